"""Rewrites that are safe: today's names of the same objects, and renamed keywords."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import io
import itertools
import json
import os
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence

from xmap_compat.legacy import removed
from xmap_compat.tools.leave.old_check.names import (
    Bindings,
    ScopedVisitor,
    bound_anywhere,
    file_names,
    first_line,
    imported_names,
    text_of,
)
from xmap_compat.tools.leave.old_check.neighbours import Neighbours
from xmap_compat.tools.leave.old_check.renamed import (
    CONSTRAINT,
    GONE,
    PACKAGE,
    RENAMED,
    SPEC,
    Others,
    Renaming,
    others_of,
)
from xmap_compat.tools.leave.old_check.sources import NOTEBOOK, Program, cells_of, program_of

PJIT = "jax.experimental.pjit.pjit"
_OF_FUNCTIONS = [row for row in removed.KEYWORDS if row.function in (PJIT, CONSTRAINT, "jax.numpy.clip")]
KEYWORDS = {(row.function, row.keyword): row.now for row in _OF_FUNCTIONS if row.now.isidentifier()}
# Modules that `import jax` does not import.
APART = ("jax.extend", "jax.example_libraries")


@dataclasses.dataclass(frozen=True)
class Edit:
    """The replacement of a part of one or more lines; lines count from 1, columns are in bytes."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


def edits_of(program: Program, others: Others = Others()) -> list[Edit]:
    return _Finder(program, others).edits


def bindings_of(program: Program) -> Bindings:
    return Bindings(program.tree, Neighbours(program.path, file_names()))


