"""How plans and pictures are written: types, bytes, and tables that fit a terminal."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

Rows = list[tuple[str, ...]]
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
    return f"{count} {noun}{'s' if count != 1 else ''}"


def listed(items: Iterable[Any]) -> str:
    return ", ".join(map(str, items))


def short_type(dtype: Any, shape: Sequence[int]) -> str:
    """``f32[3,4]``"""
    return jax.core.ShapedArray(tuple(shape), dtype).str_short(short_dtypes=True)


def show_bytes(count: int | None) -> str:
    """``96 B``, ``1.5 KiB``, ``12 MiB``."""
    return (
        "unknown"
        if count is None
        else _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
    )


def show_count(count: float) -> str:
    """``96``, ``1.5 k``, ``12 M``."""
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P")).strip()


def show_seconds(seconds: float) -> str:
    """``12 us``, ``3.5 ms``, ``2 s``."""
    return _scaled(seconds * 1e6, 1000, ("us", "ms", "s"))


def _scaled(value: float, step: int, units: Sequence[str]) -> str:
    k = 0
    while value >= step - 0.5 and k + 1 < len(units):
        value, k = value / step, k + 1
    return f"{value:.3g} {units[k]}" if value < 999.5 else f"{value:.0f} {units[k]}"


def show_spec(spec: PartitionSpec | None) -> str:
    """``P('x', None)``"""
    return "-" if spec is None else f"P({', '.join(map(repr, spec))})"


# ------------------------------------------------------------------------------ tables

GAP = 2
MANY = 12  # rows or drawings; if there are more, equal ones are shown once


def table(rows: Rows) -> list[str]:
    """Lines that fit the terminal: the widest columns are wrapped, between words as long as that is
    enough.
    """
    rows = [tuple(cell.upper() for cell in rows[0]), *rows[1:]]
    columns = range(len(rows[0]))
    widths = [max(1, *(len(row[k]) for row in rows)) for k in columns]
    # Texts may be broken at white space and after commas.
    atoms = ([atom for row in rows for atom in re.findall(r"[^\s,]+,?|,", row[k])] for k in columns)
    words = [max(map(len, found), default=1) for found in atoms]
    room = WIDTH - GAP * (len(widths) - 1)
    for least in (words, [1] * len(widths)):
        while sum(widths) > room and (wide := [k for k in columns if widths[k] > least[k]]):
            widths[max(wide, key=lambda k: widths[k])] -= 1
    lines = []
    for row in rows:
        cells = [wrapped(cell, width) for cell, width in zip(row, widths)]
        for k in range(max(map(len, cells))):
            padded = [(cell[k] if k < len(cell) else "").ljust(w) for cell, w in zip(cells, widths)]
            lines.append((" " * GAP).join(padded).rstrip())
    return lines


def wrapped(text: str, width: int) -> list[str]:
    """Lines that are broken at white space, or else after a comma, or else anywhere but inside a
    number.
    """
    lines: list[str] = []
    for piece in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]:
        while len(piece) > width:
            at = piece.rfind(",", 0, width) + 1 or _before_number(piece, width)
            lines.append(piece[:at])
            piece = piece[at:]
        lines.append(piece)
    return lines


def _before_number(text: str, at: int) -> int:
    """The last place to break that is not inside a number; ``at`` if the number fills the whole
    line.
    """
    start = at
    while start and text[start - 1].isdigit() and text[start].isdigit():
        start -= 1
    return start or at


def grouped(rows: Rows, where: str, most: int = MANY) -> Rows:
    """Merge rows that differ only in an index of their first cell, and if there are more than
    ``most`` rows, those that differ in the first cell only.  ``where`` has all rows.
    """
    head, *body = rows
    alike = by_key(body, lambda row: ("" if len(body) > most else without_index(row[0]), row[1:]))
    found = [(with_more([row[0] for row in own]), *rest) for (_, rest), own in alike.items()]
    shown = found if len(found) <= most else found[: most - 1]
    hidden = len(body) - sum(map(len, list(alike.values())[: len(shown)]))
    return [
        head,
        *shown,
        *([(f"... and {hidden} more: see {where}", *[""] * (len(head) - 1))] if hidden else []),
    ]


_INDEX = re.compile(r"\[\d+\]")


def without_index(name: str) -> str:
    """``params[]['w']`` for ``params[3]['w']``: layers of a list have one such name."""
    return _INDEX.sub("[]", name)


def with_more(alike: Sequence[str]) -> str:
    """``params[0..11]['w']``, or ``params['w1'] + 11 alike``"""
    if len(alike) == 1 or len({without_index(name) for name in alike}) > 1:
        return f"{alike[0]} + {len(alike) - 1} alike" if len(alike) > 1 else alike[0]
    first, last = (iter(_INDEX.findall(name)) for name in (alike[0], alike[-1]))
    ends = lambda low, high: low if low == high else f"{low[:-1]}..{high[1:]}"  # noqa: E731
    return _INDEX.sub(lambda _: ends(next(first), next(last)), alike[0])


def escape(content: Any) -> str:
    """A text in XML."""
    return html.escape(str(content))
