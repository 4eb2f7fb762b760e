"""Primitives bound one by one, and the definition of others."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from xmap_compat._jax.jaxprs import NamedAxisEffect, bind_params
from xmap_compat._jax.version import VERSION

Primitive = jex_core.Primitive


def bind(primitive: Any, operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Bind one primitive on operands as they are, and return its results as a list, even a single
    one.
    """
    bound = bind_params(primitive, params)
    functions = []
    if VERSION < (0, 9, 2):  # they are arguments there, before the operands
        functions = bound.pop("subfuns", [])
    out = primitive.bind(*functions, *operands, **bound)
    if primitive.multiple_results:
        return list(out)
    return [out]


# A dimension that a primitive is batched over: its size, and its position in each operand without
# the outer ones.
Level = tuple[int, Sequence[int | None]]


def call_batched(fun: Callable[..., Any], operands: Sequence[Any], levels: Sequence[Level]) -> Any:
    """Call a function under one ``jax.vmap`` for each level, the outermost first.

    The levels are the first dimensions of each result, in order.
    """

    def called(_, *operands):
        return fun(*operands)

    for size, positions in reversed(levels):
        called = jax.vmap(called, (0, *positions), axis_size=size)
    # No operand may have a level: the first argument has them all.
    return called(np.empty([size for size, _ in levels], bool), *operands)


def define_named_primitive(
    name: str,
    abstract_eval: Callable[..., tuple[tuple[int, ...], Any]],
    bind: Callable[..., Any],
    cotangent: Callable[..., Any],
    batch: Callable[..., tuple[Any, int | None]],
) -> Any:
    """A primitive with a parameter ``axes`` of named axes that is linear in each of its operands.

    Args:
      abstract_eval: ``(*operands, **params) -> (shape, dtype)`` on types without named axes.
      bind: binds the primitive, for its derivatives.
      cotangent: ``(cotangent, index, operands, **params)``: the cotangent of the operand at
        ``index``, which is given by its type only.
      batch: ``(operands, dims, name=, **params) -> (result, dim)`` for one vmap, which may bind the
        axis ``name``.

    It has no lowering: a collective exists only until its axes are resolved.
    """
    primitive = Primitive(name)

    @primitive.def_effectful_abstract_eval
    def abstract_eval_in_scope(*operands, axes, **params):
        for axis in axes:
            jax.lax.axis_size(axis)  # raises if it is unbound
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        shape, dtype = abstract_eval(*types, axes=axes, **params)
        return jax.core.ShapedArray(shape, dtype), set(map(NamedAxisEffect, axes))

    def jvp(primals, tangents, **params):
        out = primitive.bind(*primals, **params)
        pushed = []
        for k, tangent in enumerate(tangents):
            if type(tangent) is not ad.Zero:
                pushed.append(bind(*primals[:k], tangent, *primals[k + 1 :], **params))
        return out, functools.reduce(ad.add_jaxvals, pushed)

    def transpose(ct, *operands, **params):
        [index] = linear_operands(operands)
        types = list(operands)
        types[index] = operands[index].aval
        cotangents = [None] * len(operands)
        cotangents[index] = cotangent(ct, index, types, **params)
        return cotangents

    def batch_in_vmap(axis_data, operands, dims, **params):
        return batch(operands, dims, name=axis_data.name, **params)

    ad.deflinear2(primitive, transpose)
    ad.primitive_jvps[primitive] = jvp
    batching.fancy_primitive_batchers[primitive] = batch_in_vmap
    return primitive


def linear_operands(operands: Sequence[Any]) -> list[int]:
    """The positions of the operands whose cotangents a transpose gives."""
    return [k for k, x in enumerate(operands) if ad.is_undefined_primal(x)]


