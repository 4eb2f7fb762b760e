"""What the two runs find, and the command reads without importing JAX."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

# A part of a file: line, column in bytes, end line, end column.
Span = tuple[int, int, int, int]


@dataclasses.dataclass(eq=False)
class XmapCall:
    """A call of ``xmap(...)`` in a file of the program, and the function that it makes.

    Attributes:
      function: the name of the mapped function.
      made: how many functions ``xmap(...)`` has made here.
      calls: how often what it makes was called, or traced.
      recorded: how many of these calls are recorded.
      inside: the numbers of the xmap calls in whose bodies it was called.
      differentiated: whether a gradient was taken from outside.
      axes: the names of its axes.
      named_like_mesh_axes: its axes that have the name of a mesh axis.
      has_mesh_axes: whether an axis lies on mesh axes.
      undeclared: whether a result varies over an axis that its out_axes leave out.
      is_coarse: whether it computes with numbers of less than 32 bits.
      collectives: the calls in the user's files in which its collectives lie.
      problem: why its calls could not be recorded.
      refused: why it stays, and what to do.
    """

    file: str
    span: Span
    number: int = 0
    function: str = ""
    made: int = 0
    calls: int = 0
    recorded: int = 0
    inside: set[int] = dataclasses.field(default_factory=set)
    differentiated: bool = False
    axes: frozenset[Any] = frozenset()
    named_like_mesh_axes: frozenset[Any] = frozenset()
    has_mesh_axes: bool = False
    undeclared: bool = False
    is_coarse: bool = False
    collectives: list[tuple[str, Span]] = dataclasses.field(default_factory=list)
    problem: str = ""
    refused: str = ""

    @property
    def where(self) -> str:
        return f"{os.path.basename(self.file)}:{self.span[0]}"

    @property
    def is_verifiable(self) -> bool:
        """Whether the second run compares it, or the one that calls it: it has recorded calls, or
        was called in a body.  After that run, one that is not refused is verified.
        """
        return bool(self.recorded or (self.calls and self.inside))


@dataclasses.dataclass
class FirstRun:
    """The first run.

    Attributes:
      files: the program's files that it has read, and the name of each one's module.
      ended: the type of the error that ended it, or "".
    """

    xmap_calls: list[XmapCall]
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ended: str = ""


@dataclasses.dataclass
class SecondRun:
    """The second run.

    Attributes:
      problems: how edited functions differ, by the numbers of xmap calls; and the file and line of
        the program that raised an error.
      executing: the number of the xmap call whose function runs now, or -1.
      ended: the type of the error that ended it, or ""; None if it has not come to its end.
    """

    problems: dict[int, tuple[str, str, int]] = dataclasses.field(default_factory=dict)
    executing: int = -1
    ended: str | None = None


def span_of(node: Any) -> Span:
    """The place of a node of a syntax tree."""
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def calling_span(frame: Any) -> Span:
    """The place of the call that a frame executes."""
    positions = [*frame.f_code.co_positions()]
    line, end_line, column, end_column = positions[frame.f_lasti // 2]
    return line or 0, column or 0, end_line or 0, end_column or 0
