"""Batching rules: whose they are, and over what their results vary, asked without computing."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from xmap_compat._jax.jaxprs import is_jax_or_this_package, walk
from xmap_compat._jax.primitives import Level, Primitive, bind, linear_operands, sizes_of_batch
from xmap_compat._jax.tracing import plainly
from xmap_compat._jax.types import float0, varying_axes_of, varying_like

_HAVE_KNOWN_RULES: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def has_known_rules(primitive: Any) -> bool:
    """Whether JAX or this package defines a primitive, so that we know its rules: one of their
    modules holds this object.

    The name of a primitive does not say so, as anybody may call one "add".
    """
    known = _HAVE_KNOWN_RULES.get(primitive)
    if known is None:
        known = _HAVE_KNOWN_RULES[primitive] = _is_held_by_known_module(primitive)
    return known


def _is_held_by_known_module(primitive):
    for name, module in list(sys.modules.items()):
        if not is_jax_or_this_package(name):
            continue
        held = list(getattr(module, "__dict__", {}).values())
        if any(value is primitive for value in held):
            return True
    return False


def has_custom_batching(eqn: Any) -> bool:
    """Whether a batching rule of a library, or of the user, takes part in batching an equation.

    JAX's rules compute each element of an axis from the same element of the operands, and their
    results vary over all that the operands vary over; so they need not be asked.
    """
    if eqn.primitive.name == "custom_vmap_call" or not has_known_rules(eqn.primitive):
        return True
    operation = eqn.params.get("_prim")  # of jax.experimental.hijax, whose users define classes
    if operation is not None and not is_jax_or_this_package(type(operation).__module__):
        return True
    return holds_custom_batching(eqn.params)


def holds_custom_batching(held: Any) -> bool:
    """Whether a jaxpr, or any in a container, has such an equation."""
    return any(has_custom_batching(inner) for inner, _ in walk(held))


def operation_name(eqn: Any) -> str:
    """What users call an operation: a class of theirs, or a primitive."""
    if "_prim" in eqn.params:
        return type(eqn.params["_prim"]).__name__
    return eqn.primitive.name


def batched(
    fun: Callable[..., Any], levels: Sequence[Level], results: Sequence[frozenset[int]]
) -> Callable[..., Any]:
    """A function under one ``jax.vmap`` for each level, the outermost first.

    Args:
      results: the levels that each result varies over; it has a leading dimension for each.
    """
    for level, (size, positions) in reversed(list(enumerate(levels))):
        out_axes = [_first_if(level in varying) for varying in results]
        fun = jax.vmap(fun, tuple(positions), out_axes, axis_size=size)
    return fun


def _first_if(is_mapped):
    """0, the position in front, for what is mapped; else None."""
    return 0 if is_mapped else None


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

    asked = counted
    for level, (size, positions) in reversed(list(enumerate(levels))):
        note = functools.partial(_note, varying, level)
        asked = jax.vmap(_observed(asked, positions, note), tuple(positions), axis_size=size)
    jax.eval_shape(asked, *types)
    return list(map(frozenset, varying))


def _note(varying, level, is_mapped):
    for found, mapped in zip(varying, is_mapped, strict=True):
        if mapped:
            found.add(level)


def _observed(fun, positions, note):
    """``fun``; it also calls ``note`` with which of its results the ``vmap`` around maps.

    Args:
      positions: those of the mapped dimensions of the arguments, of which one is not None.
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
        if not outs:
            return outs
        # The rule is called for a mapped argument, be it one that no result needs.
        mapped = next(x for x, position in zip(xs, positions) if position is not None)
        return list(observe(mapped, *outs))

    return observed


def jaxpr_of_equation(eqn: Any) -> Any:
    """The closed jaxpr of one equation."""

    def bound(*xs):
        return bind(eqn.primitive, xs, eqn.params)

    return _plain_jaxpr(bound, [v.aval for v in eqn.invars])


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
    untyped = ctx.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals)
    return plainly(lambda: lower(untyped, *args))


def _untyped_call(fun, *args):
    return untyped_call_p.bind(*args, jaxpr=_plain_jaxpr(fun, map(jax.typeof, args)))


def _batch_untyped_call(args, dims, *, jaxpr):
    moved = []
    for x, dim in zip(args, dims):
        moved.append(x if dim is None else jax.numpy.moveaxis(x, dim, 0))
    [size] = sizes_of_batch(args, dims)
    levels = [(size, [_first_if(dim is not None) for dim in dims])]
    call = jex_core.jaxpr_as_fun(jaxpr)
    varying = [frozenset([0])] * len(jaxpr.out_avals)
    if any(map(has_custom_batching, jaxpr.eqns)):
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in moved]
        varying = plainly(lambda: varying_results(call, types, levels), in_our_shard_map=True)
    outs = _untyped_call(batched(call, levels, varying), *moved)
    return outs, [_first_if(of_result) for of_result in varying]


def _jvp_untyped_call(primals, tangents, *, jaxpr):
    """The tangents are another call, which is linear in the tangents of the operands."""
    moving = [k for k, t in enumerate(tangents) if type(t) is not ad.Zero]
    smooth = _smooth_results(jaxpr)

    def pushed(*args):
        primals = args[: len(jaxpr.in_avals)]
        fun = functools.partial(_smooth_part, jaxpr, primals, moving)
        moved = _at(moving, primals)
        _, pushed = jax.jvp(fun, moved, args[len(primals) :])
        return pushed

    outs = untyped_call_p.bind(*primals, jaxpr=jaxpr)
    out_tangents = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    found = _untyped_call(pushed, *primals, *_at(moving, tangents))
    for k, tangent in zip(smooth, found):
        out_tangents[k] = tangent
    return outs, out_tangents


def _smooth_results(jaxpr):
    """The positions of results that have a tangent: integers have none."""
    smooth = []
    for k, aval in enumerate(jaxpr.out_avals):
        if aval.to_tangent_aval().dtype != float0:
            smooth.append(k)
    return smooth


def _smooth_part(jaxpr, args, where, *values):
    """The results that have a tangent, for arguments of which those at ``where`` are replaced."""
    given = dict(enumerate(args)) | dict(zip(where, values))
    outs = jex_core.jaxpr_as_fun(jaxpr)(*given.values())
    return list(_at(_smooth_results(jaxpr), outs))


def _at(places, values):
    return tuple(values[k] for k in places)


def _transpose_untyped_call(cts, *operands, jaxpr):
    linear = linear_operands(operands)
    known = [k for k in range(len(operands)) if k not in linear]
    smooth = _smooth_results(jaxpr)

    def pulled(*args):
        primals = dict.fromkeys(range(len(operands))) | dict(zip(known, args))
        fun = functools.partial(_smooth_part, jaxpr, primals.values(), linear)
        transposed = jax.linear_transpose(fun, *_at(linear, jaxpr.in_avals))
        return transposed(list(args[len(known) :]))

    smooth_cts = map(ad.instantiate_zeros, _at(smooth, cts))
    found = _untyped_call(pulled, *_at(known, operands), *smooth_cts)
    cotangents = dict.fromkeys(range(len(operands))) | dict(zip(linear, found))
    return list(cotangents.values())


mlir.register_lowering(untyped_call_p, _lower_untyped_call)
batching.primitive_batchers[untyped_call_p] = _batch_untyped_call
ad.primitive_jvps[untyped_call_p] = _jvp_untyped_call
ad.primitive_transposes[untyped_call_p] = _transpose_untyped_call
