"""Bind primitives on named values, batched over their local dimensions; and the position of an
element on an axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.device import DeviceView, cast_alike, cast_to, laid_out_over
from xmap_compat.core.specs import AxisName, AxisNames
from xmap_compat.core.values import (
    Dims,
    NamedValue,
    merge_leading,
    others,
    positional,
    union_of_names,
    with_leading,
    without,
)


def bind_named(
    view: DeviceView, primitive: Any, operands: Sequence[NamedValue], params: Mapping[str, Any]
) -> list[NamedValue]:
    """Bind a primitive that knows nothing of names: every result varies over the union of the
    operands' names.
    """
    names = union_of_names(operands)
    levels = view.local_names(names)
    operands = cast_alike(view, operands)
    data = [cast_to(view, operand, names).data for operand in operands]

    def bind(*data):
        return _jax.bind(primitive, data, params)

    try:
        outs = _jax.call_batched(bind, data, _levels(view, operands, levels))
    except NotImplementedError:
        if not levels:
            raise
        # JAX (to 0.12) maps no initial value of lax.reduce, for example.
        return bind_per_element(view, primitive, operands, params)
    return [_typed_result(view, out, levels, names) for out in outs]


def bind_per_element(
    view: DeviceView, primitive: Any, operands: Sequence[NamedValue], params: Mapping[str, Any]
) -> list[NamedValue]:
    """Bind a primitive once for each element of the named axes, in a loop, if its batching rule
    mixes them or fails.
    """
    names = union_of_names(operands)
    levels = view.local_names(names)
    if not levels:
        return bind_named(view, primitive, operands, params)
    sizes = view.local_sizes(levels)
    flat = []
    for operand in operands:
        data = laid_out_over(view, operand, names).data
        flat.append(merge_leading(data, len(levels)))
    outs = lax.map(lambda xs: _jax.bind(primitive, xs, params), flat)
    results = []
    for out in outs:
        data = with_leading(out, 1, sizes)
        results.append(NamedValue(data, _dims(data, levels), names))
    return results


def _levels(view, operands, names):
    """The named dimensions to batch over; positions of inner ones are counted after the outer ones
    are removed.
    """
    levels = []
    left = [operand.dims for operand in operands]
    for name in names:
        positions = [dims.index(name) if name in dims else None for dims in left]
        levels.append((view.placements[name].local_size, positions))
        left = [without(dims, [name]) for dims in left]
    return levels


def _dims(data, levels) -> Dims:
    """The dimensions of a batched result: the levels, then the positional dimensions."""
    return (*levels, *(None,) * (jnp.ndim(data) - len(levels)))


def _typed_result(view, data, levels, names):
    """Make a result vary over all its names, even where a batching or typing rule found that it
    need not.
    """
    return cast_to(view, NamedValue(data, _dims(data, levels), names), names)


def apply_positional(view: DeviceView, fun: Callable[..., Any], *values: NamedValue) -> NamedValue:
    """Apply a function of positional arrays to named values, element by element of their named
    axes.
    """
    names = union_of_names(values)
    levels = view.local_names(names)
    data = [cast_to(view, value, names).data for value in values]
    out = _jax.call_batched(fun, data, _levels(view, values, levels))
    return _typed_result(view, out, levels, names)


def dot_dimensions(x: NamedValue, y: NamedValue, contract, batch) -> tuple[Any, Dims]:
    """Dimension numbers of a dot of positional dimensions, and the names of its result's
    dimensions.

    For example, the product of matrices with the dimensions ``('i', None, None)`` each, for each
    element of ``'i'``: ``((((2,), (1,)), ((0,), (0,))), ('i', None, None))``.
    """
    shared = [name for name in x.dims if name is not None and name in y.dims]
    dimensions = []
    free: list[AxisName | None] = []
    for value, contracted, batched in zip((x, y), contract, batch):
        places = value.positional_dims()
        summed = [places[dim] for dim in contracted]
        kept = [*map(value.dims.index, shared), *(places[dim] for dim in batched)]
        dimensions.append((tuple(summed), tuple(kept)))
        free.extend(value.dims[k] for k in others(len(value.dims), [*summed, *kept]))
    (x_summed, x_batch), (y_summed, y_batch) = dimensions
    numbers = ((x_summed, y_summed), (x_batch, y_batch))
    return numbers, (*shared, *(None for _ in batch[0]), *free)


def device_index(view: DeviceView, mesh_axes: Iterable[Any]) -> Any:
    """The row-major index of this device over mesh axes in the order given, as int32."""
    index = jnp.int32(0)
    for axis in mesh_axes:
        index = index * np.int32(view.mesh_size(axis)) + lax.axis_index(axis)
    return index


def index_of(view: DeviceView, names: AxisNames) -> NamedValue:
    """The row-major index of each element over the given axes, as int32."""
    first, *rest = names
    index = _single_index(view, first)
    for name in rest:
        size = np.int32(view.placement_of(name).size)
        index = apply_positional(
            view,
            functools.partial(_row_major, size),
            index,
            _single_index(view, name),
        )
    return index


def kept_where(
    view: DeviceView, value: NamedValue, names: AxisNames, is_kept: Callable[[Any], Any]
) -> NamedValue:
    """A value that is zero where ``is_kept`` of an element's index over the axes is false."""

    def keep(x, index):
        return jnp.where(is_kept(index), x, jnp.zeros_like(x))

    return apply_positional(view, keep, value, index_of(view, names))


def _row_major(size, major, minor):
    return major * size + minor


def _single_index(view, name):
    place = view.placement_of(name)
    index = device_index(view, place.mesh_axes)
    if not view.is_bound(name):
        return positional(index)
    names = frozenset({name})
    if not view.has_local_dim(name):
        return NamedValue(index, (), names)
    size = np.int32(place.local_size)
    return NamedValue(index * size + lax.iota(np.int32, place.local_size), (name,), names)
