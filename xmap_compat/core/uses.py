"""Find the gathers that are better typed as varying, from the uses of their results.

A gathered value is equal on all devices.  If its type says so, the value is cast to varying where
it meets a varying value, and the transpose of that cast is an all-reduce.  If its type is varying,
the transpose of the gather is a reduce-scatter of half the bytes, which suits the weights of FSDP.
But then all uses of the value must vary over the gathered mesh axes, and its whole cotangent is
sent even if the value shrinks first, as in ``all_gather(x).sum(0) * x``. A backward pass over each
body finds over which mesh axes the uses of every value vary, and how much is cast there.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from xmap_compat import _jax
from xmap_compat.core.bodies import bodies_of, carry_of
from xmap_compat.core.collectives import COLLECTIVES, has_groups, names_used
from xmap_compat.core.device import DeviceView
from xmap_compat.core.names import Checker, Names, flow_through
from xmap_compat.core.parameters import axis_names
from xmap_compat.core.passes import backward, fact_of
from xmap_compat.core.specs import AxisName

# How a value is used: the mesh axes over which all that is made from it is cast to vary, each with
# the number of elements that are cast on one device.  None: the value itself is cast, whole.
# ``x + y``, where y varies over 'm', uses x as ``{'m': None}``; ``x.sum() + y`` as ``{'m': 1}``.
CastUse = Mapping[Any, float | None]


class _Value(NamedTuple):
    """A variable: its named axes, and its elements on a device."""

    names: Names
    elements: int


def _names_of(values: Sequence[_Value]) -> list[Names]:
    return [value.names for value in values]


def varying_gathers(
    view: DeviceView,
    checker: Checker,
    jaxpr: Any,
    inputs: Sequence[Names],
    results: Sequence[Names],
) -> frozenset[Any]:
    """The equations of a program whose gathers are better typed as varying.

    Args:
      inputs: the named axes of the program's inputs.
      results: the named axes that its results are broadcast to.
    """
    gathered = map(_gathered, _gathers_in(jaxpr))
    if not any(map(view.mesh_axes_of, gathered)):
        return frozenset()
    uses = _Uses(view, checker)
    uses.of_inputs(jaxpr, inputs, list(map(uses.cast_to, results)))
    return frozenset(eqn for eqn, better in uses.chosen.items() if better)


def _gathered(eqn: Any) -> tuple[AxisName, ...]:
    """The axes that an equation gathers into a result that is equal for all their elements."""
    row = COLLECTIVES.get(eqn.primitive.name)
    if row is None or not row.gathers or has_groups(eqn.params):
        return ()
    return axis_names(eqn.params)


def _gathers_in(held: Any) -> Iterator[Any]:
    """Every gather of a program, or of the bodies in an equation's parameters, once."""
    return (eqn for eqn, _ in _jax.walk(held, once=True) if _gathered(eqn))


