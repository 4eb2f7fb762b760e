"""Which functions of a program are xmapped, or call one that is."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from xmap_compat.tools.check.advice import MAPS
from xmap_compat.tools.check.names import Bindings, is_literal, text_of

XMAPS = (f"{MAPS}.xmap", "xmap_compat.xmap", "xmap_compat.api.xmap")


def _label(node: ast.AST) -> str | None:
    """What a function is known by: ``'f'``, or ``'.f'`` for an attribute (``self.f``), of whatever object."""
    if isinstance(node, ast.Name):
        return node.id
    return f".{node.attr}" if isinstance(node, ast.Attribute) else None


class ThroughXmap:
    """Names and attributes are taken to mean the same everywhere."""

    def __init__(self, tree: ast.AST, bindings: Bindings):
        self._bindings = bindings
        self._known: set[str] = set()
        nodes = list(ast.walk(tree))
        methods = {id(f) for node in nodes if isinstance(node, ast.ClassDef) for f in node.body}
        before = -1
        while before != len(self._known):
            before = len(self._known)
            for node in nodes:
                self._learn(node, id(node) in methods)

    def _learn(self, node: ast.AST, is_method: bool) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and self.leads(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            self._known.update(filter(None, map(_label, targets)))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorated = any(self._mentions_xmap(part) for d in node.decorator_list for part in ast.walk(d))
            if decorated or any(map(self._calls_xmapped, ast.walk(node))):
                self._known.add(f".{node.name}" if is_method else node.name)

    def _mentions_xmap(self, node: ast.AST) -> bool:
        return self._bindings.of(node) in XMAPS

    def leads(self, node: ast.AST) -> bool:
        """Whether a function, given as an expression, leads through an xmap.

        It is ``xmap(f, ...)``, a known name, a lambda that calls one, or any of them wrapped: ``jax.jit(xmap(...))``.
        """
        if isinstance(node, ast.Lambda):
            return any(map(self._calls_xmapped, ast.walk(node.body)))
        if isinstance(node, (ast.Name, ast.Attribute)):
            return _label(node) in self._known
        if not isinstance(node, ast.Call):
            return False
        return self._mentions_xmap(node.func) or any(map(self.leads, node.args))

    def _calls_xmapped(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and not self._mentions_xmap(node.func) and self.leads(node.func)

    def body_calls(self, body: Iterable[ast.AST]) -> bool:
        """Whether the statements of a function call an xmapped one."""
        return any(self._calls_xmapped(part) for statement in body for part in ast.walk(statement))


def unused_resources(node: ast.Call) -> Iterator[ast.expr]:
    """Keys of axis_resources that are in neither in_axes nor axis_sizes, where all of them are written out."""
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    resources = given.get("axis_resources")
    declared = [given.get("in_axes", node.args[1] if len(node.args) > 1 else None), given.get("axis_sizes")]
    if not isinstance(resources, ast.Dict) or declared[0] is None or not all(map(is_literal, declared)):
        return
    names = {text_of(part) for value in declared if value is not None for part in ast.walk(value)}
    yield from (key for key in resources.keys if key is not None and text_of(key) and text_of(key) not in names)
