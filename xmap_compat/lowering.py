"""Stages 6 and 7: the positional function that an xmap call runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from xmap_compat import _jax, errors
from xmap_compat.axis_specs import (
    AxisName,
    AxisSpec,
    argument_path,
    broadcast_specs,
    check_argument,
    check_result,
    infer_sizes,
)
from xmap_compat.loops import evaluate_in_loops, loop_lengths
from xmap_compat.named_program import NamedProgram, trace_flat, trace_program
from xmap_compat.named_shapes import Checker
from xmap_compat.named_values import Locality, NamedValue, conform, positional
from xmap_compat.resources import (
    Body,
    Placement,
    Resources,
    Scope,
    current_scope,
    enclosing_bodies,
    place_axes,
)
from xmap_compat.substitution import Evaluator


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

    def key(self) -> Hashable:
        """Equal for declarations of one function that mean the same."""
        specs = [jax.tree.flatten(s) for s in (self.in_specs, self.out_specs)]
        return (
            *((tuple(leaves), tree) for leaves, tree in specs),
            tuple(self.sizes.items()),
            tuple(self.resources.items()),
            self.backend,
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
    """

    fun_name: str
    scope: Scope
    placements: dict[AxisName, Placement]
    in_specs: tuple[AxisSpec, ...]
    out_specs: tuple[AxisSpec, ...]
    program: NamedProgram
    result_names: tuple[frozenset[AxisName], ...]

    @property
    def uses_mesh(self) -> bool:
        return any(p.mesh_axes for p in self.placements.values())


def run(declared: Declaration, args: tuple[Any, ...]) -> Any:
    """Execute (or, under a trace, stage out) one call on positional arguments."""
    plan = make_plan(declared, args)
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
    body = Body({name: sizes[name] for name in placements}, scope)
    input_names = [frozenset(spec.position_of()) for spec in in_specs]
    program = trace_program(declared.fun, _named_types(args, in_specs), input_names, body)
    out_specs = _bind_results(declared, program, sizes)
    results = checker.results(program.jaxpr, input_names)
    _check_results(checker, program, out_specs, results)
    return Plan(declared.name, scope, placements, tuple(in_specs), tuple(out_specs), program, tuple(results))


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
    if enclosing or _jax.in_manual_region():
        # All mesh axes are taken by the outer xmap (or shard_map): each device computes the inner one whole.
        return {n: dataclasses.replace(p, mesh_axes=(), mesh_sizes=()) for n, p in placements.items()}
    return placements


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


def _check_results(checker, program, out_specs, results):
    for spec, names, path in zip(out_specs, results, _result_paths(program)):
        wanted = frozenset(spec.position_of())
        if names - wanted:
            raise errors.undeclared_output(path, spec.source, [n for n in checker.placements if n in names - wanted])
        _check_broadcast(checker, names, wanted - names)
        checker.check_distinct_resources(wanted, lambda path=path: f"an output of an xmapped function ({path})")


def _check_broadcast(checker, present, broadcast):
    for name in broadcast:
        for other in present:
            for resource in checker.placements[name].resources & checker.placements[other].resources:
                raise errors.output_broadcast_meets(checker.fun, name, resource, other)


# --------------------------------------------------------------------- execution


def execute(plan: Plan, leaves: Sequence[Any]) -> list[Any]:
    """Stages 5 and 6: evaluate the program on one device, or on each device of the mesh."""
    if not plan.uses_mesh:
        return _on_device(plan, Locality(plan.placements), plan.program.consts, leaves)
    mesh = plan.scope.mesh
    assert mesh is not None
    loc = Locality(plan.placements, tuple(mesh.axis_names), dict(mesh.shape))
    arg_specs = [partition_spec(spec, plan.placements) for spec in plan.in_specs]
    out_specs = [partition_spec(spec, plan.placements) for spec in plan.out_specs]

    def on_device(consts, args):
        return _on_device(plan, loc, consts, args)

    consts = list(plan.program.consts)
    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=([PartitionSpec()] * len(consts), arg_specs), out_specs=out_specs
    )
    return mapped(_jax.replicated(consts, mesh), _jax.resharded(leaves, arg_specs, mesh))


def partition_spec(spec: AxisSpec, placements: dict[AxisName, Placement]) -> PartitionSpec:
    """``P('x')``, ``P(None, 'x')``, ``P(('y', 'x'))``: an entry for each dimension up to the last mapped one."""
    entries: list[Any] = [None] * spec.needed_rank
    for position, name in spec.names:
        axes = placements[name].mesh_axes
        entries[position] = axes[0] if len(axes) == 1 else axes or None
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _on_device(plan: Plan, loc: Locality, consts: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """The results of one device from its parts of the arguments."""
    body = Body({name: p.size for name, p in plan.placements.items()}, plan.scope)
    checker = Checker(plan.placements, plan.fun_name)
    ev = Evaluator(loc, checker, lambda fun, types: trace_flat(fun, types, body))
    values = [positional(c) for c in consts]
    args = [_enter(loc, leaf, spec) for leaf, spec in zip(leaves, plan.in_specs)]
    if loop_lengths(plan.placements):
        outs = evaluate_in_loops(ev, plan.program, values, args)
    else:
        outs = ev.evaluate(plan.program.jaxpr, args, values)
    types = plan.program.out_types
    return [_leave(loc, out, spec, t.weak_type) for out, spec, t in zip(outs, plan.out_specs, types)]


def _keeps_dim(place: Placement) -> bool:
    """Whether an argument keeps a dimension for the axis on a device: to be vectorized, or to be cut by loops."""
    return bool(place.loops) or place.local_size != 1


def _enter(loc: Locality, data: Any, spec: AxisSpec) -> NamedValue:
    """Read the positional dimensions that a spec names as local dimensions."""
    named = spec.name_at()
    squeezed = [k for k, n in named.items() if not _keeps_dim(loc.placements[n])]
    dims = tuple(named.get(k) for k in range(jnp.ndim(data)) if k not in squeezed)
    return NamedValue(lax.squeeze(data, squeezed) if squeezed else data, dims, frozenset(named.values()))


def _leave(loc: Locality, value: NamedValue, spec: AxisSpec, weak_type: bool) -> Any:
    """Lay a result out as its spec says: broadcast, transpose, put dimensions of one element back."""
    named = spec.name_at()
    rank = value.dims.count(None) + len(named)
    wanted = tuple(named.get(k) for k in range(rank))
    value = _broadcast_loops(loc, value, wanted)
    squeezed = [k for k, n in enumerate(wanted) if n is not None and not _keeps_dim(loc.placements[n])]
    dims = tuple(n for k, n in enumerate(wanted) if k not in squeezed)
    value = conform(loc, value, dims, frozenset(named.values()))
    data = lax.expand_dims(value.data, squeezed) if squeezed else value.data
    return _jax.with_weak_type(data, weak_type)


def _broadcast_loops(loc, value, wanted):
    """Looped axes that a result does not vary over: broadcast to a whole device's part."""
    missing = [n for n in wanted if n is not None and n not in value.names and loc.placements[n].loops]
    missing = [n for n in missing if _keeps_dim(loc.placements[n])]
    if not missing:
        return value
    data = lax.broadcast(value.data, [loc.placements[n].device_size for n in missing])
    return NamedValue(data, (*missing, *value.dims), value.names)
