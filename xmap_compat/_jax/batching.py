"""Batching rules: whose they are, and over what their results vary, asked without computing."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from xmap_compat._jax.jaxprs import is_ours, walk
from xmap_compat._jax.primitives import Level, Primitive, bind
from xmap_compat._jax.tracing import plainly
from xmap_compat._jax.types import varying_axes_of, varying_like

_ARE_OURS: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def is_of_jax(primitive: Any) -> bool:
    """Whether JAX, or this package, defines a primitive: one of their modules holds this object.

    A name tells nothing, as anybody may call a primitive "add".
    """
    known = _ARE_OURS.get(primitive)
    if known is None:
        known = _ARE_OURS[primitive] = _is_held_by_jax(primitive)
    return known


def _is_held_by_jax(primitive):
    for name, module in list(sys.modules.items()):
        if not is_ours(name):
            continue
        held = list(getattr(module, "__dict__", {}).values())
        if any(value is primitive for value in held):
            return True
    return False


def has_custom_batching(eqn: Any) -> bool:
    """Whether a batching rule of a library, or of the user, takes part in batching an equation.

    JAX's own rules do not combine elements, and their results vary over all that the operands
    vary over; so they need not be asked.
    """
    if eqn.primitive.name == "custom_vmap_call" or not is_of_jax(eqn.primitive):
        return True
    operation = eqn.params.get("_prim")  # of jax.experimental.hijax, whose users define classes
    if operation is not None and not is_ours(type(operation).__module__):
        return True
    return holds_custom_batching(eqn.params)


def holds_custom_batching(held: Any) -> bool:
    """Whether a jaxpr, or any in a container, has such an equation."""
    return any(has_custom_batching(inner) for inner, _ in walk(held))


def operation_name(eqn: Any) -> str:
    """What users call an operation: a class of theirs, or a primitive."""
    operation = eqn.params.get("_prim")
    return eqn.primitive.name if operation is None else type(operation).__name__


def library_of(primitive: Any) -> str:
    """The package that implements a primitive."""
    module: str = getattr(primitive.impl, "__module__", "")
    return module.partition(".")[0]


def batched(
    fun: Callable[..., Any], levels: Sequence[Level], results: Sequence[frozenset[int]]
) -> Callable[..., Any]:
    """A function under one ``jax.vmap`` for each level, the outermost first.

    Args:
      results: the levels that each result varies over; it has a leading dimension for each.
    """
    for k, (size, positions) in reversed(list(enumerate(levels))):
        out_axes = [0 if k in varying else None for varying in results]
        fun = jax.vmap(fun, tuple(positions), out_axes, axis_size=size)
    return fun


def varying_results(
    fun: Callable[..., Any], types: Sequence[Any], levels: Sequence[Level]
) -> list[frozenset[int]]:
    """The levels that each result of a batched function varies over.

    Args:
      fun: it gives a list.
      types: those of the operands, with their levels as leading dimensions.
      levels: at least one operand has each of them.
    """
    varying: list[set[int]] = []

    def counted(*xs):
        outs = fun(*xs)
        varying[:] = [set() for _ in outs]
        return outs

    def noting(level):
        def note(mapped):
            for found, is_mapped in zip(varying, mapped, strict=True):
                found.update([level] if is_mapped else [])

        return note

    asked = counted
    for level, (size, positions) in reversed(list(enumerate(levels))):
        anchor = next(k for k, position in enumerate(positions) if position is not None)
        asked = jax.vmap(_observed(asked, anchor, noting(level)), tuple(positions), axis_size=size)
    jax.eval_shape(asked, *types)
    return list(map(frozenset, varying))


def _observed(fun, anchor, note):
    """``fun``, which tells ``note`` which of its results are mapped by the ``vmap`` around it.

    Args:
      anchor: the position of an argument that is mapped.
    """

    def passed_on(_, *outs):
        return outs

    def rule(_, is_mapped, __, *outs):
        mapped = tuple(is_mapped[1:])
        note(mapped)
        return outs, mapped

    observe = custom_vmap(passed_on)
    custom_vmap.def_vmap(observe, rule)

    def observed(*xs):
        outs = fun(*xs)
        return list(observe(xs[anchor], *outs)) if outs else outs

    return observed


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
    if any(map(has_custom_batching, jaxpr.eqns)):
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
