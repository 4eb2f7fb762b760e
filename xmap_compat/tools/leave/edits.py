"""The edits of a program's own files that replace its xmaps by plain JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Construction:
    """One call of ``xmap(...)`` in the program's text.

    Attributes:
      file, line: of its expression: the first line of the call.
      reached: how often the program made it.
      plans: the distinct plans of its first calls; empty if it was never called.
      function: the xmapped function of the first time.
      others: those of later times whose declarations differ.
      column: where the call starts in its line, in bytes; None if unknown.
      differentiated: whether the program took a gradient of it from outside.
    """

    file: str
    line: int
    reached: int
    plans: tuple[Any, ...]
    function: Any
    others: tuple[Any, ...] = ()
    column: int | None = None
    differentiated: bool = False


@dataclasses.dataclass(frozen=True)
class Edit:
    """The replacement of a part of a file; ``start`` and ``end`` count its characters, as :func:`read` gives them."""

    file: str
    start: int
    end: int
    text: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a construction.

    Attributes:
      edits: the first one replaces the construction, by one expression; empty if it was refused.
      refused: why it stays, and what to do.
      decorates: whether the expression is a function of the function to map, as ``@xmap(...)`` is.
    """

    construction: Construction
    edits: tuple[Edit, ...]
    refused: str | None
    note: str = ""
    decorates: bool = False


@dataclasses.dataclass(frozen=True)
class Edited:
    """All edits of a program.

    Attributes:
      outcomes: one for each construction, in their order.
      shared: edits of whole files: imports, mesh contexts, ``thread_resources``.
      helpers: the text of the helper file; empty if nothing needs it.
      helper_file: its path.
    """

    outcomes: tuple[Outcome, ...]
    shared: tuple[Edit, ...]
    helpers: str
    helper_file: str


def edits_of(constructions: Sequence[Construction], *, root: str, assignment: int | None = None) -> Edited:
    """The edits for the constructions that a program made, in files under ``root``."""
    return Edited(tuple(Outcome(c, (), "not built yet") for c in constructions), (), "", "")
