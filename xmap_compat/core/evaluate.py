"""Stage 5: evaluate a named program on one device.

Ordinary primitives are batched over local dimensions; collectives go through the table; control flow and calls are
rebuilt around the evaluation of their bodies: collectives are found at any depth, and values keep exact named axes.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xmap_compat import _jax
from xmap_compat.core import errors
from xmap_compat.core.batch import bind_named
from xmap_compat.core.collectives import COLLECTIVES, collectives_in, collectives_of
from xmap_compat.core.device import DeviceView, as_operand, conform_to_names
from xmap_compat.core.names import Checker, Names
from xmap_compat.core.parameters import axis_names
from xmap_compat.core.rules import control_flow, custom_derivatives
from xmap_compat.core.rules.callables import collectives_of_rules, evaluate_callable
from xmap_compat.core.rules.callbacks import CALLBACKS, call_python
from xmap_compat.core.rules.ordinary import DIRECT, evaluate_primitive
from xmap_compat.core.rules.partitioned import evaluate_partitioned
from xmap_compat.core.rules.table import translate
from xmap_compat.core.specs import AxisName
from xmap_compat.core.values import NamedValue, is_float0, positional

Tracer = Callable[..., Any]


class RepeatedCalls:
    """The jitted functions that a program calls more than once: each stays one, evaluated once for each layout.

    Other jitted functions are evaluated in place, which is faster to trace.
    """

    def __init__(self, jaxpr: Any):
        found = (_jax.read(eqn) for eqn, _ in _jax.walk(jaxpr, once=True))
        counts = collections.Counter(id(c.body) for c in found if isinstance(c, _jax.Call) and c.name is not None)
        self._repeated = {key for key, count in counts.items() if count > 1}
        self._functions: dict[tuple[Any, ...], Any] = {}

    def __contains__(self, jaxpr: Any) -> bool:
        return id(jaxpr) in self._repeated

    def function(self, ev: Evaluator, jaxpr: Any, name: str) -> Callable[..., list[NamedValue]]:
        """The jitted function that evaluates a jaxpr; its cache distinguishes layouts, as they are in the types."""
        key = (id(jaxpr), id(ev.view), ev.gathers, ev.apart, ev.iterating)
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
      view: the placements, and whether values are typed.
      checker: the named-shape inference of the same xmap.
      trace: ``trace(fun, avals) -> closed jaxpr``: traces a callable that a custom rule holds under
        the axis names of the xmap, as the body itself was traced.
      calls: jitted functions that the program calls repeatedly.
      taken: in a branch, which elements take it; None where all do.
      apart: axes along which not every element gets here, as they take another branch or have left the loop.
      iterating: the loop resources whose iterations run this.
      rules: the axis names found in the custom rules of equations.
      gathers: equations of the program whose results vary in their type.
    """

    view: DeviceView
    checker: Checker
    trace: Tracer
    calls: RepeatedCalls
    taken: NamedValue | None = None
    apart: Names = frozenset()
    iterating: frozenset[Hashable] = frozenset()
    rules: dict[Any, Any] = dataclasses.field(default_factory=dict)
    gathers: frozenset[Any] = frozenset()

    def evaluate(
        self, jaxpr: Any, args: Sequence[NamedValue], consts: Sequence[NamedValue] | None = None
    ) -> list[NamedValue]:
        """The results of a jaxpr (closed, or with its constants given)."""
        body, own_consts = _jax.open_jaxpr(jaxpr)
        values = consts if consts is not None else [positional(c) for c in own_consts]
        env: Any = dict(zip(_jax.input_vars(body), [*values, *args], strict=True))
        read = lambda v: positional(v.val) if isinstance(v, _jax.Literal) else env[v]  # noqa: E731
        if self.taken is None:
            self.run(body.eqns, env)
        else:
            env = control_flow.run_where_taken(self, body.eqns, env)
        return [read(v) for v in body.outvars]

    def gathering(self, jaxpr: Any, inputs: Sequence[Names], results: Sequence[Names]) -> Evaluator:
        """An evaluator that knows a program's best gathers; ``results``: the names to broadcast its results to."""
        if not self.view.typed:
            return self
        from xmap_compat.core.uses import varying_gathers  # loaded where there is a mesh

        found = varying_gathers(self.view, self.checker, jaxpr, inputs, results)
        view = dataclasses.replace(self.view, mixed=True) if found and not self.view.mixed else self.view
        return dataclasses.replace(self, view=view, gathers=found)

    def call(self, jaxpr: Any, operands: Sequence[NamedValue], name: str) -> list[NamedValue]:
        """The results of a function that the user jitted."""
        if jaxpr in self.calls and self.taken is None and not any(map(is_float0, operands)):
            return self.calls.function(self, jaxpr, name)(*operands)
        return self.evaluate(jaxpr, operands)

    def run(self, eqns: Sequence[Any], env: dict[Any, NamedValue]) -> None:
        """Evaluate equations in order; ``env`` holds the values of variables and receives new ones."""
        for eqn in eqns:
            operands = [positional(v.val) if isinstance(v, _jax.Literal) else env[v] for v in eqn.invars]
            with _jax.equation_context(eqn):
                outs = self.equation(eqn, operands)
            env.update(zip(eqn.outvars, outs, strict=True))

    def equation(self, eqn: Any, operands: Sequence[NamedValue]) -> list[NamedValue]:
        """The results of one equation."""
        primitive = eqn.primitive.name
        if primitive in COLLECTIVES:
            if self.moves_nothing(eqn):
                return self.nothing(eqn, operands)
            params = {**eqn.params, "to": "varying"} if eqn in self.gathers else eqn.params
            own = [as_operand(self.view, _as_array(v), axis_names(params)) for v in operands]
            return translate(self.view, primitive, params, own)
        if primitive in CALLBACKS:
            return call_python(self, operands, eqn)
        found = _jax.read(eqn)
        if found is not None:
            return _STRUCTURED[type(found)](self, found, list(operands), eqn)
        if primitive in _PLACING:
            return _PLACING[primitive](self, operands, eqn)
        if primitive not in DIRECT:
            self.checker.refuse_names(eqn)
        return self.ordinary(eqn, operands)

    def moves_nothing(self, eqn: Any) -> bool:
        """Whether a collective moves values between the elements of an axis that has none."""
        row, axes = COLLECTIVES[eqn.primitive.name], self.view.own(axis_names(eqn.params))
        return bool(eqn.invars) and not (row.reduces or row.joint) and self.view.total_size(axes) == 0

    def nothing(self, eqn: Any, operands: Sequence[NamedValue]) -> list[NamedValue]:
        """Results that no element of an axis asks for, or that have none of its elements."""
        names = self.checker.equation(eqn, [v.names for v in operands])
        zeros = [positional(jnp.zeros(v.aval.shape, v.aval.dtype)) for v in eqn.outvars]
        return [conform_to_names(self.view, zero, own) for zero, own in zip(zeros, names)]

    def ordinary(self, eqn: Any, operands: Sequence[NamedValue]) -> list[NamedValue]:
        """The results of an equation that knows nothing of names."""
        if not self.view.typed:
            return evaluate_primitive(self.view, eqn.primitive, operands, eqn.params)
        names = frozenset().union(*(v.names for v in operands))
        primitive, params = _jax.local_operation(eqn, self.view.mesh_axes_of(names), self.view.compiler)
        return evaluate_partitioned(self.view, primitive, operands, params)

    def communicates(self, *jaxprs: Any) -> bool:
        """Whether evaluating these jaxprs, or their derivatives, moves anything between devices."""
        eqns = (eqn for jaxpr in jaxprs for eqn in _jax.open_jaxpr(jaxpr)[0].eqns)
        return any(self.view.place(n).mesh_axes for eqn in eqns for n in self.collectives(eqn))

    def collectives(self, eqn: Any) -> frozenset[AxisName]:
        """Every axis name that collectives in an equation, and in the custom rules inside of it, mention."""
        return collectives_of(eqn) | collectives_of_rules(self, eqn)

    def names_of(self, jaxpr: Any, operands: Sequence[NamedValue]) -> list[Names]:
        return self.checker.results(jaxpr, [v.names for v in operands])

    def conformed(self, values: Sequence[Any], names: Sequence[Names]) -> list[NamedValue]:
        return [conform_to_names(self.view, v, n) for v, n in zip(values, names, strict=True)]


