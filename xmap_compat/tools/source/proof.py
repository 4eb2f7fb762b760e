"""Proof that a generated program computes the same as a plan's program: both are traced and compared.

The rewritten functions of the user are traced over the axes that execute their named axes.  Each helper stands for
the collective that it replaces.  The traced program is then compared with the plan's named program, as a graph of
operations.  The comparison covers only operations that the results need.  It ignores the names of variables, calls
of jitted functions, and the order of independent operations.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.mesh import entered
from xmap_compat.core.parameters import mentioned_names, positions
from xmap_compat.core.placement import Body
from xmap_compat.core.rules.callables import derivative
from xmap_compat.core.rules.contraction import bind_contraction
from xmap_compat.core.trace import trace_flat
from xmap_compat.tools.configuration import configured

if TYPE_CHECKING:
    from xmap_compat.tools.plan import CallPlan
    from xmap_compat.tools.source.user_code import AxisNames


def graph_of(plan: CallPlan, names: AxisNames | None = None) -> Graph:
    """A plan's named program, with its numbers: for them, the rules of its derivatives are traced now.

    Args:
      names: the axes that execute each named axis in the function to compare with; None if that has the named axes.
    """
    program, body = plan.staged.placed.program, plan.staged.placed.body
    there, parts = body, {}
    if names is not None:
        sizes: dict[Any, int] = dict(plan.mesh.shape) if plan.mesh is not None else {}
        sizes.update((local, a.device_size) for a in plan.axes if (local := names.local[a.name]))
        there, parts = Body(sizes, body.scope, body.device_axes), {name: names.parts(name) for name in names.mesh}
    graph = Graph(program.jaxpr, body, program.consts, parts, there)
    with configured(plan.staged.configuration):
        assert graph.number is not None
    return graph


def difference_from(plan: CallPlan, expected: Graph, function: Callable[..., Any]) -> str | None:
    """How the computation of a function differs from a plan's graph, as text; None if it does not.

    Args:
      function: from a module that was executed with ``stand_ins`` for its helpers.
    """
    program, there = plan.staged.placed.program, expected.among_parts
    assert there is not None
    flat = lambda *leaves: jax.tree.leaves(function(*jax.tree.unflatten(plan.staged.in_tree, leaves)))  # noqa: E731
    inputs = _jax.input_vars(program.jaxpr)[len(program.consts) :]
    with configured(plan.staged.configuration):
        with entered(there.scope.mesh):
            found = trace_flat(flat, [v.aval for v in inputs], there)
        return difference(expected, Graph(found, there))


def difference(expected: Graph, found: Graph) -> str | None:
    """An operation that only one of two programs computes, as text; None if they compute the same."""
    found.numbers = expected.numbers
    if expected.number == found.number:
        return None
    missing = next((eqn for key, eqn in expected.equations.items() if key not in found.equations), None)
    extra = next((eqn for key, eqn in found.equations.items() if key not in expected.equations), None)
    shown = [f"{what} {_described(eqn)}" for what, eqn in (("it lacks", missing), ("it has", extra)) if eqn is not None]
    return ", and ".join(shown) or "its operations are put together in another way"


def _described(eqn) -> str:
    over = ", ".join(map(str, mentioned_names(eqn.params)))
    types = ", ".join(str(v.aval.str_short()) for v in eqn.outvars)
    return f"{eqn.primitive.name}{over and f' over {over}'} -> {types} ({_jax.where_in_user_code(eqn)})"


class Number(int):
    """The number of an operation or a function, which is no number of the program."""


@dataclasses.dataclass
class Graph:
    """A program with numbered operations: equal operations on equal operands have the same number.

    Attributes:
      program: a jaxpr.
      body: the axes that it was traced over.
      consts: the values of its constants, if it does not hold them.
      parts: the axes that execute each named axis, if the other program uses named axes.
      among_parts: the axes of the other program.
      equations: the equations, by number.
    """

    program: Any
    body: Body
    consts: Sequence[Any] = ()
    parts: Mapping[Any, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    among_parts: Body | None = None
    numbers: dict[Any, int] = dataclasses.field(default_factory=dict)
    equations: dict[int, Any] = dataclasses.field(default_factory=dict)
    _effects: list[int] = dataclasses.field(default_factory=list)
    _open: list[int] = dataclasses.field(default_factory=list)  # functions with rules that are being numbered

    def _number(self, *key: Any) -> int:
        return self.numbers.setdefault(key, Number(len(self.numbers)))

    @functools.cached_property
    def number(self) -> int:
        """The number of the program.  Rules of derivatives are traced for it."""
        return self.function(self.program, self.consts)

    def function(self, jaxpr: Any, consts: Sequence[Any] = ()) -> int:
        """The number of a jaxpr as a function of its inputs."""
        body, own = _jax.open_jaxpr(jaxpr)
        given = [self._constant(c) for c in (own or consts)]
        inputs = [_type(v) for v in _jax.input_vars(body)[len(given) :]]
        around, self._effects = self._effects, []
        results = self._results(body, [*given, *(self._number("input", k, *t) for k, t in enumerate(inputs))])
        effects, self._effects = self._effects, around
        return self._number("function", *inputs, *results, "with effects", *effects)

    def _results(self, jaxpr: Any, operands: Sequence[int]) -> list[int]:
        """The numbers of a jaxpr's results, for operands with these numbers."""
        body, consts = _jax.open_jaxpr(jaxpr)
        variables = _jax.input_vars(body)
        own = [self._constant(c) for c in consts] if len(operands) < len(variables) else []
        env = dict(zip(variables, [*own, *operands], strict=True))
        read = lambda v: self._constant(v.val, v.aval.dtype) if isinstance(v, _jax.Literal) else env[v]  # noqa: E731
        for eqn in body.eqns:
            env.update(zip(eqn.outvars, self._equation(eqn, list(map(read, eqn.invars))), strict=True))
        return list(map(read, body.outvars))

    def _equation(self, eqn: Any, operands: list[int]) -> list[int]:
        primitive, held, over = eqn.primitive.name, _jax.read(eqn), self._over(eqn.params)
        if isinstance(held, _jax.Call):
            return self._results(held.body, operands)
        if primitive == "copy":
            return operands
        if primitive == "axis_index" and len(over) > 1:
            traced = trace_flat(lambda: lax.axis_index(over), [], self.among_parts or self.body)
            return dataclasses.replace(self, parts={})._results(traced, [])
        if primitive == "pdot" and not over:  # a contraction of positional dimensions
            positional = functools.partial(bind_contraction, **{**eqn.params, "mentions": None})
            return self._results(trace_flat(positional, [v.aval for v in eqn.invars], self.body), operands)
        if primitive in _NEUTRAL:
            operands, neutral = sorted(operands), self._constant(_NEUTRAL[primitive], eqn.outvars[0].aval.dtype)
            if _type(eqn.outvars[0]) in _INDICES and neutral in operands:
                operands.remove(neutral)
                return operands
        if primitive in _IN_ANY_ORDER:
            over = tuple(sorted(over, key=str))
        if isinstance(held, (_jax.CustomJvp, _jax.CustomVjp)):
            options = self._derivative(eqn, held)
        else:
            params = {**eqn.params, "vmap_method": eqn.params.get("vmap_method") or "sequential"}
            options = self._value([(k, v) for k, v in sorted(params.items()) if not over or k not in _SEEN_IN_OVER])
        key = self._number(primitive, over, options, *operands)
        self.equations.setdefault(key, eqn)
        if _jax.has_side_effect(eqn):
            self._effects.append(key)
        return [self._number("result", k, key, *_type(v)) for k, v in enumerate(eqn.outvars)]

    def _over(self, params: Mapping[str, Any]) -> tuple[Any, ...]:
        """The axes of an operation: those that execute its named axes, and positions."""
        over = [p for n in mentioned_names(params) for p in self.parts.get(n, (n,))]
        return (*over, *(("position", k) for k in (positions(params) if "axes" in params else ())))

    def _derivative(self, eqn: Any, held: Any) -> Any:
        """Numbers for a function and its derivative."""
        own = self.function(held.body)
        if own in self._open:
            return own  # the rule calls its own function
        self._open.append(own)
        try:
            rules = self.function(derivative(functools.partial(trace_flat, body=self.body), eqn))
        except Exception:
            rules = None  # what jax.checkpoint computes again keeps calls whose rules JAX has used already
        self._open.pop()
        return own, held.symbolic_zeros, rules

    def _constant(self, value: Any, dtype: Any = None) -> int:
        if _jax.is_key(value):
            return self._number("key", str(value.dtype), self._constant(jax.random.key_data(value)))
        array = np.asarray(value, dtype)
        return self._number("constant", array.shape, str(array.dtype), array.tobytes())

    def _value(self, value: Any) -> Any:
        """A parameter, converted to a value that can be compared by equality."""
        if _jax.is_jaxpr(value):
            return self.function(value)
        if isinstance(value, (np.ndarray, jax.Array)):
            return self._constant(value)
        if isinstance(value, Mapping):
            return tuple((key, self._value(v)) for key, v in value.items())
        if isinstance(value, (tuple, list)):
            return tuple(map(self._value, value))
        if isinstance(value, functools.partial):
            return self._value((value.func, value.args, value.keywords))
        if isinstance(value, types.FunctionType):  # the function of a callback
            used = inspect.getclosurevars(value)
            data = {name: v for name, v in used.globals.items() if isinstance(v, _DATA)}
            return self._value((value.__code__, used.nonlocals, data, value.__defaults__, value.__kwdefaults__))
        if isinstance(value, types.CodeType):
            return value.co_code, value.co_names, self._value(value.co_consts)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return type(value), self._value([getattr(value, f.name) for f in dataclasses.fields(value)])
        if isinstance(value, set):
            return frozenset(value)
        return type(value), repr(value) if isinstance(value, (float, complex)) else value


def _type(v) -> tuple[Any, ...]:
    return v.aval.shape, str(v.aval.dtype)


_DATA = (int, float, complex, np.ndarray, np.generic, jax.Array)
_NEUTRAL = {"add": 0, "mul": 1}  # commutative; the neutral element is dropped from indices
_INDICES = (((), "int32"), ((), "int64"))
_IN_ANY_ORDER = ("psum", "pmax", "pmin", "pdot")
_SEEN_IN_OVER = ("axes", "axis_name", "axis_size", "mentions")
