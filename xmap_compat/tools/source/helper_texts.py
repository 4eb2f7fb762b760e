"""The helpers that a generated module defines: their texts, and the helpers that each one needs."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Iterable, Mapping

from xmap_compat.tools.source import helpers
from xmap_compat.tools.source.text import literal
from xmap_compat.tools.source.user_code import AxisNames

_OURS = {name: made for name, made in vars(helpers).items() if getattr(made, "__module__", "") == helpers.__name__}
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


def helper_lines(helpers_: Mapping[str, None], names: AxisNames) -> list[str]:
    """The helpers, the helpers that they need, and the axes that they ask for."""
    needed = [name for name in HELPERS if name in with_needs(helpers_)]
    used = set().union(*(_READS[name] for name in needed))
    table = ", ".join(f"{literal(n)}: {literal(names.parts(n))}" for n in names.mesh)
    constants = {"AXES": f"AXES = {{{table}}}", "MESH_AXES": f"MESH_AXES = {literal(names.order)}"}
    lines = [text for name, text in constants.items() if name in used]
    return [*lines, *(line for name in needed for line in ("", "", *HELPERS[name]))]
