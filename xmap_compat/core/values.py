"""Values of a named program while it is evaluated on one device.

A ``NamedValue`` is an array some of whose dimensions have names.  The part of a named axis that
is left for one device is such a dimension; an axis that fills its mesh axes (or has one element)
leaves none.  Inside a typed ``shard_map`` the array also carries, in its JAX type, the mesh axes
over which it differs between devices: those of its names, and others where a gather is typed as
varying (``gathers_vary`` of ``DeviceView``).  In a ``shard_map`` of the user it carries that one's
axes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Container, Iterable, Mapping, Sequence
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
        return self.dims_of([None])

    def positional_shape(self) -> tuple[int, ...]:
        """The sizes of these dimensions."""
        shape = np.shape(self.data)
        return tuple(shape[k] for k in self.positional_dims())

    def permutation(self, order: Sequence[int]) -> tuple[int, ...]:
        """A permutation of all dimensions: positional ones get an order, named ones stay."""
        at = self.positional_dims()
        permutation = list(range(len(self.dims)))
        for place, k in zip(at, order):
            permutation[place] = at[k]
        return tuple(permutation)

    def dims_of(self, names: Iterable[AxisName]) -> list[int]:
        """The dimensions of ``data`` that belong to these names."""
        wanted = set(names)
        return [k for k, name in enumerate(self.dims) if name in wanted]

    def with_data(self, data: Any) -> NamedValue:
        """Other data with the same dimensions and names."""
        return NamedValue(data, self.dims, self.names)


def names_of_each(values: Iterable[NamedValue]) -> list[frozenset[AxisName]]:
    return [value.names for value in values]


def union_of_names(values: Iterable[NamedValue]) -> frozenset[AxisName]:
    """The axes that any of the values varies over."""
    return frozenset().union(*names_of_each(values))


def as_array(data: Any) -> Any:
    """Data with a shape: literals of a program may be Python numbers."""
    if hasattr(data, "shape"):
        return data
    return np.asarray(data, jax.typeof(data).dtype)


def positional(data: Any) -> NamedValue:
    """A value without named axes."""
    return NamedValue(data, (None,) * jnp.ndim(data), frozenset())


def value_of(env: Mapping[Any, NamedValue], atom: Any) -> NamedValue:
    """The value of a variable or a literal."""
    if isinstance(atom, _jax.Literal):
        return positional(atom.val)
    return env[atom]


def is_float0(value: NamedValue) -> bool:
    return getattr(value.data, "dtype", None) == _jax.float0


def is_smooth(x: Any) -> bool:
    """Whether a value, or a value of a type, has a derivative: integers have none."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def split(values: Iterable[Any], *lengths: int) -> list[list[Any]]:
    """Cut a list into pieces of the given lengths, and a rest."""
    rest = list(values)
    pieces = []
    for length in lengths:
        pieces.append(rest[:length])
        rest = rest[length:]
    return [*pieces, rest]


def others(count: int, chosen: Iterable[int]) -> list[int]:
    """The numbers below ``count`` that are not chosen, in order."""
    return sorted(set(range(count)).difference(chosen))


def moved_to_front(data: Any, dims: Sequence[int]) -> Any:
    """The data with these dimensions first, in the order given."""
    if list(dims) == list(range(len(dims))):
        return data
    return lax.transpose(data, (*dims, *others(data.ndim, dims)))


def with_leading(data: Any, count: int, sizes: Iterable[int]) -> Any:
    """The data with dimensions of these sizes in the place of the first ``count``."""
    return lax.reshape(data, (*sizes, *data.shape[count:]))


def merge_leading(data: Any, count: int) -> Any:
    """Merge the first ``count`` dimensions into one."""
    return with_leading(data, count, [math.prod(data.shape[:count])])


def transposed(value, dims):
    unnamed = iter(value.positional_dims())
    order = []
    for name in dims:
        order.append(next(unnamed) if name is None else value.dims.index(name))
    return NamedValue(lax.transpose(value.data, order), dims, value.names)


def leading(value: NamedValue, names: Iterable[AxisName]) -> Any:
    """The data with the local dimensions of ``names`` first, in that order."""
    return moved_to_front(value.data, list(map(value.dims.index, names)))


def common(names: Iterable[Any], others: Container[Any]) -> tuple[Any, ...]:
    """The names that are among the others, in their order."""
    return tuple(name for name in names if name in others)


def without(dims: Iterable[Any], names: Iterable[Any]) -> tuple[Any, ...]:
    """The dimensions that have none of the names, in their order."""
    dropped = set(names)
    return tuple(name for name in dims if name not in dropped)


def without_dims(dims: Dims, gone: Iterable[int]) -> Dims:
    return tuple(dims[k] for k in others(len(dims), gone))


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
    order = others(len(value.dims), [first])
    at = order.index(second)
    order.insert(at, first)
    data = value.data
    if order != sorted(order):
        data = lax.transpose(data, order)
    shape = list(data.shape)
    shape[at : at + 2] = [shape[at] * shape[at + 1]]
    dims = [value.dims[k] for k in order]
    del dims[at]
    return NamedValue(lax.reshape(data, shape), tuple(dims), value.names)


def squeeze_positional(value: NamedValue, position: int) -> NamedValue:
    """Drop a positional dimension of one element."""
    at = value.positional_dims()[position]
    dims = list(value.dims)
    del dims[at]
    return NamedValue(lax.squeeze(value.data, (at,)), tuple(dims), value.names)
