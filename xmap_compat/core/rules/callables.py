"""Callables that custom rules hold: traced as the body was, then evaluated on named values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xmap_compat import _jax
from xmap_compat.core.values import NamedValue, is_float0

if TYPE_CHECKING:
    from xmap_compat.core.evaluate import Evaluator


def only_arrays(fun):
    """A function without those results that are no arrays, and how to put them back as None.

    These are tangents of integers, and zeros that are known to be zero.
    """
    kept: list[bool] = []

    def apply(*args):
        outs = fun(*args)
        kept[:] = [x is not None and not _jax.is_symbolic_zero(x) and _dtype(x) != _jax.float0 for x in outs]
        return list(itertools.compress(outs, kept))

    def restore(outs):
        rest = iter(outs)
        return [next(rest) if keep else None for keep in kept]

    return apply, restore


def _dtype(x):
    return getattr(x, "dtype", None)


def evaluate_callable(ev: Evaluator, fun: Callable[..., Any], values: Sequence[NamedValue]) -> list[NamedValue | None]:
    """Trace a callable that a custom rule holds on positional types, then evaluate it on named values.

    Tangents of integers (float0) and symbolic zeros are no operands of any equation: they are passed as constants,
    and stand as None in the results.
    """
    dynamic = [v for v in values if not is_no_array(v)]

    def on_dynamic(*args):
        rest = iter(args)
        return fun(*(positional_zero(v) if is_no_array(v) else next(rest) for v in values))

    traced, restore = only_arrays(on_dynamic)
    jaxpr = ev.trace(traced, [positional_type(v) for v in dynamic])
    inputs = [v.names for v in dynamic]
    ev = ev.gathering(jaxpr, inputs, ev.checker.check(jaxpr, inputs))
    return restore(evaluate_whole(ev, jaxpr, dynamic))


def evaluate_whole(ev: Evaluator, jaxpr: Any, operands: Sequence[NamedValue]) -> list[NamedValue]:
    """Evaluate a custom function's body or rule: under a ``vmap(spmd_axis_name=...)`` as one jitted function.

    JAX (to 0.12) maps a custom rule late, when it has forgotten the axis of that vmap: a constant and a mapped value
    then meet with different varying mesh axes.  Mapping a jitted function recalls the axis.
    """
    if not (ev.loc.typed and ev.loc.foreign):
        return ev.evaluate(jaxpr, operands)

    @jax.jit
    def custom(*values):
        return ev.evaluate(jaxpr, values)

    return custom(*operands)


def is_no_array(value: NamedValue) -> bool:
    """Whether a tangent or cotangent is one of integers, or known to be zero."""
    return is_float0(value) or _jax.is_symbolic_zero(value.data)


def positional_zero(value: NamedValue) -> Any:
    """Zero for one element of the named axes, in the form that a rule expects."""
    if _jax.is_symbolic_zero(value.data):
        return _jax.symbolic_zero_of(positional_shape(value), value.data.dtype)
    return np.zeros(positional_shape(value), value.data.dtype)


def positional_shape(value: NamedValue) -> tuple[int, ...]:
    return tuple(np.shape(value.data)[k] for k in value.positional_dims())


def positional_type(value: NamedValue) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(value.data)
    return jax.ShapeDtypeStruct(positional_shape(value), aval.dtype, weak_type=aval.weak_type)
