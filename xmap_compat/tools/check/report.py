"""``check --report``: runs a program under ``install()``, and lists each removed name that it
looked up, and what differs from legacy.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from xmap_compat.legacy import import_hook, runner
from xmap_compat.tools.check import table
from xmap_compat.tools.source.reading import NOTEBOOK, Program, read

_OWN = str(Path(__file__).parents[2])
_INSTALLED = ("site-packages", "dist-packages")
_GRADIENTS = ("grad", "value_and_grad", "vjp", "jacrev", "hessian")
_GRADIENT = (
    "{}: {} through xmapped {}: exact; legacy's was larger by the size of an axis for each psum"
)
_RANDOM = "jax.random."
# These give the same numbers as ever.
_SAME_RANDOM = ("key", "PRNGKey", "fold_in", "key_data", "wrap_key_data", "key_impl", "clone")
_OLD_RANDOM = (
    "{}: random numbers: jax 0.4 drew others, which had jax_threefry_partitionable off. "
    "For those: python -m xmap_compat --old-random SCRIPT"
)
_DIFFERS = "what differs from legacy:"
_OF_PACKAGES = "in installed packages:"


class _Lookups:
    """What a program looked up, by file and line, and what xmap warned of."""

    def __init__(self, notebook: Program | None):
        self.counts: Counter[tuple[str, int, str]] = Counter()
        self.gradients: dict[tuple[str, int, str, str], None] = {}
        self.random: dict[tuple[str, int], None] = {}
        self._notebook = notebook
        self._shown_by_python = warnings.showwarning
        warnings.showwarning = self._warned  # type: ignore[assignment]

    # ---- while the program runs

    def watch(self) -> None:
        """Note from now on what is asked of the modules that lost names, and gradients of xmaps."""
        for module, names in _lost_names(vars(sys.modules["jax"])["__version__"]).items():
            if type(sys.modules.get(module)) is types.ModuleType:
                sys.modules[module].__class__ = _watched(module, names, self._note)
        watch = importlib.import_module("xmap_compat.core.watch")
        watch.watch_everywhere(watch.Watcher(constructed=self._xmapped))

    def _note(self, name: str, frame: types.FrameType) -> None:
        file = frame.f_code.co_filename
        if file.startswith((_OWN, "<frozen")) or _package_of(frame) == "jax":
            return
        if name.startswith(_RANDOM) and table.known(name) is None:
            self.random[file, frame.f_lineno] = None
        else:
            self.counts[file, frame.f_lineno, name] += 1

    def _xmapped(self, function: Any) -> Any:
        return _Xmapped(function, self._called)

    def _called(self, function: Any, frame: types.FrameType | None) -> None:
        """Note the transformation of JAX around a call, if it takes a gradient."""
        gradient = ""
        while frame is not None:
            outermost = frame.f_code.co_qualname.partition(".")[0]
            file = frame.f_code.co_filename
            if _package_of(frame) == "jax":
                gradient = outermost if outermost in _GRADIENTS else gradient
            elif gradient and not file.startswith(_OWN) and not _is_installed(file):
                name = getattr(function, "__name__", "function")
                self.gradients[file, frame.f_lineno, f"jax.{gradient}", name] = None
                return
            frame = frame.f_back

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

    # ---- at its end

    def lines(self) -> list[str]:
        sections: dict[str, list[str]] = {"": [], _OF_PACKAGES: [], _DIFFERS: []}
        for (file, line, name), count in sorted(self.counts.items()):
            gone = table.known(name)
            where = self._where(file, line)
            times = f" ({count} lookups)" if count > 1 else ""
            if gone is None:
                sections[_DIFFERS].append(f"{where}: {name}")
            else:
                head = _OF_PACKAGES if _is_installed(file) else ""
                sections[head].append(f"{where}: {name}{times}: {gone.remedy}")
        sections[_DIFFERS] += [*self._gradient_lines(), *self._random_lines()]
        count = len(sections[""])
        places = "1 place" if count == 1 else f"{count} places"
        looked = f"{places} looked up names" if count else "the program looked up no name"
        shown = [f"xmap_compat check: {looked} that JAX removed", *sections.pop("")]
        for head, lines in sections.items():
            if lines:
                shown += ["", head, *lines]
        return shown

    def _gradient_lines(self) -> Iterator[str]:
        for file, line, gradient, name in sorted(self.gradients):
            yield _GRADIENT.format(self._where(file, line), gradient, name)

    def _random_lines(self) -> Iterator[str]:
        jax: Any = sys.modules.get("jax")
        if self.random and jax.config.jax_threefry_partitionable:
            own = [place for place in self.random if not _is_installed(place[0])]
            first, *_ = own or self.random
            yield _OLD_RANDOM.format(self._where(*first))

    def _where(self, file: str, line: int) -> str:
        if self._notebook is not None and file == str(self._notebook.path):
            number, own = self._notebook.where(line)
            return f"{file}:cell {number}:{own}"
        shown = os.path.relpath(file) if file.startswith(os.getcwd()) else file
        return f"{shown}:{line}"


class _Xmapped:
    """An xmapped function that tells of its calls, and is one for all who ask."""

    def __init__(self, function: Any, called: Callable[[Any, types.FrameType], None]):
        self._function = function
        self._told = called
        functools.update_wrapper(self, function, updated=())
        self.__wrapped__ = function.__wrapped__

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._told(self._function, sys._getframe(1))
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __repr__(self) -> str:
        return repr(self._function)


def _lost_names(jax: str) -> dict[str, set[str]]:
    """For each module of JAX the names that it lost; and what draws random numbers."""
    lost: dict[str, set[str]] = defaultdict(set)
    for name, gone in {**table.NAMES, **table.MODULES}.items():
        if table.release(gone.until) < table.release(jax):
            module, _, last = name.rpartition(".")
            lost[module].add(last)
    for old, now in table.MOVED.items():
        lost[old].update(dir(sys.modules.get(now, types)))
    for name, value in vars(sys.modules["jax.random"]).items():
        if callable(value) and not name.startswith("_") and name not in _SAME_RANDOM:
            lost["jax.random"].add(name)
    return lost


def _watched(
    module: str, names: set[str], note: Callable[[str, types.FrameType], None]
) -> type[types.ModuleType]:
    """The class of a module that tells who reads these names."""

    class Watched(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name in names:
                note(f"{module}.{name}", sys._getframe(1))
            return value

    return Watched


def _package_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_installed(file: str) -> bool:
    return any(part in file for part in _INSTALLED)


def main(args: Sequence[str]) -> int:
    """Run ``SCRIPT [ARGS...]``, ``-m MODULE [ARGS...]`` or a notebook; the exit code and errors are
    the program's.
    """
    notebook = read(Path(args[0])) if args[0].endswith(NOTEBOOK) else None
    lookups = _Lookups(notebook)
    import_hook.install_with_jax(lookups.watch)
    if sys.stderr.isatty():
        print(f"xmap_compat check: running {' '.join(args)}", file=sys.stderr)
    try:
        if notebook is None:
            runner.run_program(args)
        else:
            exec(compile(notebook.tree, str(notebook.path), "exec"), {"__name__": "__main__"})
    finally:
        sys.stdout.flush()
        print(*lookups.lines(), sep="\n")
    return 0
