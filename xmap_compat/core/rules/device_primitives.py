"""The primitives of nested xmaps, translated by the outermost one to collectives over its
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xmap_compat.core.batch import bind_named
from xmap_compat.core.device import DeviceView, cast_to, gather_over
from xmap_compat.core.device_primitives import gather_p, sum_p, take_p, vary_p
from xmap_compat.core.parameters import Params
from xmap_compat.core.placement import is_of_devices
from xmap_compat.core.rules.exchanges import take_own
from xmap_compat.core.rules.reductions import sum_over
from xmap_compat.core.specs import AxisName
from xmap_compat.core.values import NamedValue


def _over_devices(primitive: Any, translate: Callable) -> Callable:
    """The rule of a primitive: the outermost xmap translates it, and those between bind it
    again.
    """

    def rule(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
        if not all(view.is_own(axis) for axis in params["axes"]):
            return bind_named(view, primitive, [value], params)[0]
        return translate(view, value, params["axes"], *([params["to"]] if "to" in params else []))

    return rule


def _vary_devices(view: DeviceView, value: NamedValue, axes: Sequence[AxisName]) -> NamedValue:
    return cast_to(view, value, filter(is_of_devices, axes))


TRANSLATIONS = {
    "device_vary": _over_devices(vary_p, _vary_devices),
    "device_sum": _over_devices(sum_p, sum_over),
    "device_gather": _over_devices(gather_p, gather_over),
    "device_take": _over_devices(take_p, take_own),
}
