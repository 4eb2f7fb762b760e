"""``python -m xmap_compat leave``: run a program with xmap and edited, in copies of its folders,
and print or write its patch.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xmap_compat.tools.check import checker
from xmap_compat.tools.leave import edits, messages, neighbours, patch, replaying, report
from xmap_compat.tools.leave.patch import Refused
from xmap_compat.tools.leave.running import moved
from xmap_compat.tools.leave.values import in_a_line
from xmap_compat.tools.leave.xmap_calls import FirstRun, SecondRun, XmapCall
from xmap_compat.tools.programs import add_program, program_arguments
from xmap_compat.tools.source.layout import NOTEBOOK, text_as_python

MOST_LINES = 20  # of the output of a run that ends otherwise
EVERY = 5.0  # seconds, a line says that a run goes on
_ENTRY = (
    "import pickle, sys; from xmap_compat.tools.leave import {0}; "
    "{0}.main(pickle.load(open(sys.argv[1], 'rb')))"
)
# What JAX says of `with mesh:`, if it is asked to.
_WARN = "default:`with mesh:`:DeprecationWarning"
_WITH_MESH = re.compile(r"([^\s/\\]+:\d+): DeprecationWarning: `with mesh:`")
HOME = str(Path(__file__).resolve().parents[3])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--write", action="store_true", help="write the edits into the files of the program")
    add("--unverified", action="store_true", help="edit also what this run does not verify")
    add("--diff", metavar="FILE", default="", help="save the edits as a patch for `git apply`")
    words = "write files although git has changes of them that are not committed"
    add("--force", action="store_true", help=words)
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
        if importlib.util.find_spec("ty") is None:  # which finds the names that JAX has removed
            raise Refused(checker.MISSING)
        self.cwd = os.path.realpath(os.getcwd())
        self.folders = [self.cwd]
        self.script = ""
        if self.program[0] != "-m":
            self.script = os.path.realpath(self.program[0])
            self.folders.append(os.path.dirname(self.script))
            try:
                text_as_python(patch.contents(self.script), self.script)
            except (OSError, ValueError, SyntaxError) as error:
                raise Refused(messages.NOT_READ.format(self.program[0], error)) from None
        self.seconds = 0.0

    def run(self) -> int:
        found, records = self.first_run()
        contents = {path: patch.contents(path) for path in found.files}
        program = edits.ProgramFiles(found, contents, self.folders[-1])
        program.refuse_or_add()
        neighbours.refuse_shared(found.xmap_calls, program.sources, self.folders)
        others = neighbours.others_that_need(program.sources, self.folders)
        # This script calls no xmap any more, but the modules that it imports have a helper already.
        is_plain_already = not (found.xmap_calls or found.ended or program.helper.before is None)
        if not (is_plain_already and program.edited([], others).changes):
            self.check_called(found)
        while True:
            patched = self.patched(found)
            edited = program.edited(patched, others)
            if not patched and not is_plain_already:
                edited = edits.Edited()
                break
            problems = self.replay(found, records, edited, patched)
            if not problems:
                break
            for number, words in problems.items():
                found.xmap_calls[number].refused = words
        return report.Report(self.options, found.xmap_calls, patched, edited, self.scratch).print()

    def patched(self, found: FirstRun) -> list[XmapCall]:
        """The xmap calls to patch: the verifiable ones that are not refused, and with them those
        that are made but never called.  Those inside of one that stays are refused here.
        """
        for c in found.xmap_calls:
            for number in c.inside:
                outer = found.xmap_calls[number]
                if c.has_mesh_axes and outer.refused and not c.refused:
                    c.refused = messages.IN_ONE_THAT_STAYS.format(where=outer.where)
        able = [c for c in found.xmap_calls if not c.refused]
        if self.options.unverified:
            return able
        if not any(c.is_verifiable for c in able):
            return []
        return [c for c in able if c.is_verifiable or (c.made and not c.calls)]

    # ---- the runs

    def first_run(self) -> tuple[FirstRun, str]:
        """Record the program; what is found, and the file with the records."""
        begun = time.monotonic()
        task = self.task_in("first")
        print(messages.FIRST_PRINTS, file=sys.stderr, flush=True)
        code = self.execute(task, "recording")
        print("---", file=sys.stderr)
        self.seconds = time.monotonic() - begun
        if not os.path.exists(task["result"]):
            raise self.no_call(f"its process with exit code {code}", messages.BEFORE_ITS_FIRST_CALL)
        return pickle.loads(patch.contents(task["result"])), task["records"]

    def check_called(self, found: FirstRun) -> None:
        """Refuse a program that called no xmapped function, unless it is to be edited all the
        same.
        """
        not_made = [c.where for c in found.xmap_calls if not c.made]
        if any(c.calls for c in found.xmap_calls) or (self.options.unverified and not_made):
            return
        when = messages.BEFORE_ITS_FIRST_CALL if found.ended else messages.CALLED_NONE
        if not_made:
            when += messages.UNVERIFIED_WOULD.format(", ".join(not_made))
        raise self.no_call(f"with {found.ended or messages.NO_ERROR}", when)

    def no_call(self, how: str, when: str) -> Refused:
        name = self.program[self.program[0] == "-m"]
        return Refused(messages.NO_CALL.format(name=name, how=how, when=when))

    def replay(
        self,
        found: FirstRun,
        records: str,
        edited: edits.Edited,
        patched: Sequence[XmapCall],
    ) -> dict[int, str]:
        """Run the edited program on the recorded arguments; why xmap calls stay, by number."""
        task = self.task_in("second")
        folders = task["folders"]
        task["records"] = records
        task["ended"] = found.ended
        task["places"] = {(moved(folders, path), *start): n for path, start, n in edited.places}
        task["files"] = {moved(folders, path): path for path in found.files}
        task["files"].pop(moved(folders, edited.helper), None)
        task["needs_package"] = bool(edited.needs) or len(patched) < len(found.xmap_calls)
        self.put(folders, edited)
        limit = max(120.0, 10 * self.seconds)
        code = self.execute(task, "replaying", limit)
        log = patch.contents(task["log"]).decode(errors="replace")
        warned = _WITH_MESH.search(log)
        edited.with_mesh = warned[1] if warned else ""
        seen = SecondRun()
        if os.path.exists(task["result"]):
            seen = SecondRun(**pickle.loads(patch.contents(task["result"])))
        problems = {}
        for number, (words, file, line) in seen.problems.items():
            problems[number] = messages.FOUND_TO_DIFFER.format(words)
            if file:
                problems[number] = messages.raised(words, *edited.line_before(file, line))
        if seen.executing >= 0:
            problems[seen.executing] = messages.DIES.format(seconds=limit)
        if seen.ended is None:
            seen.ended = f"exit code {code}"
        if not problems and seen.ended != found.ended:
            return self.ended_otherwise(log, patched, [seen.ended, found.ended])
        return problems

    def ended_otherwise(
        self, log: str, patched: Sequence[XmapCall], ends: list[str]
    ) -> dict[int, str]:
        """Print how the output of the edited program ends; no xmap call is verified."""
        lines = log.splitlines()[-MOST_LINES:]
        print(messages.SECOND_PRINTS, *lines, "---", sep="\n", file=sys.stderr)
        why = messages.ENDED.format(*[end or messages.NO_ERROR for end in ends])
        if not patched:
            raise Refused(why)
        return {c.number: why for c in patched}

    def put(self, folders: dict[str, str], edited: edits.Edited) -> None:
        """Write the changes into a copy, where the helper's ``mapped`` is watched."""
        for path, (_, data) in edited.changes.items():
            if path.endswith(NOTEBOOK):
                data = text_as_python(data, path).encode()
            Path(moved(folders, path)).write_bytes(data)
        with open(moved(folders, edited.helper), "a", encoding="utf-8") as file:
            file.write(f"\n\nmapped = {replaying.PROBE}(mapped)\n")

    def task_in(self, name: str) -> dict[str, Any]:
        """The task of a run, in new copies of the folders.

        Keys: ``tree`` (where the copies are), ``folders`` (the copy of each folder), ``cwd`` and
        ``program`` (in the copy), and the paths of the files ``task``, ``records``, ``result`` and
        ``log``.  ``replay`` points ``records`` at those of the first run, and adds ``ended`` (of
        the first run), ``places`` (the number of the xmap call at each file, line and column),
        ``files`` (the user's file for each copy) and ``needs_package``.
        """
        here = os.path.join(self.scratch, name)
        shutil.rmtree(here, ignore_errors=True)
        tree = os.path.join(here, "tree")
        folders = patch.mirror(self.folders, tree)
        task: dict[str, Any] = {"tree": tree + os.sep, "folders": folders}
        for file in ("task", "records", "result", "log"):
            task[file] = os.path.join(here, file)
        task["cwd"] = moved(folders, self.cwd)
        task["program"] = self.program
        if self.script:
            copy = moved(folders, self.script)
            inside = os.path.join(task["cwd"], "")
            task["program"] = [copy.removeprefix(inside), *self.program[1:]]
            if copy.endswith(NOTEBOOK):
                text = text_as_python(patch.contents(self.script), self.script)
                Path(copy).write_text(text, encoding="utf-8")
        return task

    def execute(self, task: dict[str, Any], module: str, limit: float = float("inf")) -> int:
        """Give a process its task, and say every few seconds that it runs; its exit code.

        The output of the program with xmap is shown, that of the edited one goes into a file.
        """
        Path(task["task"]).write_bytes(pickle.dumps(task))
        path = os.pathsep.join(filter(None, [HOME, os.environ.get("PYTHONPATH")]))
        # XLA warns of arrays that only the recorder places.
        environment = {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
        command = [sys.executable, "-c", _ENTRY.format(module), task["task"]]
        begun = time.monotonic()
        with open(task["log"], "wb") as log:
            output: dict[str, Any] = {"stdout": 2}
            if module == "replaying":
                output = {"stdout": log, "stderr": log}
                environment["PYTHONWARNINGS"] = _WARN
            process = subprocess.Popen(
                command, cwd=task["cwd"], env=environment, stdin=subprocess.DEVNULL, **output
            )
            while True:
                try:
                    return process.wait(EVERY)
                except subprocess.TimeoutExpired:
                    took = time.monotonic() - begun
                    print(f"leave: {module}, {took:.0f} s", file=sys.stderr, flush=True)
                    if took > limit:
                        process.kill()
                except BaseException:
                    process.kill()
                    raise
