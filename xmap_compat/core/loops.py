"""Loop resources: the part of stage 6 that computes an axis chunk by chunk.

An axis on loops is cut into chunks.  Each equation runs within scans over the loops that it varies
over, and no others.  One that combines elements of such an axis, as its batching rule says, runs
in none.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.combining import may_combine
from xmap_compat.core.device import DeviceView
from xmap_compat.core.evaluate import Evaluator
from xmap_compat.core.names import Names
from xmap_compat.core.placement import Placement
from xmap_compat.core.specs import AxisName
from xmap_compat.core.trace import NamedProgram
from xmap_compat.core.values import NamedValue, positional

Loop = Hashable


def loop_lengths(placements: Mapping[AxisName, Placement]) -> dict[Loop, int]:
    """Every loop resource in use with its length, outermost first."""
    return {loop: n for p in placements.values() for loop, n in zip(p.loops, p.loop_sizes)}


def evaluate_in_loops(
    ev: Evaluator,
    program: NamedProgram,
    consts: Sequence[NamedValue],
    args: Sequence[NamedValue],
    results: Sequence[Names],
) -> list[NamedValue]:
    """Evaluate a named program whose axes have loops.

    Args:
      args: with local dimensions for all elements that a device has of each axis.
      results: the named axes that each result is broadcast to.

    Returns:
      Results with such dimensions.
    """
    loops = loop_lengths(ev.view.placements)
    jaxpr = _jax.inline_calls(program.jaxpr, ev.calls)
    inputs = [v.names for v in args]
    names, ev = ev.checker.variables(jaxpr, inputs), ev.gathering(jaxpr, inputs, results)
    env = {
        v: _chunked(ev.view, value, loops)
        for v, value in zip(_jax.input_vars(jaxpr), [*consts, *args], strict=True)
    }
    wanted = dict.fromkeys(v for v in jaxpr.outvars if not isinstance(v, _jax.Literal))
    needed = _needed(jaxpr, wanted)
    whole = _whole_equations(ev.view, needed, names)
    nest = _Nest(ev, loops, _loops_of_variables(ev.view, jaxpr, names, whole))
    env = _run_pieces(nest, needed, whole, frozenset(wanted), env)
    joined = {v: _joined(ev.view, env[v]) for v in wanted}
    return [positional(v.val) if isinstance(v, _jax.Literal) else joined[v] for v in jaxpr.outvars]


def _whole_equations(view, eqns, names):
    """The equations with an operation that combines elements of looped axes: they are computed for
    all elements at once.
    """
    looped = frozenset(n for n, place in view.placements.items() if place.loops)
    whole = set()
    for eqn in eqns:
        meets_loop = any(not looped.isdisjoint(names[v]) for v in _variables_read(eqn))
        if meets_loop and _holds_combination(eqn):
            whole.add(eqn)
    return whole


def _holds_combination(eqn):
    return may_combine(eqn) or any(may_combine(inner) for inner, _ in _jax.walk(eqn.params))


def _run_pieces(nest, eqns, whole, wanted, env):
    """Evaluate a program in loops up to each equation that is computed for all elements at once."""
    piece: list[Any] = []
    for k, eqn in enumerate(eqns):
        if eqn in whole:
            later = wanted | _all_read(eqns[k:])
            env = nest.run(piece, later, env, tuple(nest.lengths))
            env = _run_whole(nest, eqn, env)
            piece = []
        else:
            piece.append(eqn)
    return nest.run(piece, wanted, env, tuple(nest.lengths))


def _run_whole(nest, eqn, env):
    view, checker = nest.ev.view, nest.ev.checker
    placements = {n: place.without_loops() for n, place in view.placements.items()}
    without_loops = dataclasses.replace(
        nest.ev,
        view=dataclasses.replace(view, placements=placements),
        checker=dataclasses.replace(checker, placements=placements),
    )
    values = {v: _joined(view, env[v]) for v in _variables_read(eqn)}
    without_loops.run([eqn], values)
    results = {v: _chunked(view, values[v], nest.lengths) for v in eqn.outvars}
    return {**env, **results}


def _needed(jaxpr, outputs):
    """The equations that outputs and side effects depend on, in order."""
    live = set(outputs)
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if _jax.has_side_effect(eqn) or not live.isdisjoint(eqn.outvars):
            kept.append(eqn)
            live.update(_variables_read(eqn))
    return kept[::-1]


def _variables_read(eqn):
    return [v for v in eqn.invars if not isinstance(v, _jax.Literal)]


def _loops_of_variables(view, jaxpr, names, whole):
    """The loops in which each variable is computed: those of its axes, and of the variables it is
    computed from.  Results of the equations in ``whole`` are computed in no loop.
    """
    varying = {
        v: frozenset(loop for n in names[v] for loop in view.placements[n].loops) for v in names
    }
    inside = dict(varying)
    for eqn in jaxpr.eqns:
        if eqn in whole:
            continue
        together = frozenset().union(
            *(inside[v] for v in _variables_read(eqn)), *(varying[v] for v in eqn.outvars)
        )
        inside.update(dict.fromkeys(eqn.outvars, together))
    return inside


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["loops"])
@dataclasses.dataclass(frozen=True)
class _Chunked:
    """A value whose data has leading dimensions for the loops in ``loops``, outermost first."""

    value: NamedValue
    loops: tuple[Loop, ...]


@dataclasses.dataclass(frozen=True)
class _Nest:
    """Runs equations in nested scans, each equation in the loops that it varies over and in no
    other.

    Each runs once for each iteration of the loops that it varies over: a callback is not repeated.
    The gradient of a value that does not vary over a loop reaches custom rules as one sum over its
    iterations.
    """

    ev: Evaluator
    lengths: Mapping[Loop, int]
    inside: Mapping[Any, frozenset[Loop]]

    def run(self, eqns, wanted, env, loops):
        """Evaluate equations within scans over ``loops``; return ``env`` and the variables in
        ``wanted``.
        """
        outer = [e for e in eqns if self._loops_of(e).isdisjoint(loops)]
        env = self._run_here(outer, env)
        eqns = [e for e in eqns if not self._loops_of(e).isdisjoint(loops)]
        if not eqns:
            return env
        loop, *inner = loops
        aside = [e for e in eqns if loop not in self._loops_of(e)]
        within = [e for e in eqns if loop in self._loops_of(e)]
        env = self.run(aside, wanted | _all_read(within), env, tuple(inner)) if aside else env
        return self._scan(loop, within, wanted, env, tuple(inner)) if within else env

    def _loops_of(self, eqn):
        return frozenset().union(*(self.inside[v] for v in (*_variables_read(eqn), *eqn.outvars)))

    def _run_here(self, eqns, env):
        values = {v: chunked.value for v, chunked in env.items() if not chunked.loops}
        for eqn in eqns:
            has_effect = _jax.has_side_effect(eqn)
            ev = (
                dataclasses.replace(self.ev, iterating=self._loops_of(eqn))
                if has_effect
                else self.ev
            )
            ev.run([eqn], values)
        return {**env, **{v: _Chunked(values[v], ()) for e in eqns for v in e.outvars}}

    def _scan(self, loop, eqns, wanted, env, inner):
        # In the order of the program (that of a set differs between processes).  In a gradient, JAX
        # (to 0.12) drops a callback whose results leave no scan.
        outputs = [v for e in eqns for v in e.outvars if v in wanted or _jax.has_side_effect(e)]
        read = _all_read(eqns)
        scanned = {v: c for v, c in env.items() if c.loops[:1] == (loop,) and v in read}
        variables = list(scanned)

        def iteration(carry, slices):
            current = {v: _Chunked(x, scanned[v].loops[1:]) for v, x in zip(variables, slices)}
            done = self.run(eqns, frozenset(outputs), {**env, **current}, inner)
            return carry, [done[v] for v in outputs]

        _, stacked = lax.scan(
            iteration, (), [scanned[v].value for v in variables], length=self.lengths[loop]
        )
        return {**env, **{v: _Chunked(c.value, (loop, *c.loops)) for v, c in zip(outputs, stacked)}}


def _all_read(eqns):
    return frozenset(v for eqn in eqns for v in _variables_read(eqn))


def _joined(view, chunked):
    """A value with all elements that a device has of each axis."""
    return _join(view, *_first_of_equal(view, chunked))


def _first_of_equal(view, chunked):
    """Drop the leading dimension of loops that a result does not vary over: each iteration computed
    the same value.
    """
    value, loops = chunked.value, chunked.loops
    varying = {loop for n in value.names for loop in view.placements[n].loops}
    index = tuple(slice(None) if loop in varying else 0 for loop in loops)
    return dataclasses.replace(value, data=value.data[index]), tuple(
        loop for loop in loops if loop in varying
    )


def _chunked(view: DeviceView, value: NamedValue, loops: Iterable[Loop]) -> _Chunked:
    """Cut the looped dimensions into (loops..., chunk) and move the loops to the front."""
    shape: list[int] = []
    looped: dict[Loop, int] = {}
    kept: dict[int, AxisName | None] = {}
    for size, name in zip(jnp.shape(value.data), value.dims):
        place = view.placements[name] if name is not None else None
        if place is not None and place.loops:
            looped.update(zip(place.loops, itertools.count(len(shape))))
            shape.extend(place.loop_sizes)
            size = place.local_size
        if place is None or not place.loops or size != 1:
            kept[len(shape)] = name
            shape.append(size)
    found = [loop for loop in loops if loop in looped]
    data = lax.transpose(
        _jax.reshaped(value.data, shape), (*(looped[loop] for loop in found), *kept)
    )
    return _Chunked(NamedValue(data, tuple(kept.values()), value.names), tuple(found))


def _join(view: DeviceView, value: NamedValue, loops: tuple[Loop, ...]) -> NamedValue:
    """Undo ``_chunked`` on a result: all elements that a device has of an axis become one dimension
    again.
    """
    lead = len(loops)
    order: list[int] = []
    shape: list[int] = []
    dims: list[AxisName | None] = []
    for name, place in view.placements.items():
        if name not in value.names or not place.loops:
            continue
        order.extend(loops.index(loop) for loop in place.loops)
        if name in value.dims:
            order.append(lead + value.dims.index(name))
        if place.device_size != 1:
            shape.append(place.device_size)
            dims.append(name)
    rest = [lead + k for k in range(len(value.dims)) if lead + k not in order]
    data = lax.transpose(value.data, (*order, *rest))
    data = _jax.reshaped(data, (*shape, *data.shape[len(order) :]))
    return NamedValue(data, (*dims, *(value.dims[k - lead] for k in rest)), value.names)
