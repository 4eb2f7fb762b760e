"""What a program uses that JAX removed: what the checker and the texts say, judged by its guards and by this JAX."""

from __future__ import annotations

import ast
import dataclasses
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from xmap_compat.tools.check import checker, facts, table
from xmap_compat.tools.check.checker import Reported
from xmap_compat.tools.check.facts import INSTALLED, PLAIN
from xmap_compat.tools.check.guards import Guards, Place
from xmap_compat.tools.check.texts import Texts
from xmap_compat.tools.source.reading import Error, Program, read, source_files


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
    guarded: bool = False  # whether the program is ready for its absence, or does not get there: not reported
    caught: bool = False  # whether a try around it catches its error

    def __str__(self) -> str:
        cell = f":cell {self.cell}" if self.cell else ""
        what = f"last in jax {self.gone.until}; " if self.gone.until else ""
        return f"{self.path}{cell}:{self.line}:{self.column}: {self.gone.name}: {what}{self.gone.remedy}"


@dataclasses.dataclass(frozen=True)
class Checked:
    """The programs, all findings in them in order, and the release of JAX."""

    programs: tuple[Program, ...]
    findings: tuple[Finding, ...]
    jax: str

    @property
    def reported(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.guarded]


@dataclasses.dataclass(frozen=True)
class _Use:
    """A name at a place, before it is known whether this JAX has it."""

    node: Any
    name: str
    question: str  # whether it is there
    used: bool  # called, or asked for an attribute
    at: tuple[int, int]
    place: Place


def check(paths: Sequence[Path], progress: Callable[[list[Path]], Iterable[Path]] = iter) -> Checked:
    """Read the files and folders of ``paths``, and find in them what JAX removed."""
    programs = tuple(read(path) for path in progress(list(source_files(paths))))
    near = _near_jax(programs)
    reported = _reported([program for program in near if not program.errors])
    uses = [(program, list(_Reader(program).uses(reported[program.path]))) for program in near]
    questions = {question for _, own in uses for use in own for question in (use.question, *dict(use.place.tests))}
    answers = facts.ask(questions)
    unread = [
        _unread(program, error) for program in programs if program in near or program.unread for error in program.errors
    ]
    found = [finding for program, own in uses for finding in _judged(program, own, answers)]
    by_place = lambda f: (str(f.path), f.cell, f.line, f.column)  # noqa: E731
    return Checked(programs, tuple(sorted([*unread, *found], key=by_place)), answers["jax"])


def _unread(program: Program, error: Error) -> Finding:
    line, column, message = error
    return Finding(program.path, *program.where(line), column, table.Gone("cannot be read", table.ERROR, message))


def _near_jax(programs: Iterable[Program]) -> list[Program]:
    """The programs that speak of JAX, or import what imports it: the others are not even parsed."""
    stems = [p.path.stem for p in programs if re.search(r"(?m)^\s*(from|import) jax\b", p.text)]
    imports = re.compile(rf"(?m)^\s*(from|import)\b.*\b({'|'.join(map(re.escape, stems))})\b")
    return [p for p in programs if "jax" in p.text or (stems and imports.search(p.text))]


def _reported(programs: Iterable[Program]) -> dict[Path, list[Reported]]:
    """What ty says about each program."""
    found = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="xmap_compat") as temporary:
        folder = Path(temporary).resolve()
        files, roots = {}, []
        for number, program in enumerate(programs):
            path = program.path.resolve()
            roots.append(_root_of(path))
            if path.suffix != ".py":
                path = folder / f"notebook{number}.py"
                path.write_text(program.text, encoding="utf-8")
            files[path] = program.path
        for report in checker.run(files, folder, dict.fromkeys(roots)) if files else ():
            found[files[report.path]].append(report)
    return found


def _root_of(path: Path) -> Path:
    """The folder from which a file's module is imported: the first one above it that is no package."""
    return next(folder for folder in path.parents if not (folder / "__init__.py").exists())


