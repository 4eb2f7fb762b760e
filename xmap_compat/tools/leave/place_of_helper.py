"""Where the helper file stands: every edited file must find it, whichever script runs."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

from xmap_compat.tools.leave.helper_text import helper_text

_OURS = b"def axes_of("


class Helper:
    """The helper file.

    Attributes:
      path: the file.
      module: its whole name.
    """

    def __init__(self, contents: Mapping[str, bytes], modules: Mapping[str, str], beside: str):
        self._modules, self._beside, self._contents = modules, beside, contents
        self.path, self.module, self.before = "", "", None
        for path, data in contents.items():
            if os.path.basename(path).startswith("named_axes") and _OURS in data:
                self.path, self.before = path, data
                self.module = modules[path] or _stem(path)

    def settle(self, edited: Sequence[str]) -> None:
        """Find its place: in the package of the edited files, or beside those that others
        import, or beside the script.
        """
        if self.before is not None:
            return
        others = [path for path in edited if self._modules.get(path, "") not in ("", "__main__")]
        folder, package = self._beside, ""
        packaged = [path for path in edited if self._package(path)]
        if packaged:
            first = packaged[0]
            package = self._package(first).partition(".")[0]
            folder = os.path.dirname(first)
            for _ in range(self._package(first).count(".")):
                folder = os.path.dirname(folder)
        elif others:
            folder = os.path.dirname(others[0])
        self.path = _free(folder)
        self.module = f"{package}.{_stem(self.path)}".lstrip(".")
        if os.path.exists(self.path):
            with open(self.path, "rb") as file:
                self.before = file.read()

    def _package(self, path: str) -> str:
        """The package of a file; empty if it is in none."""
        name = self._modules.get(path, "")
        if _stem(path) == "__init__":
            return name
        return name.rpartition(".")[0]

    def module_for(self, path: str) -> str:
        """How a file imports it."""
        package, root = self._package(path), self.module.rpartition(".")[0]
        if root and package.partition(".")[0] == root:
            return "." * len(package.split(".")) + _stem(self.path)
        return self.module

    def text(self, functions: Collection[str]) -> str:
        before = None if self.before is None else self.before.decode()
        return helper_text(functions, before)

    def change(self, functions: Collection[str]) -> dict[str, tuple[bytes | None, bytes]]:
        """The change of the file, if it needs one."""
        if not functions:
            return {}
        new = self.text(functions).encode()
        return {} if new == self.before else {self.path: (self.before, new)}


def _stem(path: str) -> str:
    return os.path.basename(path).removesuffix(".py")


def _free(folder: str) -> str:
    """A name for the file that is ours, or free."""
    for k in range(1, 1000):
        path = os.path.join(folder, f"named_axes{f'_{k}' * (k > 1)}.py")
        if not os.path.exists(path):
            break
        with open(path, "rb") as file:
            if _OURS in file.read():
                break
    return path
