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

from xmap_compat.tools.check import checker, sources, table, texts
from xmap_compat.tools.check.checker import Reported
from xmap_compat.tools.check.facts import Jax
from xmap_compat.tools.check.guards import ENDS, Guards, Place
from xmap_compat.tools.check.sources import Program

MODES = ("plain", "installed")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A use of a removed name, or what keeps a file from being read."""

    path: Path
    cell: int  # of a notebook; the line is that in the cell
    line: int
    column: int
    gone: table.Gone
    dies: bool = True  # whether a program that runs under install() fails there
    guarded: bool = False  # whether the program is ready for its absence, or does not get there: not reported
    caught: bool = False  # whether a try around it catches its error
    node: ast.AST = dataclasses.field(default_factory=ast.Pass, compare=False)
    statement: tuple[int, int] = (0, 0)  # its first and its last line

    def place(self) -> tuple[str, int, int, int]:
        return str(self.path), self.cell, self.line, self.column

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
class _Candidate:
    program: Program
    name: str
    option: bool
    node: ast.AST
    used: bool  # called, or asked for an attribute
    at: tuple[int, int]
    statement: ast.AST
    place: Place


def check(paths: Sequence[Path], progress: Callable[[list[Path]], Iterable[Path]] = iter) -> Checked:
    """Read the files and folders of ``paths``, and find in them what JAX removed."""
    programs = tuple(sources.read(path) for path in progress(list(sources.source_files(paths))))
    with Jax() as jax, tempfile.TemporaryDirectory(prefix="xmap_compat") as folder:
        marks = jax.marks([*table.NAMES, *table.MODULES], table.MOVED)
        reported = _reported(programs, marks, Path(folder).resolve())
        candidates: list[_Candidate] = []
        for program in programs:
            if "jax" not in program.text and not reported[program.path]:
                continue
            reader = _Reader(program)
            assigned = reader.assigned()
            found = [c for c in reader.candidates(reported[program.path]) if c.name not in assigned]
            candidates += [*found, *(use for c in found for use in reader.absent(c))]
        tests = sorted({test for c in candidates for test, _ in c.place.tests})
        names = {c.name for c in candidates if c.name.startswith("jax.") and "(" not in c.name}
        calls = [c.name[:-2].split("(") for c in candidates if c.name.endswith("=)") and c.name not in table.ALL]
        answers = jax.answers(names, tests, {c.name for c in candidates if c.option}, calls)
    findings = [*_unread(programs), *_Judge(marks, answers, tests).findings(candidates)]
    return Checked(programs, tuple(sorted(findings, key=Finding.place)), marks["jax"])


def _unread(programs: Iterable[Program]) -> Iterator[Finding]:
    for program in programs:
        for line, column, message in program.errors:
            yield Finding(
                program.path, *program.where(line), column, table.Gone("cannot be read", table.ERROR, message)
            )


def _reported(programs: Iterable[Program], marks: dict[str, Any], folder: Path) -> dict[Path, list[Reported]]:
    """What ty says about each program."""
    lacking = set(marks["names"])
    modules = [name for name in (*table.MODULES, *table.MOVED) if name in lacking]
    names = [name for name in table.NAMES if name in lacking and name not in table.MOVED]
    names += [f"{old}.{name}" for old, own in marks["moved"].items() if old in lacking for name in own]
    checker.mark(Path(marks["folder"]), names, modules, folder)
    roots: dict[Path, list[Program]] = defaultdict(list)
    for program in _near_jax(programs):
        if program.cells:
            roots[checker.root_of(program.path.resolve())].append(program)
    files, searched = {}, []
    for number, (root, members) in enumerate(roots.items()):
        searched.append(root)
        changed = {}
        for program in members:
            path, text = program.path.resolve(), texts.as_attributes(program.text)
            files[path] = program.path
            if path.suffix != ".py" or text.encode() != path.read_bytes():
                changed[path.relative_to(root).with_name(f"{path.stem}{path.suffix.replace('.ipynb', '_')}.py")] = text
                files[folder / str(number) / [*changed][-1]] = files.pop(path)
        if changed:
            searched[-1] = folder / str(number)
            searched[-1].mkdir()
            checker.overlay(root, changed, searched[-1])
    found: dict[Path, list[Reported]] = defaultdict(list)
    for report in checker.run(list(files), folder, [folder, *searched]) if files else ():
        found[files[report.path]].append(report)
    return found


def _near_jax(programs: Iterable[Program]) -> list[Program]:
    """The programs that speak of JAX, or import one that does: ty need not see others."""
    near, others, stems = [], list(programs), {"jax"}
    while stems:
        word = re.compile(rf"\b({'|'.join(map(re.escape, sorted(stems)))})\b")
        found = [program for program in others if word.search(program.text)]
        near += found
        others = [program for program in others if not word.search(program.text)]
        stems = {p.path.parent.name if p.path.stem == "__init__" else p.path.stem for p in found} - {""}
    return near


class _Reader:
    """The candidates in one program."""

    def __init__(self, program: Program):
        self._program, self._lines = program, program.text.split("\n")
        self._names = texts.Names(program.tree)
        self._guards = Guards(self._names)

    def assigned(self) -> set[str]:
        """The names that a program itself puts into JAX."""
        found = set()
        for node in self._names.nodes:
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                found.add(self._names.dotted(node))
            elif isinstance(node, ast.Call) and texts.last(node.func) == "setattr" and len(node.args) == 3:
                found.add(f"{self._names.dotted(node.args[0])}.{texts.text_of(node.args[1])}")
        return found - {""}

    def candidates(self, reported: Iterable[Reported]) -> Iterator[_Candidate]:
        calls: set[int] = set()  # the lines of calls that ty does not accept
        for report in reported:
            if report.rule in ("unknown-argument", "no-matching-overload"):
                calls.update(range(report.line, report.end_line + 1))
            start = self._bytes(report.line, report.column - 1)
            node = self._node(start, self._bytes(report.end_line, report.end_column - 1))
            if report.rule == "unknown-argument":
                yield from self._keyword(node, *report.name.split(".", 1))
            elif isinstance(node, ast.Name) and self._is_found_before(node, report.name):
                continue
            elif report.name.startswith("jax.") or report.name in table.ARRAY:
                yield self._made(node, report.name, (report.line, report.column))
        for node, name in texts.modules(self._names):
            if name in table.MODULES or name in table.MOVED:
                yield self._made(node, name)
        for node, name in texts.imported_by_text(self._names):
            yield self._made(node, name)
        yield from self._refusals()
        for node, name in texts.options(self._names):
            yield self._made(node, name, option=True)
        for node, called, keyword in texts.keywords(self._names):
            if (called, keyword) in table.KEYWORDS:
                yield self._made(node, table.KEYWORDS[called, keyword].name)
            elif node.lineno in calls:  # type: ignore[attr-defined]
                yield self._made(node, f"{called}({keyword}=)")

    def _is_found_before(self, node: ast.Name, name: str) -> bool:
        """Whether a name was found where it got its value: in an assignment, or an import that ``install()`` mends."""
        restored = name not in table.NAMES or table.NAMES[name].kind == table.RESTORED
        return node.id in self._names.values or (restored and node.id in self._names.imported)

    def _keyword(self, node: ast.AST, keyword: str, function: str) -> Iterator[_Candidate]:
        """A removed keyword of a function that only ty knows: of a method, say."""
        call: Any = self._guards.parent(node)
        for (called, removed), gone in table.KEYWORDS.items() if isinstance(call, ast.Call) else ():
            last = function.rpartition(".")[2] or called.rpartition(".")[2]
            if removed == keyword and called.endswith(f".{last}") and not self._names.dotted(call.func):
                yield self._made(node, gone.name)

    def absent(self, imported: _Candidate) -> Iterator[_Candidate]:
        """The uses of a name whose import may fail without harm, where no test looks whether it did."""
        around = imported.place.tries[0][0] if imported.place.tries else None
        if around is None or not imported.place.caught or not isinstance(imported.node, ast.alias):
            return
        local = imported.node.asname or imported.node.name
        inside = list(ast.walk(around))
        bound = [n for n in self._names.nodes if local in (getattr(n, "asname", "") or getattr(n, "name", ""),)]
        flags = {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)} | {local}
        given = [v for v in self._names.values.get(local, ()) if v is not None]
        hidden = len(self._names.values.get(local, ())) != 2 * len(given)  # by a parameter, or in a loop
        left = any(isinstance(handler.body[-1], ENDS) for handler in around.handlers)
        if len(bound) == 1 and not hidden and not left and not any(ast.unparse(v) != "None" for v in given):
            for node in self._names.nodes:
                if isinstance(node, ast.Name) and node.id == local and node not in inside:
                    use = self._made(node, imported.name)
                    if use.used and not flags & self._guards.mentioned(node):
                        yield use

    def _refusals(self) -> Iterator[_Candidate]:
        """Where a program itself raises because a name is gone: ``assert hasattr(jax, 'x')``."""
        for node in self._names.nodes:
            if isinstance(node, (ast.Raise, ast.Assert)):
                tests = self._guards.place(node, "call").tests
                tests += tuple(self._guards.tests(node.test, False)) if isinstance(node, ast.Assert) else ()
                for test, holds in tests:
                    asked = re.fullmatch(r"hasattr\(at\('(jax[\w.]*)'\), '(\w+)'\)", test)
                    if asked and not holds:
                        yield self._made(node, f"{asked[1]}.{asked[2]}")

    def _made(self, node: Any, name: str, at: tuple[int, int] | None = None, option: bool = False) -> _Candidate:
        if isinstance(node, ast.Attribute):  # where its name stands
            end = self._lines[(node.end_lineno or 0) - 1].encode()[: node.end_col_offset].decode()
            at = node.end_lineno or 0, len(end) - len(node.attr) + 1
        elif at is None:
            line = node.lineno
            start = self._lines[line - 1].encode()[: node.col_offset]  # type: ignore[attr-defined]
            at = line, len(start.decode(errors="replace")) + 1
        statement = self._guards.statement(node)
        imports = isinstance(statement, (ast.Import, ast.ImportFrom)) or isinstance(node, (ast.Constant, ast.Call))
        error = "call" if "(" in name else "import" if imports and not option else "attribute"
        if (
            isinstance(node, ast.alias)
            and isinstance(statement, ast.ImportFrom)
            and statement.module not in table.MODULES
        ):
            error = "name"
        place = self._guards.place(node, error)
        parent = self._guards.parent(node)
        used = "(" in name or node in (getattr(parent, "func", None), getattr(parent, "value", None))
        return _Candidate(self._program, name, option, node, used, at, statement, place)

    def _bytes(self, line: int, column: int) -> tuple[int, int]:
        return line, len(self._lines[line - 1][:column].encode())

    def _node(self, start: tuple[int, int], end: tuple[int, int]) -> Any:
        """The innermost node around a range."""
        found: list[tuple[tuple[int, int], ast.AST]] = []
        for node in self._names.nodes:
            if isinstance(node, (ast.stmt, ast.expr, ast.alias, ast.keyword, ast.arg)):
                first, last = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
                if first <= start and end <= last:
                    found.append(((last[0] - first[0], last[1] - first[1] if last[0] == first[0] else 0), node))
        return min(reversed(found), key=lambda pair: pair[0])[1] if found else self._program.tree.body[0]


class _Judge:
    def __init__(self, marks: dict[str, Any], answers: dict[str, Any], tests: list[str]):
        self._jax, self._moved = marks["jax"], table.MOVED
        self._names = {
            mode: {*answers[mode]["names"], *answers[mode]["options"], *answers[mode]["calls"]} for mode in MODES
        }
        self._tests = {mode: dict(zip(tests, answers[mode]["tests"])) for mode in MODES}

    def findings(self, candidates: Iterable[_Candidate]) -> list[Finding]:
        found = {}
        failed: set[tuple[int, str]] = set()  # the try statements whose body fails
        for c in sorted(candidates, key=lambda c: (str(c.program.path), c.at)):
            gone = self._gone(c)
            fails = {mode: gone is not None and self._fails(c, gone, mode, failed) for mode in MODES}
            failed |= {
                (id(node), mode) for mode in MODES if fails[mode] for node, part in c.place.tries if part == "body"
            }
            if gone is not None:
                reported, dies = (fails[mode] and not c.place.caught for mode in MODES)
                cell, line = c.program.where(c.at[0])
                lines = min(c.at[0], c.statement.lineno), c.statement.end_lineno  # type: ignore[attr-defined]
                place = (c.program.path, cell, line, c.at[1])
                found[(*place, gone.name)] = Finding(
                    *place, gone, dies, not (reported or dies), c.place.caught, c.node, lines
                )
        return list(found.values())

    def _gone(self, c: _Candidate) -> table.Gone | None:
        """What was removed; None if this JAX has it."""
        if c.name in self._names["plain"]:
            return None
        known = table.ALL.get(c.name)
        parent, _, last = c.name.rpartition(".")
        if parent in self._moved and c.name in self._names["installed"]:
            known = table.moved(c.name, f"{self._moved[parent]}.{last}")
        if known is None and c.name in self._names["installed"]:
            known = table.Gone(c.name, table.RESTORED, table.INSTALL)
        return known or table.unknown(c.name, self._jax)

    def _fails(self, c: _Candidate, gone: table.Gone, mode: str, failed: set[tuple[int, str]]) -> bool:
        if mode == "installed" and (gone.kind == table.RESTORED or (gone.kind == table.REFUSED and not c.used)):
            return False
        held = all(self._tests[mode][test] in (None, holds) for test, holds in c.place.tests)
        for node, part in c.place.tries:
            has_failed = (id(node), mode) in failed
            held &= not has_failed if part in ("body", "else") else has_failed or not _only_imports_jax(node)
        return held and not c.place.lazy


def _only_imports_jax(node: ast.Try) -> bool:
    """Whether the body of a ``try`` does nothing but import from JAX: it fails only if a name is gone."""
    for statement in node.body:
        if isinstance(statement, ast.ImportFrom) and str(statement.module).split(".")[0] == "jax":
            continue
        if isinstance(statement, ast.Import) and all(a.name.split(".")[0] == "jax" for a in statement.names):
            continue
        if not isinstance(statement, (ast.Assign, ast.Pass)) or any(
            isinstance(n, ast.Call) for n in ast.walk(statement)
        ):
            return False
    return True
