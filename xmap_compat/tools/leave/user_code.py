"""The user's functions: where their text is, what the names in it mean, and which calls in it are
collectives.
"""

from __future__ import annotations

import ast
import dataclasses
import dis
import functools
import linecache
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jax import lax

from xmap_compat import _jax, vocabulary
from xmap_compat.core.collectives import COLLECTIVES
from xmap_compat.tools.leave.construction import Spot
from xmap_compat.tools.leave.text import NotWritable
from xmap_compat.tools.source.bindings import Names, first_line, imported_names

Span = tuple[Any, ...]  # file, line, column, end line, end column


def is_xmap(callee: Any) -> bool:
    """Whether a function is xmap: this package's, which imports these tools, or the one at legacy's
    place.
    """
    homes = (sys.modules.get(name) for name in ("xmap_compat.api", "xmap_compat.legacy.maps"))
    return callable(callee) and any(getattr(home, "xmap", None) is callee for home in homes)


def is_ours(value: Any) -> bool:
    module = (
        value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", "")
    )
    return str(module).split(".")[0] == "xmap_compat"


def collectives(jaxpr: Any) -> Iterator[tuple[Any, str, list[Span]]]:
    """Each collective of a program: its name stack, and spans of the user's calls that contain it,
    innermost first.
    """
    for eqn, around in _jax.walk(jaxpr):
        if eqn.primitive.name in COLLECTIVES:
            stack = "/".join(["", *(str(e.source_info.name_stack) for e in (*around, eqn))])
            spans = (
                [(file, *span) for file, _, *span in _jax.user_frames(e)]
                for e in (eqn, *reversed(around))
            )
            yield eqn, stack, next(filter(None, spans), [])


def calls_of_collectives(jaxprs: Iterable[Any]) -> dict[Span, list[Any]]:
    """The collectives of programs, by the innermost call of the user."""
    found: dict[Span, list[Any]] = {}
    for eqn, _, spans in (each for jaxpr in jaxprs for each in collectives(jaxpr)):
        if spans:
            found.setdefault(spans[0], []).append(eqn)
    return found


# ------------------------------------------------------------------------------- pieces of files


def _free_reads(node: ast.AST) -> dict[tuple[int, int], str]:
    """The names that a piece of a program reads and does not bind, by line and column, as Python
    looks them up.
    """
    statement: Any = ast.copy_location(ast.Expr(node), node) if isinstance(node, ast.expr) else node
    tree = node if isinstance(node, ast.Module) else ast.Module([statement], [])
    top, found = compile(tree, "<piece>", "exec", dont_inherit=True), {}
    for code in codes_in(top):
        instructions = list(dis.get_instructions(code))
        # The names of a class, and `__name__`, which its body reads implicitly.
        bound = {i.argval for i in instructions if i.opname == "STORE_NAME" and code is not top} | {
            "__name__"
        }
        for i in instructions:
            if (
                i.opname in LOOKUPS
                and i.argval not in bound
                and i.positions
                and i.positions.lineno is not None
            ):
                found[i.positions.lineno, i.positions.col_offset or 0] = i.argval
    return dict(sorted(found.items()))


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from codes_in(inner)


