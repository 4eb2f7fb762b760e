"""``check --report``: runs a program under ``install()``, and lists each removed name that it
looked up.
"""

from __future__ import annotations

import os
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from xmap_compat.legacy import import_hook, runner
from xmap_compat.tools.check import table

_OURS = str(Path(__file__).parents[2])
_INSTALLED = ("site-packages", "dist-packages")


class _Lookups:
    """What a program looked up, by file, line and name."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int, str]] = Counter()

    def watch(self) -> None:
        """Note from now on what is asked of the modules that lost names."""
        for module, names in _lost_names(vars(sys.modules["jax"])["__version__"]).items():
            if type(sys.modules.get(module)) is types.ModuleType:
                sys.modules[module].__class__ = _watched(module, names, self._note)

    def _note(self, name: str, frame: types.FrameType) -> None:
        file = frame.f_code.co_filename
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package != "jax" and not file.startswith((_OURS, "<frozen")):
            self._counts[file, frame.f_lineno, name] += 1

    def lines(self) -> list[str]:
        of_program = []
        of_packages = []
        for (file, line, name), count in sorted(self._counts.items()):
            is_installed = any(part in file for part in _INSTALLED)
            if file.startswith(os.getcwd()):
                file = os.path.relpath(file)
            looked_up = name
            if count > 1:
                looked_up = f"{name} ({count} lookups)"
            text = f"{file}:{line}: {looked_up}: {table.ALL[name].remedy}"
            if is_installed:
                of_packages.append(text)
            else:
                of_program.append(text)
        found = f"{len(of_program)} places looked up names"
        if not of_program:
            found = "the program looked up no name"
        elif len(of_program) == 1:
            found = "1 place looked up names"
        lines = [f"xmap_compat check: {found} that JAX removed", *of_program]
        if of_packages:
            lines += ["", "in installed packages:", *of_packages]
        return lines


def _lost_names(jax: str) -> dict[str, set[str]]:
    """For each module of JAX the names that it lost."""
    lost: dict[str, set[str]] = defaultdict(set)
    for name, gone in table.ALL.items():
        if table.release(gone.until) < table.release(jax):
            module, _, last = name.rpartition(".")
            lost[module].add(last)
    return lost


def _watched(
    module: str, names: set[str], note: Callable[[str, types.FrameType], None]
) -> type[types.ModuleType]:
    """The class of a module that tells who reads these names."""

    class Watched(types.ModuleType):
        def __getattribute__(self, name: str) -> object:
            value = super().__getattribute__(name)
            if name in names:
                note(f"{module}.{name}", sys._getframe(1))
            return value

    return Watched


def main(args: Sequence[str]) -> int:
    """Run ``SCRIPT [ARGS...]`` or ``-m MODULE [ARGS...]``; the exit code and errors are the
    program's.
    """
    lookups = _Lookups()
    import_hook.install_with_jax(lookups.watch)
    if sys.stderr.isatty():
        print(f"xmap_compat check: running {' '.join(args)}", file=sys.stderr)
    try:
        runner.run_program(args)
    finally:
        sys.stdout.flush()
        for line in lookups.lines():
            print(line)
    return 0
