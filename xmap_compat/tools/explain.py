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
from xmap_compat.tools.programs import add_program, program_of

if TYPE_CHECKING:
    from xmap_compat.core.call import Declaration, PlacedCall
    from xmap_compat.tools.plan import Plan

# What imports JAX is imported late, for a program may still set the variables that JAX reads.

ABOUT_MESH = """the sizes of a mesh that you do not have, as x=64,y=64, for a program that plans, traces or lowers. Its
first call with arrays fails, as no devices can run it: the plan of that call is the last one"""
WRONG_MESH = "--mesh takes a name and a size for each axis, x=64,y=64, but got {!r}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "one line for each call, without its plan"
    parser.add_argument("--brief", action="store_true", help=about)
    parser.add_argument("--mesh", metavar="SIZES", help=ABOUT_MESH)
    add_program(parser, "SCRIPT [ARGS...]")


def main(options: argparse.Namespace) -> int | None:
    program = program_of(options)
    if not program:
        options.error("no program is given")
    if program[0] != "-m" and not os.path.exists(program[0]):
        options.error(f"no such file: {program[0]}")
    mesh = None
    if options.mesh is not None:
        mesh = _mesh_sizes(options.mesh)
        if mesh is None:
            options.error(WRONG_MESH.format(options.mesh))
    report = Report(sys.stdout, options.brief)  # the program may change its sys.stdout
    atexit.register(report.finish)
    install_with_jax(lambda: _begin(report, mesh))
    runner.run_program(program)
    return None


def _mesh_sizes(words: str) -> dict[str, int] | None:
    """``'x=64,y=64'`` as a dictionary; None if the text has another form."""
    sizes: dict[str, int] = {}
    for part in words.split(","):
        name, _, size = part.partition("=")
        is_size = size.isdecimal() and int(size) > 0
        if not name.isidentifier() or not is_size or name in sizes:
            return None
        sizes[name] = int(size)
    return sizes


def _begin(report: Report, mesh: dict[str, int] | None) -> None:
    """Watch from now on, in all threads, until the process ends."""
    import jax

    from xmap_compat import _jax
    from xmap_compat.core import watch

    watch.watch_everywhere(watch.Watcher(traced=report.call))
    if mesh is not None:
        sizes = tuple(mesh.values())
        _jax.enter_mesh(jax.sharding.AbstractMesh(sizes, tuple(mesh)))


class Report:
    """Collects the plans of calls, and prints each distinct one at the end."""

    def __init__(self, out: TextIO, brief: bool = False):
        self._out = out
        self._brief = brief
        self._folder = os.getcwd() + os.sep
        self._lock = threading.Lock()
        self._calls: dict[Any, tuple[str, str, str, str]] = {}

    def call(self, declared: Declaration, placed: PlacedCall, args: tuple[Any, ...]) -> None:
        """Note one call.  A failure here must not change the behaviour of the program."""
        from xmap_compat import _jax
        from xmap_compat.tools import plan

        if placed.nested:
            return  # a part of the program of the outer call
        where = _jax.where_now().removeprefix(self._folder)
        try:
            found = plan.plan_of_call(declared, args, placed)
            key: Any = found, str(placed.program.jaxpr)
            row = declared.name, _assignment(found), where, str(found)
        except Exception as error:
            key = object()
            reason = f"no plan: {type(error).__name__}: {error}"
            row = declared.name, "", f"{where}: {reason}", ""
        with self._lock:
            self._calls.setdefault(key, row)

    def finish(self) -> None:
        """Print the calls at the end of the process."""
        calls = list(self._calls.values())
        failed = [plan for *_, plan in calls].count("")
        title = "no call of an xmapped function"
        if calls:
            count = len(calls) - failed
            title = "1 plan" if count == 1 else f"{count} plans"
        if failed:
            title += f", {failed} call(s) without a plan"
        # The pipe may be closed, or the program has closed its output.
        with contextlib.suppress(OSError, ValueError):
            print(f"xmap_compat explain: {title}", file=self._out, flush=True)
            self._print(calls)

    def _print(self, calls: list[tuple[str, str, str, str]]) -> None:
        from xmap_compat.tools import text

        if not calls:
            return
        rows: text.Rows = [("", "function", "assignment", "called at")]
        for number, (function, assignment, where, _) in enumerate(calls, 1):
            rows.append((str(number), function, assignment, where))
        print(*text.table(rows), sep="\n", file=self._out, flush=True)
        for number, (*_, where, plan) in enumerate(calls, 1):
            if plan and not self._brief:
                rule = f"---- plan {number}, called at {where} ".ljust(text.WIDTH, "-")
                print(f"\n{rule}\n{plan}\n", file=self._out, flush=True)


def _assignment(plan: Plan) -> str:
    """``batch: x, hidden: y+loop 4``"""
    split = []
    for axis in plan.axes:
        loops = [f"loop {length}" for length in axis.loop_sizes]
        resources = [*map(str, axis.mesh_axes), *loops]
        if resources:
            split.append(f"{axis.name}: {'+'.join(resources)}")
    return ", ".join(split) or "one device"
