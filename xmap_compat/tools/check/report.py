"""``check --report``: runs a program under ``install()``, and lists each removed name that it
looked up, and where.
"""

from __future__ import annotations

import os
import sys
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xmap_compat.legacy import import_hook, runner
from xmap_compat.tools.check import table
from xmap_compat.tools.source.reading import NOTEBOOK, Program, read

_OWN = str(Path(__file__).parents[2])
_INSTALLED = ("site-packages", "dist-packages")
_GRADIENTS = ("jax.grad", "jax.value_and_grad", "jax.vjp")
_EXACT = (
    "exact through an xmapped function; legacy's was larger by the size of an axis for each psum"
)


class _Lookups:
    """How often each name was looked up, by file and line; and what xmap warned of."""

    def __init__(self, notebook: Program | None):
        self.counts: Counter[tuple[str, int, str]] = Counter()
        self._notebook = notebook
        self._shown_by_python = warnings.showwarning
        warnings.showwarning = self._warned  # type: ignore[assignment]

    def watch(self) -> None:
        """Note from now on what is asked of the modules that lost names."""
        lost = defaultdict(set, jax={name.removeprefix("jax.") for name in _GRADIENTS})
        for name, gone in {**table.NAMES, **table.MODULES}.items():
            if table.release(gone.until) < table.release(vars(sys.modules["jax"])["__version__"]):
                module, _, last = name.rpartition(".")
                lost[module].add(last)
        for old, now in table.MOVED.items():
            lost[old] |= set(dir(sys.modules.get(now, types)))
        for module in lost:
            if type(sys.modules.get(module)) is types.ModuleType:
                sys.modules[module].__class__ = self._class(module, lost[module])

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
        if (
            not file.startswith((_OWN, "<frozen"))
            and frame.f_globals.get("__name__", "").split(".")[0] != "jax"
        ):
            self.counts[file, frame.f_lineno, name] += 1

    def _warned(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        *rest: Any,
    ) -> None:
        if "xmap" in str(message):  # an undeclared output, an unused resource
            self.counts[filename, lineno, str(message).splitlines()[0]] += 1
        self._shown_by_python(message, category, filename, lineno, *rest)

    def lines(self) -> list[str]:
        sections: dict[str, list[str]] = {
            "": [],
            "in installed packages:": [],
            "what differs from legacy:": [],
        }
        for (file, line, name), count in sorted(self.counts.items()):
            gone = table.known(name)
            where, times = self._where(file, line), f" ({count} lookups)" * (count > 1)
            if gone is not None:
                head = "in installed packages:" * any(part in file for part in _INSTALLED)
                sections[head].append(f"{where}: {name}{times}: {gone.remedy}")
            elif name not in _GRADIENTS:
                sections["what differs from legacy:"].append(f"{where}: {name}")
            elif any(looked_up == f"{table.MAPS}.xmap" for _, _, looked_up in self.counts):
                sections["what differs from legacy:"].append(f"{where}: {name}: {_EXACT}")
        count = len(sections[""])
        looked = f"{count} places looked up names" if count else "the program looked up no name"
        shown = [f"xmap_compat check: {looked} that JAX removed", *sections.pop("")]
        return shown + [
            line for head, lines in sections.items() if lines for line in ("", head, *lines)
        ]

    def _where(self, file: str, line: int) -> str:
        if self._notebook is not None and file == str(self._notebook.path):
            return "{}:cell {}:{}".format(file, *self._notebook.where(line))
        return f"{os.path.relpath(file) if file.startswith(os.getcwd()) else file}:{line}"


def main(args: Sequence[str]) -> int:
    """Run ``SCRIPT [ARGS...]``, ``-m MODULE [ARGS...]`` or a notebook; the exit code and errors are
    the program's.
    """
    notebook = read(Path(args[0])) if args[0].endswith(NOTEBOOK) else None
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
