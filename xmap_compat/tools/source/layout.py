"""Edits of a file's bytes: the rest of it stays, its ends of lines, its encoding, and the layout of
a notebook.
"""

from __future__ import annotations

import ast
import functools
import io
import itertools
import json
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xmap_compat.tools.source.bindings import IMPORTS, first_line, imported_names
from xmap_compat.tools.source.reading import NOTEBOOK, Program, read


class Edit(NamedTuple):
    """The replacement of a part of one or more lines."""

    start: tuple[int, int]  # a line, from 1, and a column in bytes
    end: tuple[int, int]
    text: str


@functools.lru_cache(maxsize=64)
def program_of(data: bytes, path: str) -> Program:
    """A file, or the cells of a notebook, as one Python program; a part that cannot be parsed
    raises its error.
    """
    program = read(Path(path), data)
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


def in_place_of(
    node: ast.stmt, parent: ast.AST, lines: Sequence[str], statements: Sequence[str]
) -> Edit:
    """The edit that puts statements in the place of another; its inner comments stay, and a line of
    its own goes.
    """
    edit = replacing(node, "")
    line, column = edit.start
    end_line, end_column = edit.end
    before = lines[line - 1].encode()[:column].decode()
    after = lines[end_line - 1].encode()[end_column:].partition(b"#")[0].strip()
    comments = []
    if not before.strip():
        inner = "\n".join(lines[line - 1 : end_line])
        comments = re.findall(r"#[^\n\r]*", inner[: inner.rfind(")") + 1])
    blocks = [getattr(parent, name, None) for name in ("body", "orelse", "finalbody")]
    is_alone = [node] in blocks
    if not (statements or is_alone or before.strip() or after or comments):
        return Edit((line, 0), (end_line + 1, 0), "")
    separator = "; " if before.strip() else "\n" + before
    return edit._replace(text=separator.join([*comments, *(statements or ["pass"])]))


def without_keyword(keyword: Any, lines: Sequence[str]) -> Edit:
    """The edit that takes a keyword and a comma out of a call, and the line if they are alone."""
    top, bottom = keyword.lineno, keyword.end_lineno
    before = lines[top - 1].encode()[: keyword.col_offset]
    after = lines[bottom - 1].encode()[keyword.end_col_offset :]
    comma = re.match(rb"\s*,\s*", after)
    if comma is not None:
        rest = after[comma.end() :]
        if not (before.strip() or rest):
            return Edit((top, 0), (bottom + 1, 0), "")
        kept = before if rest else before.rstrip()
        return Edit((top, len(kept)), (bottom, keyword.end_col_offset + comma.end()), "")
    if not before.strip() and "#" not in lines[top - 2]:
        top -= 1
        before = lines[top - 1].encode()
    kept = before.rstrip().removesuffix(b",")
    return Edit((top, len(kept)), (bottom, keyword.end_col_offset), "")


def beside(statement: ast.stmt, lines: Sequence[str], new: Iterable[str]) -> Edit:
    """Add imports after an import, or before another statement."""
    if not isinstance(statement, (*IMPORTS, ast.Try, ast.If)):
        return before(statement, new)
    line, column = replacing(statement, "").end
    of_line = lines[line - 1].rstrip("\r").encode()
    if not of_line[column:].partition(b"#")[0].strip():
        column = len(of_line)
    return Edit((line, column), (line, column), "".join(f"\n{each}" for each in new))


def before(statement: ast.stmt, new: Iterable[str]) -> Edit:
    """Add statements before another."""
    at = first_line(statement), statement.col_offset
    end = "; " if statement.col_offset else "\n"
    return Edit(at, at, "".join(f"{line}{end}" for line in new))


def first_of_jax(tree: ast.Module) -> ast.stmt:
    """The first statement that imports JAX, or else the first one after the head of the file."""
    for statement in tree.body:
        for part in ast.walk(statement):
            for _, meant in imported_names(part):
                if meant.startswith(("jax", "xmap_")):
                    return statement
    for statement in tree.body:
        is_future = getattr(statement, "module", "") == "__future__"
        if not isinstance(statement, ast.Expr) and not is_future:
            return statement
    return tree.body[-1]


def edited(text: str, edits: Iterable[Edit]) -> str:
    """A text with these edits; the ends of its lines stay."""
    lines = [*text.encode().splitlines(keepends=True), b""]
    newline = b"\n"
    for end in (b"\r", b"\r\n"):
        if lines[0].endswith(end):
            newline = end
    for (top, left), (bottom, right), new in sorted(set(edits), reverse=True):
        before = lines[top - 1][:left]
        after = lines[bottom - 1][right:]
        lines[top - 1 : bottom] = [before + new.encode().replace(b"\n", newline) + after]
    return b"".join(lines).decode()


def applied(data: bytes, path: str, edits: Iterable[Edit]) -> bytes:
    """The contents of a file with these edits."""
    if path.endswith(NOTEBOOK):
        return _applied_to_cells(data, program_of(data, path), edits)
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return edited(data.decode(encoding), edits).encode(encoding)


def _applied_to_cells(data: bytes, program: Program, edits: Iterable[Edit]) -> bytes:
    """The contents of a notebook with these edits."""
    by_cell: dict[int, list[Edit]] = defaultdict(list)
    for edit in edits:
        number, line = program.where(edit.start[0])
        end = line + edit.end[0] - edit.start[0], edit.end[1]
        by_cell[number].append(Edit((line, edit.start[1]), end, edit.text))
    notebook = json.loads(data)
    for number, own in by_cell.items():
        cell = notebook["cells"][number - 1]
        new = edited("".join(cell["source"]), own)
        cell["source"] = new if isinstance(cell["source"], str) else new.splitlines(keepends=True)
    return _dumped_like(data, notebook)


def _dumped_like(data: bytes, notebook: Any) -> bytes:
    """A notebook in the layout of a file."""
    layouts = itertools.product((1, 2, 4, None), (False, True), ("\n", ""))
    stored = json.loads(data)
    for indent, is_ascii, end_of_file in layouts:
        dumped = functools.partial(json.dumps, indent=indent, ensure_ascii=is_ascii)
        if (dumped(stored) + end_of_file).encode() == data:
            return (dumped(notebook) + end_of_file).encode()
    return (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()
