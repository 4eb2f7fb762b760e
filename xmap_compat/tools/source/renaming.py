"""Other objects in the place of those that a file uses, and their imports.

A text for the file names them by tokens: ``{jax.sharding:Mesh}`` is ``Mesh`` of
``jax.sharding``, by the name that the file has for it, or gets.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from xmap_compat.tools.source.bindings import IMPORTS, Names, bound_by, text_of
from xmap_compat.tools.source.layout import Edit, beside, first_of_jax, in_place_of, replacing

TOKEN = re.compile(r"\{([\w.]+):(\w+)\}")
# Modules that `import jax` does not import.
NOT_IN_JAX = ("jax.extend.", "jax.example_libraries.")
_Import = tuple[str, str]  # "from a import " or "import ", and "b" or "b as c"


class Renaming:
    """The edits of a file.

    Attributes:
      dropped: prefixes, each with its dot, of what is no longer to be imported: such imports go if
        nothing uses them.
      exported: names that other files take from this one; ``*`` for all.
      homes: the module to import for each module that tokens abbreviate: ``{'h': '.named_axes'}``
        makes ``{h:psum}`` the ``psum`` of ``.named_axes``.
    """

    def __init__(
        self,
        names: Names,
        lines: Sequence[str],
        dropped: tuple[str, ...] = (),
        exported: Collection[str] = (),
    ):
        self.names = names
        self.lines = lines
        self.tree: Any = names.nodes[0]
        self.dropped = dropped
        self.homes: dict[str, str] = {}
        self.exported = {*exported}
        self._texts: set[str] = set()  # they may be in `__all__`
        self._renamed: dict[ast.AST, str] = {}  # names and attributes, and their new texts
        # Parts of imports, and the module and name of what they bring instead.
        self._reimported: dict[ast.alias, tuple[str, str]] = {}
        self._written: list[Edit] = []
        self._covered: set[ast.AST] = set()  # what is no longer in the file
        self._loads: dict[str, list[ast.Name]] = defaultdict(list)
        self._imports: list[Any] = []
        for node in names.nodes:
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
                self._loads[node.id].append(node)
            elif isinstance(node, IMPORTS):
                self._imports.append(node)
            else:
                self._texts.add(text_of(node))
        if self._loads.keys() & {"exec", "eval"}:
            self._texts.update(re.findall(r"\w+", " ".join(self._texts)))

    # ---- what is asked for

    def rename(self, node: ast.AST, text: str, kept: ast.AST | None = None) -> None:
        """Put a text in the place of a name or an attribute; the text has the part ``kept``."""
        self._renamed[node] = text
        self.cover(node)
        if kept is not None:
            self._covered.remove(kept)

    def reimport(self, alias: ast.alias, module: str, name: str) -> None:
        """Let a part of an import bring another object, under the name that the file uses now."""
        self._reimported[alias] = module, name

    def write(self, start: tuple[int, int], end: tuple[int, int], text: str) -> None:
        """Put a text in the place of a part of the file."""
        self._written.append(Edit(start, end, text))

    def cover(self, node: ast.AST) -> None:
        """Note that a text which is written has taken the place of a node."""
        self._covered.update(ast.walk(node))

    def remove(self, statement: ast.stmt) -> None:
        parent = self.names.parents[statement]
        self._written.append(in_place_of(statement, parent, self.lines, []))
        self.cover(statement)

    @property
    def is_asked(self) -> bool:
        return bool(self._renamed or self._written)

    def asked_of(self, module: str) -> set[str]:
        """The names of a module that the new texts have."""
        texts = [*self._renamed.values(), *(edit.text for edit in self._written)]
        tokens = TOKEN.findall(" ".join(texts))
        return {name for home, name in tokens if home == module}

    # ---- the edits

    def edits(self) -> list[Edit]:
        """All edits of the file; none if nothing was asked for, and no import of it is dropped."""
        if not self.tree.body:
            return []
        renamed = self._at_each_use()
        self._now = {statement: self._of_statement(statement) for statement in self._imports}
        self._taken = self._taken_names()
        self._new: dict[str, set[str]] = defaultdict(set)  # what is imported from each module
        edits = [replacing(node, self._spelled(text)) for node, text in renamed.items()]
        for edit in self._written:
            edits.append(edit._replace(text=self._spelled(edit.text)))
        lines = [f"{head}{', '.join(sorted(new))}" for head, new in sorted(self._new.items())]
        last = None
        if lines:
            last = self._last_import()
        for statement in self._imports:
            new = _statements(self._now[statement])
            if new != _statements(_as_it_is(statement)):
                if statement is last:
                    new += lines
                    lines = []
                parent = self.names.parents[statement]
                edits.append(in_place_of(statement, parent, self.lines, new))
        if last and lines:
            edits.append(beside(last, self.lines, lines))
        return edits

    def _at_each_use(self) -> dict[Any, str]:
        """What is renamed at each use.

        Where all uses of an imported name become one object, the import brings that object instead
        (``reimport``), and the uses stay.  Not for modules in ``homes``: they get one new import.
        """
        renamed = dict(self._renamed)
        for statement in self._imports:
            for alias in statement.names:
                local = alias.asname or alias.name
                uses = self._loads[local]
                texts = {self._renamed.get(node, "") for node in uses}
                token = TOKEN.fullmatch(" ".join(texts))
                if token is None or token[1] in self.homes:
                    continue
                if alias.asname or token[2] == local:
                    self.reimport(alias, *token.groups())
                    for node in uses:
                        renamed.pop(node, None)
        return renamed

    # ---- imports

    def _of_statement(self, statement: Any) -> list[_Import]:
        """What an import imports now."""
        found: list[_Import] = []
        for alias, old in zip(statement.names, _as_it_is(statement)):
            local = alias.asname or alias.name
            if self._goes(statement, alias):
                root = local.partition(".")[0]
                if "." in local and self._needs(root):
                    found.append(("import ", root))
            elif alias in self._reimported:
                module, name = self._reimported[alias]
                imported = name
                if name != local:
                    imported = f"{name} as {local}"
                found.append((f"from {self.homes.get(module, module)} import ", imported))
            else:
                found.append(old)
        return found

    def stays(self, node: ast.AST) -> bool:
        """Whether a node or a part of an import is as it was."""
        if isinstance(node, ast.alias):
            is_reimported = node in self._reimported
            return not is_reimported and not self._goes(self.names.parents[node], node)
        return node not in self._covered

    def _goes(self, statement: Any, alias: ast.alias) -> bool:
        """Whether nothing needs a part of an import any more."""
        home = getattr(statement, "module", "")
        imported = f"{home}.{alias.name}.".lstrip(".")
        is_dropped = bool(self.dropped) and imported.startswith(self.dropped)
        local = alias.asname or alias.name
        if "." in local:
            return is_dropped and not self._reads(local)
        if self.exported & {local, "*"} or local in self._texts:
            return False
        uses = self._loads[local]
        if alias in self._reimported:
            return not uses
        return self._covered.issuperset(uses) and bool(uses or is_dropped)

    def _reads(self, module: str) -> bool:
        """Whether the file still reads a module by its whole name."""
        for node in self.names.nodes:
            is_kept = isinstance(node, ast.Attribute) and node not in self._covered
            if is_kept and self.names.imported_name(node) == module:
                return True
        return False

    def _needs(self, root: str) -> bool:
        """Whether the file reads the first part of a module's name, and has no other import of
        it.
        """
        for statement in self._imports:
            if ("import ", root) in _as_it_is(statement):
                return False
        return any(node not in self._covered for node in self._loads[root])

    # ---- names

    def _taken_names(self) -> set[str]:
        """The names that mean something in the file."""
        taken = {*dir(builtins)}
        for name, nodes in self._loads.items():
            if not self._covered.issuperset(nodes):
                taken.add(name)
        for node in self.names.nodes:
            if not isinstance(node, IMPORTS):
                taken.update(bound_by(node))
        for imports in self._now.values():
            for _, imported in imports:
                taken.add(_local(imported).partition(".")[0])
        return taken

    def _spelled(self, text: str) -> str:
        return TOKEN.sub(lambda token: self._name(*token.groups()), text)

    def _name(self, module: str, name: str) -> str:
        """How the file calls a function of a module."""
        module = self.homes.get(module, module)
        known = self._known(module, name)
        if known:
            return known
        if name not in self._taken:
            self._new[f"from {module} import "].add(name)
            return name
        package, dot, last = module.rpartition(".")
        if dot and last not in self._taken:
            self._new[f"from {package or dot} import "].add(last)
            return f"{last}.{name}"
        self._new["import "].add(module)
        return f"{module}.{name}"

    def _known(self, module: str, name: str) -> str:
        """The name that imports at the top of the file give a function; empty if they do not."""
        root = module.partition(".")[0]
        is_of_import = {*self.names.bound.get(root, ())} == {root}
        reaching = {module, root}
        if f"{module}.".startswith(NOT_IN_JAX):
            reaching.remove(root)
        dotted = ""
        for statement in self.tree.body:
            for head, imported in self._now.get(statement, ()):
                if head == f"from {module} import " and imported.partition(" as ")[0] == name:
                    return _local(imported)
                if head == "import " and is_of_import and imported in reaching:
                    dotted = f"{module}.{name}"
        return dotted

    def _last_import(self) -> ast.stmt:
        """The last of the imports that follow the first one of JAX: before that, a program may set
        options that JAX reads.  Modules in ``homes`` may be found by a later ``sys.path`` only.
        """
        last = first_of_jax(self.tree)
        follows = True
        for statement in self.tree.body[self.tree.body.index(last) + 1 :]:
            sets_path = bool(self.homes) and "sys.path" in ast.unparse(statement)
            follows = sets_path or (follows and isinstance(statement, IMPORTS))
            if follows:
                last = statement
        return last


def _as_it_is(statement: Any) -> list[_Import]:
    head = "import "
    if isinstance(statement, ast.ImportFrom):
        head = f"from {'.' * statement.level}{statement.module or ''} import "
    return [(head, ast.unparse(alias)) for alias in statement.names]


def _local(imported: str) -> str:
    """The name that ``a as b`` or ``a`` gives."""
    return imported.rpartition(" as ")[2]


def _statements(imports: Iterable[_Import]) -> list[str]:
    """Import statements, those of one module together."""
    by_head: dict[str, dict[str, None]] = defaultdict(dict)
    for head, imported in imports:
        by_head[head][imported] = None
    return [head + ", ".join(imported) for head, imported in by_head.items()]
