"""The text of the user's functions with their collectives rewritten for plain JAX.

Inside, an axis is called by what executes it: its mesh axes, then the axis of a ``jax.vmap`` that has its own name.
A call of a collective gets those names; where JAX's function cannot do it over them, a helper is called instead.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import linecache
import math
import os
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from xmap_compat import _jax, vocabulary
from xmap_compat import braces as named_einsum
from xmap_compat import lax as named_lax
from xmap_compat.core.rules.parameters import mentioned_names
from xmap_compat.core.rules.table import RULES
from xmap_compat.tools.source.text import NotWritable, axes, literal

if TYPE_CHECKING:
    from xmap_compat.tools.source.module import Module

Span = tuple[Any, ...]  # file, line, column, end line, end column


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
        return Found(file, text, ast.parse(text), None)
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
    return isinstance(body, ast.Constant) and body.value in code.co_consts and not code.co_names


class Scope:
    """What the names in a piece of a file mean.

    Args:
      globals_: of its module.
      closure: the variables of the functions around it that are known.
    """

    def __init__(self, found: Found, globals_: Mapping[str, Any], closure: Mapping[str, Any] | None = None):
        self.found, self.globals, self.closure = found, globals_, closure or {}
        self.bound = _bound_names(found.node)

    @classmethod
    def of(cls, fun: types.FunctionType, found: Found) -> Scope:
        closure = {}
        for name, cell in zip(fun.__code__.co_freevars, fun.__closure__ or ()):
            try:
                closure[name] = cell.cell_contents
            except ValueError:
                continue
        return cls(found, fun.__globals__, closure)

    def free_names(self, dropped: set[ast.AST]) -> list[str]:
        """Names that are read and not bound, without those in parts that are not kept."""
        names = [
            n.id
            for n in _walk_without(self.found.node, dropped)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and not self.is_bound(n.id)
        ]
        own = getattr(self.found.node, "name", None)
        return [n for n in dict.fromkeys(names) if n != own and (self.known(n) or not hasattr(builtins, n))]

    def is_bound(self, name: str) -> bool:
        return name in self.bound and name not in self.closure

    def value(self, name: str) -> Any:
        if name in self.closure:
            return self.closure[name]
        if name in self.globals:
            return self.globals[name]
        raise NotWritable(f"{name}, which is not known")

    def known(self, name: str) -> bool:
        return not self.is_bound(name) and (name in self.closure or name in self.globals)

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


def _is_target(node, name) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(t, ast.Name) and t.id == name for t in targets)


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


# ------------------------------------------------------------------------------ rewriting


class Rewriter:
    """The text of a piece of a file with its calls of collectives rewritten.

    Attributes:
      dropped: parts of the syntax tree that are not in the new text.
      renamed: names of the user's that are called otherwise in the module.
    """

    def __init__(self, module: Module, found: Found, scope: Scope, renamed: Mapping[str, str] | None = None):
        self.module, self.found, self.scope = module, found, scope
        self.names = module.names
        self.renamed = renamed or {}
        self.dropped: set[ast.AST] = set()
        self._kept: set[ast.AST] = set()
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
        end = self.found.bounds(node)[1]
        lines = textwrap.dedent(self._spliced(start, end, [node])).rstrip().split("\n")
        if name == node.name:
            return lines
        keyword = "class" if isinstance(node, ast.ClassDef) else "def"
        head = f"{keyword} {node.name}"
        return [line.replace(head, f"{keyword} {name}", 1) if line.startswith(head) else line for line in lines]

    def text(self, node: ast.expr) -> str:
        """The new text of an expression."""
        if isinstance(node, ast.Call) and (new := self._call(node)) is not None:
            return new
        if (renamed := self._renamed_name(node)) is not None:
            return renamed
        start, end = self.found.bounds(node)
        return self._spliced(start, end, list(ast.iter_child_nodes(node)))

    def _renamed_name(self, node) -> str | None:
        if isinstance(node, ast.Name) and node.id in self.renamed and not self.scope.is_bound(node.id):
            return self.renamed[node.id]
        return None

    def _spliced(self, start, end, roots) -> str:
        """The text between two positions, with the outermost expressions in it that change replaced."""
        pieces, at = [], start
        for text, (begin, finish) in sorted(self._outermost_changed(roots), key=lambda c: c[1][0]):
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
            new = self._call(node) if isinstance(node, ast.Call) else self._renamed_name(node)
            if new is not None:
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
            self.module.edited(self.found, node, new)
        return new

    def _new_call(self, node):
        callee = self.callee(node.func)
        if callee is xmap_or_none():
            return self._nested(node)
        if callee is None and (attached := self._attached(node)) is not None:
            return attached
        if any(callee is einsum for einsum in _EINSUMS):
            return self._einsum(node)
        row = next((row for row in TABLE if row.function is callee), None) if callee is not None else None
        if row is None and callee is None:
            row = self._method(node)
        if row is not None:
            return self._collective(node, row)
        if self.module.calls.get(self.found.span(node)) or _is_of_jax(callee):
            return self._other(node, callee)
        if _is_ours(callee) and callable(callee):
            raise NotWritable(f"a use of {ast.unparse(node.func)} of xmap_compat")
        return None

    def callee(self, node: ast.expr) -> Any:
        """The object that a name or an attribute of a module means, or None."""
        if isinstance(node, ast.Name):
            return self.scope.value(node.id) if self.scope.known(node.id) else None
        if isinstance(node, ast.Attribute):
            owner = self.callee(node.value)
            if owner is lax and node.attr in vocabulary.REMOVED_FROM_LAX:
                return vocabulary.REMOVED_FROM_LAX[node.attr]
            return getattr(owner, node.attr, None) if isinstance(owner, types.ModuleType) else None
        return None

    def _method(self, node: ast.Call) -> Row | None:
        """``x.max(axis='i')`` of one array that has derivatives."""
        helper = {"max": "max_over", "min": "min_over"}.get(getattr(node.func, "attr", ""))
        return _METHODS.get(helper or "") if self.found.span(node) in self.module.calls else None

    def _collective(self, node: ast.Call, row: Row) -> str | None:
        """A call of a collective over axes that are known, or that are looked up when it runs."""
        bound = self._bind(node, row)
        if (at := bound.get(row.axis)) is None:
            return None
        names = self._names_in_scope(at)
        span = self.found.span(node)
        if names is None and row.axis == "axis" and span not in self.module.calls:
            return None
        if names is not None and not names:
            return None
        text = self._looked_up(at) if names is None else self._static(at, row)
        names = self._observed(node) if names is None else names
        self.module.handled.add(span)
        helper = row.helper_for(self, node, bound, names)
        if helper is None and row.function is lax.axis_index and len(names) > 1 and not self.names.is_same(names):
            return self._index_over(node, at, names)
        replaced = {at: text} if text is not None else {}
        return self._rebuilt(node, replaced, self._helper(node, helper), row if helper else None)

    def _helper(self, node: ast.Call, name: str | None) -> str | None:
        if name is None:
            return None
        self.dropped.add(node.func)
        return self.module.helper(name)

    def _observed(self, node) -> tuple[Any, ...]:
        """The named axes of a call in this trace."""
        eqns = self.module.calls.get(self.found.span(node), ())
        found = dict.fromkeys(n for e in eqns for n in mentioned_names(e.params))
        if not found:
            # Sizes and indices leave no collective, or none of their own.
            found = dict.fromkeys(self.names.mesh)
        return tuple(found)

    def _looked_up(self, at) -> str | None:
        if self.names.same:
            return None
        self._kept.add(at)
        return f"{self.module.helper('axes_of')}({self.text(at)})"

    def _static(self, at, row) -> str:
        values = self._axis_values(at)
        self.names.all_parts([v for v in values if v in self.names.mesh])
        parts = [p for v in values for p in (self.names.parts(v) if v in self.names.mesh else (v,))]
        bare = len(parts) == 1 and row.bare
        return axes(parts) if bare else literal(tuple(parts))

    def _index_over(self, node, at, names) -> str:
        """The index over several axes, the major one first: what executes one of them goes together."""
        self.names.all_parts(names)
        self.dropped.add(at)
        function = ast.get_source_segment(self.found.text, node.func)
        texts = [f"{function}({axes(self.names.parts(n))})" for n in names]
        sizes = [self.names.size(names[k + 1 :]) for k in range(len(names))]
        return f"({' + '.join(f'{t} * {size}' if size != 1 else t for t, size in zip(texts, sizes))})"

    def _other(self, node: ast.Call, callee) -> str | None:
        """Any other call that takes axis names (``jnp.sum``, ``one_hot``): only they change."""
        eqns = self.module.calls.get(self.found.span(node), ())
        if {e.primitive.name for e in eqns} - {"psum", "pmax", "pmin", "axis_index"}:
            return None
        arguments = [*node.args, *(k.value for k in node.keywords)]
        replaced: dict[ast.expr, str] = {}
        row = _OTHER_LAX if _is_of_lax(callee) else _OTHER
        for argument in arguments:
            if self.axis_names(argument):
                replaced[argument] = self._static(argument, row)
        at = next((k.value for k in node.keywords if k.arg in ("axis", "axis_name")), None)
        if not replaced and eqns and at is not None and self.axis_names(at) is None:
            text = self._looked_up(at)
            replaced = {at: text} if text is not None else {}
            self.module.handled.add(self.found.span(node))
        if not replaced:
            return None
        self.module.handled.add(self.found.span(node))
        return self._rebuilt(node, replaced)

    def _einsum(self, node: ast.Call) -> str | None:
        """Contracted names become letters where they are vmapped; what devices hold is summed."""
        spec = node.args[0] if node.args else None
        if not isinstance(spec, ast.Constant) or "{" not in str(spec.value):
            return None
        parsed = named_einsum.parse(str(spec.value))
        known = {str(n): n for n in self.names.mesh}
        mentioned = [known[n] for t in parsed.inputs for n in t.names if n in known]
        contracted = [n for n in dict.fromkeys(mentioned) if str(n) not in parsed.output.names]
        self.names.all_parts(contracted)
        own = self.names.local
        used = {x for t in (*parsed.inputs, parsed.output) for x in t.letters}
        spare = iter(x for x in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if x not in used)
        letters = {n: next(spare) for n in contracted if own[n]}
        terms = ["".join([*(letters[n] for n in letters if str(n) in t.names), *t.letters]) for t in parsed.inputs]
        subscripts = literal(f"{','.join(terms)}->{''.join(parsed.output.letters)}")
        across = tuple(m for m in self.names.order if any(m in self.names.mesh[n] for n in contracted))
        self.module.handled.add(self.found.span(node))
        self.dropped.add(node.func)
        operands = [subscripts, *map(self.text, node.args[1:])]
        local = {letters[n]: own[n] for n in letters}
        options = [f"local={literal(local)}"] * bool(local) + [f"across={literal(across)}"] * bool(across)
        options += [f"{k.arg}={self.text(k.value)}" for k in node.keywords]
        return f"{self.module.helper('einsum_over')}({', '.join([*operands, *options])})"

    # ---- xmaps inside

    def _nested(self, node: ast.Call) -> str:
        """``xmap(f, in_axes, out_axes)`` in a body, as a vmap for each of its axes."""
        given = dict(zip(("fun", "in_axes", "out_axes"), node.args))
        given.update({str(k.arg): k.value for k in node.keywords})
        if not {"fun", "in_axes", "out_axes"} <= set(given) <= {"fun", "in_axes", "out_axes", "axis_resources"}:
            raise NotWritable("a nested call of xmap with other options")
        function, *specs = (given.pop(k) for k in ("fun", "in_axes", "out_axes"))
        try:
            values = [self._evaluated(x) for x in (*specs, *given.values())]
        except Exception:
            raise NotWritable("a nested call of xmap whose axes are not known before it runs") from None
        self.dropped.update([*specs, *given.values(), node.func])
        return self.module.vmaps(self.text(function), *values)

    def _evaluated(self, node: ast.expr) -> Any:
        names = {**self.scope.globals, **self.scope.closure}
        if any(isinstance(n, ast.Name) and self.scope.is_bound(n.id) for n in ast.walk(node)):
            raise ValueError(ast.unparse(node))
        return eval(compile(ast.Expression(node), "<axes>", "eval"), names)

    # ---- backward rules

    def _attached(self, node: ast.Call) -> str | None:
        """``f.defvjp(fwd, bwd)`` in the text of a function."""
        if not isinstance(node.func, ast.Attribute) or node.func.attr != "defvjp" or len(node.args) != 2:
            return None
        owner, backward = node.func.value, node.args[1]
        primal = self._local_def(owner)
        rule = backward if isinstance(backward, ast.Lambda) else self._local_def(backward)
        if primal is None or rule is None:
            return None
        wrapped, axes_text = self.backward_over(self.text(backward), self.found.at(primal), rule, ())
        text = self._rebuilt(node, {backward: wrapped})
        if axes_text is None:
            return text
        statement = text or ast.get_source_segment(self.found.text, node)
        owned = f"{primal.name} = {self.module.helper('varying_over')}({primal.name}, {axes_text})"
        return f"{statement}\n{' ' * node.col_offset}{owned}"

    def _local_def(self, node):
        defs = [n for n in ast.walk(self.found.node) if isinstance(n, ast.FunctionDef)]
        return next((n for n in defs if isinstance(node, ast.Name) and n.name == node.id), None)

    def backward_over(self, text: str, primal: Found, rule: Any, nondiff: tuple[int, ...]) -> tuple[str, str | None]:
        """A backward rule for the cotangents of plain JAX; the same text if there are no others.

        Args:
          primal: where the function is.
          rule: the node of its backward rule.

        Returns:
          The rule, and the axes of ``jax.vmap`` and others along which the arguments must differ.
        """
        nodes = [primal.node, rule]
        over = self.module.rule_at(self.found.file, [(n.lineno, n.end_lineno) for n in nodes])
        if over is None:
            return text, None
        typed = self.module.typed
        found = self._axes_of_rule(over, nodes, nondiff)
        differ = over.results == "first" and not typed and any(self.names.local[n] for n in over.names)
        options = "".join(f", {key}={literal(value)}" for key, value in over.options(typed).items())
        if options:
            text = (
                f"{self.module.helper('typed_backward_over' if typed else 'backward_over')}({text}, {found}{options})"
            )
        return text, found if differ else None

    def _axes_of_rule(self, over, nodes, nondiff) -> str:
        """The axes of a rule's collectives, or a function of the arguments that are not differentiated."""
        spans = {span for span in over.spans if span[0] == self.found.file}
        calls = [n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Call) and self.found.span(n) in spans]
        parameters = [a.arg for a in (*nodes[1].args.posonlyargs, *nodes[1].args.args)][: len(nondiff)]
        for call in calls:
            for at in [*call.args, *(k.value for k in call.keywords)]:
                if isinstance(at, ast.Name) and at.id in parameters:
                    self.module.helper("axes_of")
                    return f"lambda {', '.join(parameters)}: axes_of({at.id})"
                own = [a.arg for a in nodes[0].args.args]
                if isinstance(at, ast.Name) and at.id in own and own.index(at.id) in nondiff:
                    self.module.helper("axes_of")
                    return f"lambda {', '.join(parameters)}: axes_of({parameters[nondiff.index(own.index(at.id))]})"
        parts = literal(tuple(p for n in over.names for p in self.names.parts(n)))
        for call in calls:
            row = next((row for row in TABLE if row.function is self.callee(call.func)), None)
            at = self._bind(call, row)[row.axis] if row is not None else call.func
            if isinstance(at, ast.Name) and self.axis_names(at) is None:
                # A variable of the function that makes the rule.
                self.module.helper("axes_of")
                return f"axes_of({at.id})"
        return parts

    # ---- axes

    def axis_names(self, node: ast.expr) -> tuple[Any, ...] | None:
        """The named axes of an axis argument; empty if it has none, None if nobody knows before it runs."""
        try:
            values = self._axis_values(node)
        except (ValueError, SyntaxError):
            return None
        try:
            return tuple(v for v in values if v in self.names.mesh and not isinstance(v, int))
        except TypeError:
            return ()

    def _names_in_scope(self, node: ast.expr) -> tuple[Any, ...] | None:
        """The same of a collective, with names of axes that vmaps and xmaps inside bind: any string is one."""
        names = self.axis_names(node)
        if names != ():
            return names
        return tuple(v for v in self._axis_values(node) if isinstance(v, str))

    def _axis_values(self, node) -> tuple[Any, ...]:
        value = self._axis_value(node)
        return tuple(value) if isinstance(value, (tuple, list)) else (value,)

    def _axis_value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            if self.scope.known(node.id):
                return self.scope.value(node.id)
            return self._axis_value(self.scope.assigned_once(node.id))
        if isinstance(node, (ast.Tuple, ast.List)):
            return tuple(self._axis_value(e) for e in node.elts)
        return ast.literal_eval(node)

    # ---- calls as text

    def _bind(self, node: ast.Call, row: Row) -> dict[str, ast.expr]:
        """Arguments by the names of the parameters."""
        if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
            raise NotWritable(f"arguments in a star: {ast.unparse(node)}")
        owner = [node.func] if row.method else []
        bound = dict(zip(row.parameters, [*owner, *node.args]))
        bound.update((k.arg, k.value) for k in node.keywords if k.arg is not None)
        return bound

    def _rebuilt(
        self, node: ast.Call, replaced: Mapping[ast.expr, str], function: str | None = None, row: Row | None = None
    ) -> str | None:
        """The call with some arguments replaced; None if that is what it is already."""
        start, end = self.found.bounds(node)
        if row is not None:
            unknown = [k.arg for k in node.keywords if k.arg not in row.parameters]
            if unknown:
                raise NotWritable(f"the argument {', '.join(map(str, unknown))} of {ast.unparse(node.func)}")
            if row.method:
                assert isinstance(node.func, ast.Attribute)
                (at,) = [*node.args, *(k.value for k in node.keywords)]
                self.dropped.update(set(replaced) - self._kept)
                self.dropped.discard(node.func)
                return f"{function}({self.text(node.func.value)}, {replaced.get(at) or self.text(at)})"
        pieces, done = [], start
        if function is not None:
            pieces.append(function)
            done = self.found.bounds(node.func)[1]
        children: list[Any] = [*([node.func] if function is None else []), *node.args, *node.keywords]
        for child in children:
            value = child.value if isinstance(child, ast.keyword) else child
            begin, finish = self.found.bounds(child)
            text = replaced[value] if value in replaced else self.text(value)
            if isinstance(child, ast.keyword):
                keyword = "axes" if row is not None and child.arg == row.axis else child.arg
                text = f"{keyword}={text}"
            pieces.extend([self.found.text[done:begin], text])
            done = finish
            if value in replaced and value not in self._kept:
                self.dropped.add(value)
        text = "".join([*pieces, self.found.text[done:end]])
        return None if text == self.found.text[start:end] else text


