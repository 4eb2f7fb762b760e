"""Rewrites removed names where they stand: today's names, none if nothing uses them, ``install()``
for the rest.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from xmap_compat.tools.check import calls, guards, table
from xmap_compat.tools.check.findings import Checked, Finding
from xmap_compat.tools.source.bindings import Names
from xmap_compat.tools.source.layout import (
    Edit,
    applied,
    before_jax,
    in_place_of,
    replacing,
    without_keyword,
)
from xmap_compat.tools.source.reading import Program, read

INSTALL = "import xmap_compat; xmap_compat.install()"
MESHES = (f"{table.MAPS}.Mesh", "jax.interpreters.pxla.Mesh")
# Modules that `import jax` does not import.
_APART = ("jax.extend", "jax.example_libraries", "collections")
# Where a mesh class is a value: ours is another class than JAX's.
_COMPARES = re.compile(
    r"\b(isinstance|issubclass|type|__class__|case|register)\b.*\bMesh\b|[{,] *(\w+\.)*Mesh *[]:,}]"
    r"|: Mesh\): return"
)
_OTHER_CLASS = "needs xmap_compat.install(): the class of a mesh is compared, and ours is another"


@dataclasses.dataclass(frozen=True)
class Fixed:
    """What fixing some files gives.

    Attributes:
      contents: the new contents of the files that need one.
      left: what it could not mend, each with ``path``, ``line``, ``gone.name``, ``gone.remedy``.
      notes: why an import stays, a line each.
    """

    contents: dict[Path, bytes]
    left: tuple[Finding, ...]
    notes: tuple[str, ...] = ()


def fixed(checked: Checked, install: bool = True, keep: Collection[str] = ()) -> Fixed:
    """New contents of the files that need one.

    Args:
      install: whether a file may call ``install()`` where only that gives a name; if not, the name
        is in ``left``.
      keep: dotted removed names that stay as they are.
    """
    contents: dict[Path, bytes] = {}
    left: list[Finding] = []
    notes: list[str] = []
    by_path: dict[Path, list[Finding]] = defaultdict(list)
    for finding in checked.findings:
        if finding.gone.name not in keep:
            by_path[finding.path].append(finding)
    for program in checked.programs:
        found = by_path[program.path]
        if not found or program.errors:
            continue
        file = _File(program, found, _taken(program.path, checked.programs))
        edits = [*file.edits, *before_jax(program.tree, file.lines(install))]
        if edits:
            new = applied(program.path.read_bytes(), str(program.path), edits)
            if read(program.path, new).errors:
                left += found
                continue
            contents[program.path] = new
        left += file.left
        if install:
            notes += file.notes
        else:
            left += file.installed
    return Fixed(contents, tuple(left), tuple(notes))


def _taken(path: Path, programs: Iterable[Program]) -> set[str]:
    """The names that other files, given or beside this one, take from this one."""
    beside = [read(other) for other in sorted(path.parent.glob("*.py"))[:500]]
    stem = re.escape(path.stem)
    imported = re.compile(rf"(?m)^\s*from\s+[.\w]*\b{stem}\s+import\s+\(?([^\n)]*)")
    attribute = re.compile(rf"\b{stem}\.(\w+)")
    taken: set[str] = set()
    for text in {program.text for program in (*programs, *beside) if program.path != path}:
        if path.stem in text:
            for names in imported.findall(text):
                taken.update(re.findall(r"\w+", names))
            taken.update(attribute.findall(text))
    return taken


class _File:
    """The edits of one file.

    Attributes:
      edits: the edits, without the call of ``install()``.
      left: what only a hand can change.
      installed: what only ``install()`` gives.
      notes: why an import stays.
    """

    def __init__(self, program: Program, findings: list[Finding], taken: set[str]):
        self._program = program
        self._lines = program.text.split("\n")
        self._names = Names(program.tree)
        self._exported = taken | calls.texts_in(self._names)
        self._rewritten: set[ast.AST] = set()
        self._added: set[str] = set()
        self.edits: list[Edit] = []
        self.left: list[Finding] = []
        self.installed: list[Finding] = []
        self.notes: list[str] = []
        self._why_kept = self._reasons(findings)
        of_aliases: dict[Any, Finding] = {}
        for finding in findings:
            if isinstance(finding.node, ast.alias):
                of_aliases[finding.node] = finding
            elif finding.node not in self._rewritten:
                self._use(finding)
        for statement in dict.fromkeys(self._names.parents[alias] for alias in of_aliases):
            self._import(statement, of_aliases)

    def lines(self, install: bool) -> list[str]:
        """The imports that its edits need, and the call of ``install()``."""
        installs = [INSTALL] if self.installed and install else []
        added = sorted(self._added - ({"xmap_compat"} if installs else set()))
        return [f"import {name}" for name in added] + installs

    def _reasons(self, findings: list[Finding]) -> dict[str, str]:
        """Why names that have one today stay as they are, by the name."""
        found: dict[str, str] = {}
        names = {finding.gone.name for finding in findings}
        if calls.XMAP in names or table.MAPS in names:
            asked = calls.read_calls(self._names)
            self.edits += asked.edits
            self._rewritten |= asked.covered
            for line, words in asked.reasons[:1]:
                _, own_line = self._program.where(line)
                why = f"needs xmap_compat.install(): line {own_line}: {words}"
                found[calls.XMAP] = why
        if _COMPARES.search(self._program.text):
            found |= dict.fromkeys(MESHES, _OTHER_CLASS)
        return found

    def _leave(self, finding: Finding) -> None:
        """Not rewritten: ``install()`` gives the name, or a hand has to."""
        if finding.dies:
            self.left.append(finding)
        elif finding.gone.kind != table.GONE and finding.guard in ("", guards.CAUGHT):
            why = self._why_kept.get(finding.gone.name)
            if why is not None:
                gone = dataclasses.replace(finding.gone, remedy=why)
                finding = dataclasses.replace(finding, gone=gone, guard="")
                self.notes.append(str(finding))
            self.installed.append(finding)

    def _now(self, finding: Finding) -> str:
        """Today's name of the same object, if it means the same here."""
        return "" if finding.gone.name in self._why_kept else finding.gone.now

    # ------------------------------------------------------------------------------- uses

    def _use(self, finding: Finding) -> None:
        node = finding.node
        now = self._now(finding)
        if isinstance(node, ast.keyword) and self._keyword(node, finding.gone):
            return
        if isinstance(node, ast.keyword) and node.arg and finding.gone.is_left_out:
            self.edits.append(without_keyword(node, self._lines))
            self._rewritten.update(ast.walk(node))
            return
        is_read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        if is_read and now and self._attribute(node, now):
            self._rewritten.add(node)
        else:
            self._leave(finding)

    def _keyword(self, keyword: ast.keyword, gone: table.Gone) -> bool:
        """Write today's keyword; whether it takes the same values."""
        if keyword.arg is None or not gone.now:
            return False
        if ".pjit." in gone.name:
            spec = calls.spec_of_none(self._names, keyword.value)
            if spec is None or ".pjit.pjit" not in gone.name:
                return False
            nones = calls.nones_in(keyword.value)
            if nones and spec.startswith("jax."):
                self._added.add("jax")
            self.edits += [replacing(node, spec) for node in nones]
        start = keyword.lineno, keyword.col_offset
        end = keyword.lineno, keyword.col_offset + len(keyword.arg)
        self.edits.append(Edit(start, end, gone.now))
        return True

    def _attribute(self, node: ast.Attribute, now: str) -> bool:
        """Write today's name; whether its first part can be had."""
        module, _, last = now.rpartition(".")
        root = now.partition(".")[0]
        if self._names.dotted(node.value) == module:
            line, column = replacing(node, "").end
            self.edits.append(Edit((line, column - len(node.attr.encode())), (line, column), last))
            return True
        if self._names.bound.get(root) and self._names.meaning(root) != root:
            return False
        needed = module if module.startswith(_APART) else root
        there = rf"(?m)^import (.*, *)?{re.escape(needed)}(\.\w+)*\s*(,|;|#|$)"
        if not re.search(there, self._program.text):
            self._added.add(needed)
        self.edits.append(replacing(node, now))
        return True

    # ---------------------------------------------------------------------------- imports

    def _stays(self, node: ast.AST | None) -> bool:
        """Whether a node is not part of what was rewritten."""
        while node is not None and node not in self._rewritten:
            node = self._names.parents.get(node)
        return node is None

    def _is_used(self, local: str) -> bool:
        """Whether something still reads a name of this file."""
        if local in self._exported:
            return True
        for node in self._names.nodes:
            if not isinstance(node, ast.Name) or isinstance(node.ctx, ast.Store):
                continue
            if node.id == local and self._stays(node):
                return True
        return False

    def _import(self, statement: Any, findings: dict[Any, Finding]) -> None:
        """Edit a statement that imports removed names."""
        head = "import "
        if isinstance(statement, ast.ImportFrom):
            head = f"from {statement.module} import "
        heads: dict[str, dict[str, None]] = defaultdict(dict)  # the new statements
        for alias in statement.names:
            finding = findings.get(alias)
            new = self._imported(head, alias, finding) if finding else None
            if new is None:
                heads[head][ast.unparse(alias)] = None
                if finding:
                    self._leave(finding)
            elif new:
                heads[new[0]][new[1]] = None
        if heads != {head: dict.fromkeys(ast.unparse(alias) for alias in statement.names)}:
            self._rewritten.add(statement)
            new_statements = [start + ", ".join(names) for start, names in heads.items()]
            parent = self._names.parents[statement]
            self.edits.append(in_place_of(statement, parent, self._lines, new_statements))

    def _imported(
        self, head: str, alias: ast.alias, finding: Finding
    ) -> tuple[str, str] | tuple[()] | None:
        """The head of an import and what it imports, in the place of a removed name: nothing where
        nothing uses it, and None where it stays.
        """
        now = self._now(finding)
        if head == "import " and not alias.asname:
            return None if self._reads_whole(alias.name) else (head, now or "jax")
        local = alias.asname or alias.name
        if not self._is_used(local):
            return ()
        if not now:
            return None
        module, _, last = now.rpartition(".")
        if module and head != "import ":
            return f"from {module} import ", last if last == local else f"{last} as {local}"
        return "import ", now if local == now else f"{now} as {local}"

    def _reads_whole(self, module: str) -> bool:
        """Whether something still reads a module by its whole name, which ``import a.b`` serves."""
        for node in self._names.nodes:
            is_it = isinstance(node, ast.Attribute) and self._names.dotted(node) == module
            if is_it and self._stays(node):
                return True
        return False
