"""The text of the helper file: its core, and the functions that a program needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_SOURCE = Path(__file__).with_name("helper") / "named_axes.py"
_BETWEEN = "\n\n\n"
# The core has `mapped` and `axes_of`.
_CORE, *_PIECES = _SOURCE.read_text().rstrip().split(_BETWEEN + "# ---- functions over named axes")
_TEXTS: dict[str, str] = {}
for _text in _PIECES[0].strip().split(_BETWEEN):
    _TEXTS[_text[len("def ") : _text.index("(")]] = _text


def helper_text(names: Iterable[str], existing: str | None = None) -> str:
    """The text of the file, with these functions and what they use.

    Args:
      existing: the text of a helper that is there already.  It gets what it lacks, at its end.
    """
    needed = [*names]
    for name in needed:
        # A function that is called, and no attribute.
        called = re.findall(r"(?<![\w.])\w+(?=\()", _TEXTS.get(name, ""))
        needed += set(called).difference(needed)
    before = existing or _CORE + "\n"
    added = []
    for name, text in _TEXTS.items():
        if name in needed and f"\ndef {name}(" not in before:
            added.append(_BETWEEN + text)
    if not added:
        return before
    return before.rstrip() + "".join(added) + "\n"


# ---- what the helper has


def _with_parameter(pattern: str) -> set[str]:
    """The public functions that have such a parameter."""
    found = set()
    for name, text in _TEXTS.items():
        if re.match(rf"def [a-z].*{pattern}", text):
            found.add(name)
    return found


_COLLECTIVES = _with_parameter(r"\baxis_name\b")
_REDUCTIONS = _with_parameter(r"\baxis=")
# Functions that reduce over positions, unless a literal name says otherwise.
REDUCTIONS = {"jax.numpy.amax": "max", "jax.numpy.amin": "min"}
# The name of the helper's function for what a program calls.
FUNCTIONS: dict[str, str] = {}
for _home in ("jax.lax", "xmap_compat", "xmap_compat.lax"):
    FUNCTIONS |= {f"{_home}.{name}": name for name in _COLLECTIVES}
for _home in ("jax.numpy", "jax.nn", "jax.scipy.special"):
    REDUCTIONS |= {f"{_home}.{name}": name for name in _REDUCTIONS}
FUNCTIONS |= REDUCTIONS