def xmap_or_none() -> Any:
    """The function that users call xmap, which imports the tools."""
    return getattr(sys.modules.get("xmap_compat.api"), "xmap", _is_of_jax)


def _is_of_jax(callee) -> bool:
    module = str(getattr(callee, "__module__", "") or type(callee).__module__ if callee is not None else "")
    return module.split(".")[0] == "jax"


def _is_of_lax(callee) -> bool:
    """Functions of ``jax.numpy`` read a string letter by letter, so that a tuple it is; those of ``lax`` do not."""
    return callee is not None and vars(lax).get(getattr(callee, "__name__", "")) is callee


def _is_ours(value) -> bool:
    return str(getattr(value, "__module__", "")).split(".")[0] == "xmap_compat"


# --------------------------------------------------------------------------- the table


@dataclasses.dataclass(frozen=True)
class Row:
    """A function over axes.

    Attributes:
      parameters: their names; ``axis`` is the one that takes axes.
      helper: what does it where JAX does not.
      needed: whether that is so, of the rewriter, the call, its arguments and its axes.
      bare: whether one axis may stand without a tuple.
      method: whether the function is a method, of its first argument.
    """

    function: Any
    parameters: tuple[str, ...]
    axis: str
    helper: str | None = None
    needed: Callable[..., bool] = lambda *_: True
    bare: bool = True
    method: bool = False

    def helper_for(self, r: Rewriter, node: ast.Call, bound: Mapping[str, ast.expr], names: Sequence[Any]):
        return self.helper if self.helper is not None and self.needed(r, node, bound, names) else None


