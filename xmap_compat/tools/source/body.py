"""The user's functions with their collectives rewritten for plain JAX.

Inside, an axis is called by what executes it: its mesh axes, then the axis of a ``jax.vmap`` that has its own name.
The traced program says which calls are collectives and over what; every one of them must be found in
the source that is rewritten, or this way of writing is given up.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import linecache
import math
import os
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import _jax, named_einsum, named_lax, vocabulary
from xmap_compat.collectives import RULES, mentioned_names
from xmap_compat.tools.source.helpers import HELPERS
from xmap_compat.tools.source.text import NotWritable, array, axes, literal

MAX_LITERAL = 64


@dataclasses.dataclass(frozen=True)
class Edit:
    """A call that was rewritten."""

    file: str
    line: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}: {self.old} -> {self.new}"


@dataclasses.dataclass(frozen=True)
class AxisNames:
    """What each named axis is called in plain JAX.

    Attributes:
      mesh: its mesh axes.
      local: what the vmap of each axis calls it; None if the axis fills its mesh axes.
      order: the mesh's axes, in order.
      sizes: the size of each named axis.
    """

    mesh: Mapping[Any, tuple[str, ...]]
    local: Mapping[Any, str | None]
    order: tuple[str, ...]
    sizes: Mapping[Any, int]

    def size(self, names: Sequence[Any]) -> int:
        return math.prod(self.sizes[n] for n in names)

    def parts(self, name: Any) -> tuple[Any, ...]:
        own = self.local[name]
        return self.mesh[name] if own is None else (*self.mesh[name], own)

    def all_parts(self, names: Sequence[Any]) -> tuple[Any, ...]:
        parts = tuple(p for n in names for p in self.parts(n))
        if len(set(parts)) != len(parts):
            raise NotWritable(f"a collective over {literal(tuple(names))}, which share mesh axes")
        return parts

    def is_same(self, names: Sequence[Any]) -> bool:
        return self.all_parts(names) == tuple(names)


class Body:
    """Rewrites a function and everything of the user's that it needs.

    Attributes:
      imports, assignments, functions: the statements, each kind in the order of its need.
      helpers: names of functions to be defined beside them.
      values: arrays too large to be written, by name.
      edits: the calls that were rewritten, in the order of their lines; within a call none is told apart.
    """

    def __init__(self, fun: Callable[..., Any], jaxpr: Any, names: AxisNames, reserved: Sequence[str]):
        self.names = names
        self.imports: dict[str, None] = {}
        self.assignments: dict[str, None] = {}
        self.functions: dict[str, list[str]] = {}
        self.helpers: dict[str, None] = {}
        self.values: dict[str, Any] = {}
        self._edits: dict[Edit, None] = {}
        self._meanings: dict[str, Any] = {}
        self._handled: dict[tuple[str, int, int, int, int], tuple[Any, ...]] = {}
        self._reserved = {*reserved, *HELPERS}
        self.calls = _collective_calls(jaxpr)
        self.name = self._library_function(fun) or self._function(fun, root=True)
        self._check_all_found(jaxpr)

    @property
    def edits(self) -> list[Edit]:
        return sorted(self._edits, key=lambda e: (e.file, e.line))

    def edited(self, edit: Edit) -> None:
        self._edits[edit] = None

    # ---- what is needed

    def _library_function(self, fun) -> str | None:
        """How a function of JAX or NumPy is written: it is used, not copied."""
        name = getattr(fun, "__name__", "")
        for module, alias in _LIBRARY:
            if name and vars(module).get(name) is fun:
                self.imports[_module_import(alias, module)] = None
                self._define(alias, module)
                return f"{alias}.{name}"
        if _file_of(fun).startswith(_JAX_FILES):
            raise NotWritable(f"{name or 'a function'} of JAX, which has no public name")
        return None

    def _function(self, fun, root=False, instead="body") -> str:
        """Write a function; its name, which is another ``instead`` if it is a lambda expression."""
        fun = _plain_function(fun)
        found = _source_of(fun)
        name = instead if isinstance(found.node, ast.Lambda) else fun.__name__
        if not self._define(name, fun):
            self._write(name, fun, found, decorated=not root)
        return name

    def _write(self, name, fun, found, decorated):
        """Write a function after everything that it needs."""
        scope = _Scope(fun, found)
        rewriter = _Rewriter(self, found, scope)
        lines = rewriter.definition(name, decorated)
        for free in scope.free_names(rewriter.dropped):
            self._need(free, scope)
        self.functions[name] = lines

    def _define(self, name, meaning) -> bool:
        """Note what a name means; whether that was known."""
        if name in self._reserved:
            raise NotWritable(f"the name {name}, which the program needs for something else")
        known = name in self._meanings
        if known and self._meanings[name] is not meaning:
            raise NotWritable(f"two things with the name {name}")
        self._meanings[name] = meaning
        return known

    def _need(self, name, scope):
        """Define or import what a free name of a function means."""
        value = scope.value(name)
        if _is_ours(value):
            raise NotWritable(f"a use of {name} of xmap_compat")
        if isinstance(value, types.ModuleType):
            if not self._define(name, value):
                self.imports[_module_import(name, value)] = None
        elif statement := scope.import_of(name):
            if not self._define(name, value):
                self.imports[statement] = None
        elif _file_of(value).startswith(_JAX_FILES):
            raise NotWritable(f"{name} of JAX, which is not imported")
        elif isinstance(value, types.FunctionType) and value.__name__ == name:
            self._function(value)
        elif isinstance(value, (jax.custom_vjp, jax.custom_jvp)):
            self._custom_rule(name, value)
        elif isinstance(getattr(value, "__wrapped__", None), types.FunctionType):
            self._wrapped(name, value)
        else:
            self._constant(name, value)

    def _constant(self, name, value):
        if self._define(name, value):
            return
        if isinstance(value, (np.ndarray, np.generic, jax.Array)):
            if isinstance(value, jax.core.Tracer):
                raise NotWritable(f"{name}, a value of a transformation around the call")
            if np.size(value) > MAX_LITERAL:
                self.values[name] = value
            else:
                self.assignments[f"{name} = {array(value)}"] = None
            return
        try:
            self.assignments[f"{name} = {literal(value)}"] = None
        except NotWritable as reason:
            raise NotWritable(f"{name}, {reason}") from None

    def _custom_rule(self, name, value):
        """A function with a rule for its derivatives, which a statement or a decorator attaches."""
        if self._define(name, value):
            return
        kind = "custom_vjp" if isinstance(value, jax.custom_vjp) else "custom_jvp"
        primal = _plain_function(value)
        found = _source_of(primal)
        if primal.__name__ == name and getattr(found.node, "decorator_list", None):
            self._write(name, primal, found, decorated=True)
        else:
            nondiff = tuple(value.nondiff_argnums)
            self.imports["import jax"] = None
            made = f"jax.{kind}({self._function(primal)}{f', nondiff_argnums={literal(nondiff)}' if nondiff else ''})"
            self.functions[name] = [f"{name} = {made}"]
        rules = {"fwd": value.fwd, "bwd": value.bwd} if kind == "custom_vjp" else {"jvp": value.jvp}
        names = [self._function(rule, instead=f"{name}_{suffix}") for suffix, rule in rules.items()]
        attach = kind.replace("custom_", "def")
        if f"@{name}.{attach}" not in "\n".join(self.functions[names[0]]):
            self.functions[f"{name}.{attach}"] = [f"{name}.{attach}({', '.join(names)})"]

    def _wrapped(self, name, value):
        """A jitted (or otherwise decorated) function, defined with its decorators."""
        if self._define(name, value):
            return
        inner = value.__wrapped__
        found = _source_of(inner)
        if inner.__name__ != name or not getattr(found.node, "decorator_list", None):
            raise NotWritable(f"{name}, a wrapped function")
        self._write(name, inner, found, decorated=True)

    # ---- what was found

    def handled(self, span: tuple[str, int, int, int, int], names: tuple[Any, ...]) -> None:
        self._handled[span] = names

    def _check_all_found(self, jaxpr):
        """Every collective whose axes are called otherwise now must be in a call that was rewritten."""
        for eqn, spans in _collectives(jaxpr):
            names = mentioned_names(eqn.params)
            if eqn.params.get("axis_index_groups") is not None:
                raise NotWritable("axis_index_groups")
            if eqn.primitive.name == "pbroadcast" or any(n not in self.names.mesh for n in names):
                raise NotWritable(f"{eqn.primitive.name} over {', '.join(map(str, names))}")
            if eqn.primitive.name != "pdot" and self.names.is_same(names):
                continue
            if not any(span in self._handled for span in spans):
                where = _jax.where_in_user_code(eqn)
                raise NotWritable(f"{eqn.primitive.name} over {', '.join(map(str, names))} at {where}")


def _collectives(jaxpr, outer=()) -> Iterator[tuple[Any, list[tuple]]]:
    """Each collective of a program, with the spans of the user's calls that it came from, innermost first."""
    body, _ = _jax.open_jaxpr(jaxpr)
    for eqn in body.eqns:
        spans = [(file, *span) for file, _, *span in _jax.user_frames(eqn)] or list(outer)
        if eqn.primitive.name in RULES:
            yield eqn, spans
        for sub in _jax.subjaxprs(eqn.params):
            yield from _collectives(sub, spans)


