"""Cotangents that exist once: how the names of a value say that it stands for those of all
elements.

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
    WHOLE = "by a collective, combined with a varying value: by each element as a whole"
    BOTH = "by a collective, together with what another one made, or with a varying cotangent"
    EACH = "it varies over the axis: each element has its own"


@dataclasses.dataclass(frozen=True)
class Once:
    """An entry among the names of a value in a backward rule that is made from a cotangent.

    Attributes:
      axis: the axis that the entry is about.
      use: how the cotangent was used along it.  With ``EACH`` the cotangent varies over the axis;
        with any other it exists once, summed over the axis.
    """

    axis: AxisName
    use: Use


def with_once(names: Names, axes: Names) -> Names:
    """The names of a cotangent in a rule with collectives over these axes."""
    along = set()
    for axis in axes:
        along.add(Once(axis, Use.EACH if axis in names else Use.NONE))
    return names | along


def without_once(names: Names) -> Names:
    return frozenset(n for n in names if not isinstance(n, Once))


def placements_of_once(axes: Iterable[AxisName]) -> Mapping[Any, Placement]:
    """Each ``Once`` is an axis of one element, for all that does not know what it says."""
    placements: dict[Any, Placement] = {}
    for axis in axes:
        for use in Use:
            name = Once(axis, use)
            placements[name] = Placement(name, 1)
    return placements


def in_parts(names: Names, axes: Iterable[AxisName]) -> list[AxisName]:
    """Those of the axes along which a collective takes a value with these names for the sum of the
    elements' own parts: the cotangent exists once there, and the value does not vary.
    """
    divided = []
    for axis in axes:
        if Once(axis, Use.NONE) in names and axis not in names:
            divided.append(axis)
    return divided


def after_collective(operand: Names, axes: Iterable[AxisName], result: Names) -> Names:
    """The names of a collective's result: which ``Once`` have ended, and how they were used."""
    for axis in axes:
        if Once(axis, Use.NONE) in operand:
            result -= {Once(axis, Use.NONE)}
            result |= {Once(axis, _use_by_collective(operand, axis))}
    return result


def _use_by_collective(operand, axis) -> Use:
    """How a collective over an axis uses an operand that is made from a cotangent."""
    for use in (Use.PARTS, Use.BOTH, Use.EACH):
        if Once(axis, use) in operand:
            return Use.BOTH
    if axis in operand:
        return Use.WHOLE
    if Once(axis, Use.WHOLE) in operand:
        return Use.BOTH
    return Use.PARTS


def used_both_ways(names: Names) -> Names:
    """The axes along which a result uses one cotangent in two ways: by a collective that takes it
    for the elements' parts, and without a collective (or ``BOTH``).
    """
    axes: dict[Use, set[AxisName]] = {use: set() for use in Use}
    for name in names:
        if isinstance(name, Once):
            axes[name.use].add(name.axis)
    return frozenset(axes[Use.PARTS] & axes[Use.NONE] | axes[Use.BOTH])
