"""``check --report``: runs a program under ``install()``, and lists each removed name that it looked up, and where."""

from __future__ import annotations

import sys
import types
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xmap_compat.legacy import import_hook, runner
from xmap_compat.tools.check import sources, table

_OWN = str(Path(__file__).parents[2])
_INSTALLED = ("site-packages", "dist-packages")


class _Lookups:
    """How often each name was looked up, by file and line."""

    def __init__(self, notebook: sources.Program | None):
        self.counts: Counter[tuple[str, int, str]] = Counter()
        self._notebook = notebook

    def watch(self) -> None:
        """Note from now on what is asked of the modules that lost names."""
        release = _release(vars(sys.modules["jax"])["__version__"])
        by_module: dict[str, set[str]] = defaultdict(set)
        for name, gone in {**table.NAMES, **table.MODULES, **dict.fromkeys(table.MOVED)}.items():
            if gone is None or not gone.until or _release(gone.until) < release:
                module, _, last = name.rpartition(".")
                by_module[module].add(last)
        for old, now in table.MOVED.items():
            by_module[old] |= set(dir(sys.modules.get(now, types)))
        for module, names in by_module.items():
            if type(sys.modules.get(module)) is types.ModuleType:
                sys.modules[module].__class__ = self._class(module, names)

    def _class(self, module: str, names: set[str]) -> type[types.ModuleType]:
        note = self._note

        class Watched(types.ModuleType):
            def __getattribute__(self, name: str) -> Any:
                value = super().__getattribute__(name)
                if name in names:
                    note(f"{module}.{name}", sys._getframe(1))
                return value

        return Watched

    def _note(self, name: str, frame: types.FrameType) -> None:
        file = frame.f_code.co_filename
        if not file.startswith((_OWN, "<frozen")) and frame.f_globals.get("__name__", "").split(".")[0] != "jax":
            self.counts[file, frame.f_lineno, name] += 1

    def lines(self) -> list[str]:
        own: list[str] = []
        others: list[str] = []
        for (file, line, name), count in sorted(self.counts.items()):
            gone = table.NAMES.get(name) or table.MODULES.get(name) or table.moved(name, f"the same in {name}")
            where = f"{_shown(file)}:{line}"
            if self._notebook is not None and file == str(self._notebook.path):
                where = "{}:cell {}:{}".format(file, *self._notebook.where(line))
            times = f" ({count} lookups)" if count > 1 else ""
            (others if any(part in file for part in _INSTALLED) else own).append(
                f"{where}: {name}{times}: {gone.remedy}"
            )
        apart = ["", "in installed packages:", *others] if others else []
        total = f"xmap_compat check: {len(own)} places looked up names that JAX removed" if own else ""
        return [total or "xmap_compat check: the program looked up no name that JAX removed", *own, *apart]


def _shown(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def main(args: Sequence[str]) -> int:
    """Run ``SCRIPT [ARGS...]``, ``-m MODULE [ARGS...]`` or a notebook; the exit code and errors are the program's."""
    notebook = sources.read(Path(args[0])) if args[0].endswith(sources.NOTEBOOK) else None
    lookups = _Lookups(notebook)
    import_hook.install_with_jax(lookups.watch)
    try:
        if notebook is None:
            runner.run_program(args)
        else:
            exec(compile(notebook.tree, str(notebook.path), "exec"), {"__name__": "__main__"})
    finally:
        sys.stdout.flush()
        print(*lookups.lines(), sep="\n")
    return 0
