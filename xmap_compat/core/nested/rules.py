"""The primitives of nested xmaps, translated by the outermost one to collectives over its devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from xmap_compat.core.batch import bind_named
from xmap_compat.core.device import DeviceView, gather_over, vary_over
from xmap_compat.core.indices import device_index
from xmap_compat.core.nested.primitives import gather_p, sum_p, take_p, vary_p
from xmap_compat.core.parameters import Params
from xmap_compat.core.rules.reductions import sum_over
from xmap_compat.core.rules.translation import Translation
from xmap_compat.core.specs import AxisName
from xmap_compat.core.values import NamedValue


def _over_devices(primitive: Any, translate: Callable) -> Callable:
    """One of :mod:`xmap_compat.core.nested.primitives`: the outermost xmap translates it, those between pass it on."""

    def rule(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
        if not all(view.is_own(axis) for axis in params["axes"]):
            return bind_named(view, primitive, [value], params)[0]
        return translate(view, value, params["axes"], *([params["to"]] if "to" in params else []))

    return rule


def _take_own(view: DeviceView, value: NamedValue, axes: Sequence[AxisName]) -> NamedValue:
    """Each device takes its element of the first positional dimension."""
    value = vary_over(view, value, axes)
    at = value.positional_dims()[0]
    index = device_index(view, [m for axis in axes for m in view.place(axis).mesh_axes])
    data = lax.dynamic_index_in_dim(value.data, index, at, keepdims=False)
    return NamedValue(data, (*value.dims[:at], *value.dims[at + 1 :]), value.names)


TRANSLATIONS = {
    "device_vary": Translation(_over_devices(vary_p, vary_over)),
    "device_sum": Translation(_over_devices(sum_p, sum_over)),
    "device_gather": Translation(_over_devices(gather_p, gather_over)),
    "device_take": Translation(_over_devices(take_p, _take_own)),
}
