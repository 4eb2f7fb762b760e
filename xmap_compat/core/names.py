"""Stage 4: which named axes each value of a named program varies over.

This is the type check of the named program.  It runs before anything is evaluated, refuses two axes
that would need one resource at once, and tells the evaluation what the carries of loops vary over.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax import lax

from xmap_compat import _jax
from xmap_compat.core.bodies import bodies_of, carry_of
from xmap_compat.core.collectives import (
    COLLECTIVES,
    check_parameters,
    collective_axes_in,
    names_used,
    result_names,
)
from xmap_compat.core.combining import (
    BatchedEquation,
    TraceRule,
    takes_whole_axes,
    trace_plainly,
)
from xmap_compat.core.errors import (
    LEGACY,
    quoted,
    reference,
    repeated_axis,
    resource_conflict,
)
from xmap_compat.core.parameters import Names, mentioned_names
from xmap_compat.core.passes import fact_of, forward
from xmap_compat.core.placement import MeshAxis, Placement, is_mesh_axis
from xmap_compat.core.specs import AxisName
from xmap_compat.core.undeclared import operand_names, unsplit_hidden_axes

NONE: Names = frozenset()


class ValueWords(NamedTuple):
    """What a message calls a value that varies over two axes of one resource: our words, and those
    of legacy if they differ.
    """

    ours: str
    legacy: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Checker:
    """Infers named axes and checks them against the placements of one xmap.

    Attributes:
      placements: this xmap's axes.
      fun: the name of the function, for messages.
      outer_axes: where a nested xmap is evaluated, the mesh axes of the outermost one.  Only
        ``check`` counts them among the placements; stage 4 has them in ``placements``.
      needed: each ``HiddenAxis`` on which a collective, or a predicate around one, depends;
        filled by the inference.
      trace_rule: has a batching rule traced where it sees no axes.
      asked: what batching rules answered, by their equation and the names of its operands.
    """

    placements: Mapping[AxisName, Placement]
    fun: str
    outer_axes: Mapping[AxisName, Placement] = dataclasses.field(default_factory=dict)
    needed: set[AxisName] = dataclasses.field(default_factory=set)
    trace_rule: TraceRule = trace_plainly
    asked: dict[Any, list[Names]] = dataclasses.field(default_factory=dict)
    _known: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)
    _around: list[Any] = dataclasses.field(default_factory=list, init=False)
    _taken_by: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)

    def results(self, jaxpr: Any, inputs: Sequence[Names]) -> list[Names]:
        """The named axes of a jaxpr's results, given those of its inputs (without constants)."""
        key = (jaxpr, tuple(inputs))
        if key not in self._known:
            names = self.variables(jaxpr, inputs)
            body, _ = _jax.open_jaxpr(jaxpr)
            self._known[key] = [fact_of(names, atom) for atom in body.outvars]
        return list(self._known[key])

    def check(self, jaxpr: Any, inputs: Sequence[Names]) -> list[Names]:
        """Check a program that a custom rule traced late, and return the named axes of its
        results.
        """
        placements = {**self.placements, **self.outer_axes}
        return dataclasses.replace(self, placements=placements).results(jaxpr, inputs)

    def variables(self, jaxpr: Any, inputs: Sequence[Names]) -> dict[Any, Names]:
        """The named axes of every variable of a jaxpr."""
        return forward(jaxpr, inputs, self.equation)

    def equation(self, eqn: Any, inputs: Sequence[Names]) -> list[Names]:
        """The named axes of one equation's results."""
        infer = self._structured
        if eqn.primitive.name in COLLECTIVES:
            infer = self._collective
        results = infer(eqn, inputs)
        for names in results:
            conflict = self._conflict(names)
            if conflict:
                raise _names_meet(*conflict, self._words_for(eqn))
        return results

    def _words_for(self, eqn) -> ValueWords:
        primitive = eqn.primitive.name
        where = self.where(eqn)
        is_boundary = primitive in ("device_take", "device_vary")
        if not is_boundary or not all(map(is_mesh_axis, eqn.params["axes"])):
            return ValueWords(
                f"the result of {primitive} at {where}",
                f"a value returned from a primitive {primitive} created at {where}",
            )
        # By these a nested xmap takes its part of an argument, or of a value that it closes over.
        nested = ""
        if self._around:
            nested = getattr(_jax.read(self._around[-1]), "name", "")
        if primitive == "device_take":
            return ValueWords(f"an input to an xmapped function {nested} (xmap called at {where})")
        return ValueWords(f"a value that an xmapped function {nested} uses at {where}")

    def where(self, eqn: Any) -> str:
        """The user's line of an equation, or of the call around it: equations of JAX's jitted
        functions have none.
        """
        return _jax.where_in_user_code(eqn, *reversed(self._around))

    def check_distinct_resources(self, names: Names, words: ValueWords) -> None:
        """Raise if two of the names need one resource: no device (or iteration of a loop) could
        hold both.
        """
        conflict = self._conflict(names)
        if conflict:
            raise _names_meet(*conflict, words)

    def _conflict(self, names) -> tuple[Any, Any, Any] | None:
        """Two of the names that need one resource, and the resource."""
        if len(names) < 2:
            return None
        taken: dict[Any, AxisName] = {}
        for name in sorted(names, key=str):
            for resource in sorted(self.placements[name].resources, key=str):
                if resource in taken:
                    first = taken[resource]
                    shown = self._taken_by
                    return shown.get(first, first), shown.get(name, name), resource
                taken[resource] = name
        return None

    def _structured(self, eqn, inputs):
        held = _jax.read(eqn)
        if not isinstance(held, (*_RUN_BODIES, *_ALL_ON_ALL)):
            # Results vary over the operands' names, also of custom_vmap and shard_map.
            return self._ordinary(eqn, inputs)
        self._around.append(eqn)
        try:
            if isinstance(held, _ALL_ON_ALL):
                return [_of_all_operands(self, held, inputs)] * len(eqn.outvars)
            return flow_through(self, held, inputs).results
        finally:
            self._around.pop()

    def _ordinary(self, eqn, inputs):
        """An operation in no table, which must name no axes of this xmap, nor hold a program that
        calls Python.
        """
        primitive = eqn.primitive.name
        together = _union(inputs)
        if primitive == "io_callback":
            # Each device calls it with its own values.
            self.needed.update(unsplit_hidden_axes(together, self.placements))
        if _jax.uses_references(eqn):
            raise reference(f"`{primitive}` at {self.where(eqn)}")
        used = names_used(eqn) & self.placements.keys()
        # With effects, it is evaluated.
        if used or (not eqn.effects and _calls_python(eqn)):
            raise _unsupported_primitive(primitive, sorted(used, key=str), self.where(eqn))
        if not _jax.has_custom_batching(eqn):
            return [together] * len(eqn.outvars)
        if isinstance(_jax.read(eqn), _jax.CustomVmap) and not takes_whole_axes(eqn):
            # Its function is evaluated instead.
            return [together] * len(eqn.outvars)
        return self.by_batching_rule(eqn, inputs)

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
        primitive = eqn.primitive.name
        mentioned = mentioned_names(eqn.params)
        for name in mentioned:
            if isinstance(name, MeshAxis):
                self._taken_by[name] = name.taken_by
        if len(set(mentioned)) < len(mentioned):
            raise repeated_axis(f"{primitive} at {self.where(eqn)}", mentioned)
        sizes = [self._size_of(name, eqn) for name in mentioned]
        row = COLLECTIVES[primitive]
        if inputs and 0 in sizes and not (row.reduces or row.joint):
            raise _no_elements(mentioned[sizes.index(0)], self.where(eqn))
        elements = math.prod(sizes)
        check_parameters(primitive, eqn.params, elements, self.where(eqn))
        skipped = eqn.params.get("skipped")
        if skipped is not None:
            skipped.check(inputs, self.where(eqn))
        operands = [self._operand(names, mentioned) for names in inputs]

        def result(of):
            return result_names(primitive, eqn.params, of, self.placements, elements)

        if len(eqn.outvars) > 1:
            return [result([operand]) for operand in operands]
        return [result(operands)]

    def _size_of(self, name, eqn):
        if name not in self.placements:
            return lax.axis_size(name)
        placement = self.placements[name]
        if placement.loops:
            raise _loop_collective(name, self.where(eqn))
        return placement.size

    def _operand(self, names, axes):
        operand = operand_names(names, axes, self.placements)
        if operand - names:
            self.needed.update(names - operand)
        return operand

    def note_predicate(self, predicate: Names, *bodies: Any) -> None:
        """Add to ``needed`` what a predicate depends on, if its branches or loops hold collectives
        or effects.
        """
        if predicate and any(collective_axes_in(body) or body.effects for body in bodies):
            self.needed.update(unsplit_hidden_axes(predicate, self.placements))


