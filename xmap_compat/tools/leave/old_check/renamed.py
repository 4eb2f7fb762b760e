"""The old names that a program can replace with today's names of the same objects."""

from __future__ import annotations

import ast
import dataclasses
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator

from xmap_compat.legacy import removed
from xmap_compat.tools.leave.old_check.advice import HASHABLE, HASHABLES, LAX_NAMES, MAPS, OURS
from xmap_compat.tools.leave.old_check.names import Bindings, ScopedVisitor, constant_text
from xmap_compat.tools.leave.old_check.undeclared import may_be_undeclared
from xmap_compat.tools.leave.old_check.uses import is_of_jax

PACKAGE, SPEC, CONSTRAINT = "xmap_compat", removed.SPEC, "jax.experimental.pjit.with_sharding_constraint"
MESH, SHARDING = "jax.sharding.Mesh", removed.SHARDING
MESHES = (f"{MAPS}.Mesh", "jax.interpreters.pxla.Mesh")
# Rows of the table with the same objects or modules today; names that a supported JAX still has are left alone.
_SAME = [row for row in removed.TABLE if row.kind in (removed.ALIAS, removed.MODULE)]
RENAMED = {
    **{f"{MAPS}.{name}": f"{PACKAGE}.{now}" for name, now in OURS.items()},
    **{f"{MAPS}.{name}": HASHABLE for name in HASHABLES},
    **dict.fromkeys(MESHES, f"{PACKAGE}.Mesh"),
    **{f"jax.lax.{name}": f"{PACKAGE}.{name}" for name in LAX_NAMES},
    **{row.name: row.now for row in _SAME if row.until != "0.10.0"},
    CONSTRAINT: "jax.lax.with_sharding_constraint",
}
MOVED = {row.name for row in _SAME if row.kind == removed.MODULE}
GONE = {MAPS, *removed.GONE_MODULES, *MOVED}
READERS = {"exec", "eval", "globals", "locals", "vars"}


@dataclasses.dataclass(frozen=True)
class Others:
    """Facts about the files of a program that affect each other.

    Attributes:
      taken: names that a file takes from modules other than JAX's; another of these files may define them.
      compared: old names that are used as values: ``isinstance(mesh, maps.Mesh)``.
    """

    taken: frozenset[str] = frozenset()
    compared: frozenset[str] = frozenset()


