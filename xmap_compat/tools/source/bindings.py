"""What the names in a file mean, as its imports tell, and where it binds names."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

MAPS = "jax.experimental.maps"


class Names:
    """All that the names of a file are bound to: dotted names of imports, values of assignments, or
    other nodes.
    """

    def __init__(self, tree: ast.Module):
        self.nodes = list(ast.walk(tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.bound: dict[str, list[Any]] = defaultdict(list)
        self.stars: list[str] = []  # modules of which all names are imported
        values: dict[
            ast.AST, ast.expr | None
        ] = {}  # by their targets; None for those of a comprehension
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                values.update(dict.fromkeys(node.targets, node.value))
            elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
                values[node.target] = node.value or node.target
            elif isinstance(node, ast.comprehension):
                values.update(dict.fromkeys(ast.walk(node.target)))
            elif isinstance(node, IMPORTS):
                for name, meant in imported_names(node):
                    self.bound[name].append(meant)
                self.stars += [str(getattr(node, "module", ""))] * (node.names[0].name == "*")
            elif (value := values.get(node, node)) is not None:
                for name in bound_by(node):
                    self.bound[name].append(value)

    def of(self, node: ast.AST) -> str:
        """``'jax.lax.psum'`` for ``lax.psum``, by the last import of ``lax``; empty if it is bound
        otherwise too, but to None where an import fails.
        """
        if isinstance(node, ast.Name):
            found = self.bound.get(node.id, [])
            imported = [meant for meant in found if isinstance(meant, str)]
            others = [meant for meant in found if getattr(meant, "value", meant) is not None]
            return imported[-1] if imported and imported == others else ""
        owner = self.of(node.value) if isinstance(node, ast.Attribute) else ""
        return owner and f"{owner}.{getattr(node, 'attr', '')}"

    def meaning(self, name: str) -> Any:
        """What a name is bound to, if that is one thing; a name of nowhere is one of the last
        module with a star.
        """
        found = self.bound.get(name) or [f"{module}.{name}" for module in self.stars[-1:]]
        return found[0] if found and all(each == found[0] for each in found) else None

    def dotted(self, node: Any, depth: int = 9) -> str:
        """The dotted name of an expression; empty if it has none."""
        match node:
            case ast.Name(id=name) if depth:
                meant = self.meaning(name)
                return meant if isinstance(meant, str) else self.dotted(meant, depth - 1)
            case ast.Attribute(value=owner, attr=name):
                module = self.dotted(owner, depth)
                return module and f"{module}.{name}"
            case (
                ast.Call(func=ast.Name(id="getattr"), args=[owner, key])
                | ast.Call(func=ast.Name(id="setattr"), args=[owner, key, _])
                | ast.Call(
                    func=ast.Call(func=ast.Attribute(attr="attrgetter"), args=[key]), args=[owner]
                )
                | ast.Subscript(value=ast.Call(func=ast.Name(id="vars"), args=[owner]), slice=key)
                | ast.Subscript(value=ast.Attribute(value=owner, attr="__dict__"), slice=key)
            ) if text := self.text(key):
                module = self.dotted(owner, depth)
                return module and f"{module}.{text}"
            case ast.Subscript(value=ast.Attribute(attr="modules"), slice=key):
                return self.text(key)
            case ast.Call(args=[first, *_]) if self.dotted(node.func) in (
                "functools.partial",
                "jax.tree_util.Partial",
            ):
                return self.dotted(first, depth)
        return ""

    def text(self, node: Any) -> str:
        """What a node is as a text, a literal or the name of one; empty if it is none."""
        return text_of(self.meaning(node.id) if isinstance(node, ast.Name) else node)


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
    kinds = (
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.ExceptHandler,
        ast.MatchAs,
        ast.MatchStar,
    )
    return [str(node.name)] if isinstance(node, kinds) else []


def text_of(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def assigned_once(nodes: Iterable[ast.AST], name: str) -> ast.expr | None:
    """The expression that is assigned to a variable, if that is its only binding."""
    nodes = list(nodes)
    if Counter(own for node in nodes for own in bound_by(node))[name] != 1:
        return None
    found = (n for n in nodes if isinstance(n, ast.Assign) and len(n.targets) == 1)
    return next(
        (n.value for n in found if isinstance(n.targets[0], ast.Name) and n.targets[0].id == name),
        None,
    )


def first_line(node: Any) -> int:
    """The first line of a part of a program, including its decorators."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
