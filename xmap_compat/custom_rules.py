"""Functions with rules of their own, rebuilt around the evaluation of their bodies and rules.

Custom derivatives, roots and linear solves that are differentiated implicitly, custom batching.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import _jax, errors
from xmap_compat.collectives import collectives_of, sum_over
from xmap_compat.named_shapes import NONE, Names, linear_solve_names, root_names
from xmap_compat.named_values import (
    COTANGENT,
    NamedValue,
    apply_positional,
    bind_named,
    conform,
    index_of,
    is_float0,
    is_inexact,
    split,
    vary_over,
)
from xmap_compat.resources import Placement

if TYPE_CHECKING:
    from xmap_compat.substitution import Evaluator


def custom_jvp(ev: Evaluator, params, operands, eqn):
    names = ev.names_of(params["call_jaxpr"], operands)
    rule = _jax.custom_jvp_rule(params)
    inexact = [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars]

    def values_of(operands):
        return ev.conformed(ev.evaluate(params["call_jaxpr"], operands), names)

    @jax.custom_jvp
    def fun(*values):
        return list(itertools.compress(values_of(values), inexact))

    @functools.partial(fun.defjvp, symbolic_zeros=params["symbolic_zeros"])
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
    if tangent is None:
        return dataclasses.replace(primal, data=_jax.symbolic_zero(primal.data))
    if not tangent.names <= primal.names:
        raise errors.tangent_varies_more(tangent.names - primal.names, _jax.where_in_user_code(eqn))
    return conform(ev.loc, tangent, primal.dims, primal.names)


def custom_vjp(ev: Evaluator, params, operands, eqn):
    names = ev.names_of(params["call_jaxpr"], operands)
    run_fwd, run_bwd, layout = _jax.custom_vjp_rules(params)
    layouts = [(v.dims, v.names, jax.typeof(v.data).dtype) for v in operands]

    @jax.custom_vjp
    def fun(*values):
        return ev.conformed(ev.evaluate(params["call_jaxpr"], values), names)

    def fwd(*flagged):
        perturbed = [v.data.perturbed for v in flagged]
        primals = [dataclasses.replace(v, data=v.data.value) for v in flagged]
        outs = _evaluate_callable(ev, functools.partial(run_fwd, perturbed), primals)
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
        if not params["symbolic_zeros"]:
            cotangents = [dataclasses.replace(ct, data=_jax.instantiate_symbolic(ct.data)) for ct in cotangents]
        found = {
            names: backward(residuals, cotangents, names) for names in dict.fromkeys(names for _, names, _ in layouts)
        }
        parts = [[outs[k] for outs in found[names]] for k, (_, names, _) in enumerate(layouts)]
        return tuple(_add([_cotangent_like(ev, ct, *layout) for ct in cts]) for cts, layout in zip(parts, layouts))

    # Only so are we told what is differentiated; a rule refuses to be differentiated for values that it closes over.
    fun.defvjp(fwd, bwd, symbolic_zeros=True)
    return fun(*operands)


def _cotangents_for(loc, jaxpr, residuals, cotangents, own_names) -> list[dict[int, NamedValue]]:
    """What to apply a custom backward rule to, for an operand that varies over ``own_names``: the sum of these cases.

    The cotangent of a result that does not vary over an axis arrives summed over it, and what the rule makes for an
    operand that does not vary either is summed over it where anything in the rule varies.  The cotangent must
    not be counted for every element there.  If no collective has made the result what it is, then every element's
    call returned the same value: one of them takes the cotangent.  If a collective has, the rule may sum by itself
    or leave that to us: it is applied to that cotangent alone, so that the result tells.

    Returns:
      Cases, each with cotangents by the number of their result; those that are missing are zero.  There is one at
      least; cotangents of integers, and those known to be zero, are in none.
    """
    together = frozenset().union(*(v.names for v in (*residuals, *cotangents))) - {COTANGENT} - own_names
    cases: dict[Names, dict[int, NamedValue]] = {}
    for k, (ct, collectives) in enumerate(zip(cotangents, _collectives_of_results(jaxpr), strict=True)):
        if not _is_no_array(ct):
            summed = together - ct.names
            cases.setdefault(summed & collectives, {})[k] = _at_first_element(loc, ct, summed - collectives)
    return list(cases.values()) or [{}]


def _apply_rule(ev, rule, residuals, cotangents, case):
    """The results of a backward rule; where some cotangents are zero, by the linearity of the rule without them."""
    marked = [dataclasses.replace(ct, names=ct.names | {COTANGENT}) for ct in case.values()]
    zeros = {k: _positional_zero(ct) for k, ct in enumerate(cotangents)}

    def rule_of_case(*args):
        fixed, given = args[: len(residuals)], args[len(residuals) :]
        apply, restore = _only_arrays(lambda *given: rule(*fixed, *{**zeros, **dict(zip(case, given))}.values()))
        if all(_is_no_array(ct) for k, ct in enumerate(cotangents) if k not in case):
            return restore(apply(*given))
        return restore(jax.jvp(apply, tuple(map(jnp.zeros_like, given)), tuple(given))[1])

    return _evaluate_callable(_with_cotangents(ev), rule_of_case, [*residuals, *marked])


def _only_arrays(fun):
    """A function without those results that are no arrays, and how to put them back as None.

    These are tangents of integers, and zeros that are known to be zero.
    """
    kept: list[bool] = []

    def apply(*args):
        outs = fun(*args)
        kept[:] = [x is not None and not _jax.is_symbolic_zero(x) and _dtype(x) != _jax.float0 for x in outs]
        return list(itertools.compress(outs, kept))

    def restore(outs):
        rest = iter(outs)
        return [next(rest) if keep else None for keep in kept]

    return apply, restore


def _dtype(x):
    return getattr(x, "dtype", None)


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
        found.update(dict.fromkeys(eqn.outvars, collectives_of(eqn).union(*map(read, eqn.invars))))
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


def _cotangent_like(ev, cotangent: NamedValue | None, dims, names, dtype) -> NamedValue | None:
    """Sum a cotangent over axes that its primal does not vary over; one that was summed already is left alone.

    A rule may return another precision than its primal has, as under ``jax.vmap``.
    """
    if cotangent is None:
        return None
    cotangent = dataclasses.replace(cotangent, names=cotangent.names - {COTANGENT})
    extra = cotangent.names - names
    if extra:
        cotangent = sum_over(ev.loc, cotangent, sorted(extra, key=str))
    cotangent = conform(ev.loc, cotangent, dims, names)
    return dataclasses.replace(cotangent, data=lax.convert_element_type(cotangent.data, dtype))


def _evaluate_callable(ev: Evaluator, fun: Callable[..., Any], values: Sequence[NamedValue]) -> list[NamedValue | None]:
    """Trace a callable that a custom rule holds on positional types, then evaluate it on named values.

    Tangents of integers (float0) and symbolic zeros are no operands of any equation: they are passed as constants,
    and stand as None in the results.
    """
    dynamic = [v for v in values if not _is_no_array(v)]

    def on_dynamic(*args):
        rest = iter(args)
        return fun(*(_positional_zero(v) if _is_no_array(v) else next(rest) for v in values))

    traced, restore = _only_arrays(on_dynamic)
    jaxpr = ev.trace(traced, [_positional_type(v) for v in dynamic])
    ev.checker.check(jaxpr, [v.names for v in dynamic])
    return restore(ev.evaluate(jaxpr, dynamic))


def _is_no_array(value: NamedValue) -> bool:
    """Whether a tangent or cotangent is one of integers, or known to be zero."""
    return is_float0(value) or _jax.is_symbolic_zero(value.data)


def _positional_zero(value: NamedValue) -> Any:
    """Zero for one element of the named axes, in the form that a rule expects."""
    if _jax.is_symbolic_zero(value.data):
        return _jax.symbolic_zero_of(_positional_shape(value), value.data.dtype)
    return np.zeros(_positional_shape(value), value.data.dtype)


def _positional_shape(value: NamedValue) -> tuple[int, ...]:
    return tuple(np.shape(value.data)[k] for k in value.positional_dims())


def _positional_type(value: NamedValue) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(value.data)
    return jax.ShapeDtypeStruct(_positional_shape(value), aval.dtype, weak_type=aval.weak_type)


def linear_solve(ev: Evaluator, params, operands, eqn):
    """Rebuilt around the evaluated operator and solvers; unknowns and right-hand sides share all names."""
    jaxprs, lengths = params["jaxprs"], params["const_lengths"]
    names = linear_solve_names(ev.checker, params, [v.names for v in operands])
    # JAX makes all operands of the solve vary alike, whatever its jaxprs say.
    operands = [vary_over(ev.loc, v, names) for v in operands]
    matvec_consts, _, solve_consts, transpose_consts, b = split(operands, *lengths)

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


def operation(ev: Evaluator, params, operands, eqn):
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
        consts, guess, _, _ = split(values, *root.lengths)
        return evaluated(root.solve, [*consts, *guess])

    @solve.defjvp
    def jvp(primals, tangents):
        _, _, consts, solve_consts = split(primals, *root.lengths)
        _, _, consts_dot, _ = split(tangents, *root.lengths)
        outs = solve(*primals)
        x, aux = outs[:num_roots], outs[num_roots:]
        _, residuals = jax.jvp(lambda *consts: evaluated(root.f, [*consts, *x]), consts, consts_dot)
        x_dot = evaluated(root.tangent_solve, [*solve_consts, *x, *residuals])
        negative = [dataclasses.replace(v, data=-v.data) for v in x_dot]
        return outs, [*negative, *map(_no_tangent, aux)]

    return solve(*operands)


def _no_tangent(value):
    exact = not is_inexact(value)
    return dataclasses.replace(value, data=np.zeros(np.shape(value.data), _jax.float0) if exact else value.data * 0)


def custom_vmap(ev: Evaluator, params, operands, eqn):
    """Batched over local dimensions by the user's rule; with none left, rebuilt for a vmap around the xmap."""
    if ev.named_axes(eqn):
        return ev.over_names(eqn, operands)
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
