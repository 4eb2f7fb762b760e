"""What a file of the program calls: xmap, collectives, layers that reduce over an axis."""

from __future__ import annotations

import ast
import os
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from xmap_compat.tools.leave.helper_text import FUNCTIONS, METHODS, REDUCTIONS
from xmap_compat.tools.leave.xmap_calls import Span, span_of
from xmap_compat.tools.source.bindings import Names, text_of
from xmap_compat.tools.source.layout import parsed, replacing

HOMES = ("jax.experimental.maps", "xmap_compat", "jax.interpreters.pxla")
# What the program leaves: this package, and modules that JAX removed.
OLD_PREFIXES = tuple(f"{home}." for home in HOMES)
XMAPS = tuple(f"{home}.xmap" for home in (*HOMES, "xmap_compat.api"))
# By which libraries call the axis of a layer that reduces over it.
_LAYERS = ("axis_name", "cross_replica_axis", "pmap_axis_name", "bn_axis_name")
_OVER_AXES = ("jax.lax.", "jax.numpy.", "jax.nn.", "jax.scipy.")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Source:
    """A file, and the places in it that change.

    Attributes:
      functions: names and attributes, and the helper's function for each.
      methods: calls of methods of arrays that become the helper's functions.
      layers: arguments that name an axis to a layer of a library.
    """

    def __init__(
        self,
        path: str,
        data: bytes,
        axes: Collection[str],
        traced: Collection[Span],
        modules: Collection[str],
    ):
        """
        Args:
          axes: the names of axes in the program; if there are none, each name may be one.
          traced: the calls in which collectives were traced.
          modules: the modules and packages of the program.
        """
        program = parsed(data, path)
        self.path = path
        self.lines = program.text.split("\n")
        self.tree = program.tree
        self.names = Names(program.tree)
        self._axes = axes
        self._traced = traced
        self._modules = modules
        self._calls: dict[Span, ast.Call] = {}
        self.functions: dict[ast.AST, str] = {}
        for node in self.names.nodes:
            name = ""
            if isinstance(node, ast.Call):
                self._calls[span_of(node)] = node
            if isinstance(getattr(node, "ctx", None), ast.Load):
                name = self.names.imported_name(node)
            if name in FUNCTIONS and self._may_be_over_axis(name, node):
                self.functions[node] = FUNCTIONS[name]
        self.methods = [*filter(self._is_method, self._calls.values())]
        self.layers: list[ast.expr] = []
        for call in self._calls.values():
            self.layers += self._layer_axes(call)

    # ---- what changes

    def _may_be_over_axis(self, name: str, function: ast.AST) -> bool:
        """Whether the use of a function may be over an axis of the program: it names one, or it is
        a collective that names no other.
        """
        parent = self.names.parents[function]
        if name in REDUCTIONS:
            if not isinstance(parent, ast.Call) or parent.func is not function:
                return False
            return self._is_over(parent, parent.args[1:2])
        if not isinstance(parent, ast.Call):
            return True
        named = texts_in(*parent.args, *(keyword.value for keyword in parent.keywords))
        return not named or self._has_axis(named)

    def _has_axis(self, names: Iterable[str]) -> bool:
        return any(not self._axes or name in self._axes for name in names)

    def _is_over(self, call: ast.Call, given: list[ast.expr]) -> bool:
        """Whether a call names an axis by a literal, or was traced over one."""
        for keyword in call.keywords:
            if keyword.arg in ("axis", "axis_name"):
                given = [*given, keyword.value]
        return self._has_axis(texts_in(*given)) or (bool(given) and span_of(call) in self._traced)

    def _is_method(self, call: ast.Call) -> bool:
        function = call.func
        if not isinstance(function, ast.Attribute) or function.attr not in METHODS:
            return False
        return not self.names.imported_name(function) and self._is_over(call, call.args[:1])

    def _layer_axes(self, call: ast.Call) -> Iterator[ast.expr]:
        """The axes of a layer of a library that is made in a function."""
        name = self.library(call.func)
        if not _is_class(name) or name.startswith("jax.") or not self._is_in_function(call):
            return
        for keyword in call.keywords:
            named = texts_in(keyword.value)
            is_variable = isinstance(keyword.value, (ast.Name, ast.Attribute, ast.Subscript))
            if keyword.arg in _LAYERS and (is_variable or self._has_axis(named)):
                yield keyword.value

    def _is_in_function(self, node: ast.AST | None) -> bool:
        while node is not None and not isinstance(node, _FUNCTIONS):
            node = self.names.parents.get(node)
        return node is not None

    # ---- what stands there

    def library(self, node: ast.AST) -> str:
        """The dotted name of a function of a library; empty for the program's functions, and for
        variables.
        """
        name = self.names.imported_name(node)
        if not isinstance(node, (ast.Name, ast.Attribute)):
            name = self.names.dotted(node)
        is_of_program = name.startswith(".") or name.partition(".")[0] in self._modules
        return "" if is_of_program else name

    def xmaps(self) -> dict[ast.expr, Span]:
        """Each use of xmap in a call, and the place of the outermost call that starts there."""
        found: dict[ast.expr, Span] = {}
        for span, call in self._calls.items():
            callee = self._xmap_in(call)
            if callee is not None:
                found[callee] = max(span, found.get(callee, span))
        return found

    def xmap_at(self, span: Span) -> ast.expr | None:
        """The use of xmap in a call at a place."""
        call = self._calls.get(span)
        return self._xmap_in(call) if call else None

    def _xmap_in(self, call: ast.Call) -> ast.expr | None:
        """The ``xmap`` that is called, also in ``partial(xmap, ...)(function)``."""
        called = call.func
        if isinstance(called, ast.Call):
            return self._xmap_in(called)
        if call.args and self.names.imported_name(called) == "functools.partial":
            called = call.args[0]
        return called if self.names.imported_name(called) in XMAPS else None

    def not_named(self, span: Span) -> ast.Call | None:
        """The call at a place, if it is of a library and the edit does not rename it."""
        call = self._calls.get(span)
        if call is None or call in self.methods or not self.library(call.func):
            return None
        if any(node in self.functions for node in ast.walk(call.func)):
            return None
        return call

    def missed(self, names: frozenset[Any]) -> ast.Call | None:
        """A call of a library that names one of these axes, and stays."""
        for span in self._calls:
            call = self.not_named(span)
            if call is not None and names.intersection(self._named_by(call)):
                return call
        return None

    def _named_by(self, call: ast.Call) -> list[str]:
        """The literal names in what may be an axis of a call of a library."""
        library = self.library(call.func)
        given = []
        for keyword in call.keywords:
            if "axis" in (keyword.arg or "") and keyword.value not in self.layers:
                given.append(keyword.value)
        if library.startswith(_OVER_AXES) or (
            _is_class(library) and not library.startswith("jax.")
        ):
            given += call.args
        elif library.startswith("jax.") or library == "functools.partial":
            return []
        return texts_in(*given)

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


def texts_in(*nodes: ast.AST) -> list[str]:
    """The literal strings of axis arguments, also in tuples."""
    found = []
    for node in nodes:
        for part in getattr(node, "elts", [node]):
            if text_of(part):
                found.append(text_of(part))
    return found


def _is_class(name: str) -> bool:
    return name.rpartition(".")[2][:1].isupper()
