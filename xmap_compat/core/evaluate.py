"""Stage 5: evaluate a named program on one device.

Ordinary primitives are batched over local dimensions, and collectives are translated by their
table.  Control flow and calls are rebuilt around the evaluation of their bodies, so collectives
work at any depth, and names stay exact.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat.core.collectives import COLLECTIVES
from xmap_compat.core.device import DeviceView, as_operand, laid_out_over
from xmap_compat.core.names import Checker, Names
from xmap_compat.core.parameters import axis_names
from xmap_compat.core.placement import Placement
from xmap_compat.core.rules import translate
from xmap_compat.core.rules.libraries import bind_by_rule
from xmap_compat.core.rules.ordinary import bind_ordinary
from xmap_compat.core.values import (
    NamedValue,
    as_array,
    is_float0,
    names_of_each,
    positional,
    value_of,
)

TraceFun = Callable[..., Any]
Rule = Callable[["Evaluator", Any, Sequence[NamedValue], Any], list[NamedValue]]


class RepeatedCalls:
    """The jitted functions that a program calls more than once: each stays one, evaluated once for
    each layout.

    Other jitted functions are evaluated in place, which is faster to trace.
    """

    def __init__(self, jaxpr: Any):
        counts: collections.Counter[Any] = collections.Counter()
        for eqn, _ in _jax.walk(jaxpr, once=True):
            held = _jax.read(eqn)
            if isinstance(held, _jax.Call) and held.name is not None:
                counts[held.body] += 1
        self._counts = counts
        self._functions: dict[tuple[Any, ...], Any] = {}

    def __contains__(self, jaxpr: Any) -> bool:
        return self._counts[jaxpr] > 1

    def function(self, ev: Evaluator, jaxpr: Any, name: str) -> Callable[..., list[NamedValue]]:
        """The jitted function that evaluates a jaxpr.  Its cache distinguishes layouts, which are
        in the types.
        """
        key = (jaxpr, id(ev.view), ev.gathers, ev.diverging, ev.iterating)
        if key not in self._functions:

            def fun(*operands):
                return ev.evaluate(jaxpr, operands)

            fun.__name__ = fun.__qualname__ = name
            self._functions[key] = jax.jit(fun)
        return self._functions[key]


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Evaluates jaxprs of one xmap on one device.

    Attributes:
      view: the axes of the xmap on one device.
      checker: infers which of them values vary over.
      trace: ``trace(fun, types) -> closed jaxpr``: traces a callable that a custom rule holds under
        the axis names of the xmap, as the body itself was traced.
      calls: jitted functions that the program calls repeatedly.
      structured: the rules of equations that hold programs, by the type of what they hold, or by
        their primitive.
      diverging: axes along which elements take different branches, or leave a loop at different
        times: not all of their elements get to this point.
      iterating: the loop resources in whose iterations this runs.
      rule_names: the cache of ``collective_axes_within``.
      gathers: the gathers, as equations, whose results are typed as varying.
    """

    view: DeviceView
    checker: Checker
    trace: TraceFun
    calls: RepeatedCalls
    structured: Mapping[Any, Rule]
    diverging: Names = frozenset()
    iterating: frozenset[Hashable] = frozenset()
    rule_names: dict[Any, Any] = dataclasses.field(default_factory=dict)
    gathers: frozenset[Any] = frozenset()

    def evaluate(
        self, jaxpr: Any, args: Sequence[NamedValue], consts: Sequence[NamedValue] | None = None
    ) -> list[NamedValue]:
        """The results of a jaxpr (closed, or with its constants given)."""
        body, constants = _jax.open_jaxpr(jaxpr)
        if consts is None:
            consts = list(map(positional, constants))
        env: Any = dict(zip(_jax.input_vars(body), [*consts, *args], strict=True))
        self.run(body.eqns, env)
        return [value_of(env, atom) for atom in body.outvars]

    def gathering(self, jaxpr: Any, inputs: Sequence[Names], results: Sequence[Names]) -> Evaluator:
        """An evaluator that types as varying those gathers of a program for which this sends less;
        the program's results are broadcast to the names ``results``.
        """
        if not self.view.typed:
            return self
        from xmap_compat.core.uses import varying_gathers  # loaded where there is a mesh

        view = self.view
        best = varying_gathers(view, self.checker, jaxpr, inputs, results)
        if best and not view.gathers_vary:
            view = dataclasses.replace(view, gathers_vary=True)
        return dataclasses.replace(self, view=view, gathers=best)

    def call(self, jaxpr: Any, operands: Sequence[NamedValue], name: str) -> list[NamedValue]:
        """The results of a function that the user jitted."""
        if jaxpr in self.calls and not any(map(is_float0, operands)):
            return self.calls.function(self, jaxpr, name)(*operands)
        return self.evaluate(jaxpr, operands)

    def run(self, eqns: Sequence[Any], env: dict[Any, NamedValue]) -> None:
        """Evaluate equations in order; ``env`` holds the values of variables and receives new
        ones.
        """
        for eqn in eqns:
            operands = [value_of(env, atom) for atom in eqn.invars]
            with _jax.equation_context(eqn):
                outs = self.equation(eqn, operands)
            # dce_sink has a batched result in jax 0.10, and no variable for it.
            env.update(zip(eqn.outvars, outs, strict=bool(eqn.outvars)))

    def equation(self, eqn: Any, operands: Sequence[NamedValue]) -> list[NamedValue]:
        """The results of one equation."""
        primitive = eqn.primitive.name
        if primitive in COLLECTIVES:
            return self._collective(eqn, operands)
        held = _jax.read(eqn)
        rule = self.structured.get(primitive if held is None else type(held))
        if rule is not None:
            return rule(self, held, operands, eqn)
        if _jax.has_custom_batching(eqn):
            return bind_by_rule(self, eqn, operands)
        return bind_ordinary(self.view, eqn, operands)

    def _collective(self, eqn, operands):
        params = eqn.params
        if eqn in self.gathers:
            params = {**params, "to": "varying"}
        axes = axis_names(params)
        values = [as_operand(self.view, _as_array(operand), axes) for operand in operands]
        return translate(self.view, eqn.primitive.name, params, values)

    def placing(self, placements: Mapping[Any, Placement]) -> Evaluator:
        """An evaluator whose axes have other placements."""
        view = dataclasses.replace(self.view, placements=placements)
        checker = dataclasses.replace(self.checker, placements=placements)
        return dataclasses.replace(self, view=view, checker=checker)

    def names_of(self, jaxpr: Any, operands: Sequence[NamedValue]) -> list[Names]:
        return self.checker.results(jaxpr, names_of_each(operands))

    def laid_out(self, values: Sequence[Any], names: Sequence[Names]) -> list[NamedValue]:
        return [laid_out_over(self.view, v, n) for v, n in zip(values, names, strict=True)]


def _as_array(value: NamedValue) -> NamedValue:
    if hasattr(value.data, "shape"):
        return value
    return value.with_data(as_array(value.data))
