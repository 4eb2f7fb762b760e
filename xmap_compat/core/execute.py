"""Stages 5 and 6: a call's program evaluated on one device, or on each device of a mesh inside one
``shard_map``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from xmap_compat import _jax
from xmap_compat.core import undeclared
from xmap_compat.core.call import PlacedCall, partition_spec
from xmap_compat.core.device import DeviceView, laid_out, without_single
from xmap_compat.core.errors import as_set, axes_text, note_once
from xmap_compat.core.evaluate import RepeatedCalls
from xmap_compat.core.loops import evaluate_in_loops, loop_lengths
from xmap_compat.core.names import Checker
from xmap_compat.core.nested import boundary
from xmap_compat.core.nested.axes import NestedCall, as_placements, named_scope
from xmap_compat.core.specs import AxisSpec
from xmap_compat.core.structured.table import STRUCTURED
from xmap_compat.core.trace import call_without_axes, trace_flat
from xmap_compat.core.values import NamedValue, positional, split
from xmap_compat.core.watch import NOBODY, watcher


def _lowered_for_others(axes: Sequence[Any], sizes: Sequence[int], devices: int) -> ValueError:
    return ValueError(
        f"An xmap over the abstract mesh ({axes_text(dict(zip(axes, sizes)))}) of {math.prod(sizes)} devices is "
        f"lowered for {devices}. Give the arguments shardings over that mesh, and call trace(*args).lower("
        "lowering_platforms=('cuda',)). To run it, enter a Mesh of devices"
    )


_on_mesh_p = _jax.define_device_check("on_mesh", _lowered_for_others)


@dataclasses.dataclass(frozen=True)
class Execution:
    """The evaluation of a placed call on one device."""

    placed: PlacedCall
    view: DeviceView

    def on_device(self, consts: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        """The results of one device from its parts of the arguments."""
        placed, view = self.placed, self.view
        enter, leave = (
            (boundary.take_part, boundary.gather_parts) if view.nested else (_enter, _leave)
        )
        # Where arguments enter and results leave, a device's part of a looped axis is one
        # dimension.
        outside = dataclasses.replace(
            view, placements={n: p.without_loops() for n, p in view.placements.items()}
        )
        args = [enter(outside, leaf, spec) for leaf, spec in zip(leaves, placed.in_specs)]
        values = [positional(c) for c in consts]
        names = undeclared.names_at_entry(
            placed.program.consts, [v.names for v in args], placed.every_placement
        )
        entering = [
            dataclasses.replace(value, names=entered)
            for value, entered in zip([*values, *args], names)
        ]
        outs = self._evaluate(*split(entering, len(values)))
        laid_out = zip(outs, placed.out_specs, placed.program.out_types)
        return [leave(outside, out, spec, aval.weak_type) for out, spec, aval in laid_out]

    def _evaluate(self, values, args):
        placed, view = self.placed, self.view
        body = placed.body if view.mesh_axes else dataclasses.replace(placed.body, mesh_axes={})

        def trace(fun, types):
            return trace_flat(fun, types, body, view.in_our_shard_map)

        outer = as_placements(body.mesh_axes, nested=True) if view.nested else {}
        checker = Checker(
            view.placements,
            placed.fun_name,
            outer,
            trace_rule=functools.partial(call_without_axes, in_our_shard_map=view.in_our_shard_map),
            asked=placed.asked,
        )
        jaxpr = placed.program.jaxpr
        ev = watcher().evaluator(view, checker, trace, RepeatedCalls(jaxpr), STRUCTURED)
        wanted = [
            names.union(spec.position_of())
            for names, spec in zip(placed.result_names, placed.out_specs)
        ]
        if loop_lengths(view.placements):
            return evaluate_in_loops(ev, placed.program, values, args, wanted)
        return ev.gathering(jaxpr, [v.names for v in args], wanted).evaluate(jaxpr, args, values)


def run(placed: PlacedCall, leaves: Sequence[Any]) -> Any:
    """Execute (or, under a trace, stage out) a placed call on the leaves of its arguments."""
    if placed.first_device_of is not None:
        leaves = undeclared.of_first_device(leaves, placed.first_device_of)
    outs, mesh = execute(placed, leaves), placed.scope.mesh
    runs = placed.uses_mesh and not placed.nested and watcher() is NOBODY
    if runs and isinstance(mesh, jax.sharding.AbstractMesh):
        outs = [_on_mesh_p.bind(out, axes=mesh.axis_names, sizes=mesh.axis_sizes) for out in outs]
    return jax.tree.unflatten(placed.program.out_tree, outs)


def execute(placed: PlacedCall, leaves: Sequence[Any]) -> list[Any]:
    """Stages 5 and 6: evaluate the program on one device, or on each device of the mesh."""
    call = NestedCall(placed.fun_name, tuple(placed.placements.values()))
    with watcher().around(placed), named_scope(call) if placed.nested else contextlib.nullcontext():
        if placed.uses_mesh and not placed.nested:
            return _on_mesh(placed, leaves)
        if not placed.uses_mesh:
            return _without_mesh(placed, leaves)
        return Execution(placed, boundary.device_view(placed)).on_device(
            placed.program.consts, leaves
        )


def _on_mesh(placed: PlacedCall, leaves: Sequence[Any]) -> list[Any]:
    mesh = placed.scope.mesh
    assert mesh is not None
    placements = placed.every_placement
    untyped = any(placed.undeclared) or bool(undeclared.local_elements_of(placements))
    view = DeviceView(placements, mesh.axis_names, dict(mesh.shape), untyped=untyped)
    if axes_of_vmap := _jax.axes_of_spmd_vmap():
        raise _spmd_vmap(axes_of_vmap)
    arg_specs = [partition_spec(spec, placements) for spec in placed.in_specs]
    out_specs = [partition_spec(spec, placements) for spec in placed.out_specs]

    def on_device(consts, args):
        return Execution(placed, view).on_device(consts, args)

    consts = list(placed.program.consts)
    if view.untyped:
        consts, leaves = undeclared.without_gradient(placed.fun_name, consts, list(leaves))
    in_specs = ([PartitionSpec()] * len(consts), arg_specs)
    staged = _jax.mesh_to_stage(mesh)
    specs = {"in_specs": in_specs, "out_specs": out_specs, "axis_names": set(mesh.axis_names)}
    mapped = jax.shard_map(on_device, mesh=staged, check_vma=not untyped, **specs)
    with _jax.context_of(mesh):
        args = _jax.resharded(leaves, arg_specs, staged)
        return mapped(_jax.resharded(consts, in_specs[0], staged), args)


def _spmd_vmap(axes: Iterable[Hashable]) -> NotImplementedError:
    return NotImplementedError(
        f"A vmap with spmd_axis_name={as_set(axes)} is around an xmapped function with mesh resources. Leave "
        "spmd_axis_name out, or name the mapped dimension in in_axes and give it a mesh axis in axis_resources"
    )


def _without_mesh(placed: PlacedCall, leaves: Sequence[Any]) -> list[Any]:
    view = DeviceView(placed.every_placement, in_users_shard_map=_jax.in_manual_region())
    try:
        return Execution(placed, view).on_device(placed.program.consts, leaves)
    except (
        Exception
    ) as error:  # on Explicit meshes JAX refuses some operations along a sharded dimension
        specs = zip(placed.in_specs, map(_jax.explicit_spec, leaves))
        for name, mesh_axes in [
            (n, entries[k]) for spec, entries in specs for k, n in spec.names if entries[k]
        ][:1]:
            ours = (
                f"The type of an argument shards the named axis `{name}` over {mesh_axes!r}, "
                "but axis_resources do not"
            )
            note_once(
                error, f"{ours}. Assign {mesh_axes!r} to it, or jax.sharding.reshard the argument"
            )
        raise


def _enter(view: DeviceView, data: Any, spec: AxisSpec) -> NamedValue:
    """Read the positional dimensions that a spec names as local dimensions."""
    named = spec.name_at()
    return without_single(
        view, data, tuple(map(named.get, range(jnp.ndim(data)))), frozenset(named.values())
    )


def _leave(view: DeviceView, value: NamedValue, spec: AxisSpec, weak_type: bool) -> Any:
    """Lay a result out as its spec says: broadcast, transpose, and put dimensions of one element
    back.
    """
    named = spec.name_at()
    wanted = tuple(named.get(k) for k in range(value.dims.count(None) + len(named)))
    squeezed = [k for k, n in enumerate(wanted) if n is not None and not view.has_local_dim(n)]
    dims = tuple(n for k, n in enumerate(wanted) if k not in squeezed)
    value = laid_out(view, value, dims, frozenset(named.values()))
    data = lax.expand_dims(value.data, squeezed) if squeezed else value.data
    return _jax.with_weak_type(data, weak_type)
