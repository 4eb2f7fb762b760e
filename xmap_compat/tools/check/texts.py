"""What no type checker sees: names as texts, options and keywords of JAX, and where they are
imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from xmap_compat.legacy.removed import REFUSED
from xmap_compat.tools.check import removed_names
from xmap_compat.tools.source.bindings import Names, text_of

Found = tuple[ast.AST, str]  # a node, and a name that it asks for
_MODULE = re.compile(r"jax(\.\w+)+")
_IMPORT = re.compile(r"(.*\.)?(import_module|__import__)")


def uses(names: Names) -> Iterator[Found]:
    """What a file asks of JAX by other means than an attribute that ty resolves."""
    for node in names.nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from _imported(node)
        elif isinstance(node, ast.Call):
            yield from _of_call(names, node)
        elif isinstance(node, ast.Constant) and _MODULE.fullmatch(text_of(node)):
            yield node, text_of(node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            gone = removed_names.known(names.dotted(node))
            is_of_star = not names.bound.get(node.id)
            if gone and (is_of_star or gone.kind == REFUSED):
                yield node, gone.name
        elif isinstance(node, ast.Attribute):
            name = names.dotted(node)
            if name == "sys.modules" or name.endswith(".__dict__"):
                yield node, removed_names.NOT_FOLLOWED
            yield node, name


def _imported(node: Any) -> Iterator[Found]:
    for alias in node.names:
        if alias.name == "*":
            yield node, node.module
        elif isinstance(node, ast.Import):
            yield alias, alias.name
        elif not node.level:
            yield alias, f"{node.module}.{alias.name}"


def _of_call(names: Names, call: ast.Call) -> Iterator[Found]:
    """What a call asks for: an attribute with ``getattr``, an option, and keywords, also through
    ``partial``.
    """
    called = names.dotted(call.func)
    if not _is_followed(names, call):
        yield call, removed_names.NOT_FOLLOWED
    if called in ("jax.config.update", "jax.config.config.update"):
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        option = names.text(given[0])
        if option:
            yield call, f"jax.config({option}=)"
        else:
            yield call, removed_names.NOT_FOLLOWED
    if not names.is_partial(call):
        yield call, names.dotted(call)
    if called.endswith("artial"):
        called = names.dotted(call)
    if called.startswith("jax."):
        yield from _keywords(call, called)


def _is_followed(names: Names, call: ast.Call) -> bool:
    """Whether ``uses`` knows what a call reaches: not if a text says it."""
    function = ast.unparse(call.func)
    first = None
    if call.args:
        first = call.args[0]
    if function == "vars":
        return not names.dotted(first).startswith("jax")
    if _IMPORT.fullmatch(function):
        return bool(re.match(r"\w", names.text(first)))
    return function not in ("exec", "eval", "attrgetter", "operator.attrgetter")


def _keywords(call: ast.Call, called: str) -> Iterator[Found]:
    given: dict[str, ast.AST] = {}
    for keyword in call.keywords:
        given[keyword.arg or removed_names.NOT_FOLLOWED] = keyword
    moved = removed_names.known(called)
    today = called
    if moved is not None:
        today = moved.now
    for name, node in given.items():
        asked = f"{called}({name}=)"
        known = removed_names.known(asked) or removed_names.known(f"{today}({name}=)")
        if name == removed_names.NOT_FOLLOWED:
            yield node, name
        elif known is not None:
            yield node, known.name
        else:
            yield node, asked
