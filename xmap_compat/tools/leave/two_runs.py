"""``python -m xmap_compat leave``: run a program with xmap and edited, in copies of its folders,
and print or write its patch.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from xmap_compat.tools.check import checker
from xmap_compat.tools.leave import edits, messages, neighbours, patch, report
from xmap_compat.tools.leave.patch import Refused
from xmap_compat.tools.leave.recorded_calls import in_a_line
from xmap_compat.tools.leave.running import moved
from xmap_compat.tools.leave.xmap_calls import FirstRun
from xmap_compat.tools.programs import add_program, program_arguments
from xmap_compat.tools.source.layout import NOTEBOOK, text_as_python

MOST_LINES = 20  # of the output of a run that ends otherwise
PROGRESS_SECONDS = 5.0  # between the lines that say that a run goes on
_ENTRY = (
    "import pickle, sys; from xmap_compat.tools.leave import {0}; "
    "{0}.main(pickle.load(open(sys.argv[1], 'rb')))"
)
PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--write", action="store_true", help="write the edits into the files of the program")
    add("--diff", metavar="FILE", default="", help="save the edits as a patch for `git apply`")
    add_program(parser, "SCRIPT [ARGS...], or NOTEBOOK.ipynb; it runs in copies of its folders")


def main(options: argparse.Namespace) -> int:
    """Returns the exit code: 0 if each xmap call is verified, 1 if not, 2 if the program or the
    patch is refused, or leave itself fails.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=patch.SCRATCH) as scratch:
            return Leaving(options, os.path.realpath(scratch)).run()
    except Refused as error:
        print(f"leave: {error}", file=sys.stderr)
    except Exception as error:  # a fault of ours; the user's files are as they were
        print(f"leave: {messages.INTERNAL.format(error=in_a_line(error))}", file=sys.stderr)
    return 2