def _kinds(r: Rewriter, names) -> tuple[list[Any], list[Any]]:
    parts = [p for n in names for p in r.names.parts(n)]
    return [p for p in parts if p in r.names.order], [p for p in parts if p not in r.names.order]


def _mixed(r: Rewriter, node, bound, names) -> bool:
    across, local = _kinds(r, names)
    return len(local) > 1 or bool(across and local)


def _permuted(r: Rewriter, node, bound, names) -> bool:
    across, local = _kinds(r, names)
    in_order = across == [m for m in r.names.order if m in across]
    permutations = [
        e.params["perm"] for e in r.module.calls.get(r.found.span(node), ()) if e.primitive.name == "ppermute"
    ]
    # Under vmap JAX takes element 0 where no one sends to an element.
    known = bool(permutations) and all(n in r.names.sizes for n in names)
    partial = bool(local) and not (known and all(len(p) == r.names.size(names) for p in permutations))
    return _mixed(r, node, bound, names) or partial or not in_order


def _exchanged(r: Rewriter, node, bound, names) -> bool:
    """An untiled one is wrong in JAX where the split and the new dimension differ: its derivative, or under vmap it."""
    same = bound.keys() >= {"split_axis", "concat_axis"} and r.text(bound["split_axis"]) == r.text(bound["concat_axis"])
    untiled = "tiled" not in bound or getattr(bound["tiled"], "value", None) is False
    _, local = _kinds(r, names)
    return _mixed(r, node, bound, names) or (untiled and (bool(local) or not same))


