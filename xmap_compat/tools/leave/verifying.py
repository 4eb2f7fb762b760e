"""The second run: the edited program, in a process that cannot import this package, on the recorded
arguments.
"""

from __future__ import annotations

import _thread
import builtins
import contextlib
import functools
import json
import os
import pickle
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from xmap_compat.legacy import import_hook, runner
from xmap_compat.tools.leave import patch
from xmap_compat.tools.leave.comparing import (
    RecordedCall,
    described,
    difference,
    evaluated,
    in_a_line,
    is_traced,
    jax,
    mesh_of,
    placed,
    restored,
    watched,
)
from xmap_compat.tools.leave.counting import Counter


def run(spec: dict[str, Any], finish: Callable[[str], None]) -> None:
    """Run the program in the place of the main program; ``finish`` is told how it ended."""
    os.chdir(spec["cwd"])
    if not sys.flags.safe_path:
        sys.path[0] = spec["cwd"]
    sys.path[:] = [moved(spec["folders"], path) for path in sys.path]
    sys.addaudithook(functools.partial(_copy_before_writing, spec["tree"]))
    stopped = threading.Event()

    def stop():
        stopped.set()
        _thread.interrupt_main()

    timer = threading.Timer(spec["seconds"], stop)
    timer.daemon = True
    if spec["seconds"]:
        timer.start()
    ended, code = "", 0
    try:
        runner.run_program(spec["program"])
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
    except _Stop:
        stopped.set()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        ended = f"SystemExit: {error.code}" if code else ""
    except KeyboardInterrupt:
        ended, code = "KeyboardInterrupt", 130
    except BaseException as error:
        sys.excepthook(*sys.exc_info())  # which shows only the program
        ended, code = f"{type(error).__name__}: {error}", 1
    timer.cancel()
    if stopped.is_set():  # the program may have seen KeyboardInterrupt, and ended by itself
        ended, code = "stopped", 0
    finish(ended)
    sys.exit(code)


def tell(spec: dict[str, Any], seen: str) -> None:
    """Note for who looks on what a run has seen."""
    with open(spec["status"], "w", encoding="utf-8") as file:
        file.write(seen)


class _Stop(BaseException):
    """Ends a program early, as it ended in the first run (``--stop-after``)."""


def moved(folders: dict[str, str], path: str) -> str:
    """A path in the copy, for a path below a folder that is copied."""
    for folder, copy in folders.items():
        if path == folder or path.startswith(folder + os.sep):
            return copy + path[len(folder) :]
    return path


def _copy_before_writing(tree: str, event: str, args: tuple[Any, ...]) -> None:
    """Large files of the copy are links to the user's: one that is opened to be written becomes a
    copy first.
    """
    if event != "open" or not isinstance(args[0], (str, bytes)) or not isinstance(args[2], int):
        return
    path = os.path.abspath(os.fsdecode(args[0]))
    if args[2] & (os.O_WRONLY | os.O_RDWR) and path.startswith(tree) and os.path.islink(path):
        original = os.path.realpath(path)
        os.unlink(path)
        shutil.copyfile(original, path)


# ------------------------------------------------------------------------------- the second run