def _calls_python(eqn):
    """Whether a program in an equation has an ``io_callback``."""
    return any(inner.primitive.name == "io_callback" for inner, _ in _jax.walk(eqn.params))


def _union(names: Sequence[Names]) -> Names:
    return frozenset().union(*names)


# --------------------------------------------------------------- structured equations

_RUN_BODIES = (
    _jax.Call,
    _jax.Checkpoint,
    _jax.CustomJvp,
    _jax.CustomVjp,
    _jax.Scan,
    _jax.While,
    _jax.Cond,
)
# Every result may depend on every operand.
_ALL_ON_ALL = (_jax.LinearSolve, _jax.HijaxOperation)


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
    is_branch = isinstance(held, _jax.Cond)
    bodies = bodies_of(held)
    carry = carry_of(held)
    operands = _operands_of_branches(held, inputs) if is_branch else list(inputs)
    while True:
        predicate = inputs[0] if is_branch else NONE
        outs: list[list[Names]] = []
        for body in bodies:
            names = checker.results(body.jaxpr, [operands[k] for k in body.operands])
            if body.is_condition:
                predicate |= names[0]
            else:
                outs.append(names)
        results = [_union([predicate, *names]) for names in zip(*outs)]
        grown = [old | new for old, new in zip(operands[carry], results)]
        if grown == operands[carry]:
            checker.note_predicate(predicate, *(body.jaxpr for body in bodies))
            return _Flow(operands, [*grown, *results[len(grown) :]], predicate)
        operands[carry] = grown


