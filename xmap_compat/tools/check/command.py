"""Find the names that JAX removed in Python files and notebooks, which are not run; ``--fix`` rewrites them.

The exact answer is that of a run: check --report SCRIPT [ARGS...] prints each removed name that it looked up.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from xmap_compat.tools.check import checker, editor, facts, findings, report, table
from xmap_compat.tools.source.reading import read

CLEAN, FOUND, WRONG, LEFT = 0, 1, 2, 3
NOT_SEEN = (
    "Not seen: names made at run time, uses after the error of an import was caught, and installed packages.\n"
    "`python -m xmap_compat check --report SCRIPT` runs a program, and lists all that it looks up."
)
HOW = "run it with `python -m xmap_compat SCRIPT`, or rewrite it with `python -m xmap_compat check --fix PATH`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.epilog = (
        "Exit code: 0 nothing that a run under install() dies of, 1 something, 2 wrong call, 3 not all fixed."
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="files, and folders of programs")
    parser.add_argument("--report", nargs=argparse.REMAINDER, metavar="SCRIPT", help="run it, or -m MODULE, instead")
    parser.add_argument("--fix", action="store_true", help="rewrite the files")
    parser.add_argument("--diff", action="store_true", help="show what --fix would write")
    parser.add_argument("--no-install", action="store_true", help="list what needs install(), and do not call it")
    parser.add_argument("--output-format", choices=("text", "json"), default="text", help="of the findings")


def run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m xmap_compat check", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    return main(parser.parse_args(arguments))


def main(args: argparse.Namespace) -> int:
    """Check files, or run a program and report; returns the exit code."""
    if args.report is not None:
        return report.main(args.report) if args.report else _wrong("--report needs a SCRIPT, or -m MODULE")
    missing = [str(path) for path in args.paths if not path.exists()]
    if missing or not args.paths:
        return _wrong(f"no such file or folder: {', '.join(missing)}" if missing else "no PATH is given")
    try:
        checked = findings.check(args.paths, _with_progress)
    except (checker.NoChecker, facts.NoJax) as error:
        return _wrong(str(error))
    if args.fix or args.diff:
        return _fix(checked, args.fix, not args.no_install)
    if args.output_format == "json":
        print(json.dumps({"jax": checked.jax, "findings": [*_as_json(checked)], "not seen": NOT_SEEN}, indent=1))
    else:
        print(*checked.reported, _summary(checked), sep="\n")
    return FOUND if any(finding.dies for finding in checked.reported) else CLEAN


def _wrong(message: str) -> int:
    print(message, file=sys.stderr)
    return WRONG


def _with_progress(files: list[Path]) -> Iterator[Path]:
    """The files, with a bar on a terminal."""
    shown = sys.stderr.isatty() and len(files) > 20
    for number, file in enumerate(files, start=1):
        yield file
        if shown and (number % 10 == 0 or number == len(files)):
            bar = "#" * (30 * number // len(files))
            print(f"\r[{bar:30}] {number} of {len(files)} files", end="\n" * (number == len(files)), file=sys.stderr)


def _summary(checked: findings.Checked) -> str:
    count = len(checked.programs)
    files = f"{count} file{'s' * (count != 1)}"
    if not checked.reported:
        return f"No removed name found in {files} (jax {checked.jax}).\n{NOT_SEEN}"
    names = Counter(finding.dies for finding in checked.reported)
    uses = f"{names.total()} use{'s' * (names.total() != 1)} of removed names in {files} (jax {checked.jax})"
    if not names[True]:
        return f"{uses}; install() restores all:\n{HOW}.\n{NOT_SEEN}"
    return f"{uses}: {names[True]} to change by hand, {names[False]} that install() restores.\n{NOT_SEEN}"


def _as_json(checked: findings.Checked) -> Iterator[dict[str, object]]:
    for finding in checked.reported:
        where = {"path": str(finding.path), "cell": finding.cell, "line": finding.line, "column": finding.column}
        gone = {"name": finding.gone.name, "kind": finding.gone.kind, "until": finding.gone.until}
        yield {**where, **gone, "dies": finding.dies, "remedy": finding.gone.remedy}


def _fix(checked: findings.Checked, write: bool, install: bool) -> int:
    fixed = editor.edited(checked, install)
    for path, new in fixed.contents.items():
        if write:
            path.write_bytes(new)
            print(f"rewritten: {path}")
        else:
            before, after = (read(path, data).text.splitlines(True) for data in (None, new))
            sys.stdout.writelines(difflib.unified_diff(before, after, str(path), str(path), n=1))
    errors = [finding for finding in checked.findings if finding.gone.kind == table.ERROR]
    left = [f"{finding}{'; needs install()' * (not finding.dies)}" for finding in fixed.left]
    done = f"{len(fixed.contents)} file{'s' * (len(fixed.contents) != 1)} {'' if write else 'would be '}rewritten"
    print(*errors, *left, f"{done}, {len(left)} names left.\n{NOT_SEEN}", sep="\n")
    return LEFT if left else FOUND if errors else CLEAN