def _collective_calls(jaxpr) -> dict[tuple, list[Any]]:
    """The collectives of each innermost call of the user, by its span."""
    calls: dict[tuple, list[Any]] = {}
    for eqn, spans in _collectives(jaxpr):
        if spans:
            calls.setdefault(spans[0], []).append(eqn)
    return calls


# ------------------------------------------------------------------- functions and sources


_LIBRARY = [(jnp, "jnp"), (lax, "lax"), (jax.nn, "nn"), (jax, "jax"), (np, "np")]
_JAX_FILES = os.path.dirname(jax.__file__) + os.sep


def _file_of(fun) -> str:
    code = getattr(inspect.unwrap(fun) if callable(fun) else fun, "__code__", None)
    return code.co_filename if code is not None else ""


def _plain_function(fun):
    while isinstance(getattr(fun, "__wrapped__", None), types.FunctionType):
        fun = fun.__wrapped__
    if not isinstance(fun, types.FunctionType):
        raise NotWritable(f"a body of type {type(fun).__name__}")
    return fun


@dataclasses.dataclass(frozen=True)
class _Found:
    """A function in its file."""

    file: str
    text: str
    tree: ast.Module
    node: ast.FunctionDef | ast.Lambda

    def offset(self, line: int, column: int) -> int:
        """The position in the text of a line and a column in bytes."""
        lines = self.text.splitlines(keepends=True)
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr) -> tuple[str, int, int, int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (self.file, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)

    def bounds(self, node: ast.expr) -> tuple[int, int]:
        _, line, column, end_line, end_column = self.span(node)
        return self.offset(line, column), self.offset(end_line, end_column)


def _source_of(fun: types.FunctionType) -> _Found:
    code = fun.__code__
    lines = linecache.getlines(code.co_filename)
    text = "".join(lines)
    if not text:
        raise NotWritable(f"{fun.__name__}, whose source cannot be read")
    try:
        tree = ast.parse(text)
    except SyntaxError:
        raise NotWritable(f"{fun.__name__}, whose source cannot be parsed") from None
    node = _lambda_node(tree, code) if fun.__name__ == "<lambda>" else _def_node(tree, code)
    if node is None:
        raise NotWritable(f"{fun.__name__}, whose source is not found in {os.path.basename(code.co_filename)}")
    return _Found(code.co_filename, text, tree, node)


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
        and any((node.body.lineno, node.body.col_offset) == (p[0], p[2]) for p in positions)
    ]
    return inside[0] if len(inside) == 1 else None


