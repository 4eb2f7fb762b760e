"""The adapter to the type checker, ty: it resolves the names of programs; nothing else here knows it.

ty sees a copy of JAX's folder (links, but for the modules that lost names), in which each removed name stands again as
a class that is deprecated.  So it reports each use of one, wherever the name came from, at its range, in words of ours.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

MISSING = (
    "check needs the type checker ty, which is not installed here. Install it with: pip install 'xmap-compat[check]'"
)
MARK = "removed:"
# Its rules that tell of names, which are on alone, and the parts of their messages.
_RULES = ("deprecated", "missing-attribute", "missing-union-attribute")
_MARKED_NAME = re.compile(rf".*{MARK}(.*)")
_OWNER = re.compile(r"(?:<module '|^Module `|^Object of type `)(jax[\w.]*|Array)\b")
_ATTRIBUTE = re.compile(r"(?:has no member |has no attribute |^Attribute )`(\w+)`")
_MARKED = "@_removed({!r})\nclass {}(_Any): ...\n"
_IMPORTS = "\nfrom typing import Any as _Any\nfrom typing_extensions import deprecated as _removed\n"


class NoChecker(Exception):
    """ty is not installed, or did not do what it should."""


@dataclasses.dataclass(frozen=True)
class Reported:
    """What ty says about one name; lines and columns count from 1, columns in characters."""

    path: Path
    start: tuple[int, int]
    end: tuple[int, int]
    name: str  # dotted; for an array ``jax.Array.attribute``


def run(files: Iterable[Path], folder: Path, roots: Iterable[Path]) -> Iterator[Reported]:
    """Check files.  ty starts in ``folder``, and looks for modules in ``roots`` first: JAX with its marks."""
    if importlib.util.find_spec("ty") is None:
        raise NoChecker(MISSING)
    rules = "".join(f'{rule} = "error"\n' for rule in _RULES)
    settings = f'[rules]\nall = "ignore"\n{rules}[analysis]\nrespect-type-ignore-comments = false\n'
    (folder / "ty.toml").write_text(settings)
    command: list[str | Path] = [sys.executable, "-m", "ty", "check", "--project", folder, "--python", sys.executable]
    command += [part for root in roots for part in ("--extra-search-path", root)]
    command += ["--output-format", "gitlab", "--no-progress", "--exit-zero", "--", *files]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    try:
        messages = json.loads(done.stdout)
    except ValueError:
        raise NoChecker(f"ty failed: {done.stderr.strip()}") from None
    for message in messages:
        if name := _name(message["description"].partition(": ")[2]):
            location, ends = message["location"], message["location"]["positions"]
            start, end = ((ends[which]["line"], ends[which]["column"]) for which in ("begin", "end"))
            yield Reported(folder / location["path"], start, end, name)


def _name(message: str) -> str:
    """The name that JAX lacks, of which a message speaks; empty if it speaks of something else."""
    if marked := _MARKED_NAME.match(message):
        return marked[1]
    owner, attribute = _OWNER.search(message.partition(" in union ")[0]), _ATTRIBUTE.search(message)
    return f"{owner[1].replace('Array', 'jax.Array')}.{attribute[1]}" if owner and attribute else ""


def mark(jax: Path, names: Iterable[str], modules: Mapping[str, str], folder: Path) -> None:
    """Put a copy of JAX's folder into ``folder`` that has the names, marked, and these modules, of these texts."""
    added: dict[str, list[str]] = defaultdict(list, {module: [begin] for module, begin in modules.items()})
    for name in names:
        module, _, last = name.rpartition(".")
        added[module].append(_MARKED.format(MARK + name, last))
    for module in list(added):  # `jax.experimental.maps` is an attribute of its parent, too
        parent, _, last = module.rpartition(".")
        if parent:
            added[parent].append(f"import {module} as {last}\n")
    for module, parts in added.items():
        file = _file(jax, module)
        own = file.read_text(encoding="utf-8") if file.exists() else ""
        copy = folder / file.relative_to(jax.parent)
        for above in reversed(file.relative_to(jax.parent).parents[:-1]):
            _link(jax.parent / above, folder / above)
        copy.unlink(missing_ok=True)
        copy.write_text(own + _IMPORTS + "".join(parts), encoding="utf-8")


def _file(jax: Path, module: str) -> Path:
    """The file that a type checker reads for a module: its stub, if there is one."""
    path = jax.joinpath(*module.split(".")[1:])
    names = [path / "__init__.pyi", path / "__init__.py", path.with_suffix(".pyi")]
    return next((name for name in names if name.exists()), path.with_suffix(".py"))


def _link(source: Path, folder: Path) -> None:
    """Make a folder with links to what is in another, in the place of a link to it."""
    if folder.is_symlink() or not folder.exists():
        folder.unlink(missing_ok=True)
        folder.mkdir()
        for path in source.iterdir() if source.is_dir() else ():
            (folder / path.name).symlink_to(path)
