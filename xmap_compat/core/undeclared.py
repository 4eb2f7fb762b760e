"""Results that vary over an axis that their ``out_axes`` leave out, as in legacy: under
``install()`` only.

Where the axis fills its mesh axes, each device keeps its own element.  Reading the result gives the
element of index 0, and the next xmap over the same mesh gets each device's own element there.
Programs that feed a decode state back rely on both.  Nothing is broadcast.

No array shows whether it is such a result.  So once one ``exist``s, any argument may differ along
each mesh axis, and varies over a ``HiddenAxis``.  A call is evaluated with these if a collective,
or a predicate around one, needs them.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from xmap_compat import _jax
from xmap_compat.core.parameters import Names
from xmap_compat.core.placement import HiddenAxis, Placement, split_over
from xmap_compat.core.specs import AxisName

# Whether some call has returned such a result.  It is part of jit's cache key.
exist = jax.make_user_context(default_value=False)

_warned: set[tuple[str, str, tuple[AxisName, ...]]] = set()


def can_stay(extra: Sequence[AxisName], placements: Mapping[AxisName, Placement]) -> bool:
    """Whether legacy returned a result that varies over these axes: each has one element on each
    device.
    """
    for name in extra:
        placement = placements[name]
        fills_mesh_axes = placement.mesh_axes and placement.local_size == 1
        if not fills_mesh_axes or placement.loops:
            return False
    return True


def warn(path: str, extra: Sequence[AxisName]) -> None:
    """Warn once for each place, result and axes, and remember that such results exist."""
    if not exist.value:
        _jax.set_for_all_threads(exist, True)
    where = _jax.where_now()
    if (where, path, tuple(extra)) in _warned:
        return
    _warned.add((where, path, tuple(extra)))
    names = ", ".join(map(str, extra))
    _jax.warn_user(
        f"{path} of the xmapped function at {where} varies over {names}, but its out_axes do not "
        f"name {names}. As in legacy, reading it gives the element of index 0, and each device "
        "keeps its own element for the next xmap over the same mesh. "
        f"from xmap_compat import xmap refuses this. Add {names} to its out_axes, or reduce over "
        "them in the function"
    )


def hidden_axes(mesh_axes: Iterable[Hashable], mesh: Any) -> dict[AxisName, Placement]:
    """Mesh axes as axes of values that differ between devices although their specs say nothing."""
    wanted = set(mesh_axes)
    placements: dict[AxisName, Placement] = {}
    if not wanted:
        return placements
    for axis in mesh.axis_names:
        if axis in wanted:
            name = HiddenAxis(axis)
            size = mesh.shape[axis]
            placements[name] = Placement(name, size, mesh_axes=(axis,), mesh_sizes=(size,))
    return placements


def hidden_axes_of(placements: Iterable[AxisName]) -> list[HiddenAxis]:
    return [name for name in placements if isinstance(name, HiddenAxis)]


def names_at_entry(
    consts: Sequence[Any], inputs: Sequence[Names], placements: Mapping[AxisName, Placement]
) -> list[Names]:
    """The names of captured values and of arguments: also each ``HiddenAxis`` on which none of
    their axes lies.
    """
    hidden = hidden_axes_of(placements)

    def entering(names: Names) -> Names:
        return names.union(unsplit_hidden_axes(names.union(hidden), placements))

    of_consts = []
    for value in consts:
        names: Names = frozenset()
        if not _is_on_one_device(value):
            names = entering(names)
        of_consts.append(names)
    return [*of_consts, *map(entering, inputs)]


def _is_on_one_device(value: Any) -> bool:
    if isinstance(value, jax.core.Tracer):
        return False
    return not hasattr(value, "devices") or len(value.devices()) < 2


def operand_names(
    names: Names, axes: Iterable[AxisName], placements: Mapping[AxisName, Placement]
) -> Names:
    """The names of a collective's operand: it varies over those of its axes on which it has a
    ``HiddenAxis``.
    """
    hidden = hidden_axes_of(names)
    if not hidden:
        return names
    # The axis that each mesh axis splits.
    split: dict[Hashable, AxisName] = {}
    for axis in axes:
        if axis in placements:
            split.update(dict.fromkeys(placements[axis].mesh_axes, axis))
    replaced: set[AxisName] = set()
    axes_of_operand: set[AxisName] = set()
    for name in hidden:
        mesh_axes = placements[name].mesh_axes
        if not split.keys().isdisjoint(mesh_axes):
            replaced.add(name)
            axes_of_operand.update(split[m] for m in mesh_axes)
    return names.difference(replaced).union(axes_of_operand)


def unsplit_hidden_axes(names: Names, placements: Mapping[AxisName, Placement]) -> list[HiddenAxis]:
    """The mesh axes along which a value may differ between devices although no named axis of it
    lies there.
    """
    hidden = hidden_axes_of(names)
    split = split_over(placements[name] for name in names.difference(hidden))
    return [n for n in hidden if n.mesh_axis not in split]


def mesh_of_results(declared: Any, mesh: Any) -> Any:
    """The mesh in scope, if such results may lie on it when a call without mesh resources gets
    them.
    """
    if not (declared.undeclared and exist.value):
        return None
    if declared.backend is not None or _jax.in_manual_region():
        return None
    if not isinstance(mesh, jax.sharding.Mesh) or mesh.size == 1:
        return None
    return mesh


def of_first_device(leaves: Sequence[Any], mesh: Any) -> list[Any]:
    """The arguments as the first device has them: legacy ran a call without mesh resources on one
    device.
    """
    everywhere = PartitionSpec()
    staged = _jax.mesh_to_stage(mesh)

    def first(x):
        if _jax.is_key(x):
            words = first(jax.random.key_data(x))
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
        mine = jnp.where(lax.axis_index(mesh.axis_names) == 0, x, jnp.zeros_like(x))
        return lax.psum(mine, mesh.axis_names).astype(x.dtype)

    @jax.custom_jvp
    def taken(leaves):
        mapped = jax.shard_map(
            lambda leaves: list(map(first, leaves)),
            mesh=staged,
            in_specs=everywhere,
            out_specs=everywhere,
            check_vma=False,
        )
        with _jax.context_of(mesh):
            return mapped(_jax.resharded(leaves, [everywhere] * len(leaves), staged))

    # Tangents that were equal on all devices still are.
    taken.defjvp(lambda primals, tangents: (taken(*primals), *tangents))
    return taken(list(map(jnp.asarray, leaves)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def without_gradient(fun: str, *values: Any) -> Any:
    """The values; raises where a gradient from outside is taken."""
    return values


@without_gradient.defjvp
def _refuse(fun, primals, tangents):
    raise NotImplementedError(
        f"{fun} has no gradient from outside: it returns a result that varies over an axis that "
        "its out_axes do not name, or its collectives combine what each device has of such a "
        "result of another xmap. Add the axis to those out_axes, or take the gradient in the "
        "function"
    )
