"""How plans and pictures are written: types, bytes, and tables that fit a terminal."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

Row = tuple[str, ...]
Rows = list[Row]
T = TypeVar("T")
K = TypeVar("K")


WIDTH = 80  # columns of everything that is printed


# ------------------------------------------------------------------------- small words


def by_key(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items with equal keys together, in the order of the first ones."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def plural(count: int, noun: str) -> str:
    """``1 element``, ``2 elements``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}s"


def listed(items: Iterable[Any]) -> str:
    return ", ".join(map(str, items))


def short_type(dtype: Any, shape: Sequence[int]) -> str:
    """``f32[3,4]``"""
    return jax.core.ShapedArray(tuple(shape), dtype).str_short(short_dtypes=True)


def show_bytes(count: int | None) -> str:
    """``96 B``, ``1.5 KiB``, ``12 MiB``."""
    if count is None:
        return "unknown"
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def show_count(count: float) -> str:
    """``96``, ``1.5 k``, ``12 M``."""
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P")).strip()


def _scaled(value: float, step: int, units: Sequence[str]) -> str:
    k = 0
    while value >= step - 0.5 and k + 1 < len(units):
        value /= step
        k += 1
    digits = ".3g" if value < 999.5 else ".0f"
    return f"{value:{digits}} {units[k]}"


def show_spec(spec: PartitionSpec | None) -> str:
    """``P('x', None)``"""
    if spec is None:
        return "-"
    return f"P({listed(map(repr, spec))})"


def axes_name(axes: Any) -> str:
    """``x``, or ``x+y`` for a tuple."""
    if isinstance(axes, tuple):
        return "+".join(map(str, axes))
    return str(axes)


def sent_in_words(sent: Mapping[Any, int]) -> str:
    """``1.5 KiB over x, 96 B over y``"""
    words = []
    for axes, count in sent.items():
        if count:
            words.append(f"{show_bytes(count)} over {axes_name(axes)}")
    return listed(words) or "nothing"


def escape(content: Any) -> str:
    """A text in XML."""
    return html.escape(str(content))


# ------------------------------------------------------------------------------ tables

GAP = 2
MANY = 12  # rows or drawings; if there are more, equal ones are shown once


def table(rows: Rows) -> list[str]:
    """Lines that fit the terminal: the widest columns are wrapped, between words as long as that is
    enough.
    """
    titles = tuple(cell.upper() for cell in rows[0])
    rows = [titles, *rows[1:]]
    widths = _widths(rows)
    lines = []
    for row in rows:
        cells = [wrapped(cell, width) for cell, width in zip(row, widths)]
        for k in range(max(map(len, cells))):
            line = ""
            for cell, width in zip(cells, widths):
                piece = cell[k] if k < len(cell) else ""
                line += piece.ljust(width + GAP)
            lines.append(line.rstrip())
    return lines


def _widths(rows: Rows) -> list[int]:
    """The widths of columns, which together fit the terminal if words or letters allow it."""
    columns = list(zip(*rows))
    widths = [max(1, *map(len, cells)) for cells in columns]
    words = [max(map(_longest_word, cells)) for cells in columns]
    room = WIDTH - GAP * (len(widths) - 1)
    for least in (words, [1] * len(widths)):
        while sum(widths) > room:
            wide = [k for k, width in enumerate(widths) if width > least[k]]
            if not wide:
                break
            widest = max(wide, key=widths.__getitem__)
            widths[widest] -= 1
    return widths


def _longest_word(cell: str) -> int:
    return max(map(len, cell.split()), default=1)


def wrapped(text: str, width: int) -> list[str]:
    """Lines that are broken at white space, or else anywhere."""
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def grouped(rows: Rows, where: str) -> Rows:
    """Merge rows that differ only in an index of their first cell, and if there are many rows,
    those that differ in the first cell only.  ``where`` has all rows.
    """
    head, *body = rows

    def key(row: Row) -> Any:
        name = "" if len(body) > MANY else without_index(row[0])
        return name, row[1:]

    groups = list(by_key(body, key).values())
    shown = groups
    if len(groups) > MANY:
        shown = groups[: MANY - 1]
    found = [head]
    for group in shown:
        name = with_more([row[0] for row in group])
        found.append((name, *group[0][1:]))
    hidden = len(body) - sum(map(len, shown))
    if hidden:
        empty = [""] * (len(head) - 1)
        found.append((f"... and {hidden} more: see {where}", *empty))
    return found


_INDEX = re.compile(r"\[\d+\]")


def without_index(name: str) -> str:
    """``params[]['w']`` for ``params[3]['w']``: layers of a list have one such name."""
    return _INDEX.sub("[]", name)


def with_more(alike: Sequence[str]) -> str:
    """``params[0..11]['w']``, or ``params['w1'] + 11 alike``"""
    first = alike[0]
    if len(alike) == 1:
        return first
    if len({without_index(name) for name in alike}) > 1:
        return f"{first} + {len(alike) - 1} alike"
    highest = iter(_INDEX.findall(alike[-1]))

    def both_ends(found: re.Match[str]) -> str:
        low = found[0]
        high = next(highest)
        if low == high:
            return low
        return f"{low[:-1]}..{high[1:]}"

    return _INDEX.sub(both_ends, first)
