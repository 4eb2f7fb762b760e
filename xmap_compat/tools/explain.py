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
import dataclasses
import importlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, TextIO

from xmap_compat.legacy import runner
from xmap_compat.legacy.import_hook import install_with_jax
from xmap_compat.tools.programs import add_program, program_of

if TYPE_CHECKING:
    from xmap_compat.core.call import Declaration, PlacedCall
    from xmap_compat.tools.plan import CallPlan

ABOUT_MESH = """the sizes of a mesh that you do not have, as x=64,y=64, for a program that plans, traces or lowers. Its
first call with arrays fails, as no devices can run it: the plan of that call is the last one"""
WRONG_MESH = "--mesh takes a name and a size for each axis, x=64,y=64, but got {!r}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--brief", action="store_true", help="one line for each call, without its plan"
    )
    parser.add_argument("--mesh", metavar="SIZES", help=ABOUT_MESH)
    add_program(parser, "SCRIPT [ARGS...]")


def main(options: argparse.Namespace) -> int | None:
    program, mesh = program_of(options), _mesh_sizes(options.mesh)
    if not program or mesh == {}:
        options.error(WRONG_MESH.format(options.mesh) if mesh == {} else "no program is given")
    report = Report(sys.stdout, options.brief, mesh)  # the program may change its sys.stdout
    atexit.register(report.finish)
    install_with_jax(report.begin)
    runner.run_program(program)
    return None


def _mesh_sizes(text: str | None) -> dict[str, int] | None:
    """``'x=64,y=64'`` as a dictionary; empty if the text has another form, None if the option is
    missing.
    """
    if text is None:
        return None
    axes = [part.partition("=") for part in text.split(",")]
    right = all(name.isidentifier() and size.isdecimal() and int(size) for name, _, size in axes)
    return (
        {name: int(size) for name, _, size in axes}
        if right and len({a[0] for a in axes}) == len(axes)
        else {}
    )


@dataclasses.dataclass(frozen=True)
class _Seen:
    """A call: its position, function and assignment, the text of its plan, or why it has none."""

    where: str
    function: str
    assignment: str
    plan: str
    failed: str = ""


class Report:
    """Collects the plans of all calls that are traced while it watches, and prints each distinct
    one once at the end.

    Args:
      out: where to print.
      brief: whether to print one line for each call only.
      mesh: the axis sizes of the mesh to put in scope.
    """

    def __init__(self, out: TextIO, brief: bool = False, mesh: dict[str, int] | None = None):
        self.out, self.brief, self.mesh, self.folder = out, brief, mesh, os.getcwd() + os.sep
        self._lock = threading.Lock()
        self._seen: set[Any] = set()
        self._calls: list[_Seen] = []

    def begin(self) -> None:
        """Watch from now on, in all threads, until the process ends."""
        watch = importlib.import_module("xmap_compat.core.watch")
        watch.watch_everywhere(watch.Watcher(traced=self.call))
        if self.mesh:
            axes = importlib.import_module("jax").sharding.AbstractMesh(
                (*self.mesh.values(),), (*self.mesh,)
            )
            importlib.import_module("xmap_compat._jax").enter_mesh(axes)

    def call(self, declared: Declaration, made: PlacedCall, args: tuple[Any, ...]) -> None:
        """Note one call.  A failure here must not change the behaviour of the program."""
        if made.nested:
            return  # a part of the program of the outer call
        where = importlib.import_module("xmap_compat._jax").where_now()
        try:
            plan = importlib.import_module("xmap_compat.tools.plan").describe_made(
                declared, made, args
            )
            key = plan, str(made.program.jaxpr)
            with self._lock:
                if key not in self._seen:
                    self._seen.add(key)
                    text = "" if self.brief else str(plan)
                    self._calls.append(_Seen(where, declared.name, _assignment(plan), text))
        except Exception as error:
            with self._lock:
                failed = f": no plan: {type(error).__name__}: {error}"
                self._calls.append(_Seen(where, declared.name, "", "", failed))

    def finish(self) -> None:
        """Print the calls at the end of the process."""
        with self._lock:
            failed = sum(bool(call.failed) for call in self._calls)
            count = len(self._calls) - failed
            plans = (
                f"{count} plan{'s' if count != 1 else ''}"
                if self._calls
                else "no call of an xmapped function"
            )
            more = f", {failed} call(s) without a plan" if failed else ""
            self._print(f"xmap_compat explain: {plans}{more}")
            if self._calls:
                text = importlib.import_module("xmap_compat.tools.text")
                rows = [("", "function", "assignment", "called at")]
                for k, call in enumerate(self._calls, 1):
                    where = call.where.removeprefix(self.folder) + call.failed
                    rows.append((str(k), call.function, call.assignment, where))
                self._print("\n".join(text.table(rows)))
            for k, call in enumerate(self._calls, 1):
                if call.plan:
                    rule = f"---- plan {k}, called at {call.where.removeprefix(self.folder)} "
                    self._print(f"\n{rule.ljust(text.WIDTH, '-')}\n{call.plan}\n")

    def _print(self, text: str) -> None:
        with contextlib.suppress(
            OSError, ValueError
        ):  # the pipe is closed, or the program has closed its output
            print(text, file=self.out, flush=True)


def _assignment(plan: CallPlan) -> str:
    """``batch: x, hidden: y+loop 4``"""
    loops = lambda a: [f"loop {n}" for n in a.loop_sizes]  # noqa: E731
    split = [
        (a.name, [*map(str, a.mesh_axes), *loops(a)])
        for a in plan.axes
        if a.mesh_axes or a.loop_sizes
    ]
    return ", ".join(f"{name}: {'+'.join(resources)}" for name, resources in split) or "one device"
