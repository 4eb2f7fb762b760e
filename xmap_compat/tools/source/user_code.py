"""The user's functions: where their text is, what the names in it mean, and which of its calls are collectives."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import linecache
import math
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xmap_compat import _jax
from xmap_compat.core.rules.table import RULES
from xmap_compat.tools.source.text import NotWritable, literal

Span = tuple[Any, ...]  # file, line, column, end line, end column


@dataclasses.dataclass(frozen=True)
class AxisNames:
    """What each named axis is called in plain JAX.

    Attributes:
      mesh: its mesh axes.
      local: what the vmap of each axis calls it; None if the axis fills its mesh axes.
      order: the mesh's axes, in order.
      sizes: the size of each named axis.
      inner: of the axes of xmaps inside: the mesh axes, and the turns of loops.
    """

    mesh: Mapping[Any, tuple[str, ...]]
    local: Mapping[Any, str | None]
    order: tuple[str, ...]
    sizes: Mapping[Any, int]
    inner: Mapping[Any, tuple[tuple[str, ...], int]] = dataclasses.field(default_factory=dict)

    def with_inner(self) -> AxisNames:
        """The names where those of xmaps inside count as well."""
        mesh = {**self.mesh, **{name: mesh_axes for name, (mesh_axes, _) in self.inner.items()}}
        return dataclasses.replace(self, mesh=mesh, local={**self.local, **{name: name for name in self.inner}})

    def size(self, names: Sequence[Any]) -> int:
        return math.prod(self.sizes[n] for n in names)

    def parts(self, name: Any) -> tuple[Any, ...]:
        if name not in self.mesh:
            return (name,)  # of a vmap of the user's
        own = self.local[name]
        return self.mesh[name] if own is None else (*self.mesh[name], own)

    def all_parts(self, names: Sequence[Any]) -> tuple[Any, ...]:
        parts = tuple(p for n in names for p in self.parts(n))
        if len(set(parts)) != len(parts):
            raise NotWritable(f"a collective over {literal(tuple(names))}, which share mesh axes")
        return parts

    def is_same(self, names: Sequence[Any]) -> bool:
        return self.all_parts(names) == tuple(names)

    @property
    def same(self) -> bool:
        return all(self.parts(n) == (n,) for n in self.mesh)


# ------------------------------------------------------------------------ where collectives are


def collectives(jaxpr: Any, outer: Sequence[Span] = ()) -> Iterator[tuple[Any, list[Span]]]:
    """Each collective of a program, with the spans of the user's calls that it came from, innermost first."""
    body, _ = _jax.open_jaxpr(jaxpr)
    for eqn in body.eqns:
        spans = [(file, *span) for file, _, *span in _jax.user_frames(eqn)] or list(outer)
        if eqn.primitive.name in RULES:
            yield eqn, spans
        for sub in _jax.subjaxprs(eqn.params):
            yield from collectives(sub, spans)


def collective_calls(jaxpr: Any) -> dict[Span, list[Any]]:
    """The collectives of each innermost call of the user, by its span."""
    calls: dict[Span, list[Any]] = {}
    for eqn, spans in collectives(jaxpr):
        if spans:
            calls.setdefault(spans[0], []).append(eqn)
    return calls


# ------------------------------------------------------------------- functions and sources


@dataclasses.dataclass(frozen=True)
class Found:
    """A function, a class or an expression in its file."""

    file: str
    text: str
    tree: ast.Module
    node: Any

    def offset(self, line: int, column: int) -> int:
        """The position in the text of a line and a column in bytes."""
        lines = self.text.splitlines(keepends=True)
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    def span(self, node: Any) -> Span:
        return (self.file, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)

    def bounds(self, node: Any) -> tuple[int, int]:
        _, line, column, end_line, end_column = self.span(node)
        return self.offset(line, column), self.offset(end_line, end_column)

    def at(self, node: Any) -> Found:
        """Another part of the same file."""
        return dataclasses.replace(self, node=node)


def file_at(file: str, what: str) -> Found:
    text = "".join(linecache.getlines(file))
    if not text:
        raise NotWritable(f"{what}, whose source cannot be read")
    try:
        return Found(file, text, ast.parse(text), ast.Pass(lineno=0, end_lineno=0))
    except SyntaxError:
        raise NotWritable(f"{what}, whose source cannot be parsed") from None


