"""What both runs record of calls, without and before JAX, and whether results differ."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

# Relative differences that an order of additions makes, by the size of the numbers' mantissas;
# others must be equal.
TOLERANCES = {52: 1e-9, 23: 1e-4, 10: 1e-2, 7: 5e-2}
# What differs by at most so many times the noise of the program is equal, if it is at most this
# part of the largest.
NOISE, MOST_NOISE = 4, 1e-2
NOTHING_ELSE = (
    0.1  # noise that is a larger part of the largest number: of a result that would be zero
)
TRACED = ("lower", "trace", "eval_shape", "clear_cache", "plan")


class _Jax:
    """JAX, which the program imports: it may set options before."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("jax"), name)


jax: Any = _Jax()


class Leaf(NamedTuple):
    """An array or number, as it is recorded.

    Attributes:
      key: the implementation of random keys.
      devices: what each device has of an array whose copies differ, by the ids of devices: xmap can
      make such.
    """

    value: Any
    weak: bool = False
    key: str = ""
    devices: Any = None


class RecordedCall(NamedTuple):
    """A recorded call of a construction, at the time it was reached, on a mesh, in a program that
    is traced or not.
    """

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
    return ", ".join(
        f"args{jax.tree_util.keystr(path)}: {jax.typeof(leaf).str_short()}" for path, leaf in leaves
    )


def is_traced(args: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args))


def to_host(leaf: Any) -> Leaf:
    aval = jax.typeof(leaf)
    if jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return Leaf(np.array(jax.random.key_data(leaf)), key=str(jax.random.key_impl(leaf)))
    shards = getattr(leaf, "addressable_shards", ())
    copies = {shard.device.id: np.array(shard.data) for shard in shards} if len(shards) > 1 else {}
    first: dict[str, np.ndarray] = {}
    pairs = [
        (first.setdefault(str(s.index), copies[s.device.id]), copies[s.device.id])
        for s in shards
        if copies
    ]
    return Leaf(
        np.array(leaf),
        aval.weak_type,
        devices=copies if any(_apart(*pair) for pair in pairs) else None,
    )


def restored(leaf: Leaf, own: Any = None) -> Any:
    """A recorded argument again: where the program's own argument lies, if that is committed to
    devices.
    """
    weak = leaf.weak and np.ndim(leaf.value) == 0
    value = jax.random.wrap_key_data(leaf.value, impl=leaf.key) if leaf.key else leaf.value
    value = jax.numpy.asarray(leaf.value.item() if weak else value)
    committed = isinstance(own, jax.Array) and own.committed
    if leaf.devices is not None and committed:
        parts = [
            jax.device_put(leaf.devices[s.device.id], s.device) for s in own.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(own.shape, own.sharding, parts)
    return jax.device_put(value, own.sharding) if committed else value


def evaluated(
    function: Callable[..., Any], args: tuple[Any, ...], differentiated: bool
) -> list[tuple[str, Leaf]]:
    """The results of a call, and its gradients for cotangents that are the same in each run."""
    numbers = np.random.default_rng(0)

    def cotangent(leaf):
        dtype = leaf.dtype
        smooth = jax.numpy.issubdtype(dtype, np.inexact)
        return (
            numbers.standard_normal(leaf.shape).astype(dtype)
            if smooth
            else np.zeros(leaf.shape, jax.dtypes.float0)
        )

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
      noise: the results with all elements on one device.  A program whose results depend on the
        order of additions differs from itself by as much.
    """
    if [path for path, _ in found] != [path for path, _ in expected]:
        return f"the results are {[path for path, _ in found]}, and with xmap {[path for path, _ in expected]}"
    shares = [_share(a.value, b.value) for (_, a), (_, b) in zip(noise, expected)]
    share = max(
        (s for s in shares if s < NOTHING_ELSE), default=0.0
    )  # one result may have it by chance
    for (path, leaf), (_, other) in zip(found, expected):
        types = [
            f"{leaf.key or leaf.value.dtype}{list(leaf.value.shape)}" for leaf in (leaf, other)
        ]
        if types[0] != types[1]:
            return f"{path} is {types[0]}, and with xmap {types[1]}"
        if (leaf.devices is None) != (other.devices is None):
            return (
                f"the copies of {path} {'differ' if leaf.devices else 'are equal'} on its devices"
            )
        parts, wanted = (x.devices or {0: x.value} for x in (leaf, other))
        if apart := next(
            (words for k, part in parts.items() if (words := _apart(part, wanted[k], share))), ""
        ):
            return f"{path} differs by {apart}"
    return ""


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of numbers that are finite in both; 0 for integers, which have no
    noise.
    """
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
        None
        if mesh is None or mesh.empty
        else (mesh.axis_names, [d.id for d in mesh.devices.flat], mesh.devices.shape)
    )


def mesh_of(data: Any) -> Any:
    """The mesh with these axis names and ids of devices."""
    (names, ids, shape), devices = data, {device.id: device for device in jax.devices()}
    return jax.sharding.Mesh(np.array([devices[k] for k in ids]).reshape(shape), names)
