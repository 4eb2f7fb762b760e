"""Where the helper file stands: every edited file must find it, whichever script runs."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.helper_text import helper_text
from xmap_compat.tools.leave.patch import Change, Refused

NAME = "named_axes"
_OURS = b"def axes_of("


class Helper:
    """The helper file.

    Attributes:
      path: the file.
      package: the package that it stands in, or "".
    """

    def __init__(self, modules: Mapping[str, str], beside: str):
        """
        Args:
          modules: the program's files, and their modules.
          beside: the folder of the script.
        """
        self._modules = modules
        self.path = os.path.join(beside, f"{NAME}.py")
        self.package = ""
        self.is_there = False
        for path in modules:
            if Path(path).stem == NAME:
                self.path = path
                self.package = self._package(path)
                self.is_there = True

    def choose_place(self, edited: Sequence[str]) -> None:
        """Choose its place: where it is, or in the package of the first module that is edited, or
        beside that module.
        """
        for path in edited:
            if not self.is_there and self._modules[path] not in ("", "__main__"):
                self.package, *inner = self._package(path).split(".")
                folder = os.path.join(os.path.dirname(path), *[".."] * len(inner))
                self.path = os.path.normpath(os.path.join(folder, f"{NAME}.py"))
                return

    def _package(self, path: str) -> str:
        """The package of a file; empty if it is in none."""
        name = self._modules[path]
        return name if Path(path).stem == "__init__" else name.rpartition(".")[0]

    def module_for(self, path: str) -> str:
        """How a file imports it."""
        package = self._package(path).split(".")
        if self.package and package[0] == self.package:
            return "." * len(package) + NAME
        return f"{self.package}.{NAME}".lstrip(".")

    def change(self, functions: Collection[str]) -> dict[str, Change]:
        """The change of the file, if it lacks one of these functions."""
        if not functions:
            return {}
        before = None
        existing = None
        if os.path.exists(self.path):
            before = Path(self.path).read_bytes()
            if _OURS not in before:
                raise Refused(messages.NOT_OURS.format(path=self.path))
            existing = before.decode()
        new = helper_text(functions, existing).encode()
        return {} if new == before else {self.path: (before, new)}
