"""Uses for whose failure a program is ready: within a ``try`` that catches it, or under a test for
it.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from typing import Any

from xmap_compat.tools.source.bindings import Names, text_of

CAUGHT = "within a try that catches its error"
TESTED = "under a test for it"
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# A test that mentions one of these asks which JAX this is, or whether the program runs at all.
_OF_RELEASES = re.compile(r"version|TYPE_CHECKING|find_spec", re.IGNORECASE)


def guard_of(names: Names, node: ast.AST, name: str, error: type[Exception]) -> str:
    """How a program is ready for the error that a use of a removed name raises; empty if it is
    not.
    """
    child = node
    in_function = False
    while (parent := names.parents.get(child)) is not None:
        if isinstance(parent, (ast.Try, ast.TryStar)) and not in_function:
            found = _in_try(parent, child, error)
            if found:
                return found
        for test in _tests(parent, child):
            if _is_about(names, test, node, name):
                return TESTED
        in_function |= isinstance(parent, _FUNCTIONS) and isinstance(child, ast.stmt)
        child = parent
    return ""


def _in_try(parent: Any, child: ast.AST, error: type[Exception]) -> str:
    """How a ``try`` guards a part of it."""
    if child in parent.finalbody:
        return ""
    if child in parent.body:
        for handler in parent.handlers:
            if _catches(handler.type, error):
                return CAUGHT if _ends_well(handler.body[-1]) else ""
        return ""
    # A handler, or what is after the body: it says what to do where the body fails.
    body = " ".join(ast.unparse(statement) for statement in parent.body)
    missing = (ImportError, AttributeError)
    for handler in parent.handlers:
        if any(_catches(handler.type, kind) for kind in missing) and "jax" in body:
            return TESTED
    return ""


def _catches(caught: ast.expr | None, error: type[Exception]) -> bool:
    if caught is None:
        return True
    parts = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    for part in parts:
        name = getattr(part, "attr", getattr(part, "id", ""))
        if issubclass(error, getattr(builtins, name, ())):
            return True
    return False


def _ends_well(last: ast.stmt) -> bool:
    """Whether a handler that ends so neither raises nor leaves the program."""
    if isinstance(last, (ast.FunctionDef, ast.Try)):
        return True
    return not re.search(r"\b(raise|exit|quit)\b", ast.unparse(last))


def _tests(parent: Any, child: Any) -> Iterator[ast.expr]:
    """The tests that decide whether the parent reaches this child."""
    if isinstance(parent, (ast.If, ast.IfExp, ast.While)) and child is not parent.test:
        yield parent.test
    elif isinstance(parent, ast.BoolOp):
        yield from parent.values[: parent.values.index(child)]
    for _, block in ast.iter_fields(parent):
        if isinstance(block, list) and child in block:
            for before in block[: block.index(child)]:
                if isinstance(before, ast.If) and isinstance(before.body[-1], _ENDS):
                    yield before.test


def _is_about(names: Names, test: ast.expr, node: ast.AST, name: str) -> bool:
    """Whether a test asks for a removed name, or for the variable that has it."""
    if isinstance(test, ast.Constant):
        return not test.value  # `if False:`
    last = re.split(r"\W", name.rstrip("=)"))[-1]
    for part in _parts(names, test):
        if text_of(part) == last or _OF_RELEASES.search(str(_word_of(part))):
            return True
    return _is_of_variable(names, test, node)


def _parts(names: Names, test: ast.expr) -> Iterator[ast.AST]:
    """The nodes of a test, and of what its variables are bound to."""
    for part in ast.walk(test):
        yield part
        if isinstance(part, ast.Name):
            for meant in names.bound.get(part.id, ()):
                if isinstance(meant, ast.expr):
                    yield from ast.walk(meant)
                else:
                    yield ast.Constant(meant)


def _word_of(part: ast.AST) -> object:
    for field in ("id", "attr", "value"):
        word = getattr(part, field, None)
        if isinstance(word, str):
            return word
    return ""


def _is_of_variable(names: Names, test: ast.expr, node: Any) -> bool:
    """Whether a test asks if the variable at the root of a use is None, which a failed import left
    there.
    """
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    if not isinstance(node, ast.Name):
        return False
    bound = names.bound.get(node.id, ())
    may_be_none = any(isinstance(b, ast.Constant) and b.value is None for b in bound)
    mentioned = any(isinstance(n, ast.Name) and n.id == node.id for n in ast.walk(test))
    return may_be_none and mentioned
