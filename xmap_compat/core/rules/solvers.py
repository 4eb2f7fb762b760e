"""Linear solves and roots that are differentiated implicitly, rebuilt around the evaluation of their parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.device import vary_over
from xmap_compat.core.names import linear_solve_names, root_names
from xmap_compat.core.rules.callables import evaluate_callable
from xmap_compat.core.values import NamedValue, is_inexact, split

if TYPE_CHECKING:
    from xmap_compat.core.evaluate import Evaluator


def linear_solve(ev: Evaluator, solve: _jax.LinearSolve, operands: Sequence[NamedValue], eqn: Any) -> list[NamedValue]:
    """Rebuilt around the evaluated operator and solvers; unknowns and right-hand sides share all names."""
    names = linear_solve_names([v.names for v in operands])
    # JAX makes all operands of the solve vary alike, whatever its jaxprs say.
    operands = [vary_over(ev.loc, v, names) for v in operands]
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


def root(ev: Evaluator, root: _jax.Root, operands: Sequence[NamedValue], eqn: Any) -> list[NamedValue]:
    """Rebuilt around the evaluated functions: at the root x(p) of f, ``dx = -tangent_solve(D_p f dp)``."""
    names = root_names(ev.checker, root, [v.names for v in operands])
    num_roots = root.lengths[1]

    def evaluated(fun, values):
        outs = evaluate_callable(ev, fun, values)
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