class _Scope:
    """What the names of a function mean."""

    def __init__(self, fun: types.FunctionType, found: _Found):
        self.fun, self.found = fun, found
        cells = zip(fun.__code__.co_freevars, fun.__closure__ or ())
        self.closure = {}
        for name, cell in cells:
            try:
                self.closure[name] = cell.cell_contents
            except ValueError:
                continue
        self.bound = _bound_names(found.node)

    def free_names(self, dropped: set[ast.AST]) -> list[str]:
        """Names that the function reads and does not bind, without those in parts that are not kept."""
        names = [
            n.id
            for n in _walk_without(self.found.node, dropped)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and not self._is_bound(n.id)
        ]
        own = getattr(self.found.node, "name", None)
        return [n for n in dict.fromkeys(names) if n != own and (n in self.closure or not hasattr(builtins, n))]

    def _is_bound(self, name):
        return name in self.bound and name not in self.closure

    def value(self, name: str) -> Any:
        if name in self.closure:
            return self.closure[name]
        if name in self.fun.__globals__:
            return self.fun.__globals__[name]
        raise NotWritable(f"{name}, which is not known")

    def known(self, name: str) -> bool:
        return not self._is_bound(name) and (name in self.closure or name in self.fun.__globals__)

    def assigned_once(self, name: str) -> ast.expr:
        """What the function assigns to a variable, if it does so once."""
        assigned = [
            n.value
            for n in ast.walk(self.found.node)
            if isinstance(n, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in n.targets)
        ]
        stored = [
            n
            for n in ast.walk(self.found.node)
            if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store)
        ]
        if len(assigned) == len(stored) == 1 and not isinstance(assigned[0], ast.Call):
            return assigned[0]
        raise ValueError(name)

    def import_of(self, name: str) -> str | None:
        """The statement of the file that imports a name."""
        for node in ast.walk(self.found.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        renamed = f" as {alias.asname}" if alias.asname and alias.asname != alias.name else ""
                        return f"from {node.module} import {alias.name}{renamed}"
        return None


def _bound_names(node) -> set[str]:
    bound = set()
    for n in ast.walk(node):
        if isinstance(n, ast.arg):
            bound.add(n.arg)
        elif isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load):
            bound.add(n.id)
        elif isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n is not node:
            bound.add(n.name)
        elif isinstance(n, (ast.Import, ast.ImportFrom)):
            bound.update((a.asname or a.name).split(".")[0] for a in n.names)
    return bound


def _walk_without(node, dropped):
    pending = [node]
    while pending:
        current = pending.pop()
        if current in dropped:
            continue
        yield current
        pending.extend(ast.iter_child_nodes(current))


def _module_import(name: str, module: types.ModuleType) -> str:
    path = module.__name__
    if path.split(".")[0] == "xmap_compat":
        raise NotWritable(f"a use of {path}")
    if path == name:
        return f"import {path}"
    parent, _, last = path.rpartition(".")
    return f"from {parent} import {last}" if last == name and parent else f"import {path} as {name}"


def _is_ours(value) -> bool:
    return str(getattr(value, "__module__", "")).split(".")[0] == "xmap_compat"


# ------------------------------------------------------------------------------ rewriting


