"""What a program uses that JAX removed: what the checker and the texts say, and whether this JAX
has it.
"""

from __future__ import annotations

import ast
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from xmap_compat.legacy.removed import REFUSED, Removed
from xmap_compat.tools.check import checker, facts, guards, removed_names, texts
from xmap_compat.tools.progress import progress
from xmap_compat.tools.source.bindings import Names
from xmap_compat.tools.source.reading import Program, read, source_files


@dataclasses.dataclass(frozen=True)
class Finding:
    """A use of a removed name, or what keeps a file from being read."""

    path: Path
    cell: int  # of a notebook; the line is that in the cell
    line: int
    column: int
    gone: Removed
    node: Any = None
    fails: bool = True  # whether a run under install() fails there
    guarded: bool = False  # whether the program is ready for it: then it fails nowhere

    def __str__(self) -> str:
        place = f"{self.line}:{self.column}"
        if self.cell:
            place = f"cell {self.cell}:{place}"
        remedy = self.gone.remedy
        if self.guarded:
            remedy = "guarded by a try or a test"
        return f"{self.path}:{place}: {self.gone.name}: {remedy}"


@dataclasses.dataclass(frozen=True)
class Checked:
    """The programs, all findings in them in order, and the release of JAX."""

    programs: list[Program]
    findings: list[Finding]
    jax: str


def check(paths: Sequence[Path]) -> Checked:
    """Read the files and folders of ``paths``, and find in them what JAX removed."""
    programs = [read(path) for path in source_files(paths)]
    missing = checker.missing_attributes(program for program in programs if program.text)
    uses = []
    for program in progress(programs, "files"):
        uses.append(_UsesOfProgram(program, missing[program.path]))
    asked = [name for use in uses for name in use.nodes_by_name]
    release, lacking = facts.release_and_lacking(asked)
    found: list[Finding] = []
    for use in uses:
        found += use.findings(lacking, release)
    found.sort(key=lambda finding: (finding.path, finding.cell, finding.line, finding.column))
    return Checked(programs, found, release)


class _UsesOfProgram:
    """What one program asks JAX for.

    Attributes:
      nodes_by_name: the names, and the nodes that ask for each.
    """

    def __init__(self, program: Program, missing: Iterable[checker.MissingAttribute]):
        self._program = program
        self._names = Names(program.tree)
        self._lines = program.text.split("\n")
        self.nodes_by_name: dict[str, list[Any]] = defaultdict(list)
        for node, name in texts.uses(self._names):
            if name.startswith("jax."):
                self.nodes_by_name[name].append(node)
        by_end: dict[Any, ast.AST] = {}
        set_by_program = set()  # names that the program puts into JAX
        for node in self._names.nodes:
            if isinstance(node, ast.Attribute):
                by_end[node.end_lineno, node.end_col_offset] = node
                if not isinstance(node.ctx, ast.Load):
                    set_by_program.add(self._names.dotted(node))
        for line, column, name in missing:
            before = self._lines[line - 1][: column - 1]
            reader = by_end.get((line, len(before.encode())))
            is_of_another_array = name.startswith("jax.Array.") and not removed_names.known(name)
            if reader is not None and not is_of_another_array:
                self.nodes_by_name[name].append(reader)
        for name in set_by_program:
            self.nodes_by_name.pop(name, None)

    def findings(self, lacking: set[str], jax: str) -> Iterator[Finding]:
        """The uses of what this JAX lacks, each place once."""
        by_place = {}
        for name, nodes in self.nodes_by_name.items():
            is_keyword_of_table = "(" in name and removed_names.known(name)
            if name in lacking or is_keyword_of_table:
                for node in nodes:
                    by_place[*self._place(node), name] = node
        names = {name for _, _, name in by_place}
        for (line, column, name), node in by_place.items():
            owner = name.rpartition(".")[0]
            is_part = isinstance(node, ast.Attribute) and owner in names
            if is_part and owner not in removed_names.MODULES:
                continue  # of what is found already
            gone = removed_names.known(name) or removed_names.unknown(name, jax)
            guarded = guards.is_guarded(self._names, node, name, _error_of(node, name))
            is_used = gone.kind == REFUSED and not isinstance(node, ast.alias)
            helps = gone.kind in removed_names.RESTORED or name.endswith("?")
            place = self._program.path, *self._program.where(line), column
            yield Finding(*place, gone, node, not guarded and (is_used or not helps), guarded)
        for line, column, message in self._program.errors:
            gone = Removed("cannot be read", removed_names.UNKNOWN, message)
            yield Finding(self._program.path, *self._program.where(line), column, gone)

    def _place(self, node: Any) -> tuple[int, int]:
        """The line and the column of a name."""
        line = node.lineno
        start = node.col_offset
        if isinstance(node, ast.Attribute):
            line = node.end_lineno or 0
            start = (node.end_col_offset or 0) - len(node.attr.encode())
        before = self._lines[line - 1].encode()[:start].decode(errors="replace")
        return line, len(before) + 1


def _error_of(node: Any, name: str) -> type[Exception]:
    """What Python raises where a name is gone."""
    if "(" in name and not name.startswith("jax.config("):
        return TypeError
    if isinstance(node, (ast.alias, ast.ImportFrom, ast.Constant)):
        return ImportError
    return AttributeError
