"""Control flow of a named program, rebuilt around the evaluation of its bodies.

Where elements of named axes go different ways, branches become selections and loops run until all are done; where
devices do, and their ways hold collectives, devices stay together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import _jax
from xmap_compat.collectives import collectives_in
from xmap_compat.named_shapes import scan_carry_names, while_names
from xmap_compat.named_values import NamedValue, bind_named, conform, is_inexact, split, vary_over

if TYPE_CHECKING:
    from xmap_compat.substitution import Evaluator


def scan(ev: Evaluator, params, operands, eqn):
    num_consts, num_carry = _jax.scan_arity(params)
    consts, carry, xs = split(operands, num_consts, num_carry)
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


def while_loop(ev: Evaluator, params, operands, eqn):
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, init = split(operands, num_cond, num_body)
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


def cond(ev: Evaluator, params, operands, eqn):
    index, *operands = operands
    branches = params["branches"]
    names = [n | index.names for n in map(frozenset().union, *(ev.names_of(b, operands) for b in branches))]
    if ev.loc.local_names(index.names) or (index.names and _must_stay_together(ev, branches)):
        return _cond_select(ev, branches, index, operands)

    def branch(jaxpr):
        return lambda *values: ev.conformed(ev.evaluate(jaxpr, values), names)

    if params.get("branches_platforms") is not None:
        return _by_platform(params["branches_platforms"], [branch(b) for b in branches], operands)
    # What differs inside differs before: a cast within a branch would become a sum within a branch of the gradient.
    operands = [vary_over(ev.loc, v, index.names) for v in operands]
    return lax.switch(index.data, [branch(b) for b in branches], *operands)


def _by_platform(platforms, branches, operands):
    """``lax.platform_dependent``: of the branches only that of the platform is lowered, for others may not lower there.

    Args:
      platforms: for each branch the platforms that take it, or None for all others.
    """
    named = {name: branch for taken_by, branch in zip(platforms, branches) for name in taken_by or ()}
    default = next((branch for taken_by, branch in zip(platforms, branches) if taken_by is None), None)
    return lax.platform_dependent(*operands, default=default, **named)


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
        _select(ev, taken, [dataclasses.replace(v, data=lax.stop_gradient(v.data)), v]) if is_inexact(v) else v
        for v in operands
    ]


def has_custom_rule(jaxpr: Any) -> bool:
    """Whether a jaxpr calls a function with a custom derivative."""
    eqns = _jax.open_jaxpr(jaxpr)[0].eqns
    return any(
        eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call")
        or any(map(has_custom_rule, _jax.subjaxprs(eqn.params)))
        for eqn in eqns
    )
