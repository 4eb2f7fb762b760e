"""Stages 5 and 6: a call's program evaluated on one device, or on each device of a mesh inside one ``shard_map``."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from xmap_compat import _jax
from xmap_compat.core import errors, undeclared
from xmap_compat.core.call import PlacedCall, partition_spec, result_paths
from xmap_compat.core.device import Locality, conform, gather_over
from xmap_compat.core.evaluate import Evaluator, RepeatedCalls
from xmap_compat.core.loops import evaluate_in_loops, loop_lengths
from xmap_compat.core.mesh import platform_of
from xmap_compat.core.names import Checker
from xmap_compat.core.nested_marks import NestedCall, mark
from xmap_compat.core.nested_primitives import bind, take_p
from xmap_compat.core.placement import DeviceAxis, Placement
from xmap_compat.core.specs import AxisSpec
from xmap_compat.core.trace import trace_flat
from xmap_compat.core.values import NamedValue, positional

# What executes calls instead of ``execute`` while a report on a whole program is made: a function of the same
# arguments.  It is part of jit's cache key, so that nothing is used which was traced without it.
executor = jax.make_user_context(default_value=None)


_on_mesh_p = _jax.define_device_check("on_mesh", errors.lowered_for_others)


def run(placed: PlacedCall, args: tuple[Any, ...]) -> Any:
    """Execute (or, under a trace, stage out) a planned call on its positional arguments."""
    outs = (executor.value or execute)(placed, jax.tree.leaves(args))
    mesh = placed.scope.mesh
    if isinstance(mesh, jax.sharding.AbstractMesh) and placed.uses_mesh and not (placed.nested or executor.value):
        outs = [_on_mesh_p.bind(out, axes=mesh.axis_names, sizes=mesh.axis_sizes) for out in outs]
    return jax.tree.unflatten(placed.program.out_tree, outs)


def execute(placed: PlacedCall, leaves: Sequence[Any], evaluator: Callable[..., Evaluator] = Evaluator) -> list[Any]:
    """Stages 5 and 6: evaluate the program on one device, or on each device of the mesh.

    Args:
      evaluator: makes what evaluates the program; a plan watches it with one of its own.
    """
    with mark(_nested_call(placed)) if placed.nested else contextlib.nullcontext():
        return _execute(placed, leaves, evaluator)


def _nested_call(placed: PlacedCall) -> NestedCall:
    own = tuple(p for name, p in placed.placements.items() if not isinstance(name, DeviceAxis))
    return NestedCall(placed.fun_name, own)


def _execute(placed: PlacedCall, leaves: Sequence[Any], evaluator: Callable[..., Evaluator]) -> list[Any]:
    if not placed.uses_mesh:
        loc = Locality(placed.placements, foreign=_jax.in_manual_region())
        with _explained_types(placed, leaves):
            return _on_device(placed, loc, placed.program.consts, leaves, evaluator)
    if placed.nested:
        return _in_outer_body(placed, leaves, evaluator)
    mesh = placed.scope.mesh
    assert mesh is not None
    compiler = placed.compiler
    axes = tuple(a for a in mesh.axis_names if a not in compiler)
    widens = bool(compiler) and _jax.widens(platform_of(mesh) or jax.default_backend())
    placements = placed.placements
    if compiler:  # XLA (to jax 0.12) fails on an all-reduce over an axis of one device beside axes that it partitions.
        placements = {name: p.without_mesh_axes_of_one() for name, p in placements.items()}
    loc = Locality(placements, axes, {a: mesh.shape[a] for a in axes}, compiler=compiler, widens=widens)
    if both := compiler & _jax.axes_of_spmd_vmap():
        raise errors.spmd_vmap_over_compiler_axis(both)
    arg_specs = [partition_spec(spec, placements) for spec in placed.in_specs]
    out_specs = [partition_spec(spec, placements) for spec in placed.out_specs]
    own_axes = [loc.mesh_axes_of(names) for names in placed.undeclared]
    leaving = [undeclared.stacked_spec(axes, spec) if axes else spec for axes, spec in zip(own_axes, out_specs)]

    def on_device(consts, args):
        around = dataclasses.replace(loc, foreign=bool(_jax.axes_of_spmd_vmap()))
        with _jax.no_spmd_names():
            outs = _on_device(placed, around, consts, args, evaluator)
        return [lax.expand_dims(out, [0]) if axes else out for axes, out in zip(own_axes, outs)]

    consts = list(placed.program.consts)
    whole = PartitionSpec()
    in_specs = ([whole] * len(consts), arg_specs)
    staged = _jax.mesh_to_stage(mesh)
    mapped = jax.shard_map(on_device, mesh=staged, in_specs=in_specs, out_specs=leaving, axis_names=set(axes))
    with _jax.context_of(mesh), _explained_explicit_axes(mesh, compiler):
        args = _jax.resharded(leaves, arg_specs, staged, compiler)
        outs = mapped(_jax.replicated(consts, staged, compiler), args)
        paths = result_paths(placed.program)
        outs = [
            undeclared.each_its_own(out, staged, axes, own, spec, path) if own else out
            for out, own, spec, path in zip(outs, own_axes, out_specs, paths)
        ]
        if not compiler:
            return outs
        declared = [partition_spec(spec, placed.placements) for spec in placed.out_specs]
        return _jax.resharded(outs, declared, staged, compiler)


@contextlib.contextmanager
def _explained_types(placed: PlacedCall, leaves: Sequence[Any]) -> Iterator[None]:
    """On Explicit meshes JAX refuses some operations along a sharded dimension; say which axis that is."""
    try:
        yield
    except Exception as error:
        specs = [_jax.explicit_spec(leaf) for leaf in leaves]
        sharded = [
            (n, entries[k]) for spec, entries in zip(placed.in_specs, specs) for k, n in spec.names if entries[k]
        ]
        if sharded:
            error.add_note(errors.sharded_axis_note(*sharded[0]))
        raise


@contextlib.contextmanager
def _explained_explicit_axes(mesh: _jax.AnyMesh, compiler: frozenset[Any]) -> Iterator[None]:
    """Over Explicit axes that are left to the compiler, JAX must know from types where every value lies."""
    try:
        yield
    except Exception as error:
        explicit = [
            name
            for name, kind in zip(mesh.axis_names, mesh.axis_types)
            if name in compiler and kind == jax.sharding.AxisType.Explicit
        ]
        if explicit:
            errors.note_once(error, errors.explicit_compiler_axes_note(explicit))
        raise


def _on_device(placed: PlacedCall, loc: Locality, consts: Sequence[Any], leaves: Sequence[Any], evaluator) -> list[Any]:
    """The results of one device from its parts of the arguments."""
    boundary = _without_loops(loc)
    args = [_enter(boundary, leaf, spec) for leaf, spec in zip(leaves, placed.in_specs)]
    outs = _evaluate(placed, loc, consts, args, evaluator)
    types = placed.program.out_types
    return [_leave(boundary, out, spec, t.weak_type) for out, spec, t in zip(outs, placed.out_specs, types)]


def _evaluate(placed, loc, consts, args, evaluator):
    body = placed.body if loc.mesh_axes else dataclasses.replace(placed.body, device_axes={})
    hidden = {axis: Placement(axis, size, (axis,), (size,)) for axis, size in body.device_axes.items()}
    declared = [frozenset(spec.name_at().values()) for spec in placed.out_specs]
    room = declared[0].intersection(*declared) if declared else frozenset()
    trace = lambda fun, types: trace_flat(fun, types, body)  # noqa: E731
    checker = Checker(loc.placements, placed.fun_name, hidden if loc.nested else {}, room, trace)
    ev = evaluator(loc, checker, trace, RepeatedCalls(placed.program.jaxpr))
    values = [positional(c) for c in consts]
    wanted = [names.union(spec.position_of()) for names, spec in zip(placed.result_names, placed.out_specs)]
    if loop_lengths(loc.placements):
        return evaluate_in_loops(ev, placed.program, values, args, wanted)
    jaxpr = placed.program.jaxpr
    return ev.gathering(jaxpr, [v.names for v in args], wanted).evaluate(jaxpr, args, values)


def _without_loops(loc: Locality) -> Locality:
    """Where arguments enter and results leave, a device's part of a looped axis is one dimension."""
    return dataclasses.replace(loc, placements={n: p.without_loops() for n, p in loc.placements.items()})


