"""Programs as ``check`` reads them: Python files, and notebooks, whose code cells form one
program.
"""

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
# Magics: cells that run Python, statements that do (`if 1:` is as long as `%time`), and lines that
# do not.
_PYTHON_CELL = re.compile(r"\s*%%(?:time|timeit|capture|prun)\b.*")
_PYTHON_LINE = re.compile(r"(?m)^([ \t]*)%(?:time|prun)\b(?=[ \t]+\S)")
_LINE = re.compile(
    r"(?m)^([ \t]*)(?:(?:[\w, ]+=[ \t]*)?[%!].*|\?{1,2}[\w.]+[ \t]*|[\w.]+\?{1,2}[ \t]*)$"
)
_CANNOT = (OSError, SyntaxError, ValueError, LookupError, TypeError, RecursionError, MemoryError)
Error = tuple[int, int, str]  # the line, the column, and what is wrong


@dataclasses.dataclass(frozen=True)
class Program:
    """A file as one Python text, line by line as in the file or in its cells."""

    path: Path
    text: str
    unread: tuple[Error, ...] = ()
    cells: tuple[tuple[int, int], ...] = (
        (0, 0),
    )  # numbers in a notebook, and how many lines come before each

    @functools.cached_property
    def _parsed(self) -> tuple[ast.Module, tuple[Error, ...]]:
        try:
            return _parse(self.text), self.unread
        except _CANNOT as error:
            return ast.Module([], []), (_error(error), *self.unread)

    @property
    def tree(self) -> ast.Module:
        return self._parsed[0]

    @property
    def errors(self) -> tuple[Error, ...]:
        """Why the file, or cells of it, cannot be read or parsed."""
        return self._parsed[1]

    def where(self, line: int) -> tuple[int, int]:
        """The number of a line's cell, 0 in a file, and the line in it."""
        number, before = [cell for cell in self.cells if cell[1] < line][-1]
        return number, line - before


def read(path: Path, data: bytes | None = None) -> Program:
    """Read a file, or take what it holds; this raises nothing."""
    try:
        data = path.read_bytes() if data is None else data
        if path.suffix == NOTEBOOK:
            return _notebook(path, json.loads(data)["cells"])
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return Program(path, data.decode(encoding))
    except _CANNOT as error:
        return Program(path, "", (_error(error),))


def _notebook(path: Path, stored: Iterable[dict[str, list[str]]]) -> Program:
    text, cells, unread = "", [], []
    for number, cell in enumerate(stored, start=1):
        if cell["cell_type"] == "code":
            before = text.count("\n")
            cells.append((number, before + 1))
            python, error = _python("".join(cell["source"]))
            text += python
            if error:
                unread.append((error[0] + before, *error[1:]))
    return Program(path, text, tuple(unread), tuple(cells) or ((0, 0),))


def _python(cell: str) -> tuple[str, Error | None]:
    """A cell as Python of as many lines (blank where it is none) after one more, and why it cannot
    be parsed.
    """
    if re.match(r"\s*%%", cell):
        magic = _PYTHON_CELL.match(cell)
        cell = (
            "\n" * magic[0].count("\n") + cell[magic.end() :] if magic else "\n" * cell.count("\n")
        )
    # IPython dedents an indented cell; here the line before it opens a block.
    head = "if 1:\n" if re.match(r"(?:[ \t]*(?:#.*)?\n)*[ \t]+[^\s#]", cell) else "\n"
    why = []
    for text in (cell, _LINE.sub(r"\1pass", _PYTHON_LINE.sub(r"\1if 1:", cell))):
        try:
            _parse(f"{head}{text}\n")
            return f"{head}{text}\n", None
        except _CANNOT as error:
            why.append(_error(error))
    return "\n" * (cell.count("\n") + 2), why[0]


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the program's own texts
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        return compile(text, "program", "exec", flags, dont_inherit=True)  # type: ignore[return-value]


def _error(error: BaseException) -> Error:
    message = f"{type(error).__name__}: {getattr(error, 'msg', '') or error}"
    return getattr(error, "lineno", 1) or 1, getattr(error, "offset", 1) or 1, message


def source_files(paths: Iterable[Path]) -> Iterator[Path]:
    """The given files, and the Python files and notebooks below the given folders, except hidden
    ones.
    """
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for folder, folders, files in os.walk(path):
            folders[:] = sorted(f for f in folders if not f.startswith((".", "__pycache__")))
            read = (
                f for f in sorted(files) if f.endswith((".py", NOTEBOOK)) and not f.startswith(".")
            )
            yield from (Path(folder, file) for file in read)
