"""The helpers that a generated module defines: their texts, and the helpers that each one needs."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from xmap_compat.tools.leave import collectives
from xmap_compat.tools.leave.text import literal

_OURS = {name: made for name, made in vars(collectives).items() if getattr(made, "__module__", "") == collectives.__name__}
HELPERS = {name: inspect.getsource(made).rstrip().split("\n") for name, made in _OURS.items()}
_READS = {
    name: {n.id for n in ast.walk(ast.parse("\n".join(lines))) if isinstance(n, ast.Name)}
    for name, lines in HELPERS.items()
}


def with_needs(names: Iterable[str]) -> set[str]:
    """These helpers, and those that they need."""
    needed: set[str] = set()
    pending = set(names) & HELPERS.keys()
    while pending:
        needed |= pending
        pending = (set().union(*(_READS[name] for name in pending)) & HELPERS.keys()) - needed
    return needed


def names_of(helpers_: Iterable[str]) -> set[str]:
    """Names that must keep their meaning for helpers: their own, and those of the Python builtins that they call."""
    return {*helpers_}.union(*(_READS[name] & vars(builtins).keys() for name in helpers_))


def helper_lines(helpers_: Iterable[str], parts: Mapping[Any, tuple[Any, ...]]) -> list[str]:
    """The helpers, and the helpers that they need.

    Args:
      parts: the axes that execute each named axis.
    """
    needed = [name for name in HELPERS if name in with_needs(helpers_)]
    table = ", ".join(f"{literal(n)}: {literal(axes)}" for n, axes in parts.items())
    lines = [f"AXES = {{{table}}}"] * ("axes_of" in needed)
    return [*lines, *(line for name in needed for line in ("", "", *HELPERS[name]))]