class _Rewriter:
    """The text of a function with its calls of collectives rewritten.

    Attributes:
      dropped: parts of the syntax tree that are not in the new text.
    """

    def __init__(self, body: Body, found: _Found, scope: _Scope):
        self.body, self.found, self.scope = body, found, scope
        self.dropped: set[ast.AST] = set()
        self._depth = 0

    def definition(self, name: str, decorated: bool) -> list[str]:
        """The lines of the definition, at no indentation."""
        node = self.found.node
        if isinstance(node, ast.Lambda):
            arguments = ast.unparse(node.args)
            result = self.text(node.body)
            result = f"({result})" if "\n" in result else result
            return [f"def {name}({arguments}):", *f"    return {result}".split("\n")]
        first = node.lineno
        if decorated:
            first = min([first, *(d.lineno for d in node.decorator_list)])
        else:
            self.dropped.update(node.decorator_list)
        start = self.found.offset(first, 0)
        assert node.end_lineno is not None and node.end_col_offset is not None
        end = self.found.offset(node.end_lineno, node.end_col_offset)
        text = self._spliced(start, end, [node])
        return textwrap.dedent(text).rstrip().split("\n")

    def text(self, node: ast.expr) -> str:
        """The new text of an expression."""
        if isinstance(node, ast.Call):
            new = self._call(node)
            if new is not None:
                return new
        start, end = self.found.bounds(node)
        return self._spliced(start, end, list(ast.iter_child_nodes(node)))

    def _spliced(self, start, end, roots) -> str:
        """The text between two positions, with the outermost calls in it that change replaced."""
        pieces, at = [], start
        for call in sorted(self._outermost_changed(roots), key=lambda c: c[1][0]):
            text, (begin, finish) = call
            if begin < at:
                continue
            pieces.extend([self.found.text[at:begin], text])
            at = finish
        return "".join([*pieces, self.found.text[at:end]])

    def _outermost_changed(self, roots):
        pending = list(roots)
        while pending:
            node = pending.pop()
            if node in self.dropped:
                continue
            if isinstance(node, ast.Call) and (new := self._call(node)) is not None:
                yield new, self.found.bounds(node)
                continue
            pending.extend(ast.iter_child_nodes(node))

    # ---- one call

    def _call(self, node: ast.Call) -> str | None:
        """The new text of a call, or None if it stays (its arguments may change all the same)."""
        self._depth += 1
        try:
            new = self._new_call(node)
        finally:
            self._depth -= 1
        if new is not None and not self._depth:
            old = ast.get_source_segment(self.found.text, node) or ""
            self.body.edited(Edit(self.found.file, node.lineno, _one_line(old), _one_line(new)))
        return new

    def _new_call(self, node):
        span = self.found.span(node)
        callee = self._callee(node.func)
        handler = _handler(callee)
        if handler is not None and (new := handler(self, node)) is not None:
            return new
        if callee is None and (new := _extremum_method(self, node)) is not None:
            return new
        if span in self.body.calls or _is_of_jax(callee):
            return self._renamed_arguments(node, span)
        return None

    def _callee(self, node: ast.expr) -> Any:
        """The object that a name or an attribute of a module means, or None."""
        if isinstance(node, ast.Name):
            return self.scope.value(node.id) if self.scope.known(node.id) else None
        if isinstance(node, ast.Attribute):
            owner = self._callee(node.value)
            if owner is lax and node.attr in vocabulary.REMOVED_FROM_LAX:
                return vocabulary.REMOVED_FROM_LAX[node.attr]
            return getattr(owner, node.attr, None) if isinstance(owner, types.ModuleType) else None
        return None

    def axis_value(self, node: ast.expr) -> Any:
        """What an expression for an axis means; ValueError if nobody knows before it runs."""
        if isinstance(node, ast.Name):
            if self.scope.known(node.id):
                return self.scope.value(node.id)
            return self.axis_value(self.scope.assigned_once(node.id))
        if isinstance(node, (ast.Tuple, ast.List)):
            return tuple(self.axis_value(e) for e in node.elts)
        return ast.literal_eval(node)

    def axis_names(self, node: ast.expr) -> tuple[Any, ...]:
        """The named axes of an axis argument; empty if it has none."""
        try:
            value = self.axis_value(node)
        except (ValueError, SyntaxError):
            return ()
        values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        try:
            return values if any(v in self.body.names.mesh for v in values if not isinstance(v, int)) else ()
        except TypeError:
            return ()

    def required_names(self, node: ast.expr) -> tuple[Any, ...]:
        names = self.axis_names(node)
        if not names:
            raise NotWritable(f"an axis that is not known before it runs: {ast.unparse(node)}")
        return names

    def looked_up(self, call: ast.Call, node: ast.expr) -> str | None:
        """An axis that a function gets as a parameter, looked up in a table when it runs; None if it is another."""
        if not isinstance(node, ast.Name) or node.id not in _parameters(self.found.node):
            return None
        used = [n for e in self.body.calls.get(self.found.span(call), ()) for n in mentioned_names(e.params)]
        self.body.handled(self.found.span(call), tuple(used))
        names = self.body.names
        if all(names.parts(n) == (n,) for n in names.mesh):
            return node.id
        table = ", ".join(f"{literal(n)}: {axes(names.parts(n))}" for n in names.mesh)
        self.body.assignments[f"AXES = {{{table}}}"] = None
        self.body._define("AXES", _AXES)
        return f"AXES[{node.id}]"

    def renamed(self, values: Sequence[Any], bare: bool = True) -> str:
        """An axis argument: named axes by their new names, positions as they are."""
        named = [v for v in values if v in self.body.names.mesh]
        self.body.names.all_parts(named)
        parts = [p for v in values for p in (self.body.names.parts(v) if v in self.body.names.mesh else (v,))]
        return axes(parts) if bare else literal(tuple(parts))

    def _renamed_arguments(self, node: ast.Call, span) -> str | None:
        """Any other call that takes axis names (``jnp.sum``, ``logsumexp``, ``one_hot``): only they change."""
        kinds = {e.primitive.name for e in self.body.calls.get(span, ())}
        if kinds - {"psum", "pmax", "pmin", "axis_index"}:
            return None
        arguments = [*node.args, *(k.value for k in node.keywords)]
        found = {a: names for a in arguments if (names := self.axis_names(a))}
        if not found:
            return None
        self.body.handled(span, tuple(n for names in found.values() for n in names))
        # Functions of jax.numpy read a string letter by letter, so that a tuple it is.
        is_lax = str(getattr(self._callee(node.func), "__module__", "")).startswith("jax._src.lax")
        texts = {a: self.renamed(names, bare=is_lax) for a, names in found.items()}
        return self.rebuilt(node, texts)

    def rebuilt(self, node: ast.Call, replaced: Mapping[ast.expr, str], function: str | None = None) -> str | None:
        """The call with some arguments replaced; None if that is what it is already."""
        start, end = self.found.bounds(node)
        pieces, at = [], start
        if function is not None:
            pieces.append(function)
            at = self.found.bounds(node.func)[1]
        children = [*([node.func] if function is None else []), *node.args, *(k.value for k in node.keywords)]
        for child in children:
            begin, finish = self.found.bounds(child)
            pieces.extend([self.found.text[at:begin], replaced.get(child) or self.text(child)])
            at = finish
            if child in replaced:
                self.dropped.add(child)
        text = "".join([*pieces, self.found.text[at:end]])
        return None if text == self.found.text[start:end] else text

    def bind(self, node: ast.Call, parameters: Sequence[str]) -> dict[str, ast.expr]:
        """Arguments by the names of the parameters."""
        if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
            raise NotWritable(f"arguments in a star: {ast.unparse(node)}")
        bound = dict(zip(parameters, node.args))
        bound.update((k.arg, k.value) for k in node.keywords if k.arg is not None)
        unknown = set(bound) - set(parameters)
        if unknown:
            raise NotWritable(f"the argument {', '.join(sorted(unknown))} of {ast.unparse(node.func)}")
        return bound

    def options(self, bound: Mapping[str, ast.expr], *names: str) -> str:
        """``, axis=1`` for those of the arguments that are given."""
        return "".join(f", {name}={self.text(bound[name])}" for name in names if name in bound)

    def lax(self) -> str:
        """How the file calls ``jax.lax``."""
        self.body.imports["from jax import lax"] = None
        self.body._define("lax", lax)
        return "lax"

    def helper(self, name: str) -> str:
        self.body.helpers[name] = None
        return name

    def drop_function(self, node: ast.Call) -> None:
        """Say that what the call called is not in the new text."""
        self.dropped.add(node.func)


