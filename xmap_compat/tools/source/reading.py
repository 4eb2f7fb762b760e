"""Programs as ``check`` reads them: Python files, and notebooks, whose code cells form one
program.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import os
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

NOTEBOOK = ".ipynb"
# Magics of IPython: cells that hold no Python, and statements that do, and lines that do not.
# `%time` and `%prun` become `if 1:`, which is as long, so columns stay.
_OTHER_CELL = re.compile(r"\s*%%(?!time|capture|prun)")
_PYTHON_LINE = re.compile(r"(?m)^([ \t]*)%(?:time|prun)\b(?=[ \t]+\S)")
_LINE = re.compile(
    r"(?m)^([ \t]*)(?:(?:[\w, ]+=[ \t]*)?[%!].*|\?{1,2}[\w.]+[ \t]*|[\w.]+\?{1,2}[ \t]*)$"
)
_CANNOT = (OSError, SyntaxError, ValueError, LookupError, TypeError, RecursionError, MemoryError)
Error = tuple[int, int, str]  # the line, the column, and what is wrong


@dataclasses.dataclass(frozen=True)
class Program:
    """A file as one Python text, line by line as in the file or in its cells.

    Attributes:
      tree: what the text says; empty if it cannot be parsed.
      errors: why the file, or cells of it, cannot be read or parsed.
      cells: of a notebook: their numbers, and how many lines come before each.
    """

    path: Path
    text: str
    tree: ast.Module
    errors: list[Error]
    cells: list[tuple[int, int]]

    def where(self, line: int) -> tuple[int, int]:
        """The number of a line's cell, 0 in a file, and the line in it."""
        number = before = 0
        for cell, lines in self.cells:
            if lines < line:
                number = cell
                before = lines
        return number, line - before


def read(path: Path, data: bytes | None = None) -> Program:
    """Read a file, or take what it holds; this raises nothing."""
    text = ""
    errors: list[Error] = []
    cells: list[tuple[int, int]] = []
    tree = ast.Module([], [])
    try:
        if data is None:
            data = path.read_bytes()
        if path.suffix == NOTEBOOK:
            for number, cell in enumerate(json.loads(data)["cells"], start=1):
                if cell["cell_type"] == "code":
                    before = text.count("\n")
                    cells.append((number, before))
                    text += _python("".join(cell["source"]), before, errors)
        else:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            text = data.decode(encoding)
        tree = _parse(text)
    except _CANNOT as error:
        errors.append(_error(error))
    return Program(path, text, tree, errors, cells)


def _python(cell: str, before: int, errors: list[Error]) -> str:
    """A code cell as Python text, with as many lines, blank if it is no Python.

    Why it cannot be parsed is added to ``errors``.
    """
    without_magics = _LINE.sub(r"\1pass", _PYTHON_LINE.sub(r"\1if 1:", cell))
    if _OTHER_CELL.match(cell):
        without_magics = "\n" * cell.count("\n")
    for text in (cell, without_magics):
        try:
            _parse(text)
            return f"{text}\n"
        except _CANNOT as error:
            line, column, words = _error(error)
    errors.append((line + before, column, words))
    return "\n" * (cell.count("\n") + 1)


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the program's own texts
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        tree: Any = compile(text, "program", "exec", flags, dont_inherit=True)
    return tree


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
            for file in sorted(files):
                if file.endswith((".py", NOTEBOOK)) and not file.startswith("."):
                    yield Path(folder, file)
