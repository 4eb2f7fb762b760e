"""The adapter to the type checker, ty: it resolves the names of programs; nothing else here knows it.

ty sees a copy of JAX's folder (links, but for the modules that lost names), in which each removed name stands again as
a class that is deprecated.  So it reports each use of one, wherever the name came from, at its range, in words of ours.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

MISSING = (
    "check needs the type checker ty, which is not installed here. Install it with: pip install 'xmap-compat[check]'"
)
MARK = "removed:"
# Its rules that tell of names; the others are turned off.
_RULES = {
    "deprecated": re.compile(f".*{MARK}(.*)"),
    "missing-attribute": re.compile("Module `(.*)` has no member `(.*)`"),
    "missing-module-member": re.compile("Module `(.*)` has no member `(.*)`"),
    "import-not-found": re.compile("Cannot resolve imported module `(.*)`"),
    "missing-union-attribute": re.compile("Attribute `(?P<b>.*)` is not defined on `<module '(?P<a>jax[^']*)'>`"),
    "not-callable": re.compile("Object of type `(Sharding)` is not (callable)"),
    "no-matching-overload": re.compile("No overload(.*) matches (arguments)"),
    "unknown-argument": re.compile("Argument `(.*)` does not match any known parameter(?: of .*`(.*)`)?"),
    "positional-only-parameter-as-kwarg": re.compile(
        "Positional-only.* \\(`(.*)`\\) passed as keyword.*?(?: of .*`(.*)`)?$"
    ),
}
_OBJECT = re.compile("Object of type `(.*)` has no attribute `(.*)`")
_MARKED = "@_removed({!r})\nclass {}(_Any): ...\n"
_IMPORTS = "\nfrom typing import Any as _Any\nfrom typing_extensions import deprecated as _removed\n"


class NoChecker(Exception):
    """ty is not installed, or did not do what it should."""


@dataclasses.dataclass(frozen=True)
class Reported:
    """What ty says about one name; lines and columns count from 1, columns in characters."""

    path: Path
    line: int
    column: int
    end_line: int
    end_column: int
    name: str  # dotted; for unknown-argument the keyword and the function; for an array ``Array.attribute``
    rule: str  # the name of ty's rule


def installed() -> str | None:
    """The command, beside the Python that runs or where PATH has it."""
    if importlib.util.find_spec("ty") is None:
        return None
    name = "ty.exe" if os.name == "nt" else "ty"
    homes = [sysconfig.get_path("scripts"), os.path.dirname(sys.executable), *os.get_exec_path()]
    return next((path for home in homes if os.path.isfile(path := os.path.join(home, name))), None)


def run(files: Iterable[Path], folder: Path, roots: Iterable[Path]) -> Iterator[Reported]:
    """Check files.  ty starts in ``folder``, and looks for modules in ``roots`` first: JAX with its marks."""
    command = installed()
    if command is None:
        raise NoChecker(MISSING)
    rules = "".join(f'{rule} = "error"\n' for rule in _RULES)
    settings = f'[rules]\nall = "ignore"\n{rules}[analysis]\nrespect-type-ignore-comments = false\n'
    (folder / "ty.toml").write_text(settings)
    arguments = [command, "check", "--project", str(folder), "--python", sys.executable, "--output-format", "gitlab"]
    for root in roots:
        arguments += ["--extra-search-path", str(root)]
    arguments += ["--no-progress", "--exit-zero", "--"]
    done = subprocess.run([*arguments, *map(str, files)], cwd=folder, capture_output=True, text=True)
    try:
        messages = json.loads(done.stdout)
    except ValueError:
        raise NoChecker(f"ty failed: {done.stderr.strip()}") from None
    for message in messages:
        rule, place = message["check_name"], message["location"]
        text = message["description"].partition(": ")[2]
        found = _OBJECT.match(text) or (_RULES[rule].match(text) if rule in _RULES else None)
        if found:
            owner, parts = re.search("<module '(jax[^']*)'>", text), [part or "" for part in found.groups()]
            name = f"{owner[1]}.{found.groupdict().get('b', found[2])}" if owner else ".".join(parts)
            begin, end = place["positions"]["begin"], place["positions"]["end"]
            span = (begin["line"], begin["column"], end["line"], end["column"])
            rule = "unknown-argument" if rule == "positional-only-parameter-as-kwarg" else rule
            yield Reported(folder / place["path"], *span, name, rule)


def mark(jax: Path, names: Iterable[str], modules: Iterable[str], folder: Path) -> None:
    """Put a copy of JAX's folder into ``folder`` that has the names, marked, and these modules, if only empty."""
    by_module: dict[str, list[str]] = defaultdict(list, {module: [] for module in modules})
    for name in names:
        by_module[name.rpartition(".")[0]].append(name)
    for module in list(by_module):  # `jax.experimental.maps` is an attribute of its parent, too
        parent, _, last = module.rpartition(".")
        if parent:
            by_module[parent].append(f"import {module} as {last}\n")
    texts = {}
    for module, entries in by_module.items():
        file = _file(jax, module)
        lines = [e if " " in e else _MARKED.format(MARK + e, e.rpartition(".")[2]) for e in entries]
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        texts[Path("jax", file.relative_to(jax))] = text + _IMPORTS + "".join(lines)
    overlay(jax.parent, texts, folder, ["jax"])


def _file(jax: Path, module: str) -> Path:
    """The file that a type checker reads for a module: its stub, if there is one."""
    path = jax.joinpath(*module.split(".")[1:])
    names = [path / "__init__.pyi", path / "__init__.py", path.with_suffix(".pyi")] if module != "jax" else []
    names = [path / "__init__.py"] if module == "jax" else names
    return next((name for name in names if name.exists()), path.with_suffix(".py"))


def overlay(root: Path, texts: Mapping[Path, str], folder: Path, entries: Iterable[str] | None = None) -> None:
    """Fill ``folder`` with links to what is in ``root`` (``entries`` of it), and files of their own for ``texts``."""
    own = {parent for path in texts for parent in path.parents}
    for parent in sorted(own, key=lambda path: len(path.parts)):
        (folder / parent).mkdir(exist_ok=True)
        chosen = entries if entries is not None and parent == Path(".") else _names(root / parent)
        for name in chosen:
            if (path := parent / name) not in own and path not in texts:
                (folder / path).symlink_to(root / path)
    for path, text in texts.items():
        (folder / path).write_text(text, encoding="utf-8", newline="")


def _names(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name != "__pycache__"] if folder.is_dir() else []


def root_of(path: Path) -> Path:
    """The folder from which a file's module is imported: the first one above it that is no package."""
    folder = path.parent
    while (folder / "__init__.py").exists() and folder != folder.parent:
        folder = folder.parent
    return folder
