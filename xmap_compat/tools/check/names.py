"""What the names of a program stand for: imports, aliases of them, and the scopes that hide them."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator

from xmap_compat.tools.check.advice import MAPS, MAPS_NAMES

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Bindings:
    """What the names of one program stand for: ``{'maps': 'jax.experimental.maps'}``.

    Attributes:
      modules: the modules that it imports, and names that it imports from modules, which may be modules too.
    """

    def __init__(self, tree: ast.AST):
        self._names: dict[str, str] = {}
        self._hidden: list[frozenset[str]] = []
        self.modules: set[str] = set()
        nodes = list(ast.walk(tree))
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.split(".")[0]
                    self._names[alias.asname or root] = alias.name if alias.asname else root
                    self.modules.add(alias.name)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                self._names.update(_imported_names(node))
                self.modules |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        self._follow_aliases(nodes)

    def _follow_aliases(self, nodes: list[ast.AST]) -> None:
        """``maps = jax.experimental.maps``, where the name is assigned once."""
        assigned = Counter(n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        for node in nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                value, name = self.of(node.value), node.targets[0].id
                if value is not None and value.startswith("jax.") and assigned[name] == 1:
                    self._names.setdefault(name, value)

    def enter(self, function: ast.AST) -> None:
        """From here on, names are seen from within a function."""
        self._hidden.append(_locals(function))

    def leave(self) -> None:
        self._hidden.pop()

    def of_name(self, name: str) -> str | None:
        return None if any(name in hidden for hidden in self._hidden) else self._names.get(name)

    def of(self, node: ast.AST) -> str | None:
        """``'jax.lax.psum'`` for the expression ``lax.psum``; None for what is not a dotted name from an import."""
        if isinstance(node, ast.Name):
            return self.of_name(node.id)
        if isinstance(node, ast.Attribute):
            value = self.of(node.value)
            return None if value is None else f"{value}.{node.attr}"
        return None

    def called(self, node: ast.Call) -> tuple[str | None, list[ast.expr]]:
        """The function of a call and its positional arguments, through ``functools.partial``."""
        name = self.of(node.func)
        if name in ("functools.partial", "jax.util.partial", "jax.partial") and node.args:
            return self.of(node.args[0]), node.args[1:]
        return name, node.args


def _imported_names(node: ast.ImportFrom) -> Iterator[tuple[str, str]]:
    for alias in node.names:
        names: Iterable[str] = MAPS_NAMES if alias.name == "*" and node.module == MAPS else [alias.name]
        for name in names:
            yield alias.asname or name, f"{node.module}.{name}"


def _locals(function: ast.AST) -> frozenset[str]:
    """The names that a function binds by itself, other than by imports."""
    assert isinstance(function, FUNCTIONS)
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    names = {argument.arg for argument in every if argument is not None}
    imported: set[str] = set()
    body = [function.body] if isinstance(function, ast.Lambda) else function.body
    for node in _own_nodes(body):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            imported |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            imported |= set(node.names)
    return frozenset(names - imported)


def _own_nodes(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a body without those of functions in it."""
    for node in body:
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield from _own_nodes(ast.iter_child_nodes(node))


def text_of(node: ast.AST) -> str:
    """The characters of a string literal, or of an f-string as far as they are known."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def is_literal(node: ast.AST | None) -> bool:
    """Whether an expression consists of displays and constants, so that all of its strings can be seen."""
    kinds = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.expr_context)
    return node is None or all(isinstance(part, kinds) for part in ast.walk(node))
