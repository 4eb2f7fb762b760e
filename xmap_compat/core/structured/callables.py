"""Callables that custom rules hold: traced as the body was, then evaluated on named values; and the
derivative of one equation as a program, which stage 4 and the comparison of processes ask.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from xmap_compat import _jax
from xmap_compat.core import errors
from xmap_compat.core.collectives import collective_axes_in, collective_axes_of
from xmap_compat.core.combining import may_combine
from xmap_compat.core.evaluate import Evaluator
from xmap_compat.core.placement import is_mesh_axis
from xmap_compat.core.specs import AxisName
from xmap_compat.core.values import NamedValue, is_float0, is_smooth, names_of_each, split


def only_arrays(fun):
    """A function without its results that are not arrays, and a function that puts these back as
    None.

    Such results are tangents of integers, and zeros that are known to be zero.
    """
    kept: list[bool] = []

    def apply(*args):
        outs = list(fun(*args))
        kept[:] = map(_is_array, outs)
        return list(itertools.compress(outs, kept))

    def restore(outs):
        rest = iter(outs)
        return [next(rest) if keep else None for keep in kept]

    return _jax.traced_as(fun, apply), restore


def _is_array(x):
    if x is None or isinstance(x, SymbolicZero):
        return False
    return getattr(x, "dtype", None) != _jax.float0


class StagedCallable(NamedTuple):
    """A callable that a custom rule holds, as a program.

    Attributes:
      jaxpr: traced on positional types, of the arguments that are arrays.
      operands: these arguments.
      restore: puts None where results are no arrays.
    """

    jaxpr: Any
    operands: list[NamedValue]
    restore: Callable[[list[Any]], list[Any]]


def staged_callable(
    ev: Evaluator, fun: Callable[..., Any], values: Sequence[NamedValue]
) -> StagedCallable:
    """Trace a callable that a custom rule holds on positional types.

    Tangents of integers (float0) and symbolic zeros are not operands of any equation: they are
    passed as constants, and are None in the results.
    """
    dynamic = [v for v in values if not is_no_array(v)]

    def on_dynamic(*args):
        rest = iter(args)
        everything = []
        for value in values:
            if is_no_array(value):
                everything.append(positional_zero(value))
            else:
                everything.append(next(rest))
        return fun(*everything)

    traced, restore = only_arrays(_jax.traced_as(fun, on_dynamic))
    jaxpr = ev.trace(traced, [_positional_type(v) for v in dynamic])
    return StagedCallable(jaxpr, dynamic, restore)


def evaluate_staged(ev: Evaluator, jaxpr: Any, operands: Sequence[NamedValue]) -> list[NamedValue]:
    """Evaluate a program that a custom rule traced late on named values."""
    if ev.view.in_our_shard_map:
        _check_outer_names(ev.view, jaxpr)
    inputs = names_of_each(operands)
    ev = ev.gathering(jaxpr, inputs, ev.checker.check(jaxpr, inputs))
    return ev.evaluate(jaxpr, operands)


def _check_outer_names(view, jaxpr):
    """Raise if a rule names an axis of a vmap around the xmap, which our shard_map cannot reach."""
    known = {*view.placements, *view.mesh_sizes}
    outer = itertools.filterfalse(is_mesh_axis, collective_axes_in(jaxpr) - known)
    names = sorted(outer, key=str)
    if names:
        raise errors.outer_names(names)


def evaluate_callable(
    ev: Evaluator, fun: Callable[..., Any], values: Sequence[NamedValue]
) -> list[NamedValue | None]:
    """Trace a callable that a custom rule holds, then evaluate it on named values."""
    staged = staged_callable(ev, fun, values)
    return staged.restore(evaluate_staged(ev, staged.jaxpr, staged.operands))


def checkpointed(call: _jax.Checkpoint, evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """``jax.checkpoint`` of the evaluation of a body."""

    def body(*values):
        return evaluate(call.body, values)

    return jax.checkpoint(body, policy=call.policy, prevent_cse=call.prevent_cse)


def communicates(ev: Evaluator, *jaxprs: Any) -> bool:
    """Whether evaluating these jaxprs, or their derivatives, moves anything between devices."""
    for jaxpr in jaxprs:
        body, _ = _jax.open_jaxpr(jaxpr)
        for eqn in body.eqns:
            names = collective_axes_within(ev, eqn)
            if any(ev.view.placement_of(name).mesh_axes for name in names):
                return True
    return False


# Collectives are found up to this order of derivatives: many rules call their function without end.
_ORDERS = 3


def collective_axes_within(
    ev: Evaluator, eqn: Any, order: int = 1, differentiable: bool = False
) -> frozenset[AxisName]:
    """Every axis name that collectives in an equation, and in the custom rules inside of it,
    mention.

    A rule that cannot be traced by itself may have a collective over any axis, and so may an
    operation whose batching rule combines elements.

    Args:
      differentiable: whether to leave out such operations if their results have no derivative.
    """
    key = (eqn, order, differentiable)
    if key not in ev.rule_names:
        ev.rule_names[key] = _find_collective_axes(ev, eqn, order, differentiable)
    return ev.rule_names[key]


def _find_collective_axes(ev, eqn, order, differentiable):
    bodies = _jax.subjaxprs(eqn.params)
    names = collective_axes_of(eqn) | _collective_axes_in_all(ev, bodies, order, differentiable)
    counts = not differentiable or any(is_smooth(v.aval) for v in eqn.outvars)
    if counts and may_combine(eqn):
        return names.union(ev.view.placements)
    has_rule = isinstance(_jax.read(eqn), (_jax.CustomJvp, _jax.CustomVjp, _jax.HijaxOperation))
    if not has_rule or order > _ORDERS:
        return names
    try:
        of_rule = [derivative(ev.trace, eqn)]
        return names | _collective_axes_in_all(ev, of_rule, order + 1, differentiable)
    except Exception:
        return names.union(ev.view.placements)


def _collective_axes_in_all(ev, jaxprs, order, differentiable):
    names: frozenset[AxisName] = frozenset()
    for jaxpr in jaxprs:
        body, _ = _jax.open_jaxpr(jaxpr)
        for eqn in body.eqns:
            names |= collective_axes_within(ev, eqn, order, differentiable)
    return names


def is_no_array(value: NamedValue) -> bool:
    """Whether a tangent or cotangent belongs to an integer, or is known to be zero."""
    return is_float0(value) or isinstance(value.data, SymbolicZero)


def positional_zero(value: NamedValue) -> Any:
    """Zero for one element of the named axes, in the form that a rule expects."""
    if isinstance(value.data, SymbolicZero):
        return SymbolicZero(jax.core.ShapedArray(value.positional_shape(), value.data.dtype))
    return np.zeros(value.positional_shape(), value.data.dtype)


def _positional_type(value: NamedValue) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(value.data)
    return jax.ShapeDtypeStruct(value.positional_shape(), aval.dtype, weak_type=aval.weak_type)


def derivative(trace: Callable[..., Any], eqn: Any) -> Any:
    """An equation and its derivative, as a jaxpr: ``(*operands, *tangents) -> (*results,
    *tangents)``.

    For a function with a backward rule it is ``(*operands, *cotangents) -> (*results,
    *cotangents)``.  Integers have no tangents there, and values that a function with a backward
    rule closes over have no cotangents.
    """
    held = _jax.read(eqn)
    backward = isinstance(held, _jax.CustomVjp)
    num_consts = 0
    if isinstance(held, _jax.CustomVjp):
        num_consts = held.num_consts
    operands = [v.aval for v in eqn.invars]
    results = [v.aval for v in eqn.outvars]
    smooth = [is_smooth(x) and k >= num_consts for k, x in enumerate(operands)]

    def apply(*args):
        values, seeds = split(args, len(smooth))

        def fun(*primals):
            rest = iter(primals)
            everything = [next(rest) if s else x for s, x in zip(smooth, values)]
            outs = _jax.bind(eqn.primitive, everything, eqn.params)
            return tuple(filter(is_smooth, outs)), outs

        primals = tuple(itertools.compress(values, smooth))
        if not backward:
            _, tangents, outs = jax.jvp(fun, primals, tuple(seeds), has_aux=True)
            return outs, tangents
        _, pull, outs = jax.vjp(fun, *primals, has_aux=True)
        return outs, pull(tuple(seeds))

    seeded = operands
    if backward:
        seeded = results
    types = []
    for aval in [*operands, *filter(is_smooth, seeded)]:
        types.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return trace(apply, types)
