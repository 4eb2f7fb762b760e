"""``jax.jit`` as xmap needs it: on a backend, and with clearer refusals."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from xmap_compat._jax.positions import api_boundary


def jit(fun: Callable[..., Any], backend: str | None, **options: Any) -> Any:
    """``jax.jit``, on a backend if one is named; jit's own parameter for it warns since 0.8."""
    if backend is None:
        return jax.jit(fun, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return jax.jit(fun, backend=backend, **options)


Explanation = Callable[[tuple[Any, ...], Mapping[str, Any]], None]


def explaining(stage: Callable[..., Any], explain: Explanation) -> Callable[..., Any]:
    """The same function, but where it refuses its arguments, ``explain(args, kwargs)`` may raise a clearer error."""

    @functools.wraps(stage)
    @api_boundary
    def explained(*args, **kwargs):
        try:
            return stage(*args, **kwargs)
        except TypeError:
            explain(args, kwargs)
            raise

    return explained
