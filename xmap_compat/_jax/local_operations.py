"""Equations made fit for evaluation inside a typed ``shard_map``."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from xmap_compat._jax.partial import of_compiler
from xmap_compat._jax.primitives import Primitive, bind
from xmap_compat._jax.tracing import plain_context
from xmap_compat._jax.types import varying_axes_of
from xmap_compat._jax.version import VERSION


def local_operation(eqn: Any, mesh_axes: Sequence[str], compiler: Container[Any] = ()) -> tuple[Any, Mapping[str, Any]]:
    """An equation's primitive and parameters, fit for evaluation inside our typed ``shard_map``.

    Shardings that were recorded outside have no meaning there, but for axes that the compiler has; operations that
    carry the types of their results must declare the mesh axes over which these vary; and JAX interprets Pallas
    kernels with loops that do not type-check there (as of 0.12), nor would they in a ``shard_map`` written by hand
    with ``check_vma=True``.
    """
    params: dict[str, Any] = {k: None if k == "sharding" else v for k, v in eqn.params.items()}
    if params.get("out_sharding") is not None:
        params["out_sharding"] = of_compiler(params["out_sharding"], compiler)
    if eqn.primitive.name == "call_hi_primitive":
        params["_prim"] = _varying_operation(params["_prim"], mesh_axes)
    if eqn.primitive.name == "pallas_call":
        if params["interpret"]:
            return untyped_call_p, {"jaxpr": _jaxpr_of_equation(eqn), "elementwise": False}
        params["out_avals"] = tuple(_varying_like(aval, mesh_axes) for aval in params["out_avals"])
    if VERSION >= (0, 12, 0) or eqn.primitive.name != "regularized_incomplete_beta":
        return eqn.primitive, params
    # Its lowering loops from constants to values that vary, which does not type-check before 0.12 either.
    return untyped_call_p, {"jaxpr": _jaxpr_of_equation(eqn), "elementwise": True}


def _jaxpr_of_equation(eqn):
    return _plain_jaxpr(lambda *xs: bind(eqn.primitive, xs, eqn.params), [v.aval for v in eqn.invars])


def _plain_jaxpr(fun, avals):
    with plain_context():
        return jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals))


# A call of a jaxpr without varying types among values that have them.  If it is elementwise, it can be transposed.
untyped_call_p = Primitive("untyped_call")

untyped_call_p.multiple_results = True


@untyped_call_p.def_effectful_abstract_eval
def _untyped_call_types(*avals, jaxpr, elementwise):
    varying = frozenset().union(*map(varying_axes_of, avals))
    return [_varying_like(aval, varying) for aval in jaxpr.out_avals], jaxpr.effects


def _lower_untyped_call(ctx, *args, jaxpr, elementwise):
    with plain_context():
        lower = mlir.lower_fun(jex_core.jaxpr_as_fun(jaxpr), multiple_results=True)
        return lower(ctx.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals), *args)


def _batch_untyped_call(args, dims, *, jaxpr, elementwise):
    moved = [x if d is None else jax.numpy.moveaxis(x, d, 0) for x, d in zip(args, dims)]
    in_axes = [None if d is None else 0 for d in dims]
    if elementwise:
        # All operands keep one shape.
        size = moved[in_axes.index(0)].shape[0]
        moved = [x if d == 0 else jax.numpy.broadcast_to(x, (size, *x.shape)) for x, d in zip(moved, in_axes)]
        in_axes = [0] * len(moved)
    batched = _plain_jaxpr(jax.vmap(jex_core.jaxpr_as_fun(jaxpr), in_axes=in_axes), map(jax.typeof, moved))
    outs = untyped_call_p.bind(*moved, jaxpr=batched, elementwise=elementwise)
    return outs, [0] * len(outs)


def _jvp_untyped_call(primals, tangents, *, jaxpr, elementwise):
    fun = jex_core.jaxpr_as_fun(jaxpr)
    if elementwise:
        outs = untyped_call_p.bind(*primals, jaxpr=jaxpr, elementwise=True)
        slopes = [None if type(t) is ad.Zero else _slope(fun, primals, k) for k, t in enumerate(tangents)]
        pushes = [jax.lax.mul(slope, t) for slope, t in zip(slopes, tangents) if slope is not None]
        return outs, [sum(pushes[1:], pushes[0])]
    tangents = [ad.instantiate_zeros(t) for t in tangents]

    def pushed(*args):
        outs, out_tangents = jax.jvp(fun, args[: len(primals)], args[len(primals) :])
        return [*outs, *out_tangents]

    pushed_jaxpr = _plain_jaxpr(pushed, [jax.typeof(x) for x in (*primals, *tangents)])
    outs = untyped_call_p.bind(*primals, *tangents, jaxpr=pushed_jaxpr, elementwise=False)
    return outs[: len(outs) // 2], outs[len(outs) // 2 :]


def _slope(fun, primals, k):
    def slope(*xs):
        along = lambda x: fun(*xs[:k], x, *xs[k + 1 :])  # noqa: E731
        return jax.jvp(along, (xs[k],), (jax.numpy.ones_like(xs[k]),))[1]

    (out,) = untyped_call_p.bind(
        *primals, jaxpr=_plain_jaxpr(slope, [jax.typeof(x) for x in primals]), elementwise=True
    )
    return out


mlir.register_lowering(untyped_call_p, _lower_untyped_call)
batching.primitive_batchers[untyped_call_p] = _batch_untyped_call
ad.primitive_jvps[untyped_call_p] = _jvp_untyped_call


def _varying_operation(operation, mesh_axes):
    """An operation that carries the types of its operands and results (``HiPrim``, since 0.12), on varying ones."""
    vary = lambda avals: jax.tree.map(lambda aval: _varying_like(aval, mesh_axes), avals)  # noqa: E731
    varying = copy.copy(operation)
    varying.in_avals, varying.out_aval = vary(operation.in_avals), vary(operation.out_aval)
    varying.in_avals_flat, varying.out_avals_flat = map(vary, (operation.in_avals_flat, operation.out_avals_flat))
    return varying


def _varying_like(aval, mesh_axes):
    sharding = aval.sharding.update(mesh=jax.sharding.get_abstract_mesh())
    varying = frozenset(mesh_axes)
    if VERSION >= (0, 10, 0):
        return aval.update(sharding=sharding, manual_axis_type=aval.manual_axis_type.update(varying=varying))
    return aval.update(sharding=sharding, vma=varying)
