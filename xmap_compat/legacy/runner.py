"""Run a program for ``python -m xmap_compat script.py``: in this process, in the place of the main
program.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def run_program(args: Sequence[str]) -> None:
    """Run ``SCRIPT [ARGS...]`` or ``-m MODULE [ARGS...]`` in this process, in the place of the main
    program.

    Its exceptions are raised, and shown at the end of the process with the traceback that plain
    Python shows.
    """
    if args[0] != "-m":
        sys.argv = list(args)
    try:
        if args[0] == "-m":
            sys.argv = ["-m", *args[2:]]
            _run_module(args[1])
        elif pkgutil.get_importer(args[0]) is not None:
            replace_first_path(os.path.abspath(args[0]))
            _run_module("__main__", alter_argv=False)
        else:
            replace_first_path(os.path.dirname(os.path.realpath(args[0])))
            _run_script(args[0])
    except SystemExit:
        raise
    except BaseException:
        _show_only_the_program(sys.excepthook)
        raise


def use_old_random() -> None:
    """Let the program, and processes that it starts, draw the random numbers of jax 0.4."""
    os.environ["JAX_THREEFRY_PARTITIONABLE"] = "0"  # JAX reads it at its import
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_threefry_partitionable", False)


def _run_script(script: str) -> None:
    path = os.path.join(os.getcwd(), script)  # as Python does it: absolute, not normalized
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    module = _new_main_module()
    module.__dict__.update(__file__=path, __cached__=None)
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def _run_module(name: str, alter_argv: bool = True) -> None:
    _new_main_module()
    # What the interpreter itself calls for -m and for directories.  The public functions of runpy
    # put the former main module back, while threads and exit handlers may still need the program's.
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _new_main_module() -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module
    return module


def replace_first_path(path: str) -> None:
    """Replace the entry that Python has put there for ``-m xmap_compat`` (the working directory) or
    for a command.
    """
    if not sys.flags.safe_path:
        sys.path[0] = path


def _show_only_the_program(hook: Callable[..., Any]) -> None:
    """Leave the frames up to those of this file out of the traceback that ends the process."""
    runners = (_run_script.__code__, _run_module.__code__)

    def show(kind, error, traceback):
        shown = traceback
        for entry in _entries(traceback):
            if entry.tb_frame.f_code in runners:
                shown = entry.tb_next
        error.__traceback__ = shown
        hook(kind, error, shown)

    sys.excepthook = show


def _entries(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
