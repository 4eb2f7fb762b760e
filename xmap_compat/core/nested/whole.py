"""Functions of a whole axis, such as ``cumsum``: they are applied once for all elements, and so are
their transposes.

For the transpose the cotangents of all elements are gathered as the elements were (or summed, if
all have one result), and each element takes its slice of what it makes.  After an ``all_gather``
each element would apply the transpose to its own cotangent only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from xmap_compat.core.device_primitives import bind, gather_p, take_p, vary_p
from xmap_compat.core.specs import AxisNames
from xmap_compat.core.trace import sizes_in_scope


def is_of_whole(names: AxisNames, options: Any) -> bool:
    """Whether these are axes of an xmap, not empty, and no option is traced: it might vary, or have
    a derivative.
    """
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(options))
    return (
        not traced
        and sizes_in_scope().keys() >= set(names)
        and math.prod(map(lax.axis_size, names)) > 0
    )


def apply_to_whole(fun: Callable[[Any], Any], x: Any, names: AxisNames, keep: bool = False) -> Any:
    """Apply ``fun`` to all elements, in first dimensions; with ``keep`` each gets its slice of the
    result only.
    """
    sizes = [lax.axis_size(name) for name in names]
    for name, size in reversed(list(zip(names, sizes))):
        x = bind(gather_p, x, (name,), (size,))
    out = fun(x)
    for name, size in zip(names, sizes):
        out = bind(take_p if keep else vary_p, out, (name,), (size,))
    return out
