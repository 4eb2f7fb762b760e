"""Values of a named program while it is evaluated on one device.

A ``NamedValue`` is an array some of whose dimensions have names.  The part of a named axis that
is left for one device is such a dimension; an axis that fills its mesh axes (or has one element)
leaves none.  Inside a typed ``shard_map`` the array also carries, in its JAX type, the mesh
axes over which it differs between devices: exactly the mesh axes of its names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.specs import AxisName

Dims = tuple[AxisName | None, ...]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["dims", "names"]
)
@dataclasses.dataclass(frozen=True, eq=False)
class NamedValue:
    """An array with names on some of its dimensions.

    Attributes:
      data: the array on this device.
      dims: for each dimension of ``data`` the axis that it is the local part of, or None where it
        is positional.  The positional dimensions keep their order.
      names: every axis that the value varies over, also those without a local dimension.
    """

    data: Any
    dims: Dims
    names: frozenset[AxisName]

    def positional_dims(self) -> list[int]:
        """The dimensions of ``data`` that are positional, in order."""
        return [k for k, name in enumerate(self.dims) if name is None]

    def positional_shape(self) -> tuple[int, ...]:
        """The sizes of these dimensions."""
        return tuple(np.shape(self.data)[k] for k in self.positional_dims())

    def permutation(self, order: Sequence[int]) -> tuple[int, ...]:
        """A permutation of all dimensions: positional ones get an order, named ones stay."""
        at = self.positional_dims()
        permutation = list(range(len(self.dims)))
        for place, k in zip(at, order):
            permutation[place] = at[k]
        return tuple(permutation)

    def with_data(self, data: Any) -> NamedValue:
        """Other data with the same dimensions and names."""
        return NamedValue(data, self.dims, self.names)

    def dims_of(self, names: Iterable[AxisName]) -> list[int]:
        """The dimensions of ``data`` that belong to these names."""
        wanted = set(names)
        return [k for k, name in enumerate(self.dims) if name is not None and name in wanted]


def union_of_names(values: Iterable[NamedValue]) -> frozenset[AxisName]:
    """The axes that any of the values varies over."""
    return frozenset().union(*(v.names for v in values))


def as_array(data: Any) -> Any:
    """Data with a shape: literals of a program may be Python numbers."""
    if hasattr(data, "shape"):
        return data
    return np.asarray(data, jax.typeof(data).dtype)


def positional(data: Any) -> NamedValue:
    """A value without named axes."""
    return NamedValue(data, (None,) * jnp.ndim(data), frozenset())


def is_float0(value: NamedValue) -> bool:
    return getattr(value.data, "dtype", None) == _jax.float0


def is_smooth(x: Any) -> bool:
    """Whether a value, or a value of a type, has a derivative: integers have none."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def split(values: Sequence[NamedValue], *lengths: int) -> list[list[NamedValue]]:
    """Cut a list into pieces of the given lengths, and a rest."""
    pieces, start = [], 0
    for length in lengths:
        pieces.append(list(values[start : start + length]))
        start += length
    return [*pieces, list(values[start:])]


def transposed(value, dims):
    named = {name: k for k, name in enumerate(value.dims) if name is not None}
    unnamed = iter(value.positional_dims())
    order = [next(unnamed) if name is None else named[name] for name in dims]
    return NamedValue(lax.transpose(value.data, order), dims, value.names)


def leading(value: NamedValue, names: Sequence[AxisName]) -> Any:
    """The data with the local dimensions of ``names`` first, in that order."""
    front = [value.dims.index(n) for n in names]
    rest = [k for k in range(len(value.dims)) if k not in front]
    return (
        value.data
        if front == list(range(len(front)))
        else lax.transpose(value.data, (*front, *rest))
    )


def without(dims: Dims, names: Iterable[AxisName]) -> Dims:
    dropped = set(names)
    return tuple(n for n in dims if n is None or n not in dropped)


def without_dims(dims: Dims, gone: Container[int]) -> Dims:
    return tuple(n for k, n in enumerate(dims) if k not in gone)


def move_positional(value: NamedValue, source: int, destination: int) -> NamedValue:
    """Move a positional dimension to another place among the positional dimensions."""
    if source == destination:
        return value
    order = list(range(value.dims.count(None)))
    order.insert(destination, order.pop(source))
    return value.with_data(lax.transpose(value.data, value.permutation(order)))


def merge_positional(value: NamedValue, position: int) -> NamedValue:
    """Merge positional dimensions ``position`` and ``position + 1`` into one."""
    first, second = value.positional_dims()[position : position + 2]
    order = [k for k in range(len(value.dims)) if k != first]
    order.insert(order.index(second), first)
    data = lax.transpose(value.data, order) if order != sorted(order) else value.data
    dims = tuple(value.dims[k] for k in order)
    at = order.index(first)
    shape = (*data.shape[:at], data.shape[at] * data.shape[at + 1], *data.shape[at + 2 :])
    return NamedValue(_jax.reshaped(data, shape), (*dims[:at], *dims[at + 1 :]), value.names)


def squeeze_positional(value: NamedValue, position: int) -> NamedValue:
    """Drop a positional dimension of one element."""
    at = value.positional_dims()[position]
    return NamedValue(
        lax.squeeze(value.data, (at,)), (*value.dims[:at], *value.dims[at + 1 :]), value.names
    )
