"""What the runs and the driver, which does not import JAX, know of a program: its calls of xmap, and their edits."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from xmap_compat.tools.leave.old_check.fix import Edit

FileEdit = tuple[str, Edit]  # the path of a file, and an edit of it
# Where a `with` entered a mesh: file, line and column of the statement, and which of its items; from Python 3.13 on,
# line and column of the item, and 0.
Entered = tuple[str, int, int, int]


@dataclasses.dataclass(eq=False)
class Construction:
    """A call of ``xmap(...)`` in the program's text, and what becomes of it.

    Attributes:
      line, column: where the call starts; the column in bytes, None if it is unknown.
      globals: the global variables of its file.
      functions: the xmapped functions that it made, one for each declaration.
      plans: the distinct plans of its calls.
      inside: the numbers of the constructions in whose bodies it was called.
      reached, calls, recorded: how often it was made; how often it was called or traced; how many calls are recorded.
      differentiated: whether a gradient of it was taken from outside; where it is told, whether one is recorded.
      problem: why its calls could not be recorded, or that they raise.
      refused: why it stays, and what to do.
      differs, unproved: how its edited functions differ from its plans, or why they are not compared with them.
      edits: the first one replaces the call by one expression.
      decorates: whether that expression is a function of the function to map, as ``@xmap(...)`` is.
      site, made: its place in the file, and its edits before other constructions are considered.
      assignment: its resources, in words.
    """

    file: str
    line: int
    column: int | None = None
    number: int = 0
    function: str = ""
    globals: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    functions: list[Any] = dataclasses.field(default_factory=list)
    plans: list[Any] = dataclasses.field(default_factory=list)
    inside: set[int] = dataclasses.field(default_factory=set)
    reached: int = 0
    calls: int = 0
    recorded: int = 0
    differentiated: bool = False
    problem: str = ""
    refused: str = ""
    differs: str = ""
    unproved: str = ""
    edits: list[FileEdit] = dataclasses.field(default_factory=list)
    decorates: bool = False
    site: Any = None
    made: Any = None
    assignment: str = ""

    @property
    def where(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"

    @property
    def key(self) -> tuple[str, int, int | None]:
        return self.file, self.line, self.column

    @property
    def is_nested(self) -> bool:
        return bool(self.plans) and all(plan.staged.placed.nested for plan in self.plans)

    def told(self) -> Construction:
        """What another process is told of it."""
        return dataclasses.replace(self, globals={}, functions=[], plans=[], site=None, made=None)


class Edited(NamedTuple):
    """The first run: all edits of a program, and how it ended.

    Attributes:
      shared: edits of whole files: imports, mesh contexts, ``thread_resources``.
      helpers: the text of the helper file; empty if nothing needs it.
      ended: the exception that ended it, or "".
      otherwise: where meshes were entered as ``jax.set_mesh`` cannot be, in words.
      left: the names of this package that files still import.
    """

    constructions: list[Construction]
    shared: list[FileEdit]
    helpers: str = ""
    helper_file: str = ""
    ended: str = ""
    otherwise: Sequence[str] = ()
    left: Sequence[str] = ()
