"""Operations whose batching rule is not JAX's: bound under it, or translated to collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.batch import bind_per_element
from xmap_compat.core.combining import (
    batched_axes,
    check_combined,
    combined_axes,
    combined_in_loop,
    levels_of,
    reduction_of,
)
from xmap_compat.core.device import DeviceView, cast_alike, cast_to, without_single
from xmap_compat.core.parameters import Names
from xmap_compat.core.rules.reductions import max_over, min_over
from xmap_compat.core.specs import AxisName
from xmap_compat.core.values import NamedValue


def bind_by_rule(
    view: DeviceView,
    eqn: Any,
    operands: Sequence[NamedValue],
    results: Sequence[Names],
    where: str,
) -> list[NamedValue]:
    """The results of an operation, which vary over the names ``results``."""
    inputs = [v.names for v in operands]
    combined = combined_axes(inputs, results, view.placements)
    in_parts = [n for n in combined if view.placements[n].mesh_axes or view.placements[n].loops]
    if not in_parts:
        return _bind_batched(view, eqn, operands, results)
    check_combined(eqn, in_parts, view.placements, where)
    for name in in_parts:
        if view.placements[name].loops:
            raise combined_in_loop(eqn, name, where)
    (operand,) = operands
    return [_reduced(view, eqn, operand, combined)]


def _reduced(
    view: DeviceView, eqn: Any, value: NamedValue, names: Sequence[AxisName]
) -> NamedValue:
    """One of equinox's reductions over axes.

    It is bound on the result, too, because it also reduces over what is mapped around this xmap.
    """
    reduce = max_over
    if reduction_of(eqn) == "min":
        reduce = min_over
    is_bool = value.data.dtype == np.bool_
    if is_bool:
        integers = lax.convert_element_type(value.data, np.int32)
        value = NamedValue(integers, value.dims, value.names)
    everywhere = range(value.dims.count(None))
    reduced = reduce(view, value, names, everywhere)
    data = reduced.data
    if is_bool:
        data = lax.ne(data, np.zeros((), np.int32))
    (data,) = _jax.bind(eqn.primitive, [data], eqn.params)
    return cast_to(view, NamedValue(data, reduced.dims, frozenset()), reduced.names)


def _bind_batched(view, eqn, operands, results):
    """Bind a primitive under its batching rule for every axis, also those of one element here.

    The rule may do something else for what is mapped than for what is not.
    """
    names = frozenset().union(*(v.names for v in operands))
    axes = batched_axes(names, view.placements)
    primitive, params = eqn.primitive, eqn.params
    if view.typed:
        primitive, params = _jax.local_operation(eqn, view.mesh_axes_of(names))
    operands = cast_alike(view, operands)
    data = [_with_all_axes(view, cast_to(view, v, names), v.names, axes) for v in operands]

    def bind(*values):
        return _jax.bind(primitive, values, params)

    levels = levels_of(
        axes, [v.names for v in operands], lambda name: view.placements[name].local_size
    )
    varying = [frozenset(k for k, n in enumerate(axes) if n in names) for names in results]
    try:
        outs = _jax.batched(bind, levels, varying)(*data)
    except NotImplementedError:  # it has no batching rule
        return bind_per_element(view, primitive, operands, params)
    return [_result(view, x, names, axes) for x, names in zip(outs, results, strict=True)]


def _with_all_axes(view, value, names, axes):
    """Data with a leading dimension for each axis that a value varies over."""
    present = [n for n in axes if n in names]
    missing = [n for n in present if n not in value.dims]
    sizes = tuple(view.placements[n].local_size for n in missing)
    data = lax.broadcast(value.data, sizes)
    dims = (*missing, *value.dims)
    order = [*map(dims.index, present), *(k for k, n in enumerate(dims) if n is None)]
    return data if order == sorted(order) else lax.transpose(data, order)


def _result(view, data, names, axes):
    present = [n for n in axes if n in names]
    dims = (*present, *(None,) * (np.ndim(data) - len(present)))
    value = without_single(view, data, dims, frozenset(present))
    return cast_to(view, value, names)