def source_of(fun: types.FunctionType) -> Found:
    """Where a function is defined."""
    code = fun.__code__
    found = file_at(code.co_filename, code.co_name)
    node = _lambda_node(found.tree, code) if code.co_name == "<lambda>" else _def_node(found.tree, code)
    if node is None:
        raise NotWritable(f"{code.co_name}, whose source is not found in {os.path.basename(code.co_filename)}")
    return found.at(node)


def source_of_class(cls: type) -> Found:
    """Where a class is defined."""
    module = inspect.getmodule(cls)
    found = file_at(getattr(module, "__file__", None) or "", f"the class {cls.__name__}")
    nodes = [n for n in ast.walk(found.tree) if isinstance(n, ast.ClassDef) and n.name == cls.__name__]
    if len(nodes) != 1:
        raise NotWritable(f"the class {cls.__name__}, whose source is not found")
    return found.at(nodes[0])


def _def_node(tree, code):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def _lambda_node(tree, code):
    positions = [p for p in code.co_positions() if None not in p and p[1] != p[0] - 1]
    inside = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Lambda)
        and node.lineno == code.co_firstlineno
        and [a.arg for a in node.args.args] == list(code.co_varnames[: code.co_argcount])
        and (
            _is_returned(node.body, code)
            or any((node.body.lineno, node.body.col_offset) == (p[0], p[2]) for p in positions)
        )
    ]
    return inside[0] if len(inside) == 1 else None


def _is_returned(body, code):
    """Of a constant that is returned, Python 3.12 does not know the position."""
    try:
        return not code.co_names and ast.literal_eval(body) in code.co_consts
    except (TypeError, ValueError):
        return False


class Scope:
    """What the names in a piece of a file mean.

    Args:
      globals_: of its module.
      closure: the variables of the functions around it that are known.

    Attributes:
      defaults: the values of the parameters' defaults, by their expressions.
    """

    def __init__(self, found: Found, globals_: Mapping[str, Any], closure: Mapping[str, Any] | None = None):
        self.found, self.globals, self.closure = found, globals_, closure or {}
        self.defaults: dict[ast.expr, Any] = {}
        self._bound = _bound_inside([found.node])

    @classmethod
    def of(cls, fun: types.FunctionType, found: Found) -> Scope:
        closure = {}
        for name, cell in zip(fun.__code__.co_freevars, fun.__closure__ or ()):
            try:
                closure[name] = cell.cell_contents
            except ValueError:
                continue
        scope, arguments = cls(found, fun.__globals__, closure), found.node.args
        scope.defaults.update(zip(arguments.defaults, fun.__defaults__ or ()))
        by_name = {a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults) if d is not None}
        scope.defaults.update((by_name[k], v) for k, v in (fun.__kwdefaults__ or {}).items() if k in by_name)
        return scope

    def free_names(self, dropped: set[ast.AST]) -> list[str]:
        """Names that are read and not bound, without those in parts that are not kept."""
        free = [
            n.id for n in _walk_without(self.found.node, dropped) if isinstance(n, ast.Name) and n not in self._bound
        ]
        return [n for n in dict.fromkeys(free) if self.has(n) or not hasattr(builtins, n)]

    def has(self, name: str) -> bool:
        """Whether a name has a value around the piece."""
        return name in self.closure or name in self.globals

    def value(self, name: str) -> Any:
        return self.closure[name] if name in self.closure else self.globals[name]

    def is_bound(self, node: ast.Name) -> bool:
        """Whether a name is one of the piece's own there."""
        return node in self._bound

    def known(self, node: ast.Name) -> bool:
        return not self.is_bound(node) and self.has(node.id)

    def imported_inside(self, name: str) -> Any:
        """What a function imports by a name that it gives to nothing else; None if it does not."""
        bound = [n for n in ast.walk(self.found.node) if name in _binds(n)]
        if len(bound) != 1 or not isinstance(bound[0], (ast.Import, ast.ImportFrom)):
            return None
        alias = next(a for a in bound[0].names if (a.asname or a.name).split(".")[0] == name)
        if isinstance(bound[0], ast.ImportFrom):
            home = sys.modules.get(bound[0].module or "") if not bound[0].level else None
            return getattr(home, alias.name, None) or sys.modules.get(f"{bound[0].module}.{alias.name}")
        return sys.modules.get(alias.name if alias.asname else name)

    def assigned_once(self, name: str) -> ast.expr:
        """What the function assigns to a variable, if it does so once."""
        node = assignment(self.found.node, name)
        if node is None or isinstance(node, ast.Call):
            raise ValueError(name)
        return node

    def assigned_around(self, name: str) -> ast.expr | None:
        """What is assigned to a variable, once, in the functions around or in the module."""
        around = [n for n in ast.walk(self.found.tree) if isinstance(n, ast.FunctionDef) and _contains(n, self.found)]
        for node in sorted(around, key=lambda n: -n.lineno):
            if node is not self.found.node and (value := assignment(node, name)) is not None:
                return value
        return assignment(self.found.tree, name, top_level=True)

    def import_of(self, name: str) -> str | None:
        """The statement of the file that imports a name."""
        for node in ast.walk(self.found.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        renamed = f" as {alias.asname}" if alias.asname and alias.asname != alias.name else ""
                        return f"from {node.module} import {alias.name}{renamed}"
        return None


def _contains(node, found) -> bool:
    return node.lineno <= found.node.lineno and found.node.end_lineno <= node.end_lineno


def assignment(tree: ast.AST, name: str, top_level: bool = False) -> ast.expr | None:
    """The expression that is assigned to a variable, if one is and no more than once."""
    nodes = list(tree.body if top_level and isinstance(tree, ast.Module) else ast.walk(tree))
    assigned = [
        n.value
        for n in nodes
        if isinstance(n, (ast.Assign, ast.AnnAssign)) and n.value is not None and _is_target(n, name)
    ]
    stored = [n for n in nodes if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store)]
    return assigned[0] if len(assigned) == 1 and (top_level or len(stored) == 1) else None


