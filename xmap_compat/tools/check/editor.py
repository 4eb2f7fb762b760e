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

from xmap_compat.legacy.removed import Removed
from xmap_compat.tools.check import removed_names
from xmap_compat.tools.check.findings import Checked, Finding
from xmap_compat.tools.source.bindings import Names, first_line
from xmap_compat.tools.source.layout import (
    applied,
    at_line,
    first_of_jax,
    without_keyword,
)
from xmap_compat.tools.source.reading import Program, read
from xmap_compat.tools.source.renaming import Renaming

INSTALL = "import xmap_compat; xmap_compat.install()"
# Modules that `import jax` does not import.
_NOT_IN_JAX = ("jax.extend.", "jax.example_libraries.")
_MESHES = (f"{removed_names.MAPS}.Mesh", "jax.interpreters.pxla.Mesh")
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
        left = by_path[program.path]
        if left and not program.errors:
            file = _File(program, left, exported)
            edits = file.renaming.edits()
            left = file.staying()
            by_hand = [finding for finding in left if finding.fails]
            if install and by_hand != left:
                line = first_line(first_of_jax(program.tree))
                edits.append(at_line(line, [INSTALL]))
                left = by_hand
            if edits:
                new = applied(program.path.read_bytes(), str(program.path), edits)
                if read(program.path, new).errors:
                    left = by_path[program.path]
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
            is_other = compares and finding.gone.name in _MESHES
            if isinstance(finding.node, ast.keyword):
                self._mend_keyword(finding.node, finding.gone)
            elif finding.gone.is_same and not is_other:
                self._mend_name(finding.node, finding.gone.now)

    def staying(self) -> list[Finding]:
        """What is not mended, and would fail or needs ``install()``."""
        found = []
        for finding in self._findings:
            is_needed = finding.fails or finding.gone.kind in removed_names.RESTORED
            is_mended = finding.node in self._mended or not self.renaming.stays(finding.node)
            if is_needed and not is_mended:
                found.append(finding)
        return found

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
        if reaches and not now.startswith(_NOT_IN_JAX):
            self.renaming.rename(node, root.id + now.removeprefix(meant), kept=root)
        elif meant is not None:
            self.renaming.rename(node, f"{{{module}:{name}}}")

    def _mend_keyword(self, keyword: ast.keyword, gone: Removed) -> None:
        """Write today's keyword, or leave it out, if the call means the same."""
        if gone.now.startswith("nothing: "):
            call = self._names.parents[keyword]
            edit = without_keyword(keyword, call, self._lines)
            if edit is None:
                return
            self.renaming.write(*edit)
            self.renaming.cover(keyword)
        elif keyword.arg is not None and gone.is_same and self._takes(keyword.value, gone):
            start = keyword.lineno, keyword.col_offset
            end = keyword.lineno, keyword.col_offset + len(keyword.arg)
            self.renaming.write(start, end, gone.now)
        else:
            return
        self._mended.add(keyword)

    def _takes(self, value: ast.expr, gone: Removed) -> bool:
        """Whether today's keyword takes a value.

        Those of pjit take specs: ``P()`` is written for None.  Only literal ones are mended.
        """
        if ".pjit." not in gone.name:
            return True
        nones = []
        for node in ast.walk(value):
            if isinstance(node, ast.Name):
                if not self._names.dotted(node).endswith(".PartitionSpec"):
                    return False
            elif isinstance(node, ast.Constant) and node.value is None:
                nones.append(node)
        for none in nones:
            if not isinstance(self._names.parents[none], ast.Call):
                self.renaming.rename(none, "{jax.sharding:PartitionSpec}()")
        return True
