"""Rewrites removed names where they stand: today's names, none if nothing uses them, ``install()``
for the rest.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from xmap_compat.tools.check import table
from xmap_compat.tools.check.findings import Checked, Finding
from xmap_compat.tools.source.bindings import Names, text_of
from xmap_compat.tools.source.layout import Edit, applied, before_jax, in_place_of, replacing
from xmap_compat.tools.source.reading import Program, read

INSTALL = "import xmap_compat; xmap_compat.install()"
MESHES = (f"{table.MAPS}.Mesh", "jax.interpreters.pxla.Mesh")
# What may take a name away from the axes that a result varies over.
_REDUCES = re.compile(r"\b(psum|pmean|pmax|pmin|pdot|xeinsum|all_gather|pargmax|pargmin|einsum)\b")
# Keywords that are more than another name of the same: of pjit and its constraint.
_SAME_KEYWORDS = {
    gone.name: gone.now
    for gone in table.KEYWORDS.values()
    if gone.now and ".pjit." not in gone.name
}
# Where a mesh class is a value: ours is another class than JAX's.
_COMPARES = re.compile(
    r"\b(isinstance|issubclass|type|__class__|case|register)\b.*\bMesh\b|[{,] *(\w+\.)*Mesh *[]:,}]|: Mesh\): return"
)


@dataclasses.dataclass(frozen=True)
class Fixed:
    """What fixing some files gives."""

    contents: dict[Path, bytes]  # the new contents of the files that need one
    left: tuple[
        Finding, ...
    ]  # what it could not mend, each with ``path``, ``line``, ``gone.name``, ``gone.remedy``


def fixed(checked: Checked, install: bool = True, keep: Collection[str] = ()) -> Fixed:
    """New contents of the files that need one.

    Args:
      install: whether a file may call ``install()`` where only that gives a name; if not, the name
      is in ``left``.
      keep: dotted removed names that stay as they are.
    """
    contents, left = {}, []
    for program in checked.programs:
        found = [f for f in checked.findings if f.path == program.path and f.gone.name not in keep]
        if not found or program.errors:
            continue
        file = _File(program, found, set(_taken(program.path, checked.programs)))
        edits = [*file.edits, *before_jax(program.tree, file.lines(install))]
        new = applied(program.path.read_bytes(), str(program.path), edits) if edits else b""
        if read(program.path, new).errors:
            left += found
            continue
        contents.update({program.path: new} if edits else {})
        left += file.left + file.installed * (not install)
    return Fixed(contents, tuple(left))


def _taken(path: Path, programs: Iterable[Program]) -> Iterator[str]:
    """The names that other files, given or beside this one, take from this one."""
    beside = [read(other) for other in sorted(path.parent.glob("*.py"))[:500]]
    stem = re.escape(path.stem)
    for text in {program.text for program in (*programs, *beside) if program.path != path}:
        if path.stem in text:
            for names in re.findall(
                rf"(?m)^\s*from\s+[.\w]*\b{stem}\s+import\s+\(?([^\n)]*)", text
            ):
                yield from re.findall(r"\w+", names)
            yield from re.findall(rf"\b{stem}\.(\w+)", text)


class _File:
    """The edits of one file."""

    def __init__(self, program: Program, findings: list[Finding], taken: set[str]):
        self._text, self._lines = program.text, program.text.split("\n")
        self._names = Names(program.tree)
        self._exported = taken | {text for node in self._names.nodes if (text := text_of(node))}
        self._rewritten: set[ast.AST] = set()
        self._added: set[str] = set()
        self.edits: list[Edit] = []
        self.left: list[Finding] = []
        self.installed: list[Finding] = []
        # Only the xmap of install() accepts results that vary over an axis which their out_axes do
        # not name.
        undeclared = "axis_resources" in program.text and not _REDUCES.search(program.text)
        self._differs = {f"{table.MAPS}.xmap"} if undeclared else set()
        self._differs |= {*MESHES} if _COMPARES.search(program.text) else set()
        of_aliases = {
            finding.node: finding for finding in findings if isinstance(finding.node, ast.alias)
        }
        for finding in findings:
            if finding.node not in of_aliases:
                self._use(finding)
        for statement in {self._names.parents[alias]: None for alias in of_aliases}:
            self._import(statement, of_aliases)

    def lines(self, install: bool) -> list[str]:
        """The imports that its edits need, and the call of ``install()``."""
        installs = [INSTALL] if self.installed and install else []
        return [
            f"import {name}"
            for name in sorted(self._added)
            if f"import {name};" not in str(installs)
        ] + installs

    def _leave(self, finding: Finding) -> None:
        """Not rewritten: ``install()`` gives the name, or a hand has to."""
        if finding.dies:
            self.left.append(finding)
        elif finding.gone.kind != table.GONE and (not finding.guarded or finding.caught):
            self.installed.append(finding)

    def _now(self, finding: Finding) -> str:
        """Today's name of the same object, if it means the same here."""
        return "" if finding.gone.name in self._differs else finding.gone.now

    # ------------------------------------------------------------------------------- uses

    def _use(self, finding: Finding) -> None:
        node, now = finding.node, self._now(finding)
        if isinstance(node, ast.keyword) and finding.gone.name in _SAME_KEYWORDS and node.arg:
            at = node.lineno, node.col_offset
            self.edits.append(
                Edit(at, (at[0], at[1] + len(node.arg)), _SAME_KEYWORDS[finding.gone.name])
            )
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Load)
            and now
            and self._attribute(node, now)
        ):
            self._rewritten.add(node)
        else:
            self._leave(finding)

    def _attribute(self, node: ast.Attribute, now: str) -> bool:
        """Write today's name; whether its first part can be had."""
        module, _, last = now.rpartition(".")
        root = now.split(".")[0]
        if self._names.dotted(node.value) == module:
            line, column = replacing(node, "").end
            self.edits.append(Edit((line, column - len(node.attr.encode())), (line, column), last))
            return True
        if self._names.bound.get(root) and self._names.meaning(root) != root:
            return False
        needed = (
            module
            if module.startswith(("jax.extend", "jax.example_libraries", "collections"))
            else root
        )
        if not re.search(
            rf"(?m)^import (.*, *)?{re.escape(needed)}(\.\w+)*\s*(,|;|#|$)", self._text
        ):
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
        names = (n for n in self._names.nodes if isinstance(n, ast.Name) and n.id == local)
        return local in self._exported or any(
            not isinstance(n.ctx, ast.Store) and self._stays(n) for n in names
        )

    def _import(self, statement: Any, findings: dict[ast.alias, Finding]) -> None:
        home = (
            f"from {statement.module} import "
            if isinstance(statement, ast.ImportFrom)
            else "import "
        )
        heads: dict[str, list[str]] = defaultdict(list)  # the new statements
        for alias in statement.names:
            finding, local = findings.get(alias), alias.asname or alias.name
            now, used = self._now(finding) if finding else "", True
            if home != "import " or alias.asname:
                used = self._is_used(local)
            else:  # `import a.b` serves whole names
                whole = (n for n in self._names.nodes if isinstance(n, ast.Attribute))
                stays = any(self._stays(n) for n in whole if self._names.dotted(n) == alias.name)
                now, local = "" if stays else now or "jax", ""
            module, _, last = now.rpartition(".")
            if finding is None or (used and not now):
                heads[home].append(ast.unparse(alias))
                if finding:
                    self._leave(finding)
            elif used and module and home != "import ":
                heads[f"from {module} import "].append(
                    last if last == local else f"{last} as {local}"
                )
            elif used:
                heads["import "].append(f"{now} as {local}" if local not in ("", now) else now)
        if heads != {home: [ast.unparse(alias) for alias in statement.names]}:
            self._rewritten.add(statement)
            new = [head + ", ".join(dict.fromkeys(names)) for head, names in heads.items()]
            self.edits.append(
                in_place_of(statement, self._names.parents[statement], self._lines, new)
            )
