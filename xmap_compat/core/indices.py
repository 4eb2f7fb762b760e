"""The position of an element on an axis: the index of a device, and the global index along named
axes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat.core.batch import apply_positional
from xmap_compat.core.device import DeviceView
from xmap_compat.core.specs import AxisNames
from xmap_compat.core.values import NamedValue, positional


def device_index(view: DeviceView, mesh_axes: Iterable[Any]) -> Any:
    """The row-major index of this device over mesh axes in the order given, as int32."""
    index = jnp.int32(0)
    for axis in mesh_axes:
        index = index * np.int32(view.mesh_size(axis)) + lax.axis_index(axis)
    return index


def index_of(view: DeviceView, names: AxisNames) -> NamedValue:
    """The row-major index of each element over the given axes, as int32."""
    first, *rest = names
    index = _single_index(view, first)
    for name in rest:
        inner, size = _single_index(view, name), np.int32(view.placement_of(name).size)
        index = apply_positional(
            view, lambda major, minor, size=size: major * size + minor, index, inner
        )
    return index


def _single_index(view, name):
    place = view.placement_of(name)
    index = device_index(view, place.mesh_axes)
    if not view.is_own(name):
        return positional(index)
    if not view.has_local_dim(name):
        return NamedValue(index, (), frozenset({name}))
    local = index * np.int32(place.local_size) + lax.iota(np.int32, place.local_size)
    return NamedValue(local, (name,), frozenset({name}))
