"""Mesh axes as named axes: which of them an xmap offers to those nested in it."""

from __future__ import annotations

from collections.abc import Mapping

from xmap_compat import _jax
from xmap_compat.core.placement import MeshAxis, Placement, Scope, enclosing_bodies
from xmap_compat.core.specs import AxisName


def offered(scope: Scope) -> Mapping[MeshAxis, int]:
    """The mesh axes that nested xmaps may use: the outermost body offers those of the mesh, others
    pass them on.
    """
    if enclosing := enclosing_bodies():
        return enclosing[-1].mesh_axes
    if scope.mesh is None or _jax.in_manual_region():
        return {}
    return {MeshAxis(name): size for name, size in scope.mesh.shape.items()}


def as_placements(
    axes: Mapping[MeshAxis, int], *, nested: bool = False
) -> dict[AxisName, Placement]:
    """Mesh axes as named axes, each on itself; a nested xmap sees them as axes that are bound
    around it.
    """
    placements: dict[AxisName, Placement] = {}
    for axis, size in axes.items():
        on = axis if nested else axis.mesh_axis
        placements[axis] = Placement(axis, size, mesh_axes=(on,), mesh_sizes=(size,))
    return placements
