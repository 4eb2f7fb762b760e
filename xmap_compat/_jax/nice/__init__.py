"""Optional parts: without one of them xmap gives the same numbers and compiles the same programs.

Each part is a module here and, under the same names, a class of stand-ins in ``plain.py``.  A part is off if this JAX
lacks a private thing that it needs; one warning says which.  ``XMAP_COMPAT_PUBLIC=1`` turns all of them off.
"""

from __future__ import annotations

import functools
import importlib
import os
import types
import warnings
from collections.abc import Callable
from typing import Any

from xmap_compat._jax.nice import plain

PARTS = [name for name, value in vars(plain).items() if isinstance(value, type) and value.__module__ == plain.__name__]

# Errors that Python raises where a private name is gone or has changed.
_CHANGED = (ImportError, AttributeError, LookupError, TypeError, ValueError)

_off: set[str] = set()


def part(name: str) -> Any:
    """A part by its name: its functions, which become the stand-ins as soon as one finds that JAX has changed.

    Its module is imported when it is needed.
    """
    stand_ins = {key: value for key, value in vars(getattr(plain, name)).items() if not key.startswith("__")}
    return types.SimpleNamespace(**{key: guarded(name, key, value.__func__) for key, value in stand_ins.items()})


def guarded(name: str, key: str, stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a part while it is on, then its stand-in."""

    @functools.wraps(stand_in)
    def call(*args, **kwargs):
        if is_on(name):
            try:
                return getattr(importlib.import_module(f"{__name__}.{name}"), key)(*args, **kwargs)
            except _CHANGED as error:
                _turn_off(name, error)
        return stand_in(*args, **kwargs)

    return call


def is_on(name: str) -> bool:
    return name not in _off and os.environ.get("XMAP_COMPAT_PUBLIC", "0") in ("", "0")


def _turn_off(name, error):
    """Use the stand-ins of a part from now on, and say so once."""
    _off.add(name)
    text = (
        f"This JAX has changed something private that xmap_compat's part `{name}` needs ({error}). The part is off: "
        f"{getattr(plain, name).__doc__}. Results are the same. Upgrade xmap_compat, or set XMAP_COMPAT_PUBLIC=1 to "
        "turn all such parts off"
    )
    warnings.warn(text, RuntimeWarning, stacklevel=4)
