"""The second run: the edited program, where this package cannot be imported.  Then its functions
get the recorded arguments.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import linecache
import os
import pickle
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from xmap_compat.legacy import import_hook
from xmap_compat.tools.leave import messages, recorded_calls, running
from xmap_compat.tools.leave.recorded_calls import RecordedCall, is_traced

PROBE = "__leave__"  # a builtin: in the copy, `mapped` is `__leave__(number, mapped)`


class Verifier:
    """Finds the recorded calls in the edited program, and compares them when it has ended.

    Attributes:
      problems: how edited functions differ, by the numbers of xmap calls.
    """

    def __init__(self, task: dict[str, Any]):
        self.task = task
        self.reached: dict[int, int] = defaultdict(int)
        # Recorded calls that it has made again, each with the function and the tree of arguments.
        self.found: list[tuple[RecordedCall, Any, Any]] = []
        self.problems: dict[int, str] = {}
        # The recorded calls that the program has not made again yet, by what identifies a call.
        self.pending: dict[Any, list[RecordedCall]] = defaultdict(list)
        _, records = pickle.loads(Path(task["records"]).read_bytes())
        for record in records:
            if record.number in task["patched"]:
                self.pending[record[:4]].append(record)

    def probe(self, number: int, mapped: Callable[..., Any]) -> Callable[..., Any]:
        """What takes the place of ``mapped`` where an xmap was called."""

        @functools.wraps(mapped)
        def probed(*args, **kwargs):
            made = mapped(*args, **kwargs)
            self.reached[number] += 1
            call = functools.partial(self.called, number, self.reached[number], made)
            return recorded_calls.watched(made, call)

        return probed

    def called(self, number: int, reached: int, made: Any, *args: Any, **kwargs: Any) -> Any:
        import jax

        key = number, reached, recorded_calls.described(args), is_traced(args)
        structure = jax.tree.structure(args)
        for record in self.pending.pop(key, ()):
            self.found.append((record, made, structure))
        return made(*args, **kwargs)

    def finish(self, ended: str) -> None:
        for record, function, structure in self.found:
            problem = self.compare(record, function, structure)
            if problem:
                self.problems.setdefault(record.number, problem)
        if ended == self.task["ended"]:
            for number, *_ in self.pending:
                self.problems.setdefault(number, messages.NOT_MADE_AGAIN)
        Path(self.task["result"]).write_bytes(pickle.dumps((self.problems, ended)))

    def compare(self, record: RecordedCall, function: Any, structure: Any) -> str:
        """How the results of a call differ from the recorded ones."""
        import jax

        mesh: Any = contextlib.nullcontext()
        if record.mesh:
            names, ids = record.mesh
            devices = {device.id: device for device in jax.devices()}
            mesh = jax.set_mesh(jax.sharding.Mesh(np.vectorize(devices.get)(ids), names))
        try:
            with mesh:
                results = record.evaluated(function, structure)
        except Exception as error:
            traceback.print_exc()
            return messages.raised(recorded_calls.in_a_line(error), self.line_of(error))
        words = recorded_calls.difference(results, record.results or {}, record.is_coarse)
        return words and messages.DIFFERS.format(words)

    def line_of(self, error: BaseException) -> str:
        """The innermost line of the program that an error has passed, as it was before the
        edits.
        """
        found = ""
        for frame in traceback.extract_tb(error.__traceback__):
            file = os.path.realpath(frame.filename)
            before = linecache.getlines(file.replace(*self.task["trees"]))
            if before and file.startswith(self.task["tree"]):
                added = len(linecache.getlines(file)) - len(before)
                line = (frame.lineno or 0) - added
                found = f" at {os.path.basename(file)}:{line}: `{before[line - 1].strip()}`"
        return found


def main(task: dict[str, Any]) -> None:
    verifier = Verifier(task)
    setattr(builtins, PROBE, verifier.probe)
    if task["needs_package"]:
        import_hook.install_with_jax()
    else:
        for name in [*sys.modules]:
            if name.partition(".")[0] == "xmap_compat":
                sys.modules[name] = None  # type: ignore[assignment]  # it cannot be imported
    running.run(task, verifier.finish)