_AXES = object()  # what AXES means


def _parameters(node: ast.FunctionDef | ast.Lambda) -> list[str]:
    arguments = node.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _is_of_jax(callee) -> bool:
    module = str(getattr(callee, "__module__", "") or type(callee).__module__ if callee is not None else "")
    return module.split(".")[0] == "jax"


# ---- what JAX does not differentiate


def _parallel_extremum(helper: str):
    """``lax.pmax`` of one array of numbers that is not held constant."""
    plain = _same_arguments(("x", "axis_name"), "axis_name")

    def rewrite(r: _Rewriter, node: ast.Call):
        bound = r.bind(node, ("x", "axis_name"))
        constant = isinstance(bound["x"], ast.Call) and r._callee(bound["x"].func) is lax.stop_gradient
        kinds = _operand_types(r, node)
        if constant or not kinds or not all(jnp.issubdtype(kind, jnp.inexact) for kind in kinds):
            return plain(r, node)
        if r.looked_up(node, bound["axis_name"]) is not None:
            return plain(r, node)
        x, names = r.text(bound["x"]), r.required_names(bound["axis_name"])
        if len(kinds) == 1:
            return _by_name(r, node, helper, x, names)
        return f"jax.tree.map(lambda a: {_by_name(r, node, helper, 'a', names)}, {x})"

    return rewrite


def _of_one_inexact_array(r: _Rewriter, node: ast.Call) -> bool:
    """Whether a call is one collective of one array of numbers that have derivatives."""
    kinds = _operand_types(r, node)
    return len(kinds) == 1 and jnp.issubdtype(kinds[0], jnp.inexact)


