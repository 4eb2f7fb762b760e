"""The adapter to the type checker, ty: which attributes modules and arrays lack; nothing else here
knows it.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from xmap_compat.tools.source.reading import Program

MISSING = "it needs the type checker ty, which is not installed here: pip install '.[check]'"
_COMMAND = """
-m ty check --ignore all --error missing-attribute --error missing-union-attribute
--config analysis.respect-type-ignore-comments=false
--output-format gitlab --no-progress --exit-zero
"""
# Parts of its messages.
_OWNER = re.compile(r"(?:<module '|^Module `|^Object of type `)(jax[\w.]*|Array)\b")
_ATTRIBUTE = re.compile(r"(?:has no member |has no attribute |^Attribute )`(\w+)`")


class NoChecker(Exception):
    """ty is not installed, or did not do what it should."""


class MissingAttribute(NamedTuple):
    """An attribute that ty does not find; the line and the column of its end count from 1, the
    latter in characters.
    """

    line: int
    column: int
    name: str  # dotted; for an array ``jax.Array.attribute``


def missing_attributes(programs: Iterable[Program]) -> dict[Path, list[MissingAttribute]]:
    """What ty says about each program."""
    if importlib.util.find_spec("ty") is None:
        raise NoChecker(MISSING)
    found: dict[Path, list[MissingAttribute]] = defaultdict(list)
    files: dict[Path, Path] = {}
    roots: dict[Path, None] = {}
    with tempfile.TemporaryDirectory(prefix="xmap_compat") as temporary:
        folder = Path(temporary).resolve()
        for number, program in enumerate(programs):
            path = program.path.resolve()
            roots[_root_of(path)] = None
            if path.suffix != ".py":
                path = folder / f"notebook{number}.py"
                path.write_text(program.text, encoding="utf-8")
            files[path] = program.path
        command = [sys.executable, *_COMMAND.split(), "--python", sys.executable]
        command += [f"--extra-search-path={root}" for root in roots]
        command += ["--project", temporary, "--", *map(str, files)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    try:
        messages = json.loads(done.stdout)
    except ValueError:
        raise NoChecker(f"ty failed: {done.stderr.strip()}") from None
    for message in messages:
        text = message["description"].partition(": ")[2]
        owner = _OWNER.search(text.partition(" in union ")[0])
        attribute = _ATTRIBUTE.search(text)
        if owner and attribute:
            end = message["location"]["positions"]["end"]
            name = f"{owner[1].replace('Array', 'jax.Array')}.{attribute[1]}"
            path = files[folder / message["location"]["path"]]
            found[path].append(MissingAttribute(end["line"], end["column"], name))
    return found


def _root_of(path: Path) -> Path:
    """Where a file's modules are imported from: the first folder above it that is no package."""
    folder = path.parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder
