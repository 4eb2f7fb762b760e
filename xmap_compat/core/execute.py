"""Stages 5 and 6: a call's program evaluated on one device, or on each device of a mesh inside one
``shard_map``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from xmap_compat import _jax
from xmap_compat.core import undeclared
from xmap_compat.core.call import PlacedCall, partition_spec
from xmap_compat.core.device import DeviceView, laid_out, without_single
from xmap_compat.core.errors import axes_text, note_once
from xmap_compat.core.evaluate import RepeatedCalls
from xmap_compat.core.loops import evaluate_in_loops, loop_lengths
from xmap_compat.core.names import Checker
from xmap_compat.core.nested import boundary
from xmap_compat.core.nested.axes import as_placements
from xmap_compat.core.specs import AxisName, AxisSpec
from xmap_compat.core.structured.table import STRUCTURED
from xmap_compat.core.trace import call_without_axes, trace_flat
from xmap_compat.core.values import NamedValue, names_of_each, positional, split
from xmap_compat.core.watch import NOBODY, watcher


def _lowered_for_others(axes: Sequence[Any], sizes: Sequence[int], devices: int) -> ValueError:
    mesh = axes_text(dict(zip(axes, sizes)))
    return ValueError(
        f"An xmap over the abstract mesh ({mesh}) of {math.prod(sizes)} devices is lowered for "
        f"{devices}. Give the arguments shardings over that mesh, and call trace(*args).lower("
        "lowering_platforms=('cuda',)). To run it, enter a Mesh of devices"
    )


_CARRIES_IN_SHARD_MAP = (
    "In an xmapped function inside of a shard_map, start a loop from values that vary over the "
    "same mesh axes as its results (e.g. v + 0 * w), and let all branches return such values"
)
_device_check_p = _jax.define_device_check("on_mesh", _lowered_for_others)


def _on_device(
    placed: PlacedCall, view: DeviceView, consts: Sequence[Any], leaves: Sequence[Any]
) -> list[Any]:
    """The results of one device from its parts of the arguments."""
    enter = _enter
    leave = _leave
    if view.nested:
        enter = boundary.take_part
        leave = boundary.gather_parts
    # Where arguments enter and results leave, a device's part of a looped axis is one dimension.
    outside = dataclasses.replace(view, placements=view.placements_without_loops())
    args = [enter(outside, leaf, spec) for leaf, spec in zip(leaves, placed.in_specs)]
    names = undeclared.names_at_entry(
        placed.program.consts, names_of_each(args), placed.every_placement
    )
    entering = []
    for value, entered in zip([*map(positional, consts), *args], names):
        entering.append(dataclasses.replace(value, names=entered))
    outs = _evaluate(placed, view, *split(entering, len(consts)))
    results = []
    for out, spec, aval in zip(outs, placed.out_specs, placed.program.out_types):
        results.append(_jax.with_weak_type(leave(outside, out, spec), aval.weak_type))
    return results


def _evaluate(
    placed: PlacedCall,
    view: DeviceView,
    consts: Sequence[NamedValue],
    args: Sequence[NamedValue],
) -> list[NamedValue]:
    body = placed.body
    if not view.mesh_sizes:
        body = dataclasses.replace(body, mesh_axes={})

    def trace(fun, types):
        return trace_flat(fun, types, body, view.in_our_shard_map)

    def trace_rule(fun, advice):
        return call_without_axes(fun, advice, view.in_our_shard_map)

    checker = Checker(
        view.placements,
        placed.fun_name,
        as_placements(body.mesh_axes, nested=True) if view.nested else {},
        trace_rule=trace_rule,
        asked=placed.asked,
    )
    jaxpr = placed.program.jaxpr
    ev = watcher().evaluator(view, checker, trace, RepeatedCalls(jaxpr), STRUCTURED)
    wanted = []
    for names, spec in zip(placed.result_names, placed.out_specs):
        wanted.append(names.union(spec.position_of()))
    if loop_lengths(view.placements):
        return evaluate_in_loops(ev, placed.program, consts, args, wanted)
    ev = ev.gathering(jaxpr, names_of_each(args), wanted)
    return ev.evaluate(jaxpr, args, consts=consts)


def run(placed: PlacedCall, leaves: Sequence[Any]) -> Any:
    """The results of a placed call, in the structure that the function returned; leaves may be
    tracers.
    """
    if placed.first_device_of is not None:
        leaves = undeclared.of_first_device(leaves, placed.first_device_of)
    outs = execute(placed, leaves)
    mesh = placed.scope.mesh
    for_devices = placed.opens_shard_map and watcher() is NOBODY
    if for_devices and isinstance(mesh, jax.sharding.AbstractMesh):
        outs = [
            _device_check_p.bind(out, axes=mesh.axis_names, sizes=mesh.axis_sizes) for out in outs
        ]
    return jax.tree.unflatten(placed.program.out_tree, outs)


def execute(placed: PlacedCall, leaves: Sequence[Any]) -> list[Any]:
    """The results as a list: of one device, or of a ``shard_map`` over the mesh."""
    if placed.opens_shard_map:
        return _on_mesh(placed, leaves)
    if not placed.uses_mesh:
        return _without_mesh(placed, leaves)
    return _on_device(placed, boundary.device_view(placed), placed.program.consts, leaves)


def _on_mesh(placed: PlacedCall, leaves: Sequence[Any]) -> list[Any]:
    mesh = placed.scope.mesh
    assert mesh is not None
    placements = placed.every_placement
    untyped = any(placed.undeclared) or bool(undeclared.hidden_axes_of(placements))
    view = DeviceView(placements, dict(mesh.shape), untyped=untyped)
    consts: Sequence[Any] = placed.program.consts
    if untyped:
        consts, leaves = undeclared.without_gradient(placed.fun_name, consts, list(leaves))
    const_specs = [PartitionSpec()] * len(consts)
    arg_specs = [partition_spec(spec, placements) for spec in placed.in_specs]
    staged = _jax.mesh_to_stage(mesh)
    mapped = jax.shard_map(
        functools.partial(_on_device, placed, view),
        mesh=staged,
        in_specs=(const_specs, arg_specs),
        out_specs=[partition_spec(spec, placements) for spec in placed.out_specs],
        axis_names=set(mesh.axis_names),
        check_vma=not untyped,
    )
    with _jax.context_of(mesh):
        consts = _jax.resharded(consts, const_specs, staged)
        return mapped(consts, _jax.resharded(leaves, arg_specs, staged))


def _without_mesh(placed: PlacedCall, leaves: Sequence[Any]) -> list[Any]:
    view = DeviceView(placed.every_placement, in_users_shard_map=_jax.in_manual_region())
    try:
        return _on_device(placed, view, placed.program.consts, leaves)
    except TypeError as error:
        if view.in_users_shard_map and "manual ax" in str(error):
            note_once(error, _CARRIES_IN_SHARD_MAP)
        raise


def _enter(view: DeviceView, data: Any, spec: AxisSpec) -> NamedValue:
    """Read the positional dimensions that a spec names as local dimensions."""
    named = spec.name_at()
    dims = tuple(map(named.get, range(jnp.ndim(data))))
    return without_single(view, data, dims, frozenset(named.values()))


def _leave(view: DeviceView, value: NamedValue, spec: AxisSpec) -> Any:
    """Lay a result out as its spec says: broadcast, transpose, and put dimensions of one element
    back.
    """
    named = spec.name_at()
    squeezed = []
    dims: list[AxisName | None] = []
    for k in range(value.dims.count(None) + len(named)):
        name = named.get(k)
        if name is None or view.has_local_dim(name):
            dims.append(name)
        else:
            squeezed.append(k)
    data = laid_out(view, value, tuple(dims), frozenset(named.values())).data
    if squeezed:
        data = lax.expand_dims(data, squeezed)
    return data
