"""What a file of the program calls: xmap, collectives, layers that reduce over an axis."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from xmap_compat.tools.leave.helper_text import FUNCTIONS, REDUCTIONS
from xmap_compat.tools.leave.xmap_calls import Span, span_of
from xmap_compat.tools.source.bindings import Names
from xmap_compat.tools.source.layout import parsed

HOMES = ("jax.experimental.maps", "xmap_compat", "jax.interpreters.pxla")
# What the program leaves: this package, and modules that JAX removed.
OLD_PREFIXES = tuple(f"{home}." for home in HOMES)
XMAPS = tuple(f"{home}.xmap" for home in (*HOMES, "xmap_compat.api"))
# By which libraries call the axis of a layer that reduces over it.
_LAYERS = ("axis_name", "cross_replica_axis", "pmap_axis_name", "bn_axis_name")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Source:
    """A file, and the places in it that change.

    Attributes:
      xmaps: the use of xmap in each call that makes a function with it.
      functions: names and attributes, and the helper's function for each.
      layers: arguments that name an axis to a layer of a library.
      unedited: axes that a library, or a function without a name, is given elsewhere: their lines.
    """

    def __init__(self, path: str, data: bytes, axes: Collection[str], modules: Collection[str]):
        """
        Args:
          axes: the names of axes in the program; if there are none, each name may be one.
          modules: the modules and packages of the program.
        """
        program = parsed(data, path)
        self.lines = program.text.split("\n")
        self.names = Names(program.tree)
        self._axes = axes
        self._modules = modules
        self.xmaps: dict[Span, ast.expr] = {}
        self.functions: dict[ast.AST, str] = {}
        self.layers: list[ast.expr] = []
        self.unedited: dict[str, int] = {}
        for node in self.names.nodes:
            name = ""
            if isinstance(node, ast.Call):
                callee = self._xmap_in(node)
                if callee is not None:
                    self.xmaps[span_of(node)] = callee
                self.layers += self._layer_axes(node)
                if not isinstance(node.func, (ast.Name, ast.Attribute)):
                    self.unedited |= dict.fromkeys(self._named_by(*node.args), node.lineno)
            elif isinstance(getattr(node, "ctx", None), ast.Load):
                name = self.names.imported_name(node)
            if name in FUNCTIONS and self._may_be_over_axis(name, node):
                self.functions[node] = FUNCTIONS[name]

    def _xmap_in(self, call: ast.Call) -> ast.expr | None:
        """The ``xmap`` that is called, also in ``partial(xmap, ...)(function)``."""
        called = call.func
        if isinstance(called, ast.Call):
            return self._xmap_in(called)
        if call.args and self.names.imported_name(called) == "functools.partial":
            called = call.args[0]
        return called if self.names.imported_name(called) in XMAPS else None

    def _may_be_over_axis(self, name: str, function: ast.AST) -> bool:
        """Whether the use of a function may be over an axis of the program: it names one, or it is
        a collective that names no other.
        """
        call = self.names.parents[function]
        if not isinstance(call, ast.Call):
            return name not in REDUCTIONS
        given = [*call.args]
        for keyword in call.keywords:
            if keyword.arg in ("axis", "axis_name") or name not in REDUCTIONS:
                given.append(keyword.value)
        named = self._named_by(*given)
        if name in REDUCTIONS:
            return self._has_axis(named)
        return not named or self._has_axis(named)

    def _named_by(self, *given: ast.expr) -> set[str]:
        """The literal names in arguments, also in tuples and in constants of the file."""
        found = set()
        for node in given:
            for part in getattr(node, "elts", [node]):
                found.add(self.names.text(part))
        return found - {""}

    def _has_axis(self, named: set[str]) -> bool:
        return bool(named) and not (self._axes and named.isdisjoint(self._axes))

    def _layer_axes(self, call: ast.Call) -> Iterator[ast.expr]:
        """The axes of a layer of a library that is made in a function; others are noted."""
        name = self.names.imported_name(call.func)
        is_class = name.rpartition(".")[2][:1].isupper()
        is_of_library = name.partition(".")[0] not in {"", "jax", "functools", *self._modules}
        for keyword in call.keywords:
            if not is_of_library or keyword.arg not in _LAYERS:
                continue
            named = self._named_by(keyword.value)
            is_literal = isinstance(keyword.value, ast.Constant)  # a name, or None
            if not (is_class and self._is_in_function(call)):
                self.unedited |= dict.fromkeys(named, call.lineno)
            elif not is_literal or self._has_axis(named):
                yield keyword.value

    def _is_in_function(self, node: ast.AST | None) -> bool:
        while node is not None and not isinstance(node, _FUNCTIONS):
            node = self.names.parents.get(node)
        return node is not None
