"""``python -m xmap_compat leave``: run a program twice in copies of its folders, and print or write
its patch.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from xmap_compat.tools.check import checker
from xmap_compat.tools.leave import messages, patch, report
from xmap_compat.tools.leave.comparing import in_a_line
from xmap_compat.tools.leave.construction import Construction, Edited
from xmap_compat.tools.leave.files import edited_files, others_that_need
from xmap_compat.tools.leave.patch import Refused
from xmap_compat.tools.leave.text import OURS, counted, plain
from xmap_compat.tools.leave.verifying import moved
from xmap_compat.tools.programs import add_program, program_of
from xmap_compat.tools.source.layout import NOTEBOOK, python_of

MOST_LINES = 20  # of the output of a run that ends otherwise
ROUNDS = 6  # what differs when it is run is left out, and the rest is verified again
_ENTRY = "import sys; from xmap_compat.tools.leave import {0}; {0}.main(sys.argv[1])"
HOME = str(Path(__file__).resolve().parents[3])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--write", action="store_true", help="write the edits into the files of the program"
    )
    parser.add_argument(
        "--unverified", action="store_true", help="edit also what this run does not verify"
    )
    parser.add_argument(
        "--diff", metavar="FILE", default="", help="save the edits as a patch for `git apply`"
    )
    parser.add_argument(
        "--recipe", action="store_true", help="print what to write by hand, for each xmap"
    )
    parser.add_argument(
        "--calls",
        metavar="N",
        type=int,
        default=3,
        help="record the first N calls of each kind (3)",
    )
    words = "end each run after so many seconds"
    parser.add_argument("--stop-after", metavar="SECONDS", type=int, default=0, help=words)
    parser.add_argument(
        "--memory", metavar="MB", type=int, default=1024, help="record at most so much data (1024)"
    )
    words = "write files although git has changes of them that are not committed"
    parser.add_argument("--force", action="store_true", help=words)
    add_program(parser, "SCRIPT [ARGS...], or NOTEBOOK.ipynb; it runs in copies of its folders")


def main(options: argparse.Namespace) -> int:
    """Returns the exit code: 0 if each construction is verified, 1 if not, 2 if there is nothing to
    patch.
    """
    try:
        _check(options)
        with tempfile.TemporaryDirectory(prefix="leave-") as scratch:
            return Leaving(options, os.path.realpath(scratch)).run()
    except Refused as error:
        print(f"leave: {error}", file=sys.stderr)
    except Exception as error:  # a fault of ours; the user's files are as they were
        print(f"leave: {messages.INTERNAL.format(error=in_a_line(error))}", file=sys.stderr)
    return 2


def _check(options: argparse.Namespace) -> None:
    options.program = program_of(options)
    if not options.program:
        raise Refused(messages.NO_PROGRAM)
    if importlib.util.find_spec("ty") is None:  # of whose editor the imports are
        raise Refused(checker.MISSING)


@dataclasses.dataclass
class _Seen:
    """What the second run has found.

    Attributes:
      problems: for constructions that differ, how.
      reached: the edited calls that were executed.
    """

    problems: dict[int, str] = dataclasses.field(default_factory=dict)
    reached: Sequence[int] = ()


class Leaving:
    """One invocation: its runs, what they found, and the patch that follows."""

    def __init__(self, options: argparse.Namespace, scratch: str):
        self.options, self.program, self.scratch = options, options.program, scratch
        self.cwd, self.script, self.seconds, self.code = os.path.realpath(os.getcwd()), "", 0.0, 0
        self.folders: dict[str, str] = {}  # of the first run: each folder, and its copy
        self.refused: dict[Any, str] = {}
        self.noise: list[Any] = []  # whose noise is asked for
        if self.program[0] != "-m":
            self.script = os.path.realpath(self.program[0])
            try:
                ast.parse(python_of(patch.contents(self.script), self.script))
            except (OSError, ValueError, SyntaxError) as error:
                raise Refused(messages.NOT_READ.format(name=self.program[0], error=error)) from None

    def run(self) -> int:
        for _ in range(ROUNDS):
            found, records = self.first_run()
            patched = [c for c in found.constructions if c.change and not c.refused]
            seen = self.second_run(found, records, patched) if patched else _Seen()
            if not seen.problems:
                break
            self.learn(found, seen.problems)
        else:
            for c in found.constructions:
                c.refused = c.refused or messages.NOT_VERIFIED.format(messages.OTHERS_DIFFER)
        kept = self.kept(found)
        changes, left = self.changes(found, kept)
        changes = self.checked(found, changes, bool(left) or len(kept) < len(found.constructions))
        return report.Report(self.options, found, seen, kept, changes, left, self.scratch).print()

    def learn(self, found: Edited, problems: Mapping[int, str]) -> None:
        """Leave out what differs in the next round; what differs in numbers, when its noise is
        known.
        """
        keys = {c.number: c.key for c in found.constructions}
        asked = [
            keys[n]
            for n, why in problems.items()
            if "largest element" in why and keys[n] not in self.noise
        ]
        self.noise += asked
        if not asked:
            self.refused |= {keys[n]: why for n, why in problems.items()}

    def kept(self, found: Edited) -> list[Construction]:
        """The constructions that are patched: the verified ones, and those that share edited
        functions with them.
        """
        able = [c for c in found.constructions if c.change and not c.refused]
        kept = able if self.options.unverified else [c for c in able if report.is_verified(c)]
        count = -1
        while len(kept) != count:
            count, edited = len(kept), {change for c in kept for change in c.changes}
            kept += [c for c in able if c not in kept and edited.intersection(c.changes)]
        return kept

    # The runs

    def first_run(self) -> tuple[Edited, str]:
        """Record the program, and make its edits without the constructions that have differed."""
        begun = time.monotonic()
        spec = self.prepared("first", self.options.stop_after)
        spec |= {
            "refused": [*self.refused.items()],
            "noise": self.noise,
            "calls": self.options.calls,
        }
        spec["bytes"], self.folders = self.options.memory << 20, spec["folders"]
        print(messages.FIRST_PRINTS, file=sys.stderr, flush=True)
        self.code = self.execute(spec, "recording the program with xmap", "recording", None)
        print("---", file=sys.stderr)
        self.seconds = time.monotonic() - begun
        found = (
            pickle.loads(patch.contents(spec["result"])) if os.path.exists(spec["result"]) else None
        )
        if found is None or not any(c.calls for c in found.constructions):
            how = (
                f"with {found.ended.split(':')[0] or 'no error'}" if found else ""
            )  # the error is shown above
            how = how or f"its process with exit code {self.code}"
            when = messages.BEFORE_ITS_FIRST_CALL if self.code else messages.CALLED_NONE
            raise Refused(
                messages.NO_CALL.format(
                    name=self.program[self.program[0] == "-m"], how=how, when=when
                )
            )
        return found, spec["records"]

    def second_run(self, found: Edited, records: str, patched: list[Construction]) -> _Seen:
        """Run the edited program on the recorded arguments."""
        spec = self.prepared("second", 0)
        stopped = found.ended == "stopped"
        spec |= {"records": records, "patched": [c.number for c in patched], "stopped": stopped}
        changes, left = self.changes(found, patched, probed=True)
        self.put(spec, changes, bool(left) or len(patched) < len(found.constructions))
        limit = max(120.0, 10 * self.seconds)
        code = self.execute(
            spec, f"comparing the edited program, for at most {limit:.0f} s", "verifying", limit
        )
        seen = json.loads(patch.contents(spec["result"])) if os.path.exists(spec["result"]) else {}
        reached = seen.get("reached", ())
        problems = {
            int(n): messages.FOUND_TO_DIFFER.format(text)
            for n, text in seen.get("problems", {}).items()
        }
        if not seen.get("whole") and seen.get("comparing", -1) >= 0:
            problems.setdefault(seen["comparing"], messages.DIES.format(seconds=limit))
        if problems:
            return _Seen(problems, reached)  # because of which it may have ended
        if why := self.otherwise(found, seen, code):
            self.show(spec, "the edited program")
            return _Seen({c.number: messages.NOT_VERIFIED.format(why) for c in patched}, reached)
        for c in patched:
            if (again := seen["agreed"].get(str(c.number), 0)) < c.recorded:
                why = messages.TOO_FEW.format(recorded=c.recorded, agreed=again)
                problems[c.number] = messages.NOT_VERIFIED.format(why)
        return _Seen(problems, reached)

    def otherwise(self, found: Edited, seen: Mapping[str, Any], code: int) -> str:
        """How the edited program ended otherwise than the one with xmap; empty if it did not."""
        both = (seen.get("ended", ""), code), (found.ended, self.code)
        # The type of an exception: its message may have random numbers.
        same = len({(words.partition(":")[0], k) for words, k in both}) == 1
        if seen.get("whole") and (same or "stopped" in (both[0][0], found.ended)):
            return ""
        ends = (
            words.rstrip(".") or (f"exit code {k}" if k else messages.NO_ERROR) for words, k in both
        )
        return messages.ENDED.format(*ends)

    def checked(self, found: Edited, changes: patch.Changes, some_stay: bool) -> patch.Changes:
        """The changes, if they compile, and the program ends with them as it did."""
        if not changes:
            return changes
        for path, (_, after) in changes.items():
            try:
                compile(
                    python_of(after, path),
                    path,
                    "exec",
                    ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
                    dont_inherit=True,
                )
            except SyntaxError as error:
                raise Refused(messages.DOES_NOT_COMPILE.format(path=path, error=error)) from None
        spec = self.prepared("third", int(self.seconds) + 60 if found.ended == "stopped" else 0)
        spec |= {"patched": [], "stopped": False}
        self.put(spec, changes, some_stay)
        code = self.execute(
            spec, "running the patched program", "verifying", max(120.0, 10 * self.seconds)
        )
        seen = json.loads(patch.contents(spec["result"])) if os.path.exists(spec["result"]) else {}
        if why := self.otherwise(found, seen, code):
            self.show(spec, "the patched program")
            raise Refused(f"{why}. Nothing is written")
        return changes

    def put(self, spec: dict[str, Any], changes: patch.Changes, some_stay: bool) -> None:
        """Write changes into the copy in which a run is."""
        spec["some stay"] = some_stay
        for path, (_, data) in changes.items():
            is_cells = path.endswith(NOTEBOOK) and data.lstrip()[:1] == b"{"
            with open(moved(spec["folders"], path), "wb") as file:
                file.write(python_of(data, path).encode() if is_cells else data)

    def prepared(self, run: str, seconds: int) -> dict[str, Any]:
        """What a run is told, in fresh copies of the folders."""
        here = os.path.join(self.scratch, run)
        shutil.rmtree(here, ignore_errors=True)
        tree, beside = os.path.join(here, "tree"), os.path.dirname(self.script)
        folders = patch.mirror([self.cwd, *filter(None, [beside])], tree)
        spec: dict[str, Any] = {"tree": tree + os.sep, "folders": folders, "program": self.program}
        spec |= {
            name: os.path.join(here, name)
            for name in ("records", "result", "log", "spec", "status")
        }
        spec |= {
            "cwd": moved(folders, self.cwd),
            "beside": moved(folders, beside or self.cwd),
            "seconds": seconds,
        }
        if self.script:
            copy, inside = moved(folders, self.script), os.path.join(spec["cwd"], "")
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
        options: dict[str, Any] = {
            "cwd": spec["cwd"],
            "env": {**os.environ, "PYTHONPATH": path},
            "timeout": limit,
        }
        command = [sys.executable, "-c", _ENTRY.format(module), spec["spec"]]
        with open(spec["log"], "wb") as log, report.progress(what, spec["status"]):
            options |= {"stdout": 2} if limit is None else {"stdout": log, "stderr": log}
            try:
                return subprocess.run(command, stdin=subprocess.DEVNULL, **options).returncode
            except subprocess.TimeoutExpired:
                return 124

    def show(self, spec: Mapping[str, Any], what: str) -> None:
        """Print how the output of a run ends."""
        lines = patch.contents(spec["log"]).decode(errors="replace").splitlines()[-MOST_LINES:]
        print(f"--- {what} prints:", *lines, "---", sep="\n", file=sys.stderr)

    # The patch

    def changes(
        self, found: Edited, patched: Iterable[Construction], probed: bool = False
    ) -> tuple[patch.Changes, list[str]]:
        """What the files hold and are to hold, and for what the program still needs this package.

        Args:
          probed: for the second run, with probes around each construction and each edited call.
        """
        users = {copy: folder for folder, copy in self.folders.items()}
        edits = []
        for c in patched:
            own = c.change
            assert own is not None
            probe = f"__leave_mapped__({c.number}, {OURS}mapped)"
            text = own.text.replace(f"{OURS}mapped", probe) if probed else own.text
            edits += [own._replace(text=text)]
            edits += [e._replace(text=(counted if probed else plain)(e.text)) for e in c.changes]
        if not edits:
            return {}, []
        as_python = lambda path: path + ".py" if probed and path.endswith(NOTEBOOK) else path  # noqa: E731
        here = {copy: moved(users, copy) for copy in found.files}
        contents = {}
        for copy, path in here.items():
            data, ran = patch.contents(path), patch.contents(copy)
            if (python_of(data, path).encode() if path.endswith(NOTEBOOK) else data) != ran:
                raise Refused(messages.CHANGED_WHILE_IT_RAN.format(path=path))
            contents[as_python(path)] = ran if probed else data
        edits = [e._replace(file=as_python(moved(users, e.file))) for e in edits]
        entered = {(as_python(moved(users, of)), *at) for of, *at in found.entered}
        module = os.path.basename(found.helper_file).removesuffix(".py")
        others = others_that_need(list(here.values()), self.cwd)
        new, left = edited_files(contents, edits, module, entered, found.keeps_meshes, bool(others))
        changes = {
            path.removesuffix(".py") if path not in here.values() else path: data
            for path, data in new.items()
        }
        result: dict[str, tuple[bytes | None, bytes]] = {
            p: (patch.contents(p), data) for p, data in changes.items()
        }
        result[moved(users, found.helper_file)] = None, found.helpers.encode()
        return result, [*left, *map(os.path.basename, others)]
