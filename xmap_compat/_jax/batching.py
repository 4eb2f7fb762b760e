"""Batching rules: whose they are, and over what their results vary, asked without computing."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from xmap_compat._jax.jaxprs import is_ours, walk
from xmap_compat._jax.primitives import Level

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


def has_own_batching(eqn: Any) -> bool:
    """Whether a batching rule of a library, or of the user, takes part in batching an equation.

    JAX's own rules keep elements apart, and their results vary over all that the operands vary
    over; so they need not be asked.
    """
    if eqn.primitive.name == "custom_vmap_call" or not is_of_jax(eqn.primitive):
        return True
    operation = eqn.params.get("_prim")  # of jax.experimental.hijax, whose users define classes
    if operation is not None and not is_ours(type(operation).__module__):
        return True
    return holds_own_batching(eqn.params)


def holds_own_batching(held: Any) -> bool:
    """Whether a jaxpr, or any in a container, has such an equation."""
    return any(has_own_batching(inner) for inner, _ in walk(held))


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
