"""The user's functions: where their text is, what the names in it mean, and which calls in it are collectives."""

from __future__ import annotations

import ast
import dataclasses
import dis
import functools
import inspect
import linecache
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax import lax

from xmap_compat import _jax, vocabulary
from xmap_compat.core.collectives import COLLECTIVES
from xmap_compat.tools.leave.old_check.names import assigned_once, bound_by, first_line, imported_names, own_nodes
from xmap_compat.tools.source.text import NotWritable, literal

Span = tuple[Any, ...]  # file, line, column, end line, end column


@dataclasses.dataclass(frozen=True)
class AxisNames:
    """The names of each named axis in plain JAX.

    Attributes:
      mesh: its mesh axes.
      local: the name that each axis has in its vmap; None if the axis fills its mesh axes.
      order: the mesh's axes, in order.
      sizes: the size of each named axis.
      inner: for each axis of a nested xmap, its mesh axes and the trip count of its loops.
    """

    mesh: Mapping[Any, tuple[str, ...]]
    local: Mapping[Any, str | None]
    order: tuple[str, ...]
    sizes: Mapping[Any, int]
    inner: Mapping[Any, tuple[tuple[str, ...], int]] = dataclasses.field(default_factory=dict)

    def with_inner(self) -> AxisNames:
        """The same names, together with those of nested xmaps."""
        mesh = {**self.mesh, **{name: mesh_axes for name, (mesh_axes, _) in self.inner.items()}}
        return dataclasses.replace(self, mesh=mesh, local={**self.local, **{name: name for name in self.inner}})

    def parts(self, name: Any) -> tuple[Any, ...]:
        if name not in self.mesh:
            return (name,)  # an axis of the user's own vmap
        own = self.local[name]
        return self.mesh[name] if own is None else (*self.mesh[name], own)

    def check_distinct(self, names: Sequence[Any]) -> None:
        parts = [p for n in names for p in self.parts(n)]
        if len(set(parts)) != len(parts):
            raise NotWritable(f"a collective over {literal(tuple(names))}, which share mesh axes: write one for each")

    @property
    def all(self) -> dict[Any, tuple[Any, ...]]:
        """The parts of each axis."""
        return {name: self.parts(name) for name in self.mesh}

    @property
    def same(self) -> bool:
        return all(parts == (n,) for n, parts in self.all.items())


def operations(jaxpr: Any) -> Iterator[tuple[Any, str, tuple[Any, ...]]]:
    """The equations of a program at any depth, with the name stack from the outermost equation on, and those around."""
    for eqn, around in _jax.walk(jaxpr):
        yield eqn, "/".join(["", *map(_jax.name_stack, (*around, eqn))]), tuple(around)


def is_backward(stack: str) -> bool:
    """Whether a name stack is in the backward pass of a derivative."""
    return "transpose(" in stack


def collectives(jaxpr: Any) -> Iterator[tuple[Any, str, list[Span]]]:
    """Each collective of a program: its name stack, and spans of the user's calls that contain it, innermost first."""
    for eqn, stack, around in operations(jaxpr):
        if eqn.primitive.name in COLLECTIVES:
            spans = ([(file, *span) for file, _, *span in _jax.user_frames(e)] for e in (eqn, *reversed(around)))
            yield eqn, stack, next(filter(None, spans), [])


def calls_of_collectives(jaxpr: Any) -> dict[Span, list[Any]]:
    """The collectives of a program, by the innermost call of the user."""
    found: dict[Span, list[Any]] = {}
    for eqn, _, spans in collectives(jaxpr):
        if spans:
            found.setdefault(spans[0], []).append(eqn)
    return found


# ------------------------------------------------------------------------------- pieces of files


def free_reads(node: ast.AST) -> dict[tuple[int, int], str]:
    """The names that a piece of a program reads and does not bind, by line and column, as Python looks them up."""
    top, found = _compiled(node), {}
    for code in codes_in(top):
        instructions = list(dis.get_instructions(code))
        # The names of a class, and `__name__`, which its body reads implicitly.
        bound = {i.argval for i in instructions if i.opname == "STORE_NAME" and code is not top} | {"__name__"}
        for i in instructions:
            if i.opname in LOOKUPS and i.argval not in bound and i.positions and i.positions.lineno is not None:
                found[i.positions.lineno, i.positions.col_offset or 0] = i.argval
    return dict(sorted(found.items()))