def _enter(loc: Locality, data: Any, spec: AxisSpec) -> NamedValue:
    """Read the positional dimensions that a spec names as local dimensions."""
    named = spec.name_at()
    squeezed = [k for k, n in named.items() if not loc.has_local_dim(n)]
    dims = tuple(named.get(k) for k in range(jnp.ndim(data)) if k not in squeezed)
    return NamedValue(lax.squeeze(data, squeezed) if squeezed else data, dims, frozenset(named.values()))


def _leave(loc: Locality, value: NamedValue, spec: AxisSpec, weak_type: bool) -> Any:
    """Lay a result out as its spec says: broadcast, transpose, put dimensions of one element back."""
    named = spec.name_at()
    wanted = tuple(named.get(k) for k in range(value.dims.count(None) + len(named)))
    squeezed = [k for k, n in enumerate(wanted) if n is not None and not loc.has_local_dim(n)]
    dims = tuple(n for k, n in enumerate(wanted) if k not in squeezed)
    value = conform(loc, value, dims, frozenset(named.values()))
    data = lax.expand_dims(value.data, squeezed) if squeezed else value.data
    return _jax.with_weak_type(data, weak_type)


def _in_outer_body(placed: PlacedCall, leaves: Sequence[Any], evaluator) -> list[Any]:
    """A nested call on the mesh: its mesh axes are named axes of the outermost xmap, which maps them to devices.

    Each device takes its part of the arguments, and the parts of results are gathered again.
    """
    placements = {n: p.on_device_axes() for n, p in placed.placements.items()}
    taken_by = {axis: p.name for p in placed.placements.values() for axis in p.mesh_axes}
    sizes = {DeviceAxis(a.mesh_axis, taken_by.get(a.mesh_axis)): size for a, size in placed.body.device_axes.items()}
    loc = Locality(placements, tuple(sizes), dict(sizes), nested=True)
    boundary = _without_loops(loc)
    args = [_take_part(boundary, leaf, spec) for leaf, spec in zip(leaves, placed.in_specs)]
    outs = _evaluate(placed, loc, placed.program.consts, args, evaluator)
    types = placed.program.out_types
    return [_gather_parts(boundary, out, spec, t.weak_type) for out, spec, t in zip(outs, placed.out_specs, types)]


