"""Python source as text: literals, pieces of a text that are replaced, and fresh names."""

from __future__ import annotations

import ast
import contextlib
import itertools
import keyword
import re
from collections.abc import Collection, Sequence
from typing import Any

# Begins a name in a new text that is not the user's: of a helper, or of a module
OURS = "_xmap_compat_"
# Placeholders around what may be counted: the user's text has none (`plain`), the second run has
# calls (`counted`).
_COUNT, _END = "\ue000", "\ue001"


class NotWritable(Exception):
    """A part of the program cannot be written in this way.  The message names the part, and the
    place.
    """

    placed = False

    def at(self, place: str) -> NotWritable:
        """The same error with a place in the user's files, unless it names one already."""
        if not self.placed:
            self.args, self.placed = (f"{self} ({place})",), True
        return self


def literal(value: Any) -> str:
    """Plain Python data as source: its ``repr``, if that evaluates to the same value."""
    shown = re.sub(r"'([^'\"\\]*)'", r'"\1"', repr(value))
    for text in (shown, repr(value)):
        with contextlib.suppress(Exception):
            found = ast.literal_eval(text)
            if type(found) is type(value) and repr(found) == repr(value):
                return text
    raise NotWritable(f"the name {value!r} of type {type(value).__name__}: name it by a string")


def axes(names: Sequence[Any]) -> str:
    """One axis name, or a tuple of them."""
    return literal(names[0] if len(names) == 1 else tuple(names))


def fresh(wanted: str, taken: Collection[str]) -> str:
    """A name that is not taken, as close to the wanted one as possible."""
    variants = itertools.chain([wanted], (f"{wanted}_{k}" for k in itertools.count(2)))
    return next(name for name in variants if name not in taken and not keyword.iskeyword(name))


# ------------------------------------------------------------------------- places that are counted


def placeholder(k: int) -> tuple[str, str]:
    """What is put around the function of an edited call, which is counted as number ``k``."""
    return f"{_COUNT}{k}{_COUNT}", _END


def plain(text: str) -> str:
    return re.sub(rf"{_COUNT}\d+{_COUNT}|{_END}", "", text)


def counted(text: str) -> str:
    """The text of the second run, which counts how often the edited calls are executed."""
    return re.sub(rf"{_COUNT}(\d+){_COUNT}", r"__leave_count__(\1, ", text).replace(_END, ")")
