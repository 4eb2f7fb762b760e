"""``named_shape(x)`` inside a body: the named axes of a value, computed from the operations that
made it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat.core.errors import should_be
from xmap_compat.core.names import Checker, Names
from xmap_compat.core.placement import Placement, enclosing_bodies
from xmap_compat.core.values import common


@_jax.api_boundary
def named_shape(x: Any) -> dict[Hashable, int]:
    """The named axes that a value varies over, with their sizes: ``{'batch': 20}``.

    It is computed from the operations that made the value, so it is exact: an axis that was reduced
    is gone. Inside a body, ``x.named_shape`` is the same.

    Args:
      x: an array or scalar.  Constants, and everything outside of xmapped functions, have ``{}``.

    Raises:
      TypeError: ``x`` is not an array (a pytree has no single named shape).
      ValueError: the value depends on the arguments of an inner function that JAX traces by itself
        (``jit``, the body of a ``scan``, a nested xmap): their named axes are not known there.

    Example:

      >>> import jax, numpy as np
      >>> from xmap_compat import named_shape, xmap
      >>> @xmap(in_axes=["batch", ...], out_axes={})
      ... def total(x):
      ...     print(x.shape, named_shape(x), named_shape(jax.lax.psum(x, "batch")))
      ...     return jax.lax.psum(x, "batch")
      >>> total(np.ones((8, 3))).tolist()
      (3,) {'batch': 8} {}
      [8.0, 8.0, 8.0]

    Source: ``x.named_shape`` on tracers of ``jax.experimental.maps.xmap``.
    """
    if not is_array(x):
        raise should_be("The argument of named_shape", "an array or a scalar", x)
    sizes: dict[Hashable, int] = {}
    for body in enclosing_bodies():
        if body.inputs is not None:
            sizes.update(body.sizes)
    if not sizes:
        return {}
    checker = Checker({name: Placement(name, size) for name, size in sizes.items()}, "")
    names = _names_of(x, checker, {})
    return {name: sizes[name] for name in common(sizes, names)}


def is_array(x):
    try:
        return hasattr(jax.typeof(x), "shape")
    except TypeError:
        return False


def _names_of(x, checker, memo):
    """Walk back over the equations that made a value; iterative, because programs can be long."""
    pending = [x]
    while pending:
        value = pending[-1]
        kind, origin = _jax.tracer_origin(value)
        operands = []
        if kind == "equation":
            operands = origin[2]
        elif kind == "same":
            operands = [origin]
        missing = [operand for operand in operands if id(operand) not in memo]
        if missing:
            pending.extend(missing)
            continue
        names = [memo[id(operand)] for operand in operands]
        memo[id(value)] = _step(value, kind, origin, names, checker)
        pending.pop()
    return memo[id(x)]


def _step(value, kind, origin, operands, checker) -> Names:
    if kind == "constant":
        return frozenset()
    if kind == "same":
        return operands[0]
    if kind == "equation":
        eqn, index, _ = origin
        return checker.equation(eqn, operands)[index]
    for body in enclosing_bodies():
        for tracer, names in body.inputs or ():
            if tracer is value:
                return names
    reason = (
        "it depends on an argument of a function that is traced by itself (under jit, in a loop, "
        "in a nested xmap)"
    )
    if kind == "hidden":
        reason = "this JAX does not say how a value was made, or XMAP_COMPAT_PUBLIC is set"
    raise _named_shape_unknown(reason)


def _named_shape_unknown(reason: str) -> ValueError:
    return ValueError(
        f"named_shape cannot tell which named axes this value varies over: {reason}. "
        "Ask outside of that function, for the value that is passed to it"
    )
