"""What the names in a file mean, as its imports tell, and where it binds names."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

IMPORTS = (ast.Import, ast.ImportFrom)
# What binds the name in its field `name`.
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_NAMED = (*_DEFINITIONS, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)


class Names:
    """All that the names of a file are bound to: dotted names of imports, values of assignments, or
    other nodes.
    """

    def __init__(self, tree: ast.Module):
        self.nodes: list[Any] = list(ast.walk(tree))
        self.parents: dict[ast.AST, ast.AST] = {}
        self.bound: dict[str, list[Any]] = defaultdict(list)
        self.stars: list[str] = []  # modules of which all names are imported
        for node in self.nodes:
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
            self._bind(node)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, IMPORTS):
            for name, meant in imported_names(node):
                self.bound[name].append(meant)
            if node.names[0].name == "*":
                self.stars.append(str(getattr(node, "module", "")))
            return
        for name in bound_by(node):
            self.bound[name].append(self._value(node))

    def _value(self, node: ast.AST) -> ast.AST:
        """What a node that binds a name gives it; the node itself if that is no expression."""
        parent = self.parents[node]
        if isinstance(parent, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            return parent.value or node
        return node

    def imported_name(self, node: ast.AST) -> str:
        """The dotted name of a name or attribute, by imports only: ``'jax.lax.psum'`` for
        ``lax.psum``.

        The last import of ``lax`` counts.  Empty if something else binds ``lax`` too; ``lax =
        None``, as where an import fails, is allowed.
        """
        if isinstance(node, ast.Attribute):
            owner = self.imported_name(node.value)
            return owner and f"{owner}.{node.attr}"
        imported = ""
        for meant in self.bound.get(getattr(node, "id", ""), ()):
            if isinstance(meant, str):
                imported = meant
            elif getattr(meant, "value", meant) is not None:
                return ""
        return imported

    def taken_from(self, is_meant: Callable[[str], bool]) -> set[str]:
        """The names that this file takes from modules that ``is_meant`` picks; ``*`` for all."""
        found = set()
        for node in self.nodes:
            imported = dict(imported_names(node))
            for dotted in [self.imported_name(node), *imported.values()]:
                module, _, name = dotted.rpartition(".")
                if is_meant(module):
                    found.add(name)
        return found

    def meaning(self, name: str) -> Any:
        """The one thing that a name is bound to: a dotted name or a node; None if there is none, or
        several.  A name that the file does not bind is taken to come from its last ``import *``.
        """
        found = self.bound.get(name, [])
        if not found and self.stars:
            return f"{self.stars[-1]}.{name}"
        if found and found.count(found[0]) == len(found):
            return found[0]
        return None

    def dotted(self, node: Any, depth: int = 9) -> str:
        """The dotted name of an expression; empty if it has none.  Unlike
        ``imported_name`` it follows assignments, ``partial`` and ``getattr``.
        """
        if isinstance(node, ast.Name):
            meant = self.meaning(node.id)
            if not depth:
                return ""
            if isinstance(meant, str):
                return meant
            return self.dotted(meant, depth - 1)
        if isinstance(node, ast.Call) and node.args and self.is_partial(node):
            return self.dotted(node.args[0], depth)
        match node:
            case ast.Attribute(value=owner, attr=name):
                module = self.dotted(owner, depth)
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, key]):
                module = self.dotted(owner, depth)
                name = self.text(key) or "?"
            case _:
                return ""
        return module and f"{module}.{name}"

    def is_partial(self, call: ast.Call) -> bool:
        """Whether a call makes a partial function."""
        return self.dotted(call.func) in ("functools.partial", "jax.tree_util.Partial")

    def text(self, node: Any) -> str:
        """What a node is as a text, a literal or the name of one; empty if it is none."""
        if isinstance(node, ast.Name):
            node = self.meaning(node.id)
        return text_of(node)


def imported_names(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that an import binds, with their meanings."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            root = alias.name.partition(".")[0]
            if alias.asname:
                yield alias.asname, alias.name
            else:
                yield root, root
    elif isinstance(node, ast.ImportFrom):
        home = "." * node.level + (node.module or "")
        for alias in node.names:
            yield alias.asname or alias.name, f"{home}.{alias.name}"


def bound_by(node: ast.AST) -> list[str]:
    """The names that a node itself binds."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, _NAMED):
        return [str(node.name)]
    return [name for name, _ in imported_names(node)]


def text_of(node: ast.AST | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""


def first_line(node: Any) -> int:
    """The first line of a part of a program, including its decorators."""
    decorators = getattr(node, "decorator_list", ())
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])
