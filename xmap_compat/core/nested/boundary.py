"""Both ends of a nested call on the mesh: each device takes its part of the arguments, and results
are gathered.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.call import PlacedCall
from xmap_compat.core.device import DeviceView, gather_over, without_single
from xmap_compat.core.device_primitives import bind, take_p
from xmap_compat.core.placement import MeshAxis
from xmap_compat.core.specs import AxisSpec
from xmap_compat.core.values import NamedValue


def device_view(placed: PlacedCall) -> DeviceView:
    """One device as a nested xmap knows it: its mesh axes are named axes of the outermost one."""
    taken_by = {axis: p.name for p in placed.placements.values() for axis in p.mesh_axes}
    sizes = {
        MeshAxis(a.mesh_axis, taken_by.get(a.mesh_axis)): size
        for a, size in placed.body.mesh_axes.items()
    }
    placements = {n: p.on_mesh_axes() for n, p in placed.every_placement.items()}
    return DeviceView(placements, tuple(sizes), dict(sizes), nested=True)


def take_part(view: DeviceView, data: Any, spec: AxisSpec) -> NamedValue:
    """Cut the named dimensions into (mesh axes..., local), and take this device's element of the
    former.
    """
    named = spec.name_at()
    shape: list[int] = []
    labels: list[Any] = []
    for k, size in enumerate(jnp.shape(data)):
        place = view.placements[named[k]] if k in named else None
        shape.extend((*place.mesh_sizes, place.local_size) if place else (size,))
        labels.extend((*place.mesh_axes, named[k]) if place else (None,))
    mesh_axes = view.mesh_axes_of(named.values())
    front = [labels.index(m) for m in mesh_axes]
    rest = [k for k in range(len(labels)) if k not in front]
    data = lax.transpose(lax.reshape(data, shape), (*front, *rest))
    sizes = tuple(map(view.mesh_size, mesh_axes))
    if mesh_axes:
        data = lax.reshape(data, (math.prod(sizes), *data.shape[len(sizes) :]))
        data = bind(take_p, data, mesh_axes, sizes)
    return without_single(view, data, tuple(labels[k] for k in rest), frozenset(named.values()))


def gather_parts(view: DeviceView, value: NamedValue, spec: AxisSpec, weak_type: bool) -> Any:
    """Gather a result's named axes into the positions that its spec says."""
    names = [name for _, name in spec.names]
    gathered = gather_over(view, value, names) if names else value
    data = gathered.data
    if names:
        data = lax.reshape(data, (*(view.placements[n].size for n in names), *data.shape[1:]))
        data = jnp.moveaxis(data, range(len(names)), [position for position, _ in spec.names])
    return _jax.with_weak_type(data, weak_type)
