"""Find the names that JAX removed in Python files and notebooks, which are not run; ``--fix``
rewrites them.

The exact answer is that of a run: check --report SCRIPT [ARGS...] prints each removed name that it
looked up.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from xmap_compat.tools.check import checker, editor, facts, findings, report, table
from xmap_compat.tools.source.reading import Program, read

CLEAN, FOUND, WRONG, LEFT = 0, 1, 2, 3
NOT_SEEN = (
    "Not seen: names made at run time, uses after the error of an import was caught, and installed packages.\n"
    "`python -m xmap_compat check --report SCRIPT` runs a program, and lists all that it looks up."
)
HOW = "run it with `python -m xmap_compat SCRIPT`, or rewrite it with `python -m xmap_compat check --fix PATH`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.epilog = (
        "Exit code: 0 nothing that a run under install() dies of, 1 something, "
        "2 wrong call, 3 not all fixed."
    )
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
    parser.add_argument(
        "--output-format", choices=("text", "json"), default="text", help="of the findings"
    )


def main(args: argparse.Namespace) -> int:
    """Check files, or run a program and report; returns the exit code."""
    if args.report is not None:
        return (
            report.main(args.report)
            if args.report
            else _wrong("--report needs a SCRIPT, or -m MODULE")
        )
    missing = [str(path) for path in args.paths if not path.exists()]
    if missing or not args.paths:
        return _wrong(
            f"no such file or folder: {', '.join(missing)}" if missing else "no PATH is given"
        )
    try:
        checked = findings.check(args.paths, _with_progress)
    except (checker.NoChecker, facts.NoJax) as error:
        return _wrong(str(error))
    if args.fix or args.diff:
        return _fix(checked, args.fix, not args.no_install)
    if args.output_format == "json":
        print(
            json.dumps(
                {"jax": checked.jax, "findings": [*_as_json(checked)], "not seen": NOT_SEEN},
                indent=1,
            )
        )
    else:
        print(*checked.reported, _summary(checked), sep="\n")
    return FOUND if any(finding.dies for finding in checked.reported) else CLEAN


def _wrong(message: str) -> int:
    print(message, file=sys.stderr)
    return WRONG


def _with_progress(programs: list[Program]) -> Iterator[Program]:
    """The programs that speak of JAX, with a bar on a terminal."""
    shown, last = sys.stderr.isatty() and len(programs) > 20, len(programs)
    for number, program in enumerate(programs, start=1):
        yield program
        if shown and (number % 10 == 0 or number == last):
            bar = "#" * (30 * number // last)
            print(
                f"\r[{bar:30}] {number} of {last} files",
                end="\n" * (number == last),
                file=sys.stderr,
                flush=True,
            )


def _summary(checked: findings.Checked) -> str:
    names = Counter(finding.dies for finding in checked.reported)
    counts = (names.total(), "use"), (len(checked.programs), "file")
    uses, files = (f"{count} {of}{'s' * (count != 1)}" for count, of in counts)
    found = f"{uses} of removed names" if checked.reported else "No removed name found"
    restored = f"; install() restores all:\n{HOW}" if checked.reported else ""
    by_hand = f": {names[True]} to change by hand, {names[False]} that install() restores"
    return (
        f"{found} in {files} (jax {checked.jax}){by_hand if names[True] else restored}.\n{NOT_SEEN}"
    )


def _as_json(checked: findings.Checked) -> Iterator[dict[str, object]]:
    for finding in checked.reported:
        own = {name: getattr(finding, name) for name in ("cell", "line", "column", "dies")}
        gone = {name: getattr(finding.gone, name) for name in ("name", "kind", "until", "remedy")}
        yield {"path": str(finding.path), **own, **gone}


def _fix(checked: findings.Checked, write: bool, install: bool) -> int:
    fixed = editor.fixed(checked, install)
    for path, new in fixed.contents.items():
        if write:
            path.write_bytes(new)
            print(f"rewritten: {path}")
        else:
            before, after = (read(path, data).text.splitlines(True) for data in (None, new))
            sys.stdout.writelines(difflib.unified_diff(before, after, str(path), str(path), n=1))
    errors = [finding for finding in checked.findings if finding.gone.kind == table.ERROR]
    left = [f"{finding}{'; needs install()' * (not finding.dies)}" for finding in fixed.left]
    done = (
        f"{'' if write else 'would be '}rewritten: {len(fixed.contents)}, names left: {len(left)}"
    )
    print(*errors, *left, f"Files {done}.\n{NOT_SEEN}", sep="\n")
    return LEFT if left else FOUND if errors else CLEAN
