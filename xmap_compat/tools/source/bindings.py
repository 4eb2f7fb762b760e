"""What the names in a file mean, as its imports tell, and where it binds names."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

MAPS = "jax.experimental.maps"


class Bindings:
    """The dotted names that the names of a file mean: imported ones, which it binds in no other way."""

    def __init__(self, tree: ast.Module):
        nodes = list(ast.walk(tree))
        self.own = {name for node in nodes if not isinstance(node, IMPORTS) for name in bound_by(node)}
        found = {name: meant for node in nodes for name, meant in imported_names(node)}
        self._meant = {name: meant for name, meant in found.items() if name not in self.own}

    def of(self, node: ast.AST) -> str:
        """``'jax.lax.psum'`` for ``lax.psum``; empty if it is not imported."""
        if isinstance(node, ast.Name):
            return self._meant.get(node.id, "")
        if isinstance(node, ast.Attribute) and (owner := self.of(node.value)):
            return f"{owner}.{node.attr}"
        return ""


IMPORTS = (ast.Import, ast.ImportFrom)


def imported_names(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that an import binds, with their meanings."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            root = alias.name.split(".")[0]
            yield alias.asname or root, alias.name if alias.asname else root
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, f"{'.' * node.level}{node.module or ''}.{alias.name}"


def bound_by(node: ast.AST) -> list[str]:
    """The names that a node itself binds."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, IMPORTS):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
    return [str(node.name)] if isinstance(node, kinds) else []


def bound_anywhere(tree: ast.AST) -> set[str]:
    """Every name that a program binds in any way."""
    return {name for node in ast.walk(tree) for name in bound_by(node)}


def assigned_once(nodes: Iterable[ast.AST], name: str) -> ast.expr | None:
    """The expression that is assigned to a variable, if that is its only binding."""
    nodes = list(nodes)
    if Counter(own for node in nodes for own in bound_by(node))[name] != 1:
        return None
    found = (n for n in nodes if isinstance(n, ast.Assign) and len(n.targets) == 1)
    return next((n.value for n in found if isinstance(n.targets[0], ast.Name) and n.targets[0].id == name), None)


def first_line(node: Any) -> int:
    """The first line of a part of a program, including its decorators."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
