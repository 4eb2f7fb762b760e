"""Both ends of a nested call on the mesh: each device takes its part of the arguments, and results
are gathered.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from xmap_compat.core.call import PlacedCall
from xmap_compat.core.device import DeviceView, bind_over, gather_over, without_single
from xmap_compat.core.device_primitives import take_p
from xmap_compat.core.placement import MeshAxis
from xmap_compat.core.specs import AxisSpec
from xmap_compat.core.values import NamedValue, merge_leading, others, with_leading


def device_view(placed: PlacedCall) -> DeviceView:
    """One device as a nested xmap knows it: its mesh axes are named axes of the outermost one."""
    taken_by = {}
    for name, place in placed.placements.items():
        taken_by.update(dict.fromkeys(place.mesh_axes, name))
    sizes = {}
    for axis, size in placed.body.mesh_axes.items():
        sizes[MeshAxis(axis.mesh_axis, taken_by.get(axis.mesh_axis))] = size
    placements = {name: p.on_mesh_axes() for name, p in placed.every_placement.items()}
    return DeviceView(placements, sizes, nested=True)


def take_part(view: DeviceView, data: Any, spec: AxisSpec) -> NamedValue:
    """Cut the named dimensions into (mesh axes..., local), and take this device's element of the
    former.

    For example, where 4 devices have 6 elements each of an axis that names dimension 0 of
    ``f32[24, 3]``, it becomes ``f32[4, 6, 3]``, of which a device takes ``f32[6, 3]``.
    """
    named = spec.name_at()
    shape: list[int] = []
    labels: list[Any] = []
    for k, size in enumerate(jnp.shape(data)):
        if k not in named:
            shape.append(size)
            labels.append(None)
            continue
        place = view.placements[named[k]]
        shape.extend((*place.mesh_sizes, place.local_size))
        labels.extend((*place.mesh_axes, named[k]))
    mesh_axes = view.mesh_axes_of(named.values())
    front = list(map(labels.index, mesh_axes))
    rest = others(len(labels), front)
    data = lax.transpose(lax.reshape(data, shape), (*front, *rest))
    if mesh_axes:
        data = bind_over(view, take_p, merge_leading(data, len(front)), mesh_axes)
    dims = tuple(labels[k] for k in rest)
    return without_single(view, data, dims, frozenset(named.values()))


def gather_parts(view: DeviceView, value: NamedValue, spec: AxisSpec) -> Any:
    """Gather a result's named axes into the positions that its spec says."""
    if not spec.names:
        return value.data
    positions, names = zip(*spec.names)
    data = gather_over(view, value, names).data
    sizes = [view.placements[name].size for name in names]
    return jnp.moveaxis(with_leading(data, 1, sizes), range(len(names)), positions)
