"""The first run: the program with xmap.  The first calls of each xmapped function are recorded."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from xmap_compat.legacy import import_hook
from xmap_compat.tools.leave import messages, running, values
from xmap_compat.tools.leave.values import Leaf, RecordedCall, is_traced
from xmap_compat.tools.leave.xmap_calls import Found, XmapCall, calling_span

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
MOST_CALLS = 3  # that are recorded of each kind
MOST_BYTES = 1 << 30


class _Noted(NamedTuple):
    """A call whose arguments are noted.  It is repeated when the program has ended."""

    call: RecordedCall
    function: Callable[..., Any]
    structure: Any
    shardings: list[Any]


class Recorder:
    """Watches the calls of ``xmap``, and of what it makes, in all threads, until the program
    ends.
    """

    def __init__(self, task: dict[str, Any]):
        self.task = task
        self.lock = threading.RLock()
        self.local = threading.local()
        self.xmap_calls: dict[Any, XmapCall] = {}
        self.functions: dict[int, list[Any]] = {}  # what each xmap call has made
        self.traces: list[tuple[Any, Any]] = []  # declarations, with their placed calls
        self.noted: list[_Noted] = []
        self.records: list[RecordedCall] = []
        self.seen: dict[Any, int] = {}  # how many calls of each kind
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
            c.reached += 1
            functions = self.functions.setdefault(c.number, [])
            if all(function is not other for other in functions):
                functions.append(function)
            return values.watched(function, functools.partial(self.called, c, c.reached, function))

    def traced(self, declared: Any, placed: Any, args: Any) -> None:
        if placed is not None and not self.is_over:
            self.traces.append((declared, placed))

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
        kind = call._replace(reached=0, mesh=str(mesh)), id(function)
        leaves, structure = jax.tree.flatten(args)
        noted = _Noted(call, function, structure, [values.sharding_of(leaf) for leaf in leaves])
        if call.traced:
            self.note_later(c, noted, kind, leaves)
        elif self.is_wanted(kind, 1):
            self.keep(c, noted, [values.to_host(leaf) for leaf in leaves])

    def is_wanted(self, kind: Any, more: int) -> bool:
        """Whether a call is among the first of its kind, of which there are ``more`` now."""
        with self.lock:
            self.seen[kind] = self.seen.get(kind, 0) + more
            return self.seen[kind] <= MOST_CALLS

    def keep(self, c: XmapCall, noted: _Noted, leaves: list[Leaf]) -> None:
        with self.lock:
            self.bytes += sum(leaf.value.nbytes for leaf in leaves)
            if self.bytes > MOST_BYTES:
                c.problem = messages.NO_MEMORY
                return
            self.noted.append(noted._replace(call=noted.call._replace(leaves=leaves)))

    def note_later(self, c: XmapCall, noted: _Noted, kind: Any, leaves: list[Any]) -> None:
        """Note a call in a traced program when that is executed, and its arguments have values."""
        import jax

        if not self.is_wanted(kind, 0):
            return
        plain = []
        without_values = []
        for leaf in leaves:
            key = str(jax.random.key_impl(leaf)) if values.is_key(leaf) else ""
            plain.append(jax.random.key_data(leaf) if key else leaf)
            without_values.append(Leaf(None, jax.typeof(leaf).weak_type, key))

        def note(*arrays):
            if self.is_wanted(kind, 1):
                pairs = zip(without_values, arrays)
                found = [leaf._replace(value=np.array(array)) for leaf, array in pairs]
                self.keep(c, noted, found)

        jax.debug.callback(note, *plain)

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
        found = Found(xmap_calls, self.files(), ended)
        self.learn(xmap_calls)
        for noted in self.noted:
            self.repeat(xmap_calls[noted.call.number], noted)
        compared = {call.number for call in self.records if call.differentiated}
        for c in xmap_calls:
            c.file = os.path.realpath(c.file)
            c.differentiated = c.number in compared
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
            declared = [function.plan.declared for function in self.functions[c.number]]
            traced = []
            for of, placed in self.traces:
                if any(of is each for each in declared):
                    traced.append(placed)
            tracing.learn(c, declared, traced, self.is_of_program)

    def repeat(self, c: XmapCall, noted: _Noted) -> None:
        """Record a call with its results, and its gradients if the program took some."""
        import jax

        from xmap_compat.core.mesh import entered

        call = noted.call._replace(differentiated=c.differentiated, is_coarse=c.is_coarse)
        try:
            with entered(call.mesh and values.mesh_of(call.mesh)):
                leaves = map(values.restored, call.leaves, noted.shardings)
                args = jax.tree.unflatten(noted.structure, leaves)
                results = values.evaluated(noted.function, args, c.differentiated)
        except Exception as error:
            c.problem = messages.NOT_REPEATED.format(error=values.in_a_line(error))
            return
        self.records.append(call._replace(results=results))
        c.recorded += 1

    def files(self) -> dict[str, str]:
        """The files of the program, and the names of their modules."""
        found = {os.path.realpath(c.file): "" for c in self.xmap_calls.values()}
        for name, module in [*sys.modules.items()]:
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and file.endswith((".py", ".ipynb")):
                spec = getattr(module, "__spec__", None)
                found[os.path.realpath(file)] = getattr(spec, "name", None) or name
        return {file: name for file, name in found.items() if self.is_of_program(file)}

    def is_of_program(self, file: str) -> bool:
        """Whether a file is one of the user's, which the program has not written itself."""
        if not file.startswith(self.task["tree"]) or f"{os.sep}site-packages{os.sep}" in file:
            return False
        users = {copy: folder for folder, copy in self.task["folders"].items()}
        return os.path.exists(file) and os.path.exists(running.moved(users, file))


def main(task: dict[str, Any]) -> None:
    """Run the program.  Not as ``__main__``, which is the program."""
    recorder = Recorder(task)
    import_hook.install_with_jax(recorder.begin)
    running.run(task, recorder.finish)
