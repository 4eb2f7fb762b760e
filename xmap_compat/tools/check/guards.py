"""Uses for whose failure a program is ready: within a ``try`` that catches it, or under a test for
it.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from xmap_compat.tools.source.bindings import Names


def is_guarded(names: Names, node: Any, name: str, error: type[Exception]) -> bool:
    """Whether a program is ready for the error that a use of a removed name raises."""
    last = re.split(r"\W", name.rstrip("=)"))[-1]
    root = re.split(r"\W", ast.unparse(node))[0]
    asks = re.compile(rf"(?i)'{last}'|version|TYPE_CHECKING|find_spec|\b{root} is (not )?None")
    child = node
    is_of_function = False
    while (parent := names.parents.get(child)) is not None:
        test = getattr(parent, "test", None)
        if test not in (None, child) and asks.search(ast.unparse(test)):
            return True
        is_tried = isinstance(parent, ast.Try) and child in parent.body
        if is_tried and not is_of_function and _catches(parent, error):
            return True
        is_of_function |= isinstance(parent, ast.FunctionDef)
        child = parent
    return False


def _catches(tried: Any, error: type[Exception]) -> bool:
    """Whether a ``try`` catches an error, and goes on."""
    catching = {kind.__name__ for kind in error.__mro__}
    for handler in tried.handlers:
        caught = ast.unparse(handler.type or ast.Name("Exception"))
        if not catching.isdisjoint(re.findall(r"\w+", caught)):
            return re.search(r"\b(raise|exit|quit)\b", ast.unparse(handler.body[-1])) is None
    return False
