"""The second run: the edited program, in a process that cannot import this package, on the recorded arguments.

This file is run by its path, so it imports nothing of this package; ``recording`` imports what both runs do alike.
"""

from __future__ import annotations

import _thread
import builtins
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import pickle
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

# Relative differences that an order of additions makes, by the size of the numbers' mantissas; others must be equal.
TOLERANCES = {52: 1e-9, 23: 1e-4, 10: 1e-2, 7: 5e-2}
# What differs by at most so many times the noise of the program is equal, if it is at most this part of the largest.
NOISE, MOST_NOISE = 4, 1e-2
NOTHING_ELSE = 0.1  # noise that is a larger part of the largest number: of a result that would be zero
TRACED = ("lower", "trace", "eval_shape", "clear_cache", "plan")


# ----------------------------------------------------------------------- what both runs do alike


class _Jax:
    """JAX, which the program imports: it may set options before."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("jax"), name)


jax: Any = _Jax()


class Leaf(NamedTuple):
    """An array or number, as it is recorded.

    Attributes:
      key: the implementation of random keys.
      devices: what each device has of an array whose copies differ, by the ids of devices: xmap can make such.
    """

    value: Any
    weak: bool = False
    key: str = ""
    devices: Any = None


class RecordedCall(NamedTuple):
    """A recorded call of a construction, at the time it was reached, on a mesh, in a program that is traced or not."""

    construction: int
    reached: int
    arguments: str
    mesh: Any = None
    traced: bool = False
    leaves: Sequence[Leaf] = ()
    differentiated: bool = False
    results: Sequence[tuple[str, Leaf]] = ()
    noise: Sequence[tuple[str, Leaf]] = ()


Results = Sequence[tuple[str, Leaf]]


def write_calls(path: str, calls: list[RecordedCall]) -> None:
    with open(path, "wb") as file:
        pickle.dump(calls, file)


def read_calls(path: str) -> list[RecordedCall]:
    with open(path, "rb") as file:
        return _Reader(file).load()


class _Reader(pickle.Unpickler):
    """Reads the classes of this file by their names only: by its own name, the file is not imported here."""

    def find_class(self, module: str, name: str) -> Any:
        own = {"Leaf": Leaf, "RecordedCall": RecordedCall} if module.startswith("xmap_compat.") else {}
        return own.get(name) or super().find_class(module, name)


def watched(function: Any, call: Callable[..., Any]) -> Any:
    """A function in the place of a jitted one, which can be a method and has its attributes."""

    @functools.wraps(function)
    def watch(*args, **kwargs):
        return call(*args, **kwargs)

    for name in (name for name in TRACED if hasattr(function, name)):
        setattr(watch, name, getattr(function, name))
    return watch


def described(args: tuple[Any, ...]) -> str:
    """The paths and types of all leaves, equal in both runs."""
    leaves = jax.tree_util.tree_leaves_with_path(args)
    return ", ".join(f"args{jax.tree_util.keystr(path)}: {jax.typeof(leaf).str_short()}" for path, leaf in leaves)


def is_traced(args: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args))


def to_host(leaf: Any) -> Leaf:
    aval = jax.typeof(leaf)
    if jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return Leaf(np.array(jax.random.key_data(leaf)), key=str(jax.random.key_impl(leaf)))
    shards = getattr(leaf, "addressable_shards", ())
    copies = {shard.device.id: np.array(shard.data) for shard in shards} if len(shards) > 1 else {}
    first: dict[str, np.ndarray] = {}
    pairs = [(first.setdefault(str(s.index), copies[s.device.id]), copies[s.device.id]) for s in shards if copies]
    return Leaf(np.array(leaf), aval.weak_type, devices=copies if any(_apart(*pair) for pair in pairs) else None)


def restored(leaf: Leaf, own: Any = None) -> Any:
    """A recorded argument again: where the program's own argument lies, if that is committed to devices."""
    weak = leaf.weak and np.ndim(leaf.value) == 0
    value = jax.random.wrap_key_data(leaf.value, impl=leaf.key) if leaf.key else leaf.value
    value = jax.numpy.asarray(leaf.value.item() if weak else value)
    committed = isinstance(own, jax.Array) and own.committed
    if leaf.devices is not None and committed:
        parts = [jax.device_put(leaf.devices[s.device.id], s.device) for s in own.addressable_shards]
        return jax.make_array_from_single_device_arrays(own.shape, own.sharding, parts)
    return jax.device_put(value, own.sharding) if committed else value


