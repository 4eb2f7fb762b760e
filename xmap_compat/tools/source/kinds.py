"""What the values are that the user's functions read: of a library, of ours, to be imported, or to be written."""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat.tools.source.text import NotWritable
from xmap_compat.tools.source.user_code import Scope

_LIBRARY: list[tuple[types.ModuleType, str]] = [
    *((jnp, "jnp"), (lax, "lax"), (jax.nn, "nn"), (jax, "jax"), (np, "np")),
    *((jax.random, "random"), (jax.scipy.special, "special")),
]
NO_CODE = types.SimpleNamespace(co_filename="")


def public_name(value: Any) -> tuple[tuple[str, types.ModuleType], str] | None:
    """``(('jnp', jax.numpy), 'sin')`` for a function or class of a library, which is used and not copied."""
    name = getattr(value, "__name__", "")
    if not isinstance(name, str) or not callable(value):
        return None
    for module, alias in _LIBRARY:
        if name and vars(module).get(name) is value:
            return (alias, module), name
    root = str(getattr(value, "__module__", "") or "").split(".")[0]
    there = sys.modules.get(root)
    if there is not None and root not in ("__main__", "xmap_compat", "builtins") and vars(there).get(name) is value:
        return ((root, there), name) if is_library(getattr(there, "__file__", None) or "") else None
    return None


def refuse_library(file: str, name: str) -> None:
    if is_library(file):
        raise NotWritable(f"{name or 'a function'} of a library, which has no public name")


def is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES)


_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple({*(os.path.join(_PATHS[k], "") for k in ("stdlib", "platstdlib", "purelib", "platlib"))})


def is_jitted(value: Any) -> bool:
    return isinstance(value, type(jax.jit(len)))


def is_xmapped(value: Any) -> bool:
    return is_jitted(value) and callable(getattr(value, "plan", None))


def is_ours(value: Any) -> bool:
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", "")
    return str(module).split(".")[0] == "xmap_compat"


def attaches(node) -> bool:
    """Whether a rule is attached by its decorator: ``@f.defjvp``."""
    return any(isinstance(d, ast.Attribute) and d.attr.startswith("def") for d in getattr(node, "decorator_list", ()))


def same(known: Any, value: Any) -> bool:
    plain = (bool, int, float, complex, str, bytes)
    return known is value or (type(known) is type(value) and isinstance(value, plain) and known == value)


def spells(node: ast.expr, value: Any, scope: Scope) -> bool:
    """Whether an expression of the file is a way to write a value: plain data, or arrays made from it."""
    for n in ast.walk(node):
        if isinstance(n, ast.Call) and not _is_of_arrays(n.func, scope):
            return False
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load):
            if not (n.id in scope.globals and isinstance(scope.globals[n.id], types.ModuleType)):
                return False
        elif not isinstance(n, _PLAIN_NODES):
            return False
    try:
        again = eval(compile(ast.Expression(node), "<spelling>", "eval"), dict(scope.globals))
        return type(again) is type(value) and bool(np.all(np.asarray(again) == np.asarray(value)))
    except Exception:
        return False


_PLAIN_NODES = (
    *(ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.UnaryOp, ast.BinOp, ast.Call, ast.Attribute, ast.keyword),
    *(ast.operator, ast.unaryop, ast.expr_context),
)


def _is_of_arrays(node: ast.expr, scope: Scope) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and scope.globals.get(node.id) in (np, jnp)
