"""What ``Hardware``, ``Link`` and ``Rates`` are made of, checked when they are made: some figures give no time."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

from xmap_compat.core import errors

_WANTED = {"float": "a positive number", "Rates": "Rates(...)", "Link": "a Link(...)"}


@dataclasses.dataclass(frozen=True)
class Checked:
    """Refuses what is not of the type of its field, and numbers below zero; zero too, unless it is the default."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, (kind, *optional) = getattr(self, field.name), str(field.type).split(" | ")
            if kind in _WANTED and not (optional and value is None) and not _is_right(value, kind, field.default):
                raise errors.bad_search_argument(field.name, value, _WANTED[kind], tool=type(self).__name__)


def _is_right(value: Any, kind: str, default: Any) -> bool:
    if kind != "float":
        return type(value).__name__ == kind
    return isinstance(value, numbers.Real) and (float(value) > 0 or float(value) == default == 0)
