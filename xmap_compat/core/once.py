"""Cotangents that exist once: how the names of a value say that it stands for those of all elements.

A cotangent that does not vary over an axis has arrived summed over it.  In a custom backward rule
it, and what is made from it, has a ``Once`` for the axis among its names.  It is passed on as names
are, and ends in a collective over the axis.  ``core/structured/cotangents.py`` says why.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from xmap_compat.core.parameters import Names
from xmap_compat.core.placement import Placement
from xmap_compat.core.specs import AxisName


class Use(enum.Enum):
    """How a cotangent was used to make a value, along an axis."""

    NONE = "by no collective yet"
    PARTS = "by a collective, as the elements' own values, which add up to it"
    WHOLE = "by a collective, after it met a varying value: by each element as a whole"
    BOTH = "by a collective, together with what another one made, or with a varying cotangent"
    EACH = "it varies over the axis: each element has its own"


@dataclasses.dataclass(frozen=True)
class Once:
    """Among the names of a value that is made from a cotangent which exists once along an axis.

    Attributes:
      axis: the cotangent has arrived summed over it.
      use: how it was used.
    """

    axis: AxisName
    use: Use = Use.NONE


def with_once(names: Names, axes: Names) -> Names:
    """The names of a cotangent in a rule with collectives over these axes."""
    along = (Once(axis, Use.EACH if axis in names else Use.NONE) for axis in axes)
    return names.union(along)


def without_once(names: Names) -> Names:
    return frozenset(n for n in names if not isinstance(n, Once))


def placements_of_once(axes: Iterable[AxisName]) -> Mapping[Any, Placement]:
    """Each ``Once`` is an axis of one element, for all that does not know what it says."""
    every = (Once(axis, use) for axis in axes for use in Use)
    return {name: Placement(name, 1) for name in every}


def in_parts(names: Names, axes: Iterable[AxisName]) -> list[AxisName]:
    """The axes along which a value with these names stands in a collective for the elements' own."""
    return [axis for axis in axes if Once(axis) in names and axis not in names]


def after_collective(operand: Names, axes: Iterable[AxisName], result: Names) -> Names:
    """The names of a collective's result: which ``Once`` have ended, and how they were used."""
    for axis in axes:
        if Once(axis) in operand:
            result = (result - {Once(axis)}).union(_ended(operand, axis))
    return result


def _ended(operand, axis):
    """How a collective over an axis uses an operand that is made from a cotangent."""
    others = {use for use in Use if Once(axis, use) in operand} - {Use.NONE}
    if others & {Use.PARTS, Use.BOTH, Use.EACH}:
        return [Once(axis, Use.BOTH)]
    if axis in operand:
        return [Once(axis, Use.WHOLE)]
    return [Once(axis, Use.BOTH if others else Use.PARTS)]


def used_both_ways(names: Names) -> Names:
    """The axes along which a result has a cotangent by its parts, and without any collective."""
    by_parts = {n.axis for n in names if isinstance(n, Once) and n.use is Use.PARTS}
    without = {n.axis for n in names if isinstance(n, Once) and n.use is Use.NONE}
    together = {n.axis for n in names if isinstance(n, Once) and n.use is Use.BOTH}
    return frozenset(by_parts & without | together)