def evaluated(function: Callable[..., Any], args: tuple[Any, ...], differentiated: bool) -> list[tuple[str, Leaf]]:
    """The results of a call, and its gradients for cotangents that are the same in each run."""
    numbers = np.random.default_rng(0)

    def cotangent(leaf):
        dtype = leaf.dtype
        smooth = jax.numpy.issubdtype(dtype, np.inexact)
        return numbers.standard_normal(leaf.shape).astype(dtype) if smooth else np.zeros(leaf.shape, jax.dtypes.float0)

    made: dict[str, Any] = {}
    if differentiated:
        made["the result"], pull = jax.vjp(function, *args)
        made["the gradient of args"] = pull(jax.tree.map(cotangent, made["the result"]))
    else:
        made["the result"] = function(*args)
    return [
        (what + jax.tree_util.keystr(path), to_host(leaf))
        for what, tree in made.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if getattr(leaf, "dtype", None) != jax.dtypes.float0
    ]


def difference(found: Results, expected: Results, noise: Results = ()) -> str:
    """How results differ from those that were recorded; empty if they do not.

    Args:
      noise: the results with all elements on one device.  A program whose results depend on the order of additions
        differs from itself by as much.
    """
    if [path for path, _ in found] != [path for path, _ in expected]:
        return f"the results are {[path for path, _ in found]}, and with xmap {[path for path, _ in expected]}"
    shares = [_share(a.value, b.value) for (_, a), (_, b) in zip(noise, expected)]
    share = max((s for s in shares if s < NOTHING_ELSE), default=0.0)  # one result may have it by chance
    for (path, leaf), (_, other) in zip(found, expected):
        types = [f"{leaf.key or leaf.value.dtype}{list(leaf.value.shape)}" for leaf in (leaf, other)]
        if types[0] != types[1]:
            return f"{path} is {types[0]}, and with xmap {types[1]}"
        if (leaf.devices is None) != (other.devices is None):
            return f"the copies of {path} {'differ' if leaf.devices else 'are equal'} on its devices"
        parts, wanted = (x.devices or {0: x.value} for x in (leaf, other))
        if apart := next((words for k, part in parts.items() if (words := _apart(part, wanted[k], share))), ""):
            return f"{path} differs by {apart}"
    return ""


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of numbers that are finite in both; 0 for integers, which have no noise."""
    if not jax.numpy.issubdtype(a.dtype, np.inexact) or a.dtype != b.dtype:
        return 0.0
    a, b = _wide(a), _wide(b)
    finite = np.isfinite(a) & np.isfinite(b)
    return float(np.max(np.abs(a[finite] - b[finite]), initial=0.0))


def _share(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference as a part of the largest number."""
    largest = _distance(b, np.zeros_like(b))
    return _distance(a, b) / largest if a.shape == b.shape and largest else 0.0


def _apart(found: np.ndarray, expected: np.ndarray, share: float = 0.0) -> str:
    """How far two arrays are apart, if that is more than the order of additions explains."""
    if found.tobytes() == expected.tobytes():
        return ""
    if not jax.numpy.issubdtype(found.dtype, np.inexact):
        return f"{np.sum(found != expected)} of its {found.size} elements"
    bits = jax.numpy.finfo(found.dtype).nmant
    a, b = _wide(found), _wide(expected)
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return "its infinities or NaN"
    largest, apart = float(np.max(np.abs(b[finite]), initial=0.0)), _distance(found, expected)
    tolerance = next((t for at_least, t in TOLERANCES.items() if bits >= at_least), 0.5)
    return (
        ""
        if apart <= max(tolerance, min(NOISE * share, MOST_NOISE)) * largest
        else f"{apart:.2g}, where its largest element is {largest:.2g}"
    )


def in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0].removesuffix(": ")


def placed(mesh: Any) -> Any:
    """The axis names of a mesh, and the ids of its devices; None if there is none."""
    return (
        None if mesh is None or mesh.empty else (mesh.axis_names, [d.id for d in mesh.devices.flat], mesh.devices.shape)
    )


def mesh_of(data: Any) -> Any:
    """The mesh with these axis names and ids of devices."""
    (names, ids, shape), devices = data, {device.id: device for device in jax.devices()}
    return jax.sharding.Mesh(np.array([devices[k] for k in ids]).reshape(shape), names)


