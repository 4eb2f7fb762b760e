"""Uses for whose failure a program is ready: within a ``try`` that catches it, or under a test for
it.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from typing import Any

from xmap_compat.tools.source.bindings import Names

CAUGHT = "within a try that catches its error"
TESTED = "under a test for it"
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_TRIES = (ast.Try, ast.TryStar)
_TESTS = (ast.If, ast.IfExp, ast.While)


def guard_of(names: Names, node: Any, name: str, error: type[Exception]) -> str:
    """How a program is ready for the error that a use of a removed name raises; empty if it is
    not.
    """
    child = node
    in_function = False
    while (parent := names.parents.get(child)) is not None:
        if isinstance(parent, _TRIES) and not in_function and child not in parent.finalbody:
            is_tried = child in parent.body
            if is_tried and _catches(parent, error):
                return CAUGHT
            # In a handler or an else: the try asks whether JAX has the name.
            if not is_tried and "jax" in ast.unparse(parent.body):  # type: ignore[arg-type]
                return TESTED
        for test in _tests(parent, child):
            if _is_about(names, test, node, name):
                return TESTED
        in_function |= isinstance(parent, ast.FunctionDef)
        child = parent
    return ""


def _catches(tried: Any, error: type[Exception]) -> bool:
    """Whether a ``try`` catches an error, and goes on."""
    for handler in tried.handlers:
        caught = re.findall(r"\w+", ast.unparse(handler.type or ast.Name("Exception")))
        if any(issubclass(error, getattr(builtins, name, ())) for name in caught):
            last = handler.body[-1]
            ends = re.search(r"\b(raise|exit|quit)\b", ast.unparse(last))
            return not ends or isinstance(last, (ast.FunctionDef, ast.Try))
    return False


def _tests(parent: Any, child: Any) -> Iterator[ast.expr]:
    """The tests that decide whether the parent reaches this child."""
    if isinstance(parent, _TESTS) and child is not parent.test:
        yield parent.test
    elif isinstance(parent, ast.BoolOp):
        yield from parent.values[: parent.values.index(child)]
    block = getattr(parent, "body", None)
    if isinstance(block, list) and child in block:
        for before in block[: block.index(child)]:
            if isinstance(before, ast.If) and isinstance(before.body[-1], _ENDS):
                yield before.test


def _is_about(names: Names, test: ast.expr, node: ast.AST, name: str) -> bool:
    """Whether a test asks for a removed name, for the variable that has it, or for the release of
    JAX.
    """
    if isinstance(test, ast.Constant):
        return not test.value  # `if False:`
    asked = ast.unparse(test)
    for variable in re.findall(r"\w+", asked):
        for meant in names.bound.get(variable, ()):
            if isinstance(meant, ast.expr):
                meant = ast.unparse(meant)
            asked += f" {meant}"
    last = re.split(r"\W", name.rstrip("=)"))[-1]
    root = re.split(r"\W", ast.unparse(node))[0]
    return bool(
        re.search(rf"(?i)'{last}'|version|TYPE_CHECKING|find_spec|\b{root} is (not )?None", asked)
    )
