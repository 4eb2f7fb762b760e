"""``all_gather`` and ``axis_index``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from xmap_compat.core.device import Locality, gather_devices
from xmap_compat.core.indices import index_of
from xmap_compat.core.rules.groups import group_members
from xmap_compat.core.rules.parameters import Params, axis_names
from xmap_compat.core.specs import AxisName
from xmap_compat.core.values import NamedValue, leading, merge_positional, move_positional, without


def axis_index(loc: Locality, params: Params) -> NamedValue:
    return index_of(loc, axis_names(params))


def gather_over(loc: Locality, value: NamedValue, names: Sequence[AxisName]) -> NamedValue:
    """``lax.all_gather`` into a new first positional dimension: one gather for all mesh axes."""
    names = list(names)
    present = loc.present(value, names)
    mesh, local = loc.parts_by_kind(present)
    data = leading(value, [part.name for part in local])
    if mesh:
        data = gather_devices(loc, data, [part.name for part in mesh])
    have, want = [*mesh, *local], loc.parts(present)
    order = [have.index(part) for part in want]
    data = lax.transpose(data, (*order, *range(len(order), data.ndim))) if order != sorted(order) else data
    tail = data.shape[len(have) :]
    full = [loc.place(n).size for n in names]
    data = lax.reshape(data, (*(size if n in present else 1 for n, size in zip(names, full)), *tail))
    data = jnp.broadcast_to(data, (*full, *tail)) if len(present) < len(names) else data
    data = lax.reshape(data, (math.prod(full), *tail))
    return NamedValue(data, (None, *without(value.dims, names)), value.names - frozenset(names))


def all_gather(loc: Locality, params: Params, value: NamedValue) -> NamedValue:
    at, tiled = params["all_gather_dimension"], params["tiled"]
    if params.get("axis_index_groups") is not None:
        gathered, _ = group_members(loc, value, params)
    else:
        gathered = gather_over(loc, value, axis_names(params))
    gathered = move_positional(gathered, 0, at)
    return merge_positional(gathered, at) if tiled else gathered
