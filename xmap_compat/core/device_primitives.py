"""Collectives over whole devices whose transposes are those of typed values.

Inside our ``shard_map`` they are JAX's own, with the varying axes in the types.  A nested xmap is
evaluated into the named program of the outer one, where types do not show what varies over devices.
There they are primitives of our own, which the outermost xmap translates.  Each is the transpose of
the other one of its pair:

- ``vary`` (equal on all devices -> may differ) and ``sum`` (differs -> the sum, equal on all);
- ``gather`` (differs -> all values in a new first dimension, equal on all) and ``take`` (the
reverse).

A function of a whole axis of the user has them at its ends: it begins with ``gather``, and ends
with ``take`` or, for a result that does not vary, with ``vary``: see ``xmap_compat/numpy.py``.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from xmap_compat import _jax


def _after_take(operand, dim):
    return (operand, dim - 1) if dim else (jnp.moveaxis(operand, 0, 1), 0)


def _sum_mapped(operand, dim, size):
    return (operand * np.asarray(size, operand.dtype) if dim is None else operand.sum(dim)), None


def _all_mapped(operand, dim, size):
    return (
        jnp.broadcast_to(operand, (size, *operand.shape))
        if dim is None
        else jnp.moveaxis(operand, dim, 0)
    ), None


def _take_mapped(operand, dim, size):
    return (operand if dim is None else jnp.einsum("ii...->i...", jnp.moveaxis(operand, dim, 0))), 0


vary_p, sum_p = _jax.define_dual_primitives(
    ("device_vary", "device_sum"),
    (lambda shape, sizes: shape, lambda shape, sizes: shape),
    (lambda operand, dim: (operand, dim), lambda operand, dim: (operand, dim)),
    (lambda operand, dim, size: (operand, dim), _sum_mapped),
)
gather_p, take_p = _jax.define_dual_primitives(
    ("device_gather", "device_take"),
    (lambda shape, sizes: (math.prod(sizes), *shape), lambda shape, sizes: shape[1:]),
    (lambda operand, dim: (operand, dim + 1), _after_take),
    (_all_mapped, _take_mapped),
)


def bind(primitive: Any, data: Any, axes: tuple[Any, ...], sizes: tuple[int, ...]) -> Any:
    """Bind one of the four primitives over mesh axes in the order given (major first)."""
    return primitive.bind(data, axes=tuple(axes), sizes=tuple(sizes)) if axes else data
