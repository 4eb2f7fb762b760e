"""Stage 5: evaluate a named program on one device.

Ordinary primitives are batched over the local dimensions of their operands; collectives go through
the table; control flow and calls are rebuilt around the evaluation of their bodies, so that a
collective is found wherever it hides and every value keeps exact named axes.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import _jax, errors
from xmap_compat.axis_specs import AxisName
from xmap_compat.collectives import RULES, mentioned_names, sum_over
from xmap_compat.named_shapes import Checker, linear_solve_names, root_names, scan_carry_names, while_names
from xmap_compat.named_values import (
    COTANGENT,
    Locality,
    NamedValue,
    apply_positional,
    bind_named,
    conform,
    conform_to_names,
    index_of,
    positional,
    vary_over,
)
from xmap_compat.primitives import DIRECT, evaluate_primitive
from xmap_compat.resources import Placement

Names = frozenset[AxisName]
NONE: Names = frozenset()
Tracer = Callable[..., Any]


class RepeatedCalls:
    """The jitted functions that a program calls more than once: each stays one, evaluated once for its layouts.

    Others are evaluated in place, which is faster to trace.
    """

    def __init__(self, jaxpr: Any):
        counts: collections.Counter[int] = collections.Counter()
        seen: set[int] = set()
        _count_calls(jaxpr, counts, seen)
        self._repeated = {key for key, count in counts.items() if count > 1}
        self._functions: dict[tuple[int, int], Any] = {}

    def __contains__(self, jaxpr: Any) -> bool:
        return id(jaxpr) in self._repeated

    def function(self, ev: Evaluator, jaxpr: Any, name: str) -> Callable[..., list[NamedValue]]:
        """The jitted function that evaluates a jaxpr; its cache tells layouts apart, as they are in the types."""
        key = (id(jaxpr), id(ev.loc))
        if key not in self._functions:

            def fun(*operands):
                return ev.evaluate(jaxpr, operands)

            fun.__name__ = fun.__qualname__ = name
            self._functions[key] = jax.jit(fun)
        return self._functions[key]


def _count_calls(jaxpr, counts, seen):
    for eqn in _jax.open_jaxpr(jaxpr)[0].eqns:
        for sub in _jax.subjaxprs(eqn.params):
            if eqn.primitive.name in ("jit", "pjit"):
                counts[id(sub)] += 1
            if id(sub) not in seen:
                seen.add(id(sub))
                _count_calls(sub, counts, seen)


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Evaluates jaxprs of one xmap on one device.

    Attributes:
      loc: the placements, and whether values are typed.
      checker: the named-shape inference of the same xmap.
      trace: ``trace(fun, avals) -> closed jaxpr``: traces a callable that a custom rule holds under
        the axis names of the xmap, as the body itself was traced.
      calls: jitted functions that the program calls repeatedly.
    """

    loc: Locality
    checker: Checker
    trace: Tracer
    calls: RepeatedCalls

    def evaluate(
        self, jaxpr: Any, args: Sequence[NamedValue], consts: Sequence[NamedValue] | None = None
    ) -> list[NamedValue]:
        """The results of a jaxpr (closed, or with its constants given)."""
        body, own_consts = _jax.open_jaxpr(jaxpr)
        values = consts if consts is not None else [positional(c) for c in own_consts]
        env = dict(zip(_jax.input_vars(body), [*values, *args], strict=True))
        read = lambda v: positional(v.val) if isinstance(v, _jax.Literal) else env[v]  # noqa: E731
        self.run(body.eqns, env)
        return [read(v) for v in body.outvars]

    def call(self, jaxpr: Any, operands: Sequence[NamedValue], name: str) -> list[NamedValue]:
        """The results of a function that the user jitted."""
        if jaxpr in self.calls and not any(map(_is_float0, operands)):
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
        if primitive in RULES:
            return self._collective(primitive, eqn.params, operands)
        if primitive in STRUCTURED:
            return STRUCTURED[primitive](self, eqn.params, list(operands), eqn)
        if primitive not in DIRECT:
            self._refuse_names(eqn)
        return self.ordinary(eqn, operands)

    def ordinary(self, eqn: Any, operands: Sequence[NamedValue]) -> list[NamedValue]:
        """The results of an equation that knows nothing of names."""
        if not self.loc.typed:
            return evaluate_primitive(self.loc, eqn.primitive, operands, eqn.params)
        names = frozenset().union(*(v.names for v in operands))
        primitive, params = _jax.local_operation(eqn, self.loc.mesh_axes_of(names))
        return evaluate_primitive(self.loc, primitive, operands, params)

    def _refuse_names(self, eqn):
        """Named axes in a primitive that no rule translates: a worded refusal, never a guess."""
        hidden = [n for sub in _jax.subjaxprs(eqn.params) for n in collectives_in(sub)]
        names = [n for n in dict.fromkeys([*mentioned_names(eqn.params), *hidden]) if n in self.loc.placements]
        if names:
            raise errors.unsupported_primitive(eqn.primitive.name, names, _jax.where_in_user_code(eqn))

    def _collective(self, primitive, params, operands):
        translate = RULES[primitive].translate
        operands = [_as_array(v) for v in operands]
        if primitive == "pdot" or not operands:
            return [translate(self.loc, params, *operands)]
        return [translate(self.loc, params, operand) for operand in operands]

    def communicates(self, *jaxprs: Any) -> bool:
        """Whether evaluating these jaxprs moves anything between devices."""
        return any(self.loc.place(n).mesh_axes for jaxpr in jaxprs for n in collectives_in(jaxpr))

    def names_of(self, jaxpr: Any, operands: Sequence[NamedValue]) -> list[Names]:
        return self.checker.results(jaxpr, [v.names for v in operands])

    def conformed(self, values: Sequence[Any], names: Sequence[Names]) -> list[NamedValue]:
        return [conform_to_names(self.loc, v, n) for v, n in zip(values, names, strict=True)]


