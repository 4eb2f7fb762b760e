"""The texts of a program's files after its edits: imports, mesh contexts, ``thread_resources``, and where they stay.

The driver, which does not import JAX, makes them from what the first run has found.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
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
from xmap_compat.tools.source.bindings import IMPORTS, MAPS, Names, bound_by, imported_names
from xmap_compat.tools.source.layout import Edit, applied, before_jax, program_of, python_of, replacing

_HOMES = (MAPS, "xmap_compat", "jax.interpreters.pxla")
_CONSTRAINT = "jax.experimental.pjit.with_sharding_constraint"
_OLD = (*(f"{home}." for home in _HOMES), f"{_CONSTRAINT}.")
_MESHES = tuple(f"{home}.{name}" for home in _HOMES for name in ("Mesh", "mesh"))
_LOOPS = tuple(f"{home}.SerialLoop" for home in _HOMES)
_PJIT = "jax.experimental.pjit.pjit"
_INSTALL = ("xmap_compat.install", "xmap_compat.legacy.install")
MODULES = {"jax": "jax", "jnp": "jax.numpy", "lax": "jax.lax", "np": "numpy", "partial": "functools.partial"}
_ENVIRONMENT = "thread_resources.env"


class FileNames:
    """The names under which a file knows modules and helpers; names that it lacks are imported."""

    def __init__(self, tree: ast.Module, helpers: str):
        self.helpers = helpers
        self.added: dict[str, tuple[str, str]] = {}  # by name, where from and what
        bindings = Names(tree)
        top = [name for node in _at_top(tree.body) for name, _ in imported_names(node)]
        self._known = {home: name for name in reversed(top) if (home := bindings.of(ast.Name(name, ast.Load())))}
        names = {n.id for n in bindings.nodes if isinstance(n, ast.Name)}
        old = {name for name in top if bindings.of(ast.Name(name, ast.Load())).startswith(_OLD)}  # which go
        self._taken = names.union(*map(bound_by, bindings.nodes)) - old

    def name(self, wanted: str) -> str:
        home = MODULES.get(wanted, f"{self.helpers}.{wanted}")
        if home not in self._known:
            self._known[home] = own = fresh(wanted, self._taken)
            self._taken.add(own)
            module, _, last = home.rpartition(".")
            self.added[own] = f"from {module} " * bool(module), f"{last} as {own}" if last != own else last
        return self._known[home]

    def resolved(self, text: str) -> str:
        return re.sub(rf"{OURS}(\w+)", lambda found: self.name(found[1]), text)


def _at_top(statements: Iterable[ast.AST]) -> Iterable[ast.Import | ast.ImportFrom]:
    """The imports that are executed with a module, but for those that only type checkers see."""
    for statement in statements:
        if isinstance(statement, IMPORTS):
            yield statement
        elif isinstance(statement, (ast.Try, ast.ExceptHandler)) or (
            isinstance(statement, ast.If) and not ast.unparse(statement.test).endswith("TYPE_CHECKING")
        ):
            yield from _at_top(ast.iter_child_nodes(statement))


@dataclasses.dataclass
class File:
    """A file of the program: what it holds, and what it holds after each step."""

    path: str
    data: bytes
    left: list[str] = dataclasses.field(default_factory=list)

    def tree(self) -> ast.Module:
        return program_of(self.data, self.path).tree


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
    changes = list(dict.fromkeys(changes))
    files, names = [], {}
    for path, data in contents.items():
        names[path] = own = FileNames(program_of(data, path).tree, helpers)
        edits = [] if keeps_meshes else _meshes(data, path, {tuple(at) for of, *at in entered if of == path})
        edits = [*edits, *_environment(data, path), *_options_of_xmap(data, path)]
        edits = [e._replace(text=own.resolved(e.text)) for e in edits]
        edits += [Edit(c.start, c.end, own.resolved(c.text)) for c in changes if c.file == path]
        files.append(File(path, applied(data, path, merged(edits)) if edits else data))
    texts, others = _modernized(tuple((file.path, file.data) for file in files))
    for file in files:
        file.data, own = texts.get(file.path, file.data), names[file.path]
        renamed = [e._replace(text=own.resolved(e.text)) for e in _renamed(file.tree(), keeps_meshes)]
        file.data = applied(file.data, file.path, renamed) if renamed else file.data
    taken = [names_taken(file.tree()) for file in files]
    for k, file in enumerate(files):
        elsewhere = set().union(*(t for j, t in enumerate(taken) if j != k))
        edits = _Imports(file, elsewhere, names[file.path].added).edits
        file.data = applied(file.data, file.path, edits) if edits else file.data
    left = [*(name for file in files for name in file.left), *others]
    stays = bool(left) or keeps_install
    for file in files:
        tree = file.tree()
        edits = [_without(tree, node, python_of(file.data, file.path)) for node in _installs(tree) if not stays]
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        edits += _added(tree, {own: home for own, home in names[file.path].added.items() if own in used})
        file.data = applied(file.data, file.path, edits) if edits else file.data
    if not stays:  # the import of the package, which only `install` has read
        for file in files:
            edits = _Imports(file, set(), names[file.path].added).edits
            file.data = applied(file.data, file.path, edits) if edits else file.data
    return {file.path: file.data for file in files if file.data != contents[file.path]}, left


def merged(edits: Iterable[Edit]) -> list[Edit]:
    """One insertion for all that are at one place, in their order."""
    found: dict[tuple[tuple[int, int], tuple[int, int]], str] = {}
    for edit in edits:
        key = edit.start, edit.end
        found[key] = found.get(key, "") + edit.text if edit.start == edit.end else edit.text
    return [Edit(*key, text) for key, text in found.items() if text or key[0] != key[1]]


# ---------------------------------------------------------------------- meshes, thread_resources


def _meshes(data: bytes, path: str, entered: Collection[tuple[int, ...]]) -> list[Edit]:
    """``with mesh:`` becomes ``with jax.set_mesh(mesh):`` where a mesh was entered, or is made there."""
    tree = program_of(data, path).tree
    bindings, edits = Names(tree), []
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.With)):
        for k, item in enumerate(node.items):
            context, bound = item.context_expr, item.optional_vars
            function = context.func if isinstance(context, ast.Call) else context
            is_mesh = bindings.of(function) in ("jax.sharding.Mesh", "jax.make_mesh", *_MESHES)
            places = {(node.lineno, node.col_offset, k), (context.lineno, context.col_offset, 0)}
            if isinstance(bound, (ast.Name, type(None))) and (is_mesh or places & {*entered}):
                start, end, _ = replacing(context, "")
                own = f"{bound.id} := " if bound is not None else ""
                last = replacing(bound, "").end if bound is not None else end
                edits += [Edit(start, start, f"{OURS}jax.set_mesh({own}"), Edit(end, last, ")")]
    return edits


def _environment(data: bytes, path: str) -> list[Edit]:
    """Reads of the mesh of ``thread_resources``; what sets it is refused."""
    tree = program_of(data, path).tree
    bindings, edits = Names(tree), []
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.Attribute)):
        name = bindings.of(node)
        if not isinstance(node.ctx, ast.Load) and name.endswith(_ENVIRONMENT):
            raise Refused(messages.ENVIRONMENT.format(where=f"{os.path.basename(path)}:{node.lineno}"))
        for ending, then in ((".physical_mesh", ""), (".shape", ".shape")):
            if isinstance(node.ctx, ast.Load) and name.startswith(_OLD) and name.endswith(_ENVIRONMENT + ending):
                edits.append(replacing(node, f"{OURS}context_mesh(){then}"))
    return edits


def _renamed(tree: ast.Module, keeps_meshes: bool) -> list[Edit]:
    """Other names of the old modules; ``pjit`` takes specs in a mesh that ``with`` enters, and ``jit`` in others."""
    bindings, nodes = Names(tree), list(ast.walk(tree))
    found = [n for n in nodes if isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Load)]
    read = {bindings.of(n) for n in found}
    new = dict.fromkeys(_MESHES, "jax.sharding.Mesh") | {_CONSTRAINT: "lax.with_sharding_constraint"}
    new |= {} if any(f"{home}.xmap" in read for home in _HOMES) else dict.fromkeys(_LOOPS, "SerialLoop")
    new |= {} if keeps_meshes else {_PJIT: "jax.jit"}
    is_moved = lambda n: isinstance(n, ast.Name) and n.id == "Mesh"  # noqa: E731  (its import moves)
    edits = [replacing(n, OURS + new[name]) for n in found if (name := bindings.of(n)) in new and not is_moved(n)]
    for call in (n for n in nodes if isinstance(n, ast.Call)):
        if any(bindings.of(part) == _PJIT for part in (call.func, *call.args[:1])):  # also in functools.partial
            named = (k for k in call.keywords if k.arg in ("in_axis_resources", "out_axis_resources"))
            for k in named:
                end = k.lineno, k.col_offset + len(str(k.arg))
                edits.append(Edit((k.lineno, k.col_offset), end, str(k.arg).replace("axis_resources", "shardings")))
    return edits


def _options_of_xmap(data: bytes, path: str) -> list[Edit]:
    """Options of xmap, which JAX no longer has, are not set."""
    tree, edits = program_of(data, path).tree, []
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.Expr)):
        called = node.value if isinstance(node.value, ast.Call) else None
        option = called.args[0] if called is not None and called.args else None
        if isinstance(option, ast.Constant) and str(option.value).removeprefix("jax_").startswith("experimental_xmap"):
            edits.append(_without(tree, node, python_of(data, path)))
    return edits


@functools.lru_cache(maxsize=8)
def _modernized(contents: tuple[tuple[str, bytes], ...]) -> tuple[dict[str, bytes], list[str]]:
    """Files with today's names for what JAX has removed elsewhere, as ``check --fix`` writes them, and what it leaves.

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


