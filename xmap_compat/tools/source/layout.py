"""Edits of a file's bytes: the rest of it stays, its ends of lines, its encoding, and the layout of
a notebook.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xmap_compat.tools.source.bindings import IMPORTS, first_line
from xmap_compat.tools.source.reading import NOTEBOOK, Program, read


class Edit(NamedTuple):
    """The replacement of a part of one or more lines."""

    start: tuple[int, int]  # a line, from 1, and a column in bytes
    end: tuple[int, int]
    text: str


@functools.lru_cache(maxsize=64)
def parsed(data: bytes, path: str) -> Program:
    """A file, or the cells of a notebook, as one Python program; a part that cannot be parsed
    raises its error.
    """
    program = read(Path(path), data)
    for line, column, words in program.errors:
        raise SyntaxError(f"{words} (line {line}, column {column})")
    return program


def text_as_python(data: bytes, path: str) -> str:
    """Its text, with ends of lines as Python reads them."""
    return parsed(data, path).text.replace("\r\n", "\n").replace("\r", "\n")


def replacing(node: Any, text: str) -> Edit:
    """The edit that puts a text in the place of a part of a program."""
    return Edit((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), text)


def in_place_of(
    node: ast.stmt, parent: ast.AST, lines: Sequence[str], statements: Sequence[str]
) -> Edit:
    """The edit that puts statements in the place of another.

    Its inner comments stay; where nothing is put, a line that has nothing else goes.
    """
    edit = replacing(node, "")
    top, left = edit.start
    bottom, right = edit.end
    before_it = lines[top - 1].encode()[:left].decode()
    after_it = lines[bottom - 1].encode()[right:].partition(b"#")[0].strip()
    comments: list[str] = []
    separator = "; "
    if not before_it.strip():
        separator = f"\n{before_it}"
        inner = "\n".join(lines[top - 1 : bottom]).rpartition(")")[0]
        comments = re.findall(r"#[^\n\r]*", inner)
        blocks = [getattr(parent, name, None) for name in ("body", "orelse", "finalbody")]
        is_needed = [node] in blocks or after_it or comments
        if not statements and not is_needed:
            return Edit((top, 0), (bottom + 1, 0), "")
    return edit._replace(text=separator.join([*comments, *(statements or ["pass"])]))


def without_keyword(keyword: ast.keyword, lines: Sequence[str]) -> Edit:
    """The edit that takes a keyword and a comma out of a call, and the line if nothing else is
    there.
    """
    edit = replacing(keyword, "")
    top, left = edit.start
    bottom, right = edit.end
    kept = lines[top - 1].encode()[:left]
    after_it = lines[bottom - 1].encode()[right:]
    comma = re.match(rb"\s*,\s*", after_it)
    if comma is None:  # the comma before it goes
        if not kept.strip() and "#" not in lines[top - 2]:
            top -= 1
            kept = lines[top - 1].encode()
        kept = kept.rstrip().removesuffix(b",")
    elif comma[0] == after_it:
        if not kept.strip():
            return Edit((top, 0), (bottom + 1, 0), "")
        kept = kept.rstrip()
    if comma is not None:
        right += comma.end()
    return Edit((top, len(kept)), (bottom, right), "")


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
    end = "\n"
    if statement.col_offset:  # in a block that begins in the line
        end = "; "
    return Edit(at, at, "".join(f"{line}{end}" for line in new))


def first_of_jax(tree: ast.Module) -> ast.stmt:
    """The first statement that imports JAX or xmap, else the first import, else the last
    statement.
    """
    is_of_jax = re.compile(r"(?m)^\s*(from|import) .*\b(jax|xmap_)")
    for statement in tree.body:
        is_text = isinstance(statement, ast.Expr)
        if not is_text and is_of_jax.search(ast.unparse(statement)):
            return statement
    for statement in tree.body:
        is_future = getattr(statement, "module", "") == "__future__"
        if isinstance(statement, IMPORTS) and not is_future:
            return statement
    return tree.body[-1]


def edited(text: str, edits: Iterable[Edit]) -> str:
    """A text with these edits; the ends of its lines stay."""
    lines = [*text.encode().splitlines(keepends=True), b""]
    newline = lines[0].removeprefix(lines[0].rstrip(b"\r\n")) or b"\n"
    # From the end; of several insertions at one place the last one first.
    ordered = sorted(edits, key=lambda edit: edit[:2])
    for (top, left), (bottom, right), new in reversed(ordered):
        kept = lines[top - 1][:left] + new.encode().replace(b"\n", newline)
        lines[top - 1 : bottom] = [kept + lines[bottom - 1][right:]]
    return b"".join(lines).decode()


def applied(data: bytes, path: str, edits: Iterable[Edit]) -> bytes:
    """The contents of a file with these edits."""
    if path.endswith(NOTEBOOK):
        return _applied_to_cells(data, parsed(data, path), edits)
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return edited(data.decode(encoding), edits).encode(encoding)


def _applied_to_cells(data: bytes, program: Program, edits: Iterable[Edit]) -> bytes:
    """The contents of a notebook with these edits, in the layout that it has."""
    by_cell: dict[int, list[Edit]] = defaultdict(list)
    for start, end, text in edits:
        number, line = program.where(start[0])
        last = line + end[0] - start[0]
        by_cell[number].append(Edit((line, start[1]), (last, end[1]), text))
    notebook = json.loads(data)
    for number, of_cell in by_cell.items():
        cell = notebook["cells"][number - 1]
        is_list = isinstance(cell["source"], list)
        cell["source"] = edited("".join(cell["source"]), of_cell)
        if is_list:
            cell["source"] = cell["source"].splitlines(keepends=True)
    indent = None
    indented = re.match(rb"\{\n( *)", data)
    if indented is not None:
        indent = len(indented[1])
    text = json.dumps(notebook, indent=indent, ensure_ascii=data.isascii())
    if data.endswith(b"\n"):
        text += "\n"
    return text.encode()
