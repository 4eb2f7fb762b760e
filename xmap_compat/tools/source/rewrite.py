"""The text of the user's functions with their collectives rewritten for plain JAX.

Inside, an axis is called by what executes it: its mesh axes, then the axis of a ``jax.vmap`` that has its own name.
A call of a collective gets those names; where JAX's function cannot do it over them, a helper is called instead.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import os
import textwrap
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jax import lax

from xmap_compat import braces as named_einsum
from xmap_compat import vocabulary
from xmap_compat.annotations import check_type
from xmap_compat.core.rules.parameters import mentioned_names
from xmap_compat.random import NamedShape
from xmap_compat.tools.source import old_names
from xmap_compat.tools.source.kinds import is_ours
from xmap_compat.tools.source.nested import is_xmap, xmap_inside
from xmap_compat.tools.source.rules import attached
from xmap_compat.tools.source.table import EINSUMS, METHODS, OTHER, OTHER_LAX, TABLE, Row
from xmap_compat.tools.source.text import NotWritable, axes, literal
from xmap_compat.tools.source.user_code import Found, Scope

if TYPE_CHECKING:
    from xmap_compat.tools.source.module import Module


class Rewriter:
    """The text of a piece of a file with its calls of collectives rewritten.

    Attributes:
      dropped: parts of the syntax tree that are not in the new text.
      removed: methods of a class that are not in it any more: those that call xmap, around what is written.
      renamed: names of the user's that are called otherwise in the module.
    """

    def __init__(self, module: Module, found: Found, scope: Scope, renamed: Mapping[str, str] | None = None):
        self.module, self.found, self.scope = module, found, scope
        self.names = module.names
        self.renamed = renamed or {}
        self.dropped: set[ast.AST] = set()
        self.removed: set[ast.AST] = set()
        self._kept: set[ast.AST] = set()
        self._replaced: dict[ast.AST, str] = {}
        self._depth = 0

    def definition(self, name: str, decorated: bool) -> list[str]:
        """The lines of the definition, at no indentation."""
        node = self.found.node
        if isinstance(node, ast.Lambda):
            result = self.text(node.body)
            result = f"({result})" if "\n" in result else result
            return [f"def {name}({self._parameters(node.args)}):", *f"    return {result}".split("\n")]
        first = node.lineno
        if decorated:
            first = min([first, *(d.lineno for d in node.decorator_list)])
        else:
            self.dropped.update(node.decorator_list)
        if isinstance(node, ast.ClassDef):
            self.removed.update(m for m in node.body if isinstance(m, ast.FunctionDef) and self._calls_xmap(m))
        start = self.found.offset(first, 0)
        end = self.found.bounds(node)[1]
        lines = textwrap.dedent(self._spliced(start, end, [node])).rstrip().split("\n")
        if name == node.name:
            return lines
        keyword = "class" if isinstance(node, ast.ClassDef) else "def"
        head = f"{keyword} {node.name}"
        return [line.replace(head, f"{keyword} {name}", 1) if line.startswith(head) else line for line in lines]

    def _parameters(self, arguments: ast.arguments) -> str:
        """Those of a lambda expression, which may be in several lines."""
        new = lambda x: None if x is None else ast.parse(f"({self.text(x)})", mode="eval").body  # noqa: E731
        defaults = {k: list(map(new, getattr(arguments, k))) for k in ("defaults", "kw_defaults")}
        return ast.unparse(ast.arguments(**{**vars(arguments), **defaults}))

    def _calls_xmap(self, method: ast.FunctionDef) -> bool:
        return any(isinstance(n, ast.Call) and is_xmap(self.callee(n.func)) for n in ast.walk(method))

    def text(self, node: ast.expr) -> str:
        """The new text of an expression."""
        if (new := self._changed(node)) is not None:
            return new
        start, end = self.found.bounds(node)
        return self._spliced(start, end, list(ast.iter_child_nodes(node)))

    def _changed(self, node: Any) -> str | None:
        """The new text of an expression that is itself another one; None if only parts of it may be."""
        if node in self._replaced:
            return self._replaced[node]
        if node in self.scope.defaults and (new := self._default(node)) is not None:
            return new
        return self._call(node) if isinstance(node, ast.Call) else self._renamed_name(node)

    def _default(self, node: ast.expr) -> str | None:
        """The value of a parameter's default whose names mean something else by now, as variables of loops do."""
        value, scope = self.scope.defaults[node], self.scope
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not scope.is_bound(n)}
        changed = isinstance(node, ast.Name) and scope.has(node.id) and scope.value(node.id) is not value
        if not changed and all(scope.has(name) or hasattr(builtins, name) for name in names):
            return None
        self.dropped.add(node)
        return self.module.expression(value, "default", scope)

    def _renamed_name(self, node) -> str | None:
        if isinstance(node, ast.Name) and node.id in self.renamed and not self.scope.is_bound(node):
            return self.renamed[node.id]
        owner = self.callee(node.value) if isinstance(node, ast.Attribute) else None
        if not isinstance(owner, types.ModuleType):
            return None
        value = getattr(owner, node.attr, None)
        new = old_names.written_out(value) or ("NamedShape" if value is NamedShape else None)
        if new is not None:
            new = self.module.helper(new)
        elif (name := old_names.new_name(owner.__name__, node.attr)) is not None:
            new = self.module.dotted(name)
        else:
            new = self.module.taken_out(owner, node.attr)
            if new is not None and not self._depth:
                self.module.edited(self.found, node, new)
        if new is not None:
            self.dropped.add(node)
        return new

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
            if node in self.dropped and node not in self._replaced:
                continue
            if node in self.removed:
                self.dropped.add(node)
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                yield "", (self.found.offset(first, 0), self.found.bounds(node)[1])
                continue
            if (new := self._changed(node)) is not None:
                yield new, self.found.bounds(node)
                continue
            pending.extend(ast.iter_child_nodes(node))

    # ---- one call

    def _call(self, node: ast.Call) -> str | None:
        """The new text of a call, or None if it stays (its arguments may change all the same)."""
        self._depth += 1
        try:
            new = self._new_call(node)
        except NotWritable as reason:
            raise reason.at(f"{os.path.basename(self.found.file)}:{node.lineno}") from reason.__cause__
        finally:
            self._depth -= 1
        if new is not None and not self._depth:
            self.module.edited(self.found, node, new)
        return new

    def _new_call(self, node):
        callee = self.callee(node.func)
        if is_xmap(callee):
            return xmap_inside(self, node)
        if callee is functools.partial and (partial := self._partial(node)) is not None:
            return partial
        if self._is_named_sample(node, callee):
            self.module.handled.add(self.found.span(node))
            first = [*node.args, *node.keywords][0]
            start, end = self.found.bounds(first)
            self._kept.add(first)
            given = f"{self.text(node.func)}, {self._spliced(start, end, [first])}"
            return self.rebuilt(node, {first: given}, self.module.helper("sample"))
        callee = old_names.of_jax(callee)
        if callee is None and (rule := attached(self, node)) is not None:
            return rule
        if any(callee is einsum for einsum in EINSUMS):
            return self._einsum(node)
        row = next((row for row in TABLE if row.function is callee), None) if callee is not None else None
        if row is None and callee is None:
            row = self._method(node)
        if row is not None:
            return self._collective(node, row)
        if callee is check_type:
            self.dropped.update([node.func, *node.args[1:], *(k.value for k in node.keywords)])
            return f"({self.text(node.args[0])})"
        if any(old_names.new_keyword(callee, k.arg) for k in node.keywords):
            return self.rebuilt(node, {})
        if self.module.calls.get(self.found.span(node)) or _is_of_jax(callee):
            return self._other(node, callee)
        renamed = callee is NamedShape or old_names.written_out(callee)
        if is_ours(callee) and callable(callee) and not renamed and self._renamed_name(node.func) is None:
            raise NotWritable(f"a use of {ast.unparse(node.func)} of xmap_compat")
        return None

    def callee(self, node: ast.expr) -> Any:
        """The object that a name or an attribute of a module means, or None."""
        if isinstance(node, ast.Name):
            return self.scope.value(node.id) if self.scope.known(node) else self.scope.imported_inside(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.callee(node.value)
            if owner is lax and node.attr in vocabulary.REMOVED_FROM_LAX:
                return vocabulary.REMOVED_FROM_LAX[node.attr]
            return getattr(owner, node.attr, None) if isinstance(owner, types.ModuleType) else None
        return None

    def _method(self, node: ast.Call) -> Row | None:
        """``x.max(axis='i')`` of one array that has derivatives."""
        helper = {"max": "max_over", "min": "min_over"}.get(getattr(node.func, "attr", ""))
        return METHODS.get(helper or "") if self.found.span(node) in self.module.calls else None

    def _collective(self, node: ast.Call, row: Row) -> str | None:
        """A call of a collective over axes that are known, or that are looked up when it runs."""
        bound = self.bind(node, row)
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
        helper = "pdot_inside" if helper == "pdot" and span in self.module.inside else helper
        if helper is None and row.function is lax.axis_index and len(names) > 1 and not self.names.is_same(names):
            return self._index_over(node, at, names)
        replaced = {at: text} if text is not None else {}
        if helper is None:
            return self.rebuilt(node, replaced)
        self.dropped.add(node.func)
        return self.rebuilt(node, replaced, self.module.helper(helper), row)

    def _partial(self, node: ast.Call) -> str | None:
        """``functools.partial(lax.pmean, axis_name='i')``: called elsewhere, so that the proof looks after it."""
        callee = self.callee(node.args[0])
        row = next((row for row in TABLE if row.function is callee), None) if callee is not None else None
        if row is None:
            return None
        bound = {**dict(zip(row.parameters, node.args[1:])), **{str(k.arg): k.value for k in node.keywords}}
        if (at := bound.get(row.axis)) is None:
            return None
        known = at
        if self._names_in_scope(at) is None:
            with contextlib.suppress(Exception):
                known = ast.parse(literal(self.evaluated(at)), mode="eval").body
        if not (names := self._names_in_scope(known)):
            return None
        helper = row.helper_for(self, node, bound, names)
        replaced = {at: self._static(known, row)}
        if helper is not None:
            replaced[node.args[0]] = self.module.helper(helper)
        self.module.bound.add(tuple(names))
        return self.rebuilt(node, replaced, row=row if helper else None)

    def _is_named_sample(self, node: ast.Call, callee: Any) -> bool:
        """Whether a call of ours of ``jax.random`` takes a named shape: then it asks for indices."""
        eqns = self.module.calls.get(self.found.span(node), ())
        return old_names.of_jax(callee) is not callee and {e.primitive.name for e in eqns} == {"axis_index"}

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
        row = OTHER_LAX if _is_of_lax(callee) else OTHER
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
        return self.rebuilt(node, replaced)

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
        helper = self.module.helper("einsum_inside" if self.found.span(node) in self.module.inside else "einsum_over")
        return f"{helper}({', '.join([*operands, *options])})"

    def evaluated(self, node: ast.expr) -> Any:
        """The value of an expression that is known before the function runs."""
        names = {**self.scope.globals, **self.scope.closure}
        if any(isinstance(n, ast.Name) and self.scope.is_bound(n) for n in ast.walk(node)):
            raise ValueError(ast.unparse(node))
        return eval(compile(ast.Expression(node), "<axes>", "eval"), names)

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
            if self.scope.known(node):
                return self.scope.value(node.id)
            return self._axis_value(self.scope.assigned_once(node.id))
        if isinstance(node, (ast.Tuple, ast.List)):
            return tuple(self._axis_value(e) for e in node.elts)
        return ast.literal_eval(node)

    # ---- calls as text

    def bind(self, node: ast.Call, row: Row) -> dict[str, ast.expr]:
        """Arguments by the names of the parameters."""
        if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
            raise NotWritable(f"arguments in a star: {ast.unparse(node)}")
        owner = [node.func] if row.method else []
        bound = dict(zip(row.parameters, [*owner, *node.args]))
        bound.update((k.arg, k.value) for k in node.keywords if k.arg is not None)
        return bound

    def rebuilt(
        self, node: ast.Call, replaced: Mapping[Any, str], function: str | None = None, row: Row | None = None
    ) -> str | None:
        """The call with some arguments replaced; None if that is what it is already.

        Args:
          function: what is called instead.
          row: that of a helper.
        """
        if row is not None:
            unknown = [k.arg for k in node.keywords if k.arg not in row.parameters]  # of the helper
            if unknown or len(node.args) + row.method > len(row.parameters):
                more = ", ".join(map(str, unknown)) or ast.unparse(node.args[-1])
                raise NotWritable(f"the argument {more} of {ast.unparse(node.func)}")
        self.dropped.update(set(replaced) - self._kept)
        if row is not None and row.method:
            assert isinstance(node.func, ast.Attribute)
            (at,) = [*node.args, *(k.value for k in node.keywords)]
            self.dropped.discard(node.func)
            return f"{function}({self.text(node.func.value)}, {replaced.get(at) or self.text(at)})"
        before, self._replaced = self._replaced, {**self._replaced, **replaced}
        if function is not None:
            self._replaced[node.func] = function
        for k in node.keywords:
            name = "axes" if row is not None and k.arg == row.axis and str(row.helper).endswith("_over") else k.arg
            name = old_names.new_keyword(self.callee(node.func), name) or name
            if name != k.arg:
                self._replaced[k] = f"{name}={self.text(k.value)}"
        start, end = self.found.bounds(node)
        text = self._spliced(start, end, list(ast.iter_child_nodes(node)))
        self._replaced = before
        return None if text == self.found.text[start:end] else text


def _is_of_jax(callee) -> bool:
    module = str(getattr(callee, "__module__", "") or type(callee).__module__ if callee is not None else "")
    return module.split(".")[0] == "jax"


def _is_of_lax(callee) -> bool:
    """Functions of ``jax.numpy`` read a string letter by letter, so that a tuple it is; those of ``lax`` do not."""
    return callee is not None and vars(lax).get(getattr(callee, "__name__", "")) is callee
