"""``python -m xmap_compat explain``: run a program and print the plan of each distinct call of an xmapped function.

A call is seen when it is traced, which is once for each function, specification, argument types and mesh;
its plan is read off the program that was traced for the call, so that the functions of the program run no more
often than they do without this.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib
import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from xmap_compat.legacy.import_hook import install_with_jax
from xmap_compat.legacy.runner import run_program

if TYPE_CHECKING:
    from xmap_compat.core.call import Declaration, PlacedCall
    from xmap_compat.tools.plan import CallPlan

USAGE = """usage: python -m xmap_compat explain [--source DIR] SCRIPT [ARGS...]
       python -m xmap_compat explain [--source DIR] -m MODULE [ARGS...]"""


def main(args: Sequence[str]) -> int | None:
    rest = list(args)
    directory = _take_option(rest, "--source")
    if directory == "" or not rest or rest == ["-m"] or (rest[0].startswith("-") and rest[0] != "-m"):
        print(USAGE, file=sys.stderr)
        return 2
    # The program may change directory, and what its own sys.stdout is.
    report = Report(sys.stdout, directory and os.path.abspath(directory))
    atexit.register(report.summarize)
    install_with_jax(report.begin)
    run_program(rest)
    return None


def _take_option(args: list[str], option: str) -> str | None:
    """The value of an option that stands first, which is removed: ``--source DIR`` or ``--source=DIR``; "" if none."""
    if args and args[0] == option:
        value = args[1] if len(args) > 1 else ""
        del args[:2]
        return value
    if args and args[0].startswith(f"{option}="):
        return args.pop(0).removeprefix(f"{option}=")
    return None


class Report:
    """Prints the plan of every call that is traced while it watches, equal ones once.

    Args:
      out: where to print.
      directory: where to write the program of each plan for plain JAX; None for nowhere.
    """

    def __init__(self, out: TextIO, directory: str | None = None):
        self.out = out
        self.directory = directory
        self._lock = threading.Lock()
        self._seen: set[Any] = set()
        self._files: set[str] = set()
        self._failed = 0

    def begin(self) -> None:
        """Watch from now on, in all threads, until the process ends."""
        importlib.import_module("xmap_compat.api").observe(self.call)

    def call(self, declared: Declaration, made: PlacedCall, args: tuple[Any, ...]) -> None:
        """Report one call.  Nothing that goes wrong here may change what the program does."""
        if made.nested:
            return  # a part of the program of the outer call
        where = importlib.import_module("xmap_compat._jax").where_now()
        try:
            plan = importlib.import_module("xmap_compat.tools.plan").describe_made(declared, made, args)
            # What the plan was read from may hold tracers, which must not outlive their trace.
            key = dataclasses.replace(plan, staged=None)
            with self._lock:
                if key in self._seen:
                    return
                self._seen.add(key)
                self._print(_titled(f"plan {len(self._seen)}, called at {where}", str(plan)))
                if self.directory is not None:
                    self._print(self._written(plan) + "\n")
        except Exception as error:
            with self._lock:
                self._failed += 1
                self._print(f"no plan of {declared.name}, called at {where}: {type(error).__name__}: {error}\n")

    def _written(self, plan: CallPlan) -> str:
        """Write the modern program of a plan; a line that says where, or why not."""
        assert self.directory is not None
        source = importlib.import_module("xmap_compat.tools.source")
        try:
            text, values = source.written(plan)
        except Exception as error:
            return f"no source: {error}"
        name = source.entry_name(plan).removeprefix("mapped_")
        variants = (f"{name}_{k}.py" if k else f"{name}.py" for k in (0, *range(2, 10**6)))
        file = next(f for f in variants if f not in self._files)
        self._files.add(file)
        os.makedirs(self.directory, exist_ok=True)
        path = os.path.join(self.directory, file)
        with open(path, "w", encoding="utf-8") as target:
            target.write(text)
        missing = f"; assign its arrays {', '.join(values)} before it is used" if values else ""
        return f"source: {path}{missing}"

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the pipe is closed, or the program has closed its output
            print(text, file=self.out, flush=True)

    def summarize(self) -> None:
        """Print one line at the end of the process."""
        count = len(self._seen)
        plans = f"{count} plan{'s' if count != 1 else ''}" if count else "no call of an xmapped function"
        failed = f", {self._failed} call(s) without a plan" if self._failed else ""
        written = f", {len(self._files)} written to {self.directory}" if self._files else ""
        self._print(f"xmap_compat explain: {plans}{failed}{written}")


def _titled(title: str, text: str) -> str:
    """A text under a rule with a title."""
    width = importlib.import_module("xmap_compat.tools.text").terminal_width()
    return f"---- {title} ".ljust(width, "-") + f"\n{text}\n"
