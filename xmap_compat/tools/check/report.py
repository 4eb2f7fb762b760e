"""``python -m xmap_compat check PATH...``: what JAX removed of what programs use, without running anything.

It shows what needs a hand, and counts the rest:

- ``works``: as it is under ``xmap_compat.install()`` or ``python -m xmap_compat``, or with another import;
- ``differs``: so too, but it does something else than it did; the heading of migration_guide.md that says what;
- ``change``: it needs a hand; what to write instead;
- ``unknown``: the JAX of this environment does not have it, and xmap_compat knows nothing of it;
- ``unseen``: a module of JAX is passed on as a value, code is in a text, or the name of an option or a module is not
  written out: what is read from it is not known.

Programs are read, notebooks too, and never imported or run.  Their names of JAX are looked up in the JAX of this
environment, by a process that imports nothing else.  The exit code is 1 if something needs a hand (with ``--strict``
also if something is unseen), and 0 otherwise.

options:
  --verbose   a line for each use
  --strict    fail for what is unseen, too
  --json      all uses, as JSON
  --diff      what --fix would write
  --fix       rewrite what is safe: old names of the same objects, and keywords; list what still needs install(),
              with exit code 3
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from xmap_compat.tools.check import resolve
from xmap_compat.tools.check.judge import judged, needing_install
from xmap_compat.tools.check.reader import read
from xmap_compat.tools.leave.old_check import fix, names
from xmap_compat.tools.leave.old_check.advice import BY_HAND, CHANGE, DIFFERS, UNDER, UNKNOWN, UNSEEN, WORKS
from xmap_compat.tools.leave.old_check.sources import Place, source_files
from xmap_compat.tools.leave.old_check.uses import Reading, Use, is_of_jax, unreadable

# Printed after a rewrite, if programs still need install().
INSTALL_CODE, NEEDS_INSTALL = 3, "needs xmap_compat.install()"
FLAGS = ("--verbose", "--strict", "--json", "--diff", "--fix")


@dataclasses.dataclass(frozen=True)
class Checked:
    """The results for all programs."""

    readings: list[Reading]
    uses: list[Use]
    facts: resolve.Facts

    @property
    def unresolved(self) -> int:
        """How many names of JAX could not be looked up."""
        return 0 if self.facts.jax else len({r.name for reading in self.readings for r in reading.references})

    def exit_code(self, strict: bool = False) -> int:
        failing = (*BY_HAND, UNSEEN) if strict else BY_HAND
        return 1 if self.unresolved or any(use.advice.status in failing for use in self.uses) else 0


def main(args: Sequence[str]) -> int:
    """Print the uses in these files and directories; returns the exit code."""
    flags = [arg for arg in args if arg.startswith("-")]
    paths = [arg for arg in args if arg not in flags]
    if not paths or set(flags) - set(FLAGS):
        asked = not set(flags) - {"-h", "--help"} and bool(flags)
        unknown = sorted(set(flags) - {*FLAGS, "-h", "--help"})
        if not asked:
            print(f"unknown option: {', '.join(unknown)}" if unknown else "no PATH is given", file=sys.stderr)
        text = f"usage: python -m xmap_compat check [{'] ['.join(FLAGS)}] PATH...\n\n{__doc__}"
        print(text, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        print(f"no such file or directory: {', '.join(missing)}", file=sys.stderr)
        return 2
    files = list(source_files(paths))
    if "--fix" in flags or "--diff" in flags:
        sources = {path: found for path in files if (found := _contents(path)) is not None}
        return say_what_is_left(check_files(files, fix.run(sources, write="--fix" in flags)))
    checked = check_files(files)
    if "--json" in flags:
        print(as_json(checked, paths))
    else:
        print(*lines_of(checked, paths, "--verbose" in flags), sep="\n")
    return checked.exit_code("--strict" in flags)


def say_what_is_left(checked: Checked) -> int:
    """Print the uses in rewritten programs that plain Python cannot run; returns the exit code."""
    left = [use for reading in checked.readings for use in needing_install(reading, checked.facts)]
    print(*(f"{use.place}: {NEEDS_INSTALL}: {use.name}" for use in left), sep="\n", end="\n" * bool(left))
    others = [str(use) for use in checked.uses if use.advice.status in (*BY_HAND, UNSEEN)]
    print(*others, sep="\n", end="\n" * bool(others))
    return INSTALL_CODE if left else checked.exit_code()


def _contents(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:  # for example a broken link
        print(f"{path}: {error}", file=sys.stderr)
        return None


def check_files(files: Iterable[str], texts: Mapping[str, bytes] = {}) -> Checked:
    """Read programs, and look up their names.  ``texts`` replace the contents of some files."""
    readings, names_of = [], names.file_names(texts)
    for path in files:
        try:
            with open(path, "rb") as file:
                readings.append(read(texts.get(path) or file.read(), path, names_of))
        except OSError as error:  # for example a broken link
            readings.append(Reading(path, {unreadable(Place(path, 0, 1, 1), error)}))
    facts = _facts(readings)
    return Checked(readings, [use for reading in readings for use in judged(reading, facts)], facts)


def _facts(readings: list[Reading]) -> resolve.Facts:
    references = [reference for reading in readings for reference in reading.references]
    under = [r.conditions for r in references]
    under += [conditions for reading in readings for *_, conditions in reading.keywords]
    names = {r.name for r in references}
    under += [use.conditions for reading in readings for use in reading.uses]
    names |= {name for conditions in under for name, _ in conditions if name and isinstance(name, str)}
    calls = {(function, keyword) for reading in readings for _, function, keyword, _ in reading.keywords}
    options = {option for reading in readings for _, option in reading.options}
    if not (names or calls or options):
        return resolve.Facts("nothing was asked of it")
    modules = {module for reading in readings for module in reading.modules if is_of_jax(module)}
    return resolve.ask(names, modules, calls, options)


# -------------------------------------------------------------------------- printed lines


def lines_of(checked: Checked, paths: Sequence[str], verbose: bool) -> list[str]:
    shown = checked.uses if verbose else [use for use in checked.uses if use.advice.status in (*BY_HAND, UNSEEN)]
    lines = list(map(str, shown))
    if not verbose:
        lines += _differences([use for use in checked.uses if use.advice.status == DIFFERS])
        lines += _counted([use.name for use in checked.uses if use.advice.status == WORKS])
    lines.append(_summary(checked))
    if checked.unresolved:
        lines.append(f"JAX cannot be imported here ({checked.facts.error}): {checked.unresolved} names not looked up")
    packages = other_packages(checked.readings, paths)
    if packages:
        lines.append(f"not looked at: {', '.join(packages)}")
    return lines


def _differences(uses: list[Use]) -> list[str]:
    """A line for each use, with its first place."""
    places: dict[tuple[str, str], list[Place]] = defaultdict(list)
    for use in uses:
        places[use.name, str(use.advice)].append(use.place)
    lines = []
    for (name, advice), found in places.items():
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        lines.append(f"{DIFFERS}: {name}: {advice} ({found[0]}{others})")
    return lines


def _counted(names: list[str]) -> list[str]:
    """One line for all uses that need nothing under install()."""
    counts = Counter(names)
    shown = [name if count == 1 else f"{name} ({count})" for name, count in counts.items()]
    return [f"{WORKS} {UNDER}: {', '.join(shown)}"] if shown else []


def _summary(checked: Checked) -> str:
    statuses = Counter(use.advice.status for use in checked.uses)
    total, files = len(checked.uses), len(checked.readings)
    unknown = f", {statuses[UNKNOWN]} unknown to jax {checked.facts.jax}" if statuses[UNKNOWN] else ""
    unseen = f", {statuses[UNSEEN]} not followed" if statuses[UNSEEN] else ""
    return (
        f"{total} use{'s' * (total != 1)} in {files} file{'s' * (files != 1)}: {statuses[WORKS]} as they were, "
        f"{statuses[DIFFERS]} with a difference, {statuses[CHANGE]} to change{unknown}{unseen}"
    )


def other_packages(readings: Iterable[Reading], paths: Sequence[str]) -> list[str]:
    """The packages that the programs import, except JAX, Python's own, and modules beside the programs."""
    beside = {".", *paths, *(os.path.dirname(reading.path) or "." for reading in readings)}
    own = {name.removesuffix(".py") for folder in beside if os.path.isdir(folder) for name in os.listdir(folder)}
    roots = {module.split(".")[0] for reading in readings for module in reading.modules}
    return sorted(roots - own - set(sys.stdlib_module_names) - {"jax", "jaxlib", "xmap_compat"})


def as_json(checked: Checked, paths: Sequence[str]) -> str:
    uses = [
        {
            **dataclasses.asdict(use.place),
            "status": use.advice.status,
            "name": use.name,
            "advice": use.advice.text,
            "heading": use.advice.heading,
        }
        for use in checked.uses
    ]
    found = {
        "jax": checked.facts.jax,
        "error": checked.facts.error,
        "files": [reading.path for reading in checked.readings],
        "not looked at": other_packages(checked.readings, paths),
        "uses": uses,
    }
    return json.dumps(found, indent=1)
