"""The text of the helper file: the functions of ``named_axes`` that a program needs, and what they
use.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np

_SOURCE = Path(__file__).with_name("helper") / "named_axes.py"


def helper_text(names: Iterable[str], existing: str | None = None) -> str:
    """The text of the file, with these functions and what they use.

    Args:
      existing: the text of a helper that is there already.  It gets what it lacks, at its end.
    """
    needed = _WHOLE.needs(names)
    if existing is None:
        parts = [_WHOLE.docstring, *_WHOLE.imports_of(needed), *_WHOLE.texts_of(needed)]
        return "".join(parts)
    there = _Module(existing)
    added = needed - there.definitions.keys()
    if not added:
        return existing
    lines = existing.rstrip("\n").splitlines(keepends=True)
    for text in reversed(_WHOLE.imports_of(added, there.imported())):
        lines.insert(there.end_of_imports, text.lstrip("\n"))
    return "".join(lines) + "\n\n\n" + "".join(_WHOLE.texts_of(added)).lstrip("\n")


class _Module:
    """The text of a module, in pieces: each has the blank lines and comments above it.

    Attributes:
      docstring: the first piece.
      definitions: the statement that defines each name, in their order.
      end_of_imports: the number of lines until there.
    """

    def __init__(self, text: str):
        self.docstring = ""
        self.definitions: dict[str, ast.stmt] = {}
        self.end_of_imports = 0
        self._imports: list[ast.Import | ast.ImportFrom] = []
        self._text: dict[ast.stmt, str] = {}
        lines = text.splitlines(keepends=True)
        end = 0
        for node in ast.parse(text).body:
            start = end
            end = node.end_lineno or 0
            self._text[node] = "".join(lines[start:end])
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._imports.append(node)
                self.end_of_imports = end
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign):
                self.definitions[ast.unparse(node.targets[0])] = node
            elif start == 0:
                self.docstring = self._text[node]
                self.end_of_imports = end

    def needs(self, names: Iterable[str]) -> set[str]:
        """These definitions, and those that they use."""
        found: set[str] = set()
        pending = [*names]
        while pending:
            name = pending.pop()
            if name in self.definitions and name not in found:
                found.add(name)
                pending += _names_in(self.definitions[name])
        return found

    def texts_of(self, names: Collection[str]) -> list[str]:
        texts = []
        for name, node in self.definitions.items():
            if name in names:
                texts.append(self._text[node])
        return texts

    def imported(self) -> set[str]:
        found: set[str] = set()
        for node in self._imports:
            found.update(map(_local, node.names))
        return found

    def imports_of(self, names: Collection[str], there: Collection[str] = ()) -> list[str]:
        """The statements that import what some definitions use, and is not there."""
        used: set[str] = set()
        for name in names:
            used |= _names_in(self.definitions[name])
        used.difference_update(there)
        texts = []
        blank = ""
        for node in self._imports:
            if self._text[node].startswith("\n"):
                blank = "\n"
            lacking = copy.copy(node)
            lacking.names = []
            for alias in node.names:
                if _local(alias) in used:
                    lacking.names.append(alias)
            if lacking.names:
                texts.append(blank + ast.unparse(lacking) + "\n")
                blank = ""
        return texts


def _local(alias: ast.alias) -> str:
    return alias.asname or alias.name


def _names_in(node: ast.stmt) -> set[str]:
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.add(part.id)
    return found


_WHOLE = _Module(_SOURCE.read_text())


# ---- what the helper has


def _functions_of(parameters: set[str]) -> list[str]:
    """The functions of the helper that have one of these parameters."""
    found = []
    for name, node in _WHOLE.definitions.items():
        if isinstance(node, ast.FunctionDef) and not name.startswith("_"):
            given = {part.arg for part in [*node.args.args, *node.args.kwonlyargs]}
            if given & parameters:
                found.append(name)
    return found


_COLLECTIVES = _functions_of({"axis_name", "axes"})
_REDUCTIONS = set(_functions_of({"axis"})).difference(_COLLECTIVES)
# Functions that reduce over positions, unless a literal name says otherwise.
REDUCTIONS = {"jax.numpy.amax": "max", "jax.numpy.amin": "min"}
# The name of the helper's function for what a program calls.
FUNCTIONS: dict[str, str] = {}
for _home in ("jax.lax", "xmap_compat", "xmap_compat.lax"):
    FUNCTIONS |= {f"{_home}.{name}": name for name in _COLLECTIVES}
for _home in ("jax.numpy", "jax.nn", "jax.scipy.special"):
    REDUCTIONS |= {f"{_home}.{name}": name for name in _REDUCTIONS}
FUNCTIONS |= REDUCTIONS
# Those that are methods of arrays too.
METHODS = _REDUCTIONS.intersection(dir(np.ndarray))
