"""Find the gathers that are better typed as varying, from the uses of their results.

A gathered value is equal on all devices.  If its type says so, it is cast to varying where it meets a varying value,
and the transpose of that cast is an all-reduce.  If its type does not say so, the transpose of the gather is a
reduce-scatter of half the bytes, which suits the weights of FSDP.  But then all its uses must vary over the
gathered mesh axes, and a value that shrinks before it meets others is summed whole, as in ``all_gather(x).sum(0) * x``.
A backward pass over each body finds where the uses of every value vary, and how much is cast on the way.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from xmap_compat import _jax
from xmap_compat.core.collectives import COLLECTIVES, names_used
from xmap_compat.core.device import DeviceView
from xmap_compat.core.names import Checker, Names, read_names, scan_carry_names
from xmap_compat.core.parameters import axis_names
from xmap_compat.core.specs import AxisName


class Casts(NamedTuple):
    """How many elements are cast to vary over a mesh axis because of a value, on one device.

    Attributes:
      late: those of results of the value, where they meet varying values; needed if the value itself does not vary.
      early: those of values that it meets before; needed if the value varies.
    """

    late: float
    early: float


# The cost for each mesh axis over which a value varies sooner or later; None where the value itself is cast.
Use = Mapping[Any, Casts | None]


class _Origin(enum.Enum):
    """The sources of a value: constants alone, gathered values too, or other arguments only."""

    CONSTANT = enum.auto()
    GATHERED = enum.auto()
    OTHER = enum.auto()


class _Value(NamedTuple):
    """A variable: its named axes, and its elements on a device.

    Attributes:
      cost: how many elements are cast if it meets a varying value: none without a derivative, or if it varies too.
    """

    names: Names
    elements: int
    origin: _Origin
    cost: int


def varying_gathers(
    view: DeviceView, checker: Checker, jaxpr: Any, inputs: Sequence[Names], results: Sequence[Names]
) -> frozenset[Any]:
    """The equations of a program whose gathers are better typed as varying.

    Args:
      inputs: the named axes of the program's inputs.
      results: the named axes that its results are broadcast to.
    """
    if not any(view.mesh_axes_of(_gathered(eqn)) for eqn in _gathers_in(jaxpr)):
        return frozenset()
    uses = _Uses(view, checker)
    uses.of_inputs(jaxpr, inputs, list(map(uses.cast_to, results)), [_Origin.OTHER] * len(inputs))
    return frozenset(eqn for eqn, better in uses.chosen.items() if better)


def _gathered(eqn: Any) -> tuple[AxisName, ...]:
    """The axes that an equation gathers into a result that is equal for all their elements."""
    groups = eqn.params.get("axis_index_groups")
    return axis_names(eqn.params) if eqn.primitive.name in ("all_gather", "device_gather") and groups is None else ()


def _gathers_in(held: Any) -> Iterator[Any]:
    """Every gather of a program, or of the bodies in an equation's parameters, once."""
    return (eqn for eqn, _ in _jax.walk(held, once=True) if _gathered(eqn))


@dataclasses.dataclass(frozen=True)
class _Uses:
    """The backward pass; ``chosen`` says whether each gather had better vary, wherever its body is called."""

    view: DeviceView
    checker: Checker
    chosen: dict[Any, bool] = dataclasses.field(default_factory=dict)
    _known: dict[Any, list[Use]] = dataclasses.field(default_factory=dict)

    def of_inputs(
        self, jaxpr: Any, inputs: Sequence[Names], results: Sequence[Use], origins: Sequence[_Origin]
    ) -> list[Use]:
        """The uses of a body's inputs, from those of its results."""
        key = (id(jaxpr), *inputs, *(frozenset(use.items()) for use in results), *origins)
        if key not in self._known:
            self._known[key] = self._of_inputs(jaxpr, inputs, results, origins)
        return self._known[key]

    def _of_inputs(self, jaxpr, inputs, results, origins):
        body, _ = _jax.open_jaxpr(jaxpr)
        variables = _jax.input_vars(body)
        own = variables[len(variables) - len(inputs) :]
        names, origin = self.checker.variables(jaxpr, inputs), _origins(body, dict(zip(own, origins)))

        def value(atom):
            return self._value(atom.aval, read_names(names, atom), _origin(origin, atom))

        uses: dict[Any, list[Use]] = collections.defaultdict(list)
        found = list(zip(body.outvars, results))
        for eqn in reversed([None, *body.eqns]):
            for atom, use in found:
                if not isinstance(atom, _jax.Literal):
                    uses[atom].append(use)
            if eqn is not None:
                after = [self._together(value(v), uses[v]) for v in eqn.outvars]
                operands, outs = (list(map(value, atoms)) for atoms in (eqn.invars, eqn.outvars))
                found = list(zip(eqn.invars, self._of_operands(eqn, operands, outs, after), strict=True))
        return [self._together(value(v), uses[v]) for v in own]

    def _value(self, aval, names, origin):
        local = (self.view.placements[n].local_size for n in self.view.own(names))
        elements = math.prod(getattr(aval, "shape", ())) * math.prod(local)
        smooth = jnp.issubdtype(getattr(aval, "dtype", None), jnp.inexact)
        return _Value(names, elements, origin, elements if smooth and origin is _Origin.OTHER else 0)

    def cast_to(self, names: Names) -> Use:
        """The use of a value that is cast to vary over all of the names."""
        return dict.fromkeys(self.view.mesh_axes_of(self.view.own(names)))

    def _together(self, value: _Value, uses: Sequence[Use]) -> dict[Any, Casts]:
        """All uses of a value together: the axes over which all of them vary; one cast serves several uses."""
        found = {}
        for axis in self.view.mesh_axes:
            if all(axis in use for use in uses):
                later = [cost for use in uses if (cost := use[axis]) is not None]
                late = sum(cost.late for cost in later) + (value.elements if len(later) < len(uses) else 0)
                found[axis] = Casts(late, sum(cost.early for cost in later))
        return found

    def _of_operands(self, eqn, operands, outs, after) -> Sequence[Use]:
        """The use of each operand of an equation, from the uses of its results."""
        structured = _jax.read(eqn)
        rule = _STRUCTURED.get(type(structured))
        if rule is not None:
            return rule(self, structured, operands, outs, after)
        if _gathered(eqn):
            return self._of_gathered(eqn, operands[0], outs[0], *after)
        together = self.cast_to(frozenset().union(*(v.names for v in operands)))
        if eqn.primitive.name in COLLECTIVES:
            joint = COLLECTIVES[eqn.primitive.name].joint
            return [together] * len(operands) if joint else [self.cast_to(v.names) for _, v in zip(operands, outs)]
        if structured is None and not _jax.has_side_effect(eqn) and not names_used(eqn):
            return _of_ordinary(operands, after, together)
        for body in _jax.subjaxprs(eqn.params):
            self.leave(body)
        return [{}] * len(operands)

    def leave(self, jaxpr: Any) -> None:
        """Let a body gather as invarying."""
        self.chosen.update(dict.fromkeys(_gathers_in(jaxpr), False))

    def _of_gathered(self, eqn, operand, out, after):
        axes = self.view.mesh_axes_of(n for n in _gathered(eqn) if n in operand.names)
        if axes and set(axes) <= after.keys():
            late, early = (max(after[axis][k] for axis in axes) for k in (0, 1))
            better = out.elements + 2 * early < 2 * late
        else:
            better = False
        self.chosen[eqn] = better and self.chosen.get(eqn, True)
        return [after]


