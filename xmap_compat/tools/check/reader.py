"""The uses in one program: the names that it takes from JAX, and the advice about each."""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from xmap_compat.legacy import removed
from xmap_compat.tools.check import arrays
from xmap_compat.tools.check.guards import (
    NEVER,
    OTHERWISE,
    Conditions,
    Guards,
    caught_by,
    caught_names,
    gives_up,
)
from xmap_compat.tools.check.through_xmap import DERIVATIVES, XMAP_KEYWORDS, XMAPS, ThroughXmap, unused_resources
from xmap_compat.tools.leave.old_check import advice as known
from xmap_compat.tools.leave.old_check.advice import MAPS, Advice
from xmap_compat.tools.leave.old_check.names import (
    Bindings,
    ScopedVisitor,
    assigned,
    bound_anywhere,
    file_names,
    text_of,
)
from xmap_compat.tools.leave.old_check.neighbours import NamesOf, Neighbours
from xmap_compat.tools.leave.old_check.sources import Place, Program, deep_recursion, program_of
from xmap_compat.tools.leave.old_check.uses import Reading, Reference, Use, family_advice, is_of_jax, unreadable

LOOKING = ("hasattr", "print", "repr", "str", "type", "id", "dir", "help", "bool", "callable")
TYPES_OF = ("jax.core.get_aval", "jax.typeof")
OPTION_FUNCTIONS = ("jax.config.update", "jax.config.config.update", "jax.config.read", "jax.config.config.read")


def read(source: str | bytes, path: str, names_of: NamesOf | None = None) -> Reading:
    """Read one program.  If a part cannot be parsed, that is a use that needs a hand."""
    program = program_of(source, path)
    reading = Reading(path)
    reading.uses |= {unreadable(place, error) for place, error in program.broken}
    try:
        with deep_recursion():
            _Reader(program, reading, names_of or file_names()).visit(program.tree)
    except (RecursionError, MemoryError) as error:
        reading.uses.add(unreadable(Place(path, 0, 1, 1), error))
    return reading


