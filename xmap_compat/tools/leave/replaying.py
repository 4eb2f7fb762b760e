"""The second run: the edited program, where this package cannot be imported.  Then its functions
get the recorded arguments.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import pickle
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from xmap_compat.legacy import import_hook
from xmap_compat.tools.leave import messages, running, values
from xmap_compat.tools.leave.values import RecordedCall, is_traced
from xmap_compat.tools.leave.xmap_calls import SecondRun, calling_span

PROBE = "__leave_mapped__"  # a builtin, which wraps the helper's `mapped` in the copy


class _MadeAgain(NamedTuple):
    """A recorded call that the edited program has made again."""

    record: RecordedCall
    function: Callable[..., Any]
    structure: Any


class Verifier:
    """Finds the recorded calls in the edited program, and compares them when it has ended."""

    def __init__(self, task: dict[str, Any]):
        self.task = task
        self.lock = threading.RLock()
        self.reached: dict[int, int] = {}
        self.found: list[_MadeAgain] = []
        self.seen = SecondRun()
        # The recorded calls that the program has not made again yet, by what identifies a call.
        self.pending: dict[Any, list[RecordedCall]] = defaultdict(list)
        with open(task["records"], "rb") as file:
            for record in pickle.load(file):
                key = record.number, record.reached, record.arguments, record.traced
                self.pending[key].append(record)

    def probing(self, mapped: Callable[..., Any]) -> Callable[..., Any]:
        """What takes the place of ``mapped``."""

        @functools.wraps(mapped)
        def probed(*args, **kwargs):
            frame = sys._getframe(1)
            place = os.path.realpath(frame.f_code.co_filename), *calling_span(frame)[:2]
            made = mapped(*args, **kwargs)
            number = self.task["places"].get(place)
            return made if number is None else self.probe(number, made)

        return probed

    def probe(self, number: int, made: Any) -> Any:
        """A function that ``mapped`` has made, whose calls are noted."""
        with self.lock:
            reached = self.reached.get(number, 0) + 1
            self.reached[number] = reached
        return values.watched(made, functools.partial(self.called, number, reached, made))

    def called(self, number: int, reached: int, made: Any, *args: Any, **kwargs: Any) -> Any:
        import jax

        key = number, reached, values.described(args), is_traced(args)
        records = self.pending.pop(key, ())
        structure = jax.tree.structure(args)
        self.found += [_MadeAgain(record, made, structure) for record in records]
        if not records or is_traced(args):
            return made(*args, **kwargs)
        with self.executing(number):
            return jax.block_until_ready(made(*args, **kwargs))

    @contextlib.contextmanager
    def executing(self, number: int) -> Any:
        """Note which function runs, if the process dies or hangs there."""
        self.seen.executing = number
        self.write()
        yield
        self.seen.executing = -1

    def finish(self, ended: str) -> None:
        for found in self.found:
            self.compare(found)
        if ended == self.task["ended"]:
            for number, *_ in self.pending:
                if number in self.task["places"].values():
                    self.seen.problems.setdefault(number, (messages.NOT_MADE_AGAIN, "", 0))
        self.seen.ended = ended
        self.write()

    def compare(self, found: _MadeAgain) -> None:
        number = found.record.number
        with self.executing(number):
            try:
                problem = self.difference(found), "", 0
            except Exception as error:
                traceback.print_exc()
                problem = f"it raises {values.in_a_line(error)}", *self.line_of(error)
        if problem[0]:
            self.seen.problems.setdefault(number, problem)

    def difference(self, found: _MadeAgain) -> str:
        """How the results of a call differ from the recorded ones."""
        import jax

        record = found.record
        mesh = contextlib.nullcontext()
        if record.mesh:
            mesh = jax.set_mesh(values.mesh_of(record.mesh))
        with mesh:
            args = jax.tree.unflatten(found.structure, map(values.restored, record.leaves))
            results = values.evaluated(found.function, args, record.differentiated)
        return values.difference(results, record.results or {}, record.is_coarse)

    def line_of(self, error: BaseException) -> tuple[str, int]:
        """The innermost line of the program that an error has passed, and the user's file."""
        line = "", 0
        for frame in traceback.extract_tb(error.__traceback__):
            file = self.task["files"].get(os.path.realpath(frame.filename))
            if file:
                line = file, frame.lineno or 0
        return line

    def write(self) -> None:
        new = self.task["result"] + ".new"
        with self.lock:
            with open(new, "wb") as file:
                pickle.dump(vars(self.seen), file)
            os.replace(new, self.task["result"])


class _Refusing:
    """Refuses to import this package."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "xmap_compat":
            words = f"the edited program imports {name}, and must run without xmap_compat"
            raise ModuleNotFoundError(words, name=name)


def main(task: dict[str, Any]) -> None:
    verifier = Verifier(task)
    setattr(builtins, PROBE, verifier.probing)
    if task["needs_package"]:
        import_hook.install_with_jax()
    else:
        for name in [*sys.modules]:
            if name.partition(".")[0] == "xmap_compat":
                del sys.modules[name]
        sys.meta_path.insert(0, _Refusing())  # type: ignore[arg-type]
    running.run(task, verifier.finish)
