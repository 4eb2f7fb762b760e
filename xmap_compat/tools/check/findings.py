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
from xmap_compat.tools.check.checker import Reported
from xmap_compat.tools.check.texts import Texts
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
    dies: bool = True  # whether a program that runs under install() fails there
    guard: str = ""  # how the program is ready for it: then it is listed, and is no finding

    @property
    def place(self) -> str:
        cell = f":cell {self.cell}" if self.cell else ""
        return f"{self.path}{cell}:{self.line}:{self.column}"

    def __str__(self) -> str:
        if self.guard:
            return f"{self.place}: {self.gone.name}: {self.guard}"
        what = f"last in jax {self.gone.until}; " if self.gone.until else ""
        return f"{self.place}: {self.gone.name}: {what}{self.gone.remedy}"


@dataclasses.dataclass(frozen=True)
class Checked:
    """The programs, all findings in them in order, and the release of JAX."""

    programs: tuple[Program, ...]
    findings: tuple[Finding, ...]
    jax: str

    @property
    def reported(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.guard]

    @property
    def guarded(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.guard]


@dataclasses.dataclass(frozen=True)
class _Use:
    """A name at a place, before it is known whether this JAX has it."""

    node: Any
    name: str
    line: int
    column: int
    guard: str
    is_used: bool  # called, or asked for an attribute


def check(
    paths: Sequence[Path], progress: Callable[[list[Program]], Iterable[Program]] = iter
) -> Checked:
    """Read the files and folders of ``paths``, and find in them what JAX removed."""
    programs = tuple(read(path) for path in source_files(paths))
    near = [program for program in programs if _NEAR_JAX.search(program.text)]
    reported = _reported(near)
    uses: dict[Path, list[_Use]] = {}
    asked: set[str] = set()
    for program in progress(near):
        uses[program.path] = list(_uses(program, reported[program.path]))
        asked.update(use.name for use in uses[program.path])
    release, lacking = facts.ask(asked)
    found: list[Finding] = []
    for program in programs:
        found += _judged(program, uses.get(program.path, ()), lacking, release)
        for line, column, message in program.errors:
            gone = table.Gone("cannot be read", table.ERROR, message)
            found.append(Finding(program.path, *program.where(line), column, gone))
    found.sort(key=lambda finding: (finding.path, finding.cell, finding.line, finding.column))
    return Checked(programs, tuple(found), release)


def _reported(programs: Iterable[Program]) -> dict[Path, list[Reported]]:
    """What ty says about each program."""
    found: dict[Path, list[Reported]] = defaultdict(list)
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


def _uses(program: Program, reported: Iterable[Reported]) -> Iterator[_Use]:
    """The names that a program asks JAX for."""
    names = Texts(program.tree)
    lines = program.text.split("\n")
    by_end: dict[Any, ast.AST] = {}
    put_there = set()  # by the program itself, into JAX
    for node in names.nodes:
        is_set = isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"
        if isinstance(node, ast.Attribute):
            by_end[node.end_lineno, node.end_col_offset] = node
            is_set = not isinstance(node.ctx, ast.Load)
        if is_set:
            put_there.add(names.dotted(node))
    asked = list(names.asked())
    for each in reported:
        before = lines[each.line - 1][: each.column - 1]
        node_there = by_end.get((each.line, len(before.encode())))
        if node_there is not None:
            asked.append((node_there, each.name))
    for node, name in asked:
        is_of_another_array = name.startswith("jax.Array.") and name not in table.ARRAY
        if name not in put_there and not is_of_another_array:
            yield _use(names, lines, node, name)


def _use(names: Texts, lines: Sequence[str], node: Any, name: str) -> _Use:
    line = node.lineno
    start = node.col_offset
    if isinstance(node, ast.Attribute):  # where its name stands
        line = node.end_lineno or 0
        start = (node.end_col_offset or 0) - len(node.attr.encode())
    before = lines[line - 1].encode()[:start].decode(errors="replace")
    parent = names.parents.get(node)
    is_called = getattr(parent, "func", None) is node
    is_asked = getattr(parent, "value", None) is node
    return _Use(
        node=node,
        name=name,
        line=line,
        column=len(before) + 1,
        guard=guards.guard_of(names, node, name, _error_of(node, name)),
        is_used="(" in name or is_called or is_asked,
    )


def _error_of(node: Any, name: str) -> type[Exception]:
    """What Python raises where a name is gone."""
    if "(" in name:
        return TypeError
    if isinstance(node, ast.Attribute):
        return AttributeError
    is_import = isinstance(node, (ast.alias, ast.ImportFrom))
    if is_import or "import" in ast.unparse(node):
        is_of_module = {name, name.rpartition(".")[0]} & table.MODULES.keys()
        return ModuleNotFoundError if is_of_module else ImportError
    return AttributeError


def _judged(
    program: Program, uses: Iterable[_Use], lacking: set[str], jax: str
) -> Iterator[Finding]:
    """The uses of what this JAX lacks, each place once."""
    found: set[str] = set()
    by_place = {(use.line, use.column, use.name): use for use in uses}
    for _, use in sorted(by_place.items()):
        gone = table.known(use.name)
        is_keyword_of_table = gone is not None and "(" in use.name
        if use.name not in lacking and not is_keyword_of_table:
            continue
        found.add(use.name)
        owner = use.name.rpartition(".")[0]
        is_attribute = isinstance(use.node, ast.Attribute)
        if is_attribute and owner in found and owner not in table.MODULES:
            continue  # a part of what is found already
        gone = gone or table.unknown(use.name, jax)
        helps = gone.kind == table.RESTORED or (gone.kind == table.REFUSED and not use.is_used)
        yield Finding(
            program.path,
            *program.where(use.line),
            use.column,
            gone,
            node=use.node,
            dies=not (use.guard or helps),
            guard=use.guard,
        )
