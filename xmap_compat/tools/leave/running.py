"""A run of the program in a copy of its folders, in the place of the main program."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from xmap_compat.legacy import runner


def run(task: Mapping[str, Any], finish: Callable[[str], None]) -> None:
    """Run the program, call ``finish`` with the type of the error that ended it, and exit as it
    does.
    """
    os.chdir(task["cwd"])
    if not sys.flags.safe_path:
        sys.path[0] = task["cwd"]
    sys.path[:] = [moved(task["folders"], path) for path in sys.path]
    sys.addaudithook(functools.partial(copy_before_writing, task["tree"]))
    ended, code = _run(task["program"])
    finish(ended)
    sys.exit(code)


def _run(program: list[str]) -> tuple[str, int]:
    """Run the program; the type of the error that ended it, or "", and its exit code."""
    try:
        runner.run_program(program)
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
        return f"exit code {code}" if code else "", code
    except BaseException as error:
        sys.excepthook(*sys.exc_info())  # which shows only the program
        return type(error).__name__, 1
    return "", 0


def moved(folders: Mapping[str, str], path: str) -> str:
    """A path in the copy, for a path below a folder that is copied."""
    for folder, copy in folders.items():
        if path == folder or path.startswith(os.path.join(folder, "")):
            return copy + path[len(folder) :]
    return path


def copy_before_writing(tree: str, event: str, args: tuple[Any, ...]) -> None:
    """Large files of the copy are links to the user's: one that is opened to be written becomes a
    copy first.
    """
    if event != "open" or not isinstance(args[0], (str, bytes)) or not isinstance(args[2], int):
        return
    path = os.path.abspath(os.fsdecode(args[0]))
    writes = args[2] & (os.O_WRONLY | os.O_RDWR)
    if writes and path.startswith(tree) and os.path.islink(path):
        original = os.path.realpath(path)
        os.unlink(path)
        shutil.copyfile(original, path)
