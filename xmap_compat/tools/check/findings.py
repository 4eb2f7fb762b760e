"""What a program uses that JAX removed: what the checker and the texts say, judged by its guards
and by this JAX.
"""

from __future__ import annotations

import ast
import dataclasses
import operator
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from xmap_compat.tools.check import checker, facts, guards, table
from xmap_compat.tools.check.checker import Reported
from xmap_compat.tools.check.facts import INSTALLED, PLAIN
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
    guarded: bool = (
        False  # whether the program is ready for its absence, or does not get there: not reported
    )
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
    tests: list[guards.Test]  # what holds where it is reached
    tries: list[guards.Part]
    caught: bool  # whether an error there is caught, and not raised again


def check(
    paths: Sequence[Path], progress: Callable[[list[Program]], Iterable[Program]] = iter
) -> Checked:
    """Read the files and folders of ``paths``, and find in them what JAX removed."""
    programs = tuple(read(path) for path in source_files(paths))
    near = _near_jax(programs)
    reported = _reported(near)
    uses = [
        (program, list(_Reader(program).uses(reported[program.path]))) for program in progress(near)
    ]
    questions = {
        question for _, own in uses for use in own for question in (use.question, *dict(use.tests))
    }
    answers = facts.ask(questions)
    found = [finding for program, own in uses for finding in _judged(program, own, answers)]
    for program in programs:
        for line, column, message in program.errors if program in near else program.unread:
            gone = table.Gone("cannot be read", table.ERROR, message)
            found.append(Finding(program.path, *program.where(line), column, gone))
    by_place = operator.attrgetter("path", "cell", "line", "column")
    return Checked(programs, tuple(sorted(found, key=by_place)), answers["jax"])


def _near_jax(programs: Iterable[Program]) -> list[Program]:
    """The programs that may ask JAX for something, also by a name of one that imports it: no others
    are parsed.
    """
    own = re.compile(r"\bfrom\s+jax|\bimport\b.*\bjax|__import__|import_module|\bmodules\b")
    near = [program for program in programs if "jax" in program.text and own.search(program.text)]
    stems = {re.escape((p.path.parent if p.path.stem == "__init__" else p.path).stem) for p in near}
    taken = re.compile(
        rf"\b({'|'.join(sorted(stems))})(\.|\s+import\b.*)(\b(jax|jnp|lax|maps|np)\b|\*)"
    )
    return [
        program for program in programs if program in near or (near and taken.search(program.text))
    ]


def _reported(programs: Iterable[Program]) -> dict[Path, list[Reported]]:
    """What ty says about each program."""
    found, files, roots = defaultdict(list), {}, []
    with tempfile.TemporaryDirectory(prefix="xmap_compat") as temporary:
        folder = Path(temporary).resolve()
        for number, program in enumerate(programs):
            path = program.path.resolve()
            # Where its own modules are imported from: the first folder above it that is no package.
            roots.append(
                next(above for above in path.parents if not (above / "__init__.py").exists())
            )
            if path.suffix != ".py":
                path = folder / f"notebook{number}.py"
                path.write_text(program.text, encoding="utf-8")
            files[path] = program.path
        for report in checker.run(files, folder, dict.fromkeys(roots)) if files else ():
            found[files[report.path]].append(report)
    return found


