"""The user's files: their text, their calls of xmap, and the functions that a call reaches."""

from __future__ import annotations

import ast
import bisect
import dataclasses
import functools
import inspect
import io
import os
import sys
import tokenize
import types
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from xmap_compat.tools.source.imports import file_of, is_library, is_ours, is_xmapped
from xmap_compat.tools.source.nested import is_xmap
from xmap_compat.tools.source.text import NotWritable
from xmap_compat.tools.source.user_code import Piece, file_at, first_line, source_of


def read(file: str) -> str:
    """The text of a file in the encoding that it declares, with its own line ends."""
    with open(file, "rb") as opened:
        data = opened.read()
    return data.decode(tokenize.detect_encoding(io.BytesIO(data).readline)[0])


class File:
    """A file of the user.

    Attributes:
      path: where it is; programs may know it by another name.
      text: its text, with ``\\n`` at the end of lines.
    """

    def __init__(self, path: str):
        self.path = os.path.realpath(path)
        own = read(self.path)
        self.text, self._newline = own.replace("\r\n", "\n"), "\r\n" if "\r\n" in own else "\n"
        self._returns = [k - n for n, k in enumerate(k for k in range(len(own)) if own.startswith("\r\n", k))]

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def edit(self, start: int, end: int, text: str) -> tuple[int, int, str]:
        """An edit of the text as one of the file with its own line ends."""
        first, last = (k + bisect.bisect_left(self._returns, k) for k in (start, end))
        return first, last, text.replace("\n", self._newline)


def is_under(file: str, root: str) -> bool:
    """Whether a file belongs to the program whose files are in a folder."""
    path = os.path.realpath(file)
    return path.startswith(os.path.join(os.path.realpath(root), "")) and not is_library(path) and os.path.exists(path)


def globals_of(file: str, reached: Iterable[types.FunctionType]) -> Mapping[str, Any]:
    """The global variables of a file."""
    made = next((f.__globals__ for f in reached if f.__code__.co_filename == file), None)
    path = os.path.realpath(file)
    modules = (m for m in list(sys.modules.values()) if os.path.realpath(file_of(m) or ".") == path)
    return made if made is not None else vars(next(modules, types.ModuleType("")))


@dataclasses.dataclass(frozen=True)
class Site:
    """A call of xmap in a file.

    Attributes:
      given: its arguments, by name; without ``fun`` it is a function of the function to map, as a decorator.
    """

    piece: Piece
    call: ast.Call
    given: Mapping[str, ast.expr]


def site_of(file: str, line: int, column: int | None, values: Mapping[str, Any]) -> Site:
    """The call of xmap in a line."""
    whole = dataclasses.replace(file_at(file, "a call of xmap"), globals=values)
    found = []
    for statement in whole.tree.body:
        if not (first_line(statement) <= line <= (statement.end_lineno or 0)):
            continue
        piece = whole.at(statement)
        for node in (n for n in ast.walk(statement) if isinstance(n, ast.Call)):
            starts = node.lineno == line and column in (None, node.col_offset)
            if starts and (arguments := _of_xmap(piece, node)) is not None:
                given = dict(zip(("fun", "in_axes", "out_axes"), arguments))
                given.update({str(k.arg): k.value for k in node.keywords})
                found.append(Site(piece, node, given))
    if len(found) != 1:
        many = "several calls of xmap are in this line: put each in a line of its own"
        raise NotWritable(many if found else "no call of xmap is in this line: write `xmap(...)` where it is made")
    if any(isinstance(a, ast.Starred) for a in found[0].call.args) or "None" in found[0].given:
        raise NotWritable("unpacked arguments of xmap: write them out")
    return found[0]


def _of_xmap(piece: Piece, node: ast.Call) -> list[ast.expr] | None:
    """The positional arguments of a call of xmap, or of ``functools.partial(xmap, ...)``; None for other calls."""
    callee = value_of(piece, node.func)
    if is_xmap(callee):
        return node.args
    is_partial = callee is functools.partial and bool(node.args) and is_xmap(value_of(piece, node.args[0]))
    return [ast.Constant(None), *node.args[1:]][1:] if is_partial else None