def _as_array(value: NamedValue) -> NamedValue:
    """Literals of a program may be Python numbers, which have no shape."""
    if hasattr(value.data, "shape"):
        return value
    return dataclasses.replace(value, data=np.asarray(value.data, jax.typeof(value.data).dtype))


# --------------------------------------------------------------------------- calls


def _call(ev: Evaluator, call: _jax.Call, operands, eqn):
    return ev.evaluate(call.body, operands) if call.name is None else ev.call(call.body, operands, call.name)


def _checkpoint(ev: Evaluator, call: _jax.Checkpoint, operands, eqn):
    body = lambda *values: ev.evaluate(call.body, values)  # noqa: E731
    return jax.checkpoint(body, policy=call.policy, prevent_cse=call.prevent_cse)(*operands)


def _expanded(ev: Evaluator, call: _jax.Expanded, operands, eqn):
    return evaluate_callable(ev, call.apply, operands)


def _shard_map(ev: Evaluator, call: _jax.ShardMap, operands, eqn):
    if ev.view.typed or collectives_in(call.body) & set(ev.view.placements):
        raise errors.shard_map_inside(_jax.where_in_user_code(eqn))
    return bind_named(ev.view, eqn.primitive, operands, eqn.params)


Rule = Callable[[Evaluator, Any, Sequence[NamedValue], Any], list[NamedValue]]

