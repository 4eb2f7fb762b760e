"""How plans and pictures are written: types, bytes, tables that fit a terminal, and tables of HTML."""

from __future__ import annotations

import collections
import html
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

Rows = list[tuple[str, ...]]
T = TypeVar("T")
K = TypeVar("K")


def terminal_width() -> int:
    """Columns of the terminal; 100 where there is none."""
    return max(shutil.get_terminal_size((100, 24)).columns, 40)


# ------------------------------------------------------------------------- small words


def by_key(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items with equal keys together, in the order of the first ones."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def plural(count: int, noun: str) -> str:
    """``1 slab``, ``2 slabs``."""
    return f"{count} {noun}{'s' if count != 1 else ''}"


def listed(items: Iterable[Any]) -> str:
    return ", ".join(map(str, items))


def short_type(dtype: Any, shape: Sequence[int]) -> str:
    """``f32[3,4]``"""
    return jax.core.ShapedArray(tuple(shape), dtype).str_short(short_dtypes=True)


def show_bytes(count: int | None) -> str:
    """``96 B``, ``1.5 kB``, ``12 MB``."""
    if count is None:
        return "unknown"
    return f"{count} B" if count < 1000 else _scaled(count / 1000, ("kB", "MB", "GB", "TB", "PB"))


def show_count(count: int) -> str:
    """``96``, ``1.5 k``, ``12 M``."""
    return str(count) if count < 1000 else _scaled(count / 1000, ("k", "M", "G", "T", "P"))


def show_seconds(seconds: float) -> str:
    """``12 us``, ``3.5 ms``, ``2 s``."""
    return _scaled(seconds * 1e6, ("us", "ms", "s"))


def _scaled(value: float, units: Sequence[str]) -> str:
    k = 0
    while value >= 999.5 and k + 1 < len(units):
        value, k = value / 1000, k + 1
    return f"{value:.3g} {units[k]}"


def show_spec(spec: PartitionSpec | None) -> str:
    """``P('x', None)``"""
    return "-" if spec is None else f"P({', '.join(map(repr, spec))})"


# ------------------------------------------------------------------------------ tables

GAP = 2
MANY = 12  # rows or drawings; if there are more, equal ones are shown once


def table(rows: Rows) -> list[str]:
    """Lines that fit the terminal: the widest columns are wrapped, between words as long as that is enough."""
    rows = [tuple(cell.upper() for cell in rows[0]), *rows[1:]]
    columns = range(len(rows[0]))
    widths = [max(len(row[k]) for row in rows) for k in columns]
    # Texts may be broken at white space and after commas.
    atoms = ([atom for row in rows for atom in re.findall(r"[^\s,]+,?|,", row[k])] for k in columns)
    words = [max(map(len, found), default=0) for found in atoms]
    room = terminal_width() - GAP * (len(widths) - 1)
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
    """Lines that are broken at white space, or else after a comma, or else anywhere but inside a number."""
    lines: list[str] = []
    for piece in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]:
        while len(piece) > width:
            at = piece.rfind(",", 0, width) + 1 or _before_number(piece, width)
            lines.append(piece[:at])
            piece = piece[at:]
        lines.append(piece)
    return lines


def _before_number(text: str, at: int) -> int:
    """The last place to break that is not inside a number; ``at`` if the number fills the whole line."""
    start = at
    while start and text[start - 1].isdigit() and text[start].isdigit():
        start -= 1
    return start or at


def two_columns(lines: Sequence[tuple[str, str]], margin: int = 0) -> list[str]:
    """Texts, and remarks beside them; long texts continue on the next lines, indented."""
    side = max((len(remark) for _, remark in lines), default=0)
    room = max(terminal_width() - margin - (side + GAP if side else 0), 20)
    pieces = [(_continued(text, room), remark) for text, remark in lines]
    width = max((len(line) for own, _ in pieces for line in own), default=0)
    shown = []
    for own, remark in pieces:
        shown.append(f"{own[0].ljust(width)}{' ' * GAP}{remark}".rstrip() if remark else own[0])
        shown.extend(own[1:])
    return shown


def _continued(text: str, room: int) -> list[str]:
    lead = text[: min(len(text) - len(text.lstrip()), room // 2)]
    wrapper = textwrap.TextWrapper(room, lead, f"{lead}    ", break_on_hyphens=False)
    return wrapper.wrap(text.strip()) or [lead]


def grouped(rows: Rows, where: str, most: int = MANY) -> Rows:
    """If there are more than ``most`` rows, merge those that differ only in their first cell; the rest is ``where``."""
    head, *body = rows
    if len(body) <= most:
        return rows
    alike = by_key(body, lambda row: row[1:])
    found = [(with_more([row[0] for row in own]), *rest) for rest, own in alike.items()]
    shown = found if len(found) <= most else found[: most - 1]
    hidden = len(body) - sum(map(len, list(alike.values())[: len(shown)]))
    return [head, *shown, *([(f"... and {hidden} more: see {where}", *[""] * (len(head) - 1))] if hidden else [])]


def with_more(alike: Sequence[str]) -> str:
    """``params['w1'] and 11 like it``"""
    return f"{alike[0]} and {len(alike) - 1} like it" if len(alike) > 1 else alike[0]


def tally(items: Iterable[str], most: int) -> str:
    """``2 x f32[3], f32[4]``: equal items once, and how many kinds are not shown."""
    counts = collections.Counter(items)
    shown = [item if n == 1 else f"{n} x {item}" for item, n in counts.items()]
    return ", ".join(shown if len(shown) <= most else [*shown[: most - 1], f"and {len(shown) - most + 1} more types"])


# -------------------------------------------------------------------------------- HTML

_CELL = "text-align:left;padding:3px 14px 3px 0;border-bottom:1px solid #8884;vertical-align:top"


def escape(content: Any) -> str:
    return html.escape(str(content))


def html_table(rows: Rows) -> str:
    head, *body = rows
    cells = "".join(f'<th style="{_CELL};opacity:0.7">{escape(c)}</th>' for c in head)
    lines = "".join(
        "<tr>" + "".join(f'<td style="{_CELL};font-family:monospace">{escape(c)}</td>' for c in row) + "</tr>"
        for row in body
    )
    return f'<table style="border-collapse:collapse;margin:10px 0"><tr>{cells}</tr>{lines}</table>'
