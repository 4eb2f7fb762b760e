"""The first run: the program with xmap.  The first calls of each xmapped function are recorded."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xmap_compat.legacy import import_hook
from xmap_compat.tools.leave import messages, recorded_calls, running, traced_calls
from xmap_compat.tools.leave.recorded_calls import RecordedCall, is_traced
from xmap_compat.tools.leave.xmap_calls import FirstRun, Span, XmapCall

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
MOST_CALLS = 3  # that are recorded of each kind


class _Noted(NamedTuple):
    """A call whose arguments are noted.  It is repeated when the program has ended."""

    call: RecordedCall
    function: Callable[..., Any]
    structure: Any
    mesh: Any


class Recorder:
    """Watches the calls of ``xmap``, and of what it makes, in all threads, until the program
    ends.
    """

    def __init__(self, task: dict[str, Any]):
        self.task = task
        self.local = threading.local()
        self.xmap_calls: dict[Any, XmapCall] = {}
        # By the number of an xmap call: the declarations of the functions that it has made.
        self.declared: dict[int, list[Any]] = defaultdict(list)
        # By the id of a declaration: its traced calls.
        self.traces: dict[int, list[Any]] = defaultdict(list)
        # How many calls of each kind were executed.
        self.seen: dict[Any, int] = defaultdict(int)
        self.noted: list[_Noted] = []
        self.records: list[RecordedCall] = []
        self.is_over = False

    def begin(self) -> None:
        """Begin when the program has imported JAX."""
        from xmap_compat.core import watch

        watch.watch_everywhere(watch.Watcher(traced=self.traced, constructed=self.made))

    def made(self, function: Any) -> Any:
        """What the program gets in the place of a function that xmap has made."""
        import jax

        libraries = (PACKAGE, os.path.dirname(jax.__file__) + os.sep)
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(libraries):
            frame = frame.f_back
        place = frame.f_code.co_filename, _calling_span(frame)
        new = XmapCall(*place, number=len(self.xmap_calls), function=function.__name__)
        c = self.xmap_calls.setdefault(place, new)
        c.made += 1
        self.declared[c.number].append(function.declared)
        return recorded_calls.watched(function, functools.partial(self.called, c, c.made, function))

    def traced(self, declared: Any, placed: Any, args: Any) -> None:
        if placed is not None:
            self.traces[id(declared)].append(placed)

    # ---- calls

    def called(self, c: XmapCall, reached: int, function: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_over:
            return function(*args, **kwargs)
        running_calls = vars(self.local).setdefault("running_calls", [])  # in this thread
        c.calls += 1
        c.inside.update(around.number for around in running_calls)
        if not running_calls:
            self.note(c, reached, function, args)
        running_calls.append(c)
        try:
            results = function(*args, **kwargs)
        finally:
            running_calls.pop()
        return self.noting_gradients(c, results) if is_traced(results) else results

    def note(self, c: XmapCall, reached: int, function: Any, args: Any) -> None:
        """Note a call, if it is one of the first of its kind."""
        import jax

        from xmap_compat.core import placement

        try:
            described = recorded_calls.described(args)
        except TypeError:  # no arrays: xmap says so
            return
        leaves, structure = jax.tree.flatten(args)
        keys = [recorded_calls.key_of(leaf) for leaf in leaves]
        call = RecordedCall(c.number, reached, described, is_traced(args), keys=keys)
        mesh = placement.current_scope().mesh
        kind = c.number, described, call.traced, str(mesh), id(function.declared)

        def keep(*arrays):
            self.seen[kind] += 1
            if self.seen[kind] <= MOST_CALLS:
                copies = [np.array(array) for array in arrays]
                noted = _Noted(call._replace(leaves=copies), function, structure, mesh)
                self.noted.append(noted)

        # Now, or when the traced program is executed.
        if self.seen[kind] < MOST_CALLS:
            jax.debug.callback(keep, *map(recorded_calls.data_of, leaves))

    def noting_gradients(self, c: XmapCall, results: Any) -> Any:
        """The same traced results.  When JAX takes a derivative of them, that is noted."""
        import jax

        noting = jax.custom_jvp(lambda x: x)

        @noting.defjvp
        def _(primals, tangents):
            c.differentiated = True
            return primals[0], tangents[0]

        return jax.tree.map(lambda x: noting(x) if is_traced(x) else x, results)

    # ---- the end

    def finish(self, ended: str) -> None:
        if "jax" in sys.modules:
            sys.modules["jax"].effects_barrier()
        self.is_over = True
        xmap_calls = [*self.xmap_calls.values()]
        for c in xmap_calls:
            traced_calls.note_decisions(c, self.declared[c.number], self.traces)
        for noted in self.noted:
            self.repeat(xmap_calls[noted.call.number], noted)
        found = FirstRun(xmap_calls, self.files(), ended)
        for c in xmap_calls:
            if c.calls and not (c.recorded or c.inside or c.refused):
                c.refused = messages.NONE_RECORDED
            c.file = self.users_file(c.file) or c.file
        Path(self.task["result"]).write_bytes(pickle.dumps((found, self.records)))

    def repeat(self, c: XmapCall, noted: _Noted) -> None:
        """Record a call with its results, and its gradients if the program took some."""
        from xmap_compat.core.mesh import entered

        call = noted.call._replace(differentiated=c.differentiated, is_coarse=c.is_coarse)
        try:
            if noted.mesh is not None and not noted.mesh.empty:
                call = call._replace(mesh=(noted.mesh.axis_names, noted.mesh.device_ids))
            with entered(noted.mesh):
                results = call.evaluated(noted.function, noted.structure)
        except Exception as error:
            c.refused = messages.NOT_REPEATED.format(error=recorded_calls.in_a_line(error))
            return
        self.records.append(call._replace(results=results))
        c.recorded += 1

    def files(self) -> dict[str, str]:
        """The files of the program, and the names of their modules."""
        found = {self.users_file(c.file): "" for c in self.xmap_calls.values()}
        for name, module in [*sys.modules.items()]:
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and file.endswith((".py", ".ipynb")):
                spec = getattr(module, "__spec__", None)
                found[self.users_file(file)] = getattr(spec, "name", None) or name
        found.pop("", None)
        return found

    def users_file(self, file: str) -> str:
        """The user's file of which this one is a copy; empty for others."""
        file = os.path.realpath(file)
        is_installed = f"{os.sep}site-packages{os.sep}" in file or file.startswith(PACKAGE)
        if is_installed or not file.startswith(self.task["tree"]):
            return ""
        users = {copy: folder for folder, copy in self.task["folders"].items()}
        original = running.moved(users, file)
        return original if os.path.exists(original) else ""


def _calling_span(frame: Any) -> Span:
    """The place of the call that a frame executes."""
    positions: list[Any] = [*frame.f_code.co_positions()]
    line, end_line, column, end_column = positions[frame.f_lasti // 2]
    return line, column, end_line, end_column


def main(task: dict[str, Any]) -> None:
    """Run the program.  Not as ``__main__``, which is the program."""
    recorder = Recorder(task)
    import_hook.install_with_jax(recorder.begin)
    running.run(task, recorder.finish)
