"""Functions with custom rules, and solvers, rebuilt around the evaluation of the programs that they
hold.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from xmap_compat import _jax
from xmap_compat.core.combining import batched_axes, takes_whole_axes
from xmap_compat.core.device import cast_alike, cast_to, laid_out
from xmap_compat.core.errors import quoted
from xmap_compat.core.evaluate import Evaluator
from xmap_compat.core.rules.libraries import bind_on_whole_axes
from xmap_compat.core.rules.ordinary import bind_ordinary
from xmap_compat.core.structured.callables import evaluate_callable
from xmap_compat.core.structured.cotangents import cotangents_of_operands
from xmap_compat.core.trace import call_without_axes
from xmap_compat.core.values import (
    NamedValue,
    is_smooth,
    names_of_each,
    split,
    union_of_names,
)


def custom_jvp(
    ev: Evaluator, call: _jax.CustomJvp, operands: Sequence[NamedValue], eqn: Any
) -> list[NamedValue]:
    """A ``jax.custom_jvp`` function of named values, whose rule is the user's, traced when JAX
    differentiates.

    Args:
      operands: in any layout.

    Returns:
      Results in the canonical layout of what each varies over.  A tangent is laid out as its
      primal; one that varies over more is refused, since the result has no place for it.
    """
    names = ev.checker.equation(eqn, names_of_each(operands))
    operands = cast_alike(ev.view, operands)
    inexact = [is_smooth(v.aval) for v in eqn.outvars]

    def over_names(primals, outs):
        """Results that vary as their names say, and as the operands do."""
        together = cast_alike(ev.view, [*primals, *ev.laid_out(outs, names)])
        return together[len(primals) :]

    def values_of(operands):
        return over_names(operands, ev.evaluate(call.body, operands))

    @jax.custom_jvp
    def fun(*values):
        return list(itertools.compress(values_of(values), inexact))

    @functools.partial(fun.defjvp, symbolic_zeros=call.symbolic_zeros)
    def jvp(primals, tangents):
        found = evaluate_callable(ev, call.rule, [*primals, *tangents])
        outs = over_names(primals, found[: len(names)])
        out_primals = list(itertools.compress(outs, inexact))
        out_tangents = []
        for primal, tangent in zip(out_primals, itertools.compress(found[len(names) :], inexact)):
            out_tangents.append(_tangent_like(ev, primal, tangent, eqn, call.symbolic_zeros))
        return out_primals, out_tangents

    differentiable = fun(*operands)
    if all(inexact):
        return differentiable
    # Tangents of integers have no type that fits inside of a typed shard_map (jax 0.10): they stay
    # out of the rule.
    results = values_of([v.with_data(lax.stop_gradient(v.data)) for v in operands])
    for k, value in zip(itertools.compress(range(len(inexact)), inexact), differentiable):
        results[k] = value
    return results


def _tangent_like(ev, primal, tangent, eqn, symbolic_zeros):
    if tangent is None and symbolic_zeros:
        zero = SymbolicZero(jax.typeof(primal.data).to_tangent_aval())
        return primal.with_data(zero)
    if tangent is None:  # of a root's auxiliary output
        like_primal = primal.with_data(jnp.zeros_like(primal.data))
    elif tangent.names <= primal.names:
        like_primal = laid_out(ev.view, tangent, primal.dims, primal.names)
    else:
        extra = tangent.names - primal.names
        raise _tangent_varies_more(extra, _jax.where_in_user_code(eqn))
    _, cast = cast_alike(ev.view, [primal, like_primal])
    return cast


def _tangent_varies_more(extra: Iterable[Hashable], where: str) -> TypeError:
    return TypeError(
        f"The custom_jvp rule used at {where} returns a tangent that varies over {quoted(extra)} "
        "for an output that does not. Reduce it over these axes in the rule (e.g. with lax.psum), "
        "or use the operand in the function"
    )


def custom_vjp(
    ev: Evaluator, call: _jax.CustomVjp, operands: Sequence[NamedValue], eqn: Any
) -> list[NamedValue]:
    """A ``jax.custom_vjp`` function of named values, whose rules are the user's, traced when JAX
    differentiates.

    Args:
      operands: in any layout.

    Returns:
      Results in the canonical layout of what each varies over.  The cotangent of an operand has the
      operand's layout and names, and is the cotangent of the un-mapped function;
      ``core/structured/cotangents.py`` says how.
    """
    names = ev.names_of(call.body, operands)
    run_fwd, run_bwd, layout = call.rules()
    layouts = [(v.dims, v.names, jax.typeof(v.data).dtype) for v in operands]

    @jax.custom_vjp
    def fun(*values):
        return ev.laid_out(ev.evaluate(call.body, values), names)

    def fwd(*flagged):
        perturbed = [v.data.perturbed for v in flagged]
        primals = [v.with_data(v.data.value) for v in flagged]
        returned: list[Any] = []

        def run(*primals):
            returned[:] = run_fwd(perturbed, *primals)
            return returned

        outs = evaluate_callable(ev, run, primals)
        num_residuals = len(outs) - len(names)
        _, _, forwarded = layout()
        rest = map(_residual, outs, returned)
        # Residuals that are operands are no results of the rule.
        residuals = [next(rest) if k is None else primals[k] for k in forwarded]
        # Its keys are static: {0: None, 2: None}.
        differentiated = dict.fromkeys(itertools.compress(range(len(flagged)), perturbed))
        return ev.laid_out(outs[num_residuals:], names), (residuals, differentiated)

    def bwd(kept, cotangents):
        residuals, differentiated = kept
        if not call.symbolic_zeros:
            cotangents = [ct.with_data(_jax.instantiate_symbolic(ct.data)) for ct in cotangents]
        # For no other operands: constants of a branch that not all devices take must not need a sum
        # over devices.
        wanted = {k: layouts[k] for k in differentiated}
        values = [kept for kept in residuals if not isinstance(kept, _Constant)]

        def rule(*args):
            rest = iter(args)
            given = [r.value if isinstance(r, _Constant) else next(rest) for r in residuals]
            return run_bwd(*given, *rest)

        rule = _jax.traced_as(run_bwd, rule)
        cts = cotangents_of_operands(ev, call.body, rule, values, cotangents, wanted)
        return tuple(map(cts.get, range(len(layouts))))

    # So JAX tells what is differentiated; a rule refuses to be differentiated for values that it
    # closes over.
    fun.defvjp(fwd, bwd, symbolic_zeros=True)
    return fun(*operands)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Constant:
    """A residual that is a number: a backward rule may ask it in Python, as JAX lets it."""

    value: Any


def _residual(value, returned):
    if isinstance(returned, (bool, int, float, np.generic)):
        return _Constant(returned)
    return value


# ---------------------------------------------------------------- batching rules, solvers

_NAMES_IN_LINEAR_CALL = (
    "The functions of a linear_call may name no axes of the xmap. "
    "Use jax.custom_vjp, whose rules may"
)


def linear_call(
    ev: Evaluator, _: None, operands: Sequence[NamedValue], eqn: Any
) -> list[NamedValue]:
    """A ``linear_call``, whose transpose JAX traces when it differentiates."""

    def trace(transpose):
        return call_without_axes(transpose, _NAMES_IN_LINEAR_CALL, ev.view.in_our_shard_map)

    return bind_ordinary(ev.view, _jax.with_traced_transpose(eqn, trace), operands)


def custom_vmap(
    ev: Evaluator, call: _jax.CustomVmap, operands: Sequence[NamedValue], eqn: Any
) -> list[NamedValue]:
    """The user's batching rule, applied to whole axes; the function itself if nothing varies, or if
    it calls Python.
    """
    view = ev.view
    names = union_of_names(operands)
    if batched_axes(names, view.placements) and takes_whole_axes(eqn):
        return bind_on_whole_axes(ev, eqn, operands)
    return [cast_to(view, out, names) for out in ev.evaluate(call.body, operands)]


def linear_solve(
    ev: Evaluator, solve: _jax.LinearSolve, operands: Sequence[NamedValue], eqn: Any
) -> list[NamedValue]:
    """Rebuild a solve around the evaluated operator and solvers; unknowns and right-hand sides
    share all names.
    """
    # Auxiliary results may vary over axes that no operand has.
    names, *_ = ev.checker.equation(eqn, names_of_each(operands))
    # JAX makes all operands of the solve vary alike, whatever its jaxprs say.
    operands = [cast_to(ev.view, v, names) for v in operands]
    matvec_consts, _, solve_consts, transpose_consts, b = split(operands, *solve.lengths)
    has_aux = len(solve.solve.out_avals) > len(b)

    def run(jaxpr, consts, x):
        outs = ev.evaluate(jaxpr, [*consts, *x])
        return ev.laid_out(outs, [names] * len(outs))

    def matvec(x):
        return run(solve.matvec, matvec_consts, x)

    def solver(jaxpr, consts):
        def apply(_, rhs):
            outs = run(jaxpr, consts, rhs)
            if len(outs) == len(rhs):
                return outs
            return outs[: len(rhs)], outs[len(rhs) :]

        return apply

    transpose_solve = None
    if solve.transpose_solve is not None:
        transpose_solve = solver(solve.transpose_solve, transpose_consts)
    outs = lax.custom_linear_solve(
        matvec,
        ev.laid_out(b, [names] * len(b)),
        solver(solve.solve, solve_consts),
        transpose_solve,
        symmetric=solve.vecmat is solve.matvec,
        has_aux=has_aux,
    )
    if not has_aux:
        return outs
    solution, aux = outs
    return [*solution, *aux]


def operation(
    ev: Evaluator, held: _jax.HijaxOperation, operands: Sequence[NamedValue], eqn: Any
) -> list[NamedValue]:
    """An operation that holds functions, and its rule, as those of a ``jax.custom_jvp``."""
    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    body = ev.trace(held.apply, types)
    return custom_jvp(ev, _jax.CustomJvp(body, held.rule, symbolic_zeros=False), operands, eqn)
