"""``python -m xmap_compat explain``: run a program, then list its distinct calls of xmapped functions with plans.

A call is listed when JAX traces it: once for each function, specification, argument types and mesh.  Its plan is
read from the program that was traced for the call, so the functions of the program run no more often than they do
without this command.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from xmap_compat.legacy.import_hook import install_with_jax
from xmap_compat.legacy.runner import run_program
from xmap_compat.tools.shown import view

if TYPE_CHECKING:
    from xmap_compat.core.call import Declaration, PlacedCall
    from xmap_compat.tools.plan import CallPlan
    from xmap_compat.tools.source import Merged

USAGE = """usage: python -m xmap_compat explain [--brief] [--source DIR] [--mesh SIZES] SCRIPT [ARGS...]
       python -m xmap_compat explain [--brief] [--source DIR] [--mesh SIZES] -m MODULE [ARGS...]
SIZES are those of a mesh that you do not have, as x=64,y=64, for a program that plans, traces or lowers.  Its first
call with arrays fails, as no devices can run it: the plan of that call is the last one."""


def main(args: Sequence[str]) -> int | None:
    rest = list(args)
    brief, directory, sizes = _take_options(rest)
    mesh = _mesh_sizes(sizes)
    if directory == "" or mesh == {} or not rest or rest == ["-m"] or (rest[0].startswith("-") and rest[0] != "-m"):
        seen = "no DIR is given" if directory == "" else f"unknown option: {rest[0]}" if rest and rest != ["-m"] else ""
        seen = f"--mesh takes a name and a size for each axis, x=64,y=64, but got {sizes!r}" if mesh == {} else seen
        print(seen or "no program is given", USAGE, sep="\n", file=sys.stderr)
        return 2
    program = os.path.splitext(os.path.basename(rest[0]))[0] if rest[0] != "-m" else rest[1]
    # The program may change its working directory and its sys.stdout.
    report = Report(sys.stdout, directory and os.path.abspath(directory), program.replace(".", "_"), brief, mesh)
    atexit.register(report.finish)
    install_with_jax(report.begin)
    run_program(rest)
    return None


def _take_options(args: list[str]) -> tuple[bool, str | None, str | None]:
    """Remove the options at the start, and return them: ``--brief``, ``--source DIR``, ``--mesh SIZES``."""
    brief, values = False, dict.fromkeys(("--source", "--mesh"))
    while args and (args[0] == "--brief" or args[0].partition("=")[0] in values):
        option, given, value = args.pop(0).partition("=")
        if option == "--brief":
            brief = True
        else:
            values[option] = value if given else args.pop(0) if args else ""
    return brief, values["--source"], values["--mesh"]


def _mesh_sizes(text: str | None) -> dict[str, int] | None:
    """``'x=64,y=64'`` as a dictionary; empty if the text has another form, None if the option is missing."""
    if text is None:
        return None
    axes = [part.partition("=") for part in text.split(",")]
    right = all(name.isidentifier() and size.isdecimal() and int(size) for name, _, size in axes)
    return {name: int(size) for name, _, size in axes} if right and len({a[0] for a in axes}) == len(axes) else {}


@dataclasses.dataclass(frozen=True)
class _Seen:
    """A call: its position, function and assignment, the text of its plan, and its source or the reason for none."""

    where: str
    function: str
    assignment: str
    plan: str
    written: str
    module: Any = None  # as it was written
    original: Any = None  # what runs beside it, or why nothing can


class Report:
    """Collects the plans of all calls that are traced while it watches, and prints each distinct one once at the end.

    Args:
      out: where to print.
      directory: where to write the programs for plain JAX; None for nowhere.
      program: the name of the program; the written files are named after it.
      brief: whether to print one line for each call only.
      mesh: the axis sizes of the mesh to put in scope.
    """

    def __init__(
        self,
        out: TextIO,
        directory: str | None = None,
        program: str = "program",
        brief: bool = False,
        mesh: dict[str, int] | None = None,
    ):
        self.out, self.directory, self.program, self.brief, self.mesh = out, directory, program, brief, mesh
        self._lock = threading.Lock()
        self._seen: set[Any] = set()
        self._calls: list[_Seen] = []

    def begin(self) -> None:
        """Watch from now on, in all threads, until the process ends."""
        importlib.import_module("xmap_compat.api").observe(self.call)
        if self.mesh:
            axes = importlib.import_module("jax").sharding.AbstractMesh((*self.mesh.values(),), (*self.mesh,))
            importlib.import_module("xmap_compat._jax").enter_mesh(axes)

    def call(self, declared: Declaration, made: PlacedCall, args: tuple[Any, ...]) -> None:
        """Note one call.  A failure here must not change the behaviour of the program."""
        if made.nested:
            return  # a part of the program of the outer call
        where = importlib.import_module("xmap_compat._jax").where_now()
        try:
            plan = view("plan").describe_made(declared, made, args)
            # The staged program of the plan may hold tracers, which must not outlive their trace.
            key = dataclasses.replace(plan, staged=None), tuple(plan.staged.configuration.items())
            with self._lock:
                if key not in self._seen:
                    self._seen.add(key)
                    text = "" if self.brief else str(plan)
                    self._calls.append(_Seen(where, declared.name, _assignment(plan), text, *self._written(plan)))
        except Exception as error:
            with self._lock:
                self._calls.append(_Seen(where, declared.name, "", "", f"no plan: {type(error).__name__}: {error}"))

    def _written(self, plan: CallPlan) -> tuple[Any, ...]:
        """The program of a plan for plain JAX, or the reason why there is none."""
        if self.directory is None:
            return ("",)
        source = view("source")
        try:
            found = source.written(plan)
        except Exception as error:
            return (f"refused: {str(error).partition(chr(10) + '- ')[2] or error}",)
        return "", found, source.exported(plan)

    def finish(self) -> None:
        """Print the calls and write the programs, at the end of the process."""
        with self._lock:
            files = self._write()
            calls = [call for call in self._calls if not call.written.startswith("no plan")]
            plans = f"{len(calls)} plan{'s' if len(calls) != 1 else ''}" if self._calls else ""
            failed = len(self._calls) - len(calls)
            words = [plans or "no call of an xmapped function"]
            words += [f"{failed} call(s) without a plan"] if failed else []
            if files:
                count = sum(call.module is not None for call in self._calls)
                words.append(f"{count} written to {', '.join(files)}")
            self._print(f"xmap_compat explain: {', '.join(words)}")
            if self._calls:
                rows = [("", "function", "assignment", "called at", *(["written as"] if self.directory else []))]
                for k, call in enumerate(self._calls, 1):
                    last = [call.where, *filter(None, [call.written])]
                    last = last if self.directory else [": ".join(last)]
                    rows.append((str(k), call.function, call.assignment, *last))
                self._print("\n".join(view("text").table(rows)))
            for k, call in enumerate(self._calls, 1):
                if call.plan:
                    rule = f"---- plan {k}, called at {call.where} ".ljust(view("text").terminal_width(), "-")
                    self._print(f"\n{rule}\n{call.plan}\n")

    def _write(self) -> list[str]:
        """Write the generated modules, as one if possible, and return their paths.  Note the name of each call.

        Each function runs beside the original in a process of its own.  Those that differ are refused.
        """
        while True:
            modules: list[tuple[Merged, dict[int, str]]] = []
            for k, call in enumerate(self._calls):
                if call.module is not None:
                    self._add(k, call, modules)
            paths = [self._save(merged, self._file(n)) for n, (merged, _) in enumerate(modules)]
            found = [row for path, (_, names) in zip(paths, modules) for row in self._run(path, names)]
            wrong = [(k, ran, why) for k, (ran, why) in found if why]
            for k, ran, why in wrong:
                reason = f"refused: {view('source').OTHER_NUMBERS}: {why}"
                changes = {"module": None, "written": reason} if ran else {"original": why}
                self._calls[k] = dataclasses.replace(self._calls[k], **changes)
            if not wrong:
                return paths
            list(map(os.remove, paths))

    def _add(self, k: int, call: _Seen, modules: list[tuple[Merged, dict[int, str]]]) -> None:
        """Add a call to the first module that can hold it, and its name there to the names of that module."""
        about = f"{call.function}, called at {os.path.basename(call.where)}"
        about += f": traced and compared, not run: {call.original}" if isinstance(call.original, str) else ""
        text, entry, values, _ = call.module
        for n in range(len(modules) + 1):
            if n == len(modules):
                modules.append((view("source").Merged(), {}))
            if (name := modules[n][0].add(text, entry, about, values)) is not None:
                break
        modules[n][1][k] = str(name)
        missing = f"; assign its arrays {', '.join(values)} before it is used" if values else ""
        place = f" of {self._file(n)}" if n else ""
        self._calls[k] = dataclasses.replace(call, written=f"{name}{place}{missing}")

    def _save(self, module: Merged, name: str) -> str:
        assert self.directory is not None
        os.makedirs(self.directory, exist_ok=True)
        path = os.path.join(self.directory, name)
        with open(path, "w", encoding="utf-8") as target:
            target.write(module.text(f"The calls of xmapped functions of {self.program} for plain JAX."))
        return path

    def _run(self, path: str, names: dict[int, str]) -> Iterator[tuple[int, tuple[bool, str]]]:
        """The calls in a file that may run: whether the original does, and how the function differs from it."""
        calls = {k: self._calls[k] for k in names if not isinstance(self._calls[k].original, str)}
        todo = [(names[k], *call.original) for k, call in calls.items()]
        values = {name: x for call in calls.values() for name, x in call.module.values.items()}
        return zip(calls, view("source").differences(path, todo, values) if todo else ())

    def _file(self, n: int) -> str:
        return f"{self.program}_modern{f'_{n + 1}' if n else ''}.py"

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the pipe is closed, or the program has closed its output
            print(text, file=self.out, flush=True)


def _assignment(plan: CallPlan) -> str:
    """``batch: x, hidden: y+loop 4``"""
    loops = lambda a: [f"loop {n}" for n in a.loop_sizes]  # noqa: E731
    split = [(a.name, [*map(str, a.mesh_axes), *loops(a)]) for a in plan.axes if a.mesh_axes or a.loop_sizes]
    return ", ".join(f"{name}: {'+'.join(resources)}" for name, resources in split) or "one device"
