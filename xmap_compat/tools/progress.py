"""How far a long command is, on standard error when that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def progress(items: Sequence[T], words: str) -> Iterator[T]:
    """The items, with a bar on a terminal; ``words`` says what they are: ``files``."""
    is_shown = sys.stderr.isatty() and len(items) > 0
    for number, item in enumerate(items, start=1):
        if is_shown:
            bar = "#" * (30 * number // len(items))
            text = f"\r[{bar:30}] {number} of {len(items)} {words}"
            print(text, end="", file=sys.stderr, flush=True)
        yield item
    if is_shown:
        print(file=sys.stderr)
