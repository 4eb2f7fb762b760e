"""Loop resources: the part of stage 6 that computes an axis chunk by chunk.

An axis on loops is cut into chunks.  Each equation runs within scans over the loops that it varies
over, and no others.
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
from xmap_compat.core.device import DeviceView
from xmap_compat.core.evaluate import Evaluator
from xmap_compat.core.names import Names
from xmap_compat.core.passes import flowing, forward
from xmap_compat.core.placement import Placement
from xmap_compat.core.specs import AxisName
from xmap_compat.core.trace import NamedProgram
from xmap_compat.core.values import NamedValue, common, names_of_each, others, value_of

Loop = Hashable


def loop_lengths(placements: Mapping[AxisName, Placement]) -> dict[Loop, int]:
    """Every loop resource in use with its length, outermost first."""
    lengths: dict[Loop, int] = {}
    for place in placements.values():
        lengths.update(zip(place.loops, place.loop_sizes))
    return lengths


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
    view = ev.view
    loops = loop_lengths(view.placements)
    jaxpr = _jax.inline_calls(program.jaxpr, ev.calls)
    inputs = names_of_each(args)
    names = ev.checker.variables(jaxpr, inputs)
    ev = ev.gathering(jaxpr, inputs, results)
    env = {}
    for variable, value in zip(_jax.input_vars(jaxpr), [*consts, *args], strict=True):
        env[variable] = _chunked(view, value, loops)
    wanted = dict.fromkeys(_variables(jaxpr.outvars))
    nest = _Nest(ev, loops, _loops_of_variables(view, jaxpr, names))
    env = nest.run(_needed(jaxpr, wanted), frozenset(wanted), env, loops)
    joined = {variable: _joined(view, env[variable]) for variable in wanted}
    return [value_of(joined, atom) for atom in jaxpr.outvars]


def _needed(jaxpr, outputs):
    """The equations that outputs and side effects depend on, in order."""
    needed = []
    for eqn, flows in zip(jaxpr.eqns, flowing(jaxpr.eqns, outputs, _jax.has_side_effect)):
        if flows or _jax.has_side_effect(eqn):
            needed.append(eqn)
    return needed


def _variables(atoms):
    return [atom for atom in atoms if not isinstance(atom, _jax.Literal)]


def _loops_of_names(view, names):
    """The loops over which a value with these names varies."""
    return frozenset().union(*(view.placements[name].loops for name in names))


def _loops_of_variables(view, jaxpr, names):
    """The loops in which each variable is computed: those of its axes, and of the variables it is
    computed from.
    """

    def loops_of(variable):
        return _loops_of_names(view, names[variable])

    def computed_in(eqn, operands):
        varying = list(map(loops_of, eqn.outvars))
        return [frozenset().union(*operands, *varying)] * len(varying)

    return forward(jaxpr, list(map(loops_of, jaxpr.invars)), computed_in)


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

    Attributes:
      lengths: every loop, outermost first, with its length.
      loops_of_variable: the loops in which each variable is computed.
    """

    ev: Evaluator
    lengths: Mapping[Loop, int]
    loops_of_variable: Mapping[Any, frozenset[Loop]]

    def run(self, eqns, wanted, env, loops):
        """Evaluate equations within scans over ``loops``, outermost first.

        Returns:
          ``env`` with the results that are in no loop, and those of the others that are in
          ``wanted``.
        """
        unlooped, looped = self._by_loops(eqns, loops)
        env = self._run_here(unlooped, env)
        if not looped:
            return env
        first, *inner = loops
        not_in_first, in_first = self._by_loops(looped, (first,))
        if not_in_first:
            env = self.run(not_in_first, wanted | _all_read(in_first), env, inner)
        if in_first:
            env = self._scan(first, in_first, wanted, env, inner)
        return env

    def _by_loops(self, eqns, loops):
        """The equations that vary over none of the loops, and those that vary over some."""
        varying: list[Any] = []
        unvarying: list[Any] = []
        for eqn in eqns:
            if self._loops_of(eqn).isdisjoint(loops):
                unvarying.append(eqn)
            else:
                varying.append(eqn)
        return unvarying, varying

    def _loops_of(self, eqn):
        variables = _variables([*eqn.invars, *eqn.outvars])
        return frozenset().union(*(self.loops_of_variable[variable] for variable in variables))

    def _run_here(self, eqns, env):
        values = {v: chunked.value for v, chunked in env.items() if not chunked.loops}
        env = dict(env)
        for eqn in eqns:
            ev = self.ev
            if _jax.has_side_effect(eqn):
                ev = dataclasses.replace(ev, iterating=self._loops_of(eqn))
            ev.run([eqn], values)
            for variable in eqn.outvars:
                env[variable] = _Chunked(values[variable], ())
        return env

    def _scan(self, loop, eqns, wanted, env, inner):
        # In the order of the program (that of a set differs between processes).  In a gradient, JAX
        # (to 0.12) drops a callback whose results leave no scan.
        outputs: list[Any] = []
        for eqn in eqns:
            leaves_all = _jax.has_side_effect(eqn)
            outputs.extend(v for v in eqn.outvars if leaves_all or v in wanted)
        read = _all_read(eqns)
        scanned = [v for v, chunked in env.items() if v in read and chunked.loops[:1] == (loop,)]

        def iteration(carry, slices):
            current = dict(env)
            for variable, value in zip(scanned, slices):
                current[variable] = _Chunked(value, env[variable].loops[1:])
            done = self.run(eqns, frozenset(outputs), current, inner)
            return carry, [done[variable] for variable in outputs]

        slices = [env[variable].value for variable in scanned]
        _, stacked = lax.scan(iteration, (), slices, length=self.lengths[loop])
        env = dict(env)
        for variable, chunked in zip(outputs, stacked):
            env[variable] = _Chunked(chunked.value, (loop, *chunked.loops))
        return env


