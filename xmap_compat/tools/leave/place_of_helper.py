"""Where the helper file stands: every edited file must find it, whichever script runs."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from xmap_compat.tools.leave.helper_text import helper_text
from xmap_compat.tools.leave.patch import contents

_OURS = b"def axes_of("


class Helper:
    """The helper file.

    Attributes:
      path: the file.
      module: its whole name.
      before: what it holds, if it is there.
    """

    def __init__(self, files: Mapping[str, bytes], modules: Mapping[str, str], beside: str):
        self._modules = modules
        self._beside = beside
        self.path = ""
        self.module = ""
        self.before: bytes | None = None
        for path, data in files.items():
            if Path(path).name.startswith("named_axes") and _OURS in data:
                self.path = path
                self.module = modules[path] or Path(path).stem
                self.before = data

    def settle(self, edited: Sequence[str]) -> None:
        """Find its place: in the package of the edited files, or beside those that others
        import, or beside the script.
        """
        if self.before is not None:
            return
        folder = self._beside
        package = ""
        for path in edited:
            is_imported = self._modules.get(path, "") not in ("", "__main__")
            if is_imported and not package:
                package, *inner = self._package(path).split(".")
                folder = os.path.join(os.path.dirname(path), *[".."] * len(inner))
        self.path = _ours_or_free(os.path.normpath(folder))
        self.module = f"{package}.{Path(self.path).stem}".lstrip(".")
        if os.path.exists(self.path):
            self.before = contents(self.path)

    def _package(self, path: str) -> str:
        """The package of a file; empty if it is in none."""
        name = self._modules.get(path, "")
        return name if Path(path).stem == "__init__" else name.rpartition(".")[0]

    def module_for(self, path: str) -> str:
        """How a file imports it."""
        package = self._package(path).split(".")
        root, _, stem = self.module.rpartition(".")
        if root and package[0] == root:
            return "." * len(package) + stem
        return self.module

    def change(self, functions: Collection[str]) -> dict[str, tuple[bytes | None, bytes]]:
        """The change of the file, if it lacks one of these functions."""
        if not functions:
            return {}
        before = None
        if self.before is not None:
            before = self.before.decode()
        new = helper_text(functions, before).encode()
        if new == self.before:
            return {}
        return {self.path: (self.before, new)}


def _ours_or_free(folder: str) -> str:
    """A name for the file."""
    path = os.path.join(folder, "named_axes.py")
    number = 1
    while os.path.exists(path) and _OURS not in contents(path):
        number += 1
        path = os.path.join(folder, f"named_axes_{number}.py")
    return path
