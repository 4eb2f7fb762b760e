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
    combined_axes,
    combined_in_loop,
    levels_of,
    positions_of,
    reduction_of,
)
from xmap_compat.core.device import DeviceView, cast_alike, cast_to, without_single
from xmap_compat.core.parameters import Names
from xmap_compat.core.rules.reductions import max_over, min_over
from xmap_compat.core.specs import AxisName
from xmap_compat.core.values import (
    NamedValue,
    common,
    leading,
    names_of_each,
    union_of_names,
    without,
)


def bind_by_rule(
    view: DeviceView,
    eqn: Any,
    operands: Sequence[NamedValue],
    results: Sequence[Names],
    where: str,
) -> list[NamedValue]:
    """The results of an operation, which vary over the names ``results``.

    The type check has refused one that combines elements in different places, unless it is one of
    equinox's reductions.
    """
    combined = combined_axes(names_of_each(operands), results, view.placements)
    for name in combined:
        if view.placements[name].loops:
            raise combined_in_loop(eqn, name, where)
    if not any(view.placements[n].mesh_axes for n in combined):
        return _bind_batched(view, eqn, operands, results)
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
        value = value.with_data(lax.convert_element_type(value.data, np.int32))
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
    names = union_of_names(operands)
    inputs = names_of_each(operands)
    axes = batched_axes(names, view.placements)
    primitive = eqn.primitive
    params = eqn.params
    if view.typed:
        primitive, params = _jax.local_operation(eqn, view.mesh_axes_of(names))
    operands = cast_alike(view, operands)
    data = []
    for value, over in zip(operands, inputs):
        data.append(_with_all_axes(view, cast_to(view, value, names), over, axes))

    def bind(*values):
        return _jax.bind(primitive, values, params)

    levels = levels_of(axes, inputs, view.local_sizes(axes))
    try:
        outs = _jax.batched(bind, levels, positions_of(axes, results))(*data)
    except NotImplementedError:  # it has no batching rule
        return bind_per_element(view, primitive, operands, params)
    values = []
    for x, varied in zip(outs, results, strict=True):
        values.append(_result(view, x, varied, axes))
    return values


def _with_all_axes(view, value, names, axes):
    """Data with a leading dimension for each axis that a value varies over."""
    varied = common(axes, names)
    missing = without(varied, value.dims)
    data = lax.broadcast(value.data, view.local_sizes(missing))
    return leading(NamedValue(data, (*missing, *value.dims), names), varied)


def _result(view, data, names, axes):
    varied = common(axes, names)
    dims = (*varied, *(None,) * (np.ndim(data) - len(varied)))
    value = without_single(view, data, dims, frozenset(varied))
    return cast_to(view, value, names)
