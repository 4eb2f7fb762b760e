"""The first run: the program with xmap, in which constructions and their first calls are
recorded.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import importlib
import json
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from xmap_compat.legacy import import_hook
from xmap_compat.tools.leave import comparing, messages, verifying
from xmap_compat.tools.leave.comparing import (
    Leaf,
    RecordedCall,
    described,
    is_traced,
    jax,
    restored,
    to_host,
    watched,
)
from xmap_compat.tools.leave.construction import Construction, Edited, Entered

OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


MOST_TRACES = 16  # of each construction


class _Pending(NamedTuple):
    """A call in a traced program, whose arguments were noted when that was executed; its results
    are computed last.
    """

    call: RecordedCall
    function: Callable[..., Any]
    structure: Any


def note_entered(kinds: Iterable[type], entered: set[Entered], otherwise: set[Entered]) -> None:
    """Note where ``with`` enters a mesh of these classes, and where a mesh is entered as
    ``jax.set_mesh`` cannot be.
    """
    is_clean = importlib.import_module("xmap_compat.legacy.adapters").trace_state_clean
    for kind in kinds:

        def noted(self, enter=kind.__enter__):  # type: ignore[attr-defined]
            frame = sys._getframe(1)
            line, end, column, last = [*frame.f_code.co_positions()][frame.f_lasti // 2]
            code = list(dis.get_instructions(frame.f_code))
            before = (i for i in code if i.offset < frame.f_lasti)
            same = [
                i
                for i in before
                if i.opname == "BEFORE_WITH" and i.positions == (line, end, column, last)
            ]
            place = os.path.realpath(frame.f_code.co_filename), line or 0, column or 0, len(same)
            entered.add(place)
            by_with = any(i.offset == frame.f_lasti and i.opname == "BEFORE_WITH" for i in code)
            if not (is_clean() and by_with):
                otherwise.add(place)
            return enter(self)

        kind.__enter__ = noted  # type: ignore[attr-defined]


def _noting_gradients(c: Construction, results: Any) -> Any:
    """The same traced results, of which it is noted when a derivative is taken."""

    noted = jax.custom_jvp(lambda x: x)

    @noted.defjvp
    def _(primals, tangents):
        c.differentiated = True
        return primals[0], tangents[0]

    return jax.tree.map(lambda x: noted(x) if isinstance(x, jax.core.Tracer) else x, results)


class Recorder:
    """Watches the constructions of xmaps and their calls, in all threads, until the program
    ends.
    """

    def __init__(self, spec: dict[str, Any]):
        self.spec, self.lock, self.local = spec, threading.RLock(), threading.local()
        self.found: dict[tuple[str, int, int], Construction] = {}
        self.records: list[RecordedCall] = []
        self.pending: list[_Pending] = []
        self.structures: list[
            tuple[Any, Any]
        ] = []  # of each record: the function, and the structure of its arguments
        self.seen: dict[Any, int] = {}
        self.entered, self.otherwise = set[Entered](), set[Entered]()
        self.bytes, self.over = 0, False

    def begin(self) -> None:
        """Begin when the program has imported JAX, which these modules need."""
        names = ("api", "core.placement", "core.watch")
        self.api, self.placement, watch = (
            importlib.import_module(f"xmap_compat.{name}") for name in names
        )
        watch.watch_everywhere(watch.Watcher(traced=self.traced, constructed=self.constructed))
        note_entered(
            (jax.sharding.Mesh, importlib.import_module("xmap_compat.core.mesh").Mesh),
            self.entered,
            self.otherwise,
        )

    # Constructions

    def constructed(self, function: Any) -> Any:
        frame, libraries = (
            sys._getframe(2),
            (OWN, os.path.dirname(sys.modules["jax"].__file__ or "") + os.sep),
        )
        while frame.f_back is not None and frame.f_code.co_filename.startswith(libraries):
            frame = frame.f_back
        line, _, column, _ = [*frame.f_code.co_positions()][frame.f_lasti // 2]
        key = frame.f_code.co_filename, line or frame.f_lineno, column or 0
        with self.lock:
            new = Construction(
                *key, len(self.found), getattr(function, "__name__", ""), frame.f_globals
            )
            c = self.found.setdefault(key, new)
            c.reached += 1
            self.tell()
            if all(function is not other for other in c.functions):
                c.functions.append(function)
            return watched(function, functools.partial(self.called, c, c.reached, function))

    def traced(self, declared: Any, made: Any, args: Any) -> None:
        """Keep the placements of a call that is traced."""
        with self.lock:
            known = [c for c in self.found.values() if not self.over]
            made_by = [c for c in known if any(f.plan.declared is declared for f in c.functions)]
        if made is not None:
            for c in made_by:
                with self.lock:
                    c.placed = [*c.placed, made][:MOST_TRACES]
                    c.given = [*c.given, jax.tree.map(lambda _: None, args)][:MOST_TRACES]

    @property
    def stack(self) -> list[Construction]:
        """The constructions that are being called in this thread."""
        return self.local.__dict__.setdefault("stack", [])

    # Calls

    def called(
        self, c: Construction, reached: int, function: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.over:
            return function(*args, **kwargs)
        self.stack.append(c)
        try:
            return self._called(c, reached, function, args, kwargs)
        except Exception as error:
            c.problem = messages.RAISES.format(error=comparing.in_a_line(error))
            raise
        finally:
            self.stack.pop()

    def _called(
        self, c: Construction, reached: int, function: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        outer, scope = bool(self.placement.enclosing_bodies()), self.placement.current_scope()
        with self.lock:
            c.calls += 1
            c.inside.update(around.number for around in self.stack[:-1] if outer)
        if outer or kwargs:
            return function(*args, **kwargs)
        try:
            kind = c.number, function.plan.declared.key(), described(args), scope, is_traced(args)
        except TypeError:  # no arrays: xmap says so
            return function(*args)
        call = RecordedCall(
            c.number, reached, described(args), comparing.placed(scope.mesh), is_traced(args)
        )
        wanted = self.wanted(kind, not call.traced)
        if wanted and call.traced:
            self.note_arguments(call, kind, function, args)
        elif wanted:  # arguments may be donated
            call = call._replace(leaves=[to_host(leaf) for leaf in jax.tree.leaves(args)])
        results = function(*args)
        if is_traced(results):  # as those of a function that closes over a tracer are
            return _noting_gradients(c, results)
        if wanted and not call.traced:
            try:
                noted = call._replace(results=comparing.evaluated(lambda: results, (), False))
                self.keep(c, noted, function, jax.tree.structure(args))
            except Exception as error:  # must not change the behaviour of the program
                c.problem = messages.NOT_REPEATED.format(error=comparing.in_a_line(error))
        return results

    def wanted(self, kind: Any, more: int) -> bool:
        """Whether calls of a kind are recorded, the first ones; there are ``more`` now: a traced
        one when it is run.
        """
        with self.lock:
            self.seen[kind] = self.seen.get(kind, 0) + more
            return self.seen[kind] <= self.spec["calls"]

    def note_arguments(self, call: RecordedCall, kind: Any, function: Any, args: Any) -> None:
        """Note the values of arguments when the traced program is executed."""
        leaves, structure = jax.tree.flatten(args)
        types = [jax.typeof(leaf) for leaf in leaves]
        is_key = [jax.numpy.issubdtype(t.dtype, jax.dtypes.prng_key) for t in types]
        keys = [str(jax.random.key_impl(x)) if k else "" for x, k in zip(leaves, is_key)]

        def note(*values):
            with self.lock:
                if self.wanted(kind, 1) and self.fits(values):
                    noted = [
                        Leaf(np.array(v), t.weak_type, key)
                        for v, t, key in zip(values, types, keys)
                    ]
                    self.pending.append(_Pending(call._replace(leaves=noted), function, structure))
                    self.tell()

        jax.debug.callback(
            note, *(jax.random.key_data(x) if k else x for x, k in zip(leaves, is_key))
        )

    def tell(self) -> None:
        count = len(self.records) + len(self.pending)
        verifying.tell(self.spec, f"{len(self.found)} constructions made, {count} calls recorded")

    def fits(self, values: Any) -> bool:
        self.bytes += sum(getattr(value, "nbytes", 8) for value in values)
        return self.bytes <= self.spec["bytes"]

    def keep(self, c: Construction, call: RecordedCall, function: Any, structure: Any) -> None:
        with self.lock:
            own = (
                () if call.traced else call.leaves
            )  # of a traced one, they are counted when they are noted
            if self.fits([leaf.value for leaf in (*own, *(leaf for _, leaf in call.results))]):
                self.records.append(call)
                self.structures.append((function, structure))
                c.recorded += 1
                self.tell()
            else:
                c.problem = messages.NO_MEMORY

    # The end

    def finish(self, ended: str) -> None:
        if "jax" in sys.modules:
            jax.effects_barrier()
        constructions = list(self.found.values())
        for pending in self.pending:
            self.compute(constructions[pending.call.construction], pending)
        self.over = True  # before xmaps of ours are made
        for k, call in enumerate(self.records):
            if [*constructions[call.construction].key] in self.spec["noise"]:
                self.records[k] = self.with_noise(call, *self.structures[k])
        with open(self.spec["records"], "wb") as file:
            pickle.dump(self.records, file)
        edited = self.edited(constructions) if constructions else Edited([])
        compared = {call.construction for call in self.records if call.differentiated}
        told = [
            dataclasses.replace(c.told(), differentiated=c.number in compared)
            for c in edited.constructions
        ]
        entered = frozenset(self.entered - self.otherwise)
        edited = edited._replace(
            constructions=told, ended=ended, entered=entered, keeps_meshes=bool(self.otherwise)
        )
        with open(self.spec["result"], "wb") as file:
            pickle.dump(edited, file)

    def with_noise(self, call: RecordedCall, function: Any, structure: Any) -> RecordedCall:
        """A record with the results that its arguments have where all elements are on one
        device.
        """
        if any(leaf.devices for leaf in call.leaves):
            return call
        declared = function.plan.declared
        alone = self.api.xmap(
            declared.fun, declared.in_source, declared.out_source, axis_sizes=declared.sizes
        )
        try:
            args = jax.tree.unflatten(structure, map(restored, call.leaves))
            return call._replace(noise=comparing.evaluated(alone, args, call.differentiated))
        except Exception:  # it is compared without
            return call

    def compute(self, c: Construction, pending: _Pending) -> None:
        """The results, and the gradients if the program took some, for arguments that were
        noted.
        """
        try:
            mesh = pending.call.mesh and comparing.mesh_of(pending.call.mesh)
            with importlib.import_module("xmap_compat.core.mesh").entered(mesh):
                args = jax.tree.unflatten(pending.structure, map(restored, pending.call.leaves))
                results = comparing.evaluated(pending.function, args, c.differentiated)
            call = pending.call._replace(results=results, differentiated=c.differentiated)
            self.keep(c, call, pending.function, pending.structure)
        except Exception as error:
            c.problem = messages.NOT_REPEATED.format(error=comparing.in_a_line(error))

    def generated(self, constructions: list[Construction]) -> list[str]:
        """The files of constructions and modules that are not in the user's folders: the program
        has written them.
        """
        users = {copy: folder for folder, copy in self.spec["folders"].items()}
        modules = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        files = {
            os.path.realpath(f)
            for f in (*modules, *(c.file for c in constructions))
            if isinstance(f, str)
        }
        return [file for file in files if not os.path.exists(verifying.moved(users, file))]

    def edited(self, constructions: list[Construction]) -> Edited:
        refused = {tuple(key): why for key, why in self.spec["refused"]}
        for (
            c
        ) in constructions:  # what one has traced, others of the same function need not trace again
            same = [
                o for o in constructions if any(f is g for f in c.functions for g in o.functions)
            ]
            c.placed = list({id(p): p for o in same for p in o.placed}.values()) if c.calls else []
            c.given = [args for o in same for args in o.given]
            c.refused = refused.get(c.key, "")
        edits = importlib.import_module("xmap_compat.tools.leave.edits")
        try:
            options = {
                "root": self.spec["tree"],
                "beside": self.spec["beside"],
                "generated": self.generated(constructions),
            }
            return edits.edits_of(constructions, **options)
        except Exception as error:
            traceback.print_exc()
            for c in constructions:
                c.change, c.changes, c.refused = (
                    None,
                    (),
                    messages.FAILED.format(error=comparing.in_a_line(error)),
                )
            return Edited(constructions)


def main(path: str) -> None:
    """Run the program.  Not as ``__main__``: what a call reaches is told apart from this package by
    modules.
    """
    with open(path, encoding="utf-8") as file:
        spec = json.load(file)
    recorder = Recorder(spec)
    import_hook.install_with_jax(recorder.begin)
    verifying.run(spec, recorder.finish)
