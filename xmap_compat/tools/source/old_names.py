"""Names that JAX removed and ``xmap_compat.install()`` restores: the generated program uses today's names."""

from __future__ import annotations

import types
from typing import Any

from xmap_compat.legacy.removed import ALIAS, GONE_MODULES, KEYWORDS, NAMES
from xmap_compat.random import NamedShape
from xmap_compat.tools.source.text import NotWritable

# By name, the functions of ``jax.util`` that are short enough to be written out.
WRITTEN_OUT = ("safe_map", "safe_zip", "unzip2")


def new_name(module: str, name: str) -> str | None:
    """Today's name of ``module.name`` in old programs; None if the name has not changed.

    Raises:
      NotWritable: it has no replacement, or the replacement is used differently.
    """
    row = NAMES.get(f"{module}.{name}")
    if row is None:
        if module in GONE_MODULES:
            raise NotWritable(f"a use of {module}, which JAX has removed")
        return None
    if row.kind != ALIAS:
        raise NotWritable(f"a use of {row.name}, which JAX has removed: write {row.now}")
    return row.now


def new_keyword(function: Any, keyword: str | None) -> str | None:
    """Today's name of a function's keyword; None if it has not changed."""
    for row in KEYWORDS:
        home, _, name = row.function.rpartition(".")
        if row.keyword == keyword and is_called(function, name):
            if not row.now.isidentifier():
                raise NotWritable(f"the argument {keyword} of {home}.{name}, which JAX has removed: write {row.now}")
            return row.now
    return None


def is_called(function: Any, name: str) -> bool:
    """Whether a function of JAX, or of this package in its place, has a name."""
    home = str(getattr(function, "__module__", "")).split(".")[0]
    return getattr(function, "__name__", "") == name and home in ("jax", "xmap_compat")


def helper_for(value: Any) -> str | None:
    """The name of the helper that replaces a class of this package or a function of ``jax.util``."""
    name = getattr(value, "__name__", "")
    homes = ("jax._src.util", "jaxlib", "xmap_compat.legacy.adapters")
    inside = str(getattr(value, "__module__", "") or "").startswith(homes)
    return name if value is NamedShape or (name in WRITTEN_OUT and inside and callable(value)) else None


def of_jax(value: Any) -> Any:
    """JAX's random function for a function of this package, which also takes named shapes; else the value itself."""
    ours = isinstance(value, types.FunctionType) and value.__module__ == "xmap_compat.random"
    return getattr(value, "__wrapped__", value) if ours else value
