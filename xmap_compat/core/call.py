"""Stages 1 to 4 of a call: the declaration and the arguments become one frozen value before any
evaluation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from xmap_compat import _jax
from xmap_compat.core import errors, undeclared
from xmap_compat.core.arguments import Arguments, Declaration, bind_arguments
from xmap_compat.core.collectives import collective_axes_in
from xmap_compat.core.errors import LEGACY, as_set, quoted, show, subject
from xmap_compat.core.fit import broadcast_specs, check_containers, check_result
from xmap_compat.core.mesh import platform_of
from xmap_compat.core.names import Checker, ValueWords
from xmap_compat.core.nested import axes
from xmap_compat.core.placement import (
    Body,
    MeshAxis,
    Placement,
    Scope,
    current_scope,
    enclosing_bodies,
    place_axes,
    split_over,
)
from xmap_compat.core.specs import AxisName, AxisSpec, argument_path
from xmap_compat.core.trace import NamedProgram, call_without_axes, trace_program
from xmap_compat.core.values import common


@dataclasses.dataclass(frozen=True)
class PlacedCall:
    """All decisions about one call, made before anything is evaluated.

    Attributes:
      scope: the resources in scope at the call.
      placements: the named axes of the user, in order of appearance.
      mesh_placements: mesh axes as named axes, each placed on itself: every ``MeshAxis`` if an
        outermost call, or one nested in it, uses the mesh, and each ``HiddenAxis`` that is
        needed.
      in_specs, out_specs: one spec per argument leaf and per result leaf.
      program: the traced function.
      result_names: the named axes that each result varies over.
      undeclared: for each result, those of its named axes that its spec leaves out: each device
        keeps its own element.
      body: the axes and resources in scope when the program was traced.
      nested: whether the call was made in the body of another xmap.
      first_device_of: the mesh on whose first device a call without mesh resources would run in
        legacy, or None.
      asked: what batching rules answered about operations of the program, for the evaluation.
    """

    fun_name: str
    scope: Scope
    placements: dict[AxisName, Placement]
    mesh_placements: dict[AxisName, Placement]
    in_specs: tuple[AxisSpec, ...]
    out_specs: tuple[AxisSpec, ...]
    program: NamedProgram
    result_names: tuple[frozenset[AxisName], ...]
    undeclared: tuple[tuple[AxisName, ...], ...]
    body: Body
    nested: bool
    first_device_of: Any
    asked: dict[Any, Any]

    @property
    def every_placement(self) -> dict[AxisName, Placement]:
        return {**self.placements, **self.mesh_placements}

    @property
    def uses_mesh(self) -> bool:
        return bool(split_over(self.every_placement.values()))

    @property
    def opens_shard_map(self) -> bool:
        """Whether it runs on the devices of the mesh, and not on those of an enclosing call."""
        return self.uses_mesh and not self.nested


def place_call(declared: Declaration, args: tuple[Any, ...]) -> PlacedCall:
    """Stages 1 to 4 for one call."""
    return place_bound_call(declared, bind_arguments(declared, args))


def place_bound_call(declared: Declaration, arguments: Arguments) -> PlacedCall:
    """Stages 2 to 4 for a call whose arguments have been bound to their specs."""
    placements = checked_placements(declared, arguments)
    scope = current_scope()
    sizes = {name: arguments.sizes[name] for name in placements}
    body = Body(sizes, scope, axes.offered(scope))
    program = trace_program(declared.fun, arguments.types(), arguments.names, body)
    out_specs = tuple(_bind_results(declared, program, arguments.sizes))
    return _checked_call(declared, arguments, placements, body, program, out_specs)


def checked_placements(declared: Declaration, arguments: Arguments) -> dict[AxisName, Placement]:
    """Stage 2: where the axes of a call lie."""
    placements = _placements(declared, arguments, current_scope())
    checker = Checker(placements, declared.name)
    entry = f"an input to an xmapped function {declared.name}"
    for names, path in zip(arguments.names, arguments.paths):
        words = ValueWords(f"{entry} ({path})", entry)
        checker.check_distinct_resources(names, words)
    return placements


def _checked_call(
    declared: Declaration,
    arguments: Arguments,
    placements: dict[AxisName, Placement],
    body: Body,
    program: NamedProgram,
    out_specs: tuple[AxisSpec, ...],
) -> PlacedCall:
    """Stage 4: what varies over what, and whether each result fits its spec; the placed call, if
    all is right.
    """
    nested = bool(enclosing_bodies())
    used = _mesh_axes_used(program, placements)
    mesh_axes = axes.as_placements(body.mesh_axes) if used else {}
    # Only the outermost xmap evaluates mesh axes as named axes.  They are here in a nested one too,
    # so that a value that needs one of them twice is refused.
    checker = Checker(placements | mesh_axes, declared.name, trace_rule=call_without_axes)
    _check_outer_names(program, checker.placements, used)
    hidden = _hidden_axes_needed(declared, checker, program, arguments.names, used)
    checker = dataclasses.replace(checker, placements={**checker.placements, **hidden})
    every = placements | hidden
    entering = undeclared.names_at_entry(program.consts, arguments.names, every)
    results = tuple(checker.results(program.jaxpr, entering))
    extra = _check_results(checker, program, out_specs, results, declared.undeclared and not nested)
    first_device_of = None
    if not (nested or mesh_axes or split_over(every.values())):
        first_device_of = undeclared.mesh_of_results(declared, body.scope.mesh)
    return PlacedCall(
        fun_name=declared.name,
        scope=body.scope,
        placements=placements,
        mesh_placements=hidden if nested else mesh_axes | hidden,
        in_specs=arguments.specs,
        out_specs=out_specs,
        program=program,
        result_names=results,
        undeclared=extra,
        body=body,
        nested=nested,
        first_device_of=first_device_of,
        asked=checker.asked,
    )


def _hidden_axes_needed(declared, checker, program, input_names, mesh_axes):
    """The mesh axes along which arguments may differ although no spec says so, if a collective
    depends on that.
    """
    if not (declared.undeclared and undeclared.exist.value):
        return {}
    hidden = undeclared.hidden_axes(mesh_axes, current_scope().mesh)
    checker = dataclasses.replace(checker, placements=checker.placements | hidden, needed=set())
    entering = undeclared.names_at_entry(program.consts, input_names, checker.placements)
    checker.results(program.jaxpr, entering)
    return {name: hidden[name] for name in common(hidden, checker.needed)}


def _check_outer_names(program, placements, mesh_axes):
    """Raise if the program names an axis of a vmap around the xmap, or if such an axis and a mesh
    axis share a name.

    Our shard_map cannot reach the axis of a vmap.  JAX (to 0.12) confuses a mesh axis with another
    axis of its name.
    """
    if enclosing_bodies() or not split_over(placements.values()):
        return
    taken = frozenset(filter(_jax.is_bound, mesh_axes))
    if taken:
        raise _mesh_axis_around(taken)
    outer = collective_axes_in(program.jaxpr) - placements.keys()
    if not outer:
        return
    for eqn, _ in _jax.walk(program.jaxpr, once=True):
        if isinstance(_jax.read(eqn), _jax.ShardMap):
            raise errors.shard_map_inside(_jax.where_in_user_code(eqn))
    raise errors.outer_names(sorted(outer, key=str))


def _mesh_axes_used(
    program: NamedProgram, placements: Mapping[AxisName, Placement]
) -> frozenset[Hashable]:
    """The mesh axes over which a call, or one nested in it, splits axes."""
    used = split_over(placements.values())
    for name in collective_axes_in(program.jaxpr):
        if isinstance(name, MeshAxis):
            used.add(name.mesh_axis)
    return frozenset(used)


def _placements(declared, arguments, scope):
    sizes = arguments.sizes
    enclosing = enclosing_bodies()
    around: set[AxisName] = set().union(*(body.sizes for body in enclosing))
    shadowed = around & sizes.keys()
    if shadowed:
        raise _shadowed_names(shadowed, _jax.where_now())
    if enclosing and enclosing[-1].scope.mesh != scope.mesh:
        raise _mesh_changed()
    ordered = {name: sizes[name] for name in dict.fromkeys([*declared.names, *sizes])}
    placements = place_axes(ordered, declared.resources, scope, arguments.origins)
    _check_backend(declared.backend, scope, placements)
    if axes.offered(scope):
        return placements
    # No mesh axis is available here (inside the user's shard_map): each device computes everything.
    return {name: place.without_mesh() for name, place in placements.items()}


def _check_backend(backend, scope, placements):
    if backend is None or scope.mesh is None or not split_over(placements.values()):
        return
    platform = platform_of(scope.mesh)
    if platform is not None and platform != jax.devices(backend)[0].platform:
        wanted = f"{platform!r}, as the mesh in scope"
        advice = f"Leave it out, or enter a mesh of {backend!r} devices"
        raise errors.should_be("backend", wanted, backend, ValueError, advice)


def _bind_results(declared, program, sizes):
    specs = declared.out_specs
    tree = jax.tree.unflatten(program.out_tree, program.out_types)
    if specs is None and tree is None and not declared.undeclared:
        raise _nothing_returned()
    if isinstance(specs, list) and isinstance(tree, tuple):
        specs = tuple(specs)
    out_specs = broadcast_specs("out_axes", specs, tree, declared.out_source)
    check_containers("out_axes", out_specs, tree, "result")
    for spec, aval, path in zip(out_specs, program.out_types, _result_paths(program)):
        check_result(spec, aval.shape, path, sizes)
    return out_specs


def _result_paths(program):
    tree = jax.tree.unflatten(program.out_tree, range(len(program.out_types)))
    return [argument_path(path, "result") for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _check_results(checker, program, out_specs, results, may_be_undeclared):
    """Raise if results do not fit their specs; return the axes that each varies over beyond its
    spec.
    """
    undeclared_axes = []
    for spec, names, path in zip(out_specs, results, _result_paths(program)):
        wanted = frozenset(spec.position_of())
        beyond = names - wanted
        beyond -= set(undeclared.hidden_axes_of(beyond))
        extra = common(checker.placements, beyond)
        if extra:
            if not (may_be_undeclared and undeclared.can_stay(extra, checker.placements)):
                raise _undeclared_output(path, spec.source, extra)
            undeclared.warn(path, extra)
        undeclared_axes.append(extra)
        _check_broadcast(checker, path, names, wanted - names)
        words = ValueWords(f"an output of an xmapped function ({path})")
        checker.check_distinct_resources(wanted, words)
    return tuple(undeclared_axes)


def _check_broadcast(checker, path, present, broadcast):
    for name in sorted(broadcast, key=str):
        for other in sorted(present, key=str):
            shared = checker.placements[name].resources & checker.placements[other].resources
            for resource in sorted(shared, key=str):
                raise _output_broadcast_meets(checker.fun, path, name, resource, other)


def partition_spec(spec: AxisSpec, placements: dict[AxisName, Placement]) -> PartitionSpec:
    """``P('x')``, ``P(None, 'x')``, ``P(('y', 'x'))``: an entry for each dimension up to the last
    mapped one.
    """
    entries: list[Any] = [None] * spec.needed_rank
    for position, name in spec.names:
        entries[position] = placements[name].mesh_axes or None
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


# ----------------------------------------------------------------------------- messages


def _shadowed_names(names: Iterable[Hashable], where: str) -> TypeError:
    shadowed = quoted(sorted(names, key=str))
    ours = f"The xmap at {where} has axes {shadowed}, as has an xmap around it. Rename its axes"
    legacy = f"Detected disallowed xmap axis name shadowing at {where} (shadowed axes: {shadowed})"
    return TypeError(f"{ours}{LEGACY}{legacy}")


def _mesh_changed() -> RuntimeError:
    return RuntimeError(
        "The body of an xmap enters another mesh. Enter one mesh around the outermost xmapped call"
        f"{LEGACY}Changing the physical mesh is not allowed inside xmap."
    )


def _nothing_returned() -> ValueError:
    return ValueError(
        "The function returned None (is a `return` missing?), and out_axes is None. "
        "Return an array, or write {} as out_axes of a function that is called for its effects"
    )


def _mesh_axis_around(names: Iterable[Hashable]) -> ValueError:
    return ValueError(
        f"The xmap is split over mesh axes {as_set(names)}, but a transformation around it (such "
        "as vmap with an axis_name) has axes of the same names, which JAX would take for those of "
        "the mesh. Rename one of them"
    )


def _undeclared_output(path: str, spec: Any, extra: Iterable[Hashable]) -> TypeError:
    names = quoted(extra)
    shown = show(spec)
    ours = (
        f"{subject(path)} varies over {names}, but its out_axes {shown} do not name {names}. "
        f"Add {names} to out_axes, or reduce over {names} in the function"
    )
    legacy = (
        f"One of xmap results has an out_axes specification of {shown}, but is actually mapped "
        f"along more axes defined by this xmap call: {', '.join(map(str, extra))}"
    )
    return TypeError(f"{ours}{LEGACY}{legacy}")


def _output_broadcast_meets(
    fun: str, path: str, name: Hashable, resource: Any, present: Hashable
) -> TypeError:
    ours = (
        f"{subject(path)} varies over `{present}` and its out_axes add `{name}`, but both axes are "
        f"mapped to the resource `{resource}`. Map one of them to another resource, or reduce over "
        f"`{present}` in the function"
    )
    legacy = (
        f"One of xmapped function ({fun}) outputs is broadcast along axis `{name}` which is "
        f"assigned to resources `{resource}`, but the output is already partitioned along "
        f"`{resource}`, because its named shape contains `{present}`"
    )
    return errors.resource_conflict(f"{ours}{LEGACY}{legacy}")
