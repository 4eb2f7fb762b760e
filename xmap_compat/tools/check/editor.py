"""Rewrites removed names: today's names in their place; imports that nothing uses go;
``install()`` gives the rest.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

from xmap_compat.tools.check import guards, table
from xmap_compat.tools.check.findings import Checked, Finding
from xmap_compat.tools.source.bindings import Names
from xmap_compat.tools.source.layout import (
    applied,
    before,
    first_of_jax,
    without_keyword,
)
from xmap_compat.tools.source.reading import Program, read
from xmap_compat.tools.source.renaming import NOT_IN_JAX, Renaming

INSTALL = "import xmap_compat; xmap_compat.install()"
_MESHES = (f"{table.MAPS}.Mesh", "jax.interpreters.pxla.Mesh")
# Where a mesh class is a value: ours is another class than JAX's.
_COMPARES = re.compile(
    r"\b(isinstance|issubclass|type|__class__|case|register)\b.*\bMesh\b|[{,] *(\w+\.)*Mesh *[]:,}]"
    r"|: Mesh\): return"
)


@dataclasses.dataclass(frozen=True)
class Fixed:
    """What fixing some files gives.

    Attributes:
      contents: the new contents of the files that need one.
      left: what it could not mend, each with ``path``, ``line``, ``gone.name``, ``gone.remedy``.
    """

    contents: dict[Path, bytes]
    left: list[Finding]


def fixed(checked: Checked, install: bool = True, keep: Collection[str] = ()) -> Fixed:
    """New contents of the files that need one.

    Args:
      install: whether a file may call ``install()`` where only that gives a name; if not, the name
        is in ``left``.
      keep: dotted removed names that stay as they are.
    """
    all_fixed = Fixed({}, [])
    by_path: dict[Path, list[Finding]] = defaultdict(list)
    for finding in checked.findings:
        if finding.gone.name not in keep:
            by_path[finding.path].append(finding)
    exported = _exported(checked.programs)
    for program in checked.programs:
        found = by_path[program.path]
        if not found or program.errors:
            continue
        file = _File(program, found, exported)
        edits = file.renaming.edits()
        left, installed = file.staying()
        if installed and install:
            edits.append(before(first_of_jax(program.tree), [INSTALL]))
        elif installed:
            left += installed
        if edits:
            new = applied(program.path.read_bytes(), str(program.path), edits)
            if read(program.path, new).errors:
                left = found
            else:
                all_fixed.contents[program.path] = new
        all_fixed.left.extend(left)
    return all_fixed


def _exported(programs: Collection[Program]) -> set[str]:
    """The names that programs take from others of these."""
    stems = {program.path.stem for program in programs}

    def is_of_these(module):
        return not module.startswith("jax") and not stems.isdisjoint(module.split("."))

    found: set[str] = set()
    for program in programs:
        found |= Names(program.tree).taken_from(is_of_these)
    return found


class _File:
    """What changes in one file."""

    def __init__(self, program: Program, findings: list[Finding], exported: set[str]):
        self._findings = findings
        self._lines = program.text.split("\n")
        self._names = Names(program.tree)
        self._mended: set[ast.keyword] = set()
        compares = _COMPARES.search(program.text)
        dropped = tuple(f"{finding.gone.name}." for finding in findings)
        self.renaming = Renaming(self._names, self._lines, dropped, exported)
        for finding in findings:
            is_same = not (compares and finding.gone.name in _MESHES)
            if isinstance(finding.node, ast.keyword):
                self._mend_keyword(finding.node, finding.gone)
            elif finding.gone.now and is_same:
                self._mend_name(finding.node, finding.gone.now)

    def staying(self) -> tuple[list[Finding], list[Finding]]:
        """What only a hand can change, and what only ``install()`` gives."""
        left = []
        installed = []
        for finding in self._findings:
            is_mended = finding.node in self._mended or not self.renaming.stays(finding.node)
            if is_mended:
                continue
            is_restored = finding.gone.kind != table.ABSENT
            if finding.fails:
                left.append(finding)
            elif is_restored and finding.guard in ("", guards.CAUGHT):
                installed.append(finding)
        return left, installed

    def _mend_name(self, node: Any, now: str) -> None:
        """Write the dotted name that an object has today."""
        module, _, name = now.rpartition(".")
        if isinstance(node, ast.alias):
            self.renaming.reimport(node, module, name)
        is_read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        if not is_read or not self.renaming.stays(node):
            return
        root: Any = node
        while isinstance(root, ast.Attribute):
            root = root.value
        meant: Any = ""
        if isinstance(root, ast.Name):
            meant = self._names.meaning(root.id)
        reaches = isinstance(meant, str) and now.startswith(f"{meant}.")
        if reaches and not now.startswith(NOT_IN_JAX):
            self.renaming.rename(node, root.id + now.removeprefix(meant), kept=root)
        elif meant is not None:
            self.renaming.rename(node, f"{{{module}:{name}}}")

    def _mend_keyword(self, keyword: ast.keyword, gone: table.Gone) -> None:
        """Write today's keyword, if it takes the same values."""
        if keyword.arg is None:
            return
        if gone.is_left_out:
            self.renaming.write(*without_keyword(keyword, self._lines))
            self.renaming.cover(keyword)
            self._mended.add(keyword)
            return
        # Keywords of pjit.pjit take specs: only literal ones are mended.  Others of pjit are left.
        is_same = ".pjit." not in gone.name
        if ".pjit.pjit" in gone.name:
            is_same = self._mend_specs(keyword.value)
        if is_same and gone.now:
            start = keyword.lineno, keyword.col_offset
            end = keyword.lineno, keyword.col_offset + len(keyword.arg)
            self.renaming.write(start, end, gone.now)
            self._mended.add(keyword)

    def _mend_specs(self, value: ast.expr) -> bool:
        """Write ``P()`` for each None that stands for a spec, and return True, if a value holds
        literal specs only.
        """
        nones = []
        parts = [value]
        while parts:
            part = parts.pop()
            if isinstance(part, (ast.Tuple, ast.List)):
                parts += part.elts
            elif isinstance(part, ast.Dict):
                parts += part.values
            elif isinstance(part, ast.Constant) and part.value is None:
                nones.append(part)
            elif not self._is_spec(part):
                return False
        for none in nones:
            self.renaming.rename(none, "{jax.sharding:PartitionSpec}()")
        return True

    def _is_spec(self, node: Any) -> bool:
        is_call = isinstance(node, ast.Call)
        return is_call and self._names.dotted(node.func).endswith(".PartitionSpec")
