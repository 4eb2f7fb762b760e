"""A run of the program in a copy of its folders, in the place of the main program."""

from __future__ import annotations

import os
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
    ended = ""
    code: Any = 0
    try:
        runner.run_program(task["program"])
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
    except SystemExit as error:
        code = error.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
        if code:
            ended = f"exit code {code}"
    except BaseException as error:
        sys.excepthook(*sys.exc_info())  # which shows only the program
        ended = type(error).__name__
        code = 1
    finish(ended)
    sys.exit(code)


def moved(folders: Mapping[str, str], path: str) -> str:
    """A path in the copy, for a path below a folder that is copied."""
    for folder, copy in folders.items():
        if path == folder or path.startswith(os.path.join(folder, "")):
            return copy + path[len(folder) :]
    return path
