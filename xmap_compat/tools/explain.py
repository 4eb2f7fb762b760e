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
import re
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from xmap_compat.legacy import runner
from xmap_compat.legacy.import_hook import install_with_jax
from xmap_compat.tools.programs import add_program, program_arguments

if TYPE_CHECKING:
    from xmap_compat.core.arguments import Declaration
    from xmap_compat.core.call import PlacedCall
    from xmap_compat.tools.plan import Plan

# What imports JAX is imported late, for a program may still set the variables that JAX reads.

ABOUT_MESH = (
    "the sizes of a mesh that you do not have, as x=64,y=64, for a program that plans, traces or "
    "lowers. Its first call with arrays fails, as no devices can run it: the plan of that call is "
    "the last one"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "one line for each call, without its plan"
    parser.add_argument("--brief", action="store_true", help=about)
    parser.add_argument("--mesh", metavar="SIZES", type=mesh_sizes, default={}, help=ABOUT_MESH)
    add_program(parser, "SCRIPT [ARGS...]")


def mesh_sizes(words: str) -> dict[str, int]:
    """``'x=64,y=64'`` as a dictionary."""
    sizes: dict[str, int] = {}
    for part in words.split(","):
        found = re.fullmatch(r"([^\W\d]\w*)=(0*[1-9]\d*)", part)
        if found is None or found[1] in sizes:
            raise argparse.ArgumentTypeError(
                f"it takes a name and a size for each axis, x=64,y=64, but got {words!r}"
            )
        sizes[found[1]] = int(found[2])
    return sizes


def main(options: argparse.Namespace) -> int | None:
    program = program_arguments(options)
    if not program:
        options.error("no program is given")
    if program[0] != "-m" and not os.path.exists(program[0]):
        options.error(f"no such file: {program[0]}")
    report = Report(sys.stdout, options.brief)  # the program may change its sys.stdout
    atexit.register(report.finish)
    install_with_jax(lambda: _begin(report, options.mesh))
    runner.run_program(program)
    return None


def _begin(report: Report, mesh: dict[str, int]) -> None:
    """Watch from now on, in all threads, until the process ends."""
    import jax

    from xmap_compat import _jax
    from xmap_compat.core import watch

    watch.watch_everywhere(watch.Watcher(traced=report.call))
    if mesh:
        _jax.enter_mesh(jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh)))


class Report:
    """Collects the plans of calls, and prints each distinct one at the end."""

    def __init__(self, out: TextIO, brief: bool = False):
        self._out = out
        self._brief = brief
        self._folder = os.getcwd() + os.sep
        self._lock = threading.Lock()
        # Rows of the table, and texts of plans.
        self._calls: dict[Any, tuple[list[str], str]] = {}

    def call(self, declared: Declaration, placed: PlacedCall, args: tuple[Any, ...]) -> None:
        """Note one call.  A failure here must not change the behaviour of the program."""
        from xmap_compat import _jax
        from xmap_compat.tools import plan

        if placed.nested:
            return  # a part of the program of the outer call
        where = _jax.where_now().removeprefix(self._folder)
        key: tuple[Any, str]
        try:
            found = plan.plan_of_call(declared, args, placed)
            key = found, str(placed.program.jaxpr)
            call = [declared.name, _assignment(found), where], str(found)
        except Exception as error:
            reason = f"{where}: no plan: {type(error).__name__}: {error}"
            key = reason, declared.name
            call = [declared.name, "", reason], ""
        with self._lock:
            self._calls.setdefault(key, call)

    def finish(self) -> None:
        """Print the calls at the end of the process."""
        # The pipe may be closed, or the program has closed its output.
        with contextlib.suppress(OSError, ValueError):
            print(*self._lines(), sep="\n", file=self._out, flush=True)

    def _lines(self) -> Iterator[str]:
        if not self._calls:
            yield "xmap_compat explain: no call of an xmapped function"
            return
        from xmap_compat.tools import text

        yield f"xmap_compat explain: {text.plural(len(self._calls), 'plan')}"
        rows: text.Rows = [("", "function", "assignment", "called at")]
        for number, (row, _) in enumerate(self._calls.values(), 1):
            rows.append((str(number), *row))
        yield from text.table(rows)
        for number, ((*_, where), plan) in enumerate(self._calls.values(), 1):
            if plan and not self._brief:
                rule = f"---- plan {number}, called at {where} "
                yield f"\n{rule.ljust(text.WIDTH, '-')}\n{plan}\n"


def _assignment(plan: Plan) -> str:
    """``batch: x, hidden: y+loop 4``"""
    split = []
    for axis in plan.axes:
        loops = [f"loop {length}" for length in axis.loop_sizes]
        resources = [*map(str, axis.mesh_axes), *loops]
        if resources:
            split.append(f"{axis.name}: {'+'.join(resources)}")
    return ", ".join(split) or "one device"
