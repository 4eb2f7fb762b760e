"""The first run: the program with xmap, in which constructions and their first calls are recorded."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import sys
import threading
from typing import Any

import numpy as np

from xmap_compat.legacy import import_hook, runner
from xmap_compat.tools.leave import verifying
from xmap_compat.tools.leave.verifying import Call, Leaf, described, is_traced, restored, to_host, watched

OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


@dataclasses.dataclass
class Place:
    """A construction in the program's text: the call of ``xmap`` at a position of a file.

    Attributes:
      made: the declarations of its xmapped functions.
      inside: the constructions in whose bodies it was called.
      calls: how often it was called, or traced.
      problem: why its calls could not be recorded.
    """

    file: str
    line: int
    column: int
    reached: int = 0
    functions: list[Any] = dataclasses.field(default_factory=list)
    inside: set[int] = dataclasses.field(default_factory=set)
    calls: int = 0
    differentiated: bool = False
    problem: str = ""


@dataclasses.dataclass
class Pending:
    """A call whose results are computed at the end: its arguments are known when the traced program is executed."""

    n: int
    reached: int
    arguments: str
    function: Any
    mesh: Any
    structure: Any
    weak: list[Leaf]
    given: list[list[Any]] = dataclasses.field(default_factory=list)


class Recorder:
    """Watches the constructions of xmaps and their calls, in all threads, until the program ends."""

    def __init__(self, spec: dict[str, Any]):
        self.spec, self.lock, self.local = spec, threading.RLock(), threading.local()
        self.places: dict[tuple[str, int, int], int] = {}
        self.found: list[Place] = []
        self.plans: dict[int, dict[Any, Any]] = {}  # by the identity of a declaration
        self.kept: list[Any] = []  # whose identities are used
        self.records: list[Call] = []
        self.pending: list[Pending] = []
        self.seen: dict[Any, int] = {}
        self.bytes, self.calls = 0, 0

    def begin(self) -> None:
        api = importlib.import_module("xmap_compat.api")
        make = api.make
        api.make = lambda *args, **kwargs: self.constructed(make(*args, **kwargs))  # type: ignore[attr-defined]
        api.observe(self.traced)

    # Constructions

    def constructed(self, function: Any) -> Any:
        frame, libraries = sys._getframe(2), (OWN, os.path.dirname(sys.modules["jax"].__file__ or "") + os.sep)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(libraries):
            frame = frame.f_back
        line, _, column, _ = [*frame.f_code.co_positions()][frame.f_lasti // 2]
        key = frame.f_code.co_filename, line or frame.f_lineno, column or 0
        with self.lock:
            n = self.places.setdefault(key, len(self.found))
            if n == len(self.found):
                self.found.append(Place(*key))
            place = self.found[n]
            place.reached += 1
            if all(function is not other for other in place.functions):
                place.functions.append(function)
            return watched(function, functools.partial(self.called, n, place.reached, function))

    def traced(self, declared: Any, made: Any, args: Any) -> None:
        """Keep the plan of a call that is traced.  A failure here must not change the behaviour of the program."""
        try:
            plan = importlib.import_module("xmap_compat.tools.plan").describe_made(declared, made, args)
            with self.lock:
                self.kept.append(declared)
                self.plans.setdefault(id(declared), {}).setdefault(dataclasses.replace(plan, staged=None), plan)
        except Exception as error:
            for n in self.stack[-1:]:
                self.found[n].problem = f"it has no plan: {type(error).__name__}: {error}"

    @property
    def stack(self) -> list[int]:
        """The constructions that are being called in this thread."""
        return self.local.__dict__.setdefault("stack", [])

    # Calls

    def called(self, n: int, reached: int, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.stack.append(n)
        try:
            return self._called(n, reached, function, args, kwargs)
        finally:
            self.stack.pop()

    def _called(self, n: int, reached: int, function: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        placement = importlib.import_module("xmap_compat.core.placement")
        place, outer = self.found[n], bool(placement.enclosing_bodies())
        with self.lock:
            place.calls += 1
            place.inside.update(self.stack[:-1] if outer else ())
            self.calls += not outer
        if self.spec["calls at most"] and self.calls > self.spec["calls at most"]:
            raise verifying.Stop
        if outer or kwargs or not self.wanted(n, function, args, placement.current_scope()):
            return function(*args, **kwargs)
        if is_traced(args):
            return function(*self.traced_arguments(n, reached, function, args, placement.current_scope().mesh))
        leaves = [to_host(leaf) for leaf in importlib.import_module("jax").tree.leaves(args)]  # may be donated
        text, results = described(args), function(*args)
        if not is_traced(results):  # as those of a function that closes over a tracer are
            self.keep(Call(n, reached, text, leaves, False, verifying.evaluated(lambda: results, (), False)))
        return results

    def wanted(self, n: int, function: Any, args: Any, scope: Any) -> bool:
        """Whether this is one of the first calls of its kind: of this declaration, with these types, on this mesh."""
        try:
            kind = n, function.plan.declared.key(), described(args), scope, is_traced(args)
        except TypeError:  # no arrays: xmap says so
            return False
        with self.lock:
            self.seen[kind] = self.seen.get(kind, 0) + 1
            return self.seen[kind] <= self.spec["calls"]

    def traced_arguments(self, n: int, reached: int, function: Any, args: Any, mesh: Any) -> Any:
        """The same arguments, whose values are noted when the traced program is executed."""
        import jax

        leaves, structure = jax.tree.flatten(args)
        types = [jax.typeof(leaf) for leaf in leaves]
        is_key = [jax.numpy.issubdtype(t.dtype, jax.dtypes.prng_key) for t in types]
        weak = [
            Leaf(None, t.weak_type, str(jax.random.key_impl(x)) if k else "") for x, t, k in zip(leaves, types, is_key)
        ]
        pending = Pending(n, reached, described(args), function, mesh, structure, weak)
        self.pending.append(pending)

        @jax.custom_jvp
        def noted(leaves):
            return leaves

        @noted.defjvp
        def _(primals, tangents):
            self.found[n].differentiated = True
            return primals[0], tangents[0]

        def note(*values):
            with self.lock:
                if len(pending.given) < self.spec["calls"] and self.fits(values):
                    pending.given.append([np.array(value) for value in values])

        leaves = noted(leaves)
        jax.debug.callback(note, *(jax.random.key_data(x) if k else x for x, k in zip(leaves, is_key)))
        return jax.tree.unflatten(structure, leaves)

    def fits(self, values: Any) -> bool:
        self.bytes += sum(getattr(value, "nbytes", 8) for value in values)
        return self.bytes <= self.spec["bytes"]

    def keep(self, call: Call) -> None:
        with self.lock:
            arrays = [leaf.value for leaf in call.leaves] + [leaf.value for _, leaf in call.results]
            if self.fits(arrays):
                self.records.append(call)
            else:
                self.found[call.construction].problem = "its arguments are larger than --memory"

    # The end

    def finish(self, ended: str, code: int) -> None:
        if "jax" in sys.modules:
            sys.modules["jax"].effects_barrier()
        for pending in self.pending:
            self.compute(pending)
        verifying.write_calls(self.spec["records"], self.records)
        edited = self.edited() if self.found else {"outcomes": [], "shared": [], "helpers": "", "helper_file": ""}
        with open(self.spec["result"], "w", encoding="utf-8") as file:
            json.dump({**edited, "ended": ended, "code": code}, file)

    def compute(self, pending: Pending) -> None:
        """The results, and the gradients if the program took some, for arguments that were noted."""
        import jax

        place, mesh = self.found[pending.n], pending.mesh
        mesh = mesh and (mesh.axis_names, np.vectorize(lambda device: device.id)(mesh.devices))
        for values in pending.given:
            leaves = [Leaf(value, like.weak, like.key) for value, like in zip(values, pending.weak)]
            try:
                with importlib.import_module("xmap_compat.core.mesh").entered(pending.mesh):
                    args = jax.tree.unflatten(pending.structure, map(restored, leaves))
                    made = verifying.evaluated(pending.function, args, place.differentiated)
            except Exception as error:
                words = f"a recorded call cannot be repeated: {type(error).__name__}: {error}"
                place.problem = words.partition("\n")[0]
                continue
            call = Call(pending.n, pending.reached, pending.arguments, leaves, place.differentiated, made, mesh)
            self.keep(call)

    def edited(self) -> dict[str, Any]:
        """The edits, and what is known of each construction."""
        edits = importlib.import_module("xmap_compat.tools.leave.edits")
        root = self.spec["tree"]
        mine = [n for n, place in enumerate(self.found) if self.reason(place, root) is None]
        made = edits.edits_of(
            [self.construction(edits, self.found[n]) for n in mine], root=root, assignment=self.spec["assignment"]
        )
        outcomes = dict(zip(mine, made.outcomes))
        recorded = [call.construction for call in self.records]
        return {
            "outcomes": [self.row(n, outcomes.get(n), recorded.count(n)) for n in range(len(self.found))],
            "shared": [dataclasses.astuple(edit) for edit in made.shared],
            "helpers": made.helpers,
            "helper_file": os.path.join(self.spec["beside"], os.path.basename(made.helper_file)),
        }

    def reason(self, place: Place, root: str) -> str | None:
        """Why a construction is not for the edits to decide."""
        if not os.path.isabs(place.file):
            return f"generated code ({place.file}) makes it: write it into a file"
        if not place.file.startswith(root):
            return f"it is in a file of another package, {place.file}: change it there, or copy that file"
        if [place.file, place.line, place.column] in self.spec["without"]:
            return "it differs when it is run"
        return None

    def construction(self, edits: Any, place: Place) -> Any:
        declared = [function.plan.declared for function in place.functions]
        plans = [plan for d in declared for plan in self.plans.get(id(d), {}).values()] if place.calls else []
        first, *others = place.functions
        options = {"column": place.column, "differentiated": place.differentiated, "others": (*others,)}
        return edits.Construction(place.file, place.line, place.reached, (*plans,), first, **options)

    def row(self, n: int, outcome: Any, recorded: int) -> dict[str, Any]:
        place = self.found[n]
        return {
            "place": [place.file, place.line, place.column],
            "function": place.functions[0].__name__,
            "reached": place.reached,
            "calls": place.calls,
            "recorded": recorded,
            "inside": sorted(place.inside),
            "problem": place.problem,
            "differentiated": place.differentiated,
            "edits": [dataclasses.astuple(edit) for edit in outcome.edits] if outcome else [],
            "refused": outcome.refused if outcome else self.reason(place, self.spec["tree"]),
            "note": outcome.note if outcome else "",
            "decorates": bool(outcome and outcome.decorates),
        }


def main(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        spec = json.load(file)
    recorder = Recorder(spec)
    import_hook.install_with_jax(recorder.begin)
    verifying.run(spec, runner, recorder.finish)


if __name__ == "__main__":
    main(sys.argv[1])
