"""The first run: the program with xmap.  The first calls of each xmapped function are recorded."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from xmap_compat.legacy import import_hook
from xmap_compat.tools.leave import messages, running, values
from xmap_compat.tools.leave.values import RecordedCall, is_traced
from xmap_compat.tools.leave.xmap_calls import FirstRun, XmapCall, calling_span

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
MOST_CALLS = 3  # that are recorded of each kind
MOST_BYTES = 1 << 30


class _Noted(NamedTuple):
    """A call whose arguments are noted.  It is repeated when the program has ended."""

    call: RecordedCall
    function: Callable[..., Any]
    structure: Any


class Recorder:
    """Watches the calls of ``xmap``, and of what it makes, in all threads, until the program
    ends.
    """

    def __init__(self, task: dict[str, Any]):
        self.task = task
        self.lock = threading.RLock()
        self.local = threading.local()
        self.xmap_calls: dict[Any, XmapCall] = {}
        # By the number of an xmap call: the functions that it has made, by their ids.
        self.functions: dict[int, dict[int, Any]] = defaultdict(dict)
        # By the id of a declaration: its traced calls.
        self.traces: dict[int, list[Any]] = defaultdict(list)
        # How many calls of each kind were executed, once their arguments could be noted.
        self.seen: dict[Any, int] = defaultdict(int)
        self.noted: list[_Noted] = []
        self.records: list[RecordedCall] = []
        self.bytes = 0
        self.is_over = False

    def begin(self) -> None:
        """Begin when the program has imported JAX."""
        from xmap_compat.core import watch

        watch.watch_everywhere(watch.Watcher(traced=self.traced, constructed=self.made))

    def made(self, function: Any) -> Any:
        """What the program gets in the place of a function that xmap has made."""
        if self.is_over:
            return function
        import jax

        libraries = (PACKAGE, os.path.dirname(jax.__file__) + os.sep)
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(libraries):
            frame = frame.f_back
        place = frame.f_code.co_filename, calling_span(frame)
        with self.lock:
            name = getattr(function, "__name__", "")
            new = XmapCall(*place, number=len(self.xmap_calls), function=name)
            c = self.xmap_calls.setdefault(place, new)
            c.made += 1
            self.functions[c.number][id(function)] = function
            return values.watched(function, functools.partial(self.called, c, c.made, function))

    def traced(self, declared: Any, placed: Any, args: Any) -> None:
        if placed is not None and not self.is_over:
            self.traces[id(declared)].append(placed)

    # ---- calls

    def called(self, c: XmapCall, reached: int, function: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_over:
            return function(*args, **kwargs)
        running_calls = vars(self.local).setdefault("running_calls", [])  # in this thread
        running_calls.append(c)
        try:
            self.note(c, reached, function, args, kwargs)
            results = function(*args, **kwargs)
        finally:
            running_calls.pop()
        return self.noting_gradients(c, results) if is_traced(results) else results

    def note(self, c: XmapCall, reached: int, function: Any, args: Any, kwargs: Any) -> None:
        """Note a call, if it is one of the first of its kind."""
        import jax

        from xmap_compat.core import placement

        is_inside = bool(placement.enclosing_bodies())
        with self.lock:
            c.calls += 1
            if is_inside:
                c.inside.update(around.number for around in self.local.running_calls[:-1])
        if is_inside or kwargs:
            return
        try:
            described = values.described(args)
        except TypeError:  # no arrays: xmap says so
            return
        mesh = values.described_mesh(placement.current_scope().mesh)
        call = RecordedCall(c.number, reached, described, mesh, is_traced(args))
        kind = call._replace(reached=0), id(function)
        if self.seen[kind] >= MOST_CALLS:
            return
        leaves, structure = jax.tree.flatten(args)
        types = [values.leaf_without_value(leaf) for leaf in leaves]

        def keep(*arrays):
            pairs = zip(types, arrays)
            values_too = [of._replace(value=np.array(array)) for of, array in pairs]
            noted = _Noted(call._replace(leaves=values_too), function, structure)
            with self.lock:
                self.seen[kind] += 1
                self.bytes += sum(array.nbytes for array in arrays)
                if self.bytes > MOST_BYTES:
                    c.problem = messages.NO_MEMORY
                elif self.seen[kind] <= MOST_CALLS:
                    self.noted.append(noted)

        # Now, or when the traced program is executed.
        jax.debug.callback(keep, *map(values.data_of, leaves))

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
        self.learn(xmap_calls)
        for noted in self.noted:
            self.repeat(xmap_calls[noted.call.number], noted)
        found = FirstRun(xmap_calls, self.files(), ended)
        for c in xmap_calls:
            c.file = self.users_file(c.file) or c.file
        with open(self.task["records"], "wb") as file:
            pickle.dump(self.records, file)
        with open(self.task["result"], "wb") as file:
            pickle.dump(found, file)

    def learn(self, xmap_calls: list[XmapCall]) -> None:
        """Note what the xmap calls have declared and traced."""
        if not xmap_calls:
            return
        from xmap_compat.tools.leave import tracing

        for c in xmap_calls:
            functions = self.functions[c.number].values()
            declared = [function.declared for function in functions]
            traced = []
            for each in declared:
                traced += self.traces[id(each)]
            tracing.learn(c, declared, traced, self.users_file)

    def repeat(self, c: XmapCall, noted: _Noted) -> None:
        """Record a call with its results, and its gradients if the program took some."""
        import jax

        from xmap_compat.core.mesh import entered

        call = noted.call._replace(differentiated=c.differentiated, is_coarse=c.is_coarse)
        try:
            with entered(call.mesh and values.mesh_of(call.mesh)):
                args = jax.tree.unflatten(noted.structure, map(values.restored, call.leaves))
                results = values.evaluated(noted.function, args, c.differentiated)
        except Exception as error:
            c.problem = messages.NOT_REPEATED.format(error=values.in_a_line(error))
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
        if not file.startswith(self.task["tree"]) or f"{os.sep}site-packages{os.sep}" in file:
            return ""
        users = {copy: folder for folder, copy in self.task["folders"].items()}
        original = running.moved(users, file)
        return original if os.path.exists(original) else ""


def main(task: dict[str, Any]) -> None:
    """Run the program.  Not as ``__main__``, which is the program."""
    recorder = Recorder(task)
    import_hook.install_with_jax(recorder.begin)
    running.run(task, recorder.finish)
