"""``python -m xmap_compat leave``: run a program twice in copies of its folders, and print or write its patch."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from xmap_compat.tools.leave import patch, verifying
from xmap_compat.tools.leave.patch import Refused
from xmap_compat.tools.text import table

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
            raise ValueError(f"unknown option: {option}")
        if isinstance(getattr(options, name), bool):
            setattr(options, name, True)
            continue
        value = value if given else args.pop(0) if args else ""
        number = value.removesuffix("s") if name == "stop_after" else value
        if not value or (name != "diff" and not (number.isdecimal() and int(number))):
            raise ValueError(f"{option} takes {'a file' if name == 'diff' else 'a number'}, but got {value!r}")
        setattr(options, name, value if name in ("diff", "stop_after") else int(value))
    if not args or args == ["-m"] or (args[0].startswith("-") and args[0] != "-m"):
        raise ValueError(f"unknown option: {args[0]}" if args and args != ["-m"] else "no program is given")
    return options, args


class Leaving:
    """One invocation: its two runs, what they found, and the patch that follows."""

    def __init__(self, options: Options, program: list[str], scratch: str):
        self.options, self.program, self.scratch = options, program, scratch
        self.cwd, self.script, self.seconds = os.path.realpath(os.getcwd()), "", 0.0
        self.specs: dict[str, dict[str, Any]] = {}
        self.reasons: dict[tuple[Any, ...], str] = {}
        if program[0] != "-m":
            self.script = os.path.realpath(program[0])
            self._check_script()

    def _check_script(self) -> None:
        name = self.program[0]
        try:
            with open(self.script, "rb") as file:
                text, _ = patch.text_of(file.read(), self.script)
            ast.parse(text, name)
        except SyntaxError as error:
            raise Refused(f"{name} is not valid Python: {error}. Nothing is run") from None
        except (OSError, ValueError, KeyError) as error:
            raise Refused(f"{name} cannot be read: {error}") from None

    def run(self) -> int:
        without: list[Any] = []
        for _ in range(ROUNDS):
            found = self.first_run(without)
            patched = {n: row for n, row in enumerate(found["outcomes"]) if row["edits"]}
            reasons = self.second_run(found, patched) if patched else {}
            self.reasons.update((tuple(patched[n]["place"]), reason) for n, reason in reasons.items())
            if not reasons:
                break
            without += [patched[n]["place"] for n in reasons]
        return self.report(found["outcomes"], {} if reasons else self.changes(found, patched))

    # The two runs

    def first_run(self, without: list[Any]) -> dict[str, Any]:
        """Record the program, and make its edits without some constructions."""
        spec = self.prepared("first")
        limit, unit = self.options.stop_after.removesuffix("s"), self.options.stop_after[-1:]
        spec |= {"without": without, "assignment": self.options.assignment, "calls": self.options.calls}
        spec |= {"bytes": self.options.memory << 20, "calls at most": int(limit or 0) if unit != "s" else 0}
        spec["seconds"] = int(limit) if unit == "s" else 0
        begun = time.monotonic()
        code = self.execute(spec, ["-m", "xmap_compat.tools.leave.recording"], None)
        self.seconds = time.monotonic() - begun
        found = _read(spec["result"])
        if not any(row["calls"] for row in found.get("outcomes", ())):
            how = f"with {found['ended'] or 'no error'}" if found else f"its process with exit code {code}"
            seen = "before its first call of an xmapped function" if code else "and called no xmapped function"
            raise Refused(f"{self.program[self.program[0] == '-m']} ended {how} {seen}. Nothing is patched")
        return found

    def second_run(self, found: dict[str, Any], patched: dict[int, Any]) -> dict[int, str]:
        """Run the edited program; returns why constructions are not verified."""
        first = self.specs["first"]
        spec = self.prepared("second")
        spec |= {"records": first["records"], "patched": [*patched], "seconds": 0}
        spec["stopped"] = found["ended"] == "stopped"
        spec["some stay"] = any(row["refused"] for row in found["outcomes"])
        for path, (_, data) in self.changes(found, patched, probed=True).items():
            with open(verifying.moved(spec, path), "wb") as file:
                file.write(data)
        code = self.execute(spec, [os.path.join(HERE, "verifying.py")], max(120.0, 10 * self.seconds))
        seen = _read(spec["result"])
        problems = {int(n): f"differs when it is run: {text}" for n, text in seen.get("problems", {}).items()}
        agreed = {int(n): count for n, count in seen.get("agreed", {}).items()}
        how = f"the edited program ended with {seen.get('ended') or f'exit code {code}'}"
        same = (first["code"], _kind(found["ended"])) == (code, _kind(seen.get("ended", "")))
        if not problems and not (seen.get("whole") and (same or spec["stopped"])):
            return dict.fromkeys(patched, f"not verified: {how}")
        for n, row in patched.items():
            if n in problems:
                continue
            if (again := agreed.get(n, 0)) < row["recorded"]:
                problems[n] = f"not verified: {row['recorded']} calls were recorded, and {again} found again"
            elif not row["recorded"] and not row["inside"]:
                problems[n] = f"not verified: {row['problem'] or 'none of its calls could be recorded'}"
        return _with_those_that_share(problems, patched)

    def prepared(self, run: str) -> dict[str, Any]:
        """What a run is told, in fresh copies of the folders."""
        here = os.path.join(self.scratch, run)
        shutil.rmtree(here, ignore_errors=True)
        tree = os.path.join(here, "tree")
        folders = patch.mirror([self.cwd, *([os.path.dirname(self.script)] if self.script else [])], tree)
        spec: dict[str, Any] = {"tree": tree + os.sep, "folders": folders, "program": self.program}
        spec |= {name: os.path.join(here, name) for name in ("records", "result", "log", "spec")}
        spec |= {
            "cwd": verifying.moved(spec, self.cwd),
            "runner": os.path.join(HOME, "xmap_compat", "legacy", "runner.py"),
        }
        spec["beside"] = spec["cwd"]
        if self.script:
            copy = verifying.moved(spec, self.script)
            name = os.path.relpath(copy, spec["cwd"]) if copy.startswith(spec["cwd"] + os.sep) else copy
            spec["program"] = [name, *self.program[1:]]
            spec["beside"] = os.path.dirname(copy)
            if self.script.endswith(".ipynb"):
                with open(self.script, "rb") as source, open(copy, "w", encoding="utf-8", newline="") as target:
                    target.write(patch.text_of(source.read(), self.script)[0])
        self.specs[run] = spec
        return spec

    def original(self, path: str) -> str:
        """The user's file of a file in the copy of the first run."""
        back = {copy: folder for folder, copy in self.specs["first"]["folders"].items()}
        return verifying.moved({"folders": back}, path)

    def execute(self, spec: dict[str, Any], entry: list[str], limit: float | None) -> int:
        """Run a process; the second one's output is kept apart."""
        with open(spec["spec"], "w", encoding="utf-8") as file:
            json.dump(spec, file)
        path = os.pathsep.join(filter(None, [HOME, os.environ.get("PYTHONPATH")]))
        options: dict[str, Any] = {
            "cwd": spec["cwd"],
            "env": {**os.environ, "PYTHONPATH": path},
            "stdin": subprocess.DEVNULL,
        }
        with open(spec["log"], "wb") as log:
            out: dict[str, Any] = {"stdout": 2} if limit is None else {"stdout": log, "stderr": log}
            try:
                command = [sys.executable, *entry, spec["spec"]]
                spec["code"] = subprocess.run(command, **options, **out, timeout=limit).returncode
            except subprocess.TimeoutExpired:
                spec["code"] = 124
        return spec["code"]

    # The patch

    def changes(self, found: dict[str, Any], patched: dict[int, Any], probed: bool = False) -> patch.Changes:
        """What the files hold and are to hold."""
        edits = set()
        for n, row in patched.items():
            (file, start, end, text), *others = row["edits"]
            if probed:
                probe = "lambda f: __leave_probe__({}, ({})(f))" if row["decorates"] else "__leave_probe__({}, {})"
                text = probe.format(n, text)
            edits |= {(file, start, end, text), *map(tuple, others)}
        edits |= set(map(tuple, found["shared"])) if patched else set()
        changes: dict[str, tuple[bytes | None, bytes]] = {}
        for copy in sorted({edit[0] for edit in edits}):
            path = self.original(copy)
            with open(path, "rb") as file, open(copy, "rb") as ran:
                data, text = file.read(), ran.read()
            if not path.endswith(".ipynb") and data != text:
                raise Refused(f"{path} changed while the program ran. Nothing is written: run leave again")
            after = patch.edited(data, path, [edit for edit in edits if edit[0] == copy])
            if probed and path.endswith(".ipynb"):
                after = patch.text_of(after, path)[0].encode()
            changes[path] = data, after
        if patched and found["helpers"]:
            changes[self.original(found["helper_file"])] = None, found["helpers"].encode()
        return changes

    def report(self, rows: list[Any], changes: patch.Changes) -> int:
        """Print the patch and a table, save or write it, and return the exit code."""
        text = patch.diff(changes)
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        lines: list[tuple[str, ...]] = [("", "construction", "function", "calls", "")]
        stays = [bool(row["refused"]) or tuple(row["place"]) in self.reasons for row in rows]
        verified = 0
        for k, row in enumerate(rows, 1):
            file, line, _ = row["place"]
            reason = self.reasons.get(tuple(row["place"])) or (row["refused"] and f"refused: {row['refused']}")
            if not (reason or row["edits"]) and any(stays[n] for n in row["inside"]):
                reason = "not verified: the one around it is not"
            verified += not reason
            calls = f"verified on {row['recorded']}" if row["recorded"] else "verified inside of another"
            words = reason or f"{calls}{', with gradients' if row['differentiated'] else ''}"
            for copy in [copy for spec in self.specs.values() for copy in spec["folders"].values()]:
                words = words.replace(copy + os.sep, "")
            lines.append((str(k), f"{os.path.basename(file)}:{line}", row["function"], str(row["calls"]), words))
        print("\n".join(table(lines)))
        count = sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in text.splitlines())
        print(f"{verified} of {len(rows)} constructions patched, {count} lines in {len(changes)} files")
        if self.options.diff:
            with open(self.options.diff, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                file.write(text)
        if self.options.write and changes:
            patch.write(changes, self.options.force)
            print("written:", *changes)
        return 0 if verified == len(rows) else 1


def _with_those_that_share(problems: dict[int, str], patched: dict[int, Any]) -> dict[int, str]:
    """Also the constructions that share an edited function with one that is not verified."""
    edits = {n: {tuple(edit) for edit in row["edits"]} for n, row in patched.items()}
    while more := {n: m for n in edits for m in problems if n not in problems and edits[n] & edits[m]}:
        for n, m in more.items():
            file, line, _ = patched[m]["place"]
            problems[n] = f"not verified: it shares edits with that of {os.path.basename(file)}:{line}"
    inside = {n for n, row in patched.items() if not row["recorded"] and set(row["inside"]) & set(problems)}
    return {**dict.fromkeys(inside, "not verified: the one around it is not"), **problems}


def _kind(ended: str) -> str:
    """The type of the exception that ended a program; its message may have random numbers."""
    return ended.partition(":")[0]


def _read(path: str) -> dict[str, Any]:
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return json.load(file)
