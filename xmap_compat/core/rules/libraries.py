"""Operations whose batching rule is not JAX's: bound under it, on one device or on whole axes."""

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
)
from xmap_compat.core.device import (
    cast_alike,
    cast_to,
    gather_over,
    laid_out_over,
    without_single,
)
from xmap_compat.core.rules.exchanges import take_element
from xmap_compat.core.values import (
    NamedValue,
    common,
    leading,
    names_of_each,
    union_of_names,
    without,
)


def bind_by_rule(ev: Any, eqn: Any, operands: Sequence[NamedValue]) -> list[NamedValue]:
    """The results of an operation under its batching rule.

    One that combines elements gets whole axes, if a device has a part of one.
    """
    view = ev.view
    inputs = names_of_each(operands)
    results = ev.checker.by_batching_rule(eqn, inputs)
    combined = combined_axes(inputs, results, view.placements)
    if any(view.placements[name].resources for name in combined):
        return bind_on_whole_axes(ev, eqn, operands)
    return _bind_batched(view, eqn, operands, results)


def bind_on_whole_axes(ev: Any, eqn: Any, operands: Sequence[NamedValue]) -> list[NamedValue]:
    """The results of an operation whose batching rule is applied to whole axes: gathered where a
    device has a part of one, which takes its own elements of the results.
    """
    view = ev.view
    inputs = names_of_each(operands)
    axes = batched_axes(union_of_names(operands), view.placements)
    for name in axes:
        if view.placements[name].loops:
            raise combined_in_loop(eqn, name, ev.checker.where(eqn))
    results = ev.checker.by_batching_rule(eqn, inputs)
    batched = ev.checker.trace_by_rule(eqn, inputs, results)
    outs = ev.evaluate(batched, [_whole(view, value, axes) for value in operands])
    return [_own_elements(view, out, axes, varied) for out, varied in zip(outs, results)]


def _whole(view, value, axes):
    """A value whose first positional dimensions are the whole axes that it varies over."""
    names = common(axes, value.names)
    if not names:
        return value
    gathered = gather_over(view, laid_out_over(view, value, value.names), names)
    # The gathered dimension becomes one for each axis.
    at = gathered.dims.index(None)
    shape = list(gathered.data.shape)
    shape[at : at + 1] = [view.placements[n].size for n in names]
    dims = list(gathered.dims)
    dims[at : at + 1] = [None] * len(names)
    return NamedValue(lax.reshape(gathered.data, tuple(shape)), tuple(dims), gathered.names)


def _own_elements(view, value, axes, names):
    """The elements that are here of a result whose first positional dimensions are whole axes."""
    for name in common(axes, names):
        value = take_element(view, value, [name])
    return cast_to(view, value, names)


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