LOOKUPS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A function, a class or an expression in its file, and what the names around it mean.

    Attributes:
      globals: those of its module.
      closure: the variables of the functions around it that are known.
    """

    file: str
    text: str
    tree: ast.Module
    node: Any
    globals: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    closure: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def span(self, node: Any) -> Span:
        return (self.file, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)

    @staticmethod
    def bounds(node: Any) -> tuple[Spot, Spot]:
        """Start and end of a part in the text, including its decorators."""
        line = first_line(node)
        return (line, node.col_offset if line == node.lineno else 0), (
            node.end_lineno,
            node.end_col_offset,
        )

    def holds(self, span: Span) -> bool:
        start, end = self.bounds(self.node)
        return self.file == span[0] and start <= span[1:3] and span[3:] <= end

    @functools.cached_property
    def free(self) -> dict[tuple[int, int], str]:
        """The places where it reads names that it does not bind."""
        try:
            return _free_reads(self.node)
        except SyntaxError as error:
            raise NotWritable(
                f"a function whose source alone is not valid Python: {error.msg}"
            ) from None

    @functools.cached_property
    def names(self) -> Mapping[str, Any]:
        """The values of the names around the piece."""
        return {**self.globals, **self.closure}

    @functools.cached_property
    def bindings(self) -> Names:
        """What the names of its file are bound to."""
        return Names(self.tree)

    def is_fixed(self, node: ast.expr) -> bool:
        """Whether imports alone say what a name or attribute is in each run; it may be None where
        an import fails.
        """
        dotted, parts = (
            self.bindings.dotted(node),
            (n.id for n in ast.walk(node) if isinstance(n, ast.Name)),
        )
        bound = [
            m
            for name in parts
            for m in self.bindings.bound[name]
            if getattr(m, "value", m) is not None
        ]
        return bool(dotted or bound) and all(isinstance(m, str) or dotted for m in bound)

    def is_free(self, node: ast.Name) -> bool:
        """Whether the piece itself does not bind a name at that place."""
        return (node.lineno, node.col_offset) in self.free

    def known(self, node: ast.Name) -> bool:
        return self.is_free(node) and node.id in self.names

    def imported_inside(self, name: str) -> Any:
        """The value that the piece imports by a name; None if it does not."""
        imports = (pair for part in ast.walk(self.node) for pair in imported_names(part))
        path = next((path for local, path in imports if local == name), "")
        module, _, last = path.rpartition(".")
        return getattr(sys.modules.get(module), last, None) or sys.modules.get(path)

    def meaning(self, node: ast.expr) -> Any:
        """The object that a name or an attribute of a module means, or None."""
        if isinstance(node, ast.Name):
            return self.names[node.id] if self.known(node) else self.imported_inside(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.meaning(node.value)
            if owner is lax and node.attr in vocabulary.REMOVED_FROM_LAX:
                return vocabulary.REMOVED_FROM_LAX[node.attr]
            return getattr(owner, node.attr, None) if isinstance(owner, types.ModuleType) else None
        return None


# ------------------------------------------------------------------------------- finding them


def file_at(file: str, what: str) -> Piece:
    text = "".join(linecache.getlines(file))
    if not text:
        raise NotWritable(f"{what}, whose source cannot be read")
    try:
        return Piece(file, text, ast.parse(text), ast.Pass(lineno=0, end_lineno=0))
    except SyntaxError:
        raise NotWritable(f"{what}, whose source cannot be parsed") from None


def source_of(fun: types.FunctionType) -> Piece:
    """The piece that defines a function."""
    code = fun.__code__
    found = file_at(code.co_filename, code.co_name)
    node = (
        _lambda_node(found.tree, code)
        if code.co_name == "<lambda>"
        else _def_node(found.tree, code)
    )
    if node is None:
        raise NotWritable(
            f"{code.co_name}, whose source is not found in {os.path.basename(code.co_filename)}"
        )
    cells = zip(code.co_freevars, fun.__closure__ or ())
    closure = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    return dataclasses.replace(found, node=node, globals=fun.__globals__, closure=closure)


def _def_node(tree: ast.Module, code: types.CodeType) -> Any:
    named = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == code.co_name)
    return next((n for n in named if first_line(n) == code.co_firstlineno), None)


def _lambda_node(tree: ast.Module, code: types.CodeType) -> Any:
    """The lambda expression of a code: one of its instructions has the place of the whole body."""
    lambdas = (
        n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and n.lineno == code.co_firstlineno
    )
    body = lambda n: (n.body.lineno, n.body.end_lineno, n.body.col_offset, n.body.end_col_offset)  # noqa: E731
    return next((n for n in lambdas if body(n) in {*code.co_positions()}), None)
