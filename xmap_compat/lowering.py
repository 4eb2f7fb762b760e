"""Stages 6 and 7: the positional function that an xmap call runs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from xmap_compat import _jax, devices, errors, undeclared
from xmap_compat.axis_specs import (
    AxisName,
    AxisSpec,
    argument_path,
    broadcast_specs,
    check_argument,
    check_result,
    infer_sizes,
)
from xmap_compat.collectives import collectives_in, gather_over, mentions_any
from xmap_compat.loops import evaluate_in_loops, loop_lengths
from xmap_compat.named_program import NamedProgram, trace_flat, trace_program
from xmap_compat.named_shapes import Checker
from xmap_compat.named_values import Locality, NamedValue, conform, positional
from xmap_compat.resources import (
    Body,
    DeviceAxis,
    Placement,
    Resources,
    Scope,
    current_scope,
    enclosing_bodies,
    place_axes,
)
from xmap_compat.substitution import Evaluator, RepeatedCalls


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What the user asked of xmap, parsed."""

    fun: Callable[..., Any]
    name: str
    in_specs: Any
    out_specs: Any
    in_source: Any
    out_source: Any
    sizes: dict[AxisName, int]
    resources: Resources
    names: tuple[AxisName, ...]
    backend: str | None
    undeclared: bool = False  # whether results may vary over axes on the mesh that their specs leave out

    def key(self) -> Hashable:
        """Equal for declarations of one function that mean the same."""
        specs = [jax.tree.flatten(s) for s in (self.in_specs, self.out_specs)]
        return (
            *((tuple(leaves), tree) for leaves, tree in specs),
            tuple(self.sizes.items()),
            tuple(self.resources.items()),
            self.backend,
            self.undeclared,
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything decided about one call before anything is evaluated.

    Attributes:
      scope: the resources in scope at the call.
      placements: each axis, in order of appearance.
      in_specs, out_specs: one spec per argument leaf and per result leaf.
      program: the traced function.
      result_names: the named axes that each result varies over.
      undeclared: of these, for each result, those that its spec leaves out: each device keeps its own element.
      body: what was in scope when the program was traced.
      nested: whether the call was made in the body of another xmap.
    """

    fun_name: str
    scope: Scope
    placements: dict[AxisName, Placement]
    in_specs: tuple[AxisSpec, ...]
    out_specs: tuple[AxisSpec, ...]
    program: NamedProgram
    result_names: tuple[frozenset[AxisName], ...]
    undeclared: tuple[tuple[AxisName, ...], ...]
    body: Body
    nested: bool

    @property
    def uses_mesh(self) -> bool:
        return any(p.mesh_axes for p in self.placements.values())


def run(plan: Plan, args: tuple[Any, ...]) -> Any:
    """Execute (or, under a trace, stage out) a planned call on its positional arguments."""
    outs = execute(plan, jax.tree.leaves(args))
    return jax.tree.unflatten(plan.program.out_tree, outs)


# ---------------------------------------------------------------------- planning


def make_plan(declared: Declaration, args: tuple[Any, ...]) -> Plan:
    """Stages 1 to 4 for one call: specs, sizes, placements, program, named shapes."""
    in_specs, sizes = _bind_arguments(declared, args)
    scope = current_scope()
    placements = _placements(declared, sizes, scope)
    checker = Checker(placements, declared.name)
    _check_inputs(checker, in_specs, args)
    nested = bool(enclosing_bodies())
    body = Body({name: sizes[name] for name in placements}, scope, _device_axes(scope))
    input_names = [frozenset(spec.position_of()) for spec in in_specs]
    program = trace_program(declared.fun, _named_types(args, in_specs), input_names, body)
    out_specs = _bind_results(declared, program, sizes)
    if not nested and (mesh_axes := _mesh_axes_of_nested(program, placements, body.device_axes)):
        placements = {**placements, **mesh_axes}
        checker = Checker(placements, declared.name)
    _check_outer_names(program, placements)
    results = checker.results(program.jaxpr, input_names)
    may_be_undeclared = declared.undeclared and not nested
    extra = _check_results(checker, program, out_specs, results, may_be_undeclared)
    specs = (tuple(in_specs), tuple(out_specs))
    return Plan(declared.name, scope, placements, *specs, program, tuple(results), extra, body, nested)


def _check_outer_names(program, placements):
    """Axes of a vmap around the xmap cannot be reached from inside our shard_map."""
    if enclosing_bodies() or not any(p.mesh_axes for p in placements.values()):
        return
    outer = [n for n in collectives_in(program.jaxpr) if n not in placements]
    if outer:
        raise errors.outer_names(outer)


def _device_axes(scope):
    """Mesh axes that nested xmaps may use: the outermost body offers those of the mesh, others pass them on."""
    enclosing = enclosing_bodies()
    if enclosing:
        return enclosing[-1].device_axes
    if scope.mesh is None or _jax.in_manual_region():
        return {}
    return {DeviceAxis(name): size for name, size in scope.mesh.shape.items()}


def _mesh_axes_of_nested(program, placements, device_axes):
    """Placements of mesh axes as named axes, if this xmap or one nested in it uses the mesh."""
    used = any(p.mesh_axes for p in placements.values()) or mentions_any(program.jaxpr, device_axes)
    if not used:
        return {}
    return {axis: Placement(axis, size, (axis.mesh_axis,), (size,)) for axis, size in device_axes.items()}


def _bind_arguments(declared, args):
    leaves = jax.tree_util.tree_leaves_with_path(args)
    in_specs = broadcast_specs("in_axes", declared.in_specs, args, declared.in_source)
    paths = [argument_path(path, "args") for path, _ in leaves]
    shapes = [jnp.shape(leaf) for _, leaf in leaves]
    for spec, shape, path, (_, leaf) in zip(in_specs, shapes, paths, leaves):
        check_argument(spec, shape, path, is_scalar=not shape and jax.typeof(leaf).weak_type)
    sizes = infer_sizes(in_specs, shapes, paths, declared.sizes)
    unknown = [name for name in declared.names if name not in sizes]
    if unknown:
        raise errors.size_not_inferred(unknown)
    return in_specs, sizes


def _placements(declared, sizes, scope):
    enclosing = enclosing_bodies()
    shadowed = [name for name in sizes if any(name in body.sizes for body in enclosing)]
    if shadowed:
        raise errors.shadowed_names(shadowed, _jax.where_now())
    if enclosing and enclosing[-1].scope.mesh != scope.mesh:
        raise errors.mesh_changed()
    ordered = {name: sizes[name] for name in dict.fromkeys([*declared.names, *sizes])}
    placements = place_axes(ordered, declared.resources, scope)
    _check_backend(declared.backend, scope, placements)
    if enclosing[-1].device_axes if enclosing else not _jax.in_manual_region():
        return placements
    # No mesh axis can be had here (we are inside the user's shard_map): each device computes everything.
    return {n: dataclasses.replace(p, mesh_axes=(), mesh_sizes=()) for n, p in placements.items()}


def _check_backend(backend, scope, placements):
    if backend is None or scope.mesh is None or not any(p.mesh_axes for p in placements.values()):
        return
    platform = scope.mesh.devices.flat[0].platform
    if platform != jax.devices(backend)[0].platform:
        raise errors.mesh_of_other_backend(backend, platform)


def _named_types(args, in_specs):
    """The arguments as types with their named dimensions removed."""
    leaves, treedef = jax.tree.flatten(args)
    types = []
    for leaf, spec in zip(leaves, in_specs):
        aval = jax.typeof(leaf)
        named = spec.name_at()
        shape = tuple(size for k, size in enumerate(aval.shape) if k not in named)
        types.append(jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type))
    return jax.tree.unflatten(treedef, types)


def _check_inputs(checker, in_specs, args):
    paths = [argument_path(path, "args") for path, _ in jax.tree_util.tree_leaves_with_path(args)]
    for spec, path in zip(in_specs, paths):
        place = f"an input to an xmapped function {checker.fun} ({path})"
        checker.check_distinct_resources(frozenset(spec.position_of()), lambda place=place: place)


def _bind_results(declared, program, sizes):
    tree = jax.tree.unflatten(program.out_tree, program.out_types)
    if not program.out_types and not jax.tree.leaves(declared.out_specs) and declared.out_specs == ():
        raise errors.no_results()
    specs = declared.out_specs
    if isinstance(specs, list) and isinstance(tree, tuple):
        specs = tuple(specs)
    out_specs = broadcast_specs("out_axes", specs, tree, declared.out_source)
    paths = _result_paths(program)
    for spec, aval, path in zip(out_specs, program.out_types, paths):
        check_result(spec, len(spec.names), aval.shape, path, sizes)
    return out_specs


def _result_paths(program):
    tree = jax.tree.unflatten(program.out_tree, range(len(program.out_types)))
    return [argument_path(path, "result") for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _check_results(checker, program, out_specs, results, may_be_undeclared):
    """Raises what is wrong with the results, and gives the axes that each varies over beyond its spec."""
    undeclared_axes = []
    for spec, names, path in zip(out_specs, results, _result_paths(program)):
        wanted = frozenset(spec.position_of())
        extra = tuple(n for n in checker.placements if n in names - wanted)
        if extra and not (may_be_undeclared and undeclared.can_stay(extra, checker.placements)):
            raise errors.undeclared_output(path, spec.source, extra)
        if extra:
            undeclared.warn(path, extra)
        undeclared_axes.append(extra)
        _check_broadcast(checker, path, names, wanted - names)
        checker.check_distinct_resources(wanted, lambda path=path: f"an output of an xmapped function ({path})")
    return tuple(undeclared_axes)


def _check_broadcast(checker, path, present, broadcast):
    for name in sorted(broadcast, key=str):
        for other in sorted(present, key=str):
            shared = checker.placements[name].resources & checker.placements[other].resources
            for resource in sorted(shared, key=str):
                raise errors.output_broadcast_meets(checker.fun, path, name, resource, other)


# --------------------------------------------------------------------- execution


def execute(plan: Plan, leaves: Sequence[Any], evaluator: Callable[..., Evaluator] = Evaluator) -> list[Any]:
    """Stages 5 and 6: evaluate the program on one device, or on each device of the mesh.

    Args:
      evaluator: makes what evaluates the program; a report on the plan watches with one of its own.
    """
    if not plan.uses_mesh:
        loc = Locality(plan.placements, foreign=_jax.in_manual_region())
        with _explained_types(plan, leaves):
            return _on_device(plan, loc, plan.program.consts, leaves, evaluator)
    if plan.nested:
        return _in_outer_body(plan, leaves, evaluator)
    mesh = plan.scope.mesh
    assert mesh is not None
    loc = Locality(plan.placements, tuple(mesh.axis_names), dict(mesh.shape))
    arg_specs = [partition_spec(spec, plan.placements) for spec in plan.in_specs]
    out_specs = [partition_spec(spec, plan.placements) for spec in plan.out_specs]
    own_axes = [loc.mesh_axes_of(names) for names in plan.undeclared]
    leaving = [undeclared.stacked_spec(axes, spec) if axes else spec for axes, spec in zip(own_axes, out_specs)]

    # XLA's partitioner fails if all arguments are empty and a result is not (as of jax 0.12): one more is kept alive.
    anchor = [] if any(jnp.size(leaf) for leaf in leaves) or not leaves else [jnp.zeros(())]

    def on_device(consts, args, anchor):
        around = dataclasses.replace(loc, foreign=_jax.under_spmd_vmap())
        with _jax.no_spmd_names():
            outs = _on_device(plan, around, consts, args, evaluator)
        outs = [lax.expand_dims(out, [0]) if axes else out for axes, out in zip(own_axes, outs)]
        return lax.optimization_barrier((outs, anchor))[0] if anchor else outs

    consts = list(plan.program.consts)
    whole = PartitionSpec()
    in_specs = ([whole] * len(consts), arg_specs, [whole] * len(anchor))
    staged = _jax.mesh_to_stage(mesh)
    mapped = jax.shard_map(on_device, mesh=staged, in_specs=in_specs, out_specs=leaving)
    with _jax.context_of(mesh):
        args = _jax.resharded(leaves, arg_specs, staged)
        outs = mapped(_jax.replicated(consts, staged), args, _jax.replicated(anchor, staged))
        paths = _result_paths(plan.program)
        return [
            undeclared.each_its_own(out, staged, axes, spec, path) if axes else out
            for out, axes, spec, path in zip(outs, own_axes, out_specs, paths)
        ]


@contextlib.contextmanager
def _explained_types(plan: Plan, leaves: Sequence[Any]) -> Iterator[None]:
    """On Explicit meshes JAX refuses some operations along a sharded dimension; say which axis that is."""
    try:
        yield
    except Exception as error:
        specs = [_jax.explicit_spec(leaf) for leaf in leaves]
        sharded = [(n, entries[k]) for spec, entries in zip(plan.in_specs, specs) for k, n in spec.names if entries[k]]
        if sharded:
            error.add_note(errors.sharded_axis_note(*sharded[0]))
        raise


def partition_spec(spec: AxisSpec, placements: dict[AxisName, Placement]) -> PartitionSpec:
    """``P('x')``, ``P(None, 'x')``, ``P(('y', 'x'))``: an entry for each dimension up to the last mapped one."""
    entries: list[Any] = [None] * spec.needed_rank
    for position, name in spec.names:
        axes = placements[name].mesh_axes
        entries[position] = axes[0] if len(axes) == 1 else axes or None
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _on_device(plan: Plan, loc: Locality, consts: Sequence[Any], leaves: Sequence[Any], evaluator) -> list[Any]:
    """The results of one device from its parts of the arguments."""
    boundary = _without_loops(loc)
    args = [_enter(boundary, leaf, spec) for leaf, spec in zip(leaves, plan.in_specs)]
    outs = _evaluate(plan, loc, consts, args, evaluator)
    types = plan.program.out_types
    return [_leave(boundary, out, spec, t.weak_type) for out, spec, t in zip(outs, plan.out_specs, types)]


def _evaluate(plan, loc, consts, args, evaluator):
    body = plan.body if loc.mesh_axes else dataclasses.replace(plan.body, device_axes={})
    checker = Checker(loc.placements, plan.fun_name)
    ev = evaluator(loc, checker, lambda fun, types: trace_flat(fun, types, body), RepeatedCalls(plan.program.jaxpr))
    values = [positional(c) for c in consts]
    if loop_lengths(loc.placements):
        return evaluate_in_loops(ev, plan.program, values, args)
    return ev.evaluate(plan.program.jaxpr, args, values)


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


# --------------------------------------------------------------- inside another xmap


def _in_outer_body(plan: Plan, leaves: Sequence[Any], evaluator) -> list[Any]:
    """A nested call on the mesh: its mesh axes are named axes of the outermost xmap, which maps them to devices.

    Each device takes its part of the arguments, and the parts of results are gathered again.
    """
    placements = {n: p.on_device_axes() for n, p in plan.placements.items()}
    sizes = plan.body.device_axes
    loc = Locality(placements, tuple(sizes), dict(sizes), nested=True)
    boundary = _without_loops(loc)
    args = [_take_part(boundary, leaf, spec) for leaf, spec in zip(leaves, plan.in_specs)]
    outs = _evaluate(plan, loc, plan.program.consts, args, evaluator)
    types = plan.program.out_types
    return [_gather_parts(boundary, out, spec, t.weak_type) for out, spec, t in zip(outs, plan.out_specs, types)]


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
        data = devices.bind(devices.take_p, data, mesh_axes, sizes)
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
