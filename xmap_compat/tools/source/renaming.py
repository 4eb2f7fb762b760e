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

from xmap_compat.tools.source.bindings import IMPORTS, Names, bound_by, first_line, text_of
from xmap_compat.tools.source.layout import Edit, at_line, first_of_jax, in_place_of, replacing

TOKEN = re.compile(r"\{([\w.]+):(\w+)\}")
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
        self._attributes: set[ast.AST] = set()
        self._imports: list[Any] = []
        for node in names.nodes:
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
                self._loads[node.id].append(node)
            elif isinstance(node, ast.Attribute):
                self._attributes.add(node)
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
        self._written.append(in_place_of(statement, self.names.parents[statement], self.lines, []))
        self.cover(statement)

    @property
    def has_edits(self) -> bool:
        return bool(self._renamed or self._written)

    def names_from(self, module: str) -> set[str]:
        """The names of a module that the new texts contain."""
        texts = [*self._renamed.values(), *(edit.text for edit in self._written)]
        tokens = TOKEN.findall(" ".join(texts))
        return {name for home, name in tokens if home == module}

    # ---- the edits

    def edits(self) -> list[Edit]:
        """All edits of the file; none if nothing was asked for, and no import of it is dropped."""
        self._now = {statement: self._of_statement(statement) for statement in self._imports}
        self._taken = self._taken_names()
        self._new: set[_Import] = set()
        edits = [replacing(node, self._spelled(text)) for node, text in self._renamed.items()]
        for edit in self._written:
            edits.append(edit._replace(text=self._spelled(edit.text)))
        for statement in self._imports:
            new = _statements(self._now[statement])
            if new != _statements(_as_it_is(statement)):
                parent = self.names.parents[statement]
                edits.append(in_place_of(statement, parent, self.lines, new))
        if self._new:
            edits.append(self._new_imports())
        return edits

    # ---- imports

    def _of_statement(self, statement: Any) -> list[_Import]:
        """What an import imports now."""
        found: list[_Import] = []
        for alias, old in zip(statement.names, _as_it_is(statement)):
            local = alias.asname or alias.name
            if self._goes(statement, alias):
                # Without `import jax.experimental.maps` a file may still read `jax`.
                root, dot, _ = local.partition(".")
                if dot and not self._covered.issuperset(self._loads[root]):
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
            goes = self._goes(self.names.parents[node], node)
            return not (goes or node in self._reimported)
        return node not in self._covered

    def _goes(self, statement: Any, alias: ast.alias) -> bool:
        """Whether nothing needs a part of an import any more."""
        home = getattr(statement, "module", "")
        imported = f"{home}.{alias.name}.".lstrip(".")
        is_dropped = imported.startswith(self.dropped)
        local = alias.asname or alias.name
        if "." in local:
            attributes = self._attributes - self._covered
            return is_dropped and local not in map(ast.unparse, attributes)
        if self.exported & {local, "*"} or local in self._texts:
            return False
        uses = self._loads[local]
        if alias in self._reimported:
            return not uses
        return self._covered.issuperset(uses) and bool(uses or is_dropped)

    # ---- names

    def _taken_names(self) -> set[str]:
        """The names that mean something in the file."""
        taken = {*dir(builtins)}
        for node in self.names.nodes:
            if isinstance(node, ast.Name) and node not in self._covered:
                taken.add(node.id)
            elif not isinstance(node, (ast.Name, *IMPORTS)):
                taken.update(bound_by(node))
        for imports in self._now.values():
            taken.update(_local(imported).partition(".")[0] for _, imported in imports)
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
            self._new.add((f"from {module} import ", name))
            return name
        package, dot, last = module.rpartition(".")
        if dot and last not in self._taken:
            self._new.add((f"from {package or dot} import ", last))
            return f"{last}.{name}"
        self._new.add(("import ", module))
        return f"{module}.{name}"

    def _known(self, module: str, name: str) -> str:
        """The name that imports at the top of the file give a function; empty if they do not."""
        for statement in self.tree.body:
            for head, imported in self._now.get(statement, ()):
                if head == f"from {module} import " and imported.partition(" as ")[0] == name:
                    return _local(imported)
                if (head, imported) == ("import ", module):
                    return f"{module}.{name}"
        return ""

    def _new_imports(self) -> Edit:
        """They stand below the imports that follow the first one of JAX: above, a program may set
        options that JAX reads.  Modules in ``homes`` may be found by a later ``sys.path`` only.
        """
        first = first_of_jax(self.tree)
        line = first_line(first)
        follows = True
        for statement in self.tree.body[self.tree.body.index(first) :]:
            sets_path = bool(self.homes) and "sys.path" in ast.unparse(statement)
            is_in_line = statement.lineno < line
            follows = sets_path or is_in_line or (follows and isinstance(statement, IMPORTS))
            if follows:
                line = statement.end_lineno + 1
        return at_line(line, _statements(self._new))


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
    by_head: dict[str, set[str]] = defaultdict(set)
    for head, imported in imports:
        by_head[head].add(imported)
    return [head + ", ".join(sorted(imported)) for head, imported in sorted(by_head.items())]