class _Finder(ScopedVisitor):
    def __init__(self, program: Program, others: Others):
        self.program = program
        self.bindings = bindings_of(program)
        self.renaming = Renaming(program.tree, self.bindings, program.path, others)
        self._bound = bound_anywhere(program.tree)
        self._sure = True  # whether each call of with_sharding_constraint has a spec
        self._added: set[str] = set()
        self.edits: list[Edit] = []
        self.visit(program.tree)
        if not self._sure:
            del self.renaming.names[CONSTRAINT]
            self._added, self.edits = set(), []
            self.visit(program.tree)
        self.edits += before_jax(program.tree, [f"import {module}" for module in sorted(self._added)])

    # Imports

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        old = [f"{node.module}.{alias.name}" for alias in node.names]
        now = [self.renaming.of(name) or name for name in old]
        if node.level or now == old:
            return
        moved: dict[str, list[str]] = {}
        for alias, name in zip(node.names, now):
            module, _, last = name.rpartition(".")
            local = alias.asname or alias.name
            moved.setdefault(module, []).append(last if last == local else f"{last} as {local}")
        line = self._line(node.lineno)
        in_place = re.compile(rb"from\s+(%s)\s" % re.escape(str(node.module).encode())).match(line, node.col_offset)
        if len(moved) == 1 and "" not in moved and in_place:
            self._edit(node.lineno, in_place.span(1), *moved)
            for alias, text in zip(node.names, *moved.values()):
                self.edits.append(replacing(alias, text))
            return
        statements = [
            f"from {module} import {', '.join(names)}" if module else f"import {', '.join(names)}"
            for module, names in moved.items()
        ]
        before = line[: node.col_offset].decode()
        separator = "; " if before.strip() else f"\n{before}"
        self.edits.append(replacing(node, separator.join([*self._comments(node, before), *statements])))

    def _comments(self, node: ast.stmt, before: str) -> list[str]:
        """The comments within an import; they stay, as lines before its replacement."""
        assert node.end_lineno is not None
        text = b"\n".join(map(self._line, range(node.lineno, node.end_lineno + 1)))[node.col_offset :]
        inner = text[: len(text) - len(self._line(node.end_lineno)) + (node.end_col_offset or 0)]
        return [] if before.strip() or b"\n" not in text else [t.decode() for t in re.findall(rb"#[^\n]*", inner)]

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            now = self.renaming.of(alias.name)
            if now is not None:  # without a local name, other visits rename the dotted names and add their imports
                above = alias.name.rpartition(".")[0]
                self.edits.append(replacing(alias, f"{now} as {alias.asname}" if alias.asname else above))

    # Names

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner, now = self.bindings.of(node.value), self.renaming.of(self.bindings.of(node) or "")
        stays = owner in GONE and owner not in self.renaming.modules
        if now is None or stays or not isinstance(node.ctx, ast.Load) or not self._rename(node, now, str(owner)):
            self.generic_visit(node)

    def _rename(self, node: ast.expr, now: str, owner: str = "") -> bool:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and owner in self.renaming.modules:
            text: str | None = f"{node.value.id}.{now.rpartition('.')[2]}"  # the import of that name is rewritten
        else:
            text = self._spelled(node, now)
        if text is not None and text != ast.unparse(node):
            self.edits.append(replacing(node, text))
        return text is not None

    def _spelled(self, node: ast.expr, now: str) -> str | None:
        """An expression for a dotted name here: through a name for a part of it, or an import that is added."""
        apart = now.startswith(APART)
        while isinstance(node, ast.Attribute) and not apart:
            node = node.value
            found = self.bindings.of(node) if isinstance(node, (ast.Name, ast.Attribute)) else None
            if found is not None and now.startswith(f"{found}."):
                return ast.unparse(node) + now[len(found) :]
        root, is_there = now.split(".")[0], self.bindings.of_name(now.split(".")[0]) == now.split(".")[0]
        if is_there or root not in self._bound:
            if apart or not is_there:
                self._added.add(now.rpartition(".")[0] if apart or root != "jax" else root)
            return now
        return None

    # Calls

    def visit_Call(self, node: ast.Call) -> None:
        name, args = self.bindings.called(node)
        if name == "jax.numpy.einsum" and args and "{" in text_of(args[0]):
            self._rename(node.func if self.bindings.of(node.func) == name else node.args[0], f"{PACKAGE}.einsum")
        renamed = [keyword for keyword in node.keywords if (name, keyword.arg) in KEYWORDS]
        if name == CONSTRAINT and name in self.renaming.names:
            given = [*args[1:2], *(keyword.value for keyword in renamed)]
            self._sure &= len(given) == 1 and self._is_spec(given[0])
        if name == PJIT and not self._write_nones([keyword.value for keyword in renamed]):
            renamed = []
        for keyword in renamed if name != CONSTRAINT or self._sure else ():
            span = (keyword.col_offset, keyword.col_offset + len(str(keyword.arg)))
            self._edit(keyword.lineno, span, KEYWORDS[str(name), str(keyword.arg)])
        self.generic_visit(node)

    def _write_nones(self, resources: list[ast.expr]) -> bool:
        """Write ``P()`` for each None in resources.  It meant "whole on every device", and today means "as it comes".

        Returns whether no None is left.  Where a value could be None, pjit(in_axis_resources=) is kept.
        """
        nones = [none for value in resources for none in _nones(value)]
        specs = [part.func for value in resources for part in ast.walk(value) if isinstance(part, ast.Call)]
        if not all(map(self._is_spec, resources)) or (nones and not specs):
            return False
        for none in nones:
            spec = self._spelled(specs[0], SPEC) if isinstance(specs[0], ast.Attribute) else None
            self.edits.append(replacing(none, f"{spec or ast.unparse(specs[0])}()"))
        return True

    def _is_spec(self, node: ast.expr, written: bool = True) -> bool:
        """Whether all parts of resources are specs, or None that can be rewritten here."""
        if isinstance(node, ast.Name):
            value = self.bindings.values.get(node.id)
            return isinstance(value, (ast.Tuple, ast.Call)) and self._is_spec(value, False)  # other values may change
        if isinstance(node, (ast.Tuple, ast.List, ast.Dict)):
            return all(self._is_spec(part, written) for part in _parts(node))
        if isinstance(node, ast.Constant):
            return written and node.value is None
        name = self.bindings.of(node.func) if isinstance(node, ast.Call) else None
        return RENAMED.get(str(name), name) == SPEC

    def _line(self, number: int) -> bytes:
        cell = self.program.cell(number)
        return cell.text.split("\n")[number - cell.start].encode()

    def _edit(self, line: int, span: tuple[int, int], text: str) -> None:
        self.edits.append(Edit((line, span[0]), (line, span[1]), text))


def _parts(node: ast.expr) -> list[ast.expr]:
    return list(node.values) if isinstance(node, ast.Dict) else getattr(node, "elts", [])


def _nones(node: ast.expr) -> Iterator[ast.expr]:
    """The None in resources."""
    if isinstance(node, ast.Constant):
        yield node
    for part in _parts(node):
        yield from _nones(part)


