"""Rewriting what is safe: the same objects by their names of today, and renamed keywords."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import io
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable

from xmap_compat.legacy import removed
from xmap_compat.tools.check.advice import MAPS
from xmap_compat.tools.check.names import FUNCTIONS, Bindings, assignments, bound_by, constant_text
from xmap_compat.tools.check.sources import NOTEBOOK, Program, program_of

PACKAGE = "xmap_compat"
OURS = {name: name for name in ("xmap", "mesh", "Mesh", "SerialLoop", "serial_loop")} | {
    "AnonymousSerialLoop": "SerialLoop"
}
# Aliases of these modules are rewritten; other names of the table are left to install().
SPEC = removed.SPEC
_SAFE = [row for row in removed.TABLE if row.kind == removed.ALIAS and row.public and row.now.startswith("jax.")]
RENAMED = {row.name: row.now for row in _SAFE if "tree" in row.name or row.now == SPEC}
KEYWORDS = {
    ("jax.experimental.pjit.pjit", "in_axis_resources"): "in_shardings",
    ("jax.experimental.pjit.pjit", "out_axis_resources"): "out_shardings",
}


@dataclasses.dataclass(frozen=True)
class Edit:
    """The replacement of a part of a line, or of several: lines from 1, columns in bytes."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


def edits_of(program: Program) -> list[Edit]:
    finder = _Finder(program)
    finder.visit(program.tree)
    return finder.edits


class _Finder(ast.NodeVisitor):
    def __init__(self, program: Program):
        self.program = program
        self.bindings = Bindings(program.tree)
        self._values = _values_by_name(program.tree)
        self._in_texts = _texts_given(program.tree)
        self._asked = {
            self.bindings.of(part)
            for node in ast.walk(program.tree)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass")
            for part in ast.walk(node)
        }
        self.edits: list[Edit] = []

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, FUNCTIONS):
            self.bindings.enter(node)
            super().visit(node)
            self.bindings.leave()
        else:
            super().visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        moved: dict[str, list[str]] = {}
        for alias in node.names:
            module, name = self._home(node, alias)
            local = alias.asname or alias.name
            moved.setdefault(module, []).append(name if name == local else f"{name} as {local}")
        if node.level or set(moved) == {node.module}:
            return
        statements = [f"from {module} import {', '.join(names)}" for module, names in moved.items()]
        before = self._line(node.lineno)[: node.col_offset].decode()
        separator = f"\n{before}" if not before.strip() else "; "
        self.edits.append(_replace(node, separator.join(statements)))

    def _home(self, node: ast.ImportFrom, alias: ast.alias) -> tuple[str, str]:
        """The module and name from which a name is imported today."""
        # A mesh of JAX is one of jax.experimental.maps.Mesh, and none of ours.
        asked = f"{MAPS}.{alias.name}" in self._asked
        if node.module == MAPS and alias.name in OURS and not asked:
            return PACKAGE, OURS[alias.name]
        now = RENAMED.get(f"{node.module}.{alias.name}")
        if now is None or node.level:
            return str(node.module), alias.name
        module, _, name = now.rpartition(".")
        return module, name

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.bindings.of(node) or ""
        now = None if name in self.bindings.assigned or name in self._in_texts else RENAMED.get(name)
        if now is not None and self.bindings.of(node.value) == "jax" and isinstance(node.ctx, ast.Load):
            self.edits.append(_replace(node, f"{ast.unparse(node.value)}.{now.removeprefix('jax.')}"))
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name, _ = self.bindings.called(node)
        renamed = [keyword for keyword in node.keywords if (name, keyword.arg) in KEYWORDS]
        if all(self._is_spec(keyword.value) for keyword in renamed):
            for keyword in renamed:
                new = KEYWORDS[str(name), str(keyword.arg)]
                end = (keyword.lineno, keyword.col_offset + len(str(keyword.arg)))
                self.edits.append(Edit((keyword.lineno, keyword.col_offset), end, new))
        self.generic_visit(node)

    def _is_spec(self, node: ast.expr) -> bool:
        """Whether no part of some resources is None, or could be: that meant "whole on every device", and means "as it
        comes" today.  Where it could be, pjit(in_axis_resources=) is kept."""
        if isinstance(node, ast.Name):
            value = self._values.get(node.id)
            return isinstance(value, (ast.Tuple, ast.Call)) and self._is_spec(value)  # others may change
        if isinstance(node, (ast.Tuple, ast.List)):
            return all(map(self._is_spec, node.elts))
        if isinstance(node, ast.Dict):
            return all(map(self._is_spec, node.values))
        name = self.bindings.of(node.func) if isinstance(node, ast.Call) else None
        return RENAMED.get(str(name), name) == SPEC

    def _line(self, number: int) -> bytes:
        cell = self.program.cell(number)
        return cell.text.split("\n")[number - cell.start].encode()