class _Reader:
    """The uses in one program."""

    def __init__(self, program: Program):
        self._names = Texts(program.tree)
        self._lines = program.text.split("\n")

    def uses(self, reported: Iterable[Reported]) -> Iterator[_Use]:
        attributes = [node for node in self._names.nodes if isinstance(node, ast.Attribute)]
        stored = [node for node in attributes if not isinstance(node.ctx, ast.Load)]
        calls = [
            n
            for n in self._names.nodes
            if isinstance(n, ast.Call) and ast.unparse(n.func) == "setattr"
        ]
        own = {
            self._names.dotted(node) for node in (*stored, *calls)
        }  # what the program itself puts into JAX
        by_end = {(node.end_lineno, node.end_col_offset): node for node in attributes}
        ends = {
            report: len(self._lines[report.line - 1][: report.column - 1].encode())
            for report in reported
        }
        found = [(by_end.get((r.line, end)), r.name, "") for r, end in ends.items()]
        for node, name, question in (*found, *self._names.asked(), *self._refusals()):
            if (
                node
                and name not in own
                and (name in table.ARRAY or not name.startswith("jax.Array."))
            ):
                yield self._use(node, name, question or f"has({name!r})")

    def _refusals(self) -> Iterator[tuple[ast.AST, str, str]]:
        """Where a program itself raises because a name is gone: ``assert hasattr(jax, 'x')``."""
        for node in self._names.nodes:
            if isinstance(node, (ast.Raise, ast.Assert)):
                tests = guards.place(self._names, node, Exception)[0]
                tests += (
                    guards.questions(self._names, node.test, False)
                    if isinstance(node, ast.Assert)
                    else ()
                )
                failing = " ".join(test for test, holds in tests if not holds)
                for owner, name in re.findall(r"hasattr\(at\('(jax[\w.]*)'\), '(\w+)'\)", failing):
                    yield node, f"{owner}.{name}", ""

    def _use(self, node: Any, name: str, question: str) -> _Use:
        line, column, parent = node.lineno, node.col_offset, self._names.parents.get(node)
        error: type[Exception] = AttributeError
        if isinstance(node, ast.Attribute):  # where its name stands
            line, column = (
                node.end_lineno or 0,
                (node.end_col_offset or 0) - len(node.attr.encode()),
            )
        elif "(" in name:
            error = TypeError
        elif isinstance(parent, ast.ImportFrom) and parent.module not in table.MODULES:
            error = ImportError
        elif isinstance(node, (ast.alias, ast.ImportFrom)) or "import" in ast.unparse(
            getattr(node, "func", node)
        ):
            error = ModuleNotFoundError
        used = "(" in name or node in (
            getattr(parent, "func", None),
            getattr(parent, "value", None),
        )
        column = len(self._lines[line - 1].encode()[:column].decode(errors="replace")) + 1
        return _Use(
            node, name, question, used, (line, column), *guards.place(self._names, node, error)
        )


def _judged(program: Program, uses: Iterable[_Use], answers: dict[str, Any]) -> Iterator[Finding]:
    """The uses of what this JAX lacks, each place once."""
    failed: set[tuple[ast.Try, str]] = set()  # the try statements whose body fails
    lacking: set[str] = set()
    for use in sorted({(use.at, use.name): use for use in uses}.values(), key=lambda use: use.at):
        gone, owner = _gone(use, answers), use.name.rpartition(".")[0]
        lacking |= {use.name} if gone else set()
        part = (
            isinstance(use.node, ast.Attribute) and owner in lacking and owner not in table.MODULES
        )
        if gone is not None and not part:
            fails = {}
            for mode in (PLAIN, INSTALLED):
                fails[mode] = _fails(use, gone, mode, answers[mode], failed)
                failed |= {
                    (node, mode) for node, part in use.tries if part == "body" and fails[mode]
                }
            reported, dies = (fails[mode] and not use.caught for mode in (PLAIN, INSTALLED))
            place = (program.path, *program.where(use.at[0]), use.at[1])
            yield Finding(*place, gone, use.node, dies, not (reported or dies), use.caught)


def _gone(use: _Use, answers: dict[str, Any]) -> table.Gone | None:
    """What was removed; None if this JAX has it."""
    if answers[PLAIN][use.question] in (True, None):
        return None
    known = table.known(use.name)
    if known is None and answers[INSTALLED][use.question]:
        known = table.Gone(use.name, table.RESTORED, table.INSTALL)
    return known or table.unknown(use.name, answers["jax"])


def _fails(
    use: _Use, gone: table.Gone, mode: str, answers: dict[str, bool | None], failed: set
) -> bool:
    """Whether an error is raised there, in plain Python or under ``install()``."""
    if mode == INSTALLED and (
        gone.kind == table.RESTORED or (gone.kind == table.REFUSED and not use.used)
    ):
        return False
    reached = all(answers[test] in (None, holds) for test, holds in use.tests)
    for node, part in use.tries:
        has_failed = (node, mode) in failed
        reached &= (
            not has_failed if part != "handler" else has_failed or not _only_imports_jax(node)
        )
    return reached


def _only_imports_jax(node: ast.Try) -> bool:
    """Whether the body of a ``try`` fails only if JAX lacks a name."""
    return all(
        re.match(r"(from|import) jax\b|\w+ = \w+$", ast.unparse(statement))
        for statement in node.body
    )
