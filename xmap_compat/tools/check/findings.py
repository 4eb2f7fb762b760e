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
from xmap_compat.tools.check.facts import Facts
from xmap_compat.tools.check.texts import Texts
from xmap_compat.tools.source.reading import Program, read, source_files


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
    is_used: bool  # called, or asked for an attribute
    at: tuple[int, int]
    guard: str


def check(
    paths: Sequence[Path], progress: Callable[[list[Program]], Iterable[Program]] = iter
) -> Checked:
    """Read the files and folders of ``paths``, and find in them what JAX removed."""
    programs = tuple(read(path) for path in source_files(paths))
    near = _near_jax(programs)
    reported = _reported(near)
    uses: dict[Path, list[_Use]] = {}
    for program in progress(near):
        uses[program.path] = list(_Reader(program).uses(reported[program.path]))
    told = facts.ask({use.name for own in uses.values() for use in own})
    found: list[Finding] = []
    for program in programs:
        found += _judged(program, uses.get(program.path, ()), told)
        for line, column, message in program.errors:
            gone = table.Gone("cannot be read", table.ERROR, message)
            found.append(Finding(program.path, *program.where(line), column, gone))
    found.sort(key=lambda finding: (finding.path, finding.cell, finding.line, finding.column))
    return Checked(programs, tuple(found), told.jax)


def _near_jax(programs: Sequence[Program]) -> list[Program]:
    """The programs that may ask JAX for something, also by a name of one that imports it."""
    own = re.compile(r"\bfrom\s+jax|\bimport\b.*\bjax|__import__|import_module|\bmodules\b")
    near = [program for program in programs if "jax" in program.text and own.search(program.text)]
    if not near:
        return []
    stems = set()
    for program in near:
        is_package = program.path.stem == "__init__"
        named = program.path.parent if is_package else program.path
        stems.add(re.escape(named.stem))
    any_stem = "|".join(sorted(stems))
    taken = re.compile(rf"\b({any_stem})(\.|\s+import\b.*)(\b(jax|jnp|lax|maps|np)\b|\*)")
    return [program for program in programs if program in near or taken.search(program.text)]


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
    """Where a file's own modules are imported from: the first folder above it that is no
    package.
    """
    return next(above for above in path.parents if not (above / "__init__.py").exists())


class _Reader:
    """The uses in one program."""

    def __init__(self, program: Program):
        self._names = Texts(program.tree)
        self._lines = program.text.split("\n")
        self._attributes = [n for n in self._names.nodes if isinstance(n, ast.Attribute)]

    def uses(self, reported: Iterable[Reported]) -> Iterator[_Use]:
        own = self._put_into_jax()
        for node, name in [*self._of_checker(reported), *self._names.asked()]:
            is_array = name.startswith("jax.Array.")
            if name not in own and (name in table.ARRAY or not is_array):
                yield self._use(node, name)

    def _put_into_jax(self) -> set[str]:
        """The names that the program itself puts into JAX."""
        own = set()
        for node in self._names.nodes:
            is_stored = isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
            is_set = isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"
            if is_stored or is_set:
                own.add(self._names.dotted(node))
        return own

    def _of_checker(self, reported: Iterable[Reported]) -> Iterator[tuple[ast.AST, str]]:
        by_end = {(node.end_lineno, node.end_col_offset): node for node in self._attributes}
        for report in reported:
            before = self._lines[report.line - 1][: report.column - 1]
            node = by_end.get((report.line, len(before.encode())))
            if node is not None:
                yield node, report.name

    def _use(self, node: Any, name: str) -> _Use:
        line = node.lineno
        column = node.col_offset
        if isinstance(node, ast.Attribute):  # where its name stands
            line = node.end_lineno or 0
            column = (node.end_col_offset or 0) - len(node.attr.encode())
        before = self._lines[line - 1].encode()[:column].decode(errors="replace")
        parent = self._names.parents.get(node)
        users = (getattr(parent, "func", None), getattr(parent, "value", None))
        is_used = "(" in name or node in users
        guard = guards.guard_of(self._names, node, name, _error_of(node, name, parent))
        return _Use(node, name, is_used, (line, len(before) + 1), guard)


def _error_of(node: ast.AST, name: str, parent: ast.AST | None) -> type[Exception]:
    """What Python raises where a name is gone."""
    if isinstance(node, ast.Attribute):
        return AttributeError
    if "(" in name:
        return TypeError
    if isinstance(parent, ast.ImportFrom) and parent.module not in table.MODULES:
        return ImportError
    is_import = isinstance(node, (ast.alias, ast.ImportFrom))
    if is_import or "import" in ast.unparse(getattr(node, "func", node)):
        return ModuleNotFoundError
    return AttributeError


def _judged(program: Program, uses: Iterable[_Use], told: Facts) -> Iterator[Finding]:
    """The uses of what this JAX lacks, each place once."""
    lacking: set[str] = set()
    by_place = {(use.at, use.name): use for use in uses}
    for use in sorted(by_place.values(), key=lambda use: use.at):
        gone = _gone(use.name, told)
        if gone is None:
            continue
        lacking.add(use.name)
        owner = use.name.rpartition(".")[0]
        is_attribute = isinstance(use.node, ast.Attribute)
        if is_attribute and owner in lacking and owner not in table.MODULES:
            continue  # a part of what is found already
        place = (program.path, *program.where(use.at[0]), use.at[1])
        helps = gone.kind == table.RESTORED or (gone.kind == table.REFUSED and not use.is_used)
        dies = not (use.guard or helps)
        yield Finding(*place, gone, use.node, dies, use.guard)


def _gone(name: str, told: Facts) -> table.Gone | None:
    """What was removed; None if this JAX has it."""
    is_known_keyword = "(" in name and name in table.ALL
    if name not in told.lacking and not is_known_keyword:
        return None
    known = table.known(name)
    if known is None and name not in told.lacking_installed:
        known = table.Gone(name, table.RESTORED, table.INSTALL)
    return known or table.unknown(name, told.jax)
