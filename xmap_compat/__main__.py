"""Run a program as it ran when JAX had xmap, or ask something about one.

usage:
  python -m xmap_compat SCRIPT [ARGS...]      run a script under xmap_compat.install()
  python -m xmap_compat -m MODULE [ARGS...]   run a module under xmap_compat.install()
  python -m xmap_compat check PATH...         list the uses of what JAX removed with xmap
  python -m xmap_compat explain [--source DIR] SCRIPT [ARGS...]      (or -m MODULE)
                                              run a program, and print the plan of each of its calls
                                              of xmapped functions; write them for plain JAX to DIR

A program runs as it does without `-m xmap_compat`: with its sys.argv, sys.path, __main__ module,
tracebacks and exit code.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.abc
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# The subcommands: module and function, called with the arguments that follow; it returns the exit code.
COMMANDS = {
    "check": ("xmap_compat.check", "main"),
    "explain": ("xmap_compat.tools.explain", "main"),
}


def main(args: Sequence[str]) -> int | None:
    if args and args[0] in COMMANDS:
        module, function = COMMANDS[args[0]]
        return getattr(importlib.import_module(module), function)(args[1:])
    if args and args[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    unknown = bool(args) and args[0] != "-m" and args[0].startswith("-")
    if not args or unknown or list(args) == ["-m"]:
        print(__doc__, file=sys.stderr)
        return 2
    install_with_jax()
    run_program(args)
    return None


# -------------------------------------------------------------------- running a program


def run_program(args: Sequence[str]) -> None:
    """Run ``SCRIPT [ARGS...]`` or ``-m MODULE [ARGS...]`` in this process, in the place of the main program.

    Whatever it raises is raised, and shown at the end of the process with the traceback that plain Python shows.
    """
    if args[0] != "-m":
        sys.argv = list(args)
    try:
        if args[0] == "-m":
            sys.argv = ["-m", *args[2:]]
            _run_module(args[1])
        elif pkgutil.get_importer(args[0]) is not None:
            _replace_first_path(os.path.abspath(args[0]))
            _run_module("__main__", alter_argv=False)
        else:
            _replace_first_path(os.path.dirname(os.path.realpath(args[0])))
            _run_script(args[0])
    except SystemExit:
        raise
    except BaseException:
        _show_only_the_program(sys.excepthook)
        raise


def _run_script(script: str) -> None:
    path = os.path.join(os.getcwd(), script)  # as Python does it: absolute, not normalized
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    module = _new_main_module()
    module.__dict__.update(__file__=path, __cached__=None)
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def _run_module(name: str, alter_argv: bool = True) -> None:
    _new_main_module()
    # What the interpreter itself calls for -m and for directories; the public functions of runpy put the
    # former main module back while threads and exit handlers of the program may still need their own.
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _new_main_module() -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module
    return module


def _replace_first_path(path: str) -> None:
    """``sys.path[0]`` is the working directory, put there for ``-m xmap_compat``."""
    if not sys.flags.safe_path:
        sys.path[0] = path


def _show_only_the_program(hook: Callable[..., Any]) -> None:
    """Leave the frames up to those of this file out of the traceback that ends the process."""
    runners = (_run_script.__code__, _run_module.__code__)

    def show(kind, error, traceback):
        own = [entry for entry in _entries(traceback) if entry.tb_frame.f_code in runners]
        error.__traceback__ = own[-1].tb_next if own else traceback
        hook(kind, error, error.__traceback__)

    sys.excepthook = show


def _entries(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


# ------------------------------------------------------------------ installing, not too early


def install_with_jax(then: Callable[[], None] | None = None) -> None:
    """Call ``install()``, and ``then``, as soon as the program has imported JAX; now, if JAX is imported already.

    JAX reads environment variables (``JAX_PLATFORMS``, ``JAX_ENABLE_X64``, ...) when it is imported, and programs
    set them before.  Processes that the program spawns do the same.
    """
    _after_import("jax", lambda: _install(then))
    _after_import(SPAWN, _tell_children)


def uninstall_with_jax() -> None:
    """Undo ``install_with_jax()``, whether JAX has been imported or not."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    _tell_children_no_more()
    if "xmap_compat.legacy" in sys.modules:
        sys.modules["xmap_compat.legacy"].uninstall()


def _install(then: Callable[[], None] | None) -> None:
    # A module of this package may be what is importing JAX: it is imported again, as a whole, and what is left of
    # its first import comes to nothing.
    unfinished = [name for name, module in sys.modules.items() if name.startswith("xmap_compat.") and _begun(module)]
    for name in unfinished:
        del sys.modules[name]
    importlib.import_module("xmap_compat.legacy").install()
    if then is not None:
        then()
    for name in unfinished:
        importlib.import_module(name)


def _begun(module: types.ModuleType) -> bool:
    """Whether the import of a module has begun and not ended."""
    return getattr(module.__spec__, "_initializing", False)


def _after_import(name: str, then: Callable[[], None]) -> None:
    if name in sys.modules:
        then()
    elif not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module as the other finders do, and calls a function after its import (programs may also only look)."""

    def __init__(self, name: str, then: Callable[[], None]):
        self.name, self.then = name, then

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            self._call_after(spec.loader)
        return spec

    def _call_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module):
            del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.then()

        loader.exec_module = exec_module


# ------------------------------------------------------------------------- processes it spawns

SPAWN = "multiprocessing.spawn"


class _InstallWithJax:
    """Unpickled by a child, it installs there.  (This module may be ``__main__`` here: the child must find it.)"""

    def __reduce__(self):
        return importlib.import_module(f"{__package__}.__main__").install_with_jax, ()


def _tell_children() -> None:
    """A spawned process imports the main module again, after it has unpickled what it is told to prepare."""
    spawn = sys.modules[SPAWN]
    prepare = spawn.get_preparation_data  # type: ignore[attr-defined]
    if hasattr(prepare, "without_xmap_compat"):
        return

    @functools.wraps(prepare)
    def get_preparation_data(name):
        return {**prepare(name), "xmap_compat": _InstallWithJax()}

    get_preparation_data.without_xmap_compat = prepare  # type: ignore[attr-defined]
    spawn.get_preparation_data = get_preparation_data  # type: ignore[attr-defined]


def _tell_children_no_more() -> None:
    spawn: Any = sys.modules.get(SPAWN)
    if hasattr(getattr(spawn, "get_preparation_data", None), "without_xmap_compat"):
        spawn.get_preparation_data = spawn.get_preparation_data.without_xmap_compat


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
