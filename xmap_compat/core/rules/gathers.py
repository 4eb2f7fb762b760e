"""``all_gather`` and ``axis_index``."""

from __future__ import annotations

from collections.abc import Callable

from xmap_compat.core.device import DeviceView, gather_over
from xmap_compat.core.indices import index_of
from xmap_compat.core.parameters import Params, axis_names
from xmap_compat.core.values import NamedValue, merge_positional, move_positional


def _all_gather(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    """The new first dimension moves to where ``lax.all_gather`` wants it."""
    at = params["all_gather_dimension"]
    gathered = gather_over(view, value, axis_names(params), params.get("to", "invarying"))
    gathered = move_positional(gathered, 0, at)
    return merge_positional(gathered, at) if params["tiled"] else gathered


TRANSLATIONS: dict[str, Callable[..., NamedValue]] = {
    "axis_index": lambda view, params: index_of(view, axis_names(params)),
    "all_gather": _all_gather,
}