def variables(node: ast.AST) -> set[str]:
    """The names of variables of the functions in a piece of a program."""
    return {name for code in codes_in(_compiled(node)) for name in (*code.co_varnames, *code.co_cellvars)}


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from codes_in(inner)


def _compiled(node: Any) -> types.CodeType:
    statement = ast.copy_location(ast.Expr(node), node) if isinstance(node, ast.expr) else node
    tree = node if isinstance(node, ast.Module) else ast.Module([statement], [])
    return compile(tree, "<piece>", "exec", dont_inherit=True)


LOOKUPS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def offset(text: str, line: int, column: int) -> int:
    """The position in a text of a line and a column in bytes."""
    lines = text.split("\n")
    return sum(len(x) + 1 for x in lines[: line - 1]) + len(lines[line - 1].encode()[:column].decode())


def spliced(text: str, edits: Iterable[tuple[int, int, str]], start: int = 0, end: int | None = None) -> str:
    """A part of a text with pieces of it replaced."""
    pieces, at = [], start
    for begin, finish, new in sorted(edits, key=lambda e: e[:2]):
        if at <= begin and finish <= (len(text) if end is None else end):
            pieces += [text[at:begin], new]
            at = finish
    return "".join([*pieces, text[at:end]])


def parsed(text: str) -> ast.Module:
    """A rewritten piece of a program."""
    try:
        return ast.parse(text)
    except SyntaxError as error:  # in Python 3.11, say, quotes inside an f-string end it
        raise NotWritable(f"code that is not valid Python after it is rewritten: {error.msg}") from None


def dedented(text: str) -> str:
    """A definition without indentation; its strings of several lines stay as they are."""
    width = len(text) - len(text.lstrip())
    nodes = ast.walk(parsed(f"if 1:\n{text}")) if width else ()
    strings = [n for n in nodes if isinstance(n, (ast.Constant, ast.JoinedStr))]
    held = {line for n in strings for line in range(n.lineno - 1, (n.end_lineno or 0) - 1)}
    blank = lambda line: len(line) - len(line.lstrip())  # noqa: E731
    lines = enumerate(text.split("\n"))
    return "\n".join(line if k in held else line[min(width, blank(line)) :] for k, line in lines)


