"""Places in the user's files: the calls of xmap, and the functions that a call reaches."""

from __future__ import annotations

import ast
import dataclasses
import dis
import functools
import gc
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

import xmap_compat
from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.construction import Change, Construction
from xmap_compat.tools.leave.text import OURS, NotWritable
from xmap_compat.tools.leave.user_code import (
    LOOKUPS,
    Piece,
    codes_in,
    file_at,
    is_ours,
    is_xmap,
    source_of,
)
from xmap_compat.tools.source.bindings import first_line

_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(
    {*(os.path.join(_PATHS[k], "") for k in ("stdlib", "platstdlib", "purelib", "platlib"))}
)


def file_of(module: Any) -> str:
    """The file of a module; some have no string there."""
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) else ""


def _is_xmapped(value: Any) -> bool:
    return isinstance(value, type(jax.jit(len))) and callable(getattr(value, "plan", None))


def is_under(file: str, root: str) -> bool:
    """Whether a file belongs to the program whose files are in a folder, as this package never
    does.
    """
    path, folder = _real(os.getcwd(), file), os.path.join(_real(os.getcwd(), root), "")
    is_library = path.startswith((*_LIBRARIES, _OWN)) or f"{os.sep}site-packages{os.sep}" in path
    return path.startswith(folder) and not is_library and os.path.exists(path)


def xmap_at(c: Construction, undeclared: bool) -> Change:
    """The edit that puts ``mapped`` in the place of ``xmap`` in the call of a construction.

    Args:
      undeclared: whether devices keep elements of results that its out_axes do not declare: the
      edit says so.
    """
    whole, found = dataclasses.replace(file_at(c.file, "a call of xmap"), globals=c.globals), []
    for statement in whole.tree.body:
        if first_line(statement) <= c.line <= (statement.end_lineno or 0):
            piece = dataclasses.replace(whole, node=statement)
            for node in (n for n in ast.walk(statement) if isinstance(n, ast.Call)):
                starts = node.lineno == c.line and c.column in (None, node.col_offset)
                callee = _xmap_of(piece, node) if starts else None
                if callee is not None and callee not in found:
                    found.append(callee)
    if len(found) != 1:
        raise NotWritable(messages.SEVERAL if found else messages.NO_XMAP_HERE)
    start, end = whole.bounds(found[0])
    text = f"{OURS}partial({OURS}mapped, undeclared=True)" if undeclared else f"{OURS}mapped"
    call = next(
        (n for n in ast.walk(whole.tree) if isinstance(n, ast.Call) and n.func is found[0]), None
    )
    if (
        call is not None
        and not call.args
        and call.keywords
        and all(k.arg not in ("fun", None) for k in call.keywords)
    ):
        end = whole.bounds(call.keywords[0])[0]  # a decorator that takes the function later
        text = f"{OURS}partial({OURS}mapped, " + "undeclared=True, " * undeclared
    return Change(c.file, start, end, text)


def unmade(cs: Iterable[Construction], is_own: Callable[[str], bool]) -> list[Construction]:
    """The calls of xmap in files of the program that this run has not executed, such as in branches
    not taken.
    """
    made, found = {(os.path.realpath(c.file), c.line) for c in cs}, list[Construction]()
    known = {
        file_of(m): m for m in list(sys.modules.values()) if file_of(m).endswith((".py", ".ipynb"))
    }
    modules = {os.path.realpath(f): m for f, m in known.items() if is_own(f) and os.path.getsize(f)}
    for file, module in modules.items():
        whole = dataclasses.replace(file_at(file, file), globals=vars(module))
        for statement in whole.tree.body:
            piece = dataclasses.replace(whole, node=statement)
            for node in (n for n in ast.walk(statement) if isinstance(n, ast.Call)):
                if (file, node.lineno) in made or _xmap_of(piece, node) is None:
                    continue
                made.add((file, node.lineno))
                c = Construction(
                    file, node.lineno, node.col_offset, len(made) + 10_000, globals=vars(module)
                )
                c.functions, c.refused = _as_if_made(node, vars(module))
                c.function = getattr(c.functions[0], "__name__", "") if c.functions else ""
                found.append(c)
    return found