def define_cut(name: str, tangent: Callable[..., Any]) -> Any:
    """A primitive ``(x, mask, **params) -> x`` whose derivative is ``tangent(that of x, mask,
    **params)``.

    The tangent must be its own transpose.  The dimensions of the mask are the leading ones of x, or
    have one element.
    """
    primitive = Primitive(name)
    primitive.def_impl(lambda x, mask, **params: x)
    primitive.def_abstract_eval(lambda x, mask, **params: x)
    mlir.register_lowering(primitive, lambda ctx, x, mask, **params: [x])

    def jvp(primals, tangents, **params):
        out = primitive.bind(*primals, **params)
        moved, _ = tangents
        if type(moved) is not ad.Zero:
            _, mask = primals
            moved = tangent(moved, mask, **params)
        return out, moved

    def transpose(ct, x, mask, **params):
        return [tangent(ct, mask, **params), None]

    def batch(operands, dims, **params):
        [size] = sizes_of_batch(operands, dims)
        in_front = [batching.bdim_at_front(x, dim, size) for x, dim in zip(operands, dims)]
        return primitive.bind(*in_front, **params), 0

    ad.deflinear2(primitive, transpose)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    return primitive


def sizes_of_batch(operands: Sequence[Any], dims: Sequence[int | None]) -> set[int]:
    """The sizes of the dimensions that a vmap maps, of which a batching rule has one."""
    return {x.shape[dim] for x, dim in zip(operands, dims) if dim is not None}


def define_device_check(name: str, refuse: Callable[[Any, Any, int], Exception]) -> Any:
    """An identity that is lowered only for as many devices as its mesh has.

    Its parameters ``axes`` and ``sizes`` say which mesh; ``refuse(axes, sizes, devices)`` makes the
    error for others.
    """
    primitive = Primitive(name)
    _define_linear(primitive, primitive, lambda shape, sizes: shape, lambda x, dim: (x, dim))
    primitive.def_abstract_eval(lambda x, *, axes, sizes: x)

    def lowered(ctx, x, *, axes, sizes):
        context = ctx.module_context.axis_context
        if isinstance(context, mlir.ShardingContext) and context.num_devices != math.prod(sizes):
            raise refuse(axes, sizes, context.num_devices)
        return [x]

    mlir.register_lowering(primitive, lowered)
    return primitive


def define_dual_primitives(
    names: tuple[str, str],
    shapes: tuple[Callable[..., tuple[int, ...]], Callable[..., tuple[int, ...]]],
    batch_dims: tuple[Callable[[Any, int], tuple[Any, int]], Callable[[Any, int], tuple[Any, int]]],
    over_bound: tuple[Any, Any] = (None, None),
) -> tuple[Any, Any]:
    """Two linear primitives with parameters ``axes`` and ``sizes``, each the transpose of the
    other.

    Args:
      shapes: ``(shape, sizes) -> shape`` of the result.
      batch_dims: ``(operand, mapped dimension) -> (operand with it moved aside, dimension in the
        result)``.
      over_bound: ``(operand, mapped dimension or None, size) -> (result, dimension)`` where a vmap
        binds the only axis.
    """
    first, second = map(Primitive, names)
    _define_linear(first, second, shapes[0], batch_dims[0], over_bound[0])
    _define_linear(second, first, shapes[1], batch_dims[1], over_bound[1])
    return first, second


def _define_linear(primitive, dual, shape, batch, over_bound=None):
    def abstract_eval(x, *, axes, sizes):
        return jax.core.ShapedArray(shape(x.shape, sizes), x.dtype)

    def transpose(ct, x, **params):
        return [dual.bind(ct, **params)]

    def batch_rule(axis_data, operands, dims, *, axes, sizes):
        [operand] = operands
        [dim] = dims
        if over_bound is not None and axes == (axis_data.name,):
            return over_bound(operand, dim, sizes[0])
        if dim is not None:
            operand, dim = batch(operand, dim)
        return primitive.bind(operand, axes=axes, sizes=sizes), dim

    primitive.def_abstract_eval(abstract_eval)
    ad.deflinear2(primitive, transpose)
    batching.fancy_primitive_batchers[primitive] = batch_rule
