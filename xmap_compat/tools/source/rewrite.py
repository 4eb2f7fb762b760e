"""The text of the user's functions with their collectives rewritten for plain JAX.

In the new text, the axes that execute a named axis replace it: its mesh axes, then a ``jax.vmap`` axis of its name.
A call of a collective gets these axes.  If JAX's function does not support them, a helper is called instead.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import inspect
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from xmap_compat import braces as named_einsum
from xmap_compat.core.parameters import mentioned_names
from xmap_compat.tools.source import hazards, helpers, old_names, user_code
from xmap_compat.tools.source.hazards import RuleOver, wrapped
from xmap_compat.tools.source.imports import is_ours
from xmap_compat.tools.source.nested import is_xmap, vmaps
from xmap_compat.tools.source.table import AXIS_PARAMETERS, EINSUMS, Replacement, row_of
from xmap_compat.tools.source.text import NotWritable, axes, literal
from xmap_compat.tools.source.user_code import AxisNames, Piece, Span, dedented, free_reads, offset, renamed, spliced

if TYPE_CHECKING:
    from xmap_compat.tools.plan import CallPlan

# The prefix of names in a new text that are not the user's: helpers, modules and definitions.
OURS = "_xmap_compat_"


def ours(text: str) -> str:
    """Mark an expression that was made here, for a place in the user's text."""
    return renamed(text, {name: OURS + name for name in free_reads(ast.parse(text)).values()})


@dataclasses.dataclass(frozen=True)
class CallOverAxes:
    """A call of a function over axes.

    Attributes:
      given: its arguments, by parameter name.
      over: the named axes.
      across: the mesh axes that execute them.
      local: the ``jax.vmap`` axes that execute them.
      traced: its collectives in the plan's program.
      callee: a function that returns the value of an expression in the call.
    """

    given: Mapping[str, ast.expr]
    over: Sequence[Any]
    across: Sequence[Any]
    local: Sequence[Any]
    traced: Sequence[Any]
    names: AxisNames
    callee: Callable[[ast.expr], Any]


class Rewriting:
    """A rewriting of all functions of a call, in place; into a module, it also names and collects what they need.

    Attributes:
      typed: whether JAX checks which values vary over the mesh.
      inside: calls of contractions that the body differentiates.
      only_values: whether the text must not be differentiated.
      rules: the backward rules that need another text.
      one_by_one: axes whose elements are computed one at a time.
      calls: the collectives of each innermost call of the user.
      handled: calls whose axes were rewritten or may stay, with their axes; for ``functools.partial``, the axes.
      made_here: calls of xmap that are replaced elsewhere.
      nested: in_axes, out_axes and axis_resources of the xmaps inside.  They are vmaps, or, in the module for the
        proof (``proving``), calls of ``nested_xmap_1(function)``, ``nested_xmap_2(function)``, ...
    """

    made_here: frozenset[Span] = frozenset()
    proving = False

    def __init__(self, plan: CallPlan, names: AxisNames, rules: Sequence[RuleOver], typed: bool, keeps_rules=False):
        self.plan, self.names, self.typed, jaxpr = plan, names.with_inner(), typed, plan.staged.placed.program.jaxpr
        # A gradient that is taken inside differentiates a collective differently from a gradient taken outside.
        self.inside = hazards.contractions_inside(jaxpr)
        self.only_values = keeps_rules or bool(self.inside) or (bool(rules) and hazards.differentiates(jaxpr))
        hazards.check(plan, typed or self.only_values)
        self.rules = () if self.only_values else rules
        self.one_by_one = hazards.axes_of_generators(plan)
        self.calls = user_code.calls_of_collectives(jaxpr)
        self.handled: dict[Any, tuple[Any, ...]] = {}
        self.nested: list[Any] = []

    def helper(self, name: str) -> str:
        return name

    def alias(self, name: str, module: types.ModuleType) -> str:
        """The name of a module in the new text."""
        return name

    def expression(self, value: Any, wanted: str) -> str:
        """An expression for a value; functions that are rewritten in place have no defaults to spell."""
        raise NotImplementedError

    def edited(self, piece: Piece, node: ast.AST, new: str) -> None:
        """Note an edit for the reader."""

    def taken_out(self, owner: types.ModuleType, name: str) -> str | None:
        """The name in the new text of an attribute of a user module; None if it may stay in its module."""


