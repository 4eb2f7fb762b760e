"""Where a tracer comes from, for ``named_shape``."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import partial_eval


def tracer_origin(x: Any) -> tuple[str, Any]:
    """Where a value seen inside a body comes from, one step back.

    Returns:
      ``('constant', None)``; ``('same', value)`` for a wrapper of another transformation around ``value``;
      ``('equation', (equation, index of the result, operands))``; ``('closure', value)``; ``('input', None)`` for an
      argument of a function that is being traced.
    """
    if not isinstance(x, jax.core.Tracer):
        return "constant", None
    if isinstance(x, partial_eval.DynamicJaxprTracer):
        return _staged_origin(x)
    # Tracers of a derivative have a primal, those of vmap a value.
    return "same", x.primal if hasattr(x, "primal") else x.val


def _staged_origin(x):
    variable, made_by = x.val, x.parent
    if isinstance(variable, jex_core.Literal):
        return "constant", None
    if made_by is not None:
        return "equation", (made_by, made_by.outvars.index(variable), made_by.in_tracers)
    closed_over = x._trace.frame.constvar_to_val
    return ("closure", closed_over[variable]) if variable in closed_over else ("input", None)
