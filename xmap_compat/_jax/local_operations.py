"""Equations made fit for evaluation inside a typed ``shard_map``."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from xmap_compat._jax.partial import of_compiler
from xmap_compat._jax.primitives import Primitive, bind
from xmap_compat._jax.tracing import plain_context
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
    if eqn.primitive.name == "pallas_call" and not params["interpret"]:
        params["out_avals"] = tuple(_varying_like(aval, mesh_axes) for aval in params["out_avals"])
    if _needs_plain_types(eqn, params, mesh_axes):
        return untyped_call_p, {"jaxpr": _jaxpr_of_equation(eqn)}
    return eqn.primitive, params


def _needs_plain_types(eqn, params, mesh_axes):
    """Whether an operation's lowering, or its derivative, does not type-check among values that vary over mesh axes."""
    primitive = eqn.primitive
    if primitive.name == "pallas_call":
        return params["interpret"]
    # Before 0.12 its lowering loops from constants to values that vary.
    if primitive.name == "regularized_incomplete_beta" and not VERSION >= (0, 12, 0):
        return True
    if eqn.effects or not mesh_axes or not (primitive in ad.primitive_jvps or primitive in ad.primitive_transposes):
        return False
    if primitive not in _FORGETFUL:
        types, _ = primitive.abstract_eval(*(_varying_like(v.aval, mesh_axes) for v in eqn.invars), **params)
        types = types if primitive.multiple_results else [types]
        _FORGETFUL[primitive] = any(not aval.manual_axis_type.varying.issuperset(mesh_axes) for aval in types)
    return _FORGETFUL[primitive]


# Whether the types of a primitive's results lack the mesh axes of its operands, as those of other libraries do.
_FORGETFUL: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _jaxpr_of_equation(eqn):
    return _plain_jaxpr(lambda *xs: bind(eqn.primitive, xs, eqn.params), [v.aval for v in eqn.invars])


def _plain_jaxpr(fun, avals):
    with plain_context():
        return jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals))


# A call of a jaxpr without varying types among values that have them.
untyped_call_p = Primitive("untyped_call")

untyped_call_p.multiple_results = True


@untyped_call_p.def_effectful_abstract_eval
def _untyped_call_types(*avals, jaxpr):
    varying = frozenset().union(*(aval.manual_axis_type.varying for aval in avals))
    return [_varying_like(aval, varying) for aval in jaxpr.out_avals], jaxpr.effects


def _lower_untyped_call(ctx, *args, jaxpr):
    with plain_context():
        lower = mlir.lower_fun(jex_core.jaxpr_as_fun(jaxpr), multiple_results=True)
        return lower(ctx.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals), *args)


def _untyped_call(fun, *args):
    return untyped_call_p.bind(*args, jaxpr=_plain_jaxpr(fun, map(jax.typeof, args)))


def _batch_untyped_call(args, dims, *, jaxpr):
    moved = [x if d is None else jax.numpy.moveaxis(x, d, 0) for x, d in zip(args, dims)]
    in_axes = [None if d is None else 0 for d in dims]
    outs = _untyped_call(jax.vmap(jex_core.jaxpr_as_fun(jaxpr), in_axes=in_axes), *moved)
    return outs, [0] * len(outs)


def _jvp_untyped_call(primals, tangents, *, jaxpr):
    """The tangents are a call of their own, which is linear in those of the operands."""
    moving = [k for k, t in enumerate(tangents) if type(t) is not ad.Zero]
    inexact = [k for k, aval in enumerate(jaxpr.out_avals) if aval.to_tangent_aval().dtype != jax.dtypes.float0]

    def pushed(*args):
        primals, tangents = args[: -len(moving)], args[-len(moving) :]
        fun = lambda *xs: [_call_with(jaxpr, primals, moving, xs)[k] for k in inexact]  # noqa: E731
        return jax.jvp(fun, tuple(primals[k] for k in moving), tangents)[1]

    outs = untyped_call_p.bind(*primals, jaxpr=jaxpr)
    found = dict(zip(inexact, _untyped_call(pushed, *primals, *(tangents[k] for k in moving))))
    zeros = (ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs)
    return outs, [found.get(k, zero) for k, zero in enumerate(zeros)]


def _transpose_untyped_call(cts, *operands, jaxpr):
    linear = [k for k, x in enumerate(operands) if ad.is_undefined_primal(x)]
    known = [x for x in operands if not ad.is_undefined_primal(x)]

    def pulled(*args):
        given = iter(args)
        primals = [None if k in linear else next(given) for k in range(len(operands))]
        fun = lambda *xs: _call_with(jaxpr, primals, linear, xs)  # noqa: E731
        return jax.linear_transpose(fun, *(jaxpr.in_avals[k] for k in linear))(list(given))

    found = dict(zip(linear, _untyped_call(pulled, *known, *map(ad.instantiate_zeros, cts))))
    return [found.get(k) for k in range(len(operands))]


def _call_with(jaxpr, args, where, values):
    """The results of a jaxpr where some arguments are replaced."""
    return jex_core.jaxpr_as_fun(jaxpr)(*{**dict(enumerate(args)), **dict(zip(where, values))}.values())


mlir.register_lowering(untyped_call_p, _lower_untyped_call)
batching.primitive_batchers[untyped_call_p] = _batch_untyped_call
ad.primitive_jvps[untyped_call_p] = _jvp_untyped_call
ad.primitive_transposes[untyped_call_p] = _transpose_untyped_call


def _varying_operation(operation, mesh_axes):
    """An operation that carries the types of its operands and results (``HiPrim``, since 0.12), on varying ones."""
    vary = lambda avals: jax.tree.map(lambda aval: _varying_like(aval, mesh_axes), avals)  # noqa: E731
    varying = copy.copy(operation)
    varying.in_avals, varying.out_aval = vary(operation.in_avals), vary(operation.out_aval)
    varying.in_avals_flat, varying.out_avals_flat = map(vary, (operation.in_avals_flat, operation.out_avals_flat))
    return varying


def _varying_like(aval, mesh_axes):
    sharding = aval.sharding.update(mesh=jax.sharding.get_abstract_mesh())
    varying = aval.manual_axis_type.update(varying=frozenset(mesh_axes))
    return aval.update(sharding=sharding, manual_axis_type=varying)
