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
      like_mesh_axes: those that have the name of a mesh axis of theirs.
      has_resources: whether it has ``axis_resources``.
      undeclared: whether a result varies over an axis that its out_axes leave out.
      is_coarse: whether it computes with numbers of less than 32 bits.
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
    like_mesh_axes: set[Any] = dataclasses.field(default_factory=set)
    has_resources: bool = False
    undeclared: bool = False
    is_coarse: bool = False
    refused: str = ""

    @property
    def where(self) -> str:
        return f"{os.path.basename(self.file)}:{self.span[0]}"


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


def span_of(node: Any) -> Span:
    """The place of a node of a syntax tree."""
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
