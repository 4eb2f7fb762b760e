"""What the values are that the user's functions read: of a library, of ours, to be imported, or to be written."""

from __future__ import annotations

import ast
import inspect
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
from xmap_compat.tools.source.user_code import Scope, bound_by, file_at

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


def needs_us(module: str, seen: dict[str, bool]) -> bool:
    """Whether importing a module of the user's imports this package, or what it brings back."""
    if module in seen:
        return seen[module]
    seen[module] = False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    if is_library(file):
        return False
    if not file or module.split(".")[0] in ("xmap_compat", "__main__"):
        return True
    for node in ast.walk(file_at(file, module).tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            if node.level:
                return True
            names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
        names += [n.rpartition(".")[0] for n in names]
        if any(n.startswith("jax.experimental.maps") for n in names):
            return True
        if any(n in sys.modules and needs_us(n, seen) for n in names):
            seen[module] = True
            return True
    return False


def is_as_imported(module: types.ModuleType, name: str, seen: set[tuple[str, str]] | None = None) -> bool:
    """Whether a process that imports a module finds by a name what is there now, and so does what is found.

    Modules are changed while they run: ``config.scale = 3``.  A library's are not looked into.
    """
    seen = set() if seen is None else seen
    file = getattr(module, "__file__", None) or ""
    if is_library(file) or not file or (module.__name__, name) in seen:
        return bool(file)
    seen.add((module.__name__, name))
    value, found = vars(module).get(name), file_at(file, name)
    statements = [s for s in found.tree.body if name in bound_by(s)]
    if len(statements) != 1:
        return False
    (statement,) = statements
    if isinstance(statement, ast.Import):
        return True
    if isinstance(statement, ast.ImportFrom):
        home = sys.modules.get(statement.module or "")
        own = next(a.name for a in statement.names if (a.asname or a.name) == name)
        return home is not None and vars(home).get(own) is value and is_as_imported(home, own, seen)
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return statement.value is not None and spells(statement.value, value, Scope(found, vars(module)))
    if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)) or not _is_defined_by(statement, value, file):
        return False
    read = {str(getattr(n, "id", None) or getattr(n, "attr", None)) for n in ast.walk(statement)}
    homes = [module, *(m for n in read if isinstance(m := vars(module).get(n), types.ModuleType))]
    return all(is_as_imported(home, n, seen) for home in homes for n in read if n in vars(home))


def _is_defined_by(statement: Any, value: Any, file: str) -> bool:
    if isinstance(value, type):
        plain = [s for s in statement.body if isinstance(s, (ast.Assign, ast.AnnAssign)) and s.value is not None]
        held = [(s.value, vars(value).get(name)) for s in plain for name in bound_by(s)]
        return all(not isinstance(n, ast.Constant) or same(n.value, v) for n, v in held)
    code = getattr(inspect.unwrap(value), "__code__", NO_CODE)
    first = min([statement.lineno, *(d.lineno for d in statement.decorator_list)])
    return code.co_filename == file and getattr(code, "co_firstlineno", None) == first


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


def module_import(name: str, module: types.ModuleType) -> str:
    path = module.__name__
    if path.split(".")[0] == "xmap_compat":
        raise NotWritable(f"a use of {path}")
    if needs_us(path, {}):
        raise NotWritable(f"a use of {path}, which needs xmap")
    if path == name:
        return f"import {path}"
    parent, _, last = path.rpartition(".")
    return f"from {parent} import {last}" if last == name and parent else f"import {path} as {name}"
