"""Places in the user's files: the calls of xmap, and the functions that a call reaches."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import dis
import functools
import gc
import inspect
import os
import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

import xmap_compat
from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.construction import Construction
from xmap_compat.tools.leave.old_check.names import first_line
from xmap_compat.tools.source.imports import file_of, is_library, is_ours, is_xmapped
from xmap_compat.tools.source.nested import is_xmap
from xmap_compat.tools.source.text import NotWritable
from xmap_compat.tools.source.user_code import LOOKUPS, Piece, codes_in, file_at, source_of


def is_under(file: str, root: str) -> bool:
    """Whether a file belongs to the program whose files are in a folder, as this package never does."""
    path, folder = _real(os.getcwd(), file), os.path.join(_real(os.getcwd(), root), "")
    return path.startswith(folder) and not (path.startswith(_OWN) or is_library(path)) and os.path.exists(path)


class Site(NamedTuple):
    """A call of xmap in a file.

    Attributes:
      given: its arguments, by name; without ``fun`` it is a function of the function to map, as a decorator is.
    """

    piece: Piece
    call: ast.Call
    given: Mapping[str, ast.expr]

    @property
    def bounds(self) -> tuple[int, int]:
        return self.piece.bounds(self.call)

    @property
    def decorates(self) -> bool:
        nodes = ast.walk(self.piece.node)
        return "fun" not in self.given and any(self.call in getattr(n, "decorator_list", ()) for n in nodes)


def site_of(c: Construction) -> Site:
    """The call of xmap in a line."""
    whole, found = dataclasses.replace(file_at(c.file, "a call of xmap"), globals=c.globals), []
    for statement in whole.tree.body:
        if first_line(statement) <= c.line <= (statement.end_lineno or 0):
            piece = whole.at(statement)
            for node in (n for n in ast.walk(statement) if isinstance(n, ast.Call)):
                starts = node.lineno == c.line and c.column in (None, node.col_offset)
                if starts and (arguments := _of_xmap(piece, node)) is not None:
                    given = dict(zip(("fun", "in_axes", "out_axes"), arguments))
                    found.append(Site(piece, node, given | {str(k.arg): k.value for k in node.keywords}))
    if len(found) != 1:
        raise NotWritable(messages.SEVERAL if found else messages.NO_XMAP_HERE)
    if any(isinstance(a, ast.Starred) for a in found[0].call.args) or "None" in found[0].given:
        raise NotWritable(messages.UNPACKED)
    return found[0]


def check_dropped(site: Site) -> None:
    """Refuse arguments of a call of xmap that do something beside having a value: the edited program lacks them."""
    dropped = [value for name, value in site.given.items() if name not in ("fun", "donate_argnums")]
    if does := [ast.unparse(n) for value in dropped for n in ast.walk(value) if _may_do_more(site.piece, n)]:
        raise NotWritable(messages.DOES_MORE.format(does[0]))


def _may_do_more(piece: Piece, node: ast.AST) -> bool:
    """Whether an expression may do something beside having a value, which would be lost with it."""
    if not isinstance(node, ast.Call):
        return isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom))
    function = piece.meaning(node.func) or getattr(builtins, ast.unparse(node.func), None)
    of_jax = (getattr(function, "__module__", None) or "").partition(".")[0] in ("jax", "xmap_compat")
    is_reading = isinstance(node.func, ast.Attribute) and node.func.attr in _READING
    return not (isinstance(function, type) or of_jax or is_reading or any(function is other for other in _PURE))


def _of_xmap(piece: Piece, node: ast.Call) -> list[ast.expr] | None:
    """The positional arguments of a call of xmap, or of ``functools.partial(xmap, ...)``; None for other calls."""
    callee = piece.meaning(node.func)
    if callee is functools.partial and node.args and is_xmap(piece.meaning(node.args[0])):
        return node.args[1:]
    return node.args if is_xmap(callee) else None


# --------------------------------------------------------------------- what a call reaches


class Reached:
    """The user's functions that some functions may call, found by the values that their codes read.

    Attributes:
      functions: by their code; those with the same code together.
      rules: the functions with derivative rules.
      nested: the xmapped functions.
    """

    def __init__(self, functions: Iterable[Any], root: str):
        self.functions: dict[types.CodeType, list[types.FunctionType]] = {}
        self.rules: list[Any] = []
        self.nested: list[Any] = []
        self._root = root
        self._seen: dict[int, Any] = {}
        self._names: set[str] = {"__call__", "__init__", "__post_init__", "__new__", "setup"}
        self._owners: list[Any] = []  # modules and classes, of which only what is named is reached
        pending, count = [*functions], -1
        while len(self._seen) + len(self._names) != count:
            count = len(self._seen) + len(self._names)
            while pending:
                pending.extend(self._visited(pending.pop()))
            pending = [held for owner in self._owners for name, held in vars(owner).items() if name in self._names]

    def _visited(self, value: Any) -> Iterable[Any]:
        """What can be reached from a value in one step."""
        if id(value) in self._seen or isinstance(value, _DATA) or (is_ours(value) and not is_xmapped(value)):
            return ()
        self._seen[id(value)] = value
        if is_xmapped(value):
            self.nested.append(value)
            return (value.plan.declared.fun,)
        if isinstance(value, (types.ModuleType, type)):
            if not is_under(file_of(inspect.getmodule(value)), self._root):
                return ()
            self._owners.append(value)
            return value.__mro__[1:-1] if isinstance(value, type) else ()
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, (jax.custom_vjp, jax.custom_jvp)):
            self.rules.append(value)
        held = gc.get_referents(value)
        return held if len(held) < 2000 else ()

    def _of_function(self, value: types.FunctionType) -> Iterable[Any]:
        held = [x for x in gc.get_referents(value) if x is not value.__globals__]
        if is_under(value.__code__.co_filename, self._root):
            self.functions.setdefault(value.__code__, []).append(value)
            codes = list(codes_in(value.__code__))
            self._names |= {name for code in codes for name in code.co_names}
            read = {i.argval for code in codes for i in dis.get_instructions(code) if i.opname in LOOKUPS}
            held += [value.__globals__[name] for name in read if name in value.__globals__]
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

    def attached(self) -> list[Piece]:
        """The statements of modules that give functions their backward rules."""
        calls = tuple(f"{rule.__name__}.defvjp(" for rule in self.rules if isinstance(rule, jax.custom_vjp))
        files = {piece.file: dataclasses.replace(piece, closure={}) for piece in self.pieces()}.values()
        statements = ((f, n) for f in files for n in f.tree.body if isinstance(n, ast.Expr))
        return [file.at(node) for file, node in statements if ast.unparse(node).startswith(calls)]

    def parts(self) -> list[tuple[str, float, float]]:
        """The parts of files in which these functions and their rules are."""
        try:
            return [(piece.file, *piece.bounds(piece.node)) for piece in (*self.pieces(), *self.attached())]
        except NotWritable:  # text that cannot be read: perhaps all of it
            return [(code.co_filename, 0, float("inf")) for code in self.functions]


def _is_name(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, (tuple, list)) and any(map(_is_name, value)))


_OWN = os.path.join(os.path.dirname(os.path.realpath(xmap_compat.__file__)), "")
_PURE = (getattr, len, max, min, sorted, sum)
_READING = ("copy", "format", "get", "index", "items", "join", "keys", "lower", "split", "strip", "upper", "values")
_real = functools.cache(lambda here, path: os.path.realpath(os.path.join(here, path)))  # of every module, often
_DATA = (str, bytes, int, float, complex, type(None), jax.Array, types.CodeType, types.BuiltinFunctionType)
