"""What the runs and the driver, which does not import JAX, know of a program: its calls of xmap,
and their edits.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Spot = tuple[int, int]  # a line, from 1, and a column in bytes
Place = tuple[str, int, int]  # a file, a line and a column
# Where a `with` entered a mesh: file, line and column of the statement, and which of its items;
# from Python 3.13 on, line and column of the item, and 0.
Entered = tuple[str, int, int, int]


class Change(NamedTuple):
    """A replacement in a file, from one spot to another.  Its text may hold placeholders (see
    ``text.plain``).
    """

    file: str
    start: Spot
    end: Spot
    text: str


@dataclasses.dataclass(eq=False)
class Construction:
    """A call of ``xmap(...)`` in the program's text, and what becomes of it.

    Attributes:
      line, column: where the call starts; the column in bytes, None if it is unknown.
      globals: the global variables of its file.
      functions: the xmapped functions that it made, one for each declaration.
      placed, given: its traced calls with their placements, and their arguments without the arrays.
      inside: the numbers of the constructions in whose bodies it was called.
      reached, calls, recorded: how often it was made; how often it was called or traced; how many
      calls are recorded.
      differentiated: whether a gradient of it was taken from outside; where it is told, whether one
      is recorded.
      problem: why its calls could not be recorded, or that they raise.
      refused: why it stays, and what to do.
      change: the replacement of ``xmap``.
      changes: the edits of the functions that it reaches, some of which others reach too.
      places: the indices of the edited calls in the functions that it reaches.
      recipe: what a person writes by hand.
    """

    file: str
    line: int
    column: int | None = None
    number: int = 0
    function: str = ""
    globals: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    functions: list[Any] = dataclasses.field(default_factory=list)
    placed: list[Any] = dataclasses.field(default_factory=list)
    given: list[Any] = dataclasses.field(default_factory=list)
    inside: set[int] = dataclasses.field(default_factory=set)
    reached: int = 0
    calls: int = 0
    recorded: int = 0
    differentiated: bool = False
    problem: str = ""
    refused: str = ""
    change: Change | None = None
    changes: Sequence[Change] = ()
    places: frozenset[int] = frozenset()
    recipe: Sequence[str] = ()

    @property
    def where(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"

    @property
    def key(self) -> tuple[str, int, int | None]:
        return self.file, self.line, self.column

    def told(self) -> Construction:
        """What another process is told of it."""
        return dataclasses.replace(self, globals={}, functions=[], placed=[], given=[])


class Edited(NamedTuple):
    """The first run: all edits of a program, and how it ended.

    Attributes:
      places: where the edited calls in functions are.
      files: what the program has read of its own, whose texts may be changed.
      helpers: the text of the helper file; empty if nothing is patched.
      of_one_name: axes that have the name of a mesh axis.
      unedited: collectives over axes that are split, in functions that no xmap of this run reaches.
      ended: the exception that ended it, or "".
      entered: where ``with`` entered meshes.
      keeps_meshes: whether a mesh was entered as ``jax.set_mesh`` cannot be, so that all stay as
      they are.
    """

    constructions: list[Construction]
    places: Sequence[Place] = ()
    files: Sequence[str] = ()
    helpers: str = ""
    helper_file: str = ""
    of_one_name: Sequence[str] = ()
    unedited: Sequence[Place] = ()
    ended: str = ""
    entered: frozenset[Entered] = frozenset()
    keeps_meshes: bool = False

    def missed(self, c: Construction, reached: Iterable[int]) -> list[Place]:
        """The edited places of a construction that no call has executed; ``reached`` are indices of
        those executed.
        """
        return sorted({self.places[k] for k in c.places} - {self.places[k] for k in reached})
