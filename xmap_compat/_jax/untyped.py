"""Calls of operations whose types or lowerings know no varying mesh axes: they run as outside of a
``shard_map``.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from xmap_compat._jax.batching import batched, has_own_batching, varying_results
from xmap_compat._jax.primitives import Primitive, bind
from xmap_compat._jax.tracing import plainly
from xmap_compat._jax.types import varying_axes_of, varying_like


def jaxpr_of_equation(eqn: Any) -> Any:
    """The closed jaxpr of one equation."""
    return _plain_jaxpr(
        lambda *xs: bind(eqn.primitive, xs, eqn.params), [v.aval for v in eqn.invars]
    )


def _plain_jaxpr(fun, avals):
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    return plainly(lambda: jax.make_jaxpr(fun)(*types), in_our_shard_map=True)


# A call of a jaxpr whose types do not vary, on values whose types do.
untyped_call_p = Primitive("untyped_call")
untyped_call_p.multiple_results = True


@untyped_call_p.def_effectful_abstract_eval
def _untyped_call_types(*avals, jaxpr):
    varying = frozenset().union(*map(varying_axes_of, avals))
    return [varying_like(aval, varying) for aval in jaxpr.out_avals], jaxpr.effects


def _lower_untyped_call(ctx, *args, jaxpr):
    lower = mlir.lower_fun(jex_core.jaxpr_as_fun(jaxpr), multiple_results=True)
    return plainly(
        lambda: lower(ctx.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals), *args)
    )


def _untyped_call(fun, *args):
    return untyped_call_p.bind(*args, jaxpr=_plain_jaxpr(fun, map(jax.typeof, args)))


def _batch_untyped_call(args, dims, *, jaxpr):
    moved = [x if d is None else jax.numpy.moveaxis(x, d, 0) for x, d in zip(args, dims)]
    in_axes = [None if d is None else 0 for d in dims]
    (size,) = {x.shape[0] for x, d in zip(moved, in_axes) if d is not None}
    call = jex_core.jaxpr_as_fun(jaxpr)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in moved]
    levels = [(size, in_axes)]
    varying = [frozenset([0])] * len(jaxpr.out_avals)
    if any(map(has_own_batching, jaxpr.eqns)):
        varying = plainly(lambda: varying_results(call, types, levels), in_our_shard_map=True)
    outs = _untyped_call(batched(call, levels, varying), *moved)
    return outs, [0 if of_result else None for of_result in varying]


def _jvp_untyped_call(primals, tangents, *, jaxpr):
    """The tangents are a call of their own, which is linear in the tangents of the operands."""
    moving = [k for k, t in enumerate(tangents) if type(t) is not ad.Zero]
    inexact = _smooth_results(jaxpr)

    def pushed(*args):
        primals, tangents = args[: -len(moving)], args[-len(moving) :]
        fun = lambda *xs: [_call_with(jaxpr, primals, moving, xs)[k] for k in inexact]  # noqa: E731
        return jax.jvp(fun, tuple(primals[k] for k in moving), tangents)[1]

    outs = untyped_call_p.bind(*primals, jaxpr=jaxpr)
    out_tangents = dict(
        zip(inexact, _untyped_call(pushed, *primals, *(tangents[k] for k in moving)))
    )
    zeros = (ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs)
    return outs, [out_tangents.get(k, zero) for k, zero in enumerate(zeros)]


def _smooth_results(jaxpr):
    """The positions of results that have a tangent: integers have none."""
    return [
        k
        for k, aval in enumerate(jaxpr.out_avals)
        if aval.to_tangent_aval().dtype != jax.dtypes.float0
    ]


def _transpose_untyped_call(cts, *operands, jaxpr):
    linear = [k for k, x in enumerate(operands) if ad.is_undefined_primal(x)]
    inexact = _smooth_results(jaxpr)
    known = [x for x in operands if not ad.is_undefined_primal(x)]

    def pulled(*args):
        rest = iter(args)
        primals = [None if k in linear else next(rest) for k in range(len(operands))]

        def fun(*xs):
            outs = _call_with(jaxpr, primals, linear, xs)
            return [outs[k] for k in inexact]

        return jax.linear_transpose(fun, *(jaxpr.in_avals[k] for k in linear))(list(rest))

    smooth_cts = [ad.instantiate_zeros(cts[k]) for k in inexact]
    cotangents = dict(zip(linear, _untyped_call(pulled, *known, *smooth_cts)))
    return [cotangents.get(k) for k in range(len(operands))]


def _call_with(jaxpr, args, where, values):
    """The results of a jaxpr for its arguments, of which those at the positions ``where`` are
    replaced.
    """
    return jex_core.jaxpr_as_fun(jaxpr)(
        *{**dict(enumerate(args)), **dict(zip(where, values))}.values()
    )


mlir.register_lowering(untyped_call_p, _lower_untyped_call)
batching.primitive_batchers[untyped_call_p] = _batch_untyped_call
ad.primitive_jvps[untyped_call_p] = _jvp_untyped_call
ad.primitive_transposes[untyped_call_p] = _transpose_untyped_call