def names_taken(tree: ast.Module) -> set[str]:
    """The names that a file may take from others: imported ones, and attributes of imported modules."""
    nodes = list(ast.walk(tree))
    froms = [n for n in nodes if isinstance(n, ast.ImportFrom) and not f"{n.module}.".startswith(_OLD)]
    taken = {a.name for n in froms for a in n.names if not f"{n.module}.{a.name}.".startswith(_OLD)}
    taken |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
    return taken | (_used(tree) if "*" in taken else set())


def _used(tree: ast.Module) -> set[str]:
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    read: list[ast.AST] = [
        n for n in tree.body if isinstance(n, (ast.Assign, ast.AugAssign)) and "__all__" in ast.unparse(n)
    ]
    read += [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") in ("exec", "eval")]
    strings = (str(c.value) for n in read for c in ast.walk(n) if isinstance(c, ast.Constant))
    return used | {word for text in strings for word in re.findall(r"\w+", text)}


def _is_old(node: ast.AST) -> bool:
    home = f"{node.module}." if isinstance(node, ast.ImportFrom) and not node.level else ""
    names = [a.name for a in node.names] if isinstance(node, IMPORTS) else []
    return any(f"{home}{name}.".startswith(_OLD) for name in names)


class _Imports:
    """The edits that remove old imports which nothing reads any more; notes in ``file.left`` those that stay."""

    def __init__(self, file: File, elsewhere: Collection[str], added: Collection[str]):
        self.file, self.tree, self.edits, self.added = file, file.tree(), list[Edit](), added
        self.text, file.left = python_of(file.data, file.path), []
        installs = {id(n) for node in _installs(self.tree) for n in ast.walk(node)}
        loads = [n for n in ast.walk(self.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        self.read = _used(self.tree) | {*elsewhere}
        self.by_install = {n.id for n in loads if id(n) in installs} - {n.id for n in loads if id(n) not in installs}
        for node in ast.walk(self.tree):
            if isinstance(node, IMPORTS) and _is_old(node):
                self._import(node)

    def reads(self, module: str) -> bool:
        meanings = map(Names(self.tree).of, ast.walk(self.tree))
        return any(f"{meant}.".startswith(f"{module}.") for meant in meanings)

    def others(self, node: ast.AST) -> set[str]:
        """What other imports than this one bind."""
        nodes = (n for n in ast.walk(self.tree) if n is not node and not _is_old(n))
        return {name for n in nodes for name, _ in imported_names(n)}

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        module = node.module if isinstance(node, ast.ImportFrom) else None
        home = f"{module}." if module else ""
        old = [a for a in node.names if f"{home}{a.name}.".startswith(_OLD)]
        local = lambda a: a.asname or a.name.split(".")[0]  # noqa: E731
        is_read = lambda a: a.name == "*" or (local(a) in self.read and local(a) not in self.added)  # noqa: E731
        dotted = [a for a in old if not home and not a.asname and "." in a.name and not self.reads(a.name)]
        moved = [a for a in old if home and a.name == "Mesh" and is_read(a)]
        kept = [a for a in node.names if a not in moved and a not in dotted and (a not in old or is_read(a))]
        where = f"{os.path.basename(self.file.path)}:{node.lineno}"
        needed = [a for a in kept if a in old and (a.asname or a.name) not in self.by_install]
        self.file.left += [f"{a.name} of {where}" for a in needed]
        kept += [ast.alias(local(a)) for a in dotted if local(a) in self.read - self.others(node)][:1]
        if kept == node.names:
            return
        names = lambda aliases: ", ".join(map(ast.unparse, aliases))  # noqa: E731
        lines = [f"from jax.sharding import {names(moved)}"] * bool(moved)  # first: the other may be in a `try`
        lines += [f"{f'from {module} ' if home else ''}import {names(kept)}"] * bool(kept)
        indented = f"\n{' ' * node.col_offset}".join(lines)
        self.edits.append(replacing(node, indented) if lines else _without(self.tree, node, self.text))


def _installs(tree: ast.Module) -> list[ast.stmt]:
    bindings, statements = Names(tree), (n for n in ast.walk(tree) if isinstance(n, ast.Expr))
    return [n for n in statements if isinstance(n.value, ast.Call) and bindings.of(n.value.func) in _INSTALL]


def _without(tree: ast.Module, node: ast.stmt, text: str) -> Edit:
    """The edit that removes a statement."""
    ((first, left), (last, right), _), lines = replacing(node, ""), text.split("\n")
    apart = (lines[first - 1].encode()[:left] + lines[last - 1].encode()[right:]).partition(b"#")[0]
    only = any(block == [node] for n in ast.walk(tree) for _, block in ast.iter_fields(n))
    return replacing(node, "pass") if apart.strip() or only else Edit((first, 0), (last + 1, 0), "")


def _added(tree: ast.Module, added: Mapping[str, tuple[str, str]]) -> list[Edit]:
    """New imports, one for each module."""
    found = sorted(added.values())
    lines = [f"import {name}" for home, name in found if not home]
    homes = dict.fromkeys(home for home, _ in found if home)
    lines += [f"{home}import {', '.join(name for of, name in found if of == home)}" for home in homes]
    return before_jax(tree, lines)


def others_that_need(files: Sequence[str], root: str) -> list[str]:
    """Files that files of the program import, directly or not, which did not run and hold names of xmap."""
    seen, pending, found = {*files}, [*files], []
    while pending:
        path = pending.pop()
        with open(path, "rb") as file:
            tree = program_of(file.read(), path).tree
        for node in (n for n in ast.walk(tree) if isinstance(n, IMPORTS)):
            if path not in files and _is_old(node):
                found.append(path)
            modules = [a.name for a in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
            for folder in {os.path.dirname(path), root}:
                for name in modules:
                    for end in (".py", os.sep + "__init__.py"):
                        other = os.path.realpath(os.path.join(folder, name.replace(".", os.sep)) + end)
                        if name and other not in seen and os.path.exists(other):
                            seen.add(other)
                            pending.append(other)
    return sorted({*found})