def _as_array(value: NamedValue) -> NamedValue:
    """Literals of a program may be Python numbers, which have no shape."""
    if hasattr(value.data, "shape"):
        return value
    return dataclasses.replace(value, data=np.asarray(value.data, jax.typeof(value.data).dtype))


def collectives_in(jaxpr: Any) -> frozenset[AxisName]:
    """Every axis name that some collective inside a jaxpr mentions."""
    body, _ = _jax.open_jaxpr(jaxpr)
    known = _COLLECTIVES_IN.get(body)
    if known is None:
        mentioned = [mentioned_names(eqn.params) for eqn in body.eqns if eqn.primitive.name in RULES]
        inside = [collectives_in(sub) for eqn in body.eqns for sub in _jax.subjaxprs(eqn.params)]
        known = _COLLECTIVES_IN[body] = frozenset().union(*mentioned, *inside)
    return known


# One jaxpr may stand in many equations, which may stand in many jaxprs.
_COLLECTIVES_IN: weakref.WeakKeyDictionary[Any, frozenset[AxisName]] = weakref.WeakKeyDictionary()


def has_custom_rule(jaxpr: Any) -> bool:
    """Whether a jaxpr calls a function with a custom derivative."""
    eqns = _jax.open_jaxpr(jaxpr)[0].eqns
    return any(
        eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call")
        or any(map(has_custom_rule, _jax.subjaxprs(eqn.params)))
        for eqn in eqns
    )


def mentions_any(jaxpr: Any, names: Iterable[AxisName]) -> bool:
    """Whether some collective inside a jaxpr is over one of the names."""
    return not collectives_in(jaxpr).isdisjoint(names)


# --------------------------------------------------------------------------- calls


def _inline(param: str):
    def rule(ev: Evaluator, params, operands, eqn):
        return ev.evaluate(params[param], operands)

    return rule


def _jit(ev: Evaluator, params, operands, eqn):
    return ev.call(params["jaxpr"], operands, params["name"])


def _remat(ev: Evaluator, params, operands, eqn):
    def body(*values):
        return ev.evaluate(params["jaxpr"], values)

    return jax.checkpoint(body, policy=params["policy"], prevent_cse=params["prevent_cse"])(*operands)


# ------------------------------------------------------------------------- control flow


