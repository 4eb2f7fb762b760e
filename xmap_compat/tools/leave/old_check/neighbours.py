"""The modules of a program beside a file: names that they import from JAX count for the file as well.

For ``from .common import *``, ``from utils import jnp`` and ``import utils; utils.jax``, the other file is read.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator

# With this prefix, a path stands for a module of the program in the place of a dotted name.
OWN = "file:"
ALL = "__all__"  # stands for the public names of a module, where it lists them
NamesOf = Callable[[str], dict[str, str]]


def leads_on(name: str) -> bool:
    """Whether a name leads to JAX, or to a module of the program that may lead there."""
    return name.split(".")[0] in ("jax", "xmap_compat", "functools") or name.startswith(OWN)


class Neighbours:
    """The names that one file imports from other files of its program.

    Args:
      path: the file.
      names_of: a function from the path of a file to the meanings of its names.
    """

    def __init__(self, path: str, names_of: NamesOf):
        self._folder = os.path.dirname(os.path.abspath(path))
        self._names_of = names_of

    def imported(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        """The names that an import of a module of the program binds, with their meanings."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                found = self._module(alias.name if alias.asname else root, 0)
                if found is not None:
                    yield alias.asname or root, OWN + found
        elif isinstance(node, ast.ImportFrom):
            found = self._module(node.module or "", node.level)
            for alias in node.names if found is not None else ():
                yield from self._from(str(found), alias)

    def _from(self, module: str, alias: ast.alias) -> Iterator[tuple[str, str]]:
        if alias.name == "*":
            names = self._names(module)
            public = names.get(ALL, "").split() or [name for name in names if not name.startswith("_")]
            yield from ((name, names[name]) for name in public if name in names)
            return
        value = self.attribute(OWN + module, alias.name)
        if value is not None:
            yield alias.asname or alias.name, value

    def attribute(self, module: str, name: str) -> str | None:
        """The meaning of an attribute of a module of the program: a name that its file binds, or a module below it."""
        path = module.removeprefix(OWN)
        value = self._names(path).get(name)
        if value is None and (os.path.isdir(path) or os.path.basename(path) == "__init__.py"):
            below = _file_of(os.path.join(path if os.path.isdir(path) else os.path.dirname(path), name))
            value = None if below is None else OWN + below
        return value

    def _module(self, name: str, level: int) -> str | None:
        """The file of a module, as seen from this folder, or from a parent folder of which this one is a package."""
        parts = name.split(".") if name else []
        if not level and parts[0] in ("jax", "jaxlib", "xmap_compat"):
            return None
        folder = self._folder
        for _ in range(level - 1):
            folder = os.path.dirname(folder)
        if level:
            return _file_of(os.path.join(folder, *parts))
        while True:
            found = _file_of(os.path.join(folder, *parts))
            in_package = os.path.exists(os.path.join(folder, "__init__.py")) or folder.startswith(os.getcwd() + os.sep)
            if found is not None or not in_package:
                return found
            folder = os.path.dirname(folder)

    def _names(self, path: str) -> dict[str, str]:
        if path in _being_read:  # modules import each other
            return {}
        _being_read.add(path)
        try:
            return self._names_of(path)
        except OSError:
            return {}
        finally:
            _being_read.discard(path)


_being_read: set[str] = set()


def _file_of(module: str) -> str | None:
    """The file of a module (given without ``.py``) or of a package; the folder of a package that has no file."""
    candidates = os.path.join(module, "__init__.py"), f"{module}.py"
    found = next((path for path in candidates if os.path.isfile(path)), None)
    return module if found is None and os.path.isdir(module) else found
