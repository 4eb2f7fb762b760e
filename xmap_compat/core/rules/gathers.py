"""``all_gather`` and ``axis_index``."""

from __future__ import annotations

from xmap_compat.core.device import DeviceView, gather_over
from xmap_compat.core.indices import index_of
from xmap_compat.core.parameters import Params, axis_names
from xmap_compat.core.rules.groups import exchange_in_groups
from xmap_compat.core.rules.translation import Translation
from xmap_compat.core.values import NamedValue, merge_positional, move_positional


def _all_gather(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    return _put(gather_over(view, value, axis_names(params), params.get("to", "invarying")), params)


def _all_gather_in_groups(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    return _put(exchange_in_groups(lambda members, *_: members)(view, params, value), params)


def _put(gathered, params):
    """Move the new first dimension to where ``lax.all_gather`` wants it."""
    at = params["all_gather_dimension"]
    gathered = move_positional(gathered, 0, at)
    return merge_positional(gathered, at) if params["tiled"] else gathered


TRANSLATIONS = {
    "axis_index": Translation(lambda view, params: index_of(view, axis_names(params))),
    "all_gather": Translation(_all_gather, _all_gather_in_groups),
}
