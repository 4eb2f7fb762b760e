"""Arguments and results of recorded calls, and whether results of two runs differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# Differences that an order of additions makes, as parts of the largest number, by the bits of the
# numbers' mantissas.
TOLERANCES = {52: 1e-9, 23: 1e-4, 10: 1e-2, 7: 5e-2, 0: 0.5}
COARSE = 1e-2  # at least, where a program computes with numbers of less than 32 bits
JITTED = ("lower", "trace", "eval_shape", "clear_cache", "plan")

Results = Mapping[str, np.ndarray]


class Leaf(NamedTuple):
    """An array or number of the arguments.

    Attributes:
      key: the implementation of random keys.
      devices: what each device has of an array whose copies differ, by the ids of devices.
    """

    value: Any
    weak: bool = False
    key: str = ""
    devices: Mapping[int, np.ndarray] | None = None


class RecordedCall(NamedTuple):
    """A recorded call of an xmapped function.

    Attributes:
      number: the number of the xmap call that made the function.
      reached: how often that had been called by then.
      arguments: the paths and types of the arguments.
      mesh: the axis names, the ids of the devices, and the shape of the mesh around.
      traced: whether the program was traced there.
      is_coarse: whether it computes with numbers of less than 32 bits.
    """

    number: int
    reached: int
    arguments: str
    mesh: Any = None
    traced: bool = False
    leaves: Sequence[Leaf] = ()
    differentiated: bool = False
    is_coarse: bool = False
    results: Results | None = None


# The functions below import JAX late: they run when the program has imported it, and may have set
# options before.


def watched(function: Any, call: Callable[..., Any]) -> Any:
    """A function in the place of a jitted one, which can be a method and has its attributes."""

    @functools.wraps(function)
    def watch(*args, **kwargs):
        return call(*args, **kwargs)

    for name in JITTED:
        if hasattr(function, name):
            setattr(watch, name, getattr(function, name))
    return watch


def described(args: tuple[Any, ...]) -> str:
    """The paths and types of all leaves, equal in both runs."""
    import jax

    words = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        words.append(f"args{jax.tree_util.keystr(path)}: {jax.typeof(leaf).str_short()}")
    return ", ".join(words)


def is_traced(args: Any) -> bool:
    import jax

    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args))


def is_key(leaf: Any) -> bool:
    import jax

    return jax.numpy.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.prng_key)


def to_host(leaf: Any) -> Leaf:
    import jax

    if is_key(leaf):
        return Leaf(np.array(jax.random.key_data(leaf)), key=str(jax.random.key_impl(leaf)))
    return Leaf(np.array(leaf), jax.typeof(leaf).weak_type, devices=_different_copies(leaf))


def _different_copies(array: Any) -> dict[int, np.ndarray] | None:
    """What each device has, if copies of one part differ."""
    copies: dict[int, np.ndarray] = {}
    first: dict[str, np.ndarray] = {}
    differ = False
    for shard in getattr(array, "addressable_shards", ()):
        copy = copies[shard.device.id] = np.array(shard.data)
        same_part = first.setdefault(str(shard.index), copy)
        differ = differ or bool(_difference_of(same_part, copy))
    return copies if differ else None


def sharding_of(leaf: Any) -> Any:
    """Where an argument of the program lies, if it is committed to devices."""
    if is_traced(leaf) or not getattr(leaf, "committed", False):
        return None
    return leaf.sharding


def restored(leaf: Leaf, sharding: Any = None) -> Any:
    """A recorded argument again, where the program has its own, if that is committed."""
    import jax

    value = leaf.value
    if leaf.key:
        value = jax.random.wrap_key_data(value, impl=leaf.key)
    elif leaf.weak and np.ndim(value) == 0:
        value = value.item()
    value = jax.numpy.asarray(value)
    if sharding is None:
        return value
    if leaf.devices is None:
        return jax.device_put(value, sharding)
    parts = []
    for device in sharding.addressable_devices_indices_map(value.shape):
        parts.append(jax.device_put(leaf.devices[device.id], device))
    return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)


def evaluated(
    function: Callable[..., Any], args: tuple[Any, ...], differentiated: bool
) -> dict[str, np.ndarray]:
    """The results of a call, and its gradients for cotangents that are the same in each run."""
    import jax

    if not differentiated:
        return named("the result", function(*args))
    numbers = np.random.default_rng(0)

    def cotangent(leaf):
        if jax.numpy.issubdtype(leaf.dtype, np.inexact):
            return numbers.standard_normal(leaf.shape).astype(leaf.dtype)
        return np.zeros(leaf.shape, jax.dtypes.float0)

    results, pull = jax.vjp(function, *args)
    gradients = pull(jax.tree.map(cotangent, results))
    return named("the result", results) | named("the gradient of args", gradients)


def named(what: str, results: Any) -> dict[str, np.ndarray]:
    """Arrays by their paths; each copy, if copies on devices differ."""
    import jax

    found = {}
    for path, array in jax.tree_util.tree_leaves_with_path(results):
        if getattr(array, "dtype", None) == jax.dtypes.float0:
            continue
        name = what + jax.tree_util.keystr(path)
        leaf = to_host(array)
        if leaf.key:
            name += f" ({leaf.key})"
        if leaf.devices is None:
            found[name] = leaf.value
        for device, copy in (leaf.devices or {}).items():
            found[f"{name} on device {device}"] = copy
    return found


def difference(found: Results, expected: Results, is_coarse: bool = False) -> str:
    """How results differ from those that were recorded; empty if they do not."""
    if [*found] != [*expected]:
        return f"the results are {[*found]}, and with xmap {[*expected]}"
    for path, wanted in expected.items():
        if _type(found[path]) != _type(wanted):
            return f"{path} is {_type(found[path])}, and with xmap {_type(wanted)}"
        words = _difference_of(found[path], wanted, is_coarse)
        if words:
            return f"{path} differs by {words}"
    return ""


def _type(array: np.ndarray) -> str:
    return f"{array.dtype}{[*array.shape]}"


def _difference_of(found: np.ndarray, expected: np.ndarray, is_coarse: bool = False) -> str:
    """How far arrays differ, if that is more than the order of additions explains."""
    import jax

    if found.tobytes() == expected.tobytes():
        return ""
    if not jax.numpy.issubdtype(found.dtype, np.inexact):
        return f"{np.sum(found != expected)} of its {found.size} elements"
    bits = jax.numpy.finfo(found.dtype).nmant
    tolerance = next(share for at_least, share in TOLERANCES.items() if bits >= at_least)
    if is_coarse:
        tolerance = max(tolerance, COARSE)
    a = found.astype(complex)
    b = expected.astype(complex)
    largest = np.max(np.abs(b[np.isfinite(b)]), initial=0.0)
    close = np.isclose(a, b, rtol=0, atol=tolerance * largest, equal_nan=True)
    if np.all(close):
        return ""
    differences = np.abs(a - b)[~close]
    return f"{np.max(differences):.2g}, where its largest element is {largest:.2g}"


def in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0].removesuffix(": ")


def described_mesh(mesh: Any) -> Any:
    """The axis names of a mesh, the ids of its devices, and its shape; None if there is none."""
    if mesh is None or mesh.empty:
        return None
    return mesh.axis_names, [d.id for d in mesh.devices.flat], mesh.devices.shape


def mesh_of(described: Any) -> Any:
    """The mesh of a description."""
    import jax

    names, ids, shape = described
    devices = {device.id: device for device in jax.devices()}
    return jax.sharding.Mesh(np.array([devices[k] for k in ids]).reshape(shape), names)