def _operands_of_branches(cond: _jax.Cond, inputs: Sequence[Names]) -> list[Names]:
    """The named axes of the operands of branches; batching rules within see those of the index,
    too, as under ``jax.vmap``.
    """
    index, *others = inputs
    if index and _jax.holds_custom_batching(cond.branches):
        others = [names | index for names in others]
    return [index, *others]


def _of_all_operands(checker: Checker, held: Any, inputs: Sequence[Names]) -> Names:
    """The names of each result of an equation in ``_ALL_ON_ALL``: all that its operands, or the
    bodies applied to them, vary over.
    """
    union = _union(inputs)
    found = union
    for body in bodies_of(held):
        found = found.union(*checker.results(body.jaxpr, [union] * len(body.jaxpr.in_avals)))
    return found


# ----------------------------------------------------------------------------- messages


def _names_meet(first: Hashable, second: Hashable, resource: Any, words: ValueWords) -> TypeError:
    first, second = sorted((first, second), key=str)
    resource = getattr(resource, "mesh_axis", resource)  # of a nested xmap
    ours = (
        f"Axes `{first}` and `{second}` are both assigned `{resource}`, but {words.ours} varies "
        "over both. Assign another resource to one of them, or reduce over one before they meet"
    )
    legacy = (
        f"Axes `{first}` and `{second}` are both mapped to the resource `{resource}`, but they "
        f"coincide in the named_shape of {words.legacy or words.ours}"
    )
    return resource_conflict(f"{ours}{LEGACY}{legacy}")


def _unsupported_primitive(
    primitive: str, names: Iterable[Hashable], where: str
) -> NotImplementedError:
    uses = "has an io_callback"
    if names:
        uses = f"uses the named axes {quoted(names)}"
    return NotImplementedError(
        f"xmap_compat does not know the operation `{primitive}`, which {uses} at {where}. "
        "Write it with collectives of jax.lax, or apply it outside of xmap"
    )


def _loop_collective(name: Hashable, where: str) -> RuntimeError:
    ours = (
        f"The function refers to `{name}` at {where}, but axis_resources assign a serial loop to "
        f"`{name}`. Remove the loop, or the collective"
    )
    legacy = (
        "Named axes with loop resources assigned to them cannot be referenced inside the xmapped "
        f"computation (e.g. in collectives), but `{name}` violates that rule"
    )
    return RuntimeError(f"{ours}{LEGACY}{legacy}")


def _no_elements(name: Hashable, where: str) -> ValueError:
    return ValueError(
        f"Axis {name} has size 0, so that nothing can move along it at {where}. "
        "Leave the call out there"
    )