class Rewriter:
    """Rewrites a piece of a file."""

    def __init__(self, module: Rewriting, piece: Piece):
        self.module, self.piece, self.names = module, piece, module.names
        self.callee = piece.meaning
        self._edits: list[tuple[int, int, str]] = []
        self._changed: list[Any] = []

    def definition(self, name: str, decorated: bool) -> str:
        """The definition of a function or a class, with the given name and without indentation."""
        node, text = self.piece.node, self.piece.text
        if isinstance(node, ast.Lambda):
            self._edit([node])
            start, end = self.piece.bounds(node)
            given = list(ast.iter_child_nodes(node.args))
            colon = text.index(":", max((self.piece.bounds(n)[1] for n in given), default=start))
            result = self._part(*self.piece.bounds(node.body))
            result = f"({result})" if "\n" in result else result
            return f"def {name}({self._part(start + len('lambda'), colon).strip()}):\n    return {result}"
        start, end = self.piece.bounds(node)
        kept = list(ast.iter_child_nodes(node))
        if not decorated:
            start, kept = offset(text, node.lineno, 0), [n for n in kept if n not in node.decorator_list]
        if isinstance(node, ast.ClassDef):
            # Methods that call xmap are left out of the generated program.
            for method in (n for n in node.body if isinstance(n, ast.FunctionDef)):
                if any(isinstance(n, ast.Call) and is_xmap(self.callee(n.func)) for n in ast.walk(method)):
                    self._put(*self.piece.bounds(method), "")
        self._edit(kept)
        own = next(re.compile(r"\w+[\s\\]+(\w+)").finditer(text, offset(text, node.lineno, node.col_offset)))
        self._put(own.start(1), own.end(1), name)
        return dedented(self._part(text.rfind("\n", 0, start) + 1, end)).rstrip()

    def edits(self) -> list[tuple[int, int, str]]:
        """The edits of the piece in its file: start, end and new text."""
        self._edit([self.piece.node])
        return self._edits

    def expression(self) -> str:
        """The new text of the piece, which is an expression."""
        self._edit([self.piece.node])
        return self._part(*self.piece.bounds(self.piece.node))

    # ---- edits

    def _put(self, start: int, end: int, text: str) -> None:
        self._edits.append((start, end, text))

    def _replace(self, node: Any, text: str) -> None:
        self._put(*self.piece.bounds(node), text)

    def _around(self, node: Any, inner: Any, before: str, after: str) -> None:
        """Insert text before and after a part of an expression."""
        (start, end), (inside, inside_end) = self.piece.bounds(node), self.piece.bounds(inner)
        self._put(start, inside, before)
        self._put(inside_end, end, after)

    def _part(self, start: int, end: int) -> str:
        return spliced(self.piece.text, self._edits, start, end)

    def _source(self, node: Any) -> str:
        return ast.get_source_segment(self.piece.text, node) or ""

    def _edit(self, roots: Sequence[Any]) -> None:
        """Edit the parts of the piece that change, from the outside in."""
        pending = list(roots)
        while pending:
            node = pending.pop(0)
            if isinstance(node, (ast.expr, ast.stmt)):
                start, end = self.piece.bounds(node)
                if any(b <= start and end <= e and b < e for b, e, _ in self._edits):
                    continue
                before = len(self._edits)
                try:
                    self._one(node)
                except NotWritable as reason:
                    raise reason.at(f"{os.path.basename(self.piece.file)}:{node.lineno}") from reason.__cause__
                if len(self._edits) > before:
                    self._changed.append((node, start, end))
            pending.extend(ast.iter_child_nodes(node))
        for node, start, end in self._changed:
            if not any(b <= start and end <= e and n is not node for n, b, e in self._changed):
                self.module.edited(self.piece, node, self._part(start, end).replace(OURS, ""))

    def _one(self, node: ast.AST) -> None:
        if node in self.piece.defaults:
            self._default(node)
        elif isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.Attribute) and (new := self._attribute(node)) is not None:
            self._replace(node, ours(new))

    def _default(self, node: Any) -> None:
        """Write the value of a parameter's default if its names have other values by now, as loop variables do."""
        value, piece = self.piece.defaults[node], self.piece
        names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not piece.is_bound(n)]
        changed = isinstance(node, ast.Name) and piece.has(node.id) and piece.value(node.id) is not value
        if changed or not all(piece.has(name) or name in vars(builtins) for name in names):
            self._replace(node, ours(self.module.expression(value, "default")))

    def _attribute(self, node: ast.Attribute) -> str | None:
        """The new name of an attribute of a module in the generated program; None if the name stays."""
        owner = self.callee(node.value)
        if not isinstance(owner, types.ModuleType):
            return None
        helper = old_names.helper_for(getattr(owner, node.attr, None))
        return helper or old_names.new_name(owner.__name__, node.attr) or self.module.taken_out(owner, node.attr)

    # ---- one call

    def _call(self, node: ast.Call) -> None:
        callee, function = self.callee(node.func), node.func
        if is_xmap(callee):
            return None if self.piece.span(node) in self.module.made_here else self._xmap_inside(node)
        if callee is functools.partial and node.args and takes_axes(inner := self.callee(node.args[0])):
            return self._over_axes(node, inner, node.args[0], node.args[1:])
        if old_names.of_jax(callee) is not callee and self.piece.span(node) in self.module.calls:
            # A function of this package, with a named shape: it asks for indices along the axes.
            self.module.handled[self.piece.span(node)] = ()
            first = self.piece.bounds([*node.args, *node.keywords][0])[0]
            start, end = self.piece.bounds(function)
            self._put(start, start, f"{OURS}sample(")
            return self._put(end, first, ", ")
        callee = old_names.of_jax(callee)
        if callee is None and isinstance(function, ast.Attribute) and function.attr == "defvjp" and len(node.args) == 2:
            return self._attached(node, function.value, node.args[1])
        if any(einsum in (callee, getattr(callee, "__wrapped__", None)) for einsum in EINSUMS):  # also once installed
            return self._einsum(node)
        for k in node.keywords:
            if (name := old_names.new_keyword(callee, k.arg)) is not None:
                start, _ = self.piece.bounds(k)
                self._put(start, start + len(str(k.arg)), name)
        has_method = any(k.arg == "vmap_method" for k in node.keywords)
        if old_names.is_called(callee, "pure_callback") and node.args and not has_method:
            end = max(self.piece.bounds(given)[1] for given in (*node.args, *node.keywords))
            self._put(end, end, ', vmap_method="sequential"')
        if self.piece.span(node) in self.module.calls or takes_axes(callee):
            return self._over_axes(node, callee, function, node.args)
        left = is_ours(callee) and callable(callee) and old_names.helper_for(callee) is None
        if left and not (isinstance(function, ast.Attribute) and self._attribute(function)):
            raise NotWritable(f"a use of {ast.unparse(function)} of xmap_compat")

    def _over_axes(self, node: ast.Call, callee: Any, function: Any, arguments: Sequence[Any]) -> None:
        """A call of a function over axes, or a partial one: change its axes, or call a helper."""
        traced = self.module.calls.get(self.piece.span(node), ())
        if callee is None and isinstance(function, ast.Attribute) and function.attr in vars(jnp):
            callee, arguments = vars(jnp)[function.attr], [function.value, *arguments]  # a method of an array
        row = row_of(callee)
        given = self._given(node, callee, arguments, bool(traced or row))
        parameter = next((p for p in AXIS_PARAMETERS if p in given), None)
        if parameter is None:
            return
        at = given[parameter]
        value = self._axis_value(at, function is not node.func)
        if value is _UNKNOWN:
            if not traced and parameter != "axis_name" and (row is None or parameter == "axis"):
                return
            # Sizes and indices leave no collective in the jaxpr, or none of their own.
            over = tuple(dict.fromkeys(n for e in traced for n in mentioned_names(e.params))) or tuple(self.names.mesh)
            text = None if self.names.same else f"{OURS}axes_of({self._source(at)})"
        else:
            values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
            # Any string is the name of an axis, perhaps of a vmap inside.
            over = tuple(v for v in values if isinstance(v, str) or (v in self.names.mesh and not isinstance(v, int)))
            parts = tuple(p for v in values for p in (self.names.parts(v) if v in over else (v,)))
            self.names.check_distinct([v for v in over if v in self.names.mesh])
            # Functions and methods of jax.numpy read a string letter by letter.
            in_letters = isinstance(value, str) and vars(jnp).get(getattr(callee, "__name__", "")) is callee
            stays = parts == values and not (in_letters and len(value) > 1)
            text = None if stays else ours(axes(parts) if parameter == "axis_name" else literal(parts))
        if not over:
            return
        self.module.handled[self.piece.span(node) if function is node.func else over] = over
        every = [p for n in over for p in self.names.parts(n)]
        across, local = ([p for p in every if (p in self.names.order) is kind] for kind in (True, False))
        if row is not None and row.needed(CallOverAxes(given, over, across, local, traced, self.names, self.callee)):
            return self._helped(node, function, row, next(iter(given.values())), at, text or self._source(at))
        if callee is lax.axis_index and len(over) > 1 and text is not None and value is not _UNKNOWN:
            return self._replace(node, self._index_over(function, over))
        if text is not None:
            self._replace(at, text)

    def _given(self, node: ast.Call, callee: Any, arguments: Sequence[Any], needed: bool) -> dict[str, Any]:
        """The arguments of a call, by parameter name; if unknown, an argument that names an axis is ``axis``."""
        keywords = {str(k.arg): k.value for k in node.keywords}
        if any(isinstance(a, ast.Starred) for a in arguments) or "None" in keywords:
            if needed:
                raise NotWritable(f"unpacked arguments: {ast.unparse(node)}: write them out")
            return {}
        try:
            return dict(inspect.signature(callee).bind_partial(*arguments, **keywords).arguments)
        except (TypeError, ValueError):
            named = [a for a in arguments if isinstance(v := self._axis_value(a), str) and v in self.names.mesh]
            return {**dict(zip(["axis"], named)), **keywords}

    def _helped(self, node: ast.Call, function: Any, row: Replacement, given: Any, at: ast.expr, text: str) -> None:
        """Call a helper instead of the function.

        Args:
          given: the first argument.
          at: the axes.
        """
        helper = "pdot_inside" if self.piece.span(node) in self.module.inside else row.helper
        parameters, own = (inspect.signature(f).parameters for f in (getattr(helpers, helper), row.function))
        default = {name: repr(own[name].default) for name in own.keys() - parameters.keys()}
        useless = [k for k in node.keywords if ast.unparse(k.value) == default.get(str(k.arg))]
        if self.callee(function) is None and len(node.args) + len(node.keywords) - len(useless) == 1:  # a method
            return self._around(node, function.value, f"{OURS}{helper}(", f", {text})")
        if self.callee(function) is None or len(node.args) > len(parameters) + (function is not node.func):
            raise NotWritable(f"too many arguments of {ast.unparse(function)}: write what they do as a step of its own")
        self._replace(function, OURS + helper)
        self._replace(at, text)
        called = {given: next(iter(parameters)), at: "axes"}
        for k in node.keywords:
            start, end = self.piece.bounds(k)
            if k in useless and node.args:
                self._put(self.piece.text.rindex(",", 0, start), end, "")
            elif k.value in called and k.arg not in parameters:
                self._put(start, start + len(str(k.arg)), called[k.value])
            elif k.arg not in parameters:
                raise NotWritable(f"the argument {k.arg} of {ast.unparse(function)}: write it as a step of its own")

    def _index_over(self, function: Any, names: Sequence[Any]) -> str:
        """The index over several axes, the major one first.  The axes that execute one named axis stay together.

        The terms are added from the minor axis on, as JAX does.
        """
        if others := [name for name in names if name not in self.names.mesh]:
            raise NotWritable(f"an index over several axes, of which the call does not map {others[0]}: split it")
        parts = [self.names.parts(n) for n in names]
        sizes = [f" * {OURS}lax.axis_size({axes(sum(parts[k:], ()))})" for k in range(1, len(parts))]
        terms = [f"{self._source(function)}({axes(own)}){size}" for own, size in zip(parts, [*sizes, ""])]
        return f"({' + '.join(reversed(terms))})"

    def _einsum(self, node: ast.Call) -> None:
        """Contracted names that are vmapped become letters.  For those that devices hold, the result is summed."""
        spec: Any = node.args[0] if node.args else None
        if not isinstance(spec, ast.Constant) or "{" not in str(spec.value):
            return
        parsed = named_einsum.parse(str(spec.value))
        known = {str(n): n for n in self.names.mesh}
        mentioned = [known[n] for t in parsed.inputs for n in t.names if n in known]
        contracted = [n for n in dict.fromkeys(mentioned) if str(n) not in parsed.output.names]
        self.names.check_distinct(contracted)
        own = self.names.local
        used = {x for t in (*parsed.inputs, parsed.output) for x in t.letters}
        spare = iter(x for x in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if x not in used)
        letters = {n: next(spare) for n in contracted if own[n]}
        terms = ["".join([*(letters[n] for n in letters if str(n) in t.names), *t.letters]) for t in parsed.inputs]
        across = tuple(m for m in self.names.order if any(m in self.names.mesh[n] for n in contracted))
        local = {letters[n]: own[n] for n in letters}
        options = f", local={literal(local)}" * bool(local) + f", across={literal(across)}" * bool(across)
        self.module.handled[self.piece.span(node)] = tuple(mentioned)
        helper = "einsum_inside" if self.piece.span(node) in self.module.inside else "einsum_over"
        self._replace(node.func, OURS + helper)
        self._replace(spec, literal(f"{','.join(terms)}->{''.join(parsed.output.letters)}"))
        _, end = self.piece.bounds(node.args[-1])
        self._put(end, end, options)

    def _xmap_inside(self, node: ast.Call) -> None:
        """``xmap(f, in_axes, out_axes)`` in a body, as a vmap for each of its axes."""
        given = dict(zip(("fun", "in_axes", "out_axes"), node.args))
        given.update({str(k.arg): k.value for k in node.keywords})
        if not {"fun", "in_axes", "out_axes"} <= set(given) <= {"fun", "in_axes", "out_axes", "axis_resources"}:
            raise NotWritable("a nested call of xmap with other options: give it axes and axis_resources only")
        function = given.pop("fun")
        try:
            options = {name: self._evaluated(x) for name, x in given.items()}
        except ValueError:
            raise NotWritable("a nested call of xmap whose axes are not known before it runs: write them") from None
        before, after = ours(vmaps(self.module, "function", **options)).split(f"{OURS}function")
        self._around(node, function, before, after)

    def _attached(self, node: ast.Call, owner: ast.expr, backward: ast.expr) -> None:
        """``f.defvjp(fwd, bwd)`` in the text of a function."""
        of_module = isinstance(self.piece.node, ast.Expr)  # the piece is a statement of a module
        around = self.piece.tree if of_module else self.piece.node
        defs = {n.name: n for n in ast.walk(around) if isinstance(n, ast.FunctionDef)}
        primal = defs.get(getattr(owner, "id", ""))
        rule = backward if isinstance(backward, ast.Lambda) else defs.get(getattr(backward, "id", ""))
        if primal is None or rule is None:
            return
        over = wrapped(self.module, self.piece.file, [primal, rule])
        if over.options:
            self._around(backward, backward, *ours(over.of("rule")).split(f"{OURS}rule"))
        if over.differ:
            _, end = self.piece.bounds(node)
            owned = f"{primal.name} = {OURS}varying_over({primal.name}, {ours(over.axes)})"
            self._put(end, end, f"\n{' ' * node.col_offset}{owned}")

    # ---- values

    def _evaluated(self, node: ast.expr) -> Any:
        """The value of an expression if it is known before the function runs; else a ValueError."""
        if any(isinstance(n, ast.Name) and self.piece.is_bound(n) for n in ast.walk(node)):
            raise ValueError
        names = {**self.piece.globals, **self.piece.closure}
        try:
            return eval(compile(ast.Expression(node), "<axes>", "eval"), names)
        except Exception as error:
            raise ValueError from error

    def _axis_value(self, node: ast.expr | None, evaluated: bool = False) -> Any:
        """The axes and positions of an axis argument; ``_UNKNOWN`` if they are unknown before the function runs."""
        if isinstance(node, (ast.Tuple, ast.List)):
            values = [self._axis_value(e, evaluated) for e in node.elts]
            return _UNKNOWN if _UNKNOWN in values else tuple(values)
        if isinstance(node, ast.Name) and not self.piece.known(node):
            return self._axis_value(self.piece.assigned_inside(node.id))
        try:
            constant = evaluated or isinstance(node, (ast.Name, ast.Constant, ast.UnaryOp))
            value = self._evaluated(node) if constant and node is not None else _UNKNOWN
            hash(tuple(value) if isinstance(value, list) else value)
            return value
        except (ValueError, TypeError):
            return _UNKNOWN


_UNKNOWN = object()


def takes_axes(callee: Any) -> bool:
    """Whether a function is a JAX function that takes axis names and does not bind them."""
    if callee is None or callee is jax.vmap or callee is jax.pmap:
        return False
    module = getattr(callee, "__module__", None) or type(callee).__module__
    return str(module).split(".")[0] == "jax" or row_of(callee) is not None
