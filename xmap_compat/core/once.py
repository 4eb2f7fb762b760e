"""Cotangents that exist once: how the names of a value say that it stands for those of all elements.

A cotangent that does not vary over an axis has arrived summed over it.  In a custom backward rule
it, and what is made from it, has a mark ``Once`` for the axis among its names.  Marks are passed on
as names are, and end in a collective over the axis.  ``core/structured/cotangents.py`` says why.
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
    """How a value was used to make another, along an axis that the value does not vary over."""

    NONE = "by no collective yet"
    PARTS = "by a collective, as the elements' own values, which add up to it"
    WHOLE = "by a collective, after it met a varying value: by each element as a whole"


@dataclasses.dataclass(frozen=True)
class Once:
    """A mark among the names of a value that is made from a cotangent.

    Attributes:
      axis: the cotangent has arrived summed over it.
      use: how it was used.
    """

    axis: AxisName
    use: Use = Use.NONE


def marks(axes: Iterable[AxisName]) -> frozenset[Any]:
    """The marks of a cotangent that does not vary over these axes."""
    return frozenset(map(Once, axes))


def without_marks(names: Names) -> Names:
    return frozenset(n for n in names if not isinstance(n, Once))


def placements_of_marks(axes: Iterable[AxisName]) -> Mapping[Any, Placement]:
    """Marks are axes of one element for all that does not know them."""
    every = (Once(axis, use) for axis in axes for use in Use)
    return {mark: Placement(mark, 1) for mark in every}


def in_parts(names: Names, axes: Iterable[AxisName]) -> list[AxisName]:
    """The axes along which a value with these names stands in a collective for the elements' own."""
    return [axis for axis in axes if Once(axis) in names and axis not in names]


def after_collective(operand: Names, axes: Iterable[AxisName], result: Names) -> Names:
    """The names of a collective's result, with the marks that it has."""
    for axis in axes:
        if Once(axis) in operand:
            result = (result - {Once(axis)}).union(_ended(operand, axis))
    return result


def _ended(operand, axis):
    """The marks that end in a collective over an axis, in which a cotangent is an operand."""
    if axis in operand:
        return [Once(axis, Use.WHOLE)]
    if Once(axis, Use.PARTS) in operand:  # a sum of a sum, and of its cotangent
        return [Once(axis, Use.PARTS), Once(axis, Use.WHOLE)]
    return [Once(axis, Use.PARTS)]


def used_both_ways(names: Names) -> Names:
    """The axes along which a result depends on a cotangent by its parts, and otherwise."""
    by_parts = {n.axis for n in names if isinstance(n, Once) and n.use is Use.PARTS}
    otherwise = {n.axis for n in names if isinstance(n, Once) and n.use is not Use.PARTS}
    return frozenset(by_parts & otherwise)
