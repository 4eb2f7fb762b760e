"""The meanings of the names in a program: imports, aliases of imports, and the scopes that hide them."""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from xmap_compat.tools.leave.old_check.advice import MAPS, MAPS_NAMES
from xmap_compat.tools.leave.old_check.neighbours import ALL, OWN, NamesOf, Neighbours, leads_on
from xmap_compat.tools.leave.old_check.sources import program_of

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
PARTIALS = ("functools.partial", "jax.util.partial", "jax.partial")


@dataclasses.dataclass
class NameScope:
    """A module or a function: the meanings of its names, and those of its names that hide names of outer scopes."""

    names: dict[str, str] = dataclasses.field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    imports: list[tuple[tuple[int, int], str, str]] = dataclasses.field(default_factory=list)  # places, names, meanings

    def at(self, node: ast.Name) -> str:
        """The meaning of a name at a place of this scope: that of the last import before, if there is one."""
        place = (node.lineno, node.col_offset)
        before = (found for at, name, found in reversed(self.imports) if name == node.id and at < place)
        return next(before, self.names[node.id])


class Bindings:
    """The meanings of the names in one program: ``{'maps': 'jax.experimental.maps'}``.

    Attributes:
      modules: the modules that it imports, and the names that it imports from modules and that may be modules.
      stars: the modules from which it imports everything.
      assigned: the dotted names that it assigns.
      values: the names that it binds exactly once, by an assignment, with their values.
    """

    def __init__(self, tree: ast.Module, neighbours: Neighbours | None = None):
        nodes = list(ast.walk(tree))
        self._neighbours = neighbours
        self._owners = {"self", "cls", *(node.name for node in nodes if isinstance(node, ast.ClassDef))}
        self._attributes: dict[str, str] = {}
        self.modules: set[str] = set()
        self.stars: list[str] = []
        self._partials: dict[str, str] = {}
        self.values = assigned_once(
            nodes, lambda name, value: name not in {getattr(part, "id", "") for part in ast.walk(value)}
        )
        self._scopes = [NameScope()]
        # Imports in functions are visible from elsewhere too, because the names may be global.
        self._anywhere: dict[str, str] = {}
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._anywhere.update(self._imported(node))
                if isinstance(node, ast.Import):
                    self.modules |= {alias.name for alias in node.names}
                elif not node.level:
                    self.modules |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
                    self.stars += [str(node.module) for alias in node.names if alias.name == "*"]
        self._fill(self._scopes[0], list(own_nodes(tree.body, classes=True)))
        for node in nodes:
            self._note_partial(node)
        self.assigned = {name for node in nodes if (name := self._assigned_by(node)) is not None}
        self._attributes.update(self._attribute_aliases(nodes))

    def _assigned_by(self, node: ast.AST) -> str | None:
        """The dotted name that is assigned; also by ``setattr(jax, 'x', f)`` and ``sys.modules['jax.x'] = module``."""
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            return self.of(node)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and len(node.args) == 3:
            owner, name = self.of(node.args[0]), constant_text(node.args[1])
            return f"{owner}.{name}" if owner is not None and name else None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            return constant_text(node.slice) or None if self.of(node.value) == "sys.modules" else None
        return None

    def exported(self) -> dict[str, str]:
        """The names of the module that lead to JAX, or to modules beside it, with their meanings."""
        found = {name: value for name, value in self._scopes[0].names.items() if leads_on(value)}
        public = self.values.get(ALL)
        return {**found, ALL: " ".join(map(text_of, getattr(public, "elts", ())))}

    def _imported(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        """The names that an import binds, with their meanings; the program's own modules are read for theirs."""
        own = {} if self._neighbours is None else dict(self._neighbours.imported(node))
        yield from (dict(imported_names(node)) | own).items()

    def _note_partial(self, node: ast.AST) -> None:
        """``pjit = functools.partial(pjit, ...)``: a call of the partial is a call of the function."""
        for name, value in assignments(node):
            if isinstance(value, ast.Call) and self.of(value.func) in PARTIALS:
                function, _ = self.called(value)
                if function is not None:
                    self._partials.setdefault(name, function)

    def _fill(self, scope: NameScope, nodes: list[ast.AST]) -> None:
        """Add imports of a scope, and then aliases: ``maps = jax.experimental.maps``, if the name is assigned once."""
        second = _second_choices(nodes)
        for node in nodes:
            for name, imported in self._imported(node):
                if id(node) not in second or not leads_on(scope.names.get(name, "")):
                    scope.names[name] = imported
                    scope.imports.append(((node.lineno, node.col_offset), name, imported))  # type: ignore[attr-defined]
        stored = Counter(n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        for name, found in self._aliases((pair for node in nodes for pair in assignments(node)), stored):
            scope.names.setdefault(name, found)
        scope.hidden -= scope.names.keys()

    def _attribute_aliases(self, nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
        """``self.np = jax.numpy``, if an attribute of this name is assigned once."""
        pairs = [(target.attr, value) for n in nodes for target, value in assigned(n) if self._is_own(target)]
        for body in (node.body for node in nodes if isinstance(node, ast.ClassDef)):
            pairs += [pair for statement in body for pair in assignments(statement)]
            yield from (pair for statement in body for pair in self._imported(statement) if leads_on(pair[1]))
        yield from self._aliases(pairs, Counter(attribute for attribute, _ in pairs))

    def _aliases(self, pairs: Iterable[tuple[str, ast.expr]], counts: Counter[str]) -> Iterator[tuple[str, str]]:
        """Names that are assigned once, if the value leads to JAX."""
        yield from ((name, found) for name, v in pairs if (found := self._first_of_jax(v)) and counts[name] == 1)

    def _is_own(self, node: ast.AST) -> TypeGuard[ast.Attribute]:
        """Whether an expression is an attribute of ``self``, ``cls`` or a class of the program."""
        return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self._owners

    def _first_of_jax(self, value: ast.expr) -> str | None:
        choices = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
        found = (self.of(choice) or self.of_getattr(choice) for choice in choices)
        return next((name for name in found if name is not None and leads_on(name)), None)

    def enter(self, function: ast.AST) -> None:
        """From here on, names are looked up from within a function."""
        assert isinstance(function, FUNCTIONS)
        nodes = list(own_nodes([function.body] if isinstance(function, ast.Lambda) else function.body))
        defaults = {name: found for name, value in _defaults(function.args) if (found := self._first_of_jax(value))}
        self._scopes.append(NameScope(hidden=_locals(function, nodes)))
        self._fill(self._scopes[-1], nodes)
        self._scopes[-1].names = defaults | self._scopes[-1].names

    def leave(self) -> None:
        self._scopes.pop()

    @property
    def in_function(self) -> bool:
        return len(self._scopes) > 1

    def of_name(self, name: str) -> str | None:
        for scope in reversed(self._scopes):
            if name in scope.names:
                return scope.names[name]
            if name in scope.hidden:
                return None
        return self._anywhere.get(name)

    def of(self, node: ast.AST) -> str | None:
        """``'jax.lax.psum'`` for the expression ``lax.psum``; None for other expressions than imported dotted names.

        ``getattr(lax, 'psum')`` and ``importlib.import_module('jax.lax')`` are such names too.
        """
        if isinstance(node, ast.Name):
            inner = self._scopes[-1]
            return inner.at(node) if node.id in inner.names else self.of_name(node.id)
        if isinstance(node, ast.Attribute):
            value = self.of(node.value)
            if value is None:
                return self._attributes.get(node.attr) if self._is_own(node) else None
            if self._neighbours is not None and value.startswith(OWN):
                return self._neighbours.attribute(value, node.attr)
            return f"{value}.{node.attr}"
        if isinstance(node, ast.NamedExpr):
            return self.of(node.value)
        return self._of_call(node) if isinstance(node, ast.Call) else None

    def _of_call(self, node: ast.Call) -> str | None:
        name, top = self.module_of(node)
        if name:
            return name.split(".")[0] if top else name
        return self.of_getattr(node) if len(node.args) == 2 else None

    def of_getattr(self, node: ast.expr) -> str | None:
        """``'jax.psum'`` for ``getattr(jax, 'psum')``, or ``getattr(jax, 'psum', None)``."""
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "getattr" or len(node.args) < 2:
            return None
        value, attribute = self.of(node.args[0]), self.text(node.args[1])
        is_none = all(isinstance(default, ast.Constant) and default.value is None for default in node.args[2:])
        return f"{value}.{attribute}" if value is not None and attribute and is_none else None

    def imports(self, node: ast.Call) -> bool:
        """Whether a call imports a module."""
        function = node.func.id if isinstance(node.func, ast.Name) else ""
        return function == "__import__" or self.of(node.func) == "importlib.import_module"

    def module_of(self, node: ast.Call) -> tuple[str, bool]:
        """The module that ``importlib.import_module('.lax', 'jax')`` imports; whether the call returns its first part.

        It does so for ``__import__('jax.lax')`` without ``fromlist``.
        """
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        name = self.text(node.args[0] if node.args else given.get("name"))
        if not self.imports(node):
            return "", False
        if isinstance(node.func, ast.Name) and node.func.id == "__import__":
            return name, len(node.args) < 4 and "fromlist" not in given
        if name.startswith("."):
            package = constant_text(node.args[1] if len(node.args) > 1 else given.get("package"))
            parts = package.split(".")[: 1 - (len(name) - len(name.lstrip("."))) or None]
            name = ".".join([*parts, name.lstrip(".")]) if package else ""
        return name, False

    def text(self, node: ast.AST | None) -> str:
        """The characters of a string literal, or of a name that has this value and no other."""
        return constant_text(self.values.get(node.id) if isinstance(node, ast.Name) else node)

    def keywords_of(self, node: ast.Call) -> Iterator[tuple[ast.AST, str, ast.expr]]:
        """The keywords of a call, with their values and places; also those of ``**{'axis': 0}`` and ``**options``."""
        for keyword in node.keywords:
            if keyword.arg is not None:
                yield keyword, keyword.arg, keyword.value
                continue
            value = self.values.get(getattr(keyword.value, "id", ""), keyword.value)
            if isinstance(value, ast.Dict):
                pairs = ((text_of(key), item) for key, item in zip(value.keys, value.values))
                yield from ((keyword.value, name, item) for name, item in pairs if name)
            elif isinstance(value, ast.Call) and getattr(value.func, "id", "") == "dict":
                yield from ((keyword.value, k.arg, k.value) for k in value.keywords if k.arg is not None)

    def called(self, node: ast.Call) -> tuple[str | None, list[ast.expr]]:
        """The function of a call and its positional arguments, through ``functools.partial``."""
        name = self.of(node.func)
        if name in PARTIALS and node.args:
            inner = node.args[0]
            if isinstance(inner, ast.Call) and self.of(inner.func) in PARTIALS:
                return self.called(inner)[0], []
            if isinstance(inner, ast.Name) and self.of(inner) is None:
                return self._partials.get(inner.id), []
            return self.of(inner), node.args[1:]
        if isinstance(node.func, ast.Call) and self.of(node.func.func) in PARTIALS:
            return self.called(node.func)[0], []
        if name is None and isinstance(node.func, ast.Name):
            return self._partials.get(node.func.id), []
        return name, node.args


def file_names(texts: Mapping[str, bytes] = {}) -> NamesOf:
    """The meanings of the names in each file of a program.  ``texts`` replace the contents of some files."""
    given = {os.path.abspath(path): text for path, text in texts.items()}

    @functools.cache
    def names_of(path: str) -> dict[str, str]:
        text = given.get(path)
        if text is None:
            with open(path, "rb") as file:
                text = file.read()
        return Bindings(program_of(text, path).tree, Neighbours(path, names_of)).exported()

    return names_of


class ScopedVisitor(ast.NodeVisitor):
    """Visits a program with the names that are in scope at each place."""

    bindings: Bindings

    def visit(self, node: ast.AST) -> None:
        if not isinstance(node, FUNCTIONS):
            super().visit(node)
            return
        self.visit_head(node)
        self.bindings.enter(node)
        self.visit_body([node.body] if isinstance(node, ast.Lambda) else node.body)
        self.bindings.leave()

    def visit_head(self, function: Any) -> None:
        """Visit the parts of a function that are evaluated where it is defined."""
        for outer in (*getattr(function, "decorator_list", ()), function.args, getattr(function, "returns", None)):
            if outer is not None:
                self.visit(outer)

    def visit_body(self, body: Iterable[ast.AST]) -> None:
        for part in body:
            self.visit(part)


def imported_names(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that an import binds, with their meanings."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            root = alias.name.split(".")[0]
            yield alias.asname or root, alias.name if alias.asname else root
    elif isinstance(node, ast.ImportFrom) and not node.level:
        for alias in node.names:
            names: Iterable[str] = MAPS_NAMES if alias.name == "*" and node.module == MAPS else [alias.name]
            for name in names:
                yield alias.asname or name, f"{node.module}.{name}"


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets that are assigned one value each, with their values."""
    if isinstance(node, ast.Assign):
        first = node.targets[0]
        if isinstance(first, ast.Tuple) and isinstance(node.value, ast.Tuple) and len(node.targets) == 1:
            yield from zip(first.elts, node.value.elts)
        else:
            yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        yield node.target, node.value


def assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names that are assigned one value each, with their values."""
    yield from ((target.id, value) for target, value in assigned(node) if isinstance(target, ast.Name))


def assigned_once(nodes: Iterable[ast.AST], wanted: Callable[[str, ast.expr], bool]) -> dict[str, ast.expr]:
    """Names that a program binds exactly once, by an assignment of a wanted value, with the value."""
    found: dict[str, ast.expr] = {}
    bound: Counter[str] = Counter()
    for node in nodes:
        bound.update(bound_by(node))
        found.update((name, value) for name, value in assignments(node) if wanted(name, value))
    return {name: value for name, value in found.items() if bound[name] == 1}


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    """Parameters that have a default, with the default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    values = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults, *arguments.kw_defaults]
    pairs = zip([*positional, *arguments.kwonlyargs], values, strict=True)
    yield from ((argument.arg, value) for argument, value in pairs if value is not None)


def _second_choices(nodes: Iterable[ast.AST]) -> set[int]:
    """Imports that run only where other imports did not: below ``except`` and ``else``."""
    branches: list[ast.AST] = []
    for node in nodes:
        if isinstance(node, ast.Try):
            branches += node.handlers
        elif isinstance(node, ast.If):
            branches += node.orelse
    return {id(part) for branch in branches for part in ast.walk(branch)}


def _locals(function: ast.AST, nodes: Sequence[ast.AST]) -> frozenset[str]:
    """The names that a function itself binds, except by imports."""
    assert isinstance(function, FUNCTIONS)
    parts = [*own_nodes([function.args]), *nodes]
    imports = [part for part in parts if isinstance(part, (ast.Import, ast.ImportFrom))]
    outer = (part.names for part in parts if isinstance(part, (ast.Global, ast.Nonlocal)))
    names = {name for part in parts if part not in imports for name in bound_by(part)}
    return frozenset(names.difference(*map(bound_by, imports), *outer))


def own_nodes(body: Iterable[ast.AST], classes: bool = False) -> Iterator[ast.AST]:
    """The nodes of a body in order, without those of inner functions, and without variables of comprehensions."""
    inner = (*FUNCTIONS, *COMPREHENSIONS) if classes else (*FUNCTIONS, *COMPREHENSIONS, ast.ClassDef)
    for node in body:
        yield node
        if not isinstance(node, inner):
            yield from own_nodes(ast.iter_child_nodes(node), classes)


def own_names(body: Iterable[ast.AST]) -> set[str]:
    """The names that statements bind in the scope that they are in."""
    return {name for node in own_nodes(body) for name in bound_by(node)}


def bound_anywhere(tree: ast.AST) -> set[str]:
    """Every name that a program binds in any way."""
    return {name for node in ast.walk(tree) for name in bound_by(node)}


def bound_by(node: ast.AST) -> list[str]:
    """The names that a node itself binds."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
    return [str(node.name)] if isinstance(node, kinds) else []


def first_line(node: Any) -> int:
    """The first line of a part of a program, including its decorators."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def constant_text(node: ast.AST | None) -> str:
    """The characters of a string literal."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def text_of(node: ast.AST | None) -> str:
    """The characters of a string literal, or the known characters of an f-string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    return constant_text(node)


def is_literal(node: ast.AST | None) -> bool:
    """Whether an expression consists of displays and constants only, so that all of its strings are visible."""
    kinds = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.expr_context)
    return node is None or all(isinstance(part, kinds) for part in ast.walk(node))