@dataclasses.dataclass(frozen=True)
class _Uses:
    """The backward pass; ``chosen`` says for each gather whether a varying type is better in all
    calls of its body.
    """

    view: DeviceView
    checker: Checker
    chosen: dict[Any, bool] = dataclasses.field(default_factory=dict)
    _known: dict[Any, Sequence[CastUse]] = dataclasses.field(default_factory=dict)

    def of_inputs(
        self, jaxpr: Any, inputs: Sequence[Names], results: Sequence[CastUse]
    ) -> Sequence[CastUse]:
        """The uses of a body's inputs, from those of its results."""
        key = (jaxpr, *inputs, *(frozenset(use.items()) for use in results))
        if key in self._known:
            return self._known[key]
        body, _ = _jax.open_jaxpr(jaxpr)
        names = self.checker.variables(jaxpr, inputs)

        def value(atom):
            return self._value(atom.aval, fact_of(names, atom))

        def of_operands(eqn, uses):
            operands = list(map(value, eqn.invars))
            outs = list(map(value, eqn.outvars))
            return self._of_operands(eqn, operands, outs, list(map(self._together, outs, uses)))

        uses = backward(body.eqns, zip(body.outvars, results), of_operands)
        of_inputs = [self._together(value(variable), uses[variable]) for variable in body.invars]
        self._known[key] = of_inputs
        return of_inputs

    def _value(self, aval, names):
        elements = math.prod(getattr(aval, "shape", ()))
        for name in self.view.bound(names):
            elements *= self.view.placements[name].local_size
        return _Value(names, elements)

    def cast_to(self, names: Names) -> CastUse:
        """The use of a value that is cast to vary over all of the names."""
        return dict.fromkeys(self.view.mesh_axes_of(self.view.bound(names)))

    def _together(self, value: _Value, uses: Sequence[CastUse]) -> dict[Any, float]:
        """All uses of a value together: the axes that all of them are cast to; one cast serves
        several uses.
        """
        together = {}
        for axis in self.view.mesh_sizes:
            if all(axis in use for use in uses):
                casts = [use[axis] for use in uses]
                together[axis] = sum(filter(None, casts))
                if None in casts:
                    together[axis] += value.elements
        return together

    def _of_operands(self, eqn, operands, outs, after) -> Sequence[CastUse]:
        """The use of each operand of an equation, from the uses of its results."""
        held = _jax.read(eqn)
        if isinstance(held, (_jax.Call, _jax.Checkpoint, _jax.Scan, _jax.Cond)):
            return self._of_bodies(held, operands, after)
        if isinstance(held, _jax.CustomJvp):
            # Only the type of its rule is known: each result varies by itself.
            self.leave_invarying(held.body)
            return _of_ordinary(operands, after, self._cast_by_all(outs))
        if _gathered(eqn):
            return self._of_gathered(eqn, operands[0], outs[0], *after)
        together = self.cast_to(frozenset().union(*_names_of(operands)))
        row = COLLECTIVES.get(eqn.primitive.name)
        if row is not None and row.joint:
            return [together] * len(operands)
        if row is not None:
            return list(map(self.cast_to, _names_of(outs)))[: len(operands)]
        has_rule = held is not None or _jax.has_custom_batching(eqn)
        if not (has_rule or _jax.has_side_effect(eqn) or names_used(eqn)):
            return _of_ordinary(operands, after, together)
        for body in _jax.subjaxprs(eqn.params):
            self.leave_invarying(body)
        return [{}] * len(operands)

    def _cast_by_all(self, outs):
        """The use of a value that results of one equation are computed from, each by itself."""
        if not outs:
            return {}
        return self.cast_to(frozenset.intersection(*_names_of(outs)))

    def _of_bodies(self, held, operands, after):
        """A carry is cast before the first iteration and after each; other values are cast in each
        iteration.

        Each result of branches is cast to vary over all that it varies over in some branch,
        operands as the index does.
        """
        names, results, predicate = flow_through(self.checker, held, _names_of(operands))
        carry = range(len(operands))[carry_of(held)]
        cast = len(results) if isinstance(held, _jax.Cond) else len(carry)
        inside: list[list[CastUse]] = [[] for _ in operands]
        for body in bodies_of(held):
            repeats = body.repeats or 0
            leaving = list(map(self.cast_to, results[:cast]))
            leaving.extend(_times(use, 1 / max(repeats, 1)) for use in after[cast:])
            entering = self.of_inputs(body.jaxpr, [names[k] for k in body.operands], leaving)
            for k, use in zip(body.operands, entering):
                inside[k].append(_times(use, repeats))
        before = self.cast_to(predicate)
        uses: list[CastUse] = []
        for k, value in enumerate(operands):
            if k in carry:
                uses.append(self.cast_to(names[k]))
            elif inside[k]:
                uses.append({**self._together(value, inside[k]), **before})
            else:
                uses.append({})
        return uses

    def leave_invarying(self, jaxpr: Any) -> None:
        """Leave the gathers of a body invarying."""
        self.chosen.update(dict.fromkeys(_gathers_in(jaxpr), False))

    def _of_gathered(self, eqn, operand, out, after):
        gathered = [name for name in _gathered(eqn) if name in operand.names]
        axes = self.view.mesh_axes_of(gathered)
        varies = bool(axes) and after.keys() >= set(axes)
        # In the gradient, a reduce-scatter sends each gathered element once, and an all-reduce
        # sends each cast element twice.
        better = varies and out.elements < 2 * max(after[axis] for axis in axes)
        self.chosen[eqn] = better and self.chosen.get(eqn, True)
        return [after]


def _of_ordinary(
    operands, after: Sequence[Mapping[Any, float]], together: CastUse
) -> list[CastUse]:
    """Operands are cast where one of them varies; over other axes the results are cast, where their
    uses are.
    """
    use = dict(together)
    for axis in itertools.chain(*after[:1]):
        if axis not in together and all(axis in later for later in after):
            use[axis] = sum(later[axis] for later in after)
    return [use] * len(operands)


def _times(use: CastUse, iterations: float) -> CastUse:
    """The use in so many iterations; None stays None."""
    return {axis: elements and elements * iterations for axis, elements in use.items()}