# --------------------------------------------------------------------------- running the program


def run(spec: dict[str, Any], runner: Any, finish: Callable[[str], None]) -> None:
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
    except Stop:
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


class Stop(BaseException):
    """Ends a program early, as it ended in the first run (``--stop-after``)."""


def moved(folders: dict[str, str], path: str) -> str:
    """A path in the copy, for a path below a folder that is copied."""
    for folder, copy in folders.items():
        if path == folder or path.startswith(folder + os.sep):
            return copy + path[len(folder) :]
    return path


def _copy_before_writing(tree: str, event: str, args: tuple[Any, ...]) -> None:
    """Large files of the copy are links to the user's: one that is opened to be written becomes a copy first."""
    if event != "open" or not isinstance(args[0], (str, bytes)) or not isinstance(args[2], int):
        return
    path = os.path.abspath(os.fsdecode(args[0]))
    if args[2] & (os.O_WRONLY | os.O_RDWR) and path.startswith(tree) and os.path.islink(path):
        original = os.path.realpath(path)
        os.unlink(path)
        shutil.copyfile(original, path)


# ------------------------------------------------------------------------------- the second run


class Verifier:
    """Compares the constructions of the edited program with the recorded calls, and notes what it finds in a file."""

    def __init__(self, spec: dict[str, Any]):
        self.spec, self.lock = spec, threading.RLock()
        self.reached: dict[int, int] = {}
        self.problems: dict[int, str] = {}
        self.agreed: dict[int, int] = {}
        records = read_calls(spec["records"]) if spec["patched"] else []
        self.left = [call for call in records if call.construction in spec["patched"]]
        self.traced: list[tuple[Any, ...]] = []  # what is compared when the program is in no trace, mesh or lock
        self.counter: Any = None  # it needs JAX, which the program imports
        self.comparing = -1

    def mapped(self, n: int, mapped: Callable[..., Any]) -> Callable[..., Any]:
        """What takes the place of ``mapped`` in the edited construction number ``n``."""
        return lambda *args, **kwargs: self.probe(n, mapped(*args, **kwargs))

    def count(self, k: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """What takes the place of the function of an edited call."""
        with self.lock:
            self.counter = self.counter or _loaded("counting").Counter()
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
            mine = [c for c in self.left if (c.construction, c.reached, c.arguments, c.traced) == here]
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
            raise Stop
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
                function = made if hasattr(made, "lower") else jax.jit(made)  # as it is called in the program
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
            tell(self.spec, f"{sum(self.agreed.values())} calls are equal, {len(self.problems)} constructions differ")

    def reach(self, function: Any, structure: Any, record: RecordedCall, own: Sequence[Any]) -> None:
        """Count the edited calls that the call executes.  What cannot be counted has not been reached."""
        given = jax.tree.unflatten(structure, map(restored, record.leaves, own))
        try:
            with self.counter.counting():
                evaluated(function, given, record.differentiated)
        except Exception:
            traceback.print_exc()

    def write(self, ended: str, whole: bool = True) -> None:
        with self.lock, open(self.spec["result"] + ".new", "w", encoding="utf-8") as file:
            found = {"problems": self.problems, "agreed": self.agreed, "ended": ended, "whole": whole}
            found |= {"reached": sorted(self.counter.reached) if self.counter else [], "comparing": self.comparing}
            json.dump(found, file)
        os.replace(self.spec["result"] + ".new", self.spec["result"])


def _loaded(name: str, path: str = "") -> Any:
    """A module that is loaded by its path, beside this one."""
    path = path or os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    found: Any = importlib.util.spec_from_file_location(f"leave_{name}", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


class _Refusing:
    """Refuses to import this package."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "xmap_compat":  # it is not imported before, either
            raise ModuleNotFoundError(f"the edited program imports {name}, and must run without xmap_compat", name=name)


def main(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        spec = json.load(file)
    runner = _loaded("runner", spec["runner"])
    verifier = Verifier(spec)
    builtins.__leave_mapped__, builtins.__leave_count__ = verifier.mapped, verifier.count  # type: ignore[attr-defined]
    if spec["some stay"]:
        importlib.import_module("xmap_compat.legacy.import_hook").install_with_jax()
    else:
        sys.meta_path.insert(0, _Refusing())  # type: ignore[arg-type]
    run(spec, runner, verifier.finish)


if __name__ == "__main__":
    main(sys.argv[1])
