"""``all_gather`` and ``axis_index``, and the primitives of nested xmaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from xmap_compat.core.batch import bind_named, index_of
from xmap_compat.core.collectives import collective, reduced, varied, varied_over_devices
from xmap_compat.core.device import DeviceView, cast_to, gather_over
from xmap_compat.core.device_primitives import gather_p, sum_p, take_p, vary_p
from xmap_compat.core.parameters import Params, axis_names
from xmap_compat.core.placement import is_of_devices
from xmap_compat.core.rules.exchanges import take_element
from xmap_compat.core.rules.groups import exchanged_in_groups
from xmap_compat.core.rules.reductions import sum_over
from xmap_compat.core.specs import AxisName
from xmap_compat.core.values import NamedValue, merge_positional, move_positional


@collective("axis_index", varied)
def _axis_index(view: DeviceView, params: Params) -> NamedValue:
    return index_of(view, axis_names(params))


def _gathered_in_group(members, place, params):
    at = params["all_gather_dimension"]
    members = jnp.moveaxis(members, 0, at)
    return lax.collapse(members, at, at + 2) if params["tiled"] else members


@collective("all_gather", reduced, in_groups=exchanged_in_groups(_gathered_in_group))
def _all_gather(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    """The new first dimension moves to where ``lax.all_gather`` wants it."""
    at = params["all_gather_dimension"]
    gathered = gather_over(view, value, axis_names(params), params.get("to", "invarying"))
    gathered = move_positional(gathered, 0, at)
    return merge_positional(gathered, at) if params["tiled"] else gathered


# The primitives that nested xmaps leave: the outermost one translates them, and those between bind
# them again.


def _is_outermost(view: DeviceView, axes: Sequence[AxisName]) -> bool:
    return all(view.is_bound(axis) for axis in axes)


def _bind_again(view: DeviceView, primitive: Any, params: Params, value: NamedValue) -> NamedValue:
    return bind_named(view, primitive, [value], params)[0]


@collective("device_vary", varied_over_devices)
def _vary(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    axes = params["axes"]
    if not _is_outermost(view, axes):
        return _bind_again(view, vary_p, params, value)
    return cast_to(view, value, filter(is_of_devices, axes))


@collective("device_sum", reduced)
def _sum(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    if not _is_outermost(view, params["axes"]):
        return _bind_again(view, sum_p, params, value)
    return sum_over(view, value, params["axes"])


@collective("device_gather", reduced)
def _gather(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    if not _is_outermost(view, params["axes"]):
        return _bind_again(view, gather_p, params, value)
    return gather_over(view, value, params["axes"], params.get("to", "invarying"))


@collective("device_take", varied)
def _take(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    if not _is_outermost(view, params["axes"]):
        return _bind_again(view, take_p, params, value)
    return take_element(view, value, params["axes"])
