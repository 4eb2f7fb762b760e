"""The first run: the program with xmap, whose constructions and their first calls are recorded."""

from __future__ import annotations

import functools
import json
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from xmap_compat.legacy import import_hook
from xmap_compat.tools.leave import messages, running, values
from xmap_compat.tools.leave.construction import Construction, Found
from xmap_compat.tools.leave.values import Leaf, RecordedCall, is_traced, restored

OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
SMALL = 1 << 24  # bytes of arguments that are computed once more, on one device


class _Pending(NamedTuple):
    """A call in a traced program, whose arguments were noted when that was executed; its results
    are computed last.
    """

    call: RecordedCall
    function: Callable[..., Any]
    structure: Any


def noting_gradients(c: Construction, results: Any) -> Any:
    """The same traced results, of which it is noted when a derivative is taken."""
    import jax

    noted = jax.custom_jvp(lambda x: x)

    @noted.defjvp
    def _(primals, tangents):
        c.differentiated = True
        return primals[0], tangents[0]

    return jax.tree.map(lambda x: noted(x) if is_traced(x) else x, results)


class Recorder:
    """Watches the constructions of xmaps and their calls, in all threads, until the program
    ends.
    """

    def __init__(self, spec: dict[str, Any]):
        self.spec, self.lock, self.local = spec, threading.RLock(), threading.local()
        self.found: dict[tuple[str, int, int], Construction] = {}
        self.functions: dict[int, list[Any]] = {}  # what each construction has made
        self.traces: list[tuple[Any, Any]] = []  # declarations, with their placed calls
        self.records: list[RecordedCall] = []
        self.pending: list[_Pending] = []
        self.seen: dict[Any, int] = {}
        self.bytes, self.over = 0, False

    def begin(self) -> None:
        """Begin when the program has imported JAX."""
        from xmap_compat.core import watch

        watch.watch_everywhere(watch.Watcher(traced=self.traced, constructed=self.constructed))

    # ---- constructions

    def constructed(self, function: Any) -> Any:
        if self.over:
            return function
        import jax

        libraries = (OWN, os.path.dirname(jax.__file__) + os.sep)
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(libraries):
            frame = frame.f_back
        line, _, column, _ = [*frame.f_code.co_positions()][frame.f_lasti // 2]
        key = frame.f_code.co_filename, line or frame.f_lineno, column or 0
        with self.lock:
            new = Construction(*key, len(self.found), getattr(function, "__name__", ""))
            c = self.found.setdefault(key, new)
            c.reached += 1
            made = self.functions.setdefault(c.number, [])
            if all(function is not other for other in made):
                made.append(function)
            self.tell()
            return values.watched(function, functools.partial(self.called, c, c.reached, function))

    def traced(self, declared: Any, placed: Any, args: Any) -> None:
        with self.lock:
            if placed is not None and not self.over:
                self.traces.append((declared, placed))

    # ---- calls

    def called(
        self, c: Construction, reached: int, function: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.over:
            return function(*args, **kwargs)
        self.stack.append(c)
        try:
            return self._called(c, reached, function, args, kwargs)
        except Exception as error:
            c.problem = messages.RAISES.format(error=values.in_a_line(error))
            raise
        finally:
            self.stack.pop()

    @property
    def stack(self) -> list[Construction]:
        """The constructions that are being called in this thread."""
        return vars(self.local).setdefault("stack", [])

    def _called(
        self, c: Construction, reached: int, function: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        from xmap_compat.core import placement

        inside = bool(placement.enclosing_bodies())
        with self.lock:
            c.calls += 1
            c.inside.update(around.number for around in self.stack[:-1] if inside)
        if inside or kwargs:
            return function(*args, **kwargs)
        try:
            described = values.described(args)
        except TypeError:  # no arrays: xmap says so
            return function(*args)
        mesh = values.placed(placement.current_scope().mesh)
        call = RecordedCall(c.number, reached, described, mesh, is_traced(args))
        kind = call._replace(reached=0, mesh=str(mesh)), id(function)
        wanted = self.wanted(kind, not call.traced)
        if wanted and call.traced:
            self.note_arguments(call, kind, function, args)
        elif wanted:
            return self.recorded(c, call, function, args)
        results = function(*args)
        return noting_gradients(c, results) if is_traced(results) else results

    def recorded(self, c: Construction, call: RecordedCall, function: Any, args: Any) -> Any:
        """The results of a call, which is recorded."""
        import jax

        leaves = [values.to_host(leaf) for leaf in jax.tree.leaves(args)]  # some may be donated
        structure = jax.tree.structure(args)
        results = function(*args)
        if is_traced(results):  # as those of a function that closes over a tracer are
            return noting_gradients(c, results)
        try:
            found = values.evaluated(lambda: results, (), False)
            self.keep(c, call._replace(leaves=leaves, results=found), function, structure)
        except Exception as error:  # must not change the behaviour of the program
            c.problem = messages.NOT_REPEATED.format(error=values.in_a_line(error))
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
        import jax

        leaves, structure = jax.tree.flatten(args)
        types = [jax.typeof(leaf) for leaf in leaves]
        is_key = [jax.numpy.issubdtype(t.dtype, jax.dtypes.prng_key) for t in types]
        keys = [str(jax.random.key_impl(x)) if k else "" for x, k in zip(leaves, is_key)]
        plain = [jax.random.key_data(x) if k else x for x, k in zip(leaves, is_key)]

        def note(*arrays):
            with self.lock:
                if self.wanted(kind, 1) and self.fits(arrays):
                    pairs = zip(arrays, types, keys)
                    noted = [Leaf(np.array(x), of.weak_type, key) for x, of, key in pairs]
                    self.pending.append(_Pending(call._replace(leaves=noted), function, structure))
                    self.tell()

        jax.debug.callback(note, *plain)

    def tell(self) -> None:
        count = len(self.records) + len(self.pending)
        text = f"{len(self.found)} constructions made, {count} calls recorded"
        running.tell(self.spec, text)

    def fits(self, arrays: Iterable[Any]) -> bool:
        self.bytes += sum(getattr(value, "nbytes", 8) for value in arrays)
        return self.bytes <= self.spec["bytes"]

    def keep(self, c: Construction, call: RecordedCall, function: Any, structure: Any) -> None:
        arrays = [leaf.value for _, leaf in call.results]
        if not call.traced:  # those of a traced one are counted when they are noted
            arrays += [leaf.value for leaf in call.leaves]
        with self.lock:
            if not self.fits(arrays):
                c.problem = messages.NO_MEMORY
                return
            self.records.append(call)
            self.pending.append(_Pending(call, function, structure))
            c.recorded += 1
            self.tell()

    # ---- the end

    def finish(self, ended: str) -> None:
        if "jax" in sys.modules:
            sys.modules["jax"].effects_barrier()
        self.over = True
        constructions = list(self.found.values())
        noted, self.pending = self.pending, []
        for each in noted:
            if not each.call.results:
                self.compute(constructions[each.call.construction], each)
        kept = [each for each in (*noted, *self.pending) if each.call.results]
        noise = self.noises(kept)
        records = [r._replace(noise=noise.get(r.construction, 0.0)) for r in self.records]
        with open(self.spec["records"], "wb") as file:
            pickle.dump(records, file)
        found = Found(constructions, self.files(), ended)
        self.learn(constructions)
        compared = {call.construction for call in records if call.differentiated}
        for c in constructions:
            c.file, c.differentiated = os.path.realpath(c.file), c.number in compared
        with open(self.spec["result"], "wb") as file:
            pickle.dump(found, file)

    def compute(self, c: Construction, pending: _Pending) -> None:
        """The results, and the gradients if the program took some, for arguments that were
        noted.
        """
        import jax

        from xmap_compat.core.mesh import entered

        call, function, structure = pending
        try:
            with entered(call.mesh and values.mesh_of(call.mesh)):
                args = jax.tree.unflatten(structure, map(restored, call.leaves))
                results = values.evaluated(function, args, c.differentiated)
            call = call._replace(results=results, differentiated=c.differentiated)
            self.keep(c, call, function, structure)
        except Exception as error:
            c.problem = messages.NOT_REPEATED.format(error=values.in_a_line(error))

    def noises(self, kept: Sequence[_Pending]) -> dict[int, float]:
        """How much the first recorded call of each construction differs from itself with all
        elements on one device.
        """
        found: dict[int, float] = {}
        for each in kept:
            number = each.call.construction
            sizes = (leaf.value.nbytes for leaf in each.call.leaves)
            if number not in found and sum(sizes) < SMALL:
                found[number] = _noise(*each)
        return found

    def learn(self, constructions: Sequence[Construction]) -> None:
        """Note what the constructions have declared and traced."""
        if not constructions:
            return
        from xmap_compat.tools.leave import tracing

        for c in constructions:
            declared = [function.plan.declared for function in self.functions[c.number]]
            traced = [placed for of, placed in self.traces if any(of is d for d in declared)]
            tracing.learn(c, declared, traced, self.is_own)

    def files(self) -> dict[str, str]:
        """The program's own files, and the names of their modules."""
        found = {}
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and file.endswith((".py", ".ipynb")):
                spec = getattr(module, "__spec__", None)
                found[os.path.realpath(file)] = getattr(spec, "name", None) or name
        for c in self.found.values():
            found.setdefault(os.path.realpath(c.file), "")
        return {file: name for file, name in found.items() if self.is_own(file)}

    def is_own(self, file: str) -> bool:
        """Whether a file is one of the user's, which the program has not written itself."""
        users = {copy: folder for folder, copy in self.spec["folders"].items()}
        if not (file.startswith(self.spec["tree"]) and os.path.exists(file)):
            return False
        in_package = f"{os.sep}site-packages{os.sep}" in file
        return not in_package and os.path.exists(running.moved(users, file))


def _noise(call: RecordedCall, function: Any, structure: Any) -> float:
    import jax

    from xmap_compat import xmap

    declared = function.plan.declared
    if any(leaf.devices for leaf in call.leaves) or not any(declared.resources.values()):
        return 0.0
    specs = declared.in_source, declared.out_source
    try:
        alone = xmap(declared.fun, *specs, axis_sizes=declared.sizes)
        args = jax.tree.unflatten(structure, map(restored, call.leaves))
        results = values.evaluated(alone, args, call.differentiated)
    except Exception:  # it is compared without
        traceback.print_exc()
        return 0.0
    return values.noise_of(results, call.results)


def main(path: str) -> None:
    """Run the program.  Not as ``__main__``, which is the program."""
    with open(path, encoding="utf-8") as file:
        spec = json.load(file)
    recorder = Recorder(spec)
    import_hook.install_with_jax(recorder.begin)
    running.run(spec, recorder.finish)
