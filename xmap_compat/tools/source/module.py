"""The definitions of a generated module: the user's functions, rewritten, and every value that they need.

The traced program says which calls are collectives, and over which axes.  Every one of them must be found in
the source that is rewritten; otherwise no source is generated.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import functools
import inspect
import types
from collections.abc import Iterable, Mapping, Set
from typing import Any

import jax
import numpy as np

from xmap_compat import _jax
from xmap_compat.core.parameters import mentioned_names
from xmap_compat.tools.source import imports, old_names, user_code
from xmap_compat.tools.source.hazards import wrapped
from xmap_compat.tools.source.helper_texts import HELPERS
from xmap_compat.tools.source.nested import vmaps
from xmap_compat.tools.source.rewrite import OURS, Rewriter, Rewriting, takes_axes
from xmap_compat.tools.source.text import NotWritable, Text, array, field_names, literal
from xmap_compat.tools.source.user_code import AxisNames, Piece

MAX_LITERAL = 64


class Module(Rewriting):
    """Rewrites a function and everything of the user's that it needs.

    Attributes:
      imports: the import statements.
      definitions: the text of each definition by name, in the order in which the definitions need each other.
      helpers: names of helper functions that the generated program defines as well.
      values: by name, the arrays that are too large for the source.
      name: an expression for the function.
      edits: for each call that was rewritten, the file, the line, the old text and the new one.
      files: where collectives are called.
      gave_way: whether a name of the user's program was changed because it is reserved.
    """

    def write(self, reserved: Set[str]) -> None:
        """Write the function, perhaps anew; no name is one of the reserved ones."""
        self.handled, self.nested = {}, []
        self.imports: dict[str, None] = {}
        self.definitions: dict[str, list[str]] = {}
        self.helpers: dict[str, None] = {}
        self.values: dict[str, Any] = {}
        self.files = {span[0] for span in self.calls}
        self.edits: set[tuple[str, int, str, str]] = set()
        self._meanings: dict[str, Any] = dict(imports.IMPORTED)
        self._reserved, self.gave_way = {*reserved, "AXES"}, False
        self.name = self.expression(self.plan.staged.declared.fun, "body")
        if not self.name.replace(".", "_").isidentifier():
            expression, self.name = self.name, self._define("body", object())[0]
            self.definitions[self.name] = [f"{self.name} = {expression}"]
        check_all_found(self.plan.staged.placed.program.jaxpr, self.names, self.handled)

    @property
    def taken(self) -> list[str]:
        return [*self._meanings, *self._reserved]

    def edited(self, piece: Piece, node: Any, new: str) -> None:
        start, end = piece.bounds(node)
        old, new = (" ".join(text.split()) for text in (piece.text[start:end], new))
        self.edits.add((piece.file, node.lineno, old, new))

    # ---- names

    def _define(self, wanted: str, meaning: Any) -> tuple[str, bool]:
        """The name of a value, as close to the wanted name as possible, and whether the value had a name already."""
        for name in (wanted, *(f"{wanted}_{k}" for k in range(2, 1000))):
            if name in self._reserved:
                self.gave_way = True
            elif name not in self._meanings:
                self._meanings[name] = meaning
                return name, False
            elif imports.same(self._meanings[name], meaning):
                return name, True
        raise NotWritable(f"more than a thousand objects with the name {wanted}")

    def alias(self, name: str, module: types.ModuleType) -> str:
        name, known = self._define(name, module)
        if not known:
            self.imports[imports.module_import(name, module)] = None
        return name

    def helper(self, name: str) -> str:
        self.helpers[name] = None
        return name

    def _resolved(self, text: str, piece: Piece) -> str:
        """A rewritten piece of the program, after every value that it reads has been defined and named."""
        names, tree = {}, user_code.parsed(text)
        for name in user_code.free_reads(tree).values():
            if name.startswith(OURS):
                own = name.removeprefix(OURS)
                names[name] = self.helper(own) if own in HELPERS else own
                if own in user_code.variables(tree):  # the user's own variables, which hide the name there
                    names[name], _ = self._define(own, own)
                    self.definitions[names[name]] = [f"{names[name]} = {own}"]
            elif piece.has(name) or not hasattr(builtins, name):
                names[name] = names.get(name) or self._need(name, piece)
        return user_code.renamed(text, names)

    def _write(self, name: str, piece: Piece, decorated: bool) -> None:
        """Write a definition after every definition that it needs."""
        text = self._resolved(Rewriter(self, piece).definition(name, decorated), piece)
        self.definitions[name] = text.split("\n")

    def _need(self, free: str, piece: Piece) -> str:
        """Define or import the value of a free name of some text; returns its name in the generated program."""
        if not piece.has(free):
            return self._assigned(free, piece, object())
        value = old_names.of_jax(piece.value(free))
        if old_names.helper_for(value) is not None:
            return self.expression(value, free)
        if imports.is_ours(value) and not imports.is_xmapped(value):
            raise NotWritable(f"a use of {free} of xmap_compat")
        if isinstance(value, types.ModuleType):
            return self.alias(free, value)
        if (statement := imports.import_statement(free, value, piece, self.files)) is not None:
            name, known = self._define(free, value)
            if not known:
                self.imports[statement if name == free else f"{statement.partition(' as ')[0]} as {name}"] = None
            return name
        tables: tuple[dict[str, Any], ...] = (self.imports, self.definitions, self.values, self._meanings)
        kept = [dict(table) for table in tables]
        try:
            text = self.expression(value, free)
        except NotWritable:
            for table, old in zip(tables, kept):
                table.clear()
                table.update(old)
            if piece.assigned_around(free) is None:
                raise
            return self._assigned(free, piece, value)
        if text in self.values or (callable(value) and text.replace(".", "_").isidentifier()):
            return text
        return self._assigned(free, piece, value, text)

    def _assigned(self, free: str, piece: Piece, value: Any, text: str | None = None) -> str:
        """A variable: assigned as in the file if that is clearer, or if nothing else is possible."""
        node = piece.assigned_around(free)
        if node is None and text is None:
            raise NotWritable(f"{free}, which is not known")
        name, known = self._define(free, value)
        if known:
            return name
        if node is not None and (text is None or imports.spells(node, value, piece)):
            inner = dataclasses.replace(piece, node=node, defaults={})
            text = Rewriter(self, inner).expression()
            text = self._resolved(f"({text})" if "\n" in text else text, inner)
        self.definitions[name] = [f"{name} = {text}"]
        return name

    def taken_out(self, owner: types.ModuleType, name: str) -> str | None:
        value, file = getattr(owner, name, None), imports.file_of(owner)
        known = imports.is_library(file) or imports.is_ours(owner)
        stays = not file.endswith(".py") or known or isinstance(value, types.ModuleType)
        if stays or name not in vars(owner) or imports.may_import(owner.__name__, name, value, self.files):
            return None
        return self._need(name, dataclasses.replace(user_code.file_at(file, name), globals=vars(owner)))

    # ---- values

    def expression(self, value: Any, wanted: str) -> str:
        """An expression for a value, after everything that it needs has been defined."""
        if isinstance(value, types.ModuleType):
            return self.alias(wanted, value)
        if (helper := old_names.helper_for(value)) is not None:
            return self.helper(helper)
        if (public := imports.public_name(value)) is not None:
            alias, home, name = public
            return f"{self.alias(alias, home)}.{name}"
        if isinstance(value, jax.core.Tracer):
            raise NotWritable(f"{wanted}, a value of a transformation around the call")
        return self._callable(value, wanted) or self._data(value, wanted)

    def _called(self, function: str, args: Iterable[Any], options: dict[str, Any]) -> str:
        given = [self.expression(x, "value") for x in args]
        given += [f"{k}={self.expression(x, k)}" for k, x in options.items()]
        return f"{function}({', '.join(given)})"

    def _callable(self, value: Any, wanted: str) -> str | None:
        if imports.is_xmapped(value):
            declared = value.plan.declared
            if declared.sizes or declared.backend is not None:
                raise NotWritable("a nested call of xmap with other options")
            inner = self.expression(declared.fun, "body")
            return vmaps(self, inner, declared.in_source, declared.out_source, dict(declared.resources))
        if isinstance(value, functools.partial):
            held = jax.tree.leaves([value.args, value.keywords])
            over = [n for n in held if isinstance(n, str) and self.names.parts(n) != (n,)]
            if over and takes_axes(value.func):
                raise NotWritable(f"{wanted}, a partial call over axes")  # where its text is found, it can be written
            function = f"{self.alias('functools', functools)}.partial"
            return self._called(function, [value.func, *value.args], value.keywords)
        if isinstance(value, types.MethodType):
            return f"{self.expression(value.__self__, 'instance')}.{value.__name__}"
        if (made := _jax.transformation_of(value)) is not None:
            name, inner, options = made
            return self._called(f"{self.alias('jax', jax)}.{name}", [inner], options)
        if isinstance(value, (jax.custom_vjp, jax.custom_jvp)):
            return self._custom_rule(value)
        if isinstance(value, type):
            imports.refuse_library(imports.file_of(inspect.getmodule(value)), value.__name__)
            name, known = self._define(value.__name__, value)
            if not known:
                self._write(name, user_code.source_of_class(value), decorated=True)
            return name
        if hasattr(value, "__wrapped__") and (text := self._decorated(value)) is not None:
            return text
        return self._function(value, "body") if isinstance(value, types.FunctionType) else None

    def _function(self, fun: types.FunctionType, wanted: str, decorated: bool = False, meaning: Any = None) -> str:
        """Write a function; returns its name, which is the wanted one for a lambda expression."""
        imports.refuse_library(fun.__code__.co_filename, fun.__name__)
        piece = user_code.source_of(fun)
        name, known = self._define(getattr(piece.node, "name", wanted), fun if meaning is None else meaning)
        if not known:
            self._write(name, piece, decorated)
        return name

    def _decorated(self, value: Any) -> str | None:
        """The result of a decorator: the function with its decorators, or with ``jax.jit``."""
        inner = inspect.unwrap(value)
        if isinstance(inner, types.FunctionType) and not imports.is_library(inner.__code__.co_filename):
            there = inner.__globals__.get(inner.__name__, value)
            if there is value and getattr(user_code.source_of(inner).node, "decorator_list", None):
                return self._function(inner, "", True, value)
        if not imports.is_jitted(value):
            return None
        return f"{self.alias('jax', jax)}.jit({self.expression(value.__wrapped__, 'body')})"

    def _custom_rule(self, value: Any) -> str:
        """A function with a derivative rule, which a statement or a decorator attaches."""
        name, kind = value.__name__, "vjp" if isinstance(value, jax.custom_vjp) else "jvp"
        primal, nondiff = value.__wrapped__, tuple(value.nondiff_argnums)
        if not isinstance(primal, types.FunctionType):
            raise NotWritable(f"{name}, a function of another kind with a rule")
        imports.refuse_library(primal.__code__.co_filename, name)
        written, known = self._define("function" if name == "<lambda>" else name, value)
        if known:
            return written
        piece = user_code.source_of(primal)
        if getattr(piece.node, "decorator_list", None):
            self._write(written, piece, decorated=True)
        else:
            function = self.expression(primal, f"{written}_primal")
            more = f", nondiff_argnums={literal(nondiff)}" if nondiff else ""
            self.definitions[written] = [f"{written} = {self.alias('jax', jax)}.custom_{kind}({function}{more})"]
        rules = [value.fwd, value.bwd] if kind == "vjp" else [value.jvp]
        if None in rules:
            raise NotWritable(f"{name}, which has no rule")
        names = [self._rule(rule, f"{written}_{rule_kind}") for rule, rule_kind in zip(rules, (kind, "bwd"))]
        if f"@{written}.def{kind}" in "\n".join(self.definitions.get(names[0], ())):
            return written
        attached = []
        if isinstance(rules[-1], types.FunctionType) and kind == "vjp":
            over = wrapped(self, piece.file, [piece.node, user_code.source_of(rules[-1]).node])
            names[-1] = over.of(names[-1])
            if over.differ:
                attached = [f"{written} = {self.helper('varying_over')}({written}, {over.axes})"]
        more = ", symbolic_zeros=True" if getattr(value, "symbolic_zeros", False) else ""
        self.definitions[f"{written}.def{kind}"] = [f"{written}.def{kind}({', '.join(names)}{more})", *attached]
        return written

    def _rule(self, rule: Any, wanted: str) -> str:
        if not isinstance(rule, types.FunctionType):
            return self.expression(rule, wanted)
        decorators = getattr(user_code.source_of(rule).node, "decorator_list", ())
        attaches = any(isinstance(d, ast.Attribute) and d.attr.startswith("def") for d in decorators)  # ``@f.defjvp``
        return self._function(rule, wanted, attaches)

    # ---- data

    def _data(self, value: Any, wanted: str) -> str:
        if isinstance(value, jax.Array) and _jax.is_key(value):
            data = self._array(jax.random.key_data(value), f"{wanted}_data")
            impl = literal(str(jax.random.key_impl(value)))
            return f"{self.alias('jax', jax)}.random.wrap_key_data({data}, impl={impl})"
        if isinstance(value, (np.ndarray, np.generic, jax.Array)):
            return self._array(value, wanted)
        if isinstance(value, enum.Enum) and value.name in type(value).__members__:
            return f"{self.expression(type(value), type(value).__name__)}.{value.name}"
        if (held := _attributes(value)) is not None:
            return self._called(self.expression(type(value), type(value).__name__), (), held)
        if type(value) in (tuple, list):
            return repr(type(value)(Text(self.expression(x, wanted)) for x in value))
        if type(value) is dict:
            return repr({Text(literal(key)): Text(self.expression(x, wanted)) for key, x in value.items()})
        return f"np.dtype({literal(value.name)})" if isinstance(value, np.dtype) else literal(value)

    def _array(self, value: Any, wanted: str) -> str:
        if np.size(value) <= MAX_LITERAL:
            return f"jnp.asarray({array(value)})" if isinstance(value, jax.Array) else array(value)
        name, _ = self._define(wanted, value)
        self.values[name] = value
        return name


def check_all_found(jaxpr: Any, names: AxisNames, handled: Mapping[Any, Any]) -> None:
    """Every collective whose axes have other names now must be in a call that was rewritten."""
    for eqn, stack, spans in user_code.collectives(jaxpr):
        primitive, over = eqn.primitive.name, mentioned_names(eqn.params)
        if eqn.params.get("axis_index_groups") is not None:
            raise NotWritable("axis_index_groups: make two axes of the axis, and use one of them")
        called = f"{primitive} over {', '.join(map(str, over))} at {_jax.where_in_user_code(eqn)}"
        parts = [part for n in over for part in names.parts(n)]
        # JAX locates rules of derivatives where their function is called, so the proof checks them.
        stays = parts == list(over) or "jvp(" in stack or user_code.is_backward(stack)
        if stays and primitive not in ("pdot", "all_to_all", "ppermute"):
            continue
        if handled.keys().isdisjoint([*spans, over]):
            raise NotWritable(f"{called}, which is not called by its name there: write `lax.{primitive}(...)` there")


def _attributes(value: Any) -> dict[str, Any] | None:
    """The arguments that make an object's attributes when passed to its class; None if they are not the attributes."""
    if isinstance(value, type) or type(value).__module__ in ("builtins", "types", "functools"):
        return None
    if hasattr(value, "_fields") or dataclasses.is_dataclass(value):
        return {name: getattr(value, name) for name in field_names(type(value))}
    try:
        parameters = inspect.signature(type(value)).parameters.values()
        known = all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
        return dict(vars(value)) if known and {p.name for p in parameters} == set(vars(value)) else None
    except (TypeError, ValueError):
        return None