class Leaving:
    """One invocation: its runs, and the patch that follows."""

    def __init__(self, options: argparse.Namespace, scratch: str):
        self.options = options
        self.scratch = scratch
        self.program = program_arguments(options)
        if not self.program:
            raise Refused(messages.NO_PROGRAM)
        self.name = self.program[self.program[0] == "-m"]
        if importlib.util.find_spec("ty") is None:  # which finds the names that JAX has removed
            raise Refused(checker.MISSING)
        self.cwd = os.path.realpath(os.getcwd())
        self.folders = [self.cwd]
        self.script = ""
        if self.program[0] != "-m":
            self.script = os.path.realpath(self.program[0])
            self.folders.append(os.path.dirname(self.script))
            try:
                self.script_text()
            except (OSError, ValueError, SyntaxError) as error:
                raise Refused(messages.NOT_READ.format(self.program[0], error)) from None

    def script_text(self) -> str:
        return text_as_python(Path(self.script).read_bytes(), self.script)

    def run(self) -> int:
        begun = time.monotonic()
        found = self.first_run()
        limit = max(120.0, 10 * (time.monotonic() - begun))
        program = edits.ProgramFiles(found, self.folders[-1])
        program.refuse_or_add()
        neighbours.refuse_shared(found.xmap_calls, program.sources, self.folders)
        others = neighbours.others_that_need(program.sources, self.folders)
        # A script that calls no xmap, but the modules that it imports have a helper already.
        is_plain_already = not (found.xmap_calls or found.ended) and program.helper.is_there
        is_called = any(c.calls for c in found.xmap_calls)
        if not is_called and not is_plain_already and (found.ended or not found.xmap_calls):
            how = f"with {found.ended or messages.NO_ERROR}"
            raise Refused(messages.NO_CALL.format(name=self.name, how=how))
        problems: dict[int, str] = {}
        while True:
            for number, words in problems.items():
                found.xmap_calls[number].refused = words
            refuse_inside(found)
            edited = edits.Edited()
            if all(c.refused for c in found.xmap_calls) and not is_plain_already:
                break
            edited = program.edited(others)
            problems = self.replay(found, edited, limit)
            if not problems:
                break
        return report.report(self.options, found.xmap_calls, edited)

    # ---- the runs

    def first_run(self) -> FirstRun:
        """Record the program; what is found."""
        task = self.task_in("first")
        print(messages.FIRST_PRINTS, file=sys.stderr, flush=True)
        code = self.execute(task, "recording")
        print("---", file=sys.stderr)
        if not os.path.exists(task["result"]):
            how = f"its process with exit code {code}"
            raise Refused(messages.NO_CALL.format(name=self.name, how=how))
        found, _ = pickle.loads(Path(task["result"]).read_bytes())
        return found

    def replay(self, found: FirstRun, edited: edits.Edited, limit: float) -> dict[int, str]:
        """Run the edited program on the recorded arguments; why xmap calls stay, by number."""
        task = self.task_in("second")
        patched = [c.number for c in found.xmap_calls if not c.refused]
        task["ended"] = found.ended
        task["patched"] = patched
        task["needs_package"] = edited.needs or len(patched) < len(found.xmap_calls)
        texts = edited.probed.copy()
        if edited.helper in edited.changes:
            _, texts[edited.helper] = edited.changes[edited.helper]
        for path, data in texts.items():
            if path.endswith(NOTEBOOK):
                data = text_as_python(data, path).encode()
            Path(moved(task["folders"], path)).write_bytes(data)
        code = self.execute(task, "replaying", limit)
        problems: dict[int, str] = {}
        ended = f"exit code {code} (it may take {limit:.0f} s)"
        if os.path.exists(task["result"]):
            problems, ended = pickle.loads(Path(task["result"]).read_bytes())
        if problems or ended == found.ended:
            return problems
        # No xmap call is verified.
        lines = Path(task["log"]).read_text(errors="replace").splitlines()[-MOST_LINES:]
        print(messages.SECOND_PRINTS, *lines, "---", sep="\n", file=sys.stderr)
        why = messages.ENDED.format(ended or messages.NO_ERROR, found.ended or messages.NO_ERROR)
        if not patched:
            raise Refused(why)
        return dict.fromkeys(patched, why)

    def task_in(self, name: str) -> dict[str, Any]:
        """The task of a run, in new copies of the folders.

        Keys: ``tree`` (where the copies are), ``trees`` (that, and where those of the first run
        are), ``folders`` (the copy of each folder), ``cwd`` and ``program`` (in the copy), and the
        paths of the files ``task``, ``records`` (the result of the first run), ``result`` and
        ``log``.  ``replay`` adds ``ended`` (of the first run), ``patched`` (numbers of xmap calls)
        and ``needs_package``.
        """
        here = os.path.join(self.scratch, name)
        shutil.rmtree(here, ignore_errors=True)
        tree = os.path.join(here, "tree")
        first = os.path.join(self.scratch, "first")
        folders = patch.mirror(self.folders, tree)
        task: dict[str, Any] = {"tree": tree + os.sep, "folders": folders, "trees": (here, first)}
        for file in ("task", "result", "log"):
            task[file] = os.path.join(here, file)
        task["records"] = os.path.join(first, "result")
        task["cwd"] = moved(folders, self.cwd)
        task["program"] = self.program
        if self.script:
            copy = moved(folders, self.script)
            task["program"] = [os.path.relpath(copy, task["cwd"]), *self.program[1:]]
            if copy.endswith(NOTEBOOK):
                Path(copy).write_text(self.script_text(), encoding="utf-8")
        return task

    def execute(self, task: dict[str, Any], module: str, limit: float = float("inf")) -> int:
        """Give a process its task, and say every few seconds that it runs; its exit code.

        The output of the program with xmap is shown, that of the edited one goes into a file.
        """
        Path(task["task"]).write_bytes(pickle.dumps(task))
        path = os.pathsep.join(filter(None, [PACKAGE_PARENT, os.environ.get("PYTHONPATH")]))
        # XLA warns of arrays that only the recorder places.
        environment = {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
        command = [sys.executable, "-c", _ENTRY.format(module), task["task"]]
        begun = time.monotonic()
        with open(task["log"], "wb") as log:
            output: dict[str, Any] = {"stdout": 2}
            if module == "replaying":
                output = {"stdout": log, "stderr": log}
            process = subprocess.Popen(
                command, cwd=task["cwd"], env=environment, stdin=subprocess.DEVNULL, **output
            )
            while True:
                try:
                    return process.wait(PROGRESS_SECONDS)
                except subprocess.TimeoutExpired:
                    took = time.monotonic() - begun
                    print(f"leave: {module}, {took:.0f} s", file=sys.stderr, flush=True)
                    if took > limit:
                        process.kill()
                except BaseException:
                    process.kill()
                    raise


def refuse_inside(found: FirstRun) -> None:
    """Refuse xmap calls in the bodies of those that stay."""
    for c in found.xmap_calls:
        for number in c.inside:
            outer = found.xmap_calls[number]
            if outer.refused and not c.refused:
                c.refused = messages.IN_ONE_THAT_STAYS.format(where=outer.where)