def _operand_types(r: _Rewriter, node: ast.Call) -> list[Any]:
    return [v.aval.dtype for e in r.body.calls.get(r.found.span(node), ()) for v in e.invars]


def _named_reduction(helper: str, in_turn: bool = False, extremum: bool = False):
    """A function of an array and ``axis``.

    Args:
      in_turn: whether positions can be reduced first, and then the names.
    """

    def rewrite(r: _Rewriter, node: ast.Call):
        given = {k.arg for k in node.keywords}
        if len(node.args) not in (1, 2) or not given <= {"axis"} or any(isinstance(a, ast.Starred) for a in node.args):
            return None
        axis = r.bind(node, ("x", "axis")).get("axis")
        values = r.axis_names(axis) if axis is not None else ()
        names = tuple(v for v in values if v in r.body.names.mesh)
        rest = tuple(v for v in values if v not in r.body.names.mesh)
        if not names or (rest and not in_turn) or (extremum and not _of_one_inexact_array(r, node)):
            return None
        x = r.text(node.args[0])
        if rest:
            function = ast.get_source_segment(r.found.text, node.func)
            x = f"{function}({x}, {literal(rest) if len(rest) > 1 else literal(rest[0])})"
        else:
            r.drop_function(node)
        return _by_name(r, node, helper, x, names, axis)

    return rewrite


def _by_name(r: _Rewriter, node, helper, x, names, axis=None):
    r.body.handled(r.found.span(node), names)
    r.lax()
    if axis is not None:
        r.dropped.add(axis)
    else:
        r.drop_function(node)
        r.dropped.update([*node.args[1:], *(k.value for k in node.keywords if k.arg == "axis_name")])
    return f"{r.helper(helper)}({x}, {axes(r.body.names.all_parts(names))})"


def _extremum_method(r: _Rewriter, node: ast.Call):
    """``x.max(axis='i')``"""
    helper = {"max": "max_over", "min": "min_over"}.get(getattr(node.func, "attr", ""))
    if helper is None or r.found.span(node) not in r.body.calls or len(node.args) + len(node.keywords) != 1:
        return None
    if node.keywords and node.keywords[0].arg != "axis":
        return None
    assert isinstance(node.func, ast.Attribute)
    axis = node.args[0] if node.args else node.keywords[0].value
    names = r.axis_names(axis)
    if not names or any(n not in r.body.names.mesh for n in names) or not _of_one_inexact_array(r, node):
        return None
    x = r.text(node.func.value)
    return _by_name(r, node, helper, x, names, axis)


# ---- collectives, one by one


def _same_arguments(parameters: Sequence[str], axis: str):
    """Collectives that take all parts of an axis at once, in any order: psum and its like."""

    def rewrite(r: _Rewriter, node: ast.Call):
        bound = r.bind(node, parameters)
        if (looked_up := r.looked_up(node, bound[axis])) is not None:
            return r.rebuilt(node, {bound[axis]: looked_up})
        names = r.required_names(bound[axis])
        r.body.handled(r.found.span(node), names)
        return r.rebuilt(node, {bound[axis]: r.renamed(names)})

    return rewrite


def _by_one(parameters, axis, otherwise):
    """Collectives that JAX has for one vmapped axis, or for mesh axes, but not for both together."""

    def rewrite(r: _Rewriter, node: ast.Call):
        bound = r.bind(node, parameters)
        names = r.required_names(bound[axis])
        r.body.handled(r.found.span(node), names)
        parts = r.body.names.all_parts(names)
        local = [n for n in names if r.body.names.local[n]]
        if not local or len(parts) == 1:
            return otherwise(r, node, bound, parts, None) or r.rebuilt(node, {bound[axis]: axes(parts)})
        return otherwise(r, node, bound, parts, local)

    return rewrite


def _all_gather(r: _Rewriter, node, bound, parts, local):
    """The parts from the minor to the major one, each gather joining its dimension to the one before."""
    if local is None:
        return None
    groups: list[list[Any]] = []
    is_mesh = {p: p in r.body.names.order for p in parts}
    for part in parts:
        if groups and is_mesh[part] and is_mesh[groups[-1][-1]]:
            groups[-1].append(part)
        else:
            groups.append([part])
    gather = f"{r.lax()}.all_gather"
    first, *more = reversed(groups)
    text = f"{gather}({r.text(bound['x'])}, {axes(first)}{r.options(bound, 'axis', 'tiled')})"
    at = r.options(bound, "axis")
    for group in more:
        text = f"{gather}({text}, {axes(group)}{at}, tiled=True)"
    r.drop_function(node)
    return text


def _one_split_axis(r, names, parts, what) -> tuple[str, str]:
    """The mesh axes and the vmapped axis of the single axis that a helper can do."""
    if len(names) != 1:
        raise NotWritable(f"{what} over several axes")
    return literal(tuple(parts[:-1])), literal(parts[-1])