class Mentions(ScopedVisitor):
    """The places where a program mentions old modules and names.

    Attributes:
      read: for each old module, the names that are read from it.
      kept: old modules that are used in other ways than by names that are written out.
    """

    def __init__(self, tree: ast.Module, bindings: Bindings, path: str = "", others: Others = Others()):
        self.bindings = bindings
        self.read: dict[str, set[str]] = defaultdict(set)
        self.kept: set[str] = set()
        self.taken: set[str] = set()
        self.compared: set[str] = set()
        self.undeclared: list[ast.Call] = []
        self.jits_specs = False
        self._tree = tree
        self._unvalued = {id(part) for node in ast.walk(tree) for part in _called_or_types(node)}
        texts = {constant_text(node) for node in ast.walk(tree)} - {""}
        self._exported = others.taken | texts
        self._is_package = os.path.basename(path) == "__init__.py"
        self.kept |= {m for m in GONE for text in texts | bindings.assigned if f"{text}.".startswith(f"{m}.")}
        self._names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if self._names & READERS:
            self.kept |= GONE
        self.visit(tree)

    def others(self) -> Others:
        return Others(frozenset(self.taken), frozenset(self.compared))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or not is_of_jax(str(node.module)):
            self.taken |= self._names if node.names[0].name == "*" else {alias.name for alias in node.names}
        elif node.names[0].name == "*":
            self.kept.add(str(node.module))
        for alias in node.names:
            self._bind(f"{node.module}.{alias.name}", alias.asname or alias.name)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._bind(alias.name, alias.asname or "")

    def _bind(self, name: str, local: str) -> None:
        if not self.bindings.in_function and (local in self._exported or self._is_package) and name in GONE:
            self.kept.add(name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = self.bindings.of(node.value)
        if owner is not None and not is_of_jax(owner):
            self.taken.add(node.attr)
        if owner in GONE and isinstance(node.ctx, ast.Load):
            self.read[owner].add(node.attr)
        else:
            self.visit(node.value)
        self._note(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._note(node)

    def visit_Call(self, node: ast.Call) -> None:
        if self.bindings.of(node.func) == f"{MAPS}.xmap" and may_be_undeclared(node, self._tree):
            self.undeclared.append(node)
        if self.bindings.called(node)[0] == "jax.jit":
            given = [k.value for k in node.keywords if k.arg in ("in_shardings", "out_shardings")]
            called = {self.bindings.of(part.func) for v in given for part in ast.walk(v) if isinstance(part, ast.Call)}
            self.jits_specs |= SPEC in called and SHARDING not in called
        self.generic_visit(node)

    def _note(self, node: ast.expr) -> None:
        name = self.bindings.of(node)
        if name in GONE:
            self.kept.add(name)
        if name in (*MESHES, MESH) and id(node) not in self._unvalued:
            self.compared.add(name)


class Renaming:
    """The names that one program can replace, with their replacements.

    Attributes:
      names: dotted names, each with today's name.
      modules: old modules, each with a module of today that has every name that is read from the old one.
    """

    def __init__(self, tree: ast.Module, bindings: Bindings, path: str, others: Others):
        mentions = Mentions(tree, bindings, path, others)
        blocked = bindings.assigned | _replaced(tree, bindings) | {f"{MAPS}.xmap" for _ in mentions.undeclared[:1]}
        self.names = {name: now for name, now in RENAMED.items() if name not in blocked}
        compared = mentions.compared | others.compared
        if mentions.jits_specs and MESH not in compared:  # under its `with`, jax.jit takes specs
            self.names[MESH] = f"{PACKAGE}.Mesh"
        self.names.update((name, MESH) for name in MESHES if name in compared and name in self.names)
        self.modules = {name: RENAMED[name] for name in MOVED - blocked}
        for module in mentions.read.keys() - mentions.kept - MOVED:
            now = [self.names.get(f"{module}.{name}") for name in mentions.read[module]]
            homes = {name and name.rpartition(".")[0] for name in now}
            if len(homes) == 1 and (home := homes.pop()):
                self.modules[module] = home

    def of(self, name: str) -> str | None:
        """Today's name for a dotted name; None if the old name stays."""
        module, _, last = name.rpartition(".")
        if module in MOVED:
            return f"{self.modules[module]}.{last}" if module in self.modules else None
        return self.modules.get(name) or (self.names.get(name))


def _called_or_types(node: ast.AST) -> Iterator[ast.AST]:
    """The functions that a node calls, and the types that it declares, unless a decorator may read the types."""
    if isinstance(node, ast.Call):
        yield node.func
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.decorator_list:
        types = [node.returns, *(arg.annotation for arg in ast.walk(node.args) if isinstance(arg, ast.arg))]
        yield from (part for kind in types if kind is not None for part in ast.walk(kind))
    elif isinstance(node, ast.AnnAssign):
        yield from ast.walk(node.annotation)


def _replaced(tree: ast.AST, bindings: Bindings) -> set[str]:
    """Names that a program may replace: ``mock.patch.object(jax, 'tree_map')``, ``mock.patch('jax.tree_map')``."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    calls = [call for call in calls if getattr(call.func, "id", "") not in ("hasattr", "getattr")]
    found = {text for call in calls for argument in call.args if (text := constant_text(argument))}
    owners = {owner for call in calls for argument in call.args if (owner := bindings.of(argument))}
    by_part = {f"{owner}.{text}" for owner in owners for text in found}
    return {name for name in RENAMED if name in found or name in by_part}


def others_of(programs: Iterable[tuple[ast.Module, Bindings, str]]) -> Others:
    """The names that these files import from each other, and the old names that they compare."""
    every = [Mentions(tree, bindings, path).others() for tree, bindings, path in programs]
    return Others(frozenset().union(*(o.taken for o in every)), frozenset().union(*(o.compared for o in every)))
