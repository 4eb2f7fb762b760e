"""The table of collectives with respect to named axes, and what stage 4 and the tools ask of it.

The rules in ``rules/``, which evaluate each on one device, fill it.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

from xmap_compat import _jax
from xmap_compat.core import once
from xmap_compat.core.parameters import (
    Names,
    Params,
    axis_names,
    check_groups,
    mentioned_names,
    positions,
)
from xmap_compat.core.placement import is_mesh_axis
from xmap_compat.core.specs import AxisName


def reduced(operand: Names, axes: Names) -> Names:
    """The names of a result that is equal for all elements of the axes."""
    return operand - axes


def varied(operand: Names, axes: Names) -> Names:
    """The names of a result that differs between elements of the axes."""
    return operand | axes


def varied_over_devices(operand: Names, axes: Names) -> Names:
    """The names of a result that differs between devices: only mesh axes among the axes are
    added.
    """
    return operand.union(filter(is_mesh_axis, axes))


Translation = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """All that is known of one collective primitive.

    Attributes:
      called: the name of the public function, which plans print.
      names: ``(operand names, axes of the collective) -> result names``: ``reduced``, ``varied``
        or ``varied_over_devices``.
      translate: ``(view, params, *operands) -> result``: it on one device.
      in_groups: the same with ``axis_index_groups``; None if it takes none.
      reduces: whether it is a reduction, which may also be over positional dimensions.
      check: ``(params, elements of the axes together, the user's line)``: raises if parameters do
        not fit.
      joint: whether the primitive makes one result of all operands; others translate each operand
        by itself.
      counts: whether it multiplies what is equal for all elements by their number, and knows what
        exists once.
      gathers: whether its result is equal for all elements in value, and may vary in its type.
      moves: ``(params, elements of the axes together) -> whether each element receives one``, of a
        collective by which elements only change places.
    """

    called: str
    names: Callable[[Names, Names], Names]
    translate: Translation
    in_groups: Translation | None = None
    reduces: bool = False
    check: Callable[[Params, int, str], None] | None = None
    joint: bool = False
    counts: bool = False
    gathers: bool = False
    moves: Callable[[Params, int], bool] | None = None


# Each stands at its rule in ``rules/``.
COLLECTIVES: dict[str, Row] = {}


def collective(
    primitive: str, names: Callable[[Names, Names], Names], called: str = "", **properties: Any
) -> Callable[[Translation], Translation]:
    """A decorator: a rule that translates a primitive, with all else that is known of it.

    Args:
      properties: fields of ``Row``.
    """

    def keep(translate: Translation) -> Translation:
        COLLECTIVES[primitive] = Row(called or primitive, names, translate, **properties)
        return translate

    return keep


def check_parameters(primitive: str, params: Params, size: int, where: str) -> None:
    """Raise if names or indices in a collective's parameters are invalid, or do not fit ``size``
    elements together.
    """
    row = COLLECTIVES[primitive]
    if positions(params) and not row.reduces:
        raise _integer_in_collective(primitive, positions(params)[0], where)
    if row.check is not None:
        row.check(params, size, where)
    if has_groups(params):
        check_groups(primitive, params, size, where)


def _integer_in_collective(primitive: str, axis: int, where: str) -> NameError:
    return NameError(f"{primitive} at {where} got {axis} for an axis name. {integer_name(axis)}")


def integer_name(axis: int) -> str:
    return (
        f"Collectives read {axis} as a position (dimension), and do not support axes that are "
        "named by integers. Name the axis by a string"
    )


def has_groups(params: Params) -> bool:
    return params.get("axis_index_groups") is not None


def result_names(
    primitive: str,
    params: Params,
    operands: Sequence[Names],
    bound: Container[AxisName],
    elements: int,
) -> Names:
    """The named axes of a collective's result, from those of its operands.

    Args:
      elements: how many the axes of the collective have together.
    """
    mentioned = axis_names(params)
    axes = frozenset(n for n in mentioned if n in bound)
    union = frozenset(itertools.chain.from_iterable(operands))
    row = COLLECTIVES[primitive]
    are_equal = len(axes) == len(mentioned) and not axes & union and not once.in_parts(union, axes)
    if are_equal and row.moves is not None and row.moves(params, elements):
        return union  # equal elements change places
    after = row.names
    if has_groups(params):
        after = varied
    return once.after_collective(union, axes, after(union, axes))


def collective_axes_in(jaxpr: Any) -> frozenset[AxisName]:
    """Every axis name that some collective inside a jaxpr mentions."""
    body, _ = _jax.open_jaxpr(jaxpr)
    if body not in _AXES_IN:
        _AXES_IN[body] = frozenset().union(*map(collective_axes_of, body.eqns))
    return _AXES_IN[body]


def collective_axes_of(eqn: Any) -> frozenset[AxisName]:
    """Every axis name that one equation mentions, if it is a collective or contains one."""
    inside = frozenset().union(*map(collective_axes_in, _jax.subjaxprs(eqn.params)))
    if eqn.primitive.name in COLLECTIVES or _jax.depends_on_axes(eqn):
        return inside.union(mentioned_names(eqn.params))
    return inside


def names_used(eqn: Any) -> frozenset[AxisName]:
    """Every axis name that an equation mentions, including those of primitives that are in no
    table.
    """
    return collective_axes_of(eqn).union(mentioned_names(eqn.params))


# One jaxpr may occur in many equations, and these in many jaxprs.
_AXES_IN: weakref.WeakKeyDictionary[Any, frozenset[AxisName]] = weakref.WeakKeyDictionary()