def before_jax(tree: ast.Module, lines: Sequence[str]) -> list[Edit]:
    """Add imports before the first import of JAX: a program may set options that JAX reads at its import."""
    of_jax = lambda n: any(m.startswith(("jax", "xmap_")) for part in ast.walk(n) for _, m in imported_names(part))  # noqa: E731
    is_head = lambda n: isinstance(n, ast.Expr) or getattr(n, "module", "") == "__future__"  # noqa: E731
    if not lines:
        return []
    first = next(filter(of_jax, tree.body), None) or next(itertools.filterfalse(is_head, tree.body), tree.body[-1])
    at, end = (first_line(first), first.col_offset), "; " if first.col_offset else "\n"
    return [Edit(at, at, "".join(f"{line}{end}" for line in lines))]


def replacing(node: ast.stmt | ast.expr | ast.alias, text: str) -> Edit:
    """The edit that puts a text in the place of a part of a program."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    return Edit((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), text)


def edited(text: str, edits: Iterable[Edit], first_line: int = 1) -> str:
    """A text with these edits; the ends of its lines stay."""
    lines = [*text.encode().splitlines(keepends=True), b""]
    newline = next((end for end in (b"\r\n", b"\r") if lines[0].endswith(end)), b"\n")
    for edit in sorted(dict.fromkeys(edits), key=lambda e: (e.start, e.end), reverse=True):
        (top, left), (bottom, right) = edit.start, edit.end
        top, bottom = top - first_line, bottom - first_line
        new = edit.text.encode().replace(b"\n", newline)
        lines[top : bottom + 1] = [lines[top][:left] + new + lines[bottom][right:]]
    return b"".join(lines).decode()


def applied(source: bytes, path: str, edits: Iterable[Edit]) -> bytes:
    """The contents of a file with these edits; the rest of it stays, and so does the layout of a notebook."""
    if not path.endswith(NOTEBOOK):
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        return edited(source.decode(encoding), edits).encode(encoding)
    notebook = json.loads(source)
    for part in cells_of(source, path):
        cell, end = notebook["cells"][(part.number or 1) - 1], part.start + part.text.count("\n")
        if own := [edit for edit in edits if part.start <= edit.start[0] <= end]:
            new = edited("".join(cell["source"]), own, part.start)
            cell["source"] = new if isinstance(cell["source"], str) else new.splitlines(keepends=True)
    for indent, is_ascii, end_of_file in itertools.product((1, 2, 4, None), (False, True), ("\n", "")):
        dumped = functools.partial(json.dumps, indent=indent, ensure_ascii=is_ascii)
        if (dumped(json.loads(source)) + end_of_file).encode() == source:
            return (dumped(notebook) + end_of_file).encode()
    return (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()


def fixed(source: bytes, path: str, others: Others = Others()) -> bytes:
    """A program with the safe rewrites; the same bytes if there are none."""
    edits = edits_of(program_of(source, path), others)
    return applied(source, path, edits) if edits else source


def run(sources: Mapping[str, bytes], write: bool) -> dict[str, bytes]:
    """Rewrite files, or show the differences; returns the new contents."""
    programs = [program_of(source, path) for path, source in {**_beside(sources), **sources}.items()]
    others = others_of((program.tree, bindings_of(program), program.path) for program in programs)
    results = {path: fixed(source, path, others) for path, source in sources.items()}
    for path, result in results.items():
        if result == sources[path]:
            continue
        if write:
            with open(path, "wb") as file:
                file.write(result)
            print(f"rewritten: {path}")
        else:
            before, after = (t.decode(errors="replace").splitlines(keepends=True) for t in (sources[path], result))
            sys.stdout.writelines(difflib.unified_diff(before, after, path, path))
    changed = sum(result != sources[path] for path, result in results.items())
    print(f"{changed} file{'s' * (changed != 1)} {'rewritten' if write else 'would be rewritten'}")
    return results


def _beside(sources: Iterable[str]) -> dict[str, bytes]:
    """Other files in the same folders that mention the files by name, because they may import rewritten names."""
    found = {}
    stems = {os.path.splitext(os.path.basename(path))[0].encode() for path in sources}
    for folder in {os.path.dirname(path) or "." for path in sources}:
        for path in (os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".py")):
            with open(path, "rb") as file:
                text = file.read()
            if any(stem in text for stem in stems):
                found[os.path.normpath(path)] = text
    return found
