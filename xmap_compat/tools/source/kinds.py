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
from xmap_compat.tools.source.user_code import Piece

_LIBRARY: list[tuple[types.ModuleType, str]] = [
    *((jnp, "jnp"), (lax, "lax"), (jax.nn, "nn"), (jax, "jax"), (np, "np")),
    *((jax.random, "random"), (jax.scipy.special, "special")),
]


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


def spells(node: ast.expr, value: Any, piece: Piece) -> bool:
    """Whether an expression of the file is a way to write a value: plain data, or arrays made from it."""
    modules = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    if not all(isinstance(piece.globals.get(name), types.ModuleType) for name in modules):
        return False
    for n in ast.walk(node):
        root: Any = n.func if isinstance(n, ast.Call) else None
        while isinstance(root, ast.Attribute):
            root = root.value
        made = root is None or (isinstance(root, ast.Name) and piece.globals[root.id] in (np, jnp))
        if not (made and isinstance(n, _PLAIN_NODES)):
            return False
    try:
        again = eval(compile(ast.Expression(node), "<spelling>", "eval"), dict(piece.globals))
        return type(again) is type(value) and bool(np.all(np.asarray(again) == np.asarray(value)))
    except Exception:
        return False


_PLAIN_NODES = (
    *(ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.UnaryOp, ast.BinOp, ast.Call, ast.Attribute, ast.keyword),
    *(ast.Name, ast.operator, ast.unaryop, ast.expr_context),
)
