"""The second run: the edited program, in a process that cannot import this package, on the recorded
arguments.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import json
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from xmap_compat.legacy import import_hook
from xmap_compat.tools.leave import running, values
from xmap_compat.tools.leave.values import RecordedCall, described, is_traced, restored

PROBE = "__leave_mapped__"  # a builtin, which wraps the helper's `mapped` in the copy


class Verifier:
    """Compares the constructions of the edited program with the recorded calls, and notes what it
    finds in a file.
    """

    def __init__(self, spec: dict[str, Any]):
        self.spec, self.lock = spec, threading.RLock()
        self.numbers = {(file, line, column): n for file, line, column, n in spec["places"]}
        self.reached: dict[int, int] = {}
        self.problems: dict[int, str] = {}
        self.agreed: dict[int, int] = {}
        self.raised: dict[int, tuple[str, int]] = {}  # where: a file and its line
        with open(spec["records"], "rb") as file:
            records: list[RecordedCall] = pickle.load(file)
        patched = {*self.numbers.values()}
        self.left = [call for call in records if call.construction in patched]
        self.traced: list[Any] = []  # compared when the program is in no trace, mesh or lock
        self.comparing = -1

    def probing(self, mapped: Callable[..., Any]) -> Callable[..., Any]:
        """What takes the place of ``mapped``: it compares the calls of what it makes."""

        @functools.wraps(mapped)
        def probed(*args, **kwargs):
            frame = sys._getframe(1)
            line, _, column, _ = [*frame.f_code.co_positions()][frame.f_lasti // 2]
            place = os.path.realpath(frame.f_code.co_filename), line, column
            made = mapped(*args, **kwargs)
            return self.probe(self.numbers[place], made) if place in self.numbers else made

        return probed

    def probe(self, n: int, made: Any) -> Any:
        """What a construction makes, each call of which is compared."""
        with self.lock:
            self.reached[n] = k = self.reached.get(n, 0) + 1
        return values.watched(made, functools.partial(self.called, n, k, made))

    def called(self, n: int, k: int, made: Any, *args: Any, **kwargs: Any) -> Any:
        import jax

        mine = self.taken(n, k, args)
        leaves, structure = jax.tree.flatten(args)
        own = [None if isinstance(leaf, jax.core.Tracer) else leaf for leaf in leaves]
        calls = [(record, made, structure, own) for record in mine]
        if is_traced(args):
            self.traced += calls
        elif calls:
            for call in calls:
                self.compare(*call)
            self.write("", False)
        if self.spec["stopped"] and not self.left:
            raise running.Stop
        return made(*args, **kwargs)

    def taken(self, n: int, k: int, args: Any) -> list[RecordedCall]:
        """The records of this call, which are then no longer left."""
        with self.lock:
            here = (n, k, described(args) if self.left else "", is_traced(args))
            mine: list[RecordedCall] = []
            others: list[RecordedCall] = []
            for call in self.left:
                of = call.construction, call.reached, call.arguments, call.traced
                (mine if of == here else others).append(call)
            self.left = others
        return mine

    def finish(self, ended: str) -> None:
        for call in self.traced:
            self.compare(*call)
        self.write(ended)

    def compare(self, record: RecordedCall, made: Any, structure: Any, own: Sequence[Any]) -> None:
        self.comparing = record.construction
        self.write("", False)  # which one, if the process dies here, or hangs
        try:
            apart = self.apart(record, made, structure, own)
        except Exception as error:
            traceback.print_exc()
            apart = f"it raises {values.in_a_line(error)}"
            self.note_line(record.construction, error)
        self.comparing = -1
        with self.lock:
            if apart:
                self.problems.setdefault(record.construction, apart)
            else:
                agreed = self.agreed.get(record.construction, 0)
                self.agreed[record.construction] = agreed + 1
            equal, differ = sum(self.agreed.values()), len(self.problems)
            text = f"{equal} calls are equal, {differ} constructions differ"
            running.tell(self.spec, text)

    def apart(self, record: RecordedCall, made: Any, structure: Any, own: Sequence[Any]) -> str:
        """How the results of a call differ from the recorded ones."""
        import jax

        there = values.placed(jax.sharding.get_mesh())
        other = record.mesh if record.mesh != there else None
        mesh = jax.set_mesh(values.mesh_of(other)) if other else contextlib.nullcontext()
        with mesh:
            given = jax.tree.unflatten(structure, map(restored, record.leaves, own))
            # Jitted, as it is in the program.
            function = made if hasattr(made, "lower") else jax.jit(made)
            found = values.evaluated(function, given, record.differentiated)
        return values.difference(found, record.results, record.noise)

    def note_line(self, construction: int, error: BaseException) -> None:
        """Note the innermost line of the program that an error has passed."""
        for frame in traceback.extract_tb(error.__traceback__):
            file = os.path.realpath(frame.filename)
            if file in self.spec["edited"]:
                self.raised[construction] = file, frame.lineno or 1

    def write(self, ended: str, whole: bool = True) -> None:
        found = {"problems": self.problems, "agreed": self.agreed, "ended": ended}
        found |= {"whole": whole, "comparing": self.comparing, "raised": self.raised}
        new = self.spec["result"] + ".new"
        with self.lock:
            with open(new, "w", encoding="utf-8") as file:
                json.dump(found, file)
            os.replace(new, self.spec["result"])


class _Refusing:
    """Refuses to import this package."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "xmap_compat":
            words = f"the edited program imports {name}, and must run without xmap_compat"
            raise ModuleNotFoundError(words, name=name)


def main(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        spec = json.load(file)
    verifier = Verifier(spec)
    setattr(builtins, PROBE, verifier.probing)
    if spec["some stay"]:
        import_hook.install_with_jax()
    else:
        for name in [name for name in sys.modules if name.partition(".")[0] == "xmap_compat"]:
            del sys.modules[name]
        sys.meta_path.insert(0, _Refusing())  # type: ignore[arg-type]
    running.run(spec, verifier.finish)
