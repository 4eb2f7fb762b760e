"""Arguments and results of recorded calls, and whether results of two runs differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

COARSE = 1e-2  # at least, where a program computes with numbers of less than 32 bits
# Attributes of jitted functions that their stand-ins have too.
JIT_ATTRIBUTES = ("lower", "trace", "eval_shape", "clear_cache", "plan")

Results = Mapping[str, np.ndarray]


class Leaf(NamedTuple):
    """An array or number of the arguments; ``key`` is the implementation of random keys."""

    value: Any
    weak: bool = False
    key: str = ""


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

    for name in JIT_ATTRIBUTES:
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


def leaf_without_value(leaf: Any) -> Leaf:
    """An argument without its value, which may be traced."""
    import jax

    of = jax.typeof(leaf)
    if jax.numpy.issubdtype(of.dtype, jax.dtypes.prng_key):
        return Leaf(None, key=str(jax.random.key_impl(leaf)))
    return Leaf(None, of.weak_type)


def data_of(leaf: Any) -> Any:
    """The same array, or the numbers of a random key."""
    import jax

    return jax.random.key_data(leaf) if leaf_without_value(leaf).key else leaf


def restored(leaf: Leaf) -> Any:
    """A recorded argument again."""
    import jax

    if leaf.key:
        return jax.random.wrap_key_data(leaf.value, impl=leaf.key)
    is_weak = leaf.weak and np.ndim(leaf.value) == 0
    return jax.numpy.asarray(leaf.value.item() if is_weak else leaf.value)


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
    """The arrays by their paths.  Where copies on devices differ from the whole, these copies
    too.
    """
    import jax

    found = {}
    for path, array in jax.tree_util.tree_leaves_with_path(results):
        if getattr(array, "dtype", None) == jax.dtypes.float0:
            continue
        name = what + jax.tree_util.keystr(path) + leaf_without_value(array).key
        array = data_of(array)
        whole = found[name] = np.array(array)
        for shard in array.addressable_shards:
            copy = np.array(shard.data)
            if _difference_of(copy, whole[shard.index]):
                found[f"{name} on device {shard.device.id}"] = copy
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
    # 1e-9 for float64, 1e-4 for float32, 0.02 for float16, 0.06 for bfloat16
    tolerance = float(jax.numpy.finfo(found.dtype).eps) ** 0.57
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
    return mesh.axis_names, tuple(d.id for d in mesh.devices.flat), mesh.devices.shape


def mesh_of(described: Any) -> Any:
    """The mesh of a description."""
    import jax

    names, ids, shape = described
    devices = {device.id: device for device in jax.devices()}
    return jax.sharding.Mesh(np.array([devices[k] for k in ids]).reshape(shape), names)
