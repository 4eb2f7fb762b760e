"""``python -m xmap_compat explain``: run a program, then list its distinct calls of xmapped
functions with plans.

A call is listed when JAX traces it: once for each function, specification, argument types and mesh.
Its plan is read from the program that was traced for the call, so the functions of the program run
no more often than they do without this command.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, TextIO

from xmap_compat.legacy import runner
from xmap_compat.legacy.import_hook import install_with_jax
from xmap_compat.tools.programs import add_program, program_arguments

if TYPE_CHECKING:
    from xmap_compat.core.arguments import Declaration
    from xmap_compat.core.call import PlacedCall

# What imports JAX is imported late, for a program may still set the variables that JAX reads.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_program(parser, "SCRIPT [ARGS...]")


def main(options: argparse.Namespace) -> int | None:
    program = program_arguments(options)
    if not program:
        options.error("no program is given")
    if program[0].endswith(".ipynb"):
        options.error(f"{program[0]} is a notebook: write the cells into a script")
    if program[0] != "-m" and not os.path.exists(program[0]):
        options.error(f"no such file: {program[0]}")
    report = Report(sys.stdout)  # the program may change its sys.stdout
    atexit.register(report.finish)
    install_with_jax(lambda: _begin(report))
    runner.run_program(program)
    return None


def _begin(report: Report) -> None:
    """Watch from now on, in all threads, until the process ends."""
    from xmap_compat.core import watch

    watch.watch_everywhere(watch.Watcher(traced=report.call))


class Report:
    """Collects the plans of calls, and prints each distinct one at the end."""

    def __init__(self, out: TextIO):
        self._out = out
        self._folder = os.getcwd() + os.sep
        self._lock = threading.Lock()
        # For each distinct call where it is first, and its plan.
        self._calls: dict[Any, tuple[str, Any]] = {}

    def call(self, declared: Declaration, placed: PlacedCall, args: tuple[Any, ...]) -> None:
        """Note one call.  A failure here must not change the behaviour of the program."""
        from xmap_compat import _jax
        from xmap_compat.tools import plan

        if placed.nested:
            return  # a part of the program of the outer call
        where = _jax.where_now().removeprefix(self._folder)
        try:
            found: Any = plan.plan_of_call(declared, args, placed)
            key = found, str(placed.program.jaxpr)
        except Exception as error:
            found = f"no plan of {declared.name}: {type(error).__name__}: {error}"
            key = found, where
        with self._lock:
            self._calls.setdefault(key, (where, found))

    def finish(self) -> None:
        """Print the calls at the end of the process."""
        count = len(self._calls)
        lines = [f"xmap_compat explain: distinct calls of xmapped functions: {count}"]
        for number, (where, plan) in enumerate(self._calls.values(), 1):
            lines.append(f"\n---- {number}, called at {where}\n{plan}\n")
        # The pipe may be closed, or the program has closed its output.
        with contextlib.suppress(OSError, ValueError):
            print(*lines, sep="\n", file=self._out, flush=True)
