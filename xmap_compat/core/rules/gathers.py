"""``all_gather`` and ``axis_index``, and the primitives of nested xmaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from xmap_compat.core.batch import bind_named, index_of
from xmap_compat.core.collectives import collective, reduced, varied, varied_over_devices
from xmap_compat.core.device import DeviceView, cast_to, gather_over
from xmap_compat.core.device_primitives import gather_p, sum_p, take_p, vary_p
from xmap_compat.core.parameters import Params, axis_names
from xmap_compat.core.placement import is_mesh_axis
from xmap_compat.core.rules.exchanges import take_element
from xmap_compat.core.rules.groups import exchanged_in_groups
from xmap_compat.core.rules.reductions import sum_over
from xmap_compat.core.values import NamedValue, merge_positional, move_positional


@collective("axis_index", varied)
def _axis_index(view: DeviceView, params: Params) -> NamedValue:
    return index_of(view, axis_names(params))


def _gathered_in_group(members, place, params):
    at = params["all_gather_dimension"]
    members = jnp.moveaxis(members, 0, at)
    if not params["tiled"]:
        return members
    return lax.collapse(members, at, at + 2)


@collective("all_gather", reduced, gathers=True, in_groups=exchanged_in_groups(_gathered_in_group))
def _all_gather(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    """The new first dimension moves to where ``lax.all_gather`` wants it."""
    at = params["all_gather_dimension"]
    gathered = gather_over(view, value, axis_names(params), params.get("to", "invarying"))
    gathered = move_positional(gathered, 0, at)
    if not params["tiled"]:
        return gathered
    return merge_positional(gathered, at)


# The primitives that nested xmaps leave: the outermost one translates them, and those between bind
# them again.

_Rule = Callable[[DeviceView, Params, NamedValue], NamedValue]


def _in_outermost(primitive: Any) -> Callable[[_Rule], _Rule]:
    """A decorator: the rule is for the xmap that binds all axes of the primitive."""

    def decorate(rule):
        def translate(view, params, value):
            if all(map(view.is_bound, params["axes"])):
                return rule(view, params, value)
            (again,) = bind_named(view, primitive, [value], params)
            return again

        return translate

    return decorate


@collective("device_vary", varied_over_devices)
@_in_outermost(vary_p)
def _vary(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    return cast_to(view, value, filter(is_mesh_axis, params["axes"]))


@collective("device_sum", reduced)
@_in_outermost(sum_p)
def _sum(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    return sum_over(view, value, params["axes"])


@collective("device_gather", reduced, gathers=True)
@_in_outermost(gather_p)
def _gather(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    return gather_over(view, value, params["axes"], params.get("to", "invarying"))


@collective("device_take", varied)
@_in_outermost(take_p)
def _take(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    return take_element(view, value, params["axes"])
