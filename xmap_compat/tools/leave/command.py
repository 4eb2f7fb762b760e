"""``python -m xmap_compat leave``: run a program twice in copies of its folders, and print or write its patch."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xmap_compat.tools.leave import messages, patch
from xmap_compat.tools.leave.construction import Construction, Edited, FileEdit
from xmap_compat.tools.leave.old_check import fix
from xmap_compat.tools.leave.old_check.sources import NOTEBOOK, python_of
from xmap_compat.tools.leave.patch import Refused
from xmap_compat.tools.leave.verifying import moved
from xmap_compat.tools.text import plural, table

USAGE = """usage: python -m xmap_compat leave [OPTIONS] SCRIPT [ARGS...]      (or NOTEBOOK.ipynb, or -m MODULE)
  --write            write the verified edits into the files of the program
  --diff FILE        save them as a patch for `git apply`
  --calls N          record the first N calls of each kind (3)
  --stop-after N     end both runs after N calls of xmapped functions, or after N seconds (90s)
  --memory MB        record at most so much data (1024)
  --assignment N     of a function under several assignments, follow the N-th
  --force            write files although git has changes of them that are not committed
The program runs twice, in copies of its folder and of the working directory."""
ROUNDS = 4  # what differs when it is run is left out, and the rest is verified again
_FIRST = "import sys; from xmap_compat.tools.leave import recording; recording.main(sys.argv[1])"
HERE = os.path.dirname(os.path.abspath(__file__))
HOME = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))


@dataclasses.dataclass
class Options:
    write: bool = False
    force: bool = False
    diff: str = ""
    calls: int = 3
    stop_after: str = ""
    memory: int = 1024
    assignment: int | None = None


def main(args: Sequence[str]) -> int:
    """Returns the exit code: 0 if each construction is verified, 1 if not, 2 if there is nothing to patch."""
    if args and args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    try:
        options, program = _options(list(args))
    except ValueError as error:
        print(error, USAGE, sep="\n", file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory(prefix="leave-") as scratch:
            return Leaving(options, program, os.path.realpath(scratch)).run()
    except Refused as error:
        print(f"leave: {error}", file=sys.stderr)
        return 2


def _options(args: list[str]) -> tuple[Options, list[str]]:
    """The options, and the program with its arguments; raises ValueError with what is wrong."""
    options = Options()
    while args and args[0].startswith("--"):
        option, given, value = args.pop(0).partition("=")
        name = option[2:].replace("-", "_")
        if name not in Options.__dataclass_fields__:
            raise ValueError(messages.UNKNOWN_OPTION.format(option))
        if isinstance(getattr(options, name), bool):
            setattr(options, name, True)
            continue
        value = value if given else args.pop(0) if args else ""
        number = value.removesuffix("s") if name == "stop_after" else value
        if not value or (name != "diff" and not (number.isdecimal() and int(number))):
            what = "a file" if name == "diff" else "a number"
            raise ValueError(messages.TAKES.format(option=option, what=what, value=value))
        setattr(options, name, value if name in ("diff", "stop_after") else int(value))
    if not args or args == ["-m"]:
        raise ValueError(messages.NO_PROGRAM)
    if args[0].startswith("-") and args[0] != "-m":
        raise ValueError(messages.UNKNOWN_OPTION.format(args[0]))
    for arg in args[1 + (args[0] == "-m") :]:
        if (name := arg.partition("=")[0]) in (f"--{n.replace('_', '-')}" for n in Options.__dataclass_fields__):
            print(messages.GIVEN_TO_THE_PROGRAM.format(option=name), file=sys.stderr)
    return options, args


class Leaving:
    """One invocation: its two runs, what they found, and the patch that follows."""

    def __init__(self, options: Options, program: list[str], scratch: str):
        self.options, self.program, self.scratch = options, program, scratch
        self.cwd, self.script, self.seconds, self.code = os.path.realpath(os.getcwd()), "", 0.0, 0
        self.folders: dict[str, str] = {}  # of the first run: each folder, and its copy
        self.reasons: dict[Any, str] = {}
        if program[0] != "-m":
            self.script = os.path.realpath(program[0])
            try:
                ast.parse(python_of(patch.contents(self.script), self.script))
            except SyntaxError as error:
                raise Refused(messages.NOT_PYTHON.format(name=program[0], error=error)) from None
            except (OSError, ValueError, KeyError) as error:
                raise Refused(messages.NOT_READ.format(name=program[0], error=error)) from None

    def run(self) -> int:
        for _ in range(ROUNDS):
            found, records = self.first_run()
            patched = {c.number: c for c in found.constructions if c.edits}
            reasons = self.second_run(found, records, patched) if patched else {}
            self.reasons |= {patched[n].key: reason for n, reason in reasons.items()}
            if not reasons:
                break
        else:
            left = (c.key for c in found.constructions if not c.refused)
            self.reasons = dict.fromkeys(left, messages.NOT_VERIFIED.format(messages.OTHERS_DIFFER)) | self.reasons
        return self.report(found, {} if reasons else self.changes(found, patched.values()))

    # The two runs

    def first_run(self) -> tuple[Edited, str]:
        """Record the program, and make its edits without the constructions that have differed."""
        stop, begun = self.options.stop_after, time.monotonic()
        limit = int(stop.removesuffix("s") or 0)
        spec = self.prepared("first", limit if stop.endswith("s") else 0)
        spec |= {"without": [*self.reasons], "assignment": self.options.assignment, "calls": self.options.calls}
        spec |= {"bytes": self.options.memory << 20, "calls at most": 0 if stop.endswith("s") else limit}
        self.folders = spec["folders"]
        self.code = self.execute(spec, ["-c", _FIRST], None)
        self.seconds = time.monotonic() - begun
        found = pickle.loads(patch.contents(spec["result"])) if os.path.exists(spec["result"]) else None
        if found is None or not any(c.calls for c in found.constructions):
            name = self.program[self.program[0] == "-m"]
            how = f"with {found.ended or 'no error'}" if found else f"its process with exit code {self.code}"
            when = messages.BEFORE_ITS_FIRST_CALL if self.code else messages.CALLED_NONE
            raise Refused(messages.NO_CALL.format(name=name, how=how, when=when))
        return found, spec["records"]

    def second_run(self, found: Edited, records: str, patched: Mapping[int, Construction]) -> dict[int, str]:
        """Run the edited program; returns why constructions are not verified."""
        if differ := {n: messages.COMPUTES_ANOTHER.format(c.differs) for n, c in patched.items() if c.differs}:
            return differ
        spec = self.prepared("second", 0)
        spec |= {"records": records, "patched": [*patched], "stopped": found.ended == "stopped"}
        spec["stopped"] |= self.options.assignment is not None  # what is not chosen cannot run after it
        spec["some stay"] = bool(found.left) or any(c.refused for c in found.constructions)
        for path, (_, data) in self.changes(found, patched.values(), probed=True).items():
            with open(moved(spec["folders"], path), "wb") as file:
                file.write(data)
        code = self.execute(spec, [os.path.join(HERE, "verifying.py")], max(120.0, 10 * self.seconds))
        seen = json.loads(patch.contents(spec["result"])) if os.path.exists(spec["result"]) else {}
        problems = {int(n): messages.FOUND_TO_DIFFER.format(text) for n, text in seen.get("problems", {}).items()}
        ended = seen.get("ended", "")
        # The type of an exception: its message may have random numbers.
        both = (ended, code), (found.ended, self.code)
        same = len({(words.partition(":")[0], k) for words, k in both}) == 1
        if not (
            seen.get("whole") and (same or "stopped" in (ended, found.ended))
        ):  # because of those that differ, if there are any
            ends = (words.rstrip(".") or (f"exit code {k}" if k else messages.NO_ERROR) for words, k in both)
            how = ". ".join([messages.ENDED.format(*ends), *found.otherwise])
            return problems or dict.fromkeys(patched, messages.NOT_VERIFIED.format(how))
        for n, c in patched.items():
            if (again := seen["agreed"].get(str(n), 0)) < c.recorded:
                why = messages.TOO_FEW.format(recorded=c.recorded, agreed=again)
                problems.setdefault(n, messages.NOT_VERIFIED.format(why))
            elif not (c.recorded or c.inside & patched.keys()):
                problems.setdefault(n, messages.NOT_VERIFIED.format(c.problem or messages.NONE_RECORDED))
        return problems

    def prepared(self, run: str, seconds: int) -> dict[str, Any]:
        """What a run is told, in fresh copies of the folders."""
        here = os.path.join(self.scratch, run)
        shutil.rmtree(here, ignore_errors=True)
        tree, beside = os.path.join(here, "tree"), os.path.dirname(self.script)
        folders = patch.mirror([self.cwd, *filter(None, [beside])], tree)
        spec: dict[str, Any] = {"tree": tree + os.sep, "folders": folders, "program": self.program}
        spec |= {name: os.path.join(here, name) for name in ("records", "result", "log", "spec")}
        spec |= {"cwd": moved(folders, self.cwd), "beside": moved(folders, beside or self.cwd), "seconds": seconds}
        spec["runner"] = os.path.join(HOME, "xmap_compat", "legacy", "runner.py")
        if self.script:
            copy, inside = moved(folders, self.script), os.path.join(spec["cwd"], "")
            spec["program"] = [copy.removeprefix(inside), *self.program[1:]]
            if copy.endswith(NOTEBOOK):
                with open(copy, "w", encoding="utf-8") as file:
                    file.write(python_of(patch.contents(self.script), self.script))
        return spec

    def execute(self, spec: dict[str, Any], entry: list[str], limit: float | None) -> int:
        """Run a process; the second one's output is kept apart."""
        with open(spec["spec"], "w", encoding="utf-8") as file:
            json.dump(spec, file)
        path = os.pathsep.join(filter(None, [HOME, os.environ.get("PYTHONPATH")]))
        options: dict[str, Any] = {"cwd": spec["cwd"], "env": {**os.environ, "PYTHONPATH": path}, "timeout": limit}
        command = [sys.executable, *entry, spec["spec"]]
        with open(spec["log"], "wb") as log:
            options |= {"stdout": 2} if limit is None else {"stdout": log, "stderr": log}
            try:
                return subprocess.run(command, stdin=subprocess.DEVNULL, **options).returncode
            except subprocess.TimeoutExpired:
                return 124

    # The patch

    def changes(self, found: Edited, patched: Iterable[Construction], probed: bool = False) -> patch.Changes:
        """What the files hold and are to hold; for the second run, with a probe around each construction."""
        edits: dict[FileEdit, None] = {}
        for c in patched:
            (file, own), *others = c.edits
            if probed:
                probe = "lambda f: __leave_probe__({}, ({})(f))" if c.decorates else "__leave_probe__({}, {})"
                text, *rest = re.split(r"(\n\s*@)", own.text, maxsplit=1) if c.decorates else [own.text]  # the first
                own = dataclasses.replace(own, text="".join([probe.format(c.number, text), *rest]))
            edits |= dict.fromkeys([(file, own), *others, *found.shared])
        users = {copy: folder for folder, copy in self.folders.items()}
        changes: dict[str, tuple[bytes | None, bytes]] = {}
        for copy in sorted({file for file, _ in edits}):
            path, ran = moved(users, copy), patch.contents(copy)
            data, mine = patch.contents(path), [edit for file, edit in edits if file == copy]
            if (python_of(data, path).encode() if path.endswith(NOTEBOOK) else data) != ran:
                raise Refused(messages.CHANGED_WHILE_IT_RAN.format(path=path))
            is_cells = path.endswith(NOTEBOOK) and not probed
            changes[path] = data, fix.applied(data, path, mine) if is_cells else fix.applied(ran, "", mine)
        if edits and found.helpers:
            changes[moved(users, found.helper_file)] = None, found.helpers.encode()
        return changes

    def report(self, found: Edited, changes: patch.Changes) -> int:
        """Print the patch and a table, save or write it, and return the exit code."""
        text, constructions = patch.diff(changes), found.constructions
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        lines: list[tuple[str, ...]] = [("", "construction", "function", "calls", "")]
        reasons = [self.reason(c) for c in constructions]
        for c, reason in zip(constructions, reasons):
            calls = f"verified on {c.recorded}" if c.recorded else "verified inside of another"
            calls += ", with gradients" * c.differentiated + f", by its calls only: {c.unproved}" * bool(c.unproved)
            words = reason or calls
            words = re.sub(rf"{re.escape(self.scratch)}/\w+/tree/\d+/", "", words)
            lines.append((str(c.number + 1), c.where, c.function, str(c.calls), words))
        verified = reasons.count("")
        print("\n".join(table(lines)))
        count = sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in text.splitlines())
        where = f"{plural(count, 'line')} in {plural(len(changes), 'file')}"
        print(f"{verified} of {len(constructions)} constructions patched, {where}")
        if changes and found.left:
            print(messages.LEFT.format(", ".join(found.left)))
        if self.options.diff:
            with open(self.options.diff, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                file.write(text)
        if self.options.write and changes:
            patch.write(changes, self.options.force)
            print("written:", *changes)
        return 0 if verified == len(constructions) else 1

    def reason(self, c: Construction) -> str:
        """Why a construction stays; empty if it is verified."""
        return self.reasons.get(c.key) or (c.refused and f"refused: {c.refused}")
