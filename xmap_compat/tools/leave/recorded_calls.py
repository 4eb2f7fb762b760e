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


class RecordedCall(NamedTuple):
    """A recorded call of an xmapped function.

    Attributes:
      number: the number of the xmap call that made the function.
      reached: how often that had been called by then.
      arguments: the paths and types of the arguments.
      traced: whether the program was traced there.
      mesh: the axis names and the ids of the devices of the mesh around, or None.
      leaves: the arrays of the arguments.
      keys: the implementation of each leaf that holds random keys, else "".
      is_coarse: whether it computes with numbers of less than 32 bits.
    """

    number: int
    reached: int
    arguments: str
    traced: bool
    mesh: Any = None
    leaves: Sequence[np.ndarray] = ()
    keys: Sequence[str] = ()
    differentiated: bool = False
    is_coarse: bool = False
    results: Results | None = None

    def evaluated(self, function: Callable[..., Any], structure: Any) -> dict[str, np.ndarray]:
        """The results of a call with these arguments, and its gradients if the program took some,
        for cotangents that are the same in each run.
        """
        import jax

        leaves = []
        for leaf, key in zip(self.leaves, self.keys):
            array = jax.numpy.asarray(leaf)
            if key:
                array = jax.random.wrap_key_data(array, impl=key)
            leaves.append(array)
        args = jax.tree.unflatten(structure, leaves)
        if not self.differentiated:
            return arrays_by_path("the result", function(*args))
        results, pull = jax.vjp(function, *args)
        gradients = pull(jax.tree.map(_cotangent, results))
        return arrays_by_path("the result", results) | arrays_by_path(
            "the gradient of args", gradients
        )


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


def key_of(leaf: Any) -> str:
    """The implementation of random keys; empty for other arrays."""
    import jax

    if jax.numpy.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(leaf))
    return ""


def data_of(leaf: Any) -> Any:
    """The same array, or the numbers of random keys."""
    import jax

    return jax.random.key_data(leaf) if key_of(leaf) else leaf


def _cotangent(leaf: Any) -> Any:
    import jax

    if jax.numpy.issubdtype(leaf.dtype, np.inexact):
        return np.random.default_rng(0).standard_normal(leaf.shape).astype(leaf.dtype)
    return np.zeros(leaf.shape, jax.dtypes.float0)


def arrays_by_path(what: str, results: Any) -> dict[str, np.ndarray]:
    """The arrays by their paths.  Where copies on devices differ from the whole, these copies
    too.
    """
    import jax

    found = {}
    for path, array in jax.tree_util.tree_leaves_with_path(results):
        if array.dtype == jax.dtypes.float0:
            continue
        name = what + jax.tree_util.keystr(path)
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
        words = _difference_of(found[path], wanted, is_coarse)
        if words:
            return f"{path} {words}"
    return ""


def _difference_of(found: np.ndarray, expected: np.ndarray, is_coarse: bool = False) -> str:
    """How arrays differ, if that is more than the order of additions explains."""
    import jax

    types = [f"{array.dtype}{[*array.shape]}" for array in (found, expected)]
    if types[0] != types[1]:
        return f"is {types[0]}, and with xmap {types[1]}"
    if found.tobytes() == expected.tobytes():
        return ""
    tolerance = 0.0
    if jax.numpy.issubdtype(found.dtype, np.inexact):
        # 1e-9 for float64, 1e-4 for float32, 0.02 for float16, 0.06 for bfloat16
        tolerance = float(jax.numpy.finfo(found.dtype).eps) ** 0.57
        tolerance = max(tolerance, COARSE * is_coarse)
    a = found.astype(complex)
    b = expected.astype(complex)
    largest = np.max(np.abs(b[np.isfinite(b)]), initial=0.0)
    far = ~np.isclose(a, b, rtol=0, atol=tolerance * largest, equal_nan=True)
    if not np.any(far):
        return ""
    most = np.max(np.abs(a[far] - b[far]))
    return f"differs by {most:.2g}, where its largest element is {largest:.2g}"


def in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0].removesuffix(": ")
