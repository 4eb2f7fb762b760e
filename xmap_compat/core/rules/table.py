"""The table of collectives: one row for each, from the families that translate them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from xmap_compat import _jax
from xmap_compat.core import errors
from xmap_compat.core.nested import rules as nested
from xmap_compat.core.rules import contraction, exchanges, gathers, reductions
from xmap_compat.core.rules.parameters import Names, Params, axis_names, check_groups, mentioned_names, positions
from xmap_compat.core.rules.row import Rule, spread
from xmap_compat.core.specs import AxisName
from xmap_compat.core.values import NamedValue

RULES: dict[str, Rule] = {
    **reductions.RULES,
    **gathers.RULES,
    **exchanges.RULES,
    **contraction.RULES,
    **nested.RULES,
}


def check_parameters(primitive: str, params: Params, size: int, where: str) -> None:
    """Raise if names or indices in a collective's parameters are no such, or do not fit ``size`` elements together."""
    rule = RULES[primitive]
    if positions(params) and not rule.reduces:
        raise errors.integer_in_collective(primitive, positions(params)[0], where)
    rule.check(params, size, where)
    if _has_groups(params):
        if rule.in_groups is None:
            raise errors.unsupported_groups(primitive, where)
        check_groups(primitive, params, size, rule.reduces, where)


def translate(loc: Any, primitive: str, params: Params, operands: Sequence[NamedValue]) -> list[NamedValue]:
    """The results of a collective on one device."""
    rule = RULES[primitive]
    apply = rule.in_groups if _has_groups(params) else rule.translate
    assert apply is not None, "the type check refuses other groups"
    if rule.joint or not operands:
        return [apply(loc, params, *operands)]
    return [apply(loc, params, operand) for operand in operands]


def _has_groups(params):
    return params.get("axis_index_groups") is not None


def result_names(primitive: str, params: Params, operands: Sequence[Names], own: Names) -> Names:
    """The named axes of a collective's result, from those of its operands."""
    axes = frozenset(axis_names(params)) & own
    union = frozenset(itertools.chain.from_iterable(operands))
    return spread(union, axes) if _has_groups(params) else RULES[primitive].names(union, axes)


def collectives_in(jaxpr: Any) -> frozenset[AxisName]:
    """Every axis name that some collective inside a jaxpr mentions."""
    body, _ = _jax.open_jaxpr(jaxpr)
    known = _COLLECTIVES_IN.get(body)
    if known is None:
        known = _COLLECTIVES_IN[body] = frozenset().union(*map(collectives_of, body.eqns))
    return known


def collectives_of(eqn: Any) -> frozenset[AxisName]:
    """Every axis name that one equation mentions, if it is a collective or some collective is inside of it."""
    own = mentioned_names(eqn.params) if eqn.primitive.name in RULES else ()
    return _jax.axes_of_effects(eqn).union(own, *map(collectives_in, _jax.subjaxprs(eqn.params)))


def names_used(eqn: Any) -> frozenset[AxisName]:
    """Every axis name that an equation mentions, also by a primitive that is in no table."""
    return collectives_of(eqn).union(mentioned_names(eqn.params))


# One jaxpr may stand in many equations, which may stand in many jaxprs.
_COLLECTIVES_IN: weakref.WeakKeyDictionary[Any, frozenset[AxisName]] = weakref.WeakKeyDictionary()


def mentions_any(jaxpr: Any, names: Iterable[AxisName]) -> bool:
    """Whether some collective inside a jaxpr is over one of the names."""
    return not collectives_in(jaxpr).isdisjoint(names)