class Verifier:
    """Compares the constructions of the edited program with the recorded calls, and notes what it
    finds in a file.
    """

    def __init__(self, spec: dict[str, Any]):
        self.spec, self.lock = spec, threading.RLock()
        self.reached: dict[int, int] = {}
        self.problems: dict[int, str] = {}
        self.agreed: dict[int, int] = {}
        records = pickle.loads(patch.contents(spec["records"])) if spec["patched"] else []
        self.left: list[RecordedCall] = [
            call for call in records if call.construction in spec["patched"]
        ]
        self.traced: list[
            tuple[Any, ...]
        ] = []  # what is compared when the program is in no trace, mesh or lock
        self.counter: Any = None  # it needs JAX, which the program imports
        self.comparing = -1

    def mapped(self, n: int, mapped: Callable[..., Any]) -> Callable[..., Any]:
        """What takes the place of ``mapped`` in the edited construction number ``n``."""
        return lambda *args, **kwargs: self.probe(n, mapped(*args, **kwargs))

    def count(self, k: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """What takes the place of the function of an edited call."""
        with self.lock:
            self.counter = self.counter or Counter()
        return self.counter.place(k, function)

    def probe(self, n: int, made: Any) -> Any:
        """What a construction makes, each call of which is compared."""
        with self.lock:
            self.reached[n] = self.reached.get(n, 0) + 1
            k = self.reached[n]
        return watched(made, functools.partial(self.called, n, k, made))

    def called(self, n: int, k: int, made: Any, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            here = (n, k, described(args) if self.left else "", is_traced(args))
            mine = [
                c for c in self.left if (c.construction, c.reached, c.arguments, c.traced) == here
            ]
            self.left = [c for c in self.left if all(c is not other for other in mine)]
        own, structure = jax.tree.flatten(args)
        own = [None if isinstance(leaf, jax.core.Tracer) else leaf for leaf in own]
        calls = [(record, made, structure, own) for record in mine]
        if is_traced(args):
            self.traced += calls
        elif calls:
            for call in calls:
                self.compare(*call)
            self.write("", False)
        if self.spec["stopped"] and not self.left:
            raise _Stop
        return made(*args, **kwargs)

    def finish(self, ended: str) -> None:
        for call in self.traced:
            self.compare(*call)
        self.write(ended)

    def compare(self, record: RecordedCall, made: Any, structure: Any, own: Sequence[Any]) -> None:
        self.comparing = record.construction
        self.write("", False)  # which one, if the process dies here, or hangs
        try:
            other = record.mesh if record.mesh != placed(jax.sharding.get_mesh()) else None
            with jax.set_mesh(mesh_of(other)) if other else contextlib.nullcontext():
                given = jax.tree.unflatten(structure, map(restored, record.leaves, own))
                function = (
                    made if hasattr(made, "lower") else jax.jit(made)
                )  # as it is called in the program
                found = evaluated(function, given, record.differentiated)
                apart = difference(found, record.results, record.noise)
                if not apart and self.counter is not None:
                    self.reach(function, structure, record, own)
        except Exception as error:
            traceback.print_exc()
            apart = f"it raises {in_a_line(error)}"
        self.comparing = -1
        with self.lock:
            if apart:
                self.problems.setdefault(record.construction, apart)
            else:
                self.agreed[record.construction] = self.agreed.get(record.construction, 0) + 1
            tell(
                self.spec,
                f"{sum(self.agreed.values())} calls are equal, {len(self.problems)} constructions differ",
            )

    def reach(
        self, function: Any, structure: Any, record: RecordedCall, own: Sequence[Any]
    ) -> None:
        """Count the edited calls that the call executes.  What cannot be counted has not been
        reached.
        """
        given = jax.tree.unflatten(structure, map(restored, record.leaves, own))
        try:
            with self.counter.counting():
                evaluated(function, given, record.differentiated)
        except Exception:
            traceback.print_exc()

    def write(self, ended: str, whole: bool = True) -> None:
        with self.lock, open(self.spec["result"] + ".new", "w", encoding="utf-8") as file:
            found = {
                "problems": self.problems,
                "agreed": self.agreed,
                "ended": ended,
                "whole": whole,
            }
            found |= {
                "reached": sorted(self.counter.reached) if self.counter else [],
                "comparing": self.comparing,
            }
            json.dump(found, file)
        os.replace(self.spec["result"] + ".new", self.spec["result"])


class _Refusing:
    """Refuses to import this package."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "xmap_compat":
            raise ModuleNotFoundError(
                f"the edited program imports {name}, and must run without xmap_compat", name=name
            )


def main(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        spec = json.load(file)
    verifier = Verifier(spec)
    builtins.__leave_mapped__, builtins.__leave_count__ = verifier.mapped, verifier.count  # type: ignore[attr-defined]
    if spec["some stay"]:
        import_hook.install_with_jax()
    else:
        for name in [name for name in sys.modules if name.partition(".")[0] == "xmap_compat"]:
            del sys.modules[name]
        sys.meta_path.insert(0, _Refusing())  # type: ignore[arg-type]
    run(spec, verifier.finish)
