"""What a file of the program calls: xmap, collectives, layers that reduce over an axis."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

from xmap_compat.tools.leave.helper_text import FUNCTIONS, METHODS, REDUCTIONS
from xmap_compat.tools.source.bindings import Names, text_of
from xmap_compat.tools.source.layout import program_of, replacing

HOMES = ("jax.experimental.maps", "xmap_compat", "jax.interpreters.pxla")
GONE = tuple(f"{home}." for home in HOMES)
XMAPS = tuple(f"{home}.xmap" for home in (*HOMES, "xmap_compat.api"))
# By which libraries call the axis of a layer that reduces over it.
_LAYERS = ("axis_name", "cross_replica_axis", "pmap_axis_name", "bn_axis_name")
_OVER_AXES = ("jax.lax.", "jax.numpy.", "jax.nn.", "jax.scipy.")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Span = tuple[int, int, int, int]


def span_of(node: Any) -> Span:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


class Source:
    """A file, and the places in it that change.

    Attributes:
      functions: names and attributes, and the helper's function for each.
      methods: calls of methods of arrays that become the helper's functions.
      layers: arguments that name an axis to a layer of a library.
      calls: by their place; the innermost last.
    """

    def __init__(
        self,
        path: str,
        data: bytes,
        is_axis: Callable[[str], bool],
        traced: Collection[Span],
        own: Collection[str],
    ):
        program = program_of(data, path)
        self.path, self.data, self.lines = path, data, program.text.split("\n")
        self.tree = program.tree
        self.names, self._is_axis, self._traced, self._own = (
            Names(program.tree),
            is_axis,
            traced,
            own,
        )
        self.calls: dict[Span, ast.Call] = {}
        for node in self.names.nodes:
            if isinstance(node, ast.Call):
                self.calls[span_of(node)] = node
        self.functions = self._functions()
        self.methods = [call for call in self.calls.values() if self._is_method(call)]
        self.layers = [value for call in self.calls.values() for value in self._layer_axes(call)]

    # ---- what changes

    def _functions(self) -> dict[ast.AST, str]:
        found: dict[ast.AST, str] = {}
        others: dict[ast.AST, str] = {}
        for node in self.names.nodes:
            path = self.names.of(node) if isinstance(getattr(node, "ctx", None), ast.Load) else ""
            if path in REDUCTIONS:
                if self._reduces(self.names.parents[node], node):
                    found[node] = FUNCTIONS[path]
            elif path in FUNCTIONS:
                of = found if self._may_name(self.names.parents[node]) else others
                of[node] = FUNCTIONS[path]
        imported = {node.id for node in found if isinstance(node, ast.Name)}
        for node, function in others.items():  # one import serves all uses
            if isinstance(node, ast.Name) and node.id in imported:
                found[node] = function
        return found

    def _may_name(self, parent: ast.AST) -> bool:
        """Whether a call may be over an axis of an xmap; literal names of others are not."""
        if not isinstance(parent, ast.Call):
            return True
        values = [*parent.args, *(keyword.value for keyword in parent.keywords)]
        named = [name for value in values for name in texts_in(value)]
        return not named or any(map(self._is_axis, named))

    def _reduces(self, call: ast.AST, function: ast.AST) -> bool:
        """Whether the call of a function of whole arrays is over a named axis: by a literal, or as
        the recorder has seen.
        """
        if not isinstance(call, ast.Call) or call.func is not function:
            return False
        return self._is_over(call, call.args[1:2])

    def _is_method(self, call: ast.Call) -> bool:
        function = call.func
        if not isinstance(function, ast.Attribute) or function.attr not in METHODS:
            return False
        return not self.names.of(function) and self._is_over(call, call.args[:1])

    def _is_over(self, call: ast.Call, given: list[ast.expr]) -> bool:
        given = given + [k.value for k in call.keywords if k.arg in ("axis", "axis_name")]
        named = [name for value in given for name in texts_in(value)]
        return any(map(self._is_axis, named)) or (bool(given) and span_of(call) in self._traced)

    def _layer_axes(self, call: ast.Call) -> Iterator[ast.expr]:
        """The axes of a layer of a library that is made in a function."""
        name = self.library(call.func)
        is_class = name.rpartition(".")[2][:1].isupper()
        if is_class and not name.startswith("jax.") and self._is_in_function(call):
            for keyword in call.keywords:
                named = texts_in(keyword.value)
                is_axis = any(map(self._is_axis, named)) if named else _is_variable(keyword.value)
                if keyword.arg in _LAYERS and is_axis:
                    yield keyword.value

    def _is_in_function(self, node: ast.AST | None) -> bool:
        while node is not None and not isinstance(node, _FUNCTIONS):
            node = self.names.parents.get(node)
        return node is not None

    # ---- what stands there

    def library(self, node: ast.AST) -> str:
        """The dotted name of a function of a library; empty for the program's own, and for
        variables.
        """
        name = self.names.of(node)
        if not isinstance(node, (ast.Name, ast.Attribute)):
            name = self.names.dotted(node)
        root = name.lstrip(".").partition(".")[0]
        return "" if name.startswith(".") or root in self._own else name

    def xmap_at(self, call: ast.Call) -> ast.expr | None:
        """The ``xmap`` that is called, also in ``partial(xmap, ...)``."""
        if isinstance(call.func, ast.Call):
            return self.xmap_at(call.func)
        called = call.func
        if call.args and self.names.of(called) == "functools.partial":
            called = call.args[0]
        return called if self.names.of(called) in XMAPS else None

    def xmaps(self, line: int, column: int) -> list[ast.expr]:
        """The different uses of xmap in calls that start at a place."""
        found = []
        for call in self.calls.values():
            if (call.lineno, call.col_offset) == (line, column):
                callee = self.xmap_at(call)
                if callee is not None and callee not in found:
                    found.append(callee)
        return found

    def is_named(self, call: ast.Call) -> bool:
        """Whether the edit names what a call calls, or the name is a variable, which it may have
        named where that is made.
        """
        inside = [*ast.walk(call.func)]
        if call in self.methods or any(node in self.functions for node in inside):
            return True
        return not self.library(call.func)

    def missed(self, names: Collection[str]) -> ast.Call | None:
        """A call of a library that names one of these axes, and stays."""
        for call in self.calls.values():
            library = self.library(call.func)
            is_checked = library and library != "functools.partial" and not self.is_named(call)
            if is_checked and self._names_one(call, library, names):
                return call
        return None

    def _names_one(self, call: ast.Call, library: str, names: Collection[str]) -> bool:
        keywords = [k.value for k in call.keywords if "axis" in (k.arg or "")]
        given = [value for value in keywords if value not in self.layers]
        is_class = library.rpartition(".")[2][:1].isupper()
        if library.startswith("jax."):
            given = [*given, *call.args] if library.startswith(_OVER_AXES) else []
        elif is_class:
            given = [*given, *call.args]
        return any(name in names for value in given for name in texts_in(value))

    def between(self, start: tuple[int, int], end: tuple[int, int]) -> str:
        """The text of a part of the file."""
        lines = [line.encode() for line in self.lines[start[0] - 1 : end[0]]]
        lines[-1] = lines[-1][: end[1]]
        lines[0] = lines[0][start[1] :]
        return b"\n".join(lines).decode()

    def shown(self, node: Any) -> str:
        """The first line of a part of the file."""
        return self.between(*replacing(node, "")[:2]).split("\n")[0]

    def where(self, node: Any) -> str:
        return f"{os.path.basename(self.path)}:{node.lineno}"


def texts_in(node: ast.AST) -> list[str]:
    """The literal strings of an axis argument."""
    parts = node.elts if isinstance(node, (ast.Tuple, ast.List)) else [node]
    return [text for text in map(text_of, parts) if text]


def _is_variable(node: ast.AST) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