def renamed(text: str, names: Mapping[str, str]) -> str:
    """A program in which names that it reads and does not bind are replaced."""
    edits = []
    for (line, column), name in free_reads(parsed(text)).items():
        at = offset(text, line, column)
        if names.get(name, name) != name:
            if not text.startswith(name, at):
                raise NotWritable(f"{name} in an f-string")  # Python 3.11 does not know the places of names there
            edits.append((at, at + len(name), names[name]))
    return spliced(text, edits)


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A function, a class or an expression in its file, and what the names around it mean.

    Attributes:
      globals: those of its module.
      closure: the variables of the functions around it that are known.
      defaults: the values of parameter defaults, by their expressions.
    """

    file: str
    text: str
    tree: ast.Module
    node: Any
    globals: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    closure: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    defaults: Mapping[ast.expr, Any] = dataclasses.field(default_factory=dict)

    def at(self, node: Any) -> Piece:
        """Another part of the same file."""
        return dataclasses.replace(self, node=node)

    def span(self, node: Any) -> Span:
        return (self.file, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)

    def bounds(self, node: Any) -> tuple[int, int]:
        """Start and end of a part in the text, including its decorators."""
        line = first_line(node)
        start = offset(self.text, line, node.col_offset if line == node.lineno else 0)
        return start, offset(self.text, node.end_lineno, node.end_col_offset)

    @functools.cached_property
    def free(self) -> dict[tuple[int, int], str]:
        """The places where it reads names that it does not bind."""
        try:
            return free_reads(self.node)
        except SyntaxError as error:
            raise NotWritable(f"a function whose source alone is not valid Python: {error.msg}") from None

    def has(self, name: str) -> bool:
        """Whether a name has a value around the piece."""
        return name in self.closure or name in self.globals

    def value(self, name: str) -> Any:
        return self.closure[name] if name in self.closure else self.globals[name]

    def is_bound(self, node: ast.Name) -> bool:
        """Whether the piece itself binds a name at that place."""
        return (node.lineno, node.col_offset) not in self.free

    def known(self, node: ast.Name) -> bool:
        return not self.is_bound(node) and self.has(node.id)

    def imported_inside(self, name: str) -> Any:
        """The value that the piece imports by a name; None if it does not."""
        path = imported_as(name, self.node)
        module, _, last = path.rpartition(".")
        return getattr(sys.modules.get(module), last, None) or sys.modules.get(path)

    def meaning(self, node: ast.expr) -> Any:
        """The object that a name or an attribute of a module means, or None."""
        if isinstance(node, ast.Name):
            return self.value(node.id) if self.known(node) else self.imported_inside(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.meaning(node.value)
            if owner is lax and node.attr in vocabulary.REMOVED_FROM_LAX:
                return vocabulary.REMOVED_FROM_LAX[node.attr]
            return getattr(owner, node.attr, None) if isinstance(owner, types.ModuleType) else None
        return None

    def assigned_inside(self, name: str) -> ast.expr | None:
        """The expression that the function assigns to a variable, if it does so once."""
        return assigned_once(ast.walk(self.node), lambda own, value: own == name).get(name)

    def assigned_around(self, name: str) -> ast.expr | None:
        """The expression that the functions around or the module assign to a variable, if they do so once."""
        holds = lambda n: n.lineno <= self.node.lineno and self.node.end_lineno <= n.end_lineno  # noqa: E731
        around = [n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef) and holds(n) and n is not self.node]
        for scope in [*sorted(around, key=lambda n: -n.lineno), self.tree]:
            parts = list(own_nodes(ast.iter_child_nodes(scope)))
            if any(name in bound_by(part) for part in parts):
                return assigned_once(parts, lambda own, value: own == name).get(name)
        return None


def imported_as(name: str, node: ast.AST) -> str:
    """The dotted name that a program imports by a name; empty if it does not."""
    imports = (pair for part in ast.walk(node) for pair in imported_names(part))
    return next((path for local, path in imports if local == name), "")


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
    node = _lambda_node(found.tree, code) if code.co_name == "<lambda>" else _def_node(found.tree, code)
    if node is None:
        raise NotWritable(f"{code.co_name}, whose source is not found in {os.path.basename(code.co_filename)}")
    cells = zip(code.co_freevars, fun.__closure__ or ())
    closure = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    defaults = dict(zip(node.args.defaults, fun.__defaults__ or ()))
    by_name = {a.arg: d for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults) if d is not None}
    defaults.update((by_name[k], v) for k, v in (fun.__kwdefaults__ or {}).items() if k in by_name)
    return dataclasses.replace(found, node=node, globals=fun.__globals__, closure=closure, defaults=defaults)


def source_of_class(cls: type) -> Piece:
    """The piece that defines a class."""
    module = inspect.getmodule(cls)
    found = file_at(getattr(module, "__file__", None) or "", f"the class {cls.__name__}")
    nodes = [n for n in ast.walk(found.tree) if isinstance(n, ast.ClassDef) and n.name == cls.__name__]
    if len(nodes) != 1:
        raise NotWritable(f"the class {cls.__name__}, whose source is not found")
    return dataclasses.replace(found, node=nodes[0], globals=vars(module))


def _def_node(tree: ast.Module, code: types.CodeType) -> Any:
    named = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == code.co_name)
    return next((n for n in named if first_line(n) == code.co_firstlineno), None)


def _lambda_node(tree: ast.Module, code: types.CodeType) -> Any:
    """The only lambda expression in its line that compiles to code like this."""
    lambdas = [n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and n.lineno == code.co_firstlineno]
    codes = lambda n: [c for c in _compiled(n).co_consts if isinstance(c, types.CodeType)]  # noqa: E731
    alike = [n for n in lambdas if _likeness(code) in map(_likeness, codes(n))]
    return alike[0] if len(alike) == 1 else None


def _likeness(code: types.CodeType) -> Any:
    """Parameters, constants, and the places in the file of the instructions."""
    constants = [repr(c) for c in code.co_consts if not isinstance(c, types.CodeType)]
    places = {p for p in code.co_positions() if None not in p and p[2] != p[3]}
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], constants, places
