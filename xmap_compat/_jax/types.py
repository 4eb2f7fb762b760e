"""The types of values: what varies over which mesh axes, explicit shardings, keys, and containers that
hold a shape.
"""

from __future__ import annotations

import functools
import inspect
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
    """Whether a primitive draws random bits with XLA's own generator (``impl='rbg'``).

    XLA's generator also makes keys of ``impl='unsafe_rbg'``.
    """
    if primitive.name == "rng_bit_generator":
        return True
    if primitive.name not in ("random_bits", "random_fold_in", "random_split") or not is_key(
        operands[0].data
    ):
        return False
    impl = str(jax.random.key_impl(operands[0].data))
    return "unsafe_rbg" in impl or ("rbg" in impl and primitive.name == "random_bits")


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes over which a value inside a typed ``shard_map`` differs between devices."""
    return varying_axes_of(jax.typeof(x))


def varying_axes_of(aval: Any) -> frozenset[str]:
    """The same for the type of a value."""
    return aval.manual_axis_type.varying if VERSION >= (0, 10, 0) else aval.vma


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
    return tuple(sharding.spec) if sharding is not None else (None,) * aval.ndim


def varying_like(aval: Any, mesh_axes: Iterable[Any]) -> Any:
    """A type that varies over mesh axes, as values do in a typed ``shard_map`` over the mesh in
    scope.
    """
    sharding = aval.sharding.update(mesh=jax.sharding.get_abstract_mesh())
    varying = frozenset(mesh_axes)
    if VERSION >= (0, 10, 0):
        return aval.update(
            sharding=sharding, manual_axis_type=aval.manual_axis_type.update(varying=varying)
        )
    return aval.update(sharding=sharding, vma=varying)


def instantiate_symbolic(x: Any) -> Any:
    """A cotangent as an array: zeros for a symbolic zero."""
    if isinstance(x, (ad.Zero, jax.custom_derivatives.SymbolicZero)):
        return (
            ad.zeros_like_aval(x.aval) if x.aval.dtype != float0 else np.zeros(x.aval.shape, float0)
        )
    return x


def held_by(fun: Any) -> dict[str, Any]:
    """What a function captures, by the names that the user gave it."""
    held: dict[str, Any] = {}
    while isinstance(fun, functools.partial):
        held |= {
            **fun.keywords,
            **{f"args[{k}] of functools.partial": arg for k, arg in enumerate(fun.args)},
        }
        fun = fun.func
    seen, own = (
        inspect.getclosurevars(inspect.unwrap(fun)),
        getattr(getattr(fun, "__self__", None), "__dict__", {}),
    )
    return {
        **held,
        **seen.globals,
        **seen.nonlocals,
        **{f"self.{key}": value for key, value in own.items()},
    }


def explicit_arrays(values: dict[str, Any]) -> list[Any]:
    """The paths of arrays over a mesh with Explicit axes."""
    is_explicit = lambda x: jax.sharding.AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types  # noqa: E731
    return [
        p
        for p, x in jax.tree_util.tree_leaves_with_path(values)
        if isinstance(x, jax.Array) and is_explicit(x)
    ]


def shaped_containers(tree: Any) -> Iterator[tuple[Any, Any, slice]]:
    """Containers whose ``shape`` does not follow from their arrays (``BCOO``): path, container, and
    which leaves.
    """
    is_like_an_array, end = lambda x: hasattr(x, "shape") and hasattr(x, "dtype"), 0
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_like_an_array):
        leaves, treedef = jax.tree.flatten(node)
        start, end = end, end + len(leaves)
        larger = [
            jax.ShapeDtypeStruct((1, *np.shape(x)), getattr(x, "dtype", np.float32)) for x in leaves
        ]
        if hasattr(node, "shape") and jax.tree.unflatten(treedef, larger).shape == node.shape:
            yield path, node, slice(start, end)
