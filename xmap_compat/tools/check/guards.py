"""Under which tests, and within which ``try``, a place of a program stands: is it reached, is its
error caught.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
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
Part = tuple[ast.Try, str]  # a try, and where in it: body, else, handler


def place(
    names: Names, node: ast.AST, error: type[Exception]
) -> tuple[list[Test], list[Part], bool]:
    """The tests on the way to a node, the parts of ``try`` around it, and whether such an error is
    caught there.
    """
    tests: list[Test] = []
    tries: list[Part] = []
    caught = in_function = False
    while (parent := names.parents.get(node)) is not None:
        tests += [question for test in _tests(node, parent) for question in questions(names, *test)]
        if isinstance(parent, (ast.Try, ast.TryStar)) and not in_function:
            part = "body" if node in parent.body else "else" if node in parent.orelse else "handler"
            tries.append((parent, part))  # type: ignore[arg-type]
            handler = next((h for h in parent.handlers if _catches(h.type, error)), None)
            caught |= part == "body" and handler is not None and _ends_well(handler.body[-1])
        in_function |= isinstance(parent, _FUNCTIONS) and isinstance(node, ast.stmt)
        node = parent
    return tests, tries, caught


def questions(names: Names, test: ast.expr, holds: bool) -> Iterator[Test]:
    """A test as ``facts`` can answer it; ``a and b`` that holds is two tests."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from questions(names, test.operand, not holds)
    elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == holds:
        for value in test.values:
            yield from questions(names, value, holds)
    else:
        with contextlib.suppress(_NotOfJax):
            yield ast.unparse(_Question(names).visit(copy.deepcopy(test))), holds


def _tests(child: Any, parent: Any) -> Iterator[tuple[ast.expr, bool]]:
    """The tests that hold, or do not, where the parent reaches this child."""
    if isinstance(parent, (ast.If, ast.IfExp, ast.While)) and child is not parent.test:
        yield (
            parent.test,
            child in (parent.body if isinstance(parent.body, list) else [parent.body]),
        )
    elif isinstance(parent, ast.BoolOp):
        yield from (
            (value, isinstance(parent.op, ast.And))
            for value in parent.values[: parent.values.index(child)]
        )
    block = next(
        (b for _, b in ast.iter_fields(parent) if isinstance(b, list) and child in b), [child]
    )
    for before in block[: block.index(child)]:
        if isinstance(before, ast.If) and isinstance(before.body[-1], _ENDS):
            yield before.test, False


def _ends_well(last: ast.stmt) -> bool:
    """Whether a handler that ends so neither raises nor leaves the program."""
    return isinstance(last, (ast.FunctionDef, ast.Try)) or not re.search(
        r"\b(raise|exit|quit)\b", ast.unparse(last)
    )


def _catches(caught: ast.expr | None, error: type[Exception]) -> bool:
    parts = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    kinds = (getattr(builtins, getattr(p, "attr", getattr(p, "id", "")), ()) for p in parts)
    return caught is None or any(issubclass(error, kind) for kind in kinds)


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
            return self.visit(copy.deepcopy(meant))
        if self._names.bound.get(node.id):
            raise _NotOfJax
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not _CALLED.fullmatch(ast.unparse(node.func)):
            raise _NotOfJax
        return self.generic_visit(node)
