"""Loop resources: the part of stage 6 that computes an axis chunk by chunk.

An axis placed on loops is cut into chunks on each device.  Results are grouped by the loops that
they vary over; each group is one nest of scans around the equations that it needs, so
that what does not vary over a loop is computed once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from xmap_compat import _jax
from xmap_compat.axis_specs import AxisName
from xmap_compat.named_program import NamedProgram
from xmap_compat.named_shapes import read_names
from xmap_compat.named_values import Locality, NamedValue, positional
from xmap_compat.resources import Placement
from xmap_compat.substitution import Evaluator

Loop = Hashable


def loop_lengths(placements: Mapping[AxisName, Placement]) -> dict[Loop, int]:
    """Every loop resource in use with its length, outermost first."""
    return {loop: n for p in placements.values() for loop, n in zip(p.loops, p.loop_sizes)}


def evaluate_in_loops(
    ev: Evaluator, program: NamedProgram, consts: Sequence[NamedValue], args: Sequence[NamedValue]
) -> list[NamedValue]:
    """Evaluate a named program whose axes have loops.

    Args:
      args: with local dimensions of a whole device's part of each axis.

    Returns:
      Results of the same kind.
    """
    loops = loop_lengths(ev.loc.placements)
    names = ev.checker.variables(program.jaxpr, [v.names for v in args])
    variables = _jax.input_vars(program.jaxpr)
    given = dict(zip(variables, [*consts, *args], strict=True))
    results: dict[Any, NamedValue] = {}
    for group in _groups(ev.loc, program.jaxpr, names, loops):
        values = _run_group(ev, group, {v: given[v] for v in group.inputs if v in given}, loops)
        results.update(zip(group.outputs, values, strict=True))
    return [positional(v.val) if isinstance(v, _jax.Literal) else results[v] for v in program.jaxpr.outvars]


@dataclasses.dataclass(frozen=True)
class _Group:
    """Equations that one nest of scans runs: what some results, or some side effects, need."""

    loops: tuple[Loop, ...]
    eqns: tuple[Any, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


def _groups(loc, jaxpr, names, loops):
    """Results and side effects, by the loops that anything needed for them varies over."""

    def loops_of(eqns, variables):
        atoms = [*variables, *(v for eqn in eqns for v in (*eqn.invars, *eqn.outvars))]
        used = {loop for v in atoms for n in read_names(names, v) for loop in loc.placements[n].loops}
        return tuple(loop for loop in loops if loop in used)

    variables = list(dict.fromkeys(v for v in jaxpr.outvars if not isinstance(v, _jax.Literal)))
    needed = {v: _needed(jaxpr, [v], [])[0] for v in variables}
    key_of = _keep_side_effects_together(needed, {v: loops_of(needed[v], [v]) for v in variables}, loops)
    outputs: dict[tuple, list] = {}
    for v in variables:
        outputs.setdefault(key_of[v], []).append(v)
    effects: dict[tuple, list] = {}
    done = {id(eqn) for eqns in needed.values() for eqn in eqns}
    for eqn in jaxpr.eqns:
        if not _jax.has_side_effect(eqn) or id(eqn) in done:
            continue
        key = loops_of(_needed(jaxpr, [], [eqn])[0], [])
        effects.setdefault(key, []).append(eqn)
        outputs.setdefault(key, [])
    for key, outs in outputs.items():
        eqns, inputs = _needed(jaxpr, outs, effects.get(key, []))
        yield _Group(key, eqns, inputs, tuple(outs))


def _keep_side_effects_together(needed, key_of, loops):
    """Results that need one callback are computed in one group, so that it runs once."""
    effectful = {id(e) for eqns in needed.values() for e in eqns if _jax.has_side_effect(e)}
    for effect in effectful:
        sharing = [v for v, eqns in needed.items() if any(id(e) == effect for e in eqns)]
        used = {loop for v in sharing for loop in key_of[v]}
        key_of = {**key_of, **dict.fromkeys(sharing, tuple(loop for loop in loops if loop in used))}
    return key_of


def _needed(jaxpr, outputs, effectful):
    """The equations that outputs and side effects depend on, and the variables they read first."""
    live = set(outputs)
    kept = []
    wanted = {id(eqn) for eqn in effectful}
    for eqn in reversed(jaxpr.eqns):
        if id(eqn) in wanted or any(v in live for v in eqn.outvars):
            kept.append(eqn)
            live.difference_update(eqn.outvars)
            live.update(v for v in eqn.invars if not isinstance(v, _jax.Literal))
    return tuple(reversed(kept)), tuple(live)


def _run_group(ev, group, given, loops):
    chunked = {v: _cut(ev.loc, value, loops) for v, value in given.items()}

    def body(env):
        env = {v: chunked.value for v, chunked in env.items()}
        ev.run(group.eqns, env)
        return [env[v] for v in group.outputs]

    outs = _nest(body, group.loops, chunked, loops)
    return [_join(ev.loc, *_first_of_equal(ev.loc, out, group.loops)) for out in outs]


def _first_of_equal(loc, value, loops):
    """Drop the leading dimension of loops that a result does not vary over: it was computed equal in each turn."""
    own = {loop for n in value.names for loop in loc.placements[n].loops}
    index = tuple(slice(None) if loop in own else 0 for loop in loops)
    return dataclasses.replace(value, data=value.data[index]), tuple(loop for loop in loops if loop in own)


@dataclasses.dataclass(frozen=True)
class _Chunked:
    """A value whose data has leading dimensions for the loops in ``loops``, outermost first."""

    value: NamedValue
    loops: tuple[Loop, ...]


def _nest(body, remaining, env, loops):
    """Scan over the remaining loops; results get one leading dimension for each."""
    if not remaining:
        return body(env)
    loop, *inner = remaining
    scanned = {v: c for v, c in env.items() if c.loops and c.loops[0] == loop}
    variables = list(scanned)

    def step(carry, slices):
        current = dict(env)
        for v, value in zip(variables, slices):
            current[v] = _Chunked(value, scanned[v].loops[1:])
        return carry, _nest(body, inner, current, loops)

    _, outs = lax.scan(step, (), [scanned[v].value for v in variables], length=loops[loop])
    return outs


def _cut(loc: Locality, value: NamedValue, loops) -> _Chunked:
    """Cut the looped dimensions into (loops..., chunk) and move the loops to the front."""
    shape, labels = [], []
    for size, name in zip(jnp.shape(value.data), value.dims):
        place = loc.placements[name] if name is not None else None
        if place is None or not place.loops:
            shape.append(size)
            labels.append(("keep", name))
            continue
        shape.extend(place.loop_sizes)
        labels.extend(("loop", loop) for loop in place.loops)
        if place.local_size != 1:
            shape.append(place.local_size)
            labels.append(("keep", name))
    data = lax.reshape(value.data, shape)
    mine = [loop for loop in loops if ("loop", loop) in labels]
    front = [labels.index(("loop", loop)) for loop in mine]
    rest = [k for k, (kind, _) in enumerate(labels) if kind == "keep"]
    dims = tuple(labels[k][1] for k in rest)
    return _Chunked(NamedValue(lax.transpose(data, (*front, *rest)), dims, value.names), tuple(mine))


def _join(loc: Locality, value: NamedValue, loops: tuple[Loop, ...]) -> NamedValue:
    """Undo ``_cut`` on a result: each axis gets its loops back, and a whole device's part as one dimension."""
    lead = len(loops)
    order: list[int] = []
    shape: list[int] = []
    dims: list[AxisName | None] = []
    for name in _looped_names(loc, value):
        place = loc.placements[name]
        order.extend(loops.index(loop) for loop in place.loops)
        if name in value.dims:
            order.append(lead + value.dims.index(name))
        if place.device_size != 1:
            shape.append(place.device_size)
            dims.append(name)
    rest = [lead + k for k in range(len(value.dims)) if lead + k not in order]
    data = lax.transpose(value.data, (*order, *rest))
    data = lax.reshape(data, (*shape, *data.shape[len(order) :]))
    return NamedValue(data, (*dims, *(value.dims[k - lead] for k in rest)), value.names)


def _looped_names(loc, value):
    return [n for n in loc.placements if n in value.names and loc.placements[n].loops]
