"""The helpers that a written module defines: their texts, and what each needs."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping

from xmap_compat.tools.source import helpers
from xmap_compat.tools.source.text import literal
from xmap_compat.tools.source.user_code import AxisNames


@dataclasses.dataclass(frozen=True)
class _Helper:
    lines: tuple[str, ...]
    needs: frozenset[str]


def _read_helpers() -> Mapping[str, _Helper]:
    """The functions of ``helpers``, with what each reads; the rule of a derivative belongs to its function."""
    text = inspect.getsource(helpers)
    found: dict[str, _Helper] = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            owner = re.sub("_(jvp|fwd|bwd)$", "", node.name)
        else:
            owner = _attached_to(node)
        if not owner:
            continue
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        lines = [line.split("  # noqa")[0] for line in text.split("\n")[first - 1 : node.end_lineno]]
        needs = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if owner in found:
            lines = [*found[owner].lines, "", "", *lines]
            needs |= found[owner].needs
        found[owner] = _Helper(tuple(lines), frozenset(needs - {owner}))
    return found


def _attached_to(node: ast.stmt) -> str:
    """The function of ``f.defvjp(...)``."""
    call = getattr(node, "value", None)
    owner = call.func.value if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None
    return getattr(owner, "id", "") if isinstance(node, ast.Expr) else ""


HELPERS = _read_helpers()


def with_needs(names: Iterable[str]) -> set[str]:
    needed: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in HELPERS and name not in needed:
            needed.add(name)
            pending.extend(HELPERS[name].needs)
    return needed


def helper_lines(helpers_: Mapping[str, None], names: AxisNames) -> list[str]:
    """The helpers, with what they need, and the axes that they ask for."""
    needed = [name for name in HELPERS if name in with_needs(helpers_)]
    lines = [line for name in needed for line in ("", "", *HELPERS[name].lines)]
    used = {n for name in needed for n in HELPERS[name].needs}
    constants = []
    if "AXES" in used:
        table = ", ".join(f"{literal(n)}: {literal(names.parts(n))}" for n in names.mesh)
        constants.append(f"AXES = {{{table}}}")
    if "MESH_AXES" in used:
        constants.append(f"MESH_AXES = {literal(names.order)}")
    return [*constants, *lines]
