"""Programs as ``check`` reads them: Python files, and notebooks, whose code cells form one program."""

from __future__ import annotations

import ast
import dataclasses
import functools
import io
import json
import os
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

NOTEBOOK = ".ipynb"
# Magics: cells that run Python; lines that run Python, shell, or ask for help.
_PYTHON_CELL = re.compile(r"\s*%%(?:time|timeit|capture|prun)\b.*")
_PYTHON_LINE = re.compile(r"(?m)^([ \t]*)(%(?:time|timeit|prun|memit)(?:[ \t]+-\S+(?:[ \t]+\d+)?)*[ \t])")
_LINE = re.compile(r"(?m)^([ \t]*)(?:(?:[\w, ]+=\s*)?[%!](?:.*\\\n)*.*|\?{1,2}[\w.]+\s*|[\w.]+\?{1,2}\s*)$")


@dataclasses.dataclass(frozen=True)
class Cell:
    """A part of a program: its number in a notebook (0 for a file), and how many lines of the whole come before it."""

    number: int
    before: int
    text: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A file as one Python text, line by line as in the file or in its cells, and the syntax errors of its parts."""

    path: Path
    cells: tuple[Cell, ...]
    text: str
    tree: ast.Module
    errors: tuple[tuple[int, int, str], ...] = ()

    def where(self, line: int) -> tuple[int, int]:
        """The number of a line's cell, and the line in it."""
        cell = [cell for cell in self.cells if cell.before < line][-1] if self.cells else Cell(0, 0, "")
        return cell.number, line - cell.before


def read(path: Path) -> Program:
    """Read a file; what cannot be read or parsed is listed in ``errors``, and raises nothing."""
    try:
        cells = cells_of(path)
    except (OSError, SyntaxError, ValueError, LookupError, TypeError) as error:
        return Program(path, (), "", ast.Module([], []), ((1, 1, f"{type(error).__name__}: {error}"),))
    parts: list[str] = []
    unread: list[tuple[int, int, str]] = []
    for cell in cells:
        text, broken = _python(cell)
        parts.append(text)
        if broken is not None:
            line, column = getattr(broken, "lineno", 1) or 1, getattr(broken, "offset", 1) or 1
            message = getattr(broken, "msg", "") or str(broken)
            unread.append((line + cell.before, column, f"{type(broken).__name__}: {message}"))
    text = "".join(parts)
    tree = ast.Module([], []) if not cells[:1] else _parsed(text, cells[0].number > 0)
    return Program(path, cells, text, tree, tuple(unread))


def cells_of(path: Path) -> tuple[Cell, ...]:
    if path.suffix != NOTEBOOK:
        return (Cell(0, 0, decoded(path.read_bytes())),)
    cells, before = [], 0
    for number, cell in enumerate(json.loads(path.read_bytes())["cells"], start=1):
        if cell["cell_type"] == "code":
            cells.append(Cell(number, before + 1, "".join(cell["source"])))
            before += cells[-1].text.count("\n") + 2
    return tuple(cells)


def decoded(source: bytes) -> str:
    """The text of a Python file, in the encoding that it declares, with its own ends of lines."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    return source.decode(encoding)


def encoded(text: str, source: bytes) -> bytes:
    return text.encode(tokenize.detect_encoding(io.BytesIO(source).readline)[0])


@functools.lru_cache(maxsize=1)
def _parsed(text: str, notebook: bool) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the program's own texts
        tree = compile(text, "program", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT * notebook, True)
    assert isinstance(tree, ast.Module)
    return tree


def _python(cell: Cell) -> tuple[str, Exception | None]:
    """A cell as Python of as many lines (blank where it is none), and why it cannot be parsed."""
    text, head, end = cell.text, "", ""
    if cell.number:
        # IPython dedents an indented cell; here the line before it opens a block.
        indented = re.match(r"(?:[ \t]*(?:#.*)?\n)*[ \t]+[^\s#]", text)
        head, end = "if 1:\n" if indented else "\n", "\n"
        magic = re.match(r"\s*%%.*", text)
        if magic:
            runs = _PYTHON_CELL.match(text) is not None
            text = "\n" * magic[0].count("\n") + text[magic.end() :] if runs else "\n" * text.count("\n")
    error: Exception | None = None
    without = _PYTHON_LINE.sub(lambda m: m[1] + "if 1:".ljust(len(m[2])), text)
    without = _LINE.sub(lambda m: f"{m[1]}pass" + "\n" * m[0].count("\n"), without)
    for python in (text, without)[: 1 + bool(cell.number)]:
        try:
            _parsed(head + python + end, cell.number > 0)
            return head + python + end, None
        except (SyntaxError, ValueError, RecursionError, MemoryError) as found:
            error = error or found
    if isinstance(error, SyntaxError) and cell.number:
        error.lineno = (error.lineno or 2) - 1
    return "\n" * (head + text + end).count("\n"), error


def source_files(paths: Iterable[Path]) -> Iterator[Path]:
    """The given files, and the Python files and notebooks below the given folders, except hidden ones."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for folder, folders, files in os.walk(path):
            folders[:] = sorted(f for f in folders if not f.startswith((".", "__pycache__")))
            read = (f for f in sorted(files) if f.endswith((".py", NOTEBOOK)) and not f.startswith("."))
            yield from (Path(folder, file) for file in read)