def _as_if_made(node: ast.Call, names: dict[str, Any]) -> tuple[list[Any], str]:
    """The function that a call of xmap makes, if it can be made of global variables; why not."""
    try:
        made = eval(compile(ast.Expression(node), "<xmap>", "eval"), dict(names))
        return [made] if _is_xmapped(made) or hasattr(made, "plan") else [], ""
    except Exception:
        given = next(
            (
                value
                for n in node.args[:1]
                if isinstance(n, ast.Name) and (value := names.get(n.id))
            ),
            None,
        )
        stays = types.SimpleNamespace(
            plan=types.SimpleNamespace(declared=types.SimpleNamespace(fun=given, names=()))
        )
        return [stays], messages.NOT_MADE


def _xmap_of(piece: Piece, node: ast.Call) -> ast.expr | None:
    """The ``xmap`` that is called, also in ``functools.partial(xmap, ...)`` and ``partial(xmap,
    ...)(function)``.
    """
    if isinstance(node.func, ast.Call):
        return _xmap_of(piece, node.func)
    callee = piece.meaning(node.func)
    called = node.args[0] if callee is functools.partial and node.args else node.func
    return called if is_xmap(piece.meaning(called)) and piece.is_fixed(called) else None


# --------------------------------------------------------------------- what a call reaches


class Reached:
    """The user's functions that some functions may call, found by the values that their codes read.

    Attributes:
      functions: by their code; those with the same code together.
    """

    def __init__(self, functions: Iterable[Any], is_own: Callable[[str], bool]):
        self.functions: dict[types.CodeType, list[types.FunctionType]] = {}
        self._is_own = is_own
        self._seen: dict[int, Any] = {}
        self._names: set[str] = {"__call__", "__init__", "__post_init__", "__new__", "setup"}
        self._owners: list[Any] = []  # modules and classes, of which only what is named is reached
        pending, count = [*functions], -1
        while len(self._seen) + len(self._names) != count:
            count = len(self._seen) + len(self._names)
            while pending:
                pending.extend(self._visited(pending.pop()))
            pending = [
                held
                for owner in self._owners
                for name, held in vars(owner).items()
                if name in self._names
            ]

    @property
    def names(self) -> set[str]:
        return {code.co_name for code in self.functions} | {
            owner.__name__ for owner in self._owners
        }

    def _visited(self, value: Any) -> Iterable[Any]:
        """What can be reached from a value in one step."""
        if (
            id(value) in self._seen
            or isinstance(value, _DATA)
            or (is_ours(value) and not _is_xmapped(value))
        ):
            return ()
        self._seen[id(value)] = value
        if _is_xmapped(value):
            return (value.plan.declared.fun,)
        if isinstance(value, (types.ModuleType, type)):
            if not self._is_own(file_of(inspect.getmodule(value))):
                return ()
            self._owners.append(value)
            return value.__mro__[1:-1] if isinstance(value, type) else ()
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        held = gc.get_referents(value)
        return held if len(held) < 2000 else ()

    def _of_function(self, value: types.FunctionType) -> Iterable[Any]:
        held = [x for x in gc.get_referents(value) if x is not value.__globals__]
        if self._is_own(value.__code__.co_filename):
            self.functions.setdefault(value.__code__, []).append(value)
            codes = list(codes_in(value.__code__))
            self._names |= {name for code in codes for name in code.co_names}
            read = {
                i.argval
                for code in codes
                for i in dis.get_instructions(code)
                if i.opname in LOOKUPS
            }
            held += [value.__globals__[name] for name in read if name in value.__globals__]
        return held

    @staticmethod
    def piece(functions: Sequence[Any]) -> Piece:
        """The text of functions with one code."""
        pieces = [source_of(f) for f in functions]
        known = [p.closure for p in pieces]
        # The name of an axis stays where it is a variable: other calls may have another one.
        closure = {
            n: v
            for n, v in known[0].items()
            if not _is_name(v) and all(c.get(n) is v for c in known)
        }
        return dataclasses.replace(pieces[0], closure=closure)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, (tuple, list)) and any(map(_is_name, value))
    )


_OWN = os.path.join(os.path.dirname(os.path.realpath(xmap_compat.__file__)), "")
_real = functools.cache(
    lambda here, path: os.path.realpath(os.path.join(here, path))
)  # of every module, often
_DATA = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    jax.Array,
    types.CodeType,
    types.BuiltinFunctionType,
)
