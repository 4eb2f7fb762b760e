"""The edits that the xmaps of a file have in common: imports, mesh contexts, ``thread_resources``, renamed names."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from collections.abc import Iterable, Sequence, Set

from xmap_compat.tools.leave.construction import Entered
from xmap_compat.tools.leave.old_check import fix
from xmap_compat.tools.leave.old_check.advice import MAPS, MAPS_NAMES
from xmap_compat.tools.leave.old_check.fix import Edit, replacing
from xmap_compat.tools.leave.old_check.names import (
    Bindings,
    ScopedVisitor,
    bound_anywhere,
    bound_by,
    constant_text,
)
from xmap_compat.tools.leave.old_check.renamed import RENAMED
from xmap_compat.tools.leave.old_check.sources import NOTEBOOK, program_of
from xmap_compat.tools.source.helper_texts import HELPERS
from xmap_compat.tools.source.imports import IMPORTED
from xmap_compat.tools.source.text import Names
from xmap_compat.tools.source.user_code import Piece

_HOMES = (MAPS, "xmap_compat", "jax.interpreters.pxla")
_OLD = tuple(f"{home}." for home in _HOMES)
_MESHES = [f"{home}.{name}" for home in _HOMES for name in ("Mesh", "mesh")]
_CONTEXTS = ("jax.sharding.Mesh", "jax.make_mesh", *_MESHES)
_LOOPS = [f"{home}.serial_loop" for home in _HOMES]
_INSTALL = ("xmap_compat.install", "xmap_compat.legacy.install")
_READS = {
    "thread_resources.env.shape": "jax.sharding.get_abstract_mesh().shape",
    "thread_resources.env.physical_mesh": "jax.sharding.get_mesh()",
}
_IMPORTS = (ast.Import, ast.ImportFrom)
# What an edit may name, with where it comes from.
MODULES = {name: module.__name__ for name, module in IMPORTED.items()}
MODULES |= {"contextlib": "contextlib", "P": "jax.sharding.PartitionSpec", "partial": "functools.partial"}


class FileNames:
    """The names under which a file knows modules and helpers; names that it lacks are imported."""

    def __init__(self, tree: ast.Module, helpers: str):
        self.helpers = helpers
        self.added: dict[str, tuple[str, str]] = {}  # by name, where from and what
        bindings, nodes = Bindings(tree), list(ast.walk(tree))
        top = {name for node in _imports(tree.body) for name in bound_by(node)}
        meant = {name: bindings.of_name(name) or "" for name in sorted(top - _own_names(tree))}
        self._known = {RENAMED.get(home, home): name for name, home in meant.items()}  # as they are imported then
        self._known |= {f"{home}.partial": f"{own}.partial" for home, own in self._known.items() if home == "functools"}
        self._fresh = Names({*bound_anywhere(tree), *(n.id for n in nodes if isinstance(n, ast.Name))})

    def name(self, wanted: str) -> str:
        if wanted not in MODULES and wanted not in HELPERS:
            return wanted  # the file's own
        home = MODULES.get(wanted, f"{self.helpers}.{wanted}")
        if home not in self._known:
            self._known[home] = own = self._fresh.like(wanted)
            module, _, last = home.rpartition(".")
            self.added[own] = f"from {module} " * bool(module), f"{last} as {own}" if last != own else last
        return self._known[home]


def _own_names(tree: ast.Module) -> set[str]:
    """The names that a file binds otherwise than by imports."""
    return {name for node in ast.walk(tree) if not isinstance(node, _IMPORTS) for name in bound_by(node)}


def _imports(statements: Iterable[ast.AST]) -> Iterable[ast.Import | ast.ImportFrom]:
    """The imports that are executed with a module, but for those that only type checkers see."""
    for statement in statements:
        if isinstance(statement, _IMPORTS):
            yield statement
        elif isinstance(statement, (ast.Try, ast.ExceptHandler)) or (
            isinstance(statement, ast.If) and not ast.unparse(statement.test).endswith("TYPE_CHECKING")
        ):
            yield from _imports(ast.iter_child_nodes(statement))


class Shared(ScopedVisitor):
    """The edits of a whole file.

    Args:
      entered: where the program has entered meshes.

    Attributes:
      left: the names of this package, or of the old modules, that it still imports.
    """

    def __init__(self, file: Piece, names: FileNames, entered: Set[Entered]):
        self.text, self.tree, self.names = file.text, file.tree, names
        self._path = file.file
        self._program = program_of(file.text, file.file.replace(NOTEBOOK, ".py"))
        self._entered = {tuple(place) for path, *place in entered if os.path.realpath(path) == file.file}
        self.edits: list[Edit] = []
        self.left: list[str] = []
        self.bindings, self._own = fix.bindings_of(self._program), _own_names(file.tree)
        self.visit(file.tree)

    def _replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        self.edits.append(replacing(node, text.replace("jax.", f"{self.names.name('jax')}.")))

    def visit_With(self, node: ast.With) -> None:
        for k, item in enumerate(node.items):
            context, bound = item.context_expr, item.optional_vars
            function = context.func if isinstance(context, ast.Call) else context
            if self.bindings.of(function) in _LOOPS:
                self._replace(context, f"{self.names.name('contextlib')}.nullcontext()")
            elif isinstance(bound, (ast.Name, type(None))) and (
                self.bindings.of(function) in _CONTEXTS
                or {(node.lineno, node.col_offset, k), (context.lineno, context.col_offset, 0)} & self._entered
            ):
                (start, end), own = _bounds(context), f"{bound.id} := " if bound is not None else ""
                last = _bounds(bound)[1] if bound is not None else end
                self.edits += [Edit(start, start, f"{self.names.name('jax')}.set_mesh({own}"), Edit(end, last, ")")]
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        value = node.value
        if not (self.bindings.of(node.targets[0]) or "").endswith("thread_resources.env"):
            return self.generic_visit(node)
        if (self.bindings.of(value) or "").endswith(".EMPTY_ENV"):
            return self._replace(
                node, f"jax.set_mesh(jax.sharding.Mesh({self.names.name('np')}.empty((), object), ()))"
            )
        if not (isinstance(value, ast.Call) and (value.args or value.keywords)):
            return self.generic_visit(node)
        mesh = value.args[0] if value.args else value.keywords[0].value
        (start, end), (first, last) = _bounds(node), _bounds(mesh)
        self.edits += [Edit(start, first, f"{self.names.name('jax')}.set_mesh("), Edit(last, end, ")")]
        return self.visit(mesh)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.bindings.of(node) or ""
        new = next((new for old, new in _READS.items() if name.endswith(f".{old}")), None)
        if new is not None and isinstance(node.ctx, ast.Load):
            self._replace(node, new)
        elif name in _MESHES:
            self._replace(node, "jax.sharding.Mesh")
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        name, reads = self.bindings.of(node), isinstance(node.ctx, ast.Load) and node.id not in self._own
        if name in _MESHES and reads and not (node.id == "Mesh" and name.endswith(".Mesh")):
            self._replace(node, "jax.sharding.Mesh")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and self.bindings.of(node.value.func) in _INSTALL:
            self.edits.append(self._without(node))
        else:
            self.generic_visit(node)

    def _without(self, node: ast.stmt) -> Edit:
        """The edit that removes a statement."""
        ((first, left), (last, right)), lines = _bounds(node), self.text.split("\n")
        apart = (lines[first - 1].encode()[:left] + lines[last - 1].encode()[right:]).partition(b"#")[0]
        only = any(block == [node] for n in ast.walk(self.tree) for _, block in ast.iter_fields(n))
        return replacing(node, "pass") if apart.strip() or only else Edit((first, 0), (last + 1, 0), "")

    # ---- imports

    def edit(self, others: Sequence[Edit]) -> None:
        """Note the edits beside those of xmaps and imports, and the names that the file then reads."""
        apart = lambda e, taken: all(e.end <= t.start or t.end <= e.start for t in taken)  # noqa: E731
        own = [e for e in self.edits if apart(e, others)]
        renamed = map(_without_us, fix.edits_of(self._program))
        self._fixes = [e for e in renamed if "xmap_compat" not in e.text and apart(e, [*others, *own])]
        self.edits, tree = own, ast.parse(fix.edited(self.text, [*others, *own, *self._fixes]))
        exported = [n for n in tree.body if isinstance(n, (ast.Assign, ast.AugAssign)) and "__all__" in ast.unparse(n)]
        nodes = list(ast.walk(tree))
        self.used = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        self.used |= {constant_text(c) for n in exported for c in ast.walk(n)}
        imported = {name for n in nodes if isinstance(n, _IMPORTS) for name in bound_by(n)}
        froms = [n for n in nodes if isinstance(n, ast.ImportFrom) and not f"{n.module}.".startswith(_OLD)]
        of_names = (n for n in nodes if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") in imported)
        taken = {a.name for n in froms for a in n.names} | {n.attr for n in of_names}
        self.taken = taken | (self.used if "*" in taken else set())

    def finished(self, elsewhere: Set[str]) -> list[Edit]:
        """These edits and those of imports, of which names stay that other files take, perhaps of this one."""
        used = self.used | elsewhere
        imports = [n for n in ast.walk(self.tree) if isinstance(n, _IMPORTS)]
        within = lambda e: any(start <= e.start and e.end <= end for start, end in map(_bounds, imports))  # noqa: E731
        edits = [e for e in [*self.edits, *self._fixes] if not within(e)]
        for statement in imports:
            edits += self._import(statement, used, self._fixes)
        return list(dict.fromkeys([*edits, *self._added(self.used)]))

    def _import(self, node: ast.Import | ast.ImportFrom, used: set[str], fixes: Sequence[Edit]) -> list[Edit]:
        """The edits of an import: without the old names that nothing reads any more."""
        start, end = _bounds(node)
        module = node.module if isinstance(node, ast.ImportFrom) else None
        home = f"{module}." if module else ""
        old = [a for a in node.names if f"{home}{a.name}.".startswith(_OLD)]
        if (isinstance(node, ast.ImportFrom) and node.level) or not old:
            return [e for e in fixes if start <= e.start and e.end <= end]
        of_star = (used & {*MAPS_NAMES}) - {"Mesh"} - self._own
        is_used = lambda a: of_star if a.name == "*" else (a.asname or a.name.split(".")[0]) in used  # noqa: E731
        moved = [a for a in old if home and a.name == "Mesh" and is_used(a)]
        moved += [ast.alias("Mesh") for a in old if a.name == "*" and "Mesh" in used]
        kept = [a for a in node.names if a not in moved and (a not in old or is_used(a))]
        self.left += [f"{a.name} of {os.path.basename(self._path)}:{node.lineno}" for a in kept if a in old]
        if len(kept) == len(node.names):
            return []
        names = lambda aliases: ", ".join(map(ast.unparse, aliases))  # noqa: E731
        lines = [f"from jax.sharding import {names(moved)}"] * bool(moved)  # first: the other may be in a `try`
        lines += [f"{f'from {module} ' if home else ''}import {names(kept)}"] * bool(kept)
        return [replacing(node, f"\n{' ' * node.col_offset}".join(lines))] if lines else [self._without(node)]

    def _added(self, used: set[str]) -> list[Edit]:
        """New imports, one for each module."""
        added = sorted(found for own, found in self.names.added.items() if own in used)
        lines = [f"import {name}" for home, name in added if not home]
        homes = dict.fromkeys(home for home, _ in added if home)
        lines += [f"{home}import {', '.join(name for of, name in added if of == home)}" for home in homes]
        return fix.before_jax(self.tree, lines)


def _bounds(node: ast.expr | ast.stmt) -> tuple[tuple[int, int], tuple[int, int]]:
    edit = replacing(node, "")
    return edit.start, edit.end


def _without_us(edit: Edit) -> Edit:
    """``check --fix`` keeps what this package restores, and imports it."""
    return dataclasses.replace(edit, text=re.sub(r"import xmap_compat(; |\n)", "", edit.text))