def _texts_given(tree: ast.AST) -> set[str]:
    """The names of JAX that may be replaced by ``mock.patch.object(jax, 'tree_map')`` and the like."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    others = (call for call in calls if getattr(call.func, "id", "") not in ("hasattr", "getattr"))
    texts = {constant_text(argument) for call in others for argument in call.args}
    return {name for name in RENAMED if name in texts or name.rpartition(".")[2] in texts}


def _values_by_name(tree: ast.AST) -> dict[str, ast.expr]:
    """Names that are assigned once in a program, with their values."""
    found: dict[str, ast.expr] = {}
    bound: Counter[str] = Counter()
    for node in ast.walk(tree):
        bound.update(bound_by(node))
        found.update((name, value) for name, value in assignments(node) if not _mentions(value, name))
    return {name: value for name, value in found.items() if bound[name] == 1}


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))


def _replace(node: ast.stmt | ast.expr, text: str) -> Edit:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return Edit((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), text)


def _apply(text: str, edits: Iterable[Edit], first_line: int) -> str:
    lines = text.encode().split(b"\n")
    for edit in sorted(edits, key=lambda e: e.start, reverse=True):
        (top, left), (bottom, right) = edit.start, edit.end
        top, bottom = top - first_line, bottom - first_line
        replaced = lines[top][:left] + edit.text.encode() + lines[bottom][right:]
        lines[top : bottom + 1] = [replaced]
    return b"\n".join(lines).decode()


def fixed(source: bytes, path: str) -> bytes:
    """A program with what is safe rewritten; the same bytes if there is nothing."""
    program = program_of(source, path)
    edits = edits_of(program)
    if not edits:
        return source
    texts = {}
    for cell in program.cells:
        end = cell.start + cell.text.count("\n")
        own = [edit for edit in edits if cell.start <= edit.start[0] <= end]
        texts[cell.number] = _apply(cell.text, own, cell.start)
    if path.endswith(NOTEBOOK):
        return _notebook_with(source, texts)
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    text = texts[None].replace("\n", "\r\n") if b"\r\n" in source else texts[None]
    return text.encode(encoding)


def _notebook_with(source: bytes, texts: dict[int | None, str]) -> bytes:
    notebook = json.loads(source)
    for number, cell in enumerate(notebook["cells"], start=1):
        if number in texts and "".join(cell["source"]) != texts[number]:
            cell["source"] = texts[number].splitlines(keepends=True)
    return (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()


def run(files: Iterable[str], write: bool) -> int:
    """Rewrite files, or show the differences; returns the exit code."""
    changed = 0
    for path in files:
        try:
            with open(path, "rb") as file:
                source = file.read()
        except OSError as error:
            print(f"{path}: {error}", file=sys.stderr)
            continue
        result = fixed(source, path)
        if result == source:
            continue
        changed += 1
        if write:
            with open(path, "wb") as file:
                file.write(result)
            print(f"rewritten: {path}")
        else:
            before, after = (text.decode(errors="replace").splitlines(keepends=True) for text in (source, result))
            sys.stdout.writelines(difflib.unified_diff(before, after, path, path))
    print(f"{changed} file{'s' * (changed != 1)} {'rewritten' if write else 'would be rewritten'}")
    return 0
