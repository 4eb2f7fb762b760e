"""Stage 4: which named axes each value of a named program varies over.

This is the type check of the named program.  It runs before anything is evaluated, refuses two axes
that would need one resource at once, and tells the evaluation what the carries of loops vary over.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax import lax

from xmap_compat import _jax
from xmap_compat.core.bodies import bodies_of, carry_of
from xmap_compat.core.collectives import (
    COLLECTIVES,
    check_parameters,
    collectives_in,
    names_used,
    result_names,
)
from xmap_compat.core.combining import (
    BatchedEquation,
    TraceRule,
    check_combined,
    combined_axes,
    takes_whole_axes,
    trace_plainly,
)
from xmap_compat.core.errors import (
    LEGACY,
    quoted,
    repeated_axis,
    resource_conflict,
)
from xmap_compat.core.parameters import Names, mentioned_names
from xmap_compat.core.placement import MeshAxis, Placement, is_of_devices
from xmap_compat.core.specs import AxisName
from xmap_compat.core.undeclared import operand_names, unsplit_elements

NONE: Names = frozenset()


class Place(NamedTuple):
    """A value whose axes meet, for messages: in our words, and in legacy's where they differ."""

    ours: str
    legacy: str = ""


@dataclasses.dataclass(frozen=True)
class Checker:
    """Infers named axes and checks them against the placements of one xmap.

    Attributes:
      placements: this xmap's axes.
      fun: the name of the function, for messages.
      outer_axes: mesh axes that belong to the outermost xmap around this one; known only where a
        program is checked, not where it is evaluated.
      needed: each ``LocalElement`` on which a collective, or a predicate around one, depends; filled by
        the inference.
      trace_rule: has a batching rule traced where it sees no axes.
      asked: what batching rules answered, by their equation and the names of its operands.
    """

    placements: Mapping[AxisName, Placement]
    fun: str
    outer_axes: Mapping[AxisName, Placement] = dataclasses.field(default_factory=dict)
    needed: set[AxisName] = dataclasses.field(default_factory=set, repr=False, compare=False)
    trace_rule: TraceRule = dataclasses.field(default=trace_plainly, repr=False, compare=False)
    asked: dict[Any, list[Names]] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )
    _known: dict[Any, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _around: list[Any] = dataclasses.field(
        default_factory=list, init=False, repr=False, compare=False
    )
    _taken_by: dict[Any, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def results(self, jaxpr: Any, inputs: Sequence[Names]) -> list[Names]:
        """The named axes of a jaxpr's results, given those of its inputs (without constants)."""
        key = (jaxpr, tuple(inputs))
        if key not in self._known:
            names = self.variables(jaxpr, inputs)
            self._known[key] = [read_names(names, v) for v in _jax.open_jaxpr(jaxpr)[0].outvars]
        return list(self._known[key])

    def check(self, jaxpr: Any, inputs: Sequence[Names]) -> list[Names]:
        """Check a program that a custom rule traced late, and return the named axes of its
        results.
        """
        placements = {**self.placements, **self.outer_axes}
        return dataclasses.replace(self, placements=placements).results(jaxpr, inputs)

    def variables(self, jaxpr: Any, inputs: Sequence[Names]) -> dict[Any, Names]:
        """The named axes of every variable of a jaxpr."""
        body, _ = _jax.open_jaxpr(jaxpr)
        variables = _jax.input_vars(body)
        names: dict[Any, Names] = dict(
            zip(variables, [NONE] * (len(variables) - len(inputs)) + list(inputs))
        )
        for eqn in body.eqns:
            outs = self.equation(eqn, [read_names(names, v) for v in eqn.invars])
            names.update(zip(eqn.outvars, outs))
        return names

    def equation(self, eqn: Any, inputs: Sequence[Names]) -> list[Names]:
        """The named axes of one equation's results."""
        primitive = eqn.primitive.name
        outs = (self._collective if primitive in COLLECTIVES else self._structured)(eqn, inputs)
        for names in outs:
            self.check_distinct_resources(names, lambda: self._place(eqn))
        return outs

    def _place(self, eqn) -> Place:
        of_devices = all(map(is_of_devices, eqn.params.get("axes", ())))
        if eqn.primitive.name not in ("device_take", "device_vary") or not of_devices:
            made = f"{eqn.primitive.name} at {self.where(eqn)}"
            returned = f"{eqn.primitive.name} created at {self.where(eqn)}"
            return Place(f"the result of {made}", f"a value returned from a primitive {returned}")
        # By these a nested xmap takes its part of an argument, or of a value that it closes over.
        nested = getattr(_jax.read(self._around[-1]), "name", "") if self._around else ""
        if eqn.primitive.name == "device_take":
            return Place(
                f"an input to an xmapped function {nested} (xmap called at {self.where(eqn)})"
            )
        return Place(f"a value that an xmapped function {nested} uses at {self.where(eqn)}")

    def where(self, eqn: Any) -> str:
        """The user's line of an equation, or of the call around it: equations of JAX's jitted
        functions have none.
        """
        return _jax.where_in_user_code(eqn, *reversed(self._around))

    def check_distinct_resources(self, names: Names, place: Callable[[], Place]) -> None:
        """Raise if two of the names need one resource: no device (or iteration of a loop) could
        hold both.
        """
        if len(names) < 2:
            return
        owner: dict[Any, AxisName] = {}
        for name in sorted(names, key=str):
            for resource in sorted(self.placements[name].resources, key=str):
                if resource in owner:
                    first, second = (self._taken_by.get(n, n) for n in (owner[resource], name))
                    raise _names_meet(first, second, resource, place())
                owner[resource] = name

    def _structured(self, eqn, inputs):
        held = _jax.read(eqn)
        rule = _STRUCTURED.get(type(held))
        if rule is None:
            return self._ordinary(eqn, inputs)
        self._around.append(eqn)
        try:
            return rule(self, held, inputs, eqn)
        finally:
            self._around.pop()

    def _ordinary(self, eqn, inputs):
        """An operation in no table, which must name no axes of this xmap, nor hold a program that
        calls Python.
        """
        if eqn.primitive.name == "io_callback":
            self.needed.update(
                unsplit_elements(_union(inputs), self.placements)
            )  # each device calls it with its own values
        calls = any(inner.primitive.name == "io_callback" for inner, _ in _jax.walk(eqn.params))
        used = names_used(eqn) & self.placements.keys()
        if used or (calls and not eqn.effects):  # with effects, it is evaluated
            raise _unsupported_primitive(eqn.primitive.name, sorted(used, key=str), self.where(eqn))
        if not _jax.has_custom_batching(eqn):
            return [_union(inputs)] * len(eqn.outvars)
        return self._by_rule(eqn, inputs)

    def _by_rule(self, eqn, inputs):
        results = self.by_batching_rule(eqn, inputs)
        if isinstance(_jax.read(eqn), _jax.CustomVmap) and not takes_whole_axes(eqn):
            return [_union(inputs)] * len(eqn.outvars)  # its function is evaluated instead
        if not takes_whole_axes(eqn):
            combined = combined_axes(inputs, results, self.placements)
            check_combined(eqn, combined, self.placements, self.where(eqn))
        return results

    def by_batching_rule(self, eqn: Any, inputs: Sequence[Names]) -> list[Names]:
        """The named axes of the results of an operation that is not JAX's.  Its rule is asked
        once.
        """
        key = (eqn, tuple(inputs))
        if key not in self.asked:
            self.asked[key] = self._batched(eqn, inputs).results()
        return self.asked[key]

    def trace_by_rule(self, eqn: Any, inputs: Sequence[Names], results: Sequence[Names]) -> Any:
        """A jaxpr of an operation on whole axes, as its batching rule makes it."""
        return self._batched(eqn, inputs).jaxpr(results)

    def _batched(self, eqn, inputs):
        return BatchedEquation(eqn, inputs, self.placements, self.trace_rule)

    def _collective(self, eqn, inputs):
        mentioned = mentioned_names(eqn.params)
        self._taken_by.update(
            (name, name.taken_by) for name in mentioned if isinstance(name, MeshAxis)
        )
        if len(set(mentioned)) < len(mentioned):
            raise repeated_axis(f"{eqn.primitive.name} at {self.where(eqn)}", mentioned)
        for name in mentioned:
            if name in self.placements and self.placements[name].loops:
                raise _loop_collective(name, self.where(eqn))
        sizes = [
            self.placements[n].size if n in self.placements else lax.axis_size(n) for n in mentioned
        ]
        row = COLLECTIVES[eqn.primitive.name]
        if inputs and 0 in sizes and not (row.reduces or row.joint):
            raise _no_elements(mentioned[sizes.index(0)], self.where(eqn))
        elements = math.prod(sizes)
        check_parameters(eqn.primitive.name, eqn.params, elements, self.where(eqn))
        mentions = eqn.params.get("mentions")
        if mentions is not None:
            mentions.check(inputs, self.where(eqn))
        inputs = [self._operand(names, mentioned) for names in inputs]
        if len(eqn.outvars) > 1:
            return [
                result_names(eqn.primitive.name, eqn.params, [names], self.placements, elements)
                for names in inputs
            ]
        primitive = eqn.primitive.name
        return [result_names(primitive, eqn.params, inputs, self.placements, elements)]

    def _operand(self, names, axes):
        operand = operand_names(names, axes, self.placements)
        self.needed.update(names - operand if operand - names else ())
        return operand

    def note_predicate(self, predicate: Names, *bodies: Any) -> None:
        """Add to ``needed`` what a predicate depends on, if its branches or loops hold collectives or
        effects.
        """
        if predicate and any(collectives_in(body) or body.effects for body in bodies):
            self.needed.update(unsplit_elements(predicate, self.placements))


def read_names(names: Mapping[Any, Names], atom: Any) -> Names:
    """The named axes of a variable or literal."""
    return NONE if isinstance(atom, _jax.Literal) else names[atom]


def _union(names: Sequence[Names]) -> Names:
    return frozenset().union(*names)


# --------------------------------------------------------------- structured equations


class _Flow(NamedTuple):
    """The named axes in an equation that runs bodies.

    Attributes:
      operands: those of its operands; of a carry, after any number of iterations.
      results: those of its results.
      predicate: those of the index of a branch, or of the condition of a loop.
    """

    operands: list[Names]
    results: list[Names]
    predicate: Names


def flow_through(checker: Checker, held: Any, inputs: Sequence[Names]) -> _Flow:
    """The fixpoint of the named axes in calls, loops and branches."""
    bodies, carry, operands = bodies_of(held), carry_of(held), list(inputs)
    if isinstance(held, _jax.Cond):
        operands = operands_of_branches(held, inputs)
    while True:
        predicate = inputs[0] if isinstance(held, _jax.Cond) else NONE
        outs: list[list[Names]] = []
        for body in bodies:
            names = checker.results(body.jaxpr, [operands[k] for k in body.operands])
            predicate, outs = (
                (predicate | names[0], outs) if body.is_condition else (predicate, [*outs, names])
            )
        results = [_union([predicate, *names]) for names in zip(*outs)]
        grown = [old | new for old, new in zip(operands[carry], results)]
        if grown == operands[carry]:
            checker.note_predicate(predicate, *(body.jaxpr for body in bodies))
            return _Flow(operands, [*grown, *results[len(grown) :]], predicate)
        operands[carry] = grown


def operands_of_branches(cond: _jax.Cond, inputs: Sequence[Names]) -> list[Names]:
    """The named axes of the operands of branches; batching rules within see those of the index,
    too, as under ``jax.vmap``.
    """
    index, *others = inputs
    if index and _jax.holds_custom_batching(cond.branches):
        others = [names | index for names in others]
    return [index, *others]


def _of_all_operands(checker: Checker, held: Any, inputs: Sequence[Names], eqn: Any) -> list[Names]:
    """The same names for all results: a solution, or a root, depends on all that its equation
    depends on.
    """
    union = _union(inputs)
    jaxprs = [body.jaxpr for body in bodies_of(held)]
    results = [checker.results(jaxpr, [union] * len(jaxpr.in_avals)) for jaxpr in jaxprs]
    return [_union([union, *itertools.chain(*results)])] * len(eqn.outvars)


# For the others (custom_vmap, shard_map, linear maps of roots), results vary over the operands'
# names.
_STRUCTURED: dict[type, Callable[[Checker, Any, Sequence[Names], Any], list[Names]]] = {
    **dict.fromkeys(
        (
            _jax.Call,
            _jax.Checkpoint,
            _jax.CustomJvp,
            _jax.CustomVjp,
            _jax.Scan,
            _jax.While,
            _jax.Cond,
        ),
        lambda checker, held, inputs, _: flow_through(checker, held, inputs).results,
    ),
    **dict.fromkeys((_jax.LinearSolve, _jax.HijaxOperation), _of_all_operands),
}


# ----------------------------------------------------------------------------- messages


def _names_meet(first: Hashable, second: Hashable, resource: Any, place: Place) -> TypeError:
    first, second = sorted((first, second), key=str)
    resource = getattr(resource, "mesh_axis", resource)  # of a nested xmap
    return resource_conflict(
        f"Axes `{first}` and `{second}` are both assigned `{resource}`, but {place.ours} varies over both. Assign "
        f"another resource to one of them, or reduce over one before they meet"
        f"{LEGACY}Axes `{first}` and `{second}` are both mapped to the resource `{resource}`, but they coincide in the "
        f"named_shape of {place.legacy or place.ours}"
    )


def _unsupported_primitive(
    primitive: str, names: Iterable[Hashable], where: str
) -> NotImplementedError:
    uses = f"uses the named axes {quoted(names)}" if names else "has an io_callback"
    return NotImplementedError(
        f"xmap_compat does not know the operation `{primitive}`, which {uses} at {where}. "
        "Write it with collectives of jax.lax, or apply it outside of xmap"
    )


def _loop_collective(name: Hashable, where: str) -> RuntimeError:
    return RuntimeError(
        f"The function refers to `{name}` at {where}, but axis_resources assign a serial loop to `{name}`. Remove the "
        f"loop, or the collective{LEGACY}Named axes with loop resources assigned to them cannot be referenced inside "
        f"the xmapped computation (e.g. in collectives), but `{name}` violates that rule"
    )


def _no_elements(name: Hashable, where: str) -> ValueError:
    return ValueError(
        f"Axis {name} has size 0, so that nothing can move along it at {where}. Leave the call out there"
    )
