"""The texts of a program's files after its edits: imports, mesh contexts, ``thread_resources``, and
where they stay.

The driver, which does not import JAX, makes them from what the first run has found.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from xmap_compat.tools.check import editor, findings, table
from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.construction import Change, Entered
from xmap_compat.tools.leave.patch import Refused
from xmap_compat.tools.leave.text import OURS, fresh
from xmap_compat.tools.source.bindings import (
    IMPORTS,
    MAPS,
    Names,
    bound_by,
    imported_names,
    text_of,
)
from xmap_compat.tools.source.layout import (
    Edit,
    applied,
    before_jax,
    in_place_of,
    program_of,
    python_of,
    replacing,
)

_HOMES = (MAPS, "xmap_compat", "jax.interpreters.pxla")
_CONSTRAINT = "jax.experimental.pjit.with_sharding_constraint"
_OLD = (*(f"{home}." for home in _HOMES), f"{_CONSTRAINT}.")
_MESHES = tuple(f"{home}.{name}" for home in _HOMES for name in ("Mesh", "mesh"))
_LOOPS = tuple(f"{home}.SerialLoop" for home in _HOMES)
_PJIT = "jax.experimental.pjit.pjit"
_INSTALL = ("xmap_compat.install", "xmap_compat.legacy.install")
_MODULES = {
    "jax": "jax",
    "jnp": "jax.numpy",
    "lax": "jax.lax",
    "np": "numpy",
    "partial": "functools.partial",
}
_ENVIRONMENT = "thread_resources.env"


class _File:
    """A file of the program: what it holds, and its names of modules and helpers; those that it
    lacks are imported.
    """

    def __init__(self, path: str, data: bytes, helpers: str):
        self.path, self.data, self._helpers = path, data, helpers
        self.added: dict[str, tuple[str, str]] = {}  # by name, where from and what
        names = self.names
        top = [name for node in _at_top(self.tree.body) for name, _ in imported_names(node)]
        meant = {name: names.of(ast.Name(name, ast.Load())) for name in top}
        self._known = {home: name for name, home in reversed(meant.items()) if home}
        old = {name for name, home in meant.items() if home.startswith(_OLD)}  # which go
        self._taken = {n.id for n in names.nodes if isinstance(n, ast.Name)}.union(
            *map(bound_by, names.nodes)
        ) - old

    @property
    def tree(self) -> ast.Module:
        return program_of(self.data, self.path).tree

    @property
    def names(self) -> Names:
        return Names(self.tree)

    def edit(self, edits: Iterable[Edit]) -> None:
        """Apply edits; names in their texts that begin with ``text.OURS`` become names of the
        file.
        """
        resolved = [
            e._replace(text=re.sub(rf"{OURS}(\w+)", lambda found: self._name(found[1]), e.text))
            for e in edits
        ]
        self.data = applied(self.data, self.path, _merged(resolved)) if resolved else self.data

    def without(self, node: ast.stmt, names: Names, statements: Sequence[str] = ()) -> Edit:
        """The edit that removes a statement, or puts others in its place."""
        return in_place_of(
            node, names.parents[node], python_of(self.data, self.path).split("\n"), statements
        )

    def imports(self) -> list[Edit]:
        """The edit that adds the imports of new names that are used, one for each module."""
        used = {n.id for n in self.names.nodes if isinstance(n, ast.Name)}
        found = sorted(home for own, home in self.added.items() if own in used)
        homes = dict.fromkeys(home for home, _ in found if home)
        lines = [f"import {name}" for home, name in found if not home]
        lines += [
            f"{home}import {', '.join(name for of, name in found if of == home)}" for home in homes
        ]
        return before_jax(self.tree, lines)

    def _name(self, wanted: str) -> str:
        home = _MODULES.get(wanted, f"{self._helpers}.{wanted}")
        if home not in self._known:
            self._known[home] = own = fresh(wanted, self._taken)
            self._taken.add(own)
            module, _, last = home.rpartition(".")
            self.added[own] = (
                f"from {module} " * bool(module),
                f"{last} as {own}" if last != own else last,
            )
        return self._known[home]


def _at_top(statements: Iterable[ast.AST]) -> Iterable[ast.Import | ast.ImportFrom]:
    """The imports that are executed with a module, but for those that only type checkers see."""
    for statement in (
        s for s in statements if isinstance(s, (*IMPORTS, ast.Try, ast.ExceptHandler, ast.If))
    ):
        if isinstance(statement, IMPORTS):
            yield statement
        elif "TYPE_CHECKING" not in ast.unparse(getattr(statement, "test", ast.Pass())):
            yield from _at_top(ast.iter_child_nodes(statement))


def edited_files(
    contents: Mapping[str, bytes],
    changes: Iterable[Change],
    helpers: str,
    entered: Collection[Entered],
    keeps_meshes: bool,
    keeps_install: bool = False,
) -> tuple[dict[str, bytes], list[str]]:
    """The new contents of files, and the names of this package that they still need.

    Args:
      contents: of the files of the program, by path.
      changes: in these files; names that begin with ``text.OURS`` are given those of the file.
      helpers: the name of the helper module.
      entered: where meshes were entered by ``with``, which becomes ``jax.set_mesh``.
      keeps_meshes: whether meshes are entered as before.
      keeps_install: whether other files need this package.
    """
    files = [_File(path, data, helpers) for path, data in contents.items()]
    for file in files:
        edits = (
            []
            if keeps_meshes
            else _meshes(file.names, {tuple(at) for of, *at in entered if of == file.path})
        )
        edits += [*_environment(file), *_options_of_xmap(file)]
        file.edit(
            [
                *edits,
                *(
                    Edit(c.start, c.end, c.text)
                    for c in dict.fromkeys(changes)
                    if c.file == file.path
                ),
            ]
        )
    texts, others = _modernized(tuple((file.path, file.data) for file in files))
    for file in files:
        file.data = texts.get(file.path, file.data)
        file.edit(_renamed(file.names, keeps_meshes))
    taken, left = [_names_taken(file.names) for file in files], list[str]()
    for k, file in enumerate(files):
        edits, stay = _old_imports(file, set().union(*(t for j, t in enumerate(taken) if j != k)))
        file.edit(edits)
        left += stay
    left += others
    stays = bool(left) or keeps_install
    for file in files:
        names = file.names
        file.edit(
            [
                *(file.without(node, names) for node in _installs(names) if not stays),
                *file.imports(),
            ]
        )
        if not stays:  # the import of the package, which only `install` has read
            file.edit(_old_imports(file, set())[0])
    return {file.path: file.data for file in files if file.data != contents[file.path]}, left


def _merged(edits: Iterable[Edit]) -> list[Edit]:
    """One insertion for all that are at one place, in their order."""
    found: dict[tuple[tuple[int, int], tuple[int, int]], str] = {}
    for edit in edits:
        key = edit.start, edit.end
        found[key] = found.get(key, "") + edit.text if edit.start == edit.end else edit.text
    return [Edit(*key, text) for key, text in found.items() if text or key[0] != key[1]]


# ---------------------------------------------------------------------- meshes, thread_resources


def _meshes(names: Names, entered: Collection[tuple[int, ...]]) -> list[Edit]:
    """``with mesh:`` becomes ``with jax.set_mesh(mesh):`` where a mesh was entered, or is made
    there.
    """
    edits = []
    for node in (n for n in names.nodes if isinstance(n, ast.With)):
        for k, item in enumerate(node.items):
            context, bound = item.context_expr, item.optional_vars
            function = context.func if isinstance(context, ast.Call) else context
            is_mesh = names.of(function) in ("jax.sharding.Mesh", "jax.make_mesh", *_MESHES)
            places = {(node.lineno, node.col_offset, k), (context.lineno, context.col_offset, 0)}
            if isinstance(bound, (ast.Name, type(None))) and (is_mesh or places & {*entered}):
                start, end, _ = replacing(context, "")
                own = f"{bound.id} := " if bound is not None else ""
                last = replacing(bound, "").end if bound is not None else end
                edits += [Edit(start, start, f"{OURS}jax.set_mesh({own}"), Edit(end, last, ")")]
    return edits


def _environment(file: _File) -> list[Edit]:
    """Reads of the mesh of ``thread_resources``; what sets it is refused."""
    names, edits = file.names, []
    for node in (n for n in names.nodes if isinstance(n, ast.Attribute)):
        name = names.of(node)
        if not isinstance(node.ctx, ast.Load) and name.endswith(_ENVIRONMENT):
            raise Refused(
                messages.ENVIRONMENT.format(where=f"{os.path.basename(file.path)}:{node.lineno}")
            )
        for ending, then in ((".physical_mesh", ""), (".shape", ".shape")):
            if (
                isinstance(node.ctx, ast.Load)
                and name.startswith(_OLD)
                and name.endswith(_ENVIRONMENT + ending)
            ):
                edits.append(replacing(node, f"{OURS}context_mesh(){then}"))
    return edits


def _renamed(names: Names, keeps_meshes: bool) -> list[Edit]:
    """Other names of the old modules; ``pjit`` takes specs in a mesh that ``with`` enters, and
    ``jit`` in others.
    """
    found = [
        n
        for n in names.nodes
        if isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Load)
    ]
    read = {names.of(n) for n in found}
    new = dict.fromkeys(_MESHES, "jax.sharding.Mesh") | {
        _CONSTRAINT: "lax.with_sharding_constraint"
    }
    new |= (
        {}
        if any(f"{home}.xmap" in read for home in _HOMES)
        else dict.fromkeys(_LOOPS, "SerialLoop")
    )
    new |= {} if keeps_meshes else {_PJIT: "jax.jit"}
    is_moved = lambda n: isinstance(n, ast.Name) and n.id == "Mesh"  # noqa: E731  (its import moves)
    edits = [
        replacing(n, OURS + new[name])
        for n in found
        if (name := names.of(n)) in new and not is_moved(n)
    ]
    for call in (n for n in names.nodes if isinstance(n, ast.Call)):
        if any(
            names.of(part) == _PJIT for part in (call.func, *call.args[:1])
        ):  # also in functools.partial
            for k in (
                k for k in call.keywords if k.arg in ("in_axis_resources", "out_axis_resources")
            ):
                end = k.lineno, k.col_offset + len(str(k.arg))
                edits.append(
                    Edit(
                        (k.lineno, k.col_offset),
                        end,
                        str(k.arg).replace("axis_resources", "shardings"),
                    )
                )
    return edits


def _options_of_xmap(file: _File) -> list[Edit]:
    """Options of xmap, which JAX no longer has, are not set."""
    names, edits = file.names, []
    for node in (n for n in names.nodes if isinstance(n, ast.Expr)):
        options = node.value.args[:1] if isinstance(node.value, ast.Call) else []
        if re.match("(jax_)?experimental_xmap", "".join(map(text_of, options))):
            edits.append(file.without(node, names))
    return edits


@functools.lru_cache(maxsize=8)
def _modernized(contents: tuple[tuple[str, bytes], ...]) -> tuple[dict[str, bytes], list[str]]:
    """Files with today's names for what JAX has removed elsewhere, as ``check --fix`` writes them,
    and what it leaves.

    Names of xmap and its meshes are edited here.
    """
    of_xmap = [name for name in (*table.NAMES, *table.MODULES) if f"{name}.".startswith(_OLD)]
    of_xmap += [gone.name for gone in table.KEYWORDS.values() if ".pjit." in gone.name]
    with tempfile.TemporaryDirectory() as folder:
        copies = {Path(folder + path).resolve(): path for path, _ in contents}
        for path, data in contents:
            copy = Path(folder + path).resolve()
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(data)
        fixed = editor.fixed(findings.check(list(copies)), install=False, keep=of_xmap)
    texts = {copies[path.resolve()]: data for path, data in fixed.contents.items()}
    return texts, [f"{found.gone.name} of {found.path.name}:{found.line}" for found in fixed.left]


# ------------------------------------------------------------------------------------ imports


def _names_taken(names: Names) -> set[str]:
    """The names that a file may take from others: imported ones, and attributes of imported
    modules.
    """
    froms = (n for n in names.nodes if isinstance(n, ast.ImportFrom))
    taken = {a.name for n in froms for a in n.names if not f"{n.module}.{a.name}.".startswith(_OLD)}
    taken |= {
        n.attr
        for n in names.nodes
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
    }
    return taken | (_used(names) if "*" in taken else set())


def _used(names: Names) -> set[str]:
    """The names that a file reads; also by a text of ``__all__``, or of what it executes."""
    found, texts = (
        [n for n in names.nodes if isinstance(n, ast.Name)],
        {text_of(n) for n in names.nodes},
    )
    readers = {n.id for n in found} & {"__all__", "exec", "eval"}
    words = (
        texts
        if readers == {"__all__"}
        else {word for text in texts for word in re.findall(r"\w+", text)}
    )
    return {n.id for n in found if isinstance(n.ctx, ast.Load)} | (words if readers else set())


def _old_names(node: ast.AST) -> list[ast.alias]:
    home = f"{node.module}." if isinstance(node, ast.ImportFrom) and not node.level else ""
    return (
        [a for a in node.names if f"{home}{a.name}.".startswith(_OLD)]
        if isinstance(node, IMPORTS)
        else []
    )


def _old_imports(file: _File, elsewhere: Collection[str]) -> tuple[list[Edit], list[str]]:
    """The edits that remove old imports which nothing reads any more, and the names that stay."""
    names, edits, left = file.names, [], []
    installs = {id(n) for node in _installs(names) for n in ast.walk(node)}
    loads = [n for n in names.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    read, meanings = _used(names) | {*elsewhere}, {f"{names.of(node)}." for node in names.nodes}
    by_install = {n.id for n in loads if id(n) in installs} - {
        n.id for n in loads if id(n) not in installs
    }
    local = lambda a: a.asname or a.name.split(".")[0]  # noqa: E731
    is_read = lambda a: a.name == "*" or (local(a) in read and local(a) not in file.added)  # noqa: E731
    for node in (n for n in names.nodes if isinstance(n, IMPORTS) and _old_names(n)):
        old, home = (
            _old_names(node),
            f"from {node.module} " if isinstance(node, ast.ImportFrom) else "",
        )
        reads = lambda a: any(meant.startswith(f"{a.name}.") for meant in meanings)  # noqa: E731
        dotted = [a for a in old if not home and not a.asname and "." in a.name and not reads(a)]
        moved = [a for a in old if home and a.name == "Mesh" and is_read(a)]
        kept = [
            a
            for a in node.names
            if a not in moved and a not in dotted and (a not in old or is_read(a))
        ]
        needed = [a for a in kept if a in old and (a.asname or a.name) not in by_install]
        left += [f"{a.name} of {os.path.basename(file.path)}:{node.lineno}" for a in needed]
        others = {
            name
            for n in names.nodes
            if n is not node and not _old_names(n)
            for name, _ in imported_names(n)
        }
        kept += [ast.alias(local(a)) for a in dotted if local(a) in read - others][:1]
        if kept != node.names:
            shown = lambda aliases: ", ".join(map(ast.unparse, aliases))  # noqa: E731
            lines = [f"from jax.sharding import {shown(moved)}"] * bool(
                moved
            )  # first: the other may be in a `try`
            lines += [f"{home}import {shown(kept)}"] * bool(kept)
            edits.append(file.without(node, names, lines))
    return edits, left


def _installs(names: Names) -> list[ast.stmt]:
    statements = (n for n in names.nodes if isinstance(n, ast.Expr))
    return [
        n
        for n in statements
        if isinstance(n.value, ast.Call) and names.of(n.value.func) in _INSTALL
    ]


def others_that_need(files: Sequence[str], root: str) -> list[str]:
    """Files that files of the program import, directly or not, which did not run and hold names of
    xmap.
    """
    seen, pending, found = {*files}, [*files], []
    while pending:
        path = pending.pop()
        with open(path, "rb") as file:
            tree = program_of(file.read(), path).tree
        for node in (n for n in ast.walk(tree) if isinstance(n, IMPORTS)):
            if path not in files and _old_names(node):
                found.append(path)
            modules = [a.name for a in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
            parts = (
                {os.path.dirname(path), root},
                filter(None, modules),
                (".py", os.sep + "__init__.py"),
            )
            for folder, name, end in itertools.product(*parts):
                other = os.path.realpath(os.path.join(folder, name.replace(".", os.sep)) + end)
                if other not in seen and os.path.exists(other):
                    seen.add(other)
                    pending.append(other)
    return sorted({*found})
