"""Under which tests, and within which ``try``, a place of a program stands: is it reached, is its error caught."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from xmap_compat.tools.source.bindings import Names

_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# What a test may call and import, to be evaluated beside JAX.
_CALLED = re.compile(
    r"(.*\.)?(hasattr|getattr|tuple|list|int|len|map|any|all|split|startswith|parse|Version|match|find_spec)"
)
_ROOTS = ("jax", "jaxlib", "packaging", "re", "importlib")

Test = tuple[str, bool]  # a question to ``facts``, and its answer where a place is reached


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a node stands."""

    tests: tuple[Test, ...]
    tries: tuple[tuple[ast.Try, str], ...]  # the tries around it, each with its part: body, else, handler
    caught: bool  # whether an error there is caught, and not raised again


class Guards:
    def __init__(self, names: Names):
        self._names = names
        self._parents = {child: node for node in names.nodes for child in ast.iter_child_nodes(node)}

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(node)

    def place(self, node: ast.AST, error: type[Exception]) -> Place:
        around: list[tuple[ast.expr, bool]] = []
        tries: list[tuple[ast.Try, str]] = []
        caught = in_function = False
        while (parent := self._parents.get(node)) is not None:
            around += _tests(node, parent)
            if isinstance(parent, (ast.Try, ast.TryStar)) and not in_function:
                part = "body" if node in parent.body else "else" if node in parent.orelse else "handler"
                tries.append((parent, part))  # type: ignore[arg-type]
                handler = next((h for h in parent.handlers if _catches(h.type, error)), None)
                caught |= part == "body" and handler is not None and _ends_well(handler.body[-1])
            elif isinstance(parent, ast.With) and not in_function:
                caught |= any(_suppresses(item.context_expr, error) for item in parent.items)
            in_function |= isinstance(parent, _FUNCTIONS) and isinstance(node, ast.stmt)
            node = parent
        tests = tuple(question for test in around for question in self.questions(*test))
        return Place(tests, tuple(tries), caught)

    def questions(self, test: ast.expr, holds: bool) -> Iterator[Test]:
        """A test as ``facts`` can answer it; ``a and b`` that holds is two tests."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield from self.questions(test.operand, not holds)
        elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == holds:
            for value in test.values:
                yield from self.questions(value, holds)
        else:
            try:
                yield ast.unparse(_Question(self._names).visit(_copy(test))), holds
            except _NotOfJax:
                return


def _copy(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body


def _tests(child: Any, parent: Any) -> Iterator[tuple[ast.expr, bool]]:
    """The tests that hold, or do not, where the parent reaches this child."""
    if isinstance(parent, (ast.If, ast.IfExp, ast.While)) and child is not parent.test:
        yield parent.test, child in (parent.body if isinstance(parent.body, list) else [parent.body])
    elif isinstance(parent, ast.BoolOp):
        yield from ((value, isinstance(parent.op, ast.And)) for value in parent.values[: parent.values.index(child)])
    block = next((b for _, b in ast.iter_fields(parent) if isinstance(b, list) and child in b), [child])
    for before in block[: block.index(child)]:
        if isinstance(before, ast.Assert):
            yield before.test, True
        elif isinstance(before, ast.If) and isinstance(before.body[-1], _ENDS):
            yield before.test, False
        elif isinstance(before, ast.If) and before.orelse and isinstance(before.orelse[-1], _ENDS):
            yield before.test, True


def _ends_well(last: ast.stmt) -> bool:
    """Whether a handler that ends so neither raises nor leaves the program."""
    return isinstance(last, (ast.FunctionDef, ast.Try)) or not re.search(r"\b(raise|exit|quit)\b", ast.unparse(last))


def _catches(caught: ast.expr | None, error: type[Exception]) -> bool:
    parts = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    kinds = (getattr(builtins, getattr(p, "attr", getattr(p, "id", "")), ()) for p in parts)
    return caught is None or any(issubclass(error, kind) for kind in kinds)


def _suppresses(context: ast.expr, error: type[Exception]) -> bool:
    is_call = isinstance(context, ast.Call) and ast.unparse(context.func).endswith("suppress")
    return is_call and any(_catches(argument, error) for argument in context.args)  # type: ignore[attr-defined]


class _NotOfJax(Exception):
    """The expression is not about JAX alone."""


class _Question(ast.NodeTransformer):
    """Replaces the names of a program by what they are bound to."""

    def __init__(self, names: Names):
        self._names, self._depth = names, 9

    def visit_Name(self, node: ast.Name) -> ast.AST:
        meant = self._names.meaning(node.id)
        if node.id == "TYPE_CHECKING":
            return ast.Constant(False)
        if isinstance(meant, str) and meant.split(".")[0] in _ROOTS:
            return ast.Call(ast.Name("at"), [ast.Constant(meant)], [])
        if isinstance(meant, ast.expr) and not isinstance(meant, ast.Name) and self._depth:
            self._depth -= 1
            return self.visit(_copy(meant))
        if self._names.bound.get(node.id):
            raise _NotOfJax
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not _CALLED.fullmatch(ast.unparse(node.func)):
            raise _NotOfJax
        return self.generic_visit(node)
