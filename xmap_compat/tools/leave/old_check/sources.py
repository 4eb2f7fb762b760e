"""Programs as ``check`` reads them: Python files, and notebooks, whose cells form one program."""

from __future__ import annotations

import ast
import bisect
import contextlib
import dataclasses
import io
import json
import os
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator

NOTEBOOK = ".ipynb"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A part of a program: its text, its number in the notebook (None for a file), and its first line in the whole."""

    text: str
    number: int | None
    start: int


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """A place in a file: lines and columns count from 1; cells of a notebook from 1, and 0 means a file."""

    path: str
    cell: int
    line: int
    column: int

    def __str__(self) -> str:
        cell = f":cell {self.cell}" if self.cell else ""
        return f"{self.path}{cell}:{self.line}:{self.column}"


@dataclasses.dataclass(frozen=True)
class Program:
    """A parsed file: one tree over all of its cells, and the parts that could not be parsed."""

    path: str
    cells: tuple[Cell, ...]
    tree: ast.Module
    broken: tuple[tuple[Place, Exception], ...] = ()

    def place(self, node: ast.AST) -> Place:
        line, column = node.lineno, node.col_offset + 1  # type: ignore[attr-defined]
        cell = self.cell(line)
        return Place(self.path, cell.number or 0, line - cell.start + 1, column)

    def cell(self, line: int) -> Cell:
        return self.cells[bisect.bisect_right([cell.start for cell in self.cells], line) - 1]


def program_of(source: str | bytes, path: str) -> Program:
    """Read a file's contents; a part that cannot be parsed is listed and raises nothing."""
    try:
        cells = cells_of(source, path)
    except (SyntaxError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Program(path, (), ast.Module([], []), ((Place(path, 0, 1, 1), error),))
    body: list[ast.stmt] = []
    broken = []
    for cell in cells:
        try:
            with deep_recursion():
                tree, _ = _parse(cell, path)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line, column = getattr(error, "lineno", None) or 1, getattr(error, "offset", None) or 1
            broken.append((Place(path, cell.number or 0, line, column), error))
            continue
        ast.increment_lineno(tree, cell.start - 1)
        body.extend(tree.body)
    return Program(path, tuple(cells), ast.Module(body, []), tuple(broken))


def python_of(source: bytes, path: str) -> str:
    """A file as one text of Python with the same lines; a part that cannot be parsed raises its error."""
    return "\n".join(_parse(cell, path)[1] for cell in cells_of(source, path))


def _parse(cell: Cell, path: str) -> tuple[ast.Module, str]:
    """The tree and text of a cell, without lines that are not Python and look like lines for IPython or the shell."""
    name = path if cell.number is None else f"{path}:cell {cell.number}"
    flags = ast.PyCF_ONLY_AST | (0 if cell.number is None else ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    lines = (cell.text if cell.number is None else without_cell_magic(cell.text)).split("\n")
    while True:
        try:
            tree = compile("\n".join(lines), name, "exec", flags, dont_inherit=True)
        except SyntaxError as error:
            magic = None if cell.number is None else _magic_line(lines, error.lineno or 0)
            if magic is None:
                of_cell = None if cell.number is None else _CELL_MAGIC.match(cell.text)
                if of_cell is not None and of_cell[1] not in _PYTHON_CELLS:
                    return ast.Module([], []), "\n" * cell.text.count("\n")  # the cell is not Python
                raise
            _leave_out(lines, magic)
        else:
            assert isinstance(tree, ast.Module)
            return tree, "\n".join(lines)


def cells_of(source: str | bytes, path: str) -> list[Cell]:
    if not path.endswith(NOTEBOOK):
        return [Cell(decoded(source), None, 1)]
    cells, start = [], 1
    for number, cell in enumerate(json.loads(source)["cells"], start=1):
        if cell["cell_type"] == "code":
            text = "".join(cell["source"]).replace("\r\n", "\n").replace("\r", "\n")
            cells.append(Cell(text, number, start))
            start += text.count("\n") + 1
    return cells


def decoded(source: str | bytes) -> str:
    """The text of a Python file, in the encoding that it declares."""
    if isinstance(source, str):
        return source
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    return io.TextIOWrapper(io.BytesIO(source), encoding, newline=None).read()


# Cell magics and line magics that run Python; cell magics that do not.  Cells of other magics may be Python.
_PYTHON_CELLS = ("time", "timeit", "capture", "prun")
_SHELLS = {"bash", "cmd", "powershell", "script", "sh", "shell", "sx", "system", "!"}
_LANGUAGES = {"cython", "html", "javascript", "js", "latex", "markdown", "perl", "r", "ruby", "sql", "svg"}
_PROCESSES = {"pypy", "python", "python2", "python3"}
_OTHER_CELLS = {*_SHELLS, *_LANGUAGES, *_PROCESSES, "file", "writefile"}
_PYTHON_LINE = re.compile(
    r"^(\s*)((?:[\w, ]+=\s*)?%(?:time|timeit|prun|memit)(?:\s+-s\s+\w+|\s+-\S+(?:\s+\d+)?)*\s)(.*)$"
)
# Also `name = !command` and `name = %magic`; `help?` and `?help` for a name.
_MAGIC_LINE = re.compile(r"^(\s*)(?:[\w, ]+=\s*)?[%!].*$|^(\s*)(?:\?{1,2}[\w.]+|\?{0,2}[\w.]+\?{1,2})\s*$")
_CELL_MAGIC = re.compile(r"\s*%%(\w+|!).*")


def without_cell_magic(text: str) -> str:
    """A cell's text without its first line, if that is a magic; empty if the magic does not run Python."""
    magic = _CELL_MAGIC.match(text)
    if magic is None:
        return text
    if magic[1].lower() in _OTHER_CELLS:
        return "\n" * text.count("\n")
    return "\n" * magic[0].count("\n") + text[magic.end() :]


def _magic_line(lines: list[str], number: int) -> int | None:
    """The last line that looks like a magic, at or before the line of a syntax error; counted from 0."""
    before = range(min(number, len(lines)) - 1, -1, -1)
    return next((k for k in before if _MAGIC_LINE.match(lines[k])), None)


def _leave_out(lines: list[str], k: int) -> None:
    """Remove a command, which may continue after a backslash."""
    continued = lines[k].endswith("\\")
    lines[k] = without_magic(lines[k].rstrip("\\"))
    if continued and k + 1 < len(lines):
        rest = lines[k + 1]
        lines[k + 1] = ""
        if rest.endswith("\\"):
            lines[k + 1] = "!\\"
            _leave_out(lines, k + 1)


def without_magic(line: str) -> str:
    """``pass`` for a line for IPython or the shell; for ``%time``, its Python at the same place."""
    python = _PYTHON_LINE.match(line)
    if python:
        return python[1] + "if 1:".ljust(len(python[2])) + python[3]
    match = _MAGIC_LINE.match(line)
    assert match is not None
    return f"{match[1] or match[2] or ''}pass"


@contextlib.contextmanager
def deep_recursion() -> Iterator[None]:
    """Raise the recursion limit: generated sources may have deeply nested expressions and branches."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 20_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def source_files(paths: Iterable[str]) -> Iterator[str]:
    """The given files, and the Python files and notebooks below the given directories, except hidden ones."""
    for path in paths:
        if not os.path.isdir(path):
            yield path
            continue
        for directory, directories, files in os.walk(path):
            directories[:] = sorted(d for d in directories if not d.startswith((".", "__pycache__")))
            read = (file for file in sorted(files) if file.endswith((".py", NOTEBOOK)) and not file.startswith("."))
            yield from (os.path.join(directory, file) for file in read)
