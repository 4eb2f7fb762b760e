"""How plans and pictures are written: types, bytes and tables."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax

Row = tuple[str, ...]
Rows = list[Row]
T = TypeVar("T")
K = TypeVar("K")

WIDTH = 80  # columns of lines of words
MANY = 12  # rows or drawings; if there are more, equal ones are shown once


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


def show_bytes(count: float) -> str:
    """``96 B``, ``1.5 KiB``, ``12 MiB``."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while count >= 999.5 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:.3g} {units[0]}"


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


def table(rows: Rows) -> list[str]:
    """The lines of a table, whose first row has the titles."""
    titles = tuple(cell.upper() for cell in rows[0])
    rows = [titles, *rows[1:]]
    columns = []
    for cells in zip(*rows):
        width = max(map(len, cells))
        columns.append([cell.ljust(width) for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns)]


def merged(rows: Rows) -> Rows:
    """If there are many rows, those that differ in the first cell only as one."""
    if len(rows) <= MANY:
        return rows
    groups = by_key(rows, lambda row: row[1:])
    return [(with_more([row[0] for row in group]), *rest) for rest, group in groups.items()]


def with_more(alike: Sequence[str]) -> str:
    """``params['w1'] + 11 alike``"""
    if len(alike) == 1:
        return alike[0]
    return f"{alike[0]} + {len(alike) - 1} alike"
