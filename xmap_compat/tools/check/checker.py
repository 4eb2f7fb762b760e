"""The adapter to the type checker, ty: which attributes modules and arrays lack; nothing else here
knows it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

MISSING = "it needs the type checker ty, which is not installed here: pip install '.[check]'"
# The rules that are on, and the parts of their messages.
_RULES = ("missing-attribute", "missing-union-attribute")
_OWNER = re.compile(r"(?:<module '|^Module `|^Object of type `)(jax[\w.]*|Array)\b")
_ATTRIBUTE = re.compile(r"(?:has no member |has no attribute |^Attribute )`(\w+)`")


class NoChecker(Exception):
    """ty is not installed, or did not do what it should."""


@dataclasses.dataclass(frozen=True)
class MissingAttribute:
    """An attribute that ty does not find; the line and the column of its end count from 1, the
    latter in characters.
    """

    path: Path
    line: int
    column: int
    name: str  # dotted; for an array ``jax.Array.attribute``


def run(files: Iterable[Path], folder: Path, roots: Iterable[Path]) -> Iterator[MissingAttribute]:
    """Check files.  ty starts in ``folder``, and looks for modules in ``roots`` first."""
    if importlib.util.find_spec("ty") is None:
        raise NoChecker(MISSING)
    rules = "".join(f'{rule} = "error"\n' for rule in _RULES)
    settings = f'[rules]\nall = "ignore"\n{rules}[analysis]\nrespect-type-ignore-comments = false\n'
    (folder / "ty.toml").write_text(settings)
    command: list[str | Path] = [
        *(sys.executable, "-m", "ty", "check"),
        *("--project", folder, "--python", sys.executable),
    ]
    for root in roots:
        command += ["--extra-search-path", root]
    command += ["--output-format", "gitlab", "--no-progress", "--exit-zero", "--", *files]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    try:
        messages = json.loads(done.stdout)
    except ValueError:
        raise NoChecker(f"ty failed: {done.stderr.strip()}") from None
    for message in messages:
        end = message["location"]["positions"]["end"]
        text = message["description"].partition(": ")[2]
        owner = _OWNER.search(text.partition(" in union ")[0])
        attribute = _ATTRIBUTE.search(text)
        if owner and attribute:
            name = f"{owner[1].replace('Array', 'jax.Array')}.{attribute[1]}"
            yield MissingAttribute(
                folder / message["location"]["path"], end["line"], end["column"], name
            )
