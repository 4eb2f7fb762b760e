"""Results that vary over an axis that their ``out_axes`` leave out, as in legacy: under ``install()`` only.

Where the axis fills its mesh axes, each device keeps its own element.  Reading the result gives the element of index 0,
and the next xmap over the same mesh gets each device's own element there.  Programs that feed a decode state
back rely on both.  Nothing is broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from xmap_compat import _jax
from xmap_compat.core.placement import Placement
from xmap_compat.core.specs import AxisName

_warned: set[tuple[str, str, tuple[AxisName, ...]]] = set()


def can_stay(extra: Sequence[AxisName], placements: Mapping[AxisName, Placement]) -> bool:
    """Whether legacy returned a result that varies over these axes: each has one element on each device."""
    places = [placements[name] for name in extra]
    return all(p.mesh_axes and p.local_size == 1 and not p.loops for p in places)


def warn(path: str, extra: Sequence[AxisName]) -> None:
    """Warn once for each place, result and axes."""
    place = (_jax.where_now(), path, tuple(extra))
    if place not in _warned:
        _warned.add(place)
        names = ", ".join(map(str, extra))
        text = (
            f"{path} of the xmapped function at {place[0]} varies over {names}, but its out_axes do not name {names}. "
            "As in legacy, reading it gives the element of index 0, and each device keeps its own element for the next "
            f"xmap over the same mesh. from xmap_compat import xmap refuses this. Add {names} to its out_axes, or "
            "reduce over them in the function"
        )
        _jax.warn_user(text)


def stacked_spec(mesh_axes: Sequence[str], spec: PartitionSpec) -> PartitionSpec:
    """The spec of a result that leaves the typed shard_map: the elements of all devices get their own dimension."""
    return PartitionSpec(tuple(mesh_axes), *spec)


def each_its_own(
    stacked: Any, mesh: Any, mapped: Sequence[str], mesh_axes: Sequence[str], spec: PartitionSpec, path: str
) -> Any:
    """Drop that dimension on each device: each keeps its own element of an array that is declared replicated.

    Args:
      mapped: the mesh axes that are not left to the compiler.
    """

    @jax.custom_jvp
    def drop(stacked):
        sharded = {"mesh": mesh, "in_specs": stacked_spec(mesh_axes, spec), "out_specs": spec, "check_vma": False}
        return jax.shard_map(lambda x: lax.squeeze(x, [0]), axis_names=set(mapped), **sharded)(stacked)

    @drop.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(
            f"{path} of an xmapped function has no gradient from outside, because it varies over an axis that its "
            "out_axes do not name. Add the axis to its out_axes, or reduce over it in the function"
        )

    return drop(stacked)