def _scan(ev: Evaluator, params, operands, eqn):
    num_consts, num_carry = _jax.scan_arity(params)
    consts, carry, xs = _split(operands, num_consts, num_carry)
    names = scan_carry_names(ev.checker, params, [v.names for v in operands])
    first = ev.conformed(carry, names)

    def body(carry, slices):
        outs = ev.evaluate(params["jaxpr"], [*consts, *carry, *slices])
        return ev.conformed(outs[:num_carry], names), outs[num_carry:]

    last, ys = lax.scan(
        body,
        first,
        [_scanned_first(x) for x in xs],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*last, *(NamedValue(y.data, (None, *y.dims), y.names) for y in ys)]


def _scanned_first(value: NamedValue) -> NamedValue:
    """Move the first positional dimension to the front of the data and out of ``dims``: scan strips it."""
    at = value.positional_dims()[0]
    data = jnp.moveaxis(value.data, at, 0) if at else value.data
    return NamedValue(data, (*value.dims[:at], *value.dims[at + 1 :]), value.names)


def _while(ev: Evaluator, params, operands, eqn):
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, init = _split(operands, num_cond, num_body)
    names, varying = while_names(ev.checker, params, [v.names for v in operands])
    condition = lambda carry: ev.evaluate(params["cond_jaxpr"], [*cond_consts, *carry])[0]  # noqa: E731
    step = lambda carry: ev.conformed(ev.evaluate(params["body_jaxpr"], [*body_consts, *carry]), names)  # noqa: E731
    first = ev.conformed(init, names)
    together = ev.communicates(params["cond_jaxpr"], params["body_jaxpr"])
    if not ev.loc.local_names(varying) and not (varying and together):
        return lax.while_loop(lambda carry: condition(carry).data, step, first)
    return _while_any(ev, condition, step, first, varying, together)


def _while_any(ev, condition, step, first, varying, together):
    """Run until every element is done; elements that are done keep their value.

    Where the loop communicates, all devices must agree to go on: whether any is left is then an
    all-reduce; otherwise each device stops by itself.
    """

    def state(pending, carry):
        left = pending.data.any()
        if together:
            axes = ev.loc.mesh_axes_of(varying)
            left = lax.pmax(left.astype(np.int32), axes) > 0 if axes else left
        return left, pending, carry

    def body(current):
        _, pending, carry = current
        stepped = [_select(ev, pending, [old, new]) for old, new in zip(carry, step(carry))]
        carry = [conform(ev.loc, new, old.dims, old.names) for old, new in zip(carry, stepped)]
        again = ev.conformed([condition(carry)], [varying])[0]
        return state(NamedValue(pending.data & again.data, again.dims, again.names), carry)

    pending = ev.conformed([condition(first)], [varying])[0]
    return lax.while_loop(lambda current: current[0], body, state(pending, first))[2]


def _select(ev, which: NamedValue, cases: Sequence[NamedValue]) -> NamedValue:
    return bind_named(ev.loc, lax.select_n_p, [which, *cases], {})[0]


def _cond(ev: Evaluator, params, operands, eqn):
    index, *operands = operands
    branches = params["branches"]
    names = [n | index.names for n in map(frozenset().union, *(ev.names_of(b, operands) for b in branches))]
    if ev.loc.local_names(index.names) or (index.names and _must_stay_together(ev, branches)):
        return _cond_select(ev, branches, index, operands)

    def branch(jaxpr):
        return lambda *values: ev.conformed(ev.evaluate(jaxpr, values), names)

    # What differs inside differs before: a cast within a branch would become a sum within a branch of the gradient.
    operands = [vary_over(ev.loc, v, index.names) for v in operands]
    return lax.switch(index.data, [branch(b) for b in branches], *operands)


def _must_stay_together(ev, branches):
    """Whether a device that takes another branch might miss a collective that others wait for.

    A custom rule may hide one in its derivative.  Then, as for several elements on one device, all branches
    are computed and each element takes its own.
    """
    return ev.communicates(*branches) or any(map(has_custom_rule, branches))


