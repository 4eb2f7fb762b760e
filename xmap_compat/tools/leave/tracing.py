"""What the traced calls of an xmapped function say: its axes, its collectives, and what JAX cannot
do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from xmap_compat import _jax
from xmap_compat.core import undeclared
from xmap_compat.core.collectives import COLLECTIVES
from xmap_compat.core.mesh import SerialLoop
from xmap_compat.core.names import Checker
from xmap_compat.core.parameters import mentioned_names
from xmap_compat.core.placement import MeshAxis
from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.xmap_calls import Span, XmapCall


def learn(
    c: XmapCall,
    declared: Sequence[Any],
    traced: Sequence[Any],
    users_file: Callable[[str], str],
) -> None:
    """Note in an xmap call what its declarations and their traced calls say."""
    resources: set[Any] = set()
    for each in declared:
        c.axes |= {*each.names}
        resources.update(*each.resources.values())
    c.has_mesh_axes = any(not isinstance(each, SerialLoop) for each in resources)
    for placed in traced:
        if placed.scope.mesh is not None:
            resources.update(placed.scope.mesh.axis_names)
        c.undeclared = c.undeclared or any(placed.undeclared)
        c.is_coarse = c.is_coarse or _is_coarse(placed)
        c.collectives += _collectives(placed, users_file)
        c.refused = c.refused or next(_reasons(placed), "")
    c.named_like_mesh_axes = c.axes & {axis for axis in resources if isinstance(axis, str)}


def _is_coarse(placed: Any) -> bool:
    for eqn, _ in _jax.walk(placed.program.jaxpr):
        for variable in eqn.outvars:
            dtype = getattr(variable.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
                return True
    return False


def _collectives(placed: Any, users_file: Callable[[str], str]) -> Iterator[tuple[str, Span]]:
    """The calls in which the collectives of a body lie, but for those of derivatives: JAX locates
    their rules where the function is called.
    """
    for eqn, around in _jax.walk(placed.program.jaxpr):
        if eqn.primitive.name not in COLLECTIVES or not _names_an_axis(eqn):
            continue
        stack = "/".join(str(each.source_info.name_stack) for each in (*around, eqn))
        if "jvp(" in stack or "transpose(" in stack:
            continue
        for path, _, *span in _jax.user_frames(eqn):
            file = users_file(path)
            if file:
                yield file, tuple(span)
                break


def _names_an_axis(eqn: Any) -> bool:
    """Whether a collective is over an axis of the program, and not only over mesh axes."""
    names = mentioned_names(eqn.params)
    return not all(isinstance(name, MeshAxis) for name in names)


def _reasons(placed: Any) -> Iterator[str]:
    """Why JAX cannot do what a call does."""
    for placement in placed.placements.values():
        for loop in placement.loops:
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
    the operand.  In JAX they reduce that one, and data that are alike, such as zeros, do not show
    it.
    """
    every = placed.every_placement
    found: list[str] = []

    class Lacking(Checker):
        def _collective(self, eqn, inputs):
            held = every.keys() & frozenset().union(*inputs)
            lacks = every.keys() & {*mentioned_names(eqn.params)} - held
            for name, other in itertools.product(lacks, held):
                if {*every[name].mesh_axes} & {*every[other].mesh_axes}:
                    where = self.where(eqn)
                    found.append(messages.LACKS.format(where=where, name=name, other=other))
            return super()._collective(eqn, inputs)

    if not placed.nested and len(every) > 1:
        given = [frozenset(spec.position_of()) for spec in placed.in_specs]
        entering = undeclared.names_at_entry(placed.program.consts, given, every)
        Lacking(every, placed.fun_name).results(placed.program.jaxpr, entering)
    return found
