"""Values of recorded calls, and whether those of two runs differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# Relative differences that an order of additions makes, by the bits of the numbers' mantissas;
# others must be equal.
TOLERANCES = {52: 1e-9, 23: 1e-4, 10: 1e-2, 7: 5e-2, 0: 0.5}
# What differs by at most so many times the noise of the program is equal, if it is at most this
# part of the largest.
NOISE, MOST_NOISE = 4, 1e-2
TRACED = ("lower", "trace", "eval_shape", "clear_cache", "plan")


class Leaf(NamedTuple):
    """An array or number, as it is recorded.

    Attributes:
      key: the implementation of random keys.
      devices: what each device has of an array whose copies differ, by the ids of devices.
    """

    value: Any
    weak: bool = False
    key: str = ""
    devices: Mapping[int, np.ndarray] | None = None


Results = Sequence[tuple[str, Leaf]]


class RecordedCall(NamedTuple):
    """A recorded call of a construction, at the time it was reached, on a mesh, in a program that
    is traced or not.

    Attributes:
      noise: the largest difference, as a part of the largest number, that it makes to have all
        elements on one device.
    """

    construction: int
    reached: int
    arguments: str
    mesh: Any = None
    traced: bool = False
    leaves: Sequence[Leaf] = ()
    differentiated: bool = False
    results: Results = ()
    noise: float = 0.0


# The functions below are called when the program has imported JAX: it may set options before.


def watched(function: Any, call: Callable[..., Any]) -> Any:
    """A function in the place of a jitted one, which can be a method and has its attributes."""

    @functools.wraps(function)
    def watch(*args, **kwargs):
        return call(*args, **kwargs)

    for name in TRACED:
        if hasattr(function, name):
            setattr(watch, name, getattr(function, name))
    return watch


def described(args: tuple[Any, ...]) -> str:
    """The paths and types of all leaves, equal in both runs."""
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(args)
    types = [(jax.tree_util.keystr(path), jax.typeof(leaf).str_short()) for path, leaf in leaves]
    return ", ".join(f"args{path}: {of}" for path, of in types)


def is_traced(args: Any) -> bool:
    import jax

    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args))


def to_host(leaf: Any) -> Leaf:
    import jax

    aval = jax.typeof(leaf)
    if jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return Leaf(np.array(jax.random.key_data(leaf)), key=str(jax.random.key_impl(leaf)))
    return Leaf(np.array(leaf), aval.weak_type, devices=_copies(leaf))


def _copies(array: Any) -> dict[int, np.ndarray] | None:
    """What each device has, if copies of one part differ."""
    shards = getattr(array, "addressable_shards", ())
    if len(shards) < 2:
        return None
    copies = {shard.device.id: np.array(shard.data) for shard in shards}
    first: dict[str, np.ndarray] = {}
    for shard in shards:
        own = copies[shard.device.id]
        if _apart(first.setdefault(str(shard.index), own), own):
            return copies
    return None


def restored(leaf: Leaf, own: Any = None) -> Any:
    """A recorded argument again: where the program's own argument lies, if that is committed to
    devices.
    """
    import jax

    value = leaf.value
    if leaf.key:
        value = jax.random.wrap_key_data(value, impl=leaf.key)
    elif leaf.weak and np.ndim(value) == 0:
        value = value.item()
    value = jax.numpy.asarray(value)
    if not (isinstance(own, jax.Array) and own.committed):
        return value
    if leaf.devices is None:
        return jax.device_put(value, own.sharding)
    shards = own.addressable_shards
    parts = [jax.device_put(leaf.devices[s.device.id], s.device) for s in shards]
    return jax.make_array_from_single_device_arrays(own.shape, own.sharding, parts)


def evaluated(
    function: Callable[..., Any], args: tuple[Any, ...], differentiated: bool
) -> list[tuple[str, Leaf]]:
    """The results of a call, and its gradients for cotangents that are the same in each run."""
    import jax

    numbers = np.random.default_rng(0)

    def cotangent(leaf):
        if jax.numpy.issubdtype(leaf.dtype, np.inexact):
            return numbers.standard_normal(leaf.shape).astype(leaf.dtype)
        return np.zeros(leaf.shape, jax.dtypes.float0)

    made: dict[str, Any] = {}
    if differentiated:
        made["the result"], pull = jax.vjp(function, *args)
        made["the gradient of args"] = pull(jax.tree.map(cotangent, made["the result"]))
    else:
        made["the result"] = function(*args)
    found = []
    for what, tree in made.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if getattr(leaf, "dtype", None) != jax.dtypes.float0:
                found.append((what + jax.tree_util.keystr(path), to_host(leaf)))
    return found


def difference(found: Results, expected: Results, noise: float = 0.0) -> str:
    """How results differ from those that were recorded; empty if they do not."""
    paths, wanted = [path for path, _ in found], [path for path, _ in expected]
    if paths != wanted:
        return f"the results are {paths}, and with xmap {wanted}"
    for (path, leaf), (_, other) in zip(found, expected):
        words = _difference_of(path, leaf, other, noise)
        if words:
            return words
    return ""


def _difference_of(path: str, leaf: Leaf, other: Leaf, noise: float) -> str:
    if _type(leaf) != _type(other):
        return f"{path} is {_type(leaf)}, and with xmap {_type(other)}"
    if (leaf.devices is None) != (other.devices is None):
        how = "differ" if leaf.devices else "are equal"
        return f"the copies of {path} {how} on its devices"
    wanted = other.devices or {0: other.value}
    for k, part in (leaf.devices or {0: leaf.value}).items():
        apart = _apart(part, wanted[k], noise)
        if apart:
            return f"{path} differs by {apart}"
    return ""


def _type(leaf: Leaf) -> str:
    return f"{leaf.key or leaf.value.dtype}{list(leaf.value.shape)}"


def noise_of(alone: Results, expected: Results) -> float:
    """The largest difference of results, as a part of the largest number of each.  That of a result
    which would be zero is left out: it has nothing else.
    """
    shares = [_share(a.value, b.value) for (_, a), (_, b) in zip(alone, expected)]
    return max((share for share in shares if share < 0.1), default=0.0)


def _share(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape or a.dtype != b.dtype or not _is_inexact(b):
        return 0.0
    largest = _largest(b)
    return _largest(_wide(a) - _wide(b)) / largest if largest else 0.0


def _is_inexact(x: np.ndarray) -> bool:
    import jax

    return jax.numpy.issubdtype(x.dtype, np.inexact)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _largest(x: np.ndarray) -> float:
    """The largest of the numbers that are finite."""
    x = np.abs(_wide(x))
    return float(np.max(x[np.isfinite(x)], initial=0.0))


def _apart(found: np.ndarray, expected: np.ndarray, noise: float = 0.0) -> str:
    """How far two arrays are apart, if that is more than the order of additions explains."""
    import jax

    if found.tobytes() == expected.tobytes():
        return ""
    if not _is_inexact(found):
        return f"{np.sum(found != expected)} of its {found.size} elements"
    a, b = _wide(found), _wide(expected)
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return "its infinities or NaN"
    apart, largest = _largest(a[finite] - b[finite]), _largest(b[finite])
    bits = jax.numpy.finfo(found.dtype).nmant
    order = next(tolerance for at_least, tolerance in TOLERANCES.items() if bits >= at_least)
    if apart <= max(order, min(NOISE * noise, MOST_NOISE)) * largest:
        return ""
    return f"{apart:.2g}, where its largest element is {largest:.2g}"


def in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0].removesuffix(": ")


def placed(mesh: Any) -> Any:
    """The axis names of a mesh, and the ids of its devices; None if there is none."""
    if mesh is None or mesh.empty:
        return None
    return mesh.axis_names, [d.id for d in mesh.devices.flat], mesh.devices.shape


def mesh_of(data: Any) -> Any:
    """The mesh with these axis names and ids of devices."""
    import jax

    names, ids, shape = data
    devices = {device.id: device for device in jax.devices()}
    return jax.sharding.Mesh(np.array([devices[k] for k in ids]).reshape(shape), names)