def _cond_select(ev, branches, index, operands):
    clamped = lax.clamp(np.int32(0), index.data.astype(np.int32), np.int32(len(branches) - 1))
    which = dataclasses.replace(index, data=clamped)
    results = [ev.evaluate(b, _only_where_taken(ev, b, which, k, operands)) for k, b in enumerate(branches)]
    return [_select(ev, which, cases) for cases in zip(*results)]


def _only_where_taken(ev, branch, which, k, operands):
    """Cut the gradient of elements that take another branch, where this one may not be differentiable.

    (``0 * inf`` would be NaN; ``jax.vmap`` does the same.)  With a collective in the branch, which a custom rule
    may hide, every element contributes to the others, so nothing can be cut.
    """
    if collectives_in(branch) or has_custom_rule(branch):
        return operands
    taken = dataclasses.replace(which, data=which.data == k)
    return [
        _select(ev, taken, [dataclasses.replace(v, data=lax.stop_gradient(v.data)), v]) if _is_inexact(v) else v
        for v in operands
    ]


def _is_inexact(value):
    return jnp.issubdtype(jax.typeof(value.data).dtype, jnp.inexact)


# ------------------------------------------------------------------------ custom rules


def _custom_jvp(ev: Evaluator, params, operands, eqn):
    names = ev.names_of(params["call_jaxpr"], operands)
    rule = _jax.custom_jvp_rule(params)
    inexact = [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars]

    def values_of(operands):
        return ev.conformed(ev.evaluate(params["call_jaxpr"], operands), names)

    @jax.custom_jvp
    def fun(*values):
        return list(itertools.compress(values_of(values), inexact))

    @fun.defjvp
    def jvp(primals, tangents):
        outs = _evaluate_callable(ev, rule, [*primals, *tangents])
        out_primals = itertools.compress(ev.conformed(outs[: len(names)], names), inexact)
        out_tangents = itertools.compress(outs[len(names) :], inexact)
        pairs = [(primal, _tangent_like(ev, primal, t, eqn)) for primal, t in zip(out_primals, out_tangents)]
        return [primal for primal, _ in pairs], [tangent for _, tangent in pairs]

    differentiable = iter(fun(*operands))
    if all(inexact):
        return list(differentiable)
    # Tangents of integers have no type that fits inside of a typed shard_map (jax 0.10): they stay out of the rule.
    constant = values_of([dataclasses.replace(v, data=lax.stop_gradient(v.data)) for v in operands])
    return [next(differentiable) if smooth else value for value, smooth in zip(constant, inexact)]


def _tangent_like(ev, primal, tangent, eqn):
    if not tangent.names <= primal.names:
        raise errors.tangent_varies_more(tangent.names - primal.names, _jax.where_in_user_code(eqn))
    return conform(ev.loc, tangent, primal.dims, primal.names)


def _custom_vjp(ev: Evaluator, params, operands, eqn):
    names = ev.names_of(params["call_jaxpr"], operands)
    run_fwd, run_bwd, layout = _jax.custom_vjp_rules(params)
    layouts = [(v.dims, v.names) for v in operands]

    @jax.custom_vjp
    def fun(*values):
        return ev.conformed(ev.evaluate(params["call_jaxpr"], values), names)

    def fwd(*primals):
        outs = _evaluate_callable(ev, run_fwd, primals)
        num_residuals = len(outs) - len(names)
        returned = iter(outs[:num_residuals])
        _, _, forwarded = layout()
        residuals = [next(returned) if k is None else primals[k] for k in forwarded]
        return ev.conformed(outs[num_residuals:], names), residuals

    def backward(residuals, cotangents, own_names):
        """The cotangents of the operands, right for those that vary over ``own_names``."""
        cases = _cotangents_for(ev.loc, params["call_jaxpr"], residuals, cotangents, own_names)
        return [_apply_rule(ev, run_bwd, residuals, cotangents, case) for case in cases]

    def bwd(residuals, cotangents):
        found = {names: backward(residuals, cotangents, names) for names in {names for _, names in layouts}}
        parts = [[outs[k] for outs in found[names]] for k, (_, names) in enumerate(layouts)]
        return tuple(_add([_cotangent_like(ev, ct, *layout) for ct in cts]) for cts, layout in zip(parts, layouts))

    fun.defvjp(fwd, bwd)
    return fun(*operands)


