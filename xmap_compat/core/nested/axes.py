"""Mesh axes as named axes: which of them an xmap offers to those nested in it; and the named scopes
by which plans find the equations of a nested call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping

import jax

from xmap_compat import _jax
from xmap_compat.core.placement import MeshAxis, Placement, Scope, enclosing_bodies
from xmap_compat.core.specs import AxisName
from xmap_compat.core.values import common


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


@dataclasses.dataclass(frozen=True)
class NestedCall:
    """A call of an xmapped function in the body of another.

    Attributes:
      function: its name.
      axes: its named axes and how they are executed.
    """

    function: str
    axes: tuple[Placement, ...]


# Equal calls share one scope: this grows with the axes of a program, and not with its calls.
_calls: dict[str, NestedCall] = {}


@contextlib.contextmanager
def named_scope(call: NestedCall) -> Iterator[None]:
    """The named scope around what a nested call traces."""
    digest = hashlib.blake2s(repr(call).encode(), digest_size=8).hexdigest()
    _calls[digest] = call
    with jax.named_scope(f"nested_xmap_{digest}"):
        yield


def calls_in(name_stack: str) -> list[NestedCall]:
    """The nested calls, outermost first, that an equation with these named scopes comes from."""
    digests = re.findall(r"nested_xmap_([0-9a-f]{16})", name_stack)
    return [_calls[digest] for digest in common(digests, _calls)]