class _Reader:
    """The uses in one program."""

    def __init__(self, program: Program):
        self._names = Texts(program.tree)
        self._guards = Guards(self._names)
        self._lines = program.text.split("\n")

    def uses(self, reported: Iterable[Reported]) -> Iterator[_Use]:
        stored = (n for n in self._names.nodes if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load))
        calls = (n for n in self._names.nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "setattr")
        own = {self._names.dotted(node) for node in (*stored, *calls)}  # what the program itself puts into JAX
        found = [(self._node(report), report.name, f"has({report.name!r})") for report in reported]
        for node, name, question in (*found, *self._names.asked(), *self._refusals()):
            if name not in own and (name in table.ARRAY or not name.startswith("jax.Array.")):
                yield self._use(node, name, question)

    def _refusals(self) -> Iterator[tuple[ast.AST, str, str]]:
        """Where a program itself raises because a name is gone: ``assert hasattr(jax, 'x')``."""
        for node in self._names.nodes:
            if isinstance(node, (ast.Raise, ast.Assert)):
                tests = self._guards.place(node, Exception).tests
                tests += tuple(self._guards.questions(node.test, False)) if isinstance(node, ast.Assert) else ()
                asked = (
                    re.fullmatch(r"hasattr\(at\('(jax[\w.]*)'\), '(\w+)'\)", test) for test, holds in tests if not holds
                )
                yield from ((node, f"{a[1]}.{a[2]}", f"has('{a[1]}.{a[2]}')") for a in asked if a)

    def _use(self, node: Any, name: str, question: str) -> _Use:
        line, column, parent = node.lineno, node.col_offset, self._guards.parent(node)
        error: type[Exception] = AttributeError
        if isinstance(node, ast.Attribute):  # where its name stands
            line, column = node.end_lineno or 0, (node.end_col_offset or 0) - len(node.attr.encode())
        elif "(" in name:
            error = TypeError
        elif isinstance(parent, ast.ImportFrom) and parent.module not in table.MODULES:
            error = ImportError
        elif isinstance(node, (ast.alias, ast.ImportFrom)) or "import" in ast.unparse(getattr(node, "func", node)):
            error = ModuleNotFoundError
        used = "(" in name or node in (getattr(parent, "func", None), getattr(parent, "value", None))
        column = len(self._lines[line - 1].encode()[:column].decode(errors="replace")) + 1
        return _Use(node, name, question, used, (line, column), self._guards.place(node, error))

    def _node(self, report: Reported) -> Any:
        """The innermost node around what ty reports."""
        start, end = (
            (line, len(self._lines[line - 1][: column - 1].encode())) for line, column in (report.start, report.end)
        )
        nodes: list[Any] = [node for node in self._names.nodes if hasattr(node, "lineno")]
        around = (n for n in nodes if (n.lineno, n.col_offset) <= start and end <= (n.end_lineno, n.end_col_offset))
        return [*around][-1]


def _judged(program: Program, uses: Iterable[_Use], answers: dict[str, Any]) -> Iterator[Finding]:
    """The uses of what this JAX lacks, each place once."""
    failed: set[tuple[ast.Try, str]] = set()  # the try statements whose body fails
    found = {}
    lacking: set[str] = set()
    for use in sorted({(use.at, use.name): use for use in uses}.values(), key=lambda use: use.at):
        gone, owner = _gone(use, answers), use.name.rpartition(".")[0]
        lacking |= {use.name} if gone else set()
        part = isinstance(use.node, ast.Attribute) and owner in lacking and owner not in table.MODULES
        if gone is not None and not part:
            fails = {}
            for mode in (PLAIN, INSTALLED):
                fails[mode] = _fails(use, gone, mode, answers[mode], failed)
                failed |= {(node, mode) for node, part in use.place.tries if part == "body" and fails[mode]}
            reported, dies = (fails[mode] and not use.place.caught for mode in (PLAIN, INSTALLED))
            place = (program.path, *program.where(use.at[0]), use.at[1])
            found[place, gone.name] = Finding(*place, gone, use.node, dies, not (reported or dies), use.place.caught)
    yield from found.values()


def _gone(use: _Use, answers: dict[str, Any]) -> table.Gone | None:
    """What was removed; None if this JAX has it."""
    if answers[PLAIN][use.question] in (True, None):
        return None
    known = table.known(use.name)
    if known is None and answers[INSTALLED][use.question]:
        known = table.Gone(use.name, table.RESTORED, table.INSTALL)
    return known or table.unknown(use.name, answers["jax"])


def _fails(use: _Use, gone: table.Gone, mode: str, answers: dict[str, bool | None], failed: set) -> bool:
    """Whether an error is raised there, in plain Python or under ``install()``."""
    if mode == INSTALLED and (gone.kind == table.RESTORED or (gone.kind == table.REFUSED and not use.used)):
        return False
    reached = all(answers[test] in (None, holds) for test, holds in use.place.tests)
    for node, part in use.place.tries:
        has_failed = (node, mode) in failed
        reached &= not has_failed if part != "handler" else has_failed or not _only_imports_jax(node)
    return reached


def _only_imports_jax(node: ast.Try) -> bool:
    """Whether the body of a ``try`` fails only if JAX lacks a name."""
    return all(re.match(r"(from|import) jax\b|\w+ = \w+$", ast.unparse(statement)) for statement in node.body)