def _cotangents_for(loc, jaxpr, residuals, cotangents, own_names) -> list[dict[int, NamedValue]]:
    """What to apply a custom backward rule to, for an operand that varies over ``own_names``: the sum of these cases.

    The cotangent of a result that does not vary over an axis arrives summed over it, and what the rule makes for an
    operand that does not vary either is summed over it where anything in the rule varies.  The cotangent must
    not be counted for every element there.  If no collective has made the result what it is, then every element's
    call returned the same value: one of them takes the cotangent.  If a collective has, the rule may sum by itself
    or leave that to us: it is applied to that cotangent alone, so that the result tells.

    Returns:
      Cases, each with cotangents by the number of their result; those that are missing are zero.
    """
    together = frozenset().union(*(v.names for v in (*residuals, *cotangents))) - {COTANGENT} - own_names
    cases: dict[Names, dict[int, NamedValue]] = {}
    for k, (ct, collectives) in enumerate(zip(cotangents, _collectives_of_results(jaxpr), strict=True)):
        summed = NONE if _is_float0(ct) else together - ct.names
        cases.setdefault(summed & collectives, {})[k] = _at_first_element(loc, ct, summed - collectives)
    return list(cases.values())


def _apply_rule(ev, rule, residuals, cotangents, case):
    """The results of a backward rule; where some cotangents are zero, by the linearity of the rule without them."""
    marked = [dataclasses.replace(ct, names=ct.names | {COTANGENT}) for ct in case.values()]
    if len(case) == len(cotangents):
        return _evaluate_callable(_with_cotangents(ev), rule, [*residuals, *marked])
    zeros = [np.zeros(_positional_shape(ct), ct.data.dtype) for ct in cotangents]

    def rule_of_case(*args):
        fixed, given = args[: len(residuals)], args[len(residuals) :]
        kept: list[bool] = []

        def linear(*given):
            everything = [*zeros]
            for k, ct in zip(case, given):
                everything[k] = ct
            outs = rule(*fixed, *everything)
            kept[:] = [x is not None and getattr(x, "dtype", None) != _jax.float0 for x in outs]
            return [x for x, keep in zip(outs, kept) if keep]

        outs = iter(jax.jvp(linear, tuple(map(jnp.zeros_like, given)), tuple(given))[1])
        return [next(outs) if keep else None for keep in kept]

    return _evaluate_callable(_with_cotangents(ev), rule_of_case, [*residuals, *marked])


def _add(values):
    first, *others = values
    if first is None or not others:
        return first
    return dataclasses.replace(first, data=sum((other.data for other in others), first.data))


def _collectives_of_results(jaxpr) -> list[Names]:
    """The axes of the collectives that each result is computed with."""
    body, _ = _jax.open_jaxpr(jaxpr)
    found: dict[Any, Names] = {}
    read = lambda v: NONE if isinstance(v, _jax.Literal) else found.get(v, NONE)  # noqa: E731
    for eqn in body.eqns:
        inside = [collectives_in(sub) for sub in _jax.subjaxprs(eqn.params)]
        own = mentioned_names(eqn.params) if eqn.primitive.name in RULES else ()
        found.update(dict.fromkeys(eqn.outvars, frozenset(own).union(*inside, *map(read, eqn.invars))))
    return [read(v) for v in body.outvars]


def _at_first_element(loc, value, names):
    """A value that is zero but for the first element of axes that it did not vary over."""
    if not names:
        return value
    index = index_of(loc, [n for n in loc.placements if n in names])
    return apply_positional(loc, lambda x, i: jnp.where(i == 0, x, jnp.zeros_like(x)), value, index)


def _with_cotangents(ev: Evaluator) -> Evaluator:
    """An evaluator that knows the mark of cotangents, as an axis of one element."""
    placements = {**ev.loc.placements, COTANGENT: Placement(COTANGENT, 1)}
    loc = dataclasses.replace(ev.loc, placements=placements)
    return dataclasses.replace(ev, loc=loc, checker=dataclasses.replace(ev.checker, placements=placements))


