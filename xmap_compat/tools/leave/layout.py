"""Edits of a file's bytes: the rest of it stays, its ends of lines, its encoding, and the layout of a notebook."""

from __future__ import annotations

import ast
import functools
import io
import itertools
import json
import os
import tempfile
import tokenize
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xmap_compat.tools.check import editor, sources
from xmap_compat.tools.check.sources import NOTEBOOK
from xmap_compat.tools.leave.bindings import first_line, imported_names
from xmap_compat.tools.leave.construction import Spot


class Edit(NamedTuple):
    """The replacement of a part of one or more lines."""

    start: Spot
    end: Spot
    text: str


@functools.lru_cache(maxsize=64)
def program_of(data: bytes, path: str) -> sources.Program:
    """A file, or the cells of a notebook, as one Python program; a part that cannot be parsed raises its error."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, os.path.basename(path))
        copy.write_bytes(data)
        program = sources.read(copy)
    for line, column, words in program.errors:
        raise SyntaxError(f"{words} (line {line}, column {column})")
    return program


def python_of(data: bytes, path: str) -> str:
    """Its text, with ends of lines as Python reads them."""
    return program_of(data, path).text.replace("\r\n", "\n").replace("\r", "\n")


def replacing(node: ast.stmt | ast.expr | ast.alias, text: str) -> Edit:
    """The edit that puts a text in the place of a part of a program."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    return Edit((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), text)


def before_jax(tree: ast.Module, lines: Sequence[str]) -> list[Edit]:
    """Add imports before the first import of JAX: a program may set options that JAX reads at its import."""
    of_jax = lambda n: any(m.startswith(("jax", "xmap_")) for part in ast.walk(n) for _, m in imported_names(part))  # noqa: E731
    is_head = lambda n: isinstance(n, ast.Expr) or getattr(n, "module", "") == "__future__"  # noqa: E731
    if not lines:
        return []
    first = next(filter(of_jax, tree.body), None) or next(itertools.filterfalse(is_head, tree.body), tree.body[-1])
    at, end = (first_line(first), first.col_offset), "; " if first.col_offset else "\n"
    return [Edit(at, at, "".join(f"{line}{end}" for line in lines))]


def applied(data: bytes, path: str, edits: Iterable[Edit]) -> bytes:
    """The contents of a file with these edits."""
    if not path.endswith(NOTEBOOK):
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return editor.applied(data.decode(encoding), edits).encode(encoding)
    notebook, program, by_cell = json.loads(data), program_of(data, path), dict[int, list[Edit]]()
    for edit in edits:
        number, line = program.where(edit.start[0])
        end = line + edit.end[0] - edit.start[0], edit.end[1]
        by_cell.setdefault(number, []).append(Edit((line, edit.start[1]), end, edit.text))
    for number, own in by_cell.items():
        cell = notebook["cells"][number - 1]
        new = editor.applied("".join(cell["source"]), own)
        cell["source"] = new if isinstance(cell["source"], str) else new.splitlines(keepends=True)
    return laid_out(notebook, data)


def laid_out(notebook: Any, data: bytes) -> bytes:
    """A notebook in the layout that it has had."""
    for indent, is_ascii, end_of_file in itertools.product((1, 2, 4, None), (False, True), ("\n", "")):
        dumped = functools.partial(json.dumps, indent=indent, ensure_ascii=is_ascii)
        if (dumped(json.loads(data)) + end_of_file).encode() == data:
            return (dumped(notebook) + end_of_file).encode()
    return (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()
