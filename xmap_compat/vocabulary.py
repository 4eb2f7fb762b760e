"""The functions that JAX has removed, put at their old places while a body is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat import braces as named_einsum
from xmap_compat import lax as named_lax
from xmap_compat.core.restored import restored

REMOVED_FROM_LAX: dict[str, Callable[..., Any]] = {
    "pdot": named_lax.pdot,
    "pargmax": named_lax.pargmax,
    "pargmin": named_lax.pargmin,
    "pgather": named_lax.pgather,
    "xeinsum": named_einsum.xeinsum,
}


def _einsum_or(positional: Callable[..., Any]) -> Callable[..., Any]:
    """``jnp.einsum`` that reads braces, and calls JAX's for other specs."""

    @functools.wraps(positional)
    def einsum(*args, **kwargs):
        if args and isinstance(args[0], str) and ("{" in args[0] or "}" in args[0]):
            return named_einsum.einsum(*args, **kwargs)
        return positional(*args, **kwargs)

    return einsum


@functools.cache
def complete() -> None:
    """Add these functions to what is in place while a body is traced, before a body is.

    Who comes first calls it: the first import of xmap, or install(), which can come in the middle
    of that import.
    """
    for name, function in REMOVED_FROM_LAX.items():
        restored.add(_jax.replaced(jax.lax, name, function))
    restored.add(_jax.replaced(jax.numpy, "einsum", _einsum_or(jax.numpy.einsum)))
