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
    after_it = lines[bottom - 1].encode()[right:].decode()
    if before_it.strip():
        return edit._replace(text="; ".join(statements or ["pass"]))
    inner = "\n".join(lines[top - 1 : bottom]).rpartition(")")[0]
    new = [*re.findall(r"#[^\n\r]*", inner), *statements]
    is_sole = any([node] == block for _, block in ast.iter_fields(parent))
    if not new and not is_sole and not after_it.partition("#")[0].strip():
        return Edit((top, 0), (bottom + 1, 0), "")
    if not statements:
        new.append("pass")
    return edit._replace(text=f"\n{before_it}".join(new))


def without_keyword(keyword: ast.keyword, call: Any, lines: Sequence[str]) -> Edit | None:
    """The edit that takes a keyword and the comma before it out of a call; None if a comment
    stands between them, or nothing.
    """
    ends = [replacing(argument, "").end for argument in (*call.args, *call.keywords)]
    edit = replacing(keyword, "")
    start = max([end for end in ends if end < edit.start], default=edit.start)
    has_comment = "#" in "".join(lines[start[0] - 1 : edit.start[0] - 1])
    if has_comment or start == edit.start:
        return None
    return edit._replace(start=start)


def at_line(line: int, statements: Iterable[str]) -> Edit:
    """Add statements above a line of the top level."""
    return Edit((line, 0), (line, 0), "".join(f"{statement}\n" for statement in statements))


def first_of_jax(tree: ast.Module) -> ast.stmt:
    """The first statement that imports JAX or xmap, else the first one after the docstring and
    imports of the future.
    """
    others = []
    for statement in tree.body:
        text = ast.unparse(statement)
        if re.search(r"(?m)^\s*(from|import) .*\b(jax|xmap_)", text):
            return statement
        is_docstring = text.startswith(("'", '"'))
        if not is_docstring and "__future__" not in text:
            others.append(statement)
    return others[0]


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
    """The contents of a notebook with these edits, in the layout of Jupyter."""
    by_cell: dict[int, list[Edit]] = defaultdict(list)
    for start, end, text in edits:
        number, line = program.where(start[0])
        last = line + end[0] - start[0]
        by_cell[number].append(Edit((line, start[1]), (last, end[1]), text))
    notebook = json.loads(data)
    for number, of_cell in by_cell.items():
        cell = notebook["cells"][number - 1]
        cell["source"] = edited("".join(cell["source"]), of_cell).splitlines(keepends=True)
    return f"{json.dumps(notebook, indent=1, ensure_ascii=False)}\n".encode()
