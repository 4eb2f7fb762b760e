"""Where a tracer comes from, for ``named_shape``."""

from __future__ import annotations

from typing import Any

import jax
from jax.interpreters import partial_eval


def tracer_origin(x: Any) -> tuple[str, Any]:
    """Where a value seen inside a body comes from, one step back.

    Returns:
      ``('constant', None)``; ``('same', value)`` for what stands for ``value``: in another
      transformation, or in a function that closes over it; ``('equation', (equation, index of the
      result, operands))``; ``('input', None)`` for an argument of a function that is being traced.
    """
    if not isinstance(x, jax.core.Tracer):
        return "constant", None
    if not isinstance(x, partial_eval.DynamicJaxprTracer):
        if hasattr(x, "primal"):  # of a derivative
            return "same", x.primal
        return "same", x.val  # of vmap
    # For a constant, and for a value that a function closes over, the value itself.
    held = x.full_lower()
    if held is not x:
        return "same", held
    if x.parent is None:
        return "input", None
    return "equation", (x.parent, x.parent.outvars.index(x.val), x.parent.invars)


def _tried(x):
    """Ask for each kind of tracer, so that it fails here."""

    def ask(v):
        tracer_origin(v)
        return v * 2

    tracer_origin(ask(x))
    return jax.vmap(ask)(x), jax.jvp(ask, (x,), (x,))


jax.make_jaxpr(_tried)(jax.ShapeDtypeStruct((1,), "float32"))
