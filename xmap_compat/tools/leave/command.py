"""``python -m xmap_compat leave``: run a program with xmap and edited, in copies of its folders, and
print or write its patch.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import pickle
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
from xmap_compat.tools.leave.construction import Construction, Found
from xmap_compat.tools.leave.patch import Refused
from xmap_compat.tools.leave.running import moved
from xmap_compat.tools.leave.values import in_a_line
from xmap_compat.tools.programs import add_program, program_of
from xmap_compat.tools.source.layout import NOTEBOOK, python_of

MOST_LINES = 20  # of the output of a run that ends otherwise
_ENTRY = "import sys; from xmap_compat.tools.leave import {0}; {0}.main(sys.argv[1])"
HOME = str(Path(__file__).resolve().parents[3])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--write", action="store_true", help="write the edits into the files of the program")
    add("--unverified", action="store_true", help="edit also what this run does not verify")
    add("--diff", metavar="FILE", default="", help="save the edits as a patch for `git apply`")
    words = "record the first N calls of each kind (3)"
    add("--calls", metavar="N", type=int, default=3, help=words)
    words = "end each run after so many seconds"
    add("--stop-after", metavar="SECONDS", type=int, default=0, help=words)
    words = "record at most so much data (1024)"
    add("--memory", metavar="MB", type=int, default=1024, help=words)
    words = "write files although git has changes of them that are not committed"
    add("--force", action="store_true", help=words)
    add_program(parser, "SCRIPT [ARGS...], or NOTEBOOK.ipynb; it runs in copies of its folders")


def main(options: argparse.Namespace) -> int:
    """Returns the exit code: 0 if each construction is verified, 1 if not, 2 if there is nothing to
    patch.
    """
    try:
        check(options)
        with tempfile.TemporaryDirectory(prefix="leave-") as scratch:
            return Leaving(options, os.path.realpath(scratch)).run()
    except Refused as error:
        print(f"leave: {error}", file=sys.stderr)
    except Exception as error:  # a fault of ours; the user's files are as they were
        print(f"leave: {messages.INTERNAL.format(error=in_a_line(error))}", file=sys.stderr)
    return 2


def check(options: argparse.Namespace) -> None:
    options.program = program_of(options)
    if not options.program:
        raise Refused(messages.NO_PROGRAM)
    if importlib.util.find_spec("ty") is None:  # which finds the names that JAX has removed
        raise Refused(checker.MISSING)


class Leaving:
    """One invocation: its runs, and the patch that follows."""

    def __init__(self, options: argparse.Namespace, scratch: str):
        self.options, self.program, self.scratch = options, options.program, scratch
        self.cwd, self.script, self.seconds = os.path.realpath(os.getcwd()), "", 0.0
        self.rounds = 0
        if self.program[0] != "-m":
            self.script = os.path.realpath(self.program[0])
            try:
                ast.parse(python_of(patch.contents(self.script), self.script))
            except (OSError, ValueError, SyntaxError) as error:
                raise Refused(messages.NOT_READ.format(name=self.program[0], error=error)) from None
        self.beside = os.path.dirname(self.script) or self.cwd

    def run(self) -> int:
        found, spec, code = self.first_run()
        contents = self.contents_of(found, spec["folders"])
        program = edits.Program(found, contents, self.beside)
        program.judge()
        neighbours.judge(found.constructions, program.sources, [self.cwd, self.beside])
        others = neighbours.others_that_need(program.sources, [self.cwd, self.beside])
        # Its xmaps may have left already, in modules that it imports.
        has_left = not (found.constructions or code or program.helper.before is None)
        if not has_left or not program.edited([], others).changes:
            self.check_called(found, code)
        edited = None
        while True:
            patched = self.patched(found)
            if not patched and not has_left:
                edited = None
                break
            edited = program.edited(patched, others)
            self.check_syntax(edited)
            problems = self.replay(found, spec["records"], edited, patched, code)
            if not problems:
                break
            for c in patched:
                c.refused = problems.get(c.number, "")
        return report.Report(self.options, found, patched, edited, self.scratch).print()

    def patched(self, found: Found) -> list[Construction]:
        """The constructions to patch: those that are verified if they do not differ, and with them
        those that the program makes and never calls.
        """
        for c in found.constructions:  # of an outer one that stays
            for outer in (o for o in found.constructions if o.number in c.inside and o.refused):
                if c.resources and not c.refused:
                    c.refused = messages.IN_ONE_THAT_STAYS.format(where=outer.where)
        able = [c for c in found.constructions if not c.refused]
        if self.options.unverified:
            return able
        if not any(c.is_verified for c in able):
            return []
        return [c for c in able if c.is_verified or (c.reached and not c.calls)]

    # ---- the runs

    def first_run(self) -> tuple[Found, dict[str, Any], int]:
        """Record the program."""
        begun = time.monotonic()
        spec = self.prepared("first", self.options.stop_after)
        spec |= {"calls": self.options.calls, "bytes": self.options.memory << 20}
        print(messages.FIRST_PRINTS, file=sys.stderr, flush=True)
        code = self.execute(spec, "recording the program with xmap", "recording", None)
        print("---", file=sys.stderr)
        self.seconds = time.monotonic() - begun
        if not os.path.exists(spec["result"]):
            how = f"its process with exit code {code}"
            raise self.no_call(how, code)
        found = pickle.loads(patch.contents(spec["result"]))
        users = {copy: folder for folder, copy in spec["folders"].items()}
        found.files = {moved(users, path): name for path, name in found.files.items()}
        for c in found.constructions:
            c.file = moved(users, c.file)
            c.collectives = [
                e._replace(file=moved(users, e.file), inside=moved(users, e.inside))
                for e in c.collectives
            ]
        return found, spec, code

    def check_called(self, found: Found, code: int) -> None:
        """Refuse a program that called no xmapped function, unless it is to be edited all the
        same.
        """
        unmade = [c.where for c in found.constructions if not c.reached]
        if any(c.calls for c in found.constructions) or (self.options.unverified and unmade):
            return
        how = f"with {found.ended.split(':')[0] or 'no error'}"
        more = messages.UNVERIFIED_WOULD.format(where=", ".join(unmade)) if unmade else ""
        raise self.no_call(how, code, more)

    def no_call(self, how: str, code: int, more: str = "") -> Refused:
        name = self.program[self.program[0] == "-m"]
        when = messages.BEFORE_ITS_FIRST_CALL if code else messages.CALLED_NONE
        return Refused(messages.NO_CALL.format(name=name, how=how, when=when) + more)

    def contents_of(self, found: Found, folders: dict[str, str]) -> dict[str, bytes]:
        """What the program's files hold, as the first run has read them."""
        contents = {}
        for path in found.files:
            data, ran = patch.contents(path), patch.contents(moved(folders, path))
            text = python_of(data, path).encode() if path.endswith(NOTEBOOK) else data
            if text != ran:
                raise Refused(messages.CHANGED_WHILE_IT_RAN.format(path=path))
            if data:
                contents[path] = data
        return contents

    def replay(
        self,
        found: Found,
        records: str,
        edited: edits.Edited,
        patched: Sequence[Construction],
        first_code: int,
    ) -> dict[int, str]:
        """Run the edited program on the recorded arguments; why constructions stay."""
        spec = self.prepared("second", 0)
        folders = spec["folders"]
        spec |= {"records": records, "stopped": found.ended == "stopped"}
        spec["places"] = [(moved(folders, path), *of) for path, *of in edited.places]
        files = {moved(folders, p): p for p in found.files if p != edited.helper.path}
        spec["edited"] = [*files]
        stays = len(patched) < len(found.constructions)
        spec["some stay"] = stays or bool(edited.left)
        self.put(folders, edited)
        limit = max(120.0, 10 * self.seconds)
        what = f"comparing the edited program, for at most {limit:.0f} s"
        code = self.execute(spec, what, "replaying", limit)
        seen: dict[str, Any] = {}
        if os.path.exists(spec["result"]):
            seen = json.loads(patch.contents(spec["result"]))
        problems = {}
        for number, text in seen.get("problems", {}).items():
            where = shown = ""
            if number in seen.get("raised", {}):
                file, line = seen["raised"][number]
                where, shown = edited.line_before(files[file], line)
            problems[int(number)] = messages.differs(text, where, shown)
        if not seen.get("whole") and seen.get("comparing", -1) >= 0:
            problems.setdefault(seen["comparing"], messages.DIES.format(seconds=limit))
        if problems:
            return problems  # because of which it may have ended
        why = self.otherwise(found, first_code, seen, code)
        if why:
            self.show(spec)
            if not patched:
                raise Refused(messages.NOT_VERIFIED.format(why))
            return {c.number: messages.NOT_VERIFIED.format(why) for c in patched}
        for c in patched:
            agreed = seen["agreed"].get(str(c.number), 0)
            if agreed < c.recorded:
                why = messages.TOO_FEW.format(recorded=c.recorded, agreed=agreed)
                problems[c.number] = messages.NOT_VERIFIED.format(why)
        return problems

    def otherwise(self, found: Found, first_code: int, seen: dict[str, Any], code: int) -> str:
        """How the edited program ended otherwise than the one with xmap; empty if it did not."""
        both = (seen.get("ended", ""), code), (found.ended, first_code)
        # The type of an exception: its message may have random numbers.
        kinds = {(words.partition(":")[0], k) for words, k in both}
        stopped = "stopped" in (both[0][0], found.ended)
        if seen.get("whole") and (len(kinds) == 1 or stopped):
            return ""
        ends = [
            words.rstrip(".") or f"exit code {k}" if k else messages.NO_ERROR for words, k in both
        ]
        return messages.ENDED.format(*ends)

    def check_syntax(self, edited: edits.Edited) -> None:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        for path, (_, after) in edited.changes.items():
            try:
                compile(python_of(after, path), path, "exec", flags, dont_inherit=True)
            except SyntaxError as error:
                raise Refused(messages.DOES_NOT_COMPILE.format(path=path, error=error)) from None

    def put(self, folders: dict[str, str], edited: edits.Edited) -> None:
        """Write the changes into the copy in which a run is; the helper's ``mapped`` is probed."""
        for path, (_, data) in edited.changes.items():
            if path.endswith(NOTEBOOK):
                data = python_of(data, path).encode()
            with open(moved(folders, path), "wb") as file:
                file.write(data)
        probe = f"\n\nmapped = {replaying.PROBE}(mapped)\n"
        with open(moved(folders, edited.helper.path), "a", encoding="utf-8") as file:
            file.write(probe)

    def prepared(self, run: str, seconds: int) -> dict[str, Any]:
        """What a run is told, in fresh copies of the folders."""
        here = os.path.join(self.scratch, run)
        shutil.rmtree(here, ignore_errors=True)
        tree = os.path.join(here, "tree")
        folders = patch.mirror([self.cwd, self.beside], tree)
        spec: dict[str, Any] = {"tree": tree + os.sep, "folders": folders, "seconds": seconds}
        for name in ("records", "result", "log", "spec", "status"):
            spec[name] = os.path.join(here, name)
        spec["program"], spec["cwd"] = self.program, moved(folders, self.cwd)
        if self.script:
            copy = moved(folders, self.script)
            inside = os.path.join(spec["cwd"], "")
            spec["program"] = [copy.removeprefix(inside), *self.program[1:]]
            if copy.endswith(NOTEBOOK):
                with open(copy, "w", encoding="utf-8") as file:
                    file.write(python_of(patch.contents(self.script), self.script))
        return spec

    def execute(self, spec: dict[str, Any], what: str, module: str, limit: float | None) -> int:
        """Run a module in a process, whose task is told; the output of the edited program is kept
        apart.
        """
        with open(spec["spec"], "w", encoding="utf-8") as file:
            json.dump(spec, file)
        path = os.pathsep.join(filter(None, [HOME, os.environ.get("PYTHONPATH")]))
        # XLA warns of arrays that only the recorder places.
        environment = {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
        command = [sys.executable, "-c", _ENTRY.format(module), spec["spec"]]
        with open(spec["log"], "wb") as log, report.progress(what, spec["status"]):
            shown: dict[str, Any] = {"stdout": 2}
            if limit is not None:
                shown = {"stdout": log, "stderr": log}
            try:
                done = subprocess.run(
                    command,
                    cwd=spec["cwd"],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    timeout=limit,
                    **shown,
                )
            except subprocess.TimeoutExpired:
                return 124
        return done.returncode

    def show(self, spec: dict[str, Any]) -> None:
        """Print how the output of the edited program ends."""
        lines = patch.contents(spec["log"]).decode(errors="replace").splitlines()[-MOST_LINES:]
        print("--- the edited program prints:", *lines, "---", sep="\n", file=sys.stderr)