def _by_helper(name: str, *options: str):
    def rewrite(r: _Rewriter, node, bound, parts, local):
        if local is None:
            return None
        names = r.required_names(bound["axis_name"])
        mesh_axes, own = _one_split_axis(r, names, parts, name)
        r.drop_function(node)
        r.dropped.add(bound["axis_name"])
        return f"{r.helper(name)}({r.text(bound['x'])}, {mesh_axes}, {own}{r.options(bound, *options)})"

    return rewrite


def _all_to_all(r: _Rewriter, node, bound, parts, local):
    """JAX's derivative of an untiled one over devices is wrong where the split and the new dimension differ."""
    split, concat = (r.text(bound[k]) for k in ("split_axis", "concat_axis"))
    if local is not None or "tiled" in bound or split == concat or not set(parts) & set(r.body.names.order):
        return _by_helper("all_to_all", "split_axis", "concat_axis", "tiled")(r, node, bound, parts, local)
    r.drop_function(node)
    r.dropped.add(bound["axis_name"])
    r.body.imports["import jax.numpy as jnp"] = None
    r.body._define("jnp", jnp)
    exchanged = f"{r.lax()}.all_to_all({r.text(bound['x'])}, {axes(parts)}, {split}, {split})"
    return f"jnp.moveaxis({exchanged}, {split}, {concat})"


def _ppermute(r: _Rewriter, node, bound, parts, local):
    names = r.required_names(bound["axis_name"])
    permutations = [
        e.params["perm"] for e in r.body.calls.get(r.found.span(node), ()) if e.primitive.name == "ppermute"
    ]
    _check_order(r, parts)
    if local is None and not r.body.names.local[names[0]]:
        return None
    # Under vmap JAX takes element 0 where no one sends to an element.
    partial = not permutations or any(len(p) < r.body.names.size(names) for p in permutations)
    if local is None and not partial:
        return None
    mesh_axes, own = _one_split_axis(r, names, parts, "ppermute")
    r.drop_function(node)
    r.dropped.add(bound["axis_name"])
    return f"{r.helper('ppermute')}({r.text(bound['x'])}, {mesh_axes}, {own}, {r.text(bound['perm'])})"


def _check_order(r, parts):
    """``lax.ppermute`` counts devices in the order of the mesh, whatever the order of the axes in the call."""
    across = [p for p in parts if p in r.body.names.order]
    if across != [m for m in r.body.names.order if m in across]:
        raise NotWritable("ppermute over mesh axes in another order than the mesh's")


def _pswapaxes(r: _Rewriter, node: ast.Call):
    """``pswapaxes(x, axis_name, axis)`` is an all_to_all."""
    bound = r.bind(node, ("x", "axis_name", "axis"))
    names = r.required_names(bound["axis_name"])
    r.body.handled(r.found.span(node), names)
    parts = r.body.names.all_parts(names)
    if len(parts) == 1 or not any(r.body.names.local[n] for n in names):
        return r.rebuilt(node, {bound["axis_name"]: axes(parts)})
    mesh_axes, own = _one_split_axis(r, names, parts, "pswapaxes")
    r.drop_function(node)
    r.dropped.add(bound["axis_name"])
    x, axis = r.text(bound["x"]), r.text(bound["axis"])
    return f"{r.helper('all_to_all')}({x}, {mesh_axes}, {own}, {axis}, {axis})"


def _pshuffle(r: _Rewriter, node: ast.Call):
    """``pshuffle(x, axis, perm)``: element i of the result comes from ``perm[i]``."""
    bound = r.bind(node, ("x", "axis_name", "perm"))
    names = r.required_names(bound["axis_name"])
    r.body.handled(r.found.span(node), names)
    parts = r.body.names.all_parts(names)
    if len(parts) == 1:
        return r.rebuilt(node, {bound["axis_name"]: axes(parts)})
    pairs = f"list(zip({r.text(bound['perm'])}, range({r.body.names.size(names)})))"
    r.drop_function(node)
    r.dropped.add(bound["axis_name"])
    _check_order(r, parts)
    if not any(r.body.names.local[n] for n in names):
        return f"{r.lax()}.ppermute({r.text(bound['x'])}, {axes(parts)}, {pairs})"
    mesh_axes, own = _one_split_axis(r, names, parts, "pshuffle")
    return f"{r.helper('ppermute')}({r.text(bound['x'])}, {mesh_axes}, {own}, {pairs})"


def _pdot(r: _Rewriter, node: ast.Call):
    positional = ("pos_contract", "pos_batch", "precision", "preferred_element_type")
    bound = r.bind(node, ("x", "y", "axis_name", *positional))
    names = r.required_names(bound["axis_name"])
    r.body.handled(r.found.span(node), names)
    local = tuple(r.body.names.local[n] for n in names if r.body.names.local[n])
    across = tuple(m for m in r.body.names.order if any(m in r.body.names.mesh[n] for n in names))
    r.body.names.all_parts(names)
    helper = "pdot_general" if any(p in bound for p in positional) else "pdot"
    more = (f", local={literal(local)}" if local else "") + (f", across={literal(across)}" if across else "")
    r.drop_function(node)
    r.dropped.add(bound["axis_name"])
    x, y = r.text(bound["x"]), r.text(bound["y"])
    return f"{r.helper(helper)}({x}, {y}{more}{r.options(bound, *positional)})"


