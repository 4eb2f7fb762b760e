"""Where the values come from that the user's functions read: from a library, from this package, or from user modules.

A value stays in its user module, and is imported from it, if it needs no xmap and exists in a new process too.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat.tools.leave.old_check.names import Bindings, first_line, own_names
from xmap_compat.tools.source import old_names
from xmap_compat.tools.source.text import NotWritable
from xmap_compat.tools.source.user_code import Piece, file_at, imported_as

_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple({*(os.path.join(_PATHS[k], "") for k in ("stdlib", "platstdlib", "purelib", "platlib"))})
_LIBRARY: list[tuple[types.ModuleType, str]] = [
    *((jnp, "jnp"), (lax, "lax"), (jax.nn, "nn"), (jax, "jax"), (np, "np")),
    *((jax.random, "random"), (jax.scipy.special, "special")),
]

# Names of modules that a written program imports if it uses them.
IMPORTED = {"functools": functools, "jax": jax, "jnp": jnp, "lax": lax, "np": np}


def public_name(value: Any) -> tuple[str, types.ModuleType, str] | None:
    """``('jnp', jax.numpy, 'sin')`` for a function or class of a library, which is imported and not copied."""
    name = getattr(value, "__name__", "")
    if not isinstance(name, str) or not name or not callable(value):
        return None
    root = str(getattr(value, "__module__", "") or "").split(".")[0]
    own = sys.modules.get(root if root not in ("__main__", "xmap_compat", "builtins") else "")
    homes = [*_LIBRARY, *([(own, root)] if is_library(file_of(own)) else [])]
    return next(((alias, home, name) for home, alias in homes if home and vars(home).get(name) is value), None)


def file_of(module: Any) -> str:
    return getattr(module, "__file__", None) or ""


def is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES)


def refuse_library(file: str, name: str) -> None:
    if is_library(file):
        raise NotWritable(f"{name or 'a function'} of a library, which has no public name")


def is_jitted(value: Any, kind: type = type(jax.jit(len))) -> bool:
    return isinstance(value, kind)


def is_xmapped(value: Any) -> bool:
    return is_jitted(value) and callable(getattr(value, "plan", None))


def is_ours(value: Any) -> bool:
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", "")
    return str(module).split(".")[0] == "xmap_compat"


def same(known: Any, value: Any) -> bool:
    plain = (bool, int, float, complex, str, bytes)
    return known is value or (type(known) is type(value) and isinstance(value, plain) and known == value)


def spells(node: ast.expr, value: Any, piece: Piece) -> bool:
    """Whether an expression of the file describes a value completely: plain data, or arrays made from plain data."""
    modules = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    if not all(isinstance(piece.globals.get(name), types.ModuleType) for name in modules):
        return False
    makers = [ast.unparse(n.func).split(".")[0] for n in ast.walk(node) if isinstance(n, ast.Call)]
    plain = all(isinstance(n, _PLAIN_NODES) for n in ast.walk(node))
    if not plain or any(piece.globals.get(name) not in (np, jnp) for name in makers):
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


# ------------------------------------------------------------------------------- imports


def import_statement(free: str, value: Any, piece: Piece, rewritten: Set[str]) -> str | None:
    """The statement that imports a value in the same way as the user's file does.

    Args:
      rewritten: files with collectives.
    """
    homes = [imported_as(free, piece.tree)]
    if free not in piece.closure and not isinstance(value, type):
        homes.append(f"{piece.globals.get('__name__', '__main__')}.{free}")
    for module, _, name in (home.rpartition(".") for home in homes):
        if (new := old_names.new_name(module, name)) is not None:
            module, _, name = new.rpartition(".")
        if may_import(module, name, value, rewritten):
            return f"from {module} import {name}" + (f" as {free}" if name != free else "")
    return None


def may_import(module: str, name: str, value: Any, rewritten: Set[str]) -> bool:
    """Whether a value may stay in its module, which must need no xmap, hold no collectives, and still define it."""
    there = sys.modules.get(module)
    if there is None or needs_us(module, {}):
        return False
    return getattr(there, name, None) is value and is_as_imported(there, name, rewritten)


def needs_us(module: str, seen: dict[str, bool]) -> bool:
    """Whether importing a user module imports this package, or a name that this package restores."""
    if module not in seen:
        there, file = sys.modules.get(module), file_of(sys.modules.get(module))
        known = file or module in sys.builtin_module_names or hasattr(there, "__path__")
        seen[module] = not known or module.split(".")[0] in ("xmap_compat", "__main__")
        if not seen[module] and file and not is_library(file):
            tree = file_at(file, module).tree
            names = Bindings(tree).modules
            gone = any(n.startswith("jax.experimental.maps") for n in names)
            relative = any(isinstance(n, ast.ImportFrom) and n.level for n in ast.walk(tree))
            packages = {n.rpartition(".")[0] for n in names}
            seen[module] = gone or relative or any(n in sys.modules and needs_us(n, seen) for n in names | packages)
    return seen[module]


def is_as_imported(
    module: types.ModuleType, name: str, rewritten: Set[str], seen: Set[tuple[str, str]] = frozenset()
) -> bool:
    """Whether a new process that imports a module finds the present value by a name, and all that the value reads.

    None of these values may be in a file that is rewritten.

    A program may change modules while it runs: ``config.scale = 3``.  Libraries are not checked for that.
    """
    file, value = file_of(module), vars(module).get(name)
    if is_library(file) or not file or (file, name) in seen:
        return True
    if file in rewritten:
        return False
    if isinstance(value, types.ModuleType):
        return is_library(file_of(value)) or not file_of(value)
    piece = dataclasses.replace(file_at(file, name), globals=vars(module))
    statements: list[Any] = [s for s in piece.tree.body if name in own_names([s])]
    if len(statements) != 1:
        return False
    statement, seen = statements[0], {*seen, (file, name)}
    if isinstance(statement, ast.ImportFrom):
        home = sys.modules.get(statement.module or "")
        own = next(a.name for a in statement.names if (a.asname or a.name) == name)
        return home is not None and vars(home).get(own) is value and is_as_imported(home, own, rewritten, seen)
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return statement.value is not None and spells(statement.value, value, piece)
    read = [n for n in piece.at(statement).free.values() if n in vars(module)]
    return _is_defined_by(piece.at(statement), value) and all(is_as_imported(module, n, rewritten, seen) for n in read)


def _is_defined_by(piece: Piece, value: Any) -> bool:
    if isinstance(value, type):
        plain = [s for s in piece.node.body if isinstance(s, (ast.Assign, ast.AnnAssign)) and s.value is not None]
        held = [(s.value, vars(value).get(name)) for s in plain for name in own_names([s])]
        return all(not isinstance(n, ast.Constant) or same(n.value, v) for n, v in held)
    code = getattr(inspect.unwrap(value), "__code__", None)
    return code is not None and (code.co_filename, code.co_firstlineno) == (piece.file, first_line(piece.node))


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


def imports_for(lines: Iterable[str]) -> set[str]:
    """The imports of modules that the lines of a written program read."""
    read = {n.id for n in ast.walk(ast.parse("\n".join(lines))) if isinstance(n, ast.Name)}
    return {module_import(name, IMPORTED[name]) for name in read & IMPORTED.keys()}
