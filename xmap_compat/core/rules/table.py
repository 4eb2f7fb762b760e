"""The table of collectives: one row for each."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.device import vary_over
from xmap_compat.core.nested_primitives import gather_p, sum_p, take_p, vary_p
from xmap_compat.core.rules.contraction import contract
from xmap_compat.core.rules.exchanges import _all_to_all, ppermute, reduce_scatter
from xmap_compat.core.rules.gathers import all_gather, axis_index, gather_over
from xmap_compat.core.rules.groups import reduce_in_groups
from xmap_compat.core.rules.nested import over_devices, take_own
from xmap_compat.core.rules.parameters import Names, Params, _positions, axis_names, mentioned_names
from xmap_compat.core.rules.reductions import max_over, min_over, pbroadcast, sum_over
from xmap_compat.core.specs import AxisName
from xmap_compat.core.values import NamedValue


class Rule(NamedTuple):
    """How one collective primitive is typed and translated.

    Attributes:
      names: ``(operand names, axes of the collective) -> result names``.
      translate: ``(locality, params, *operands) -> result``.
    """

    names: Callable[[Names, Names], Names]
    translate: Callable[..., NamedValue]


def _reduced(operand: Names, axes: Names) -> Names:
    return operand - axes


def _spread(operand: Names, axes: Names) -> Names:
    return operand | axes


def _reduction_rule(over: Callable, positional_reduce: Callable, neutral: Callable[[Any], Any]) -> Rule:
    """The rule of a reduction; ``neutral(own value)`` is what changes nothing if it is reduced as well."""

    def translate(loc, params, value):
        if params.get("axis_index_groups") is not None:
            return reduce_in_groups(loc, params, value, positional_reduce, neutral)
        return over(loc, value, axis_names(params), _positions(params))

    return Rule(_reduced, translate)


RULES: dict[str, Rule] = {
    "psum": _reduction_rule(sum_over, lax.reduce_sum, jnp.zeros_like),
    # Every type has a largest value with itself, though not an infinity, as some of 8 bits.
    "pmax": _reduction_rule(max_over, lax.reduce_max, lambda own: own),
    "pmin": _reduction_rule(min_over, lax.reduce_min, lambda own: own),
    "axis_index": Rule(_spread, axis_index),
    "all_gather": Rule(_reduced, all_gather),
    "reduce_scatter": Rule(_spread, reduce_scatter),
    "all_to_all": Rule(_spread, _all_to_all),
    "ppermute": Rule(_spread, ppermute),
    "pbroadcast": Rule(_reduced, pbroadcast),
    "pdot": Rule(_reduced, contract),
    "device_vary": Rule(_spread, over_devices(vary_p, vary_over)),
    "device_sum": Rule(_reduced, over_devices(sum_p, sum_over)),
    "device_gather": Rule(_reduced, over_devices(gather_p, gather_over)),
    "device_take": Rule(_spread, over_devices(take_p, take_own)),
}


def result_names(primitive: str, params: Params, operands: Sequence[Names], own: Names) -> Names:
    """The named axes of a collective's result, from those of its operands."""
    axes = frozenset(axis_names(params)) & own
    grouped = params.get("axis_index_groups") is not None
    union = frozenset(itertools.chain.from_iterable(operands))
    return _spread(union, axes) if grouped else RULES[primitive].names(union, axes)


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
