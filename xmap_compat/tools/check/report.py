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
            gone = table.known(name)
            shown = os.path.relpath(file) if file.startswith(os.getcwd()) else file
            times = f" ({count} lookups)" if count > 1 else ""
            text = f"{shown}:{line}: {name}{times}: {gone.remedy if gone else ''}"
            is_installed = any(part in file for part in _INSTALLED)
            (of_packages if is_installed else of_program).append(text)
        found = "the program looked up no name"
        if of_program:
            places = "1 place" if len(of_program) == 1 else f"{len(of_program)} places"
            found = f"{places} looked up names"
        shown_lines = [f"xmap_compat check: {found} that JAX removed", *of_program]
        if of_packages:
            shown_lines += ["", "in installed packages:", *of_packages]
        return shown_lines


def _lost_names(jax: str) -> dict[str, set[str]]:
    """For each module of JAX the names that it lost."""
    lost: dict[str, set[str]] = defaultdict(set)
    for name, gone in {**table.NAMES, **table.MODULES}.items():
        if table.release(gone.until) < table.release(jax):
            module, _, last = name.rpartition(".")
            lost[module].add(last)
    for old, now in table.MOVED.items():
        lost[old].update(dir(sys.modules.get(now, types)))
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
