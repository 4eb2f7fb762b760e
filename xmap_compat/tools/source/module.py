"""The definitions of a written module: the user's functions, rewritten, and every value that they need.

The traced program says which calls are collectives and over what; every one of them must be found in
the source that is rewritten, or there is no source.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.rules.parameters import mentioned_names
from xmap_compat.random import NamedShape
from xmap_compat.tools.source import old_names
from xmap_compat.tools.source.hazards import RuleOver
from xmap_compat.tools.source.imports import import_statement, may_import, module_import
from xmap_compat.tools.source.kinds import (
    NO_CODE,
    attaches,
    is_jitted,
    is_library,
    is_ours,
    is_xmapped,
    public_name,
    refuse_library,
    same,
    spells,
)
from xmap_compat.tools.source.nested import vmaps
from xmap_compat.tools.source.rewrite import Rewriter
from xmap_compat.tools.source.rules import backward_over
from xmap_compat.tools.source.text import NotWritable, array, literal, quoted
from xmap_compat.tools.source.user_code import (
    AxisNames,
    Found,
    Scope,
    Span,
    collective_calls,
    collectives,
    file_at,
    source_of,
    source_of_class,
)

MAX_LITERAL = 64
# Names of modules that are imported where they are used.
IMPORTED = {"functools": functools, "jax": jax, "jnp": jnp, "lax": lax, "np": np}


@dataclasses.dataclass(frozen=True)
class Edit:
    """A call that was rewritten."""

    file: str
    line: int
    old: str
    new: str


class Module:
    """Rewrites a function and everything of the user's that it needs.

    Attributes:
      imports: the import statements.
      definitions: the lines of each definition, in the order of need, by name.
      helpers: names of functions to be defined beside them.
      values: arrays too large to be written, by name.
      name: the function, as an expression.
      calls: the collectives of each innermost call of the user.
      files: where those calls are.
      inside: calls of contractions that the body differentiates.
      gave_way: whether a name of the user's was reserved.
      handled: calls whose axes were rewritten, or need not be.
      bound: axes of collectives that are arguments of ``functools.partial``.
      nested: in_axes, out_axes and axis_resources of the xmaps inside; they are vmaps, or, where the module is made for
        the proof (``proving``), calls of ``nested_xmap_1(function)``, ``nested_xmap_2(function)``, ...
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        jaxpr: Any,
        names: AxisNames,
        reserved: Iterable[str],
        rules: Sequence[RuleOver] = (),
        typed: bool = False,
        proving: bool = False,
        inside: frozenset[Span] = frozenset(),
    ):
        self.names, self.rules, self.typed, self.proving, self.inside = names, rules, typed, proving, inside
        self.imports: dict[str, None] = {}
        self.definitions: dict[str, list[str]] = {}
        self.helpers: dict[str, None] = {}
        self.values: dict[str, Any] = {}
        self.nested: list[Any] = []
        self.calls = collective_calls(jaxpr)
        self.files = {span[0] for span in self.calls}
        self.handled: set[Any] = set()
        self.bound: set[tuple[Any, ...]] = set()
        self._edits: dict[Edit, None] = {}
        self._meanings: dict[str, Any] = dict(IMPORTED)
        self._reserved, self.gave_way = {*reserved, "AXES", "MESH_AXES"}, False
        self.name = self.expression(fun, "body")
        if not self.name.replace(".", "_").isidentifier():
            expression, self.name = self.name, self._define("body", object())[0]
            self.definitions[self.name] = [f"{self.name} = {expression}"]
        self._check_all_found(jaxpr)

    @property
    def edits(self) -> list[Edit]:
        return sorted(self._edits, key=lambda e: (e.file, e.line))

    @property
    def taken(self) -> list[str]:
        return [*self._meanings, *self._reserved]

    def edited(self, found: Found, node: ast.Call, new: str) -> None:
        old = ast.get_source_segment(found.text, node) or ""
        if _one_line(old).replace("'", '"') != _one_line(new).replace("'", '"'):
            self._edits[Edit(found.file, node.lineno, _one_line(old), _one_line(new))] = None

    def _check_all_found(self, jaxpr):
        """Every collective whose axes are called otherwise now must be in a call that was rewritten."""
        for eqn, spans in collectives(jaxpr):
            names = mentioned_names(eqn.params)
            if eqn.params.get("axis_index_groups") is not None:
                raise NotWritable("axis_index_groups")
            needs_helper = eqn.primitive.name in ("pdot", "all_to_all", "ppermute")
            # Of a backward rule JAX says that it is where the function is called: the proof looks after it.
            backward = "transpose(" in _jax.name_stack(eqn)
            if not needs_helper and (self.names.is_same(names) or names in self.bound or backward):
                continue
            if not any(span in self.handled for span in spans):
                where = _jax.where_in_user_code(eqn)
                called = f"{eqn.primitive.name} over {', '.join(map(str, names))} at {where}"
                raise NotWritable(f"{called}, which is not called by its name there")

    # ---- names

    def _define(self, wanted: str, meaning: Any) -> tuple[str, bool]:
        """What a value is called, as near to what is wanted as can be, and whether it was known."""
        for name in (wanted, *(f"{wanted}_{k}" for k in range(2, 1000))):
            if name in self._reserved:
                self.gave_way = True
                continue
            if name not in self._meanings:
                self._meanings[name] = meaning
                return name, False
            if same(self._meanings[name], meaning):
                return name, True
        raise NotWritable(f"a thousand things with the name {wanted}")

    def alias(self, name: str, module: types.ModuleType) -> str:
        """What a module is called here."""
        name, known = self._define(name, module)
        if not known:
            self.imports[module_import(name, module)] = None
        return name

    def dotted(self, name: str) -> str:
        """``jax.tree.map``, imported."""
        self.alias("jax", jax)
        return name

    def helper(self, name: str) -> str:
        self.helpers[name] = None
        return name

    # ---- values

    def expression(self, value: Any, wanted: str, scope: Scope | None = None) -> str:
        """An expression for a value, after everything that it needs has been defined."""
        if isinstance(value, types.ModuleType):
            return self.alias(wanted, value)
        if (name := old_names.written_out(value)) is not None:
            return self.helper(name)
        if value is NamedShape:
            return self.helper("NamedShape")
        if (public := public_name(value)) is not None:
            module, name = public
            return f"{self.alias(*module)}.{name}"
        for writes in (self._callable, self._data):
            if (text := writes(value, wanted, scope)) is not None:
                return text
        raise NotWritable(f"{wanted}, a value of type {type(value).__name__}")

    def _callable(self, value, wanted, scope) -> str | None:
        if is_xmapped(value):
            declared = value.plan.args[0] if isinstance(value.plan, functools.partial) else value.plan.declared
            if declared.sizes or declared.backend is not None:
                raise NotWritable("a nested call of xmap with other options")
            inner = self.expression(declared.fun, "body", scope)
            return vmaps(self, inner, declared.in_source, declared.out_source, dict(declared.resources))
        if isinstance(value, functools.partial):
            function = self.expression(value.func, "body", scope)
            args = [self.expression(a, "value", scope) for a in value.args]
            args += [f"{k}={self.expression(v, k, scope)}" for k, v in value.keywords.items()]
            return f"{self.alias('functools', functools)}.partial({', '.join([function, *args])})"
        if isinstance(value, types.MethodType):
            return f"{self.expression(value.__self__, 'instance', scope)}.{value.__name__}"
        if (made := _jax.transformation_of(value)) is not None:
            name, inner, options = made
            given = "".join(f", {k}={self.expression(v, k, scope)}" for k, v in options.items())
            return f"{self.alias('jax', jax)}.{name}({self.expression(inner, 'body', scope)}{given})"
        if isinstance(value, (jax.custom_vjp, jax.custom_jvp)):
            return self._custom_rule(value.__name__, value)
        if isinstance(value, types.FunctionType):
            if hasattr(value, "__wrapped__") and (text := self._decorated(value, scope)) is not None:
                return text
            refuse_library(value.__code__.co_filename, value.__name__)
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        return self._decorated(value, scope)

    def _function(self, fun: types.FunctionType, wanted: str = "body") -> str:
        """Write a function; its name, which is the wanted one if it is a lambda expression."""
        found = source_of(fun)
        name, known = self._define(wanted if isinstance(found.node, ast.Lambda) else found.node.name, fun)
        if not known:
            self._write(name, found, Scope.of(fun, found), decorated=False)
        return name

    def _write(self, name: str, found: Found, scope: Scope, decorated: bool) -> None:
        """Write a definition after everything that it needs."""
        rewriter = Rewriter(self, found, scope)
        lines = rewriter.definition(name, decorated)
        renamed = self._needs(rewriter, scope)
        if renamed:
            lines = Rewriter(self, found, scope, renamed).definition(name, decorated)
        self.definitions[name] = lines

    def _needs(self, rewriter: Rewriter, scope: Scope) -> dict[str, str]:
        """Define what a piece of text reads; the names that are other ones here."""
        written = {free: self._need(free, scope) for free in scope.free_names(rewriter.dropped)}
        return {free: name for free, name in written.items() if name != free}

    def _need(self, free: str, scope: Scope) -> str:
        """Define or import what a free name of a piece of text means; what it is called here."""
        if not scope.has(free):
            return self._assigned(free, scope, object())
        value = old_names.of_jax(scope.value(free))
        if value is NamedShape or old_names.written_out(value):
            return self.expression(value, free, scope)
        if is_ours(value) and not is_xmapped(value):
            raise NotWritable(f"a use of {free} of xmap_compat")
        if isinstance(value, types.ModuleType):
            return self.alias(free, value)
        if (statement := import_statement(free, value, scope, self.files)) is not None:
            name, known = self._define(free, value)
            if not known:
                self.imports[statement if name == free else f"{statement.partition(' as ')[0]} as {name}"] = None
            return name
        kept = [dict(d) for d in self._tables]
        try:
            text = self.expression(value, free, scope)
        except NotWritable:
            for table, old in zip(self._tables, kept):
                table.clear()
                table.update(old)
            if scope.assigned_around(free) is None:
                raise
            return self._assigned(free, scope, value)
        if text in self.values or (callable(value) and text.replace(".", "_").isidentifier()):
            return text
        return self._assigned(free, scope, value, text)

    @property
    def _tables(self) -> list[dict[str, Any]]:
        return [self.imports, self.definitions, self.values, self._meanings]

    def _assigned(self, free: str, scope: Scope, value: Any, text: str | None = None) -> str:
        """A variable: assigned as in the file if that says it better, or as there is no other way."""
        node = scope.assigned_around(free)
        if node is None and text is None:
            raise NotWritable(f"{free}, which is not known")
        name, known = self._define(free, value)
        if known:
            return name
        if node is not None and (text is None or spells(node, value, scope)):
            found = scope.found.at(node)
            inner = Scope(found, scope.globals, scope.closure)
            rewriter = Rewriter(self, found, inner)
            text = rewriter.text(node)
            if renamed := self._needs(rewriter, inner):
                text = Rewriter(self, found, inner, renamed).text(node)
            text = f"({text})" if "\n" in text and not text.endswith((")", "]", "}")) else text
        assert text is not None
        self.definitions[name] = [f"{name} = {text}"]
        return name

    def taken_out(self, owner: types.ModuleType, name: str) -> str | None:
        """What an attribute of a module of the user's is called here; None if it may stay there."""
        value = getattr(owner, name, None)
        file = getattr(owner, "__file__", None) or ""
        stays = not file.endswith(".py") or is_library(file) or is_ours(owner) or isinstance(value, types.ModuleType)
        if stays or name not in vars(owner) or may_import(owner.__name__, name, value, self.files):
            return None
        return self._need(name, Scope(file_at(file, name), vars(owner)))

    # ---- functions of other kinds

    def _custom_rule(self, name: str, value: Any) -> str:
        """A function with a rule for its derivatives, which a statement or a decorator attaches."""
        kind = "custom_vjp" if isinstance(value, jax.custom_vjp) else "custom_jvp"
        primal = value.__wrapped__
        refuse_library(getattr(primal, "__code__", NO_CODE).co_filename, name)
        written, known = self._define("function" if name == "<lambda>" else name, value)
        if known:
            return written
        found = source_of(primal)
        if getattr(found.node, "decorator_list", None) and found.node.name == primal.__name__:
            self._write(written, found, Scope.of(primal, found), decorated=True)
        else:
            nondiff = tuple(value.nondiff_argnums)
            function = self.expression(primal, f"{written}_primal")
            more = f", nondiff_argnums={literal(nondiff)}" if nondiff else ""
            self.definitions[written] = [f"{written} = {self.alias('jax', jax)}.{kind}({function}{more})"]
        rules = {"fwd": value.fwd, "bwd": value.bwd} if kind == "custom_vjp" else {"jvp": value.jvp}
        if None in rules.values():
            raise NotWritable(f"{name}, whose rule is not known")
        attach = kind.replace("custom_", "def")
        names = [self._rule(rule, f"{written}_{suffix}") for suffix, rule in rules.items()]
        if f"@{written}.{attach}" not in "\n".join(self.definitions.get(names[0], ())):
            more = ", symbolic_zeros=True" if getattr(value, "symbolic_zeros", False) else ""
            self.definitions[f"{written}.{attach}"] = []
            if kind == "custom_vjp" and isinstance(value.bwd, types.FunctionType):
                bwd = source_of(value.bwd)
                rewriter = Rewriter(self, bwd, Scope.of(value.bwd, bwd))
                nondiff = tuple(value.nondiff_argnums)
                names[1], over = backward_over(rewriter, names[1], found, bwd.node, nondiff)
                if over is not None:
                    owned = (
                        f"{self.helper('varying_over')}({written}, {over}{f', {literal(nondiff)}' if nondiff else ''})"
                    )
                    self.definitions[f"{written} over axes"] = [f"{written} = {owned}"]
            self.definitions[f"{written}.{attach}"] = [f"{written}.{attach}({', '.join(names)}{more})"]
        return written

    def _rule(self, rule, wanted) -> str:
        if not isinstance(rule, types.FunctionType):
            return self.expression(rule, wanted)
        found = source_of(rule)
        name, known = self._define(wanted if isinstance(found.node, ast.Lambda) else found.node.name, rule)
        if not known:
            self._write(name, found, Scope.of(rule, found), decorated=attaches(found.node))
        return name

    def _decorated(self, value: Any, scope: Scope | None) -> str | None:
        """What a decorator made of a function: with its decorators, or by ``jax.jit``."""
        inner = inspect.unwrap(value) if callable(getattr(value, "__wrapped__", None)) else None
        if isinstance(inner, types.FunctionType) and not is_library(inner.__code__.co_filename):
            found = source_of(inner)
            there = inner.__globals__.get(inner.__name__, value)
            if getattr(found.node, "decorator_list", None) and there is value:
                name, known = self._define(found.node.name, value)
                if not known:
                    self._write(name, found, Scope.of(inner, found), decorated=True)
                return name
        if is_jitted(value):
            return f"{self.alias('jax', jax)}.jit({self.expression(value.__wrapped__, 'body', scope)})"
        return None

    def _class(self, cls: type) -> str:
        refuse_library(getattr(inspect.getmodule(cls), "__file__", None) or "", cls.__name__)
        name, known = self._define(cls.__name__, cls)
        if not known:
            found = source_of_class(cls)
            self._write(name, found, Scope(found, vars(sys.modules[cls.__module__])), decorated=True)
        return name

    # ---- data

    def _data(self, value: Any, wanted: str, scope: Scope | None) -> str | None:
        if isinstance(value, jax.core.Tracer):
            raise NotWritable(f"{wanted}, a value of a transformation around the call")
        if isinstance(value, jax.Array) and _jax.is_key(value):
            data = self._data(jax.random.key_data(value), f"{wanted}_data", scope)
            impl = quoted(str(jax.random.key_impl(value)))
            return f"{self.alias('jax', jax)}.random.wrap_key_data({data}, impl={impl})"
        if isinstance(value, (np.ndarray, np.generic, jax.Array)):
            return self._array(value, wanted)
        items = lambda values: [self.expression(v, wanted, scope) for v in values]  # noqa: E731
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            given = ", ".join(f"{f}={x}" for f, x in zip(value._fields, items(value)))
            return f"{self.expression(type(value), type(value).__name__, scope)}({given})"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [f.name for f in dataclasses.fields(value) if f.init]
            given = ", ".join(f"{f}={x}" for f, x in zip(fields, items(getattr(value, f) for f in fields)))
            return f"{self.expression(type(value), type(value).__name__, scope)}({given})"
        if type(value) is tuple and value:
            return f"({', '.join(items(value))}{',' if len(value) == 1 else ''})"
        if type(value) is list:
            return f"[{', '.join(items(value))}]"
        if type(value) is dict:
            return "{" + ", ".join(f"{literal(k)}: {x}" for k, x in zip(value, items(value.values()))) + "}"
        if isinstance(value, np.dtype):
            return f"np.dtype({quoted(value.name)})"
        try:
            return literal(value)
        except NotWritable:
            return self._instance(value, scope)

    def _array(self, value, wanted) -> str:
        if np.size(value) <= MAX_LITERAL:
            text = array(value)
            return f"jnp.asarray({text})" if isinstance(value, jax.Array) else text
        name, _ = self._define(wanted, value)
        self.values[name] = value
        return name

    def _instance(self, value: Any, scope: Scope | None) -> str | None:
        """An object whose class is given what its attributes are."""
        if type(value).__module__ in ("builtins", "types", "functools") or not hasattr(value, "__dict__"):
            return None
        parameters = list(inspect.signature(type(value)).parameters.values())
        held = vars(value)
        if any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
            return None
        if {p.name for p in parameters} != set(held):
            return None
        given = ", ".join(f"{k}={self.expression(v, k, scope)}" for k, v in held.items())
        return f"{self.expression(type(value), type(value).__name__, scope)}({given})"


def _one_line(text: str) -> str:
    return " ".join(text.split())