def bound_by(statement: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    return {name for n in _of_scope([statement]) for name in _binds(n)}


def _is_target(node, name) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(t, ast.Name) and t.id == name for t in targets)


_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, *_COMPREHENSIONS)


def _bound_inside(parts: Sequence[ast.AST], visible: frozenset[str] = frozenset(), of: Any = None) -> set[ast.Name]:
    """The names in parts of a file that are bound in them, or where they are.

    Args:
      visible: names that are bound around them.
      of: the scope that they are the inside of; None for a piece of a file, which binds its own name if it is a class.
    """
    nodes = list(_of_scope(parts))
    elsewhere = {name for n in nodes if isinstance(n, (ast.Global, ast.Nonlocal)) for name in n.names}
    visible -= {name for n in nodes if isinstance(n, ast.Global) for name in n.names}
    binding = nodes if of is not None else [n for n in parts if isinstance(n, ast.ClassDef)]
    bound = frozenset(name for n in binding for name in _binds(n)) - elsewhere
    found = {n for n in nodes if isinstance(n, ast.Name) and n.id in visible | bound}
    around = visible if isinstance(of, ast.ClassDef) else visible | bound
    return found.union(*(_bound_inside(_inside(n), around, n) for n in nodes if isinstance(n, _SCOPES)))


def _of_scope(parts: Sequence[Any]) -> Iterator[Any]:
    """The nodes of one scope; of scopes in it, what is evaluated around them."""
    pending = list(parts)
    while pending:
        node = pending.pop()
        yield node
        inside = _inside(node) if isinstance(node, _SCOPES) else ()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.arguments, ast.comprehension)) and inside:
                pending.extend(c for c in ast.iter_child_nodes(child) if c not in inside)
            elif child not in inside:
                pending.append(child)


def _inside(scope: Any) -> list[Any]:
    """The parts of a function, a class or a comprehension that are evaluated in its own scope."""
    if isinstance(scope, _COMPREHENSIONS):
        first, *rest = scope.generators
        elements = [getattr(scope, k) for k in ("elt", "key", "value") if hasattr(scope, k)]
        return [*elements, first.target, *first.ifs, *rest]
    body = scope.body if isinstance(scope.body, list) else [scope.body]
    given = [c for c in ast.iter_child_nodes(scope.args) if isinstance(c, ast.arg)] if hasattr(scope, "args") else []
    return [*given, *body]


def _binds(node: Any) -> Iterator[str]:
    """The names that a node binds in its scope."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((a.asname or a.name).split(".")[0] for a in node.names)
    elif isinstance(node, _COMPREHENSIONS):
        yield from (n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr))
    elif (name := getattr(node, _NAMED.get(type(node), ""), None)) is not None:
        yield name


_NAMED = {
    **{ast.arg: "arg", ast.ExceptHandler: "name"},
    **{ast.MatchAs: "name", ast.MatchStar: "name", ast.MatchMapping: "rest"},
}


def _walk_without(node, dropped):
    pending = [node]
    while pending:
        current = pending.pop()
        if current in dropped:
            continue
        yield current
        pending.extend(ast.iter_child_nodes(current))
