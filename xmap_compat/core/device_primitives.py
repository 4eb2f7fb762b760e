"""The four collectives between devices that a nested xmap leaves in the program around it.

Inside our ``shard_map`` they are JAX's own, with the varying axes in the types.  A nested xmap is
evaluated into the named program of the outer one, where types do not show what varies over devices.
There they are primitives of our own, which the outermost xmap translates.  Each is the transpose of
the other one of its pair:

- ``vary`` (equal on all devices -> may differ) and ``sum`` (differs -> the sum, equal on all);
- ``gather`` (differs -> all values in a new first dimension, equal on all) and ``take`` (the
reverse).

``xmap_compat/numpy.py`` uses them too: a user's function of a whole axis comes between a ``gather``
and a ``take``, or a ``vary`` for a result without the axis.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from xmap_compat import _jax


def _same_shape(shape, sizes):
    return shape


def _shape_of_all(shape, sizes):
    return (math.prod(sizes), *shape)


def _shape_of_one(shape, sizes):
    return shape[1:]


# A vmap around one of them moves its dimension aside, and finds it in the result.


def _same_dim(operand, dim):
    return operand, dim


def _after_gathered(operand, dim):
    return operand, dim + 1


def _after_taken(operand, dim):
    if dim == 0:
        return jnp.moveaxis(operand, 0, 1), 0
    return operand, dim - 1


# A vmap that binds the axis has all elements, in a dimension or equal ones.


def _vary_mapped(operand, dim, size):
    return operand, dim


def _sum_mapped(operand, dim, size):
    if dim is None:
        return operand * np.asarray(size, operand.dtype), None
    return operand.sum(dim), None


def _gather_mapped(operand, dim, size):
    if dim is None:
        return jnp.broadcast_to(operand, (size, *operand.shape)), None
    return jnp.moveaxis(operand, dim, 0), None


def _take_mapped(operand, dim, size):
    if dim is None:
        return operand, 0
    return jnp.einsum("ii...->i...", jnp.moveaxis(operand, dim, 0)), 0


vary_p, sum_p = _jax.define_dual_primitives(
    ("device_vary", "device_sum"),
    (_same_shape, _same_shape),
    (_same_dim, _same_dim),
    (_vary_mapped, _sum_mapped),
)
gather_p, take_p = _jax.define_dual_primitives(
    ("device_gather", "device_take"),
    (_shape_of_all, _shape_of_one),
    (_after_gathered, _after_taken),
    (_gather_mapped, _take_mapped),
)


def bind(primitive: Any, data: Any, axes: tuple[Any, ...], sizes: tuple[int, ...]) -> Any:
    """Bind one of the four primitives over mesh axes in the order given (major first)."""
    if not axes:
        return data
    return primitive.bind(data, axes=tuple(axes), sizes=tuple(sizes))
