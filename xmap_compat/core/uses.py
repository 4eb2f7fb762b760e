"""Find the gathers that are better typed as varying, from the uses of their results.

A gathered value is equal on all devices.  If its type says so, the value is cast to varying where
it meets a varying value, and the transpose of that cast is an all-reduce.  If its type is varying,
the transpose of the gather is a reduce-scatter of half the bytes, which suits the weights of FSDP.
But then all uses of the value must vary over the gathered mesh axes, and its whole cotangent is
sent even if the value shrinks first, as in ``all_gather(x).sum(0) * x``. A backward pass over each
body finds over which mesh axes the uses of every value vary, and how much is cast there.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from xmap_compat import _jax
from xmap_compat.core.bodies import bodies_of, carry_of
from xmap_compat.core.collectives import COLLECTIVES, names_used
from xmap_compat.core.device import DeviceView
from xmap_compat.core.names import Checker, Names, flow_through, read_names
from xmap_compat.core.parameters import axis_names
from xmap_compat.core.specs import AxisName

# For each mesh axis that a use of a value is cast to, sooner or later: how many elements are cast,
# on one device, of the results that are computed from the value; None if the value itself is cast.
Use = Mapping[Any, float | None]


class _Value(NamedTuple):
    """A variable: its named axes, and its elements on a device."""

    names: Names
    elements: int


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
    if not any(view.mesh_axes_of(_gathered(eqn)) for eqn in _gathers_in(jaxpr)):
        return frozenset()
    uses = _Uses(view, checker)
    uses.of_inputs(jaxpr, inputs, list(map(uses.cast_to, results)))
    return frozenset(eqn for eqn, better in uses.chosen.items() if better)


def _gathered(eqn: Any) -> tuple[AxisName, ...]:
    """The axes that an equation gathers into a result that is equal for all their elements."""
    groups = eqn.params.get("axis_index_groups")
    return (
        axis_names(eqn.params)
        if eqn.primitive.name in ("all_gather", "device_gather") and groups is None
        else ()
    )


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
    _known: dict[Any, list[Use]] = dataclasses.field(default_factory=dict)

    def of_inputs(self, jaxpr: Any, inputs: Sequence[Names], results: Sequence[Use]) -> list[Use]:
        """The uses of a body's inputs, from those of its results."""
        key = (jaxpr, *inputs, *(frozenset(use.items()) for use in results))
        if key not in self._known:
            self._known[key] = self._of_inputs(jaxpr, inputs, results)
        return self._known[key]

    def _of_inputs(self, jaxpr, inputs, results):
        body, _ = _jax.open_jaxpr(jaxpr)
        variables = _jax.input_vars(body)
        input_vars = variables[len(variables) - len(inputs) :]
        names = self.checker.variables(jaxpr, inputs)

        def value(atom):
            return self._value(atom.aval, read_names(names, atom))

        uses: dict[Any, list[Use]] = collections.defaultdict(list)
        latest = list(zip(body.outvars, results))
        for eqn in reversed([None, *body.eqns]):
            for atom, use in latest:
                if not isinstance(atom, _jax.Literal):
                    uses[atom].append(use)
            if eqn is not None:
                after = [self._together(value(v), uses[v]) for v in eqn.outvars]
                operands, outs = (list(map(value, atoms)) for atoms in (eqn.invars, eqn.outvars))
                latest = list(
                    zip(eqn.invars, self._of_operands(eqn, operands, outs, after), strict=True)
                )
        return [self._together(value(v), uses[v]) for v in input_vars]

    def _value(self, aval, names):
        local = (self.view.placements[n].local_size for n in self.view.bound(names))
        return _Value(names, math.prod(getattr(aval, "shape", ())) * math.prod(local))

    def cast_to(self, names: Names) -> Use:
        """The use of a value that is cast to vary over all of the names."""
        return dict.fromkeys(self.view.mesh_axes_of(self.view.bound(names)))

    def _together(self, value: _Value, uses: Sequence[Use]) -> dict[Any, float]:
        """All uses of a value together: the axes that all of them are cast to; one cast serves
        several uses.
        """
        together = {}
        for axis in self.view.mesh_axes:
            if all(axis in use for use in uses):
                later = [elements for use in uses if (elements := use[axis]) is not None]
                together[axis] = sum(later) + (value.elements if len(later) < len(uses) else 0)
        return together

    def _of_operands(self, eqn, operands, outs, after) -> Sequence[Use]:
        """The use of each operand of an equation, from the uses of its results."""
        structured = _jax.read(eqn)
        if isinstance(structured, (_jax.Call, _jax.Checkpoint, _jax.Scan, _jax.Cond)):
            return self._of_bodies(structured, operands, after)
        if isinstance(
            structured, _jax.CustomJvp
        ):  # only the type of its rule is known: each result varies by itself
            self.leave(structured.body)
            shared = frozenset.intersection(*(v.names for v in outs)) if outs else frozenset()
            return _of_ordinary(operands, after, self.cast_to(shared))
        if _gathered(eqn):
            return self._of_gathered(eqn, operands[0], outs[0], *after)
        together = self.cast_to(frozenset().union(*(v.names for v in operands)))
        if eqn.primitive.name in COLLECTIVES:
            joint = COLLECTIVES[eqn.primitive.name].joint
            return (
                [together] * len(operands)
                if joint
                else [self.cast_to(v.names) for _, v in zip(operands, outs)]
            )
        is_ordinary = structured is None and not _jax.has_side_effect(eqn) and not names_used(eqn)
        if is_ordinary and not _jax.has_custom_batching(eqn):
            return _of_ordinary(operands, after, together)
        for body in _jax.subjaxprs(eqn.params):
            self.leave(body)
        return [{}] * len(operands)

    def _of_bodies(self, held, operands, after):
        """A carry is cast before the first iteration and after each; other values are cast in each
        iteration.

        Each result of branches is cast to vary over all that it varies over in some branch,
        operands as the index does.
        """
        names, results, predicate = flow_through(self.checker, held, [v.names for v in operands])
        carry, before = range(len(operands))[carry_of(held)], self.cast_to(predicate)
        inside: list[list[Use]] = [[] for _ in operands]
        for body in bodies_of(held):
            iterations = body.repeats or 1
            after = [_times(use, 1 / iterations) for use in after]
            cast = len(results) if isinstance(held, _jax.Cond) else len(carry)
            leaving = [*map(self.cast_to, results[:cast]), *after[cast:]]
            entering = self.of_inputs(body.jaxpr, [names[k] for k in body.operands], leaving)
            for k, use in zip(body.operands, entering):
                inside[k].append(_times(use, iterations if body.repeats else 0))
        return [
            self.cast_to(names[k])
            if k in carry
            else {**self._together(v, inside[k]), **before}
            if inside[k]
            else {}
            for k, v in enumerate(operands)
        ]

    def leave(self, jaxpr: Any) -> None:
        """Leave the gathers of a body invarying."""
        self.chosen.update(dict.fromkeys(_gathers_in(jaxpr), False))

    def _of_gathered(self, eqn, operand, out, after):
        axes = self.view.mesh_axes_of(n for n in _gathered(eqn) if n in operand.names)
        varies = bool(axes) and set(axes) <= after.keys()
        better = varies and out.elements < 2 * max(after[axis] for axis in axes)
        self.chosen[eqn] = better and self.chosen.get(eqn, True)
        return [after]


def _of_ordinary(operands: Sequence[_Value], after: Sequence[Use], together: Use) -> list[Use]:
    """Operands are cast where one of them varies; over other axes the results are cast, where their
    uses are.
    """
    ahead = (
        [axis for axis in after[0] if axis not in together and all(axis in use for use in after)]
        if after
        else []
    )
    return [{**together, **{axis: sum(use[axis] or 0 for use in after) for axis in ahead}}] * len(
        operands
    )


def _times(use: Use, iterations: float) -> Use:
    return {axis: elements and elements * iterations for axis, elements in use.items()}