def _cotangent_like(ev, cotangent: NamedValue | None, dims, names) -> NamedValue | None:
    """Sum a cotangent over axes that its primal does not vary over; one that was summed already is left alone."""
    if cotangent is None:
        return None
    cotangent = dataclasses.replace(cotangent, names=cotangent.names - {COTANGENT})
    extra = cotangent.names - names
    if extra:
        cotangent = sum_over(ev.loc, cotangent, sorted(extra, key=str))
    return conform(ev.loc, cotangent, dims, names)


def _evaluate_callable(ev: Evaluator, fun: Callable[..., Any], values: Sequence[NamedValue]) -> list[NamedValue | None]:
    """Trace a callable that a custom rule holds on positional types, then evaluate it on named values.

    Tangents of integers (float0) are no operands of any equation: they are passed as constants, and
    stand as None in the results.
    """
    dynamic = [v for v in values if not _is_float0(v)]
    kept: list[bool] = []

    def on_dynamic(*args):
        rest = iter(args)
        outs = fun(*(np.zeros(_positional_shape(v), _jax.float0) if _is_float0(v) else next(rest) for v in values))
        kept[:] = [x is not None and getattr(x, "dtype", None) != _jax.float0 for x in outs]
        return [x for x, keep in zip(outs, kept) if keep]

    jaxpr = ev.trace(on_dynamic, [_positional_type(v) for v in dynamic])
    results = iter(ev.evaluate(jaxpr, dynamic))
    return [next(results) if keep else None for keep in kept]


def _is_float0(value: NamedValue) -> bool:
    return getattr(value.data, "dtype", None) == _jax.float0


def _positional_shape(value: NamedValue) -> tuple[int, ...]:
    return tuple(np.shape(value.data)[k] for k in value.positional_dims())


def _positional_type(value: NamedValue) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(value.data)
    return jax.ShapeDtypeStruct(_positional_shape(value), aval.dtype, weak_type=aval.weak_type)


def _linear_solve(ev: Evaluator, params, operands, eqn):
    """Rebuilt around the evaluated operator and solvers; unknowns and right-hand sides share all names."""
    jaxprs, lengths = params["jaxprs"], params["const_lengths"]
    names = linear_solve_names(ev.checker, params, [v.names for v in operands])
    # JAX makes all operands of the solve vary alike, whatever its jaxprs say.
    operands = [vary_over(ev.loc, v, names) for v in operands]
    matvec_consts, _, solve_consts, transpose_consts, b = _split(operands, *lengths)

    def run(jaxpr, consts):
        def apply(x):
            outs = ev.evaluate(jaxpr, [*consts, *x])
            return ev.conformed(outs, [names] * len(outs))

        return apply

    def solver(jaxpr, consts):
        def apply(_, rhs):
            outs = run(jaxpr, consts)(rhs)
            return (outs[: len(rhs)], outs[len(rhs) :]) if len(outs) > len(rhs) else outs

        return apply

    has_aux = len(jaxprs.solve.out_avals) > len(b)
    transpose = None if jaxprs.transpose_solve is None else solver(jaxprs.transpose_solve, transpose_consts)
    outs = lax.custom_linear_solve(
        run(jaxprs.matvec, matvec_consts),
        ev.conformed(b, [names] * len(b)),
        solver(jaxprs.solve, solve_consts),
        transpose_solve=transpose,
        has_aux=has_aux,
    )
    return [*outs[0], *outs[1]] if has_aux else outs


def _operation(ev: Evaluator, params, operands, eqn):
    """Operations with rules of their own (since jax 0.12): ``lax.custom_root`` holds functions, others do not."""
    linear_map = _jax.linear_map_of_root(params)
    if linear_map is not None:
        return _evaluate_callable(ev, linear_map, operands)
    root = _jax.root_finder(params)
    return ev.ordinary(eqn, operands) if root is None else _custom_root(ev, root, operands)