_STRUCTURED: dict[type, Rule] = {
    _jax.Call: _call,
    _jax.Checkpoint: _checkpoint,
    _jax.Scan: control_flow.scan,
    _jax.While: control_flow.while_loop,
    _jax.Cond: control_flow.cond,
    _jax.CustomJvp: custom_derivatives.custom_jvp,
    _jax.CustomVjp: custom_derivatives.custom_vjp,
    _jax.CustomVmap: custom_derivatives.custom_vmap,
    _jax.LinearSolve: custom_derivatives.linear_solve,
    _jax.HijaxOperation: custom_derivatives.operation,
    _jax.Expanded: _expanded,
    _jax.ShardMap: _shard_map,
}


# ------------------------------------------------------------------------- placement


def _sharding_constraint(ev: Evaluator, operands, eqn):
    """Inside our shard_map each device already holds its part: a constraint applies to the compiler's axes only."""
    if not ev.view.typed:
        return bind_named(ev.view, eqn.primitive, operands, eqn.params)
    sharding = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
    return [_constrained(ev.view, v, sharding) if ev.view.compiler else v for v in operands]


def _constrained(view: DeviceView, value: NamedValue, sharding: Any) -> NamedValue:
    """Constrain a value's positional dimensions over the compiler's axes, as a sharding over all axes says."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return value
    entries = itertools.chain(sharding.spec, itertools.repeat(None))
    wanted = [next(entries) if name is None else jax.sharding.PartitionSpec.UNCONSTRAINED for name in value.dims]
    return dataclasses.replace(value, data=_jax.constrained(value.data, wanted, view.compiler))


def _device_put(ev: Evaluator, operands, eqn):
    """Treat shardings as constraints; leave other places (a device, a kind of memory) to JAX."""
    places = eqn.params["devices"]
    if ev.view.typed and any(isinstance(place, jax.sharding.NamedSharding) for place in places):
        return [_constrained(ev.view, v, place) if ev.view.compiler else v for v, place in zip(operands, places)]
    return ev.ordinary(eqn, operands)


_PLACING: dict[str, Callable[[Evaluator, Sequence[NamedValue], Any], list[NamedValue]]] = {
    "sharding_constraint": _sharding_constraint,
    "reshard": _sharding_constraint,
    "device_put": _device_put,
}