def _origins(body, found):
    for eqn in body.eqns:
        kinds = {_origin(found, v) for v in eqn.invars}
        if _Origin.GATHERED in kinds or _gathered(eqn) or any(True for _ in _gathers_in(eqn.params)):
            kind = _Origin.GATHERED
        else:
            kind = _Origin.OTHER if _Origin.OTHER in kinds else _Origin.CONSTANT
        found.update(dict.fromkeys(eqn.outvars, kind))
    return found


def _origin(found, atom):
    return _Origin.CONSTANT if isinstance(atom, _jax.Literal) else found.get(atom, _Origin.CONSTANT)


def _of_ordinary(operands, after, together):
    """Results vary where an operand does, and otherwise where their uses do."""
    ahead = [axis for axis in after[0] if axis not in together and all(axis in use for use in after)] if after else []
    met = sum(v.cost for v in operands)
    costs = {axis: [sum(use[axis][k] for use in after) for k in (0, 1)] for axis in ahead}
    return [
        {**together, **{axis: Casts(late, early + met - v.cost) for axis, (late, early) in costs.items()}}
        for v in operands
    ]


# --------------------------------------------------------------- structured equations


def _called(uses: _Uses, call: Any, operands: Sequence[_Value], outs: Sequence[_Value], after: Sequence[Use]):
    return uses.of_inputs(call.body, [v.names for v in operands], after, [v.origin for v in operands])


def _scan(uses: _Uses, scan: _jax.Scan, operands: Sequence[_Value], outs: Sequence[_Value], after: Sequence[Use]):
    """Values that enter or leave an iteration are cast in each; the carry is cast before the first, and after each."""
    names = [v.names for v in operands]
    carry = scan_carry_names(uses.checker, scan, names)
    carried = list(map(uses.cast_to, carry))
    begin, end = scan.num_consts, scan.num_consts + scan.num_carry
    names[begin:end] = carry
    in_a_turn = [*carried, *(_times(use, 1 / (scan.length or 1)) for use in after[scan.num_carry :])]
    inside = uses.of_inputs(scan.body, names, in_a_turn, [v.origin for v in operands])
    inside = [_times(use, scan.length) for use in inside]
    return [*inside[:begin], *carried, *inside[end:]]


def _custom(
    uses: _Uses, call: _jax.CustomJvp, operands: Sequence[_Value], outs: Sequence[_Value], after: Sequence[Use]
):
    """Only the type of its rule is known: that of an operation, each of whose results varies by itself."""
    uses.leave(call.body)
    return _of_ordinary(operands, after, uses.cast_to(frozenset.intersection(*(v.names for v in outs))) if outs else {})


def _times(use, turns):
    return {axis: cost and Casts(cost.late * turns, cost.early * turns) for axis, cost in use.items()}


def _cond(uses: _Uses, cond: _jax.Cond, operands: Sequence[_Value], outs: Sequence[_Value], after: Sequence[Use]):
    """Operands are cast first to the index's names; results are cast to the names of any branch's results."""
    index, *operands = operands
    results, before = [uses.cast_to(v.names) for v in outs], uses.cast_to(index.names)
    names, origins = [v.names for v in operands], [v.origin for v in operands]
    branches = [uses.of_inputs(branch, names, results, origins) for branch in cond.branches]
    return [{}, *({**uses._together(v, inside), **before} for v, *inside in zip(operands, *branches))]


_STRUCTURED: dict[type, Callable[..., Sequence[Use]]] = {
    _jax.Call: _called,
    _jax.Checkpoint: _called,
    _jax.Scan: _scan,
    _jax.Cond: _cond,
    _jax.CustomJvp: _custom,
}
