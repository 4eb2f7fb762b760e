"""What the traced calls of a construction tell: its axes, its collectives, and what JAX cannot do."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xmap_compat import _jax
from xmap_compat.core import undeclared
from xmap_compat.core.collectives import COLLECTIVES
from xmap_compat.core.names import Checker
from xmap_compat.core.parameters import mentioned_names
from xmap_compat.core.placement import MeshAxis
from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.construction import Collective, Construction


def learn(
    c: Construction,
    declared: Sequence[Any],
    traced: Sequence[Any],
    is_own: Callable[[str], bool],
) -> None:
    """Note in a construction what its declarations and their traced calls tell."""
    c.axes = frozenset(name for each in declared for name in each.names)
    meshes = {placed.scope.mesh for placed in traced} - {None}
    on_meshes = {axis for mesh in meshes for axis in mesh.axis_names}
    given = {axis for each in declared for of in each.resources.values() for axis in of}
    c.resources = bool(given)
    c.of_one_name = c.axes & {axis for axis in (*on_meshes, *given) if isinstance(axis, str)}
    c.undeclared = any(any(placed.undeclared) for placed in traced)
    found = (each for placed in traced for each in _collectives(placed, is_own))
    c.collectives = [*dict.fromkeys(found)]
    reasons = [words for placed in traced for words in _reasons(placed)]
    if reasons:
        c.refused = reasons[0]
    elif c.problem and not traced:
        c.refused = c.problem


def _collectives(placed: Any, is_own: Callable[[str], bool]) -> Iterator[Collective]:
    """The collectives of a traced body, but for those of derivatives: JAX locates their rules
    where the function is called.
    """
    for eqn, around in _jax.walk(placed.program.jaxpr):
        if eqn.primitive.name not in COLLECTIVES:
            continue
        stack = "/".join(str(each.source_info.name_stack) for each in (*around, eqn))
        if "jvp(" in stack or "transpose(" in stack:
            continue
        frames = [(os.path.realpath(file), *span) for file, _, *span in _jax.user_frames(eqn)]
        own = next((frame for frame in frames if is_own(frame[0])), None)
        mentioned = mentioned_names(eqn.params)
        names = tuple(name for name in mentioned if not isinstance(name, MeshAxis))
        if own is not None and names:
            file, line, column, end_line, end_column = own
            yield Collective(
                file,
                line,
                column,
                end_line,
                end_column,
                inside=frames[0][0],
                primitive=eqn.primitive.name,
                names=names,
            )


def _reasons(placed: Any) -> Iterator[str]:
    """Why JAX cannot do what a call does."""
    loops = [loop for p in placed.placements.values() for loop in p.loops]
    for loop in loops:
        if not isinstance(loop, tuple):
            yield messages.NAMED_LOOP.format(name=loop)
    if "Explicit" in str(getattr(placed.scope.mesh, "axis_types", "")):
        yield messages.EXPLICIT
    for eqn, _ in _jax.walk(placed.program.jaxpr):
        if eqn.params.get("axis_index_groups") is not None and eqn.primitive.name in COLLECTIVES:
            yield messages.GROUPS.format(where=_jax.where_in_user_code(eqn))
    yield from _lacking(placed)


def _lacking(placed: Any) -> list[str]:
    """Collectives over an axis that their operand lacks, and whose mesh axis splits another one of
    the operand.  In JAX they reduce that one, and data that are alike, such as zeros, do not tell.
    """
    every, found = placed.every_placement, list[str]()

    class Lacking(Checker):
        def _collective(self, eqn, inputs):
            held = frozenset().union(*inputs)
            over = [n for n in mentioned_names(eqn.params) if n in every and n not in held]
            for name, other in itertools.product(over, held & every.keys()):
                if {*every[name].mesh_axes} & {*every[other].mesh_axes}:
                    where = self.where(eqn)
                    found.append(messages.LACKS.format(where=where, name=name, other=other))
            return super()._collective(eqn, inputs)

    if not placed.nested and len(every) > 1:
        given = [frozenset(spec.position_of()) for spec in placed.in_specs]
        entering = undeclared.names_at_entry(placed.program.consts, given, every)
        Lacking(every, placed.fun_name).results(placed.program.jaxpr, entering)
    return found
