"""What every stage needs to know of a collective: one row of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from xmap_compat.core.rules.parameters import Names, Params
from xmap_compat.core.values import NamedValue


def reduced(operand: Names, axes: Names) -> Names:
    """The names of a result that is equal for all elements of the axes."""
    return operand - axes


def spread(operand: Names, axes: Names) -> Names:
    """The names of a result that differs between elements of the axes."""
    return operand | axes


def _any_parameters(params: Params, size: int, where: str) -> None:
    pass


class Rule(NamedTuple):
    """One collective primitive.

    Attributes:
      called: the name of the function that people call.
      names: ``(operand names, axes of the collective) -> result names``, one of the two above.
      translate: ``(locality, params, *operands) -> result``, on one device.
      in_groups: the same with ``axis_index_groups``, whose results always differ; None where JAX has no groups.
      reduces: whether it is a reduction, which may also be over positional dimensions, and over groups of any sizes.
      check: ``(params, elements of the axes together, the user's line)``: raises if parameters do not fit.
      joint: whether the primitive makes one result of all operands; others translate each operand by itself.
    """

    called: str
    names: Callable[[Names, Names], Names]
    translate: Callable[..., NamedValue]
    in_groups: Callable[..., NamedValue] | None = None
    reduces: bool = False
    check: Callable[[Params, int, str], None] = _any_parameters
    joint: bool = False