def _index_of_extremum(extremum: str):
    def rewrite(r: _Rewriter, node: ast.Call):
        bound = r.bind(node, ("x", "axis_name"))
        names = r.required_names(bound["axis_name"])
        r.body.handled(r.found.span(node), names)
        r.drop_function(node)
        r.dropped.add(bound["axis_name"])
        r.lax()
        return f"{r.helper('index_of')}({r.text(bound['x'])}, {extremum}, {axes(r.body.names.all_parts(names))})"

    return rewrite


def _einsum(r: _Rewriter, node: ast.Call):
    """Contracted names become letters: the vmapped part is gathered (for free), the mesh part summed at the end."""
    spec = node.args[0] if node.args else None
    if not isinstance(spec, ast.Constant) or "{" not in str(spec.value):
        return None
    if any(k.arg not in ("precision", "preferred_element_type", "optimize") for k in node.keywords):
        raise NotWritable(f"an einsum with other arguments: {ast.unparse(node)}")
    parsed = named_einsum.parse(str(spec.value))
    known = {str(n): n for n in r.body.names.mesh}
    mentioned = [known[n] for t in parsed.inputs for n in t.names]
    contracted = [n for n in dict.fromkeys(mentioned) if str(n) not in parsed.output.names]
    r.body.handled(r.found.span(node), tuple(contracted))
    used = {x for t in (*parsed.inputs, parsed.output) for x in t.letters}
    spare = iter(x for x in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if x not in used)
    letters = {n: next(spare) for n in contracted if r.body.names.local[n]}
    terms, operands = [], []
    for term, operand in zip(parsed.inputs, node.args[1:], strict=True):
        text = r.text(operand)
        gathered = [n for n in letters if str(n) in term.names]
        for n in reversed(gathered):
            text = f"{r.lax()}.all_gather({text}, {literal(r.body.names.local[n])})"
        terms.append("".join([*(letters[n] for n in gathered), *term.letters]))
        operands.append(text)
    subscripts = literal(f"{','.join(terms)}->{''.join(parsed.output.letters)}")
    options = "".join(f", {k.arg}={r.text(k.value)}" for k in node.keywords)
    r.body.imports["import jax.numpy as jnp"] = None
    r.body._define("jnp", jnp)
    r.drop_function(node)
    text = f"jnp.einsum({', '.join([subscripts, *operands])}{options})"
    across = [m for m in r.body.names.order if any(m in r.body.names.mesh[n] for n in contracted)]
    return f"{r.lax()}.psum({text}, {axes(across)})" if across else text


def _refuse(r: _Rewriter, node: ast.Call):
    raise NotWritable(f"{ast.unparse(node.func)}")


_HANDLERS: list[tuple[Any, Callable[[_Rewriter, ast.Call], str | None]]] = [
    (lax.psum, _same_arguments(("x", "axis_name"), "axis_name")),
    (lax.pmean, _same_arguments(("x", "axis_name"), "axis_name")),
    (lax.pmax, _parallel_extremum("max_over")),
    (lax.pmin, _parallel_extremum("min_over")),
    (jnp.max, _named_reduction("max_over", in_turn=True, extremum=True)),
    (jnp.min, _named_reduction("min_over", in_turn=True, extremum=True)),
    (jax.scipy.special.logsumexp, _named_reduction("logsumexp_over", in_turn=True)),
    (jax.nn.softmax, _named_reduction("softmax_over")),
    (jax.nn.log_softmax, _named_reduction("log_softmax_over")),
    (lax.axis_index, _same_arguments(("axis_name",), "axis_name")),
    (lax.all_gather, _by_one(("x", "axis_name", "axis", "tiled"), "axis_name", _all_gather)),
    (lax.ppermute, _by_one(("x", "axis_name", "perm"), "axis_name", _ppermute)),
    (
        lax.psum_scatter,
        _by_one(
            ("x", "axis_name", "scatter_dimension", "tiled"),
            "axis_name",
            _by_helper("psum_scatter", "scatter_dimension", "tiled"),
        ),
    ),
    (
        lax.all_to_all,
        _by_one(
            ("x", "axis_name", "split_axis", "concat_axis", "tiled"),
            "axis_name",
            _all_to_all,
        ),
    ),
    (lax.pshuffle, _pshuffle),
    (lax.pswapaxes, _pswapaxes),
    (lax.pbroadcast, _refuse),
    (named_lax.pdot, _pdot),
    (named_lax.pargmax, _index_of_extremum("lax.pmax")),
    (named_lax.pargmin, _index_of_extremum("lax.pmin")),
    (named_lax.pgather, _refuse),
    (named_einsum.xeinsum, _einsum),
    (named_einsum.einsum, _einsum),
    (jnp.einsum, _einsum),
]


def _handler(callee):
    if callee is None:
        return None
    for function, rewrite in _HANDLERS:
        if callee is function:
            return rewrite
    return _refuse if _is_ours(callee) and callable(callee) else None
