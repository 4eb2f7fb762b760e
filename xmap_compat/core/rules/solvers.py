"""Linear solves and roots that are differentiated implicitly, rebuilt around the evaluation of their parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.device import vary_over
from xmap_compat.core.rules.custom_derivatives import custom_jvp
from xmap_compat.core.values import NamedValue, split

if TYPE_CHECKING:
    from xmap_compat.core.evaluate import Evaluator


def linear_solve(ev: Evaluator, solve: _jax.LinearSolve, operands: Sequence[NamedValue], eqn: Any) -> list[NamedValue]:
    """Rebuild a solve around the evaluated operator and solvers; unknowns and right-hand sides share all names."""
    names = frozenset().union(*(v.names for v in operands))
    # JAX makes all operands of the solve vary alike, whatever its jaxprs say.
    operands = [vary_over(ev.view, v, names) for v in operands]
    matvec_consts, _, solve_consts, transpose_consts, b = split(operands, *solve.lengths)

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

    has_aux = len(solve.solve.out_avals) > len(b)
    transpose = None if solve.transpose_solve is None else solver(solve.transpose_solve, transpose_consts)
    outs = lax.custom_linear_solve(
        run(solve.matvec, matvec_consts),
        ev.conformed(b, [names] * len(b)),
        solver(solve.solve, solve_consts),
        transpose_solve=transpose,
        has_aux=has_aux,
    )
    return [*outs[0], *outs[1]] if has_aux else outs


def operation(ev: Evaluator, held: _jax.HijaxOperation, operands: Sequence[NamedValue], eqn: Any) -> list[NamedValue]:
    """An operation that holds functions, and its rule, as those of a ``jax.custom_jvp``."""
    body = ev.trace(held.apply, [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars])
    return custom_jvp(ev, _jax.CustomJvp(body, held.rule, symbolic_zeros=False), operands, eqn)