def _all_read(eqns):
    read: set[Any] = set()
    for eqn in eqns:
        read.update(_variables(eqn.invars))
    return read


def _chunked(view: DeviceView, value: NamedValue, loops: Iterable[Loop]) -> _Chunked:
    """Cut the looped dimensions into (loops..., chunk) and move the loops to the front.

    For example, ``f32[12, 5]`` with the dimensions ``('i', None)``, in a loop of 4 iterations, is
    ``f32[4, 3, 5]``: the loop, the chunk of ``'i'``, and the positional dimension.
    """
    shape: list[int] = []
    looped: dict[Loop, int] = {}
    kept: dict[int, AxisName | None] = {}
    for size, name in zip(jnp.shape(value.data), value.dims):
        place = view.placements.get(name)
        if place is None:
            kept[len(shape)] = name
            shape.append(size)
            continue
        looped.update(zip(place.loops, itertools.count(len(shape))))
        shape.extend(place.loop_sizes)
        if place.local_size != 1:
            kept[len(shape)] = name
            shape.append(place.local_size)
    found = common(loops, looped)
    front = [looped[loop] for loop in found]
    data = lax.transpose(lax.reshape(value.data, shape), (*front, *kept))
    return _Chunked(NamedValue(data, tuple(kept.values()), value.names), found)


def _joined(view: DeviceView, chunked: _Chunked) -> NamedValue:
    """Undo ``_chunked`` on a result: all elements that a device has of an axis become one dimension
    again.
    """
    value = chunked.value
    varying = _loops_of_names(view, value.names)
    # Of a result that does not vary over a loop, every iteration has the same copy: take one.
    index = tuple(slice(None) if loop in varying else 0 for loop in chunked.loops)
    data = value.data[index]
    loops = common(chunked.loops, varying)
    # The dimensions of the data.
    every = (*(None for _ in loops), *value.dims)
    order: list[int] = []
    shape: list[int] = []
    dims: list[AxisName | None] = []
    for name, place in view.placements.items():
        if name not in value.names or not place.loops:
            continue
        order.extend(map(loops.index, place.loops))
        if name in every:
            order.append(every.index(name))
        if place.device_size != 1:
            shape.append(place.device_size)
            dims.append(name)
    rest = others(len(every), order)
    data = lax.transpose(data, (*order, *rest))
    data = lax.reshape(data, (*shape, *data.shape[len(order) :]))
    return NamedValue(data, (*dims, *(every[k] for k in rest)), value.names)
