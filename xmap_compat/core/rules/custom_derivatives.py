"""Functions with derivative rules of their own, rebuilt around the evaluation of their bodies and rules."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import lax

from xmap_compat import _jax
from xmap_compat.core import errors
from xmap_compat.core.device import conform, vary_alike
from xmap_compat.core.rules.callables import evaluate_callable
from xmap_compat.core.rules.cotangents import add_cotangents, apply_rule, cotangent_like, cotangents_for
from xmap_compat.core.values import NamedValue, is_smooth

if TYPE_CHECKING:
    from xmap_compat.core.evaluate import Evaluator


def custom_jvp(ev: Evaluator, call: _jax.CustomJvp, operands: Sequence[NamedValue], eqn: Any) -> list[NamedValue]:
    """A ``jax.custom_jvp`` function of named values, whose rule is the user's, traced when JAX differentiates.

    Args:
      operands: in any layout.

    Returns:
      Results in the canonical layout of what each varies over.  A tangent is laid out as its primal; one that
      varies over more is refused, since the result has no place for it.
    """
    names = ev.checker.equation(eqn, [v.names for v in operands])
    operands = vary_alike(ev.view, operands)
    inexact = [is_smooth(v.aval) for v in eqn.outvars]

    def conformed(primals, outs):
        """Results that vary as their names say, and as the operands do."""
        return vary_alike(ev.view, [*primals, *ev.conformed(outs, names)])[len(primals) :]

    def values_of(operands):
        return conformed(operands, ev.evaluate(call.body, operands))

    @jax.custom_jvp
    def fun(*values):
        return list(itertools.compress(values_of(values), inexact))

    @functools.partial(fun.defjvp, symbolic_zeros=call.symbolic_zeros)
    def jvp(primals, tangents):
        outs = evaluate_callable(ev, call.rule, [*primals, *tangents])
        out_primals = itertools.compress(conformed(primals, outs[: len(names)]), inexact)
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
    return vary_alike(ev.view, [primal, conform(ev.view, tangent, primal.dims, primal.names)])[1]


def custom_vjp(ev: Evaluator, call: _jax.CustomVjp, operands: Sequence[NamedValue], eqn: Any) -> list[NamedValue]:
    """A ``jax.custom_vjp`` function of named values, whose rules are the user's, traced when JAX differentiates.

    Args:
      operands: in any layout.

    Returns:
      Results in the canonical layout of what each varies over.  The cotangent of an operand has the operand's layout
      and names, and is the cotangent of the un-mapped function; ``core/rules/cotangents.py`` says how.
    """
    names = ev.names_of(call.body, operands)
    run_fwd, run_bwd, layout = call.rules()
    layouts = [(v.dims, v.names, jax.typeof(v.data).dtype) for v in operands]
    differentiated: set[int] = set()

    @jax.custom_vjp
    def fun(*values):
        return ev.conformed(ev.evaluate(call.body, values), names)

    def fwd(*flagged):
        perturbed = [v.data.perturbed for v in flagged]
        differentiated.update(itertools.compress(itertools.count(), perturbed))
        primals = [dataclasses.replace(v, data=v.data.value) for v in flagged]
        outs = evaluate_callable(ev, functools.partial(run_fwd, perturbed), primals)
        num_residuals = len(outs) - len(names)
        returned = iter(outs[:num_residuals])
        _, _, forwarded = layout()
        residuals = [next(returned) if k is None else primals[k] for k in forwarded]
        return ev.conformed(outs[num_residuals:], names), residuals

    def backward(residuals, cotangents, own_names):
        """The cotangents of the operands, right for those that vary over ``own_names``."""
        cases = cotangents_for(ev.view, call.body, residuals, cotangents, own_names)
        return [apply_rule(ev, run_bwd, residuals, cotangents, case, own_names) for case in cases]

    def bwd(residuals, cotangents):
        if not call.symbolic_zeros:
            cotangents = [dataclasses.replace(ct, data=_jax.instantiate_symbolic(ct.data)) for ct in cotangents]
        # No other operands: constants of a branch that not all devices take must not need a sum over devices.
        wanted = {k: layouts[k] for k in differentiated}
        different = dict.fromkeys(names for _, names, _ in wanted.values())
        found = {names: backward(residuals, cotangents, names) for names in different}
        parts = {k: [outs[k] for outs in found[names]] for k, (_, names, _) in wanted.items()}
        cts = {k: add_cotangents([cotangent_like(ev, ct, *wanted[k]) for ct in cts]) for k, cts in parts.items()}
        return tuple(map(cts.get, range(len(layouts))))

    # Only so are we told what is differentiated; a rule refuses to be differentiated for values that it closes over.
    fun.defvjp(fwd, bwd, symbolic_zeros=True)
    return fun(*operands)