class _Reader(ScopedVisitor):
    def __init__(self, program: Program, reading: Reading, names_of: NamesOf):
        self.program, self.reading = program, reading
        self.bindings = Bindings(program.tree, Neighbours(program.path, names_of))
        self.through_xmap = ThroughXmap(program.tree, self.bindings)
        self.uses_xmap = any(self.bindings.of(node) in XMAPS for node in ast.walk(program.tree))
        self._caught: set[str] = set()
        self._conditions: Conditions = ()
        self.guards = Guards(program.tree, self.bindings)
        self._asked = False
        self._bound = bound_anywhere(program.tree) | set(dir(builtins)) if self.bindings.stars else set()
        self._methods = {n.name for n in ast.walk(program.tree) if isinstance(n, ast.FunctionDef)}
        self._followed: set[int] = set()
        self._in_function = False  # and in no class of it
        self._late_annotations = self.bindings.of_name("annotations") == "__future__.annotations"
        reading.modules |= self.bindings.modules

    def add(self, node: ast.AST, name: str, advice: Advice) -> None:
        conditions = self._conditions
        missed = "attribute" if not isinstance(node, ast.alias) else "module" if name.startswith(MAPS) else "import"
        if family_advice(name) is not None:
            conditions += ((name, False),)  # if the name exists without install(), the program needs nothing
        if advice is known.PRIVATE and {"import", "attribute"} & self._caught:
            return
        if missed in self._caught or (name in self.guards.instead and missed == "attribute"):
            conditions += NEVER
        self.reading.uses.add(Use(self.program.place(node), name, advice, conditions))

    def refer(
        self, node: ast.AST, name: str, imported: bool = False, written: int | None = None, passed: bool = False
    ) -> None:
        if not is_of_jax(name) or ("import" if imported else "attribute") in self._caught:
            return
        if any(f"{name}.".startswith(f"{own}.") for own in self.bindings.assigned):
            return
        if written is None:
            written = 0 if imported else sum(isinstance(part, ast.Attribute) for part in ast.walk(node))
        parts = name.split(".")
        bound, rest = ".".join(parts[: len(parts) - written]), parts[len(parts) - written :]
        found = Reference(self.program.place(node), name, imported, written, self._asked, self._conditions, passed)
        for other in () if imported else self.guards.instead.get(bound, ()):
            if other != OTHERWISE:
                where = (*self._conditions, (bound, False))
                instead = dataclasses.replace(found, name=".".join([other, *rest]), conditions=where)
                self.reading.references.append(instead)
            found = dataclasses.replace(found, conditions=(*found.conditions, (bound, True)))
        self.reading.references.append(found)

    # Scopes, and code that runs only if a name exists

    def visit_head(self, function: Any) -> None:
        for outer in (*getattr(function, "decorator_list", ()), function.args):
            self.visit(outer)
        if getattr(function, "returns", None) is not None and not self._late_annotations:
            self._visit_asked(function.returns)
        for decorator in getattr(function, "decorator_list", ()):
            self._derivative_of(decorator, function)

    def visit_body(self, body: Iterable[ast.AST]) -> None:
        with self._within(_caught=set(), _in_function=True):  # the body runs later
            self._visit_all(body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        with self._within(_in_function=False):
            self.generic_visit(node)

    @contextlib.contextmanager
    def _within(self, **state: Any) -> Iterator[None]:
        """Visit something in another state: other exceptions are caught, or other conditions hold."""
        before = {name: getattr(self, name) for name in state}
        vars(self).update(state)
        yield
        vars(self).update(before)

    def visit_arg(self, node: ast.arg) -> None:
        if node.annotation is not None and not self._late_annotations:
            self._visit_asked(node.annotation)

    def _visit_asked(self, node: ast.AST, asked: bool = True) -> None:
        """Visit an expression, such as a type, that asks about names and does not use them."""
        with self._within(_asked=asked):
            self.visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._follow_assignment(node)
        self.visit(node.target)
        if not self._late_annotations and not self._in_function:  # annotations of local variables are not evaluated
            self._visit_asked(node.annotation)
        if node.value is not None:
            self.visit(node.value)

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        with self._catching(caught_by(node, self.bindings)):
            self._visit_all(node.body)
        for handler in node.handlers:
            self._visit_all([] if handler.type is None else [handler.type])
            self._visit_all(handler.body)
        with self._where(self.guards.imports_in(node.body)):
            self._visit_all(node.orelse)
        self._visit_all(node.finalbody)

    visit_TryStar = visit_Try

    def visit_With(self, node: ast.With) -> None:
        self._visit_all(node.items)
        contexts = [item.context_expr for item in node.items]
        calls = [c for c in contexts if isinstance(c, ast.Call) and self.bindings.of(c.func) == "contextlib.suppress"]
        with self._catching(caught_names(arg for call in calls for arg in call.args)):
            self._visit_all(node.body)

    def _catching(self, caught: set[str]) -> contextlib.AbstractContextManager[None]:
        return self._within(_caught=self._caught | caught)

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> None:
        self.visit(node.test)
        for branch, holds in ((node.body, True), (node.orelse, False)):
            with self._where(self.guards.conditions(node.test, holds)):
                self._visit_all(branch if isinstance(branch, list) else [branch])

    visit_IfExp = visit_While = visit_If

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """``hasattr(jax, 'x') and jax.x``, or ``not hasattr(jax, 'x') or jax.x``."""
        with self._where(()):
            for value in node.values:
                self.visit(value)
                self._conditions += self.guards.conditions(value, isinstance(node.op, ast.And))

    def _where(self, conditions: Conditions) -> contextlib.AbstractContextManager[None]:
        return self._within(_conditions=self._conditions + conditions)

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        """Visit statements in order; those after ``if x is None: return`` are reached only if x is not None."""
        with self._where(()):
            for node in nodes:
                self.visit(node)
                if isinstance(node, ast.If):
                    for branch, holds in ((node.body, False), (node.orelse, True)):
                        if branch and not isinstance(branch[-1], ast.If) and gives_up(branch[-1], self.bindings):
                            self._need(branch[-1], node.test, holds)
                if "import" in self._caught or not isinstance(node, (ast.Import, ast.ImportFrom)):
                    self._conditions += self.guards.known_after(node)

    def _need(self, node: ast.AST, test: ast.expr, holds: bool) -> None:
        """The program ends at a node unless a test is true, or is false: ``assert hasattr(jax, 'x')``."""
        for name, there in self.guards.conditions(test, holds):
            if there and name and isinstance(name, str):
                place = self.program.place(node)
                self.reading.references.append(Reference(place, name, True, 0, self._asked, self._conditions))

    def visit_Assert(self, node: ast.Assert) -> None:
        self._need(node, node.test, True)
        self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        for _, value in ast.iter_fields(node):
            parts = value if isinstance(value, list) else [value]
            self._visit_all(part for part in parts if isinstance(part, ast.AST))

    # Modules that are passed on as values

    def visit_Assign(self, node: ast.Assign | ast.NamedExpr) -> None:
        self._follow_assignment(node)
        self.generic_visit(node)

    visit_NamedExpr = visit_Assign

    def visit_arguments(self, node: ast.arguments) -> None:
        self._follow(*node.defaults, *(default for default in node.kw_defaults if default is not None))
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        self._follow(node.value)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        for part in (node.left, node.right):
            self._visit_asked(part, self._asked or isinstance(node.op, ast.BitOr))  # a union of types

    def visit_Compare(self, node: ast.Compare) -> None:
        self._follow(node.left, *node.comparators)
        for part in (node.left, *node.comparators):
            self._visit_asked(part)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if str(self.bindings.of(node.value)).startswith("typing."):
            self._visit_asked(node.slice)
            return
        name = text_of(node.slice)
        if self.bindings.of(node.value) == "sys.modules" and is_of_jax(name) and isinstance(node.ctx, ast.Load):
            self.refer(node, name, passed=True)
        self.generic_visit(node)

    def _follow_assignment(self, node: ast.Assign | ast.AnnAssign | ast.NamedExpr) -> None:
        """Mark an assigned value as followed if the name is known to stand for it."""
        self._follow(*(value for target, value in assigned(node) if self.bindings.of(target) is not None))

    def _follow(self, *values: ast.expr) -> None:
        for value in values:
            self._followed |= {id(v) for v in ([value.body, value.orelse] if isinstance(value, ast.IfExp) else [value])}

    # Names

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            advice = family_advice(alias.name)
            if advice is not None:
                self.add(alias, alias.name, advice)
            elif "module" not in self._caught:
                self.refer(alias, alias.name, imported=True)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            name = str(node.module) if alias.name == "*" else f"{node.module}.{alias.name}"
            # ModuleNotFoundError is raised only if the module itself does not exist.
            there = ((str(node.module), True),) if "module" in self._caught else ()
            advice = None if node.level else family_advice(name)
            if advice is not None and advice is not known.REFUSED_NAME:
                self.add(alias, name, advice)
            elif not node.level:
                with self._where(there):
                    self.refer(alias, name, imported=True)

    def visit_Name(self, node: ast.Name) -> None:
        found = self.bindings.of(node)
        stars = self._from_star(node) if found is None else []
        name = next(reversed(stars), found)
        if name is None or not isinstance(node.ctx, ast.Load):
            return
        advice = family_advice(name)
        # A name that needs another import was reported at the import; modules are reported at their attributes.
        if advice is None or name == MAPS:
            with self._where(tuple((star, False) for star in stars[:-1])):
                self.refer(node, name, written=len(stars[:1]) or None, passed=id(node) not in self._followed)
        elif advice.status != known.CHANGE or advice is known.REFUSED_NAME:
            self.add(node, name, advice)

    def _from_star(self, node: ast.AST) -> list[str]:
        """The meanings that a name may have which only ``from jax import *`` binds."""
        stars = self.bindings.stars
        if not stars or not all(map(is_of_jax, stars)) or not isinstance(node, ast.Name) or node.id in self._bound:
            return []
        names = [f"{module}.{node.id}" for module in stars]
        known_ones = [name for name in names if name in removed.NAMES or family_advice(name)]
        return known_ones[:1] or names

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._follow(node.value)
        name = self.bindings.of(node)
        advice = family_advice(name)
        if advice is not None:
            self.add(node, str(name), advice)
        elif node.attr in removed.XMAP_OPTIONS:
            self.add(node, node.attr, known.xmap_option(node.attr))
        elif name is None and self._jax_is_imported and node.attr in arrays.ATTRIBUTES.keys() - self._methods:
            self.add(node, f"array.{node.attr}", known.written(arrays.ATTRIBUTES[node.attr]))
            self.visit(node.value)
        elif node.attr == "named_shape" and self._is_type(node.value):
            self.add(node, "aval.named_shape", known.TYPE_NAMED_SHAPE)
            self.visit(node.value)
        elif node.attr == "named_shape" and self.uses_xmap and not str(name).startswith("xmap_compat."):
            self.add(node, "named_shape", known.NAMED_SHAPE)
            self.visit(node.value)
        elif name is not None and isinstance(node.ctx, ast.Load):
            if any(family_advice(name.rsplit(".", k)[0]) for k in range(1, name.count(".") + 1)):
                self.visit(node.value)
            elif node.attr == "__dict__":
                self.refer(node, name.rpartition(".")[0], passed=True)
            else:
                self.refer(node, name, passed=id(node) not in self._followed)
        else:
            self.visit(node.value)

    @property
    def _jax_is_imported(self) -> bool:
        return any(map(is_of_jax, self.bindings.modules))

    def _is_type(self, node: ast.AST) -> bool:
        """Whether an expression is the type of an array: ``x.aval``, or ``jax.core.get_aval(x)``."""
        called = self.bindings.of(node.func) if isinstance(node, ast.Call) else None
        return (self.uses_xmap and isinstance(node, ast.Attribute) and node.attr == "aval") or called in TYPES_OF

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value in removed.XMAP_OPTIONS:
            self.add(node, str(node.value), known.xmap_option(node.value))
        elif node.value == MAPS:
            self.add(node, MAPS, known.FAMILY[MAPS])

    # Calls

    def visit_Call(self, node: ast.Call) -> None:
        name, args = self.bindings.called(node)
        name = name or next(iter(self._from_star(node.func)), None)
        if name is not None and getattr(node.func, "id", "") in self.guards.bare and "call" not in self._caught:
            self.refer(node.func, name, written=1)
        if self._asked:
            return self._visit_asked(node, asked=False)
        if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
            self._visit_all(node.args[:1])
            for types in node.args[1:]:
                self._visit_asked(types)
            return None
        self._named_by_text(node)
        self._follow_arguments(node)
        if name == "jax.numpy.einsum" and args and "{" in text_of(args[0]):
            self.add(node, "jax.numpy.einsum with braces", known.BRACES)
        if name is not None and is_of_jax(name):
            self._keywords(node, name, args)
            self._option(node, name)
        elif self._jax_is_imported and self.bindings.of(node.func) is None:
            for place, method, advice in arrays.in_call(node, self._methods):
                self.add(place, method, advice)
        if name in XMAPS:
            for key in unused_resources(node):
                self.add(key, f"axis_resources of {text_of(key)!r}", known.IGNORED)
            for keyword in node.keywords:
                if keyword.arg is not None and keyword.arg not in XMAP_KEYWORDS:
                    self.add(keyword, f"xmap({keyword.arg}=)", known.NO_KEYWORD)
        if name in DERIVATIVES and args and self.through_xmap.leads(args[0]):
            self.add(node, f"{name} of a function that calls an xmapped one", known.GRADIENT)
        if name in known.NAMED_AXIS_FUNCTIONS or self._is_reducing_method(node):
            self._axis_strings(node)
        self.generic_visit(node)

    def _named_by_text(self, node: ast.Call) -> None:
        """Names given as text: ``getattr(jax, 'tree_map')``, ``importlib.import_module('jax.linear_util')``."""
        name = self.bindings.of(node)
        if name is None or family_advice(name) is not None:
            return
        module, _ = self.bindings.module_of(node)
        if not module:
            self.refer(node, name, written=1)
        elif "module" not in self._caught:
            self.refer(node, module, imported=True)
            self.reading.modules.add(module)

    def _follow_arguments(self, node: ast.Call) -> None:
        """Mark arguments as followed if the function reads no names from them; report calls that run code in a text."""
        function = node.func.id if isinstance(node.func, ast.Name) else ""
        read_here = function in ("getattr", "setattr") and len(node.args) > 1 and bool(self.bindings.text(node.args[1]))
        if function in LOOKING or read_here or self.bindings.of(node.func) == "importlib.reload":
            self._follow(*node.args)
        elif function in ("exec", "eval") and node.args and (not (code := text_of(node.args[0])) or "jax" in code):
            self.add(node, function, known.CODE_IN_TEXT)
        elif self.bindings.imports(node) and any(map(self._may_name_jax, node.args[:1])):
            self.add(node, "an import", known.CODE_IN_TEXT)

    def _may_name_jax(self, node: ast.expr) -> bool:
        """``f"jax.{name}"``, ``"jax." + name``; or ``name``, where the program has texts such as ``"jax.lax"``."""
        if self.bindings.text(node):
            return False
        is_open = any(isinstance(part, ast.Name) for part in ast.walk(node))
        texts = [text_of(part) for part in ast.walk(self.program.tree if is_open else node)]
        return any(is_of_jax(text) and "." in text and " " not in text for text in texts)

    def _derivative_of(self, decorator: ast.expr, function: ast.AST) -> None:
        """``@jax.grad``, also with arguments, on a function that calls an xmapped one."""
        name = self.bindings.called(decorator)[0] if isinstance(decorator, ast.Call) else self.bindings.of(decorator)
        parts = (part for statement in function.body for part in ast.walk(statement))  # type: ignore[attr-defined]
        if name in DERIVATIVES and any(map(self.through_xmap.calls_xmapped, parts)):
            self.add(decorator, f"{name} of a function that calls an xmapped one", known.GRADIENT)

    def _keywords(self, node: ast.Call, name: str, args: list[ast.expr]) -> None:
        given: list[tuple[ast.AST, str, ast.expr]] = list(self.bindings.keywords_of(node))
        if len(args) > 1 and not any(isinstance(argument, ast.Starred) for argument in args):
            given.append((node, str(len(args)), node))
        if name == "jax.pure_callback" and not {"vectorized", "vmap_method"} & {k for _, k, _ in given}:
            given = [*given, (node, "without vmap_method", node)]
        for place, keyword, value in given:
            is_default = keyword == "reduce_axes" and ast.unparse(value) == "()"
            if not is_default and family_advice(name) is None and "call" not in self._caught:
                self.reading.keywords.append((self.program.place(place), name, keyword, self._conditions))

    def _option(self, node: ast.Call, name: str) -> None:
        if name not in OPTION_FUNCTIONS or "attribute" in self._caught:
            return
        given = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "name"), node)
        option = text_of(given)
        if not option:
            self.add(node, name, known.OPTION_UNSEEN)
        elif option not in removed.XMAP_OPTIONS:
            self.reading.options.append((self.program.place(given), option))

    def _is_reducing_method(self, node: ast.Call) -> bool:
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr in known.REDUCTIONS
        return self.uses_xmap and is_method and self.bindings.of(node.func) is None

    def _axis_strings(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            axis = text_of(keyword.value)
            if keyword.arg == "axis" and len(axis) > 1 and axis not in known.POSITIONAL_WORDS:
                self.add(keyword, f"axis={axis!r}", known.AXIS_STRING)
