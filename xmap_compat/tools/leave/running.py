"""A run of the program in a copy of its folders, in the place of the main program."""

from __future__ import annotations

import _thread
import functools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from xmap_compat.legacy import runner


class Stop(BaseException):
    """Ends a program early, as it ended in the first run (``--stop-after``)."""


def run(spec: Mapping[str, Any], finish: Callable[[str], None]) -> None:
    """Run the program, and exit as it does; ``finish`` is told how it ended."""
    os.chdir(spec["cwd"])
    if not sys.flags.safe_path:
        sys.path[0] = spec["cwd"]
    sys.path[:] = [moved(spec["folders"], path) for path in sys.path]
    sys.addaudithook(functools.partial(copy_before_writing, spec["tree"]))
    stopped = threading.Event()

    def stop():
        stopped.set()
        _thread.interrupt_main()

    timer = threading.Timer(spec["seconds"], stop)
    timer.daemon = True
    if spec["seconds"]:
        timer.start()
    ended, code = _ended(spec["program"], stopped)
    timer.cancel()
    if stopped.is_set():  # the program may have seen KeyboardInterrupt, and ended by itself
        ended, code = "stopped", 0
    finish(ended)
    sys.exit(code)


def _ended(program: list[str], stopped: threading.Event) -> tuple[str, int]:
    """Run the program; how it ended, and its exit code."""
    try:
        runner.run_program(program)
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
    except Stop:
        stopped.set()
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        if error.code:
            return f"SystemExit: {error.code}", error.code if isinstance(error.code, int) else 1
    except KeyboardInterrupt:
        return "KeyboardInterrupt", 130
    except BaseException as error:
        sys.excepthook(*sys.exc_info())  # which shows only the program
        return f"{type(error).__name__}: {error}", 1
    return "", 0


def tell(spec: Mapping[str, Any], seen: str) -> None:
    """Note for who looks on what a run has seen."""
    with open(spec["status"], "w", encoding="utf-8") as file:
        file.write(seen)


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