def _take_part(loc: Locality, data: Any, spec: AxisSpec) -> NamedValue:
    """Cut the named dimensions into (mesh axes..., local), and take this device's element of the former."""
    named = spec.name_at()
    shape: list[int] = []
    labels: list[Any] = []
    for k, size in enumerate(jnp.shape(data)):
        place = loc.placements[named[k]] if k in named else None
        shape.extend((*place.mesh_sizes, place.local_size) if place else (size,))
        labels.extend((*place.mesh_axes, named[k]) if place else (None,))
    mesh_axes = loc.mesh_axes_of(named.values())
    front = [labels.index(m) for m in mesh_axes]
    rest = [k for k in range(len(labels)) if k not in front]
    data = lax.transpose(lax.reshape(data, shape), (*front, *rest))
    sizes = tuple(map(loc.mesh_size, mesh_axes))
    if mesh_axes:
        data = lax.reshape(data, (math.prod(sizes), *data.shape[len(sizes) :]))
        data = bind(take_p, data, mesh_axes, sizes)
    dims = tuple(labels[k] for k in rest)
    single = [k for k, n in enumerate(dims) if n is not None and not loc.has_local_dim(n)]
    kept = tuple(n for k, n in enumerate(dims) if k not in single)
    return NamedValue(lax.squeeze(data, single) if single else data, kept, frozenset(named.values()))


def _gather_parts(loc: Locality, value: NamedValue, spec: AxisSpec, weak_type: bool) -> Any:
    """Gather a result's named axes into the positions that its spec says."""
    names = [name for _, name in spec.names]
    gathered = gather_over(loc, value, names) if names else value
    data = gathered.data
    if names:
        data = lax.reshape(data, (*(loc.placements[n].size for n in names), *data.shape[1:]))
        data = jnp.moveaxis(data, range(len(names)), [position for position, _ in spec.names])
    return _jax.with_weak_type(data, weak_type)