def _differentiable(r: Rewriter, node, bound, names) -> bool:
    """Extrema of numbers that are not held constant."""
    kinds = [v.aval.dtype for e in r.module.calls.get(r.found.span(node), ()) for v in e.invars]
    x = next(iter(bound.values()))
    constant = isinstance(x, ast.Call) and r.callee(x.func) is lax.stop_gradient
    inside = not any(n in r.names.mesh for n in names)  # of a vmap inside, whose collectives are gone
    return not constant and (bool(kinds) or inside) and all(jnp.issubdtype(kind, jnp.inexact) for kind in kinds)


def _extremum(function, helper, parameters, axis):
    return Row(function, parameters, axis, helper, _differentiable, bare=axis == "axis_name")


_POSITIONAL = ("pos_contract", "pos_batch", "precision", "preferred_element_type")

TABLE = (
    Row(lax.psum, ("x", "axis_name"), "axis_name"),
    Row(lax.pmean, ("x", "axis_name"), "axis_name"),
    Row(lax.axis_index, ("axis_name",), "axis_name"),
    Row(lax.axis_size, ("axis_name",), "axis_name"),
    _extremum(lax.pmax, "max_over", ("x", "axis_name"), "axis_name"),
    _extremum(lax.pmin, "min_over", ("x", "axis_name"), "axis_name"),
    _extremum(jnp.max, "max_over", ("a", "axis"), "axis"),
    _extremum(jnp.min, "min_over", ("a", "axis"), "axis"),
    Row(jax.scipy.special.logsumexp, ("a", "axis"), "axis", "logsumexp_over"),
    Row(jax.nn.logsumexp, ("a", "axis"), "axis", "logsumexp_over"),
    Row(jax.nn.softmax, ("x", "axis"), "axis", "softmax_over"),
    Row(jax.nn.log_softmax, ("x", "axis"), "axis", "log_softmax_over"),
    Row(lax.all_gather, ("x", "axis_name", "axis", "tiled"), "axis_name", "all_gather", _mixed),
    Row(lax.ppermute, ("x", "axis_name", "perm"), "axis_name", "ppermute", _permuted),
    Row(lax.pshuffle, ("x", "axis_name", "perm"), "axis_name", "pshuffle", _permuted),
    Row(lax.pbroadcast, ("x", "axis_name", "source"), "axis_name", "pbroadcast"),
    Row(lax.psum_scatter, ("x", "axis_name", "scatter_dimension", "tiled"), "axis_name", "psum_scatter", _mixed),
    Row(
        lax.all_to_all,
        ("x", "axis_name", "split_axis", "concat_axis", "tiled"),
        "axis_name",
        "all_to_all",
        _exchanged,
    ),
    Row(lax.pswapaxes, ("x", "axis_name", "axis"), "axis_name", "pswapaxes", _mixed),
    Row(named_lax.pdot, ("x", "y", "axis_name", *_POSITIONAL), "axis_name", "pdot"),
    Row(named_lax.pgather, ("src", "idx", "axes"), "axes", "pgather", bare=False),
    Row(named_lax.pargmax, ("x", "axis_name"), "axis_name", "pargmax"),
    Row(named_lax.pargmin, ("x", "axis_name"), "axis_name", "pargmin"),
)
_METHODS = {
    helper: Row(None, ("x", "axis"), "axis", helper, _differentiable, bare=False, method=True)
    for helper in ("max_over", "min_over")
}
_OTHER, _OTHER_LAX = Row(None, (), "axis", bare=False), Row(None, (), "axis")
_EINSUMS = (named_einsum.xeinsum, named_einsum.einsum, jnp.einsum)
