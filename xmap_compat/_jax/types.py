"""The types of values: what varies over which mesh axes, explicit shardings, keys, and containers
that hold a shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import primitives
from jax.interpreters import ad

from xmap_compat._jax.version import VERSION

float0 = jax.dtypes.float0


def is_key(x: Any) -> bool:
    """Whether a value is an array of typed PRNG keys."""
    return jax.dtypes.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key)


def draws_from_rbg(primitive: Any, operands: Sequence[Any]) -> bool:
    """Whether a primitive draws random bits with XLA's generator (``impl='rbg'``).

    That generator also makes keys of ``impl='unsafe_rbg'``.
    """
    if primitive.name == "rng_bit_generator":
        return True
    if primitive.name not in ("random_bits", "random_fold_in", "random_split"):
        return False
    key = operands[0].data
    if not is_key(key):
        return False
    impl = str(jax.random.key_impl(key))
    return "unsafe_rbg" in impl or ("rbg" in impl and primitive.name == "random_bits")


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes over which a value inside a typed ``shard_map`` differs between devices."""
    return varying_axes_of(jax.typeof(x))


def varying_axes_of(aval: Any) -> frozenset[str]:
    """The same for the type of a value."""
    if VERSION < (0, 10, 0):
        return aval.vma
    return aval.manual_axis_type.varying


def with_weak_type(x: Any, weak_type: bool) -> Any:
    """Set whether a value promotes like a Python scalar."""
    if jax.typeof(x).weak_type == weak_type:
        return x
    return primitives.convert_element_type_p.bind(
        x, new_dtype=x.dtype, weak_type=weak_type, sharding=None
    )


def explicit_spec(x: Any) -> tuple[Any, ...]:
    """How a value's type shards its dimensions over Explicit mesh axes; None where it does not."""
    aval = jax.typeof(x)
    sharding = getattr(aval, "sharding", None)
    if sharding is None:
        return (None,) * aval.ndim
    return tuple(sharding.spec)


def varying_like(aval: Any, mesh_axes: Iterable[Any]) -> Any:
    """A type that varies over mesh axes, as values do in a typed ``shard_map`` over the mesh in
    scope.
    """
    sharding = aval.sharding.update(mesh=jax.sharding.get_abstract_mesh())
    varying = frozenset(mesh_axes)
    if VERSION < (0, 10, 0):
        return aval.update(sharding=sharding, vma=varying)
    manual = aval.manual_axis_type.update(varying=varying)
    return aval.update(sharding=sharding, manual_axis_type=manual)


def instantiate_symbolic(x: Any) -> Any:
    """A cotangent as an array: zeros for a symbolic zero."""
    if not isinstance(x, (ad.Zero, jax.custom_derivatives.SymbolicZero)):
        return x
    if x.aval.dtype == float0:
        return np.zeros(x.aval.shape, float0)
    return ad.zeros_like_aval(x.aval)


def shaped_containers(tree: Any) -> Iterator[tuple[Any, Any, slice]]:
    """Containers whose ``shape`` does not follow from their arrays (``BCOO``): path, container, and
    which leaves.
    """
    start = 0
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_like_an_array)
    for path, node in nodes:
        leaves, treedef = jax.tree.flatten(node)
        end = start + len(leaves)
        larger = []
        for x in leaves:
            dtype = getattr(x, "dtype", np.float32)
            larger.append(jax.ShapeDtypeStruct((1, *np.shape(x)), dtype))
        if hasattr(node, "shape") and jax.tree.unflatten(treedef, larger).shape == node.shape:
            yield path, node, slice(start, end)
        start = end


def _is_like_an_array(x):
    return hasattr(x, "shape") and hasattr(x, "dtype")