def _custom_root(ev: Evaluator, root: _jax.RootFinder, operands):
    """Rebuilt around the evaluated functions: at the root x(p) of f, ``dx = -tangent_solve(D_p f dp)``."""
    names = root_names(ev.checker, root, [v.names for v in operands])
    num_roots = root.lengths[1]

    def evaluated(fun, values):
        outs = _evaluate_callable(ev, fun, values)
        return ev.conformed(outs, [names] * len(outs))

    @jax.custom_jvp
    def solve(*values):
        consts, guess, _, _ = _split(values, *root.lengths)
        return evaluated(root.solve, [*consts, *guess])

    @solve.defjvp
    def jvp(primals, tangents):
        _, _, consts, solve_consts = _split(primals, *root.lengths)
        _, _, consts_dot, _ = _split(tangents, *root.lengths)
        outs = solve(*primals)
        x, aux = outs[:num_roots], outs[num_roots:]
        _, residuals = jax.jvp(lambda *consts: evaluated(root.f, [*consts, *x]), consts, consts_dot)
        x_dot = evaluated(root.tangent_solve, [*solve_consts, *x, *residuals])
        negative = [dataclasses.replace(v, data=-v.data) for v in x_dot]
        return outs, [*negative, *map(_no_tangent, aux)]

    return solve(*operands)


def _no_tangent(value):
    exact = not _is_inexact(value)
    return dataclasses.replace(value, data=np.zeros(np.shape(value.data), _jax.float0) if exact else value.data * 0)


def _custom_vmap(ev: Evaluator, params, operands, eqn):
    """Batched over local dimensions by the user's rule; with none left, rebuilt for a vmap around the xmap."""
    ev._refuse_names(eqn)
    names = frozenset().union(*(v.names for v in operands))
    if ev.loc.local_names(names) or not ev.loc.typed:
        return bind_named(ev.loc, eqn.primitive, operands, eqn.params)

    @jax.custom_batching.custom_vmap
    def fun(*arrays):
        values = [NamedValue(x, v.dims, v.names) for x, v in zip(arrays, operands)]
        return [vary_over(ev.loc, out, names).data for out in ev.evaluate(params["call"], values)]

    @fun.def_vmap
    def rule(axis_size, in_batched, *arrays):
        args, batched = (jax.tree.unflatten(params["in_tree"], leaves) for leaves in (arrays, in_batched))
        outs = params["rule"](axis_size, batched, *args)
        return tuple(jax.tree.leaves(out) for out in outs)

    outs = fun(*(v.data for v in operands))
    return [NamedValue(x, (None,) * jnp.ndim(x), names) for x in outs]


# ------------------------------------------------------------------------- placement


def _sharding_constraint(ev: Evaluator, params, operands, eqn):
    """Inside our shard_map each device holds its part already: a constraint says nothing more."""
    if ev.loc.typed:
        return operands
    return bind_named(ev.loc, eqn.primitive, operands, eqn.params)


def _shard_map(ev: Evaluator, params, operands, eqn):
    if ev.loc.typed or collectives_in(params["jaxpr"]) & set(ev.loc.placements):
        raise errors.shard_map_inside(_jax.where_in_user_code(eqn))
    return bind_named(ev.loc, eqn.primitive, operands, eqn.params)


# ----------------------------------------------------------------------------- table


def _split(values: Sequence[NamedValue], *lengths: int) -> list[list[NamedValue]]:
    """Cut a list into pieces of the given lengths and a rest."""
    pieces, start = [], 0
    for length in lengths:
        pieces.append(list(values[start : start + length]))
        start += length
    return [*pieces, list(values[start:])]


STRUCTURED: dict[str, Callable[..., list[NamedValue]]] = {
    "jit": _jit,
    "pjit": _jit,
    "closed_call": _inline("call_jaxpr"),
    "core_call": _inline("call_jaxpr"),
    "eval_jaxpr": _inline("call_jaxpr"),
    "remat_opt": _inline("fwd_jaxpr"),  # custom_vjp(optimize_remat=True): XLA drops residuals that nobody reads
    "remat2": _remat,
    "remat": _remat,
    "checkpoint": _remat,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "custom_linear_solve": _linear_solve,
    "custom_vmap_call": _custom_vmap,
    "call_hi_primitive": _operation,
    "sharding_constraint": _sharding_constraint,
    "shard_map": _shard_map,
}
