"""How far a long command is, on standard error when that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def progress(items: Sequence[T], words: str) -> Iterator[T]:
    """The items, with a bar on a terminal, by tqdm where it is installed; ``words`` says what they
    are: ``files``.
    """
    if not sys.stderr.isatty():
        yield from items
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield from _counted(items, words)
    else:
        yield from tqdm(items, desc=words, file=sys.stderr, leave=False)


def _counted(items: Sequence[T], words: str) -> Iterator[T]:
    for number, item in enumerate(items, start=1):
        bar = "#" * (30 * number // len(items))
        print(f"\r[{bar:30}] {number} of {len(items)} {words}", end="", file=sys.stderr, flush=True)
        yield item
    if items:
        print(file=sys.stderr)
