"""What a rewriting of the user's functions knows: the names of axes in the edited program, and what
it has edited.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from xmap_compat.tools.leave.text import NotWritable, literal
from xmap_compat.tools.leave.user_code import Piece, Span

Parts = tuple[Any, ...]  # what executes an axis in plain JAX: ("x", "batch_local")


@dataclasses.dataclass(frozen=True)
class AxisNames:
    """What executes each named axis in the edited program.

    Attributes:
      choices: for each axis its parts: one choice for each way in which the program splits it.
      mesh_axes: the axes of meshes.
    """

    choices: Mapping[Any, Sequence[Parts]]
    mesh_axes: frozenset[Any]

    def stays(self, name: Any) -> bool:
        return list(self.choices.get(name, [(name,)])) == [(name,)]

    def parts(self, name: Any) -> Parts | None:
        """The parts of an axis, also of one that the user's own vmap has; None if there are several
        choices.
        """
        choices = self.choices.get(name, [(name,)])
        return choices[0] if len(choices) == 1 else None

    def check_distinct(self, names: Sequence[Any]) -> None:
        parts = [p for n in names for p in self.parts(n) or ()]
        if len(set(parts)) != len(parts):
            raise NotWritable(
                f"a collective over {literal(tuple(names))}, which share mesh axes: write one for each"
            )


@dataclasses.dataclass
class Rewriting:
    """What the rewriting of a program's functions needs, and what it finds.

    Attributes:
      calls: the collectives of each innermost call of the user, in all traced programs.
      handled: calls whose axes were rewritten or may stay; for partial functions and layers, those
        that use them, and the axes.
      places: where each edited call is, which the second run counts by its index; and, never
        counted, others that name an axis of one name with its mesh axis.
      functions: the names of the functions and classes of the user that xmaps reach.
    """

    names: AxisNames
    calls: Mapping[Span, Sequence[Any]]
    handled: set[Any] = dataclasses.field(default_factory=set)
    places: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    functions: frozenset[str] = frozenset()

    def place(self, piece: Piece, node: Any) -> int:
        self.places.append((piece.file, node.lineno, node.col_offset))
        return len(self.places) - 1
