"""The edits that the xmaps of a file have in common: imports, mesh contexts, ``thread_resources``, renamed names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from xmap_compat.tools.check import fix
from xmap_compat.tools.check.advice import MAPS
from xmap_compat.tools.check.names import Bindings, ScopedVisitor, bound_anywhere, file_names
from xmap_compat.tools.check.neighbours import Neighbours
from xmap_compat.tools.check.sources import program_of
from xmap_compat.tools.check.uses import is_of_jax
from xmap_compat.tools.leave.places import File
from xmap_compat.tools.source.text import Names
from xmap_compat.tools.source.user_code import offset, spliced

_HOMES = (MAPS, "xmap_compat", "jax.interpreters.pxla")
_MESHES = [f"{home}.{name}" for home in _HOMES for name in ("Mesh", "mesh")]
_CONTEXT = ("jax.sharding.Mesh", "jax.make_mesh", *_MESHES)
_LOOPS = [f"{home}.serial_loop" for home in _HOMES]
_INSTALL = ("xmap_compat.install", "xmap_compat.legacy.install")
_READS = {
    "thread_resources.env.shape": "jax.sharding.get_abstract_mesh().shape",
    "thread_resources.env.physical_mesh": "jax.sharding.get_mesh()",
}
# What an edit may name, with where it comes from.
MODULES = {
    **{"jax": "jax", "jnp": "jax.numpy", "lax": "jax.lax", "np": "numpy", "functools": "functools"},
    **{"contextlib": "contextlib", "P": "jax.sharding.PartitionSpec"},
}


class FileNames:
    """The names under which a file knows modules and helpers; names that it lacks are imported."""

    def __init__(self, file: File, helpers: str):
        self.helpers = helpers
        self.added: dict[str, str] = {}
        bound = {n.id for n in ast.walk(file.tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        bound |= {n.arg for n in ast.walk(file.tree) if isinstance(n, ast.arg)}
        bindings = Bindings(file.tree)
        top = {a.asname or a.name.split(".")[0] for n in _imports(file.tree.body) for a in n.names}
        self._known = {bindings.of_name(name): name for name in sorted(top - bound)}
        self._fresh = Names(
            {*bound_anywhere(file.tree), *(n.id for n in ast.walk(file.tree) if isinstance(n, ast.Name))}
        )

    def name(self, wanted: str) -> str:
        home = MODULES.get(wanted, f"{self.helpers}.{wanted}")
        if home not in self._known:
            self._known[home] = own = self._fresh.like(wanted)
            module, _, last = home.rpartition(".")
            renamed = f"{last} as {own}" if last != own else last
            self.added[own] = f"from {module} import {renamed}" if module else f"import {renamed}"
        return self._known[home]


def _imports(statements: Iterable[ast.stmt]) -> Iterable[ast.Import | ast.ImportFrom]:
    for statement in statements:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield statement
        elif isinstance(statement, (ast.Try, ast.If)):
            inner = [
                *statement.body,
                *statement.orelse,
                *(s for h in getattr(statement, "handlers", ()) for s in h.body),
            ]
            yield from _imports(inner)


class Shared(ScopedVisitor):
    """The edits of a whole file.

    Attributes:
      edits: start, end, and new text.
    """

    def __init__(self, file: File, names: FileNames):
        self.file, self.names = file, names
        self.edits: list[tuple[int, int, str]] = []
        self.bindings = Bindings(file.tree, Neighbours(file.path, file_names()))
        self._meshes = {
            getattr(target, "id", getattr(target, "attr", ""))
            for node in ast.walk(file.tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            for target in node.targets
            if self.bindings.of(node.value.func) in _CONTEXT
        }
        self.visit(file.tree)

    def _bounds(self, node: ast.expr | ast.stmt | ast.alias) -> tuple[int, int]:
        text = self.file.text
        return offset(text, node.lineno, node.col_offset), offset(text, node.end_lineno or 0, node.end_col_offset or 0)

    def _replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        self.edits.append((*self._bounds(node), text.replace("jax.", f"{self.names.name('jax')}.", 1)))

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            context, called = item.context_expr, isinstance(item.context_expr, ast.Call)
            of = self.bindings.of(context.func if isinstance(context, ast.Call) else context) or ""
            last = re.findall(r"\w+", ast.unparse(context.func if isinstance(context, ast.Call) else context))[-1]
            if of in _LOOPS:
                self._replace(context, f"{self.names.name('contextlib')}.nullcontext()")
            elif isinstance(item.optional_vars, (ast.Name, type(None))) and (
                of in _CONTEXT
                or (not is_of_jax(of) and (last in self._meshes or (called and last.endswith("mesh"))))
                or (not called and last.lower().endswith("mesh"))
            ):
                start, end = self._bounds(context)
                bound = f"{item.optional_vars.id} := " if isinstance(item.optional_vars, ast.Name) else ""
                after = self._bounds(item.optional_vars)[1] if item.optional_vars else end
                self.edits += [(start, start, f"{self.names.name('jax')}.set_mesh({bound}"), (end, after, ")")]
        self.generic_visit(node)

    visit_AsyncWith = visit_With  # type: ignore[assignment]

    def visit_Assign(self, node: ast.Assign) -> None:
        name, value = self.bindings.of(node.targets[0]) or "", node.value
        if name.endswith("thread_resources.env") and (self.bindings.of(value) or "").endswith(".EMPTY_ENV"):
            empty = f"jax.sharding.Mesh({self.names.name('np')}.empty((), object), ())"
            return self._replace(node, f"jax.set_mesh({empty})".replace("jax.", f"{self.names.name('jax')}."))
        if name.endswith("thread_resources.env") and isinstance(value, ast.Call) and (value.args or value.keywords):
            start, end = self._bounds(value.args[0] if value.args else value.keywords[0].value)
            (first, _), (_, last) = self._bounds(node), self._bounds(node)
            self.edits += [(first, start, f"{self.names.name('jax')}.set_mesh("), (end, last, ")")]
            return self.visit(value.args[0] if value.args else value.keywords[0].value)
        return self.generic_visit(node)

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
        name = self.bindings.of(node)
        if name in _MESHES and isinstance(node.ctx, ast.Load) and not (node.id == "Mesh" and name.endswith(".Mesh")):
            self._replace(node, "jax.sharding.Mesh")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and self.bindings.of(node.value.func) in _INSTALL:
            self.edits.append(self._without(node))
        else:
            self.generic_visit(node)

    def _without(self, node: ast.stmt) -> tuple[int, int, str]:
        """The edit that removes a statement."""
        start, end = self._bounds(node)
        text = self.file.text
        line, after = text.rfind("\n", 0, start) + 1, text.find("\n", end) + 1 or len(text)
        alone = not text[line:start].strip() and not text[end:after].strip()
        blocks = [b for n in ast.walk(self.file.tree) for b in (getattr(n, k, None) for k in _BLOCKS) if b]
        only = any(block == [node] for block in blocks)
        return (line, after, "") if alone and not only else (start, end, "pass")

    def finished(self, others: Iterable[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
        """The edits, with those of imports, and of names that JAX has renamed.

        Args:
          others: the edits of the file's xmaps.
        """
        fixes = [self._fix(e) for e in fix.edits_of(program_of(self.file.text, self.file.path))]
        taken = [*others, *self.edits]
        apart = lambda e: all(e[1] <= s or end <= e[0] for s, end, _ in taken)  # noqa: E731
        fixes = [e for e in fixes if "xmap_compat" not in e[2] and apart(e)]
        edits = [*self.edits, *fixes]
        text = spliced(self.file.text, _applicable([*others, *edits]))
        tree = ast.parse(text)
        exported = [n for n in tree.body if isinstance(n, (ast.Assign, ast.AugAssign)) and "__all__" in ast.unparse(n)]
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        used |= {
            c.value for n in exported for c in ast.walk(n) if isinstance(c, ast.Constant) and isinstance(c.value, str)
        }
        edits = [e for e in edits if not self._is_import(e)]
        for statement in (n for n in ast.walk(self.file.tree) if isinstance(n, (ast.Import, ast.ImportFrom))):
            edits += self._import(statement, used, fixes)
        return [*edits, *self._added(used)]

    def _fix(self, edit: fix.Edit) -> tuple[int, int, str]:
        new = re.sub(r"import xmap_compat(; |\n)", "", edit.text)  # fix keeps what this package restores
        return (offset(self.file.text, *edit.start), offset(self.file.text, *edit.end), new)

    def _is_import(self, edit: tuple[int, int, str]) -> bool:
        nodes = (n for n in ast.walk(self.file.tree) if isinstance(n, (ast.Import, ast.ImportFrom)))
        return any(s <= edit[0] and edit[1] <= e for s, e in map(self._bounds, nodes))

    def _import(self, node, used, fixes) -> list[tuple[int, int, str]]:
        """The edits of an import: without the old names that nothing reads any more."""
        start, end = self._bounds(node)
        home = f"{node.module}." if isinstance(node, ast.ImportFrom) and not node.level else ""
        is_old = lambda a: f"{home}{a.name}.".startswith(tuple(f"{h}." for h in _HOMES))  # noqa: E731
        if home == "." or not any(map(is_old, node.names)):
            return [e for e in fixes if start <= e[0] and e[1] <= end]
        kept, moved = [], []
        for alias in node.names:
            own = alias.asname or alias.name.split(".")[0]
            if is_old(alias) and home and alias.name == "Mesh" and own in used:
                moved.append(ast.unparse(alias))
            elif not is_old(alias) or own in used:
                kept.append(ast.unparse(alias))
        lines = [f"{'from ' + str(node.module) + ' ' if home else ''}import {', '.join(kept)}"] if kept else []
        lines += [f"from jax.sharding import {', '.join(moved)}"] if moved else []
        if len(kept) == len(node.names):
            return []
        indent = " " * node.col_offset
        return [(start, end, f"\n{indent}".join(lines))] if lines else [self._without(node)]

    def _added(self, used: set[str]) -> list[tuple[int, int, str]]:
        """New imports before the first one of JAX: a program may set options that JAX reads at its import."""
        lines = [line for name, line in self.names.added.items() if name in used]
        body = self.file.tree.body
        if not lines:
            return []
        about = [n for n in body[:1] if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
        after = len(about) + sum(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in body)
        of_jax = (
            k for k, n in enumerate(body) for i in _imports([n]) for m in _modules(i) if m.startswith(("jax", "xmap_"))
        )
        place = body[min(next(of_jax, after), len(body) - 1)]
        first = min([place, *getattr(place, "decorator_list", ())], key=lambda node: node.lineno)
        at = offset(self.file.text, first.lineno, 0)
        return [(at, at, "".join(f"{line}\n" for line in sorted(lines)))]


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [str(node.module)] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]


def _applicable(edits: Iterable[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    return sorted(set(edits))


_BLOCKS = ("body", "orelse", "finalbody", "handlers")
