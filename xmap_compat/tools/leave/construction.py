"""What the runs tell the driver, which does not import JAX: the calls of xmap, and what they
executed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Collective(NamedTuple):
    """A collective of a traced body: the call of the user's file in which it lies, and its axes.

    Attributes:
      inside: the file of the library or of the program whose code calls JAX there.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    inside: str
    primitive: str
    names: tuple[Any, ...]


@dataclasses.dataclass(eq=False)
class Construction:
    """A call of ``xmap(...)`` in a file of the program.

    Attributes:
      line, column: where the call starts; the column in bytes.
      reached, calls, recorded: how often it was made, called or traced; how many calls are
        recorded.
      inside: the numbers of those in whose bodies it was called.
      differentiated: whether a gradient was taken from outside.
      axes: the names of its axes.
      of_one_name: those that have the name of a mesh axis.
      resources: whether an axis lies on mesh axes.
      undeclared: whether a result varies over an axis that its out_axes leave out.
      problem: why its calls could not be recorded.
      refused: why it stays, and what to do.
    """

    file: str
    line: int
    column: int = 0
    number: int = 0
    function: str = ""
    reached: int = 0
    calls: int = 0
    recorded: int = 0
    inside: set[int] = dataclasses.field(default_factory=set)
    differentiated: bool = False
    axes: frozenset[Any] = frozenset()
    of_one_name: frozenset[Any] = frozenset()
    resources: bool = False
    undeclared: bool = False
    problem: str = ""
    refused: str = ""
    collectives: Sequence[Collective] = ()

    @property
    def where(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"

    @property
    def is_verified(self) -> bool:
        """Whether recorded calls were compared; meant of one that is not refused."""
        return bool(self.recorded or (self.calls and self.inside))


@dataclasses.dataclass
class Found:
    """The first run.

    Attributes:
      files: the program's own files that it has read, and the name of each one's module.
      ended: the exception that ended it, or "".
    """

    constructions: list[Construction]
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ended: str = ""
