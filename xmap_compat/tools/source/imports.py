"""What stays in the user's modules and is imported from them: what needs no xmap, and is there in a new process too."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import types
from collections.abc import Set
from typing import Any

from xmap_compat.tools.source import old_names
from xmap_compat.tools.source.kinds import is_library, same, spells
from xmap_compat.tools.source.text import NotWritable
from xmap_compat.tools.source.user_code import Piece, bound_by, file_at


def import_statement(free: str, value: Any, piece: Piece, rewritten: Set[str]) -> str | None:
    """The statement that imports a value from where the user's file has it.

    Args:
      rewritten: files with collectives.
    """
    homes = [piece.import_of(free)]
    if free not in piece.closure and not isinstance(value, type):
        homes.append((str(piece.globals.get("__name__", "__main__")), free))
    for module, name in filter(None, homes):
        if (new := old_names.new_name(module, name)) is not None:
            module, _, name = new.rpartition(".")
        if may_import(module, name, value, rewritten):
            return f"from {module} import {name}" + (f" as {free}" if name != free else "")
    return None


def may_import(module: str, name: str, value: Any, rewritten: Set[str]) -> bool:
    """Whether a value may stay in its module: one that needs no xmap, has none of its collectives, and gives it."""
    there = sys.modules.get(module)
    if there is None or needs_us(module, {}):
        return False
    file = getattr(there, "__file__", None) or ""
    here = vars(there).get(name) is value and file not in rewritten
    return is_library(file) or (here and is_as_imported(there, name))


def needs_us(module: str, seen: dict[str, bool]) -> bool:
    """Whether importing a module of the user's imports this package, or what it brings back."""
    if module in seen:
        return seen[module]
    there = sys.modules.get(module)
    file = getattr(there, "__file__", None) or ""
    known = file or module in sys.builtin_module_names or hasattr(there, "__path__")
    seen[module] = not known or module.split(".")[0] in ("xmap_compat", "__main__")
    if seen[module] or not file or is_library(file):
        return seen[module]
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
        return True
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
        there = dataclasses.replace(found, globals=vars(module))
        return statement.value is not None and spells(statement.value, value, there)
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
    code = getattr(inspect.unwrap(value), "__code__", None)
    first = min([statement.lineno, *(d.lineno for d in statement.decorator_list)])
    return code is not None and (code.co_filename, code.co_firstlineno) == (file, first)


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
