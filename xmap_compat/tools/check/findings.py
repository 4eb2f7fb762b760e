"""What a program uses that JAX removed: what the checker and the texts say, and whether this JAX
has it.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from xmap_compat.tools.check import checker, facts, guards, table
from xmap_compat.tools.check.checker import MissingAttribute
from xmap_compat.tools.check.texts import Uses
from xmap_compat.tools.source.reading import Program, read, source_files

# What programs call JAX and its modules, also those that take them from other files.
_NEAR_JAX = re.compile(r"\b(jax|jnp|lax|maps|np)\b")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A use of a removed name, or what keeps a file from being read."""

    path: Path
    cell: int  # of a notebook; the line is that in the cell
    line: int
    column: int
    gone: table.Gone
    node: Any = None
    fails: bool = True  # whether a run under install() fails there
    guard: str = ""  # how the program is ready for it: then it is listed, and is no finding

    @property
    def place(self) -> str:
        if self.cell:
            return f"{self.path}:cell {self.cell}:{self.line}:{self.column}"
        return f"{self.path}:{self.line}:{self.column}"

    def __str__(self) -> str:
        if self.guard:
            return f"{self.place}: {self.gone.name}: {self.guard}"
        if self.gone.until:
            until = f"last in jax {self.gone.until}"
            return f"{self.place}: {self.gone.name}: {until}; {self.gone.remedy}"
        return f"{self.place}: {self.gone.name}: {self.gone.remedy}"


@dataclasses.dataclass(frozen=True)
class Checked:
    """The programs, all findings in them in order, and the release of JAX."""

    programs: tuple[Program, ...]
    findings: tuple[Finding, ...]
    jax: str

    @property
    def unguarded(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.guard]

    @property
    def guarded(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.guard]


def check(
    paths: Sequence[Path], progress: Callable[[list[Program]], Iterable[Program]] = iter
) -> Checked:
    """Read the files and folders of ``paths``, and find in them what JAX removed."""
    programs = tuple(read(path) for path in source_files(paths))
    near = [program for program in programs if _NEAR_JAX.search(program.text)]
    missing = _missing_attributes(near)
    uses: dict[Path, _UsesOfProgram] = {}
    asked: set[str] = set()
    for program in progress(near):
        uses[program.path] = _UsesOfProgram(program, missing[program.path])
        asked |= uses[program.path].nodes_by_name.keys()
    release, lacking = facts.ask(asked)
    found: list[Finding] = []
    for program in programs:
        if program.path in uses:
            found += uses[program.path].findings(lacking, release)
        for line, column, message in program.errors:
            gone = table.Gone("cannot be read", table.ERROR, message)
            found.append(Finding(program.path, *program.where(line), column, gone))
    found.sort(key=lambda finding: (finding.path, finding.cell, finding.line, finding.column))
    return Checked(programs, tuple(found), release)


def _missing_attributes(programs: Iterable[Program]) -> dict[Path, list[MissingAttribute]]:
    """What ty says about each program."""
    found: dict[Path, list[MissingAttribute]] = defaultdict(list)
    files: dict[Path, Path] = {}
    roots: dict[Path, None] = {}
    with tempfile.TemporaryDirectory(prefix="xmap_compat") as temporary:
        folder = Path(temporary).resolve()
        for number, program in enumerate(programs):
            path = program.path.resolve()
            roots[_root_of(path)] = None
            if path.suffix != ".py":
                path = folder / f"notebook{number}.py"
                path.write_text(program.text, encoding="utf-8")
            files[path] = program.path
        if files:
            for report in checker.run(files, folder, roots):
                found[files[report.path]].append(report)
    return found


def _root_of(path: Path) -> Path:
    """Where a file's modules are imported from: the first folder above it that is no package."""
    folder = path.parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


class _UsesOfProgram:
    """What one program asks JAX for.

    Attributes:
      nodes_by_name: the names, and the nodes that ask for each.
    """

    def __init__(self, program: Program, missing: Iterable[MissingAttribute]):
        self._program = program
        self._names = Uses(program.tree)
        self._lines = program.text.split("\n")
        self.nodes_by_name: dict[str, list[Any]] = defaultdict(list)
        for node, name in self._names.uses():
            self.nodes_by_name[name].append(node)
        by_end: dict[Any, ast.AST] = {}
        put_there = set()  # by the program itself, into JAX
        for node in self._names.nodes:
            is_set = isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"
            if isinstance(node, ast.Attribute):
                by_end[node.end_lineno, node.end_col_offset] = node
                is_set = not isinstance(node.ctx, ast.Load)
            if is_set:
                put_there.add(self._names.dotted(node))
        for each in missing:
            before = self._lines[each.line - 1][: each.column - 1]
            reader = by_end.get((each.line, len(before.encode())))
            is_of_another_array = each.name.startswith("jax.Array.") and not table.known(each.name)
            if reader is not None and not is_of_another_array:
                self.nodes_by_name[each.name].append(reader)
        for name in put_there:
            self.nodes_by_name.pop(name, None)

    def findings(self, lacking: set[str], jax: str) -> Iterator[Finding]:
        """The uses of what this JAX lacks, each place once."""
        by_place = {}
        for name, nodes in self.nodes_by_name.items():
            is_keyword_of_table = "(" in name and table.known(name)
            if name in lacking or is_keyword_of_table:
                for node in nodes:
                    by_place[*self._place(node), name] = node
        found: set[str] = set()
        for (line, column, name), node in sorted(by_place.items()):
            found.add(name)
            owner = name.rpartition(".")[0]
            is_attribute = isinstance(node, ast.Attribute)
            if is_attribute and owner in found and owner not in table.MODULES:
                continue  # a part of what is found already
            gone = table.known(name) or table.unknown(name, jax)
            guard = guards.guard_of(self._names, node, name, _error_of(node, name))
            helps = gone.kind == table.RESTORED
            if gone.kind == table.REFUSED:
                helps = "(" not in name and not self._is_used(node)
            place = self._program.path, *self._program.where(line), column
            yield Finding(*place, gone, node=node, fails=not (guard or helps), guard=guard)

    def _place(self, node: Any) -> tuple[int, int]:
        """The line and the column of a name."""
        line = node.lineno
        start = node.col_offset
        if isinstance(node, ast.Attribute):
            line = node.end_lineno or 0
            start = (node.end_col_offset or 0) - len(node.attr.encode())
        before = self._lines[line - 1].encode()[:start].decode(errors="replace")
        return line, len(before) + 1

    def _is_used(self, node: ast.AST) -> bool:
        """Whether something is called, or asked for an attribute."""
        parent = self._names.parents.get(node)
        return node in (getattr(parent, "func", None), getattr(parent, "value", None))


def _error_of(node: Any, name: str) -> type[Exception]:
    """What Python raises where a name is gone."""
    if "(" in name:
        return TypeError
    is_import = isinstance(node, (ast.alias, ast.ImportFrom)) or "import" in ast.unparse(node)
    if isinstance(node, ast.Attribute) or not is_import:
        return AttributeError
    if name in table.MODULES or name.rpartition(".")[0] in table.MODULES:
        return ModuleNotFoundError
    return ImportError
