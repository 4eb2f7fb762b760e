"""Find the names that JAX removed in Python files and notebooks, which are not run; ``--fix``
rewrites them.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from xmap_compat.tools.check import checker, editor, facts, findings
from xmap_compat.tools.source.reading import read

CLEAN = 0
FOUND = 1
WRONG = 2
NOT_SEEN = (
    "Not seen: names made at run time, code in texts, uses in code that catches ImportError, and "
    "installed packages."
)
HOW = (
    "run it with `python -m xmap_compat SCRIPT`, "
    "or rewrite it with `python -m xmap_compat check --fix PATH`"
)
EXIT_CODES = (
    "Exit code: 0 nothing would stop a run under install(), 1 something would, 2 wrong call."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.epilog = EXIT_CODES
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="files, and folders of programs"
    )
    parser.add_argument("--fix", action="store_true", help="rewrite the files")
    parser.add_argument("--diff", action="store_true", help="show what --fix would write")


def main(args: argparse.Namespace) -> int:
    """Check files; returns the exit code."""
    try:
        checked = findings.check(args.paths)
    except (checker.NoChecker, facts.NoJax) as error:
        print(error, file=sys.stderr)
        return WRONG
    if not checked.programs:
        print("0 files: no Python file or notebook in", *args.paths, file=sys.stderr)
        return WRONG
    found = checked.findings
    if args.fix or args.diff:
        fixed = editor.fixed(checked)
        _write(fixed, args.fix)
        found = fixed.left
    print(*found, f"{_summary(checked)}\n{NOT_SEEN}", sep="\n")
    if any(finding.fails for finding in found):
        return FOUND
    return CLEAN


def _summary(checked: findings.Checked) -> str:
    alive = [finding for finding in checked.findings if not finding.guarded]
    failing = sum(finding.fails for finding in alive)
    restored = len(alive) - failing
    text = (
        f"Files: {len(checked.programs)} (jax {checked.jax}). Uses of removed names: {restored} "
        f"that install() restores, {failing} to change by hand"
    )
    if restored:
        text += f";\n{HOW}"
    return f"{text}."


def _write(fixed: editor.Fixed, is_written: bool) -> None:
    """Write new contents of files, or show what they would change."""
    for path, new in fixed.contents.items():
        if is_written:
            path.write_bytes(new)
            print(f"rewritten: {path}")
        else:
            before = read(path).text.splitlines()
            after = read(path, new).text.splitlines()
            name = str(path)
            for line in difflib.unified_diff(before, after, name, name, n=1, lineterm=""):
                print(line)