def value_of(piece: Piece, node: ast.expr) -> Any:
    """What a dotted name means at a place, or None."""
    if isinstance(node, ast.Attribute):
        owner = value_of(piece, node.value)
        return getattr(owner, node.attr, None) if isinstance(owner, types.ModuleType) else None
    if isinstance(node, ast.Name):
        inside = piece.imported_inside(node.id)
        return inside if inside is not None else piece.globals.get(node.id)
    return None


# --------------------------------------------------------------------- what a call reaches


class Reached:
    """The user's functions that a function may call, found by the values that its code reads.

    Attributes:
      functions: by their code; those with the same code together.
      rules: the functions with derivative rules.
      nested: the xmapped functions.
    """

    def __init__(self, function: Any, root: str):
        self.functions: dict[types.CodeType, list[types.FunctionType]] = {}
        self.rules: list[Any] = []
        self.nested: list[Any] = []
        self._root = root
        self._seen: dict[int, Any] = {}
        self._names: set[str] = set()
        self._owners: dict[int, Any] = {}  # modules and classes, of which only what is named is reached
        pending, count = [function], -1
        while len(self._seen) + len(self._names) != count:
            count = len(self._seen) + len(self._names)
            while pending:
                pending.extend(self._visited(pending.pop()))
            for owner in list(self._owners.values()):
                held = vars(owner)
                pending += [held[n] for n in held if n in self._names or (isinstance(owner, type) and n in _IMPLICIT)]

    def _visited(self, value: Any) -> Iterable[Any]:
        """What can be reached from a value in one step."""
        if id(value) in self._seen or isinstance(value, _DATA) or (is_ours(value) and not is_xmapped(value)):
            return ()
        self._seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, (types.ModuleType, type)):
            if is_under(
                file_of(value if isinstance(value, types.ModuleType) else inspect.getmodule(value)), self._root
            ):
                self._owners[id(value)] = value
                return value.__mro__[1:-1] if isinstance(value, type) else ()
            return ()
        if is_xmapped(value):
            self.nested.append(value)
            return (value.plan.declared.fun,)
        if isinstance(value, (tuple, list, set, frozenset, dict)):
            return list(value.values() if isinstance(value, dict) else value) if len(value) < 1000 else ()
        if isinstance(value, (jax.custom_vjp, jax.custom_jvp)):
            self.rules.append(value)
        inner = [getattr(value, name, None) for name in _INNER]
        try:
            return [*inner, type(value), *vars(value).values()]
        except TypeError:
            return [*inner, type(value)]

    def _of_function(self, value: types.FunctionType) -> Iterable[Any]:
        held = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        held += [
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
            getattr(value, "__wrapped__", None),
        ]
        if is_under(value.__code__.co_filename, self._root):
            self.functions.setdefault(value.__code__, []).append(value)
            names = {name for code in _codes(value.__code__) for name in code.co_names}
            self._names |= names
            held += [value.__globals__[name] for name in names if name in value.__globals__]
        return held

    def pieces(self) -> list[Piece]:
        """The text of each function, the innermost ones first."""
        found = []
        for functions in self.functions.values():
            pieces = [source_of(f) for f in functions]
            known = [p.closure for p in pieces]
            # The name of an axis stays where it is a variable: other calls may have another one.
            closure = {n: v for n, v in known[0].items() if not _is_name(v) and all(c.get(n) is v for c in known)}
            found.append(dataclasses.replace(pieces[0], closure=closure, defaults={}))
        return sorted(found, key=lambda p: p.node.end_lineno - p.node.lineno)


def _codes(code: types.CodeType) -> Iterable[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, (tuple, list)) and any(map(_is_name, value)))


_IMPLICIT = ("__call__", "__init__", "__post_init__", "__new__", "setup")
_INNER = ("__func__", "__self__", "__wrapped__", "fget", "func", "args", "keywords", "fun", "fwd", "bwd", "jvp")
_DATA = (str, bytes, int, float, complex, type(None), jax.Array, types.CodeType, types.BuiltinFunctionType)
