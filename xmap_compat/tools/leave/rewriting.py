"""What a rewriting of the user's functions knows: the names of axes in the edited program, and what it has edited."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xmap_compat.tools.leave.text import NotWritable, literal
from xmap_compat.tools.leave.user_code import Piece, Span

# The prefix of names in a new text that are not the user's: helpers and modules.
OURS = "_xmap_compat_"
Parts = tuple[Any, ...]  # what executes an axis in plain JAX: ("x", "batch_local")


@dataclasses.dataclass(frozen=True)
class AxisNames:
    """What executes each named axis in the edited program.

    Attributes:
      choices: for each axis its parts: one choice for each way in which the program splits it.
      mesh_axes: the axes of meshes.
      sizes: the sizes that each axis has.
    """

    choices: Mapping[Any, Sequence[Parts]]
    mesh_axes: frozenset[Any]
    sizes: Mapping[Any, frozenset[int]]

    def within(self, choices: Mapping[Any, Sequence[Parts]]) -> AxisNames:
        """The names in a function that only some xmaps reach."""
        return dataclasses.replace(self, choices=choices)

    def stays(self, name: Any) -> bool:
        return list(self.choices.get(name, [(name,)])) == [(name,)]

    def parts(self, name: Any) -> Parts | None:
        """The parts of an axis, also of one that the user's own vmap has; None if there are several choices."""
        choices = self.choices.get(name, [(name,)])
        return choices[0] if len(choices) == 1 else None

    def every(self, name: Any) -> list[Any]:
        return list(dict.fromkeys(part for choice in self.choices.get(name, [(name,)]) for part in choice))

    def check_distinct(self, names: Sequence[Any]) -> None:
        parts = [p for n in names for p in self.parts(n) or ()]
        if len(set(parts)) != len(parts):
            raise NotWritable(f"a collective over {literal(tuple(names))}, which share mesh axes: write one for each")

    @property
    def same(self) -> bool:
        return all(map(self.stays, self.choices))


@dataclasses.dataclass(frozen=True)
class CallOverAxes:
    """A call of a function over axes.

    Attributes:
      given: its arguments, by parameter name.
      over: the named axes.
      across: the mesh axes that execute them.
      local: the ``jax.vmap`` axes that execute them.
      traced: its collectives in the traced programs.
      callee: a function that returns the value of an expression in the call.
    """

    given: Mapping[str, ast.expr]
    over: Sequence[Any]
    across: Sequence[Any]
    local: Sequence[Any]
    traced: Sequence[Any]
    names: AxisNames
    callee: Callable[[ast.expr], Any]


@dataclasses.dataclass
class Rewriting:
    """What the rewriting of a program's functions needs, and what it finds.

    Attributes:
      calls: the collectives of each innermost call of the user, in all traced programs.
      handled: calls whose axes were rewritten or may stay, with their axes; for ``functools.partial``, the axes.
      places: where each edited call is, which the second run counts by its index; and, never counted, others that name
        an axis of one name with its mesh axis.
      functions: the names of the functions and classes of the user that xmaps reach.
    """

    names: AxisNames
    calls: Mapping[Span, Sequence[Any]]
    handled: dict[Any, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    places: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    functions: frozenset[str] = frozenset()

    def place(self, piece: Piece, node: Any) -> int:
        self.places.append((piece.file, node.lineno, node.col_offset))
        return len(self.places) - 1
