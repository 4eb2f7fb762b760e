"""Find the names that JAX removed in Python files and notebooks, which are not run; ``--fix``
rewrites them.

The exact answer is that of a run: check --report SCRIPT [ARGS...] prints each removed name that it
looked up.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

from xmap_compat.tools.check import checker, editor, facts, findings, report, table
from xmap_compat.tools.progress import progress
from xmap_compat.tools.source.reading import NOTEBOOK, Program, read

CLEAN = 0
FOUND = 1
WRONG = 2
LEFT = 3
NOT_SEEN = (
    "Not seen: names made at run time, uses in code that catches ImportError, and installed "
    "packages.\n"
    "`python -m xmap_compat check --report SCRIPT` runs a program, and lists all that it looks up."
)
STRICTER = (
    "Only the xmap of install() accepts results that vary over an axis that out_axes lack, and "
    "axis_resources of no axis: xmap_compat.xmap refuses them."
)
HOW = (
    "run it with `python -m xmap_compat SCRIPT`, "
    "or rewrite it with `python -m xmap_compat check --fix PATH`"
)
EXIT_CODES = (
    "Exit code: 0 nothing would stop a run under install(), 1 something would, 2 wrong call, "
    "3 not all fixed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.epilog = EXIT_CODES
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="PATH", help="files, and folders of programs"
    )
    parser.add_argument(
        "--report", nargs=argparse.REMAINDER, metavar="SCRIPT", help="run it, or -m MODULE, instead"
    )
    parser.add_argument("--fix", action="store_true", help="rewrite the files")
    parser.add_argument("--diff", action="store_true", help="show what --fix would write")
    parser.add_argument(
        "--no-install", action="store_true", help="list what needs install(), and do not call it"
    )


def main(args: argparse.Namespace) -> int:
    """Check files, or run a program and report; returns the exit code."""
    if args.report and args.report[0].endswith(NOTEBOOK):
        return _wrong("--report runs a SCRIPT, or -m MODULE; give a notebook as a PATH")
    if args.report:
        return report.main(args.report)
    if args.report is not None:
        return _wrong("--report needs a SCRIPT, or -m MODULE")
    if not args.paths:
        return _wrong("no PATH is given")
    for path in args.paths:
        if not path.exists():
            return _wrong(f"no such file or folder: {path}")
    try:
        checked = findings.check(args.paths, _with_progress)
    except (checker.NoChecker, facts.NoJax) as error:
        return _wrong(str(error))
    if not checked.programs:
        return _wrong(f"0 files: no Python file or notebook in {', '.join(map(str, args.paths))}")
    if args.fix or args.diff:
        return _fix(checked, args.fix, not args.no_install)
    for finding in checked.unguarded:
        print(finding)
    if checked.guarded:
        print("guarded, and no finding:", *checked.guarded, sep="\n")
    print(_summary(checked))
    print(NOT_SEEN)
    for finding in checked.unguarded:
        if finding.fails:
            return FOUND
    return CLEAN


def _wrong(message: str) -> int:
    print(message, file=sys.stderr)
    return WRONG


def _with_progress(programs: list[Program]) -> Iterator[Program]:
    return progress(programs, "files")


def _counted(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}s"


def _summary(checked: findings.Checked) -> str:
    unread = sum(finding.gone.kind == table.ERROR for finding in checked.unguarded)
    uses = len(checked.unguarded) - unread
    by_hand = sum(finding.fails for finding in checked.unguarded) - unread
    found = "No removed name found"
    then = ""
    if uses:
        found = f"{_counted(uses, 'use')} of removed names"
    if by_hand:
        then = f": {by_hand} to change by hand, {uses - by_hand} that install() restores"
    elif uses:
        then = f"; install() restores all:\n{HOW}"
    if unread:
        then += f"; {_counted(unread, 'error')} in files that cannot be read"
    files = _counted(len(checked.programs), "file")
    return f"{found} in {files} (jax {checked.jax}){then}."


def _fix(checked: findings.Checked, write: bool, install: bool) -> int:
    fixed = editor.fixed(checked, install)
    for path, new in fixed.contents.items():
        if write:
            path.write_bytes(new)
            print(f"rewritten: {path}")
        else:
            before = read(path).text.splitlines(True)
            after = read(path, new).text.splitlines(True)
            sys.stdout.writelines(difflib.unified_diff(before, after, str(path), str(path), n=1))
    errors = [finding for finding in checked.findings if finding.gone.kind == table.ERROR]
    done = "rewritten"
    if not write:
        done = "would be rewritten"
    summary = f"Files {done}: {len(fixed.contents)}, names left: {len(fixed.left)}."
    print(*errors, *fixed.left, summary, sep="\n")
    if f"{table.MAPS}.xmap" in {finding.gone.name for finding in checked.findings}:
        print(STRICTER)
    print(NOT_SEEN)
    if fixed.left:
        return LEFT
    if errors:
        return FOUND
    return CLEAN
