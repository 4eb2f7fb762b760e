"""Bind primitives on named values, batched over their local dimensions; and the position of an element
on an axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.device import DeviceView, cast_alike, cast_to, laid_out_over
from xmap_compat.core.specs import AxisNames
from xmap_compat.core.values import Dims, NamedValue, positional, without


def bind_named(
    view: DeviceView, primitive: Any, operands: Sequence[NamedValue], params: Mapping[str, Any]
) -> list[NamedValue]:
    """Bind a primitive that knows nothing of names: every result varies over the union of the
    operands' names.
    """
    names = frozenset().union(*(v.names for v in operands))
    levels = view.local_names(names)
    operands = cast_alike(view, operands)
    data = [cast_to(view, v, names).data for v in operands]
    if not levels:
        outs = _jax.bind(primitive, data, params)
        return [_typed_result(view, x, _dims(x, levels), names) for x in outs]
    try:
        outs = _jax.bind_batched(primitive, data, params, _levels(view, operands, levels))
    except NotImplementedError:  # JAX (to 0.12) maps no initial value of lax.reduce, for example
        return bind_per_element(view, primitive, operands, params)
    return [_typed_result(view, x, _dims(x, levels), names) for x in outs]


def bind_per_element(
    view: DeviceView, primitive: Any, operands: Sequence[NamedValue], params: Mapping[str, Any]
) -> list[NamedValue]:
    """Bind a primitive once for each element of the named axes, in a loop, if its batching rule
    mixes them or fails.
    """
    names = frozenset().union(*(v.names for v in operands))
    levels = view.local_names(names)
    if not levels:
        return bind_named(view, primitive, operands, params)
    sizes = tuple(view.placements[n].local_size for n in levels)
    data = [laid_out_over(view, v, names).data for v in operands]
    flat = [lax.reshape(x, (math.prod(sizes), *x.shape[len(sizes) :])) for x in data]
    outs = lax.map(lambda xs: _jax.bind(primitive, xs, params), flat)
    shaped = [lax.reshape(x, (*sizes, *x.shape[1:])) for x in outs]
    return [NamedValue(x, (*levels, *(None,) * (x.ndim - len(sizes))), names) for x in shaped]


def _levels(view, operands, names):
    """The named dimensions to batch over; positions of inner ones are counted after the outer ones
    are removed.
    """
    levels = []
    for k, name in enumerate(names):
        left = [without(v.dims, names[:k]) for v in operands]
        positions = [dims.index(name) if name in dims else None for dims in left]
        levels.append((view.placements[name].local_size, positions))
    return levels


def _dims(data, levels) -> Dims:
    """The dimensions of a batched result: the levels, then the positional dimensions."""
    return (*levels, *(None,) * (jnp.ndim(data) - len(levels)))


def _typed_result(view, data, dims, names):
    """Make a result vary over all its names, even where a batching or typing rule found that it
    need not.
    """
    return cast_to(view, NamedValue(data, dims, names), names)


def apply_positional(view: DeviceView, fun: Callable[..., Any], *values: NamedValue) -> NamedValue:
    """Apply a function of positional arrays to named values, element by element of their named
    axes.
    """
    names = frozenset().union(*(v.names for v in values))
    levels = view.local_names(names)
    mapped = fun
    for size, positions in reversed(_levels(view, values, levels)):
        mapped = jax.vmap(mapped, positions, axis_size=size)
    data = mapped(*(cast_to(view, v, names).data for v in values))
    return _typed_result(view, data, _dims(data, levels), names)


def dot_dimensions(x: NamedValue, y: NamedValue, contract, batch) -> tuple[Any, Dims]:
    """Dimension numbers of a dot of positional dimensions, and the names of its result's
    dimensions.
    """
    xp, yp = x.positional_dims(), y.positional_dims()
    shared = [n for n in x.dims if n is not None and n in y.dims]
    x_contract, y_contract = (xp[d] for d in contract[0]), (yp[d] for d in contract[1])
    x_batch = [*(x.dims.index(n) for n in shared), *(xp[d] for d in batch[0])]
    y_batch = [*(y.dims.index(n) for n in shared), *(yp[d] for d in batch[1])]
    numbers = ((tuple(x_contract), tuple(y_contract)), (tuple(x_batch), tuple(y_batch)))
    x_free = [n for k, n in enumerate(x.dims) if k not in numbers[0][0] and k not in x_batch]
    y_free = [n for k, n in enumerate(y.dims) if k not in numbers[0][1] and k not in y_batch]
    return numbers, (*shared, *(None for _ in batch[0]), *x_free, *y_free)


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
        inner, size = _single_index(view, name), np.int32(view.placement_of(name).size)
        index = apply_positional(
            view, lambda major, minor, size=size: major * size + minor, index, inner
        )
    return index


def _single_index(view, name):
    place = view.placement_of(name)
    index = device_index(view, place.mesh_axes)
    if not view.is_bound(name):
        return positional(index)
    if not view.has_local_dim(name):
        return NamedValue(index, (), frozenset({name}))
    local = index * np.int32(place.local_size) + lax.iota(np.int32, place.local_size)
    return NamedValue(local, (name,), frozenset({name}))
