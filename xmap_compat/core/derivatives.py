"""The derivative of one equation as a program of its own: stage 4 asks what it varies over, and
what it sends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat.core.values import is_smooth


def derivative(trace: Callable[..., Any], eqn: Any) -> Any:
    """An equation and its derivative, as a jaxpr: ``(*operands, *tangents) -> (*results,
    *tangents)``.

    For a function with a backward rule it is ``(*operands, *cotangents) -> (*results,
    *cotangents)``.  Integers have no tangents there, and values that a function with a backward
    rule closes over have no cotangents.
    """
    backward = isinstance(held := _jax.read(eqn), _jax.CustomVjp)
    operands, results = ([v.aval for v in variables] for variables in (eqn.invars, eqn.outvars))
    smooth = [is_smooth(x) and k >= getattr(held, "num_consts", 0) for k, x in enumerate(operands)]

    def apply(*args):
        values, seeds = args[: len(smooth)], args[len(smooth) :]

        def fun(*primals):
            rest = iter(primals)
            outs = _jax.bind(
                eqn.primitive, [next(rest) if s else x for s, x in zip(smooth, values)], eqn.params
            )
            return tuple(filter(is_smooth, outs)), outs

        primals = tuple(itertools.compress(values, smooth))
        if not backward:
            _, tangents, outs = jax.jvp(fun, primals, seeds, has_aux=True)
            return outs, tangents
        _, pull, outs = jax.vjp(fun, *primals, has_aux=True)
        return outs, pull(seeds)

    avals = [*operands, *filter(is_smooth, results if backward else operands)]
    return trace(apply, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals])
