"""Backward rules with collectives: what plain JAX gives them, and takes from them, other than xmap does.

A cotangent of a result that is equal along an axis is one for all elements.  Under ``jax.vmap``, and where the types
of a ``shard_map`` are checked, a rule gets their sum; without types each device gets a part of it.  A rule that
sums over the axis by itself may count neither twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from xmap_compat import _jax
from xmap_compat.core.names import Checker, Names
from xmap_compat.core.rules.cotangents import collectives_of_results
from xmap_compat.core.rules.table import collectives_in
from xmap_compat.core.trace import trace_flat
from xmap_compat.tools.source.proof import vjp_rules
from xmap_compat.tools.source.rewrite import Span, collectives
from xmap_compat.tools.source.text import NotWritable

if TYPE_CHECKING:
    from xmap_compat.tools.plan import CallPlan


@dataclasses.dataclass(frozen=True)
class RuleOver:
    """A backward rule of a function with collectives in it or in the rule.

    Attributes:
      spans: the user's calls of those collectives.
      names: their axes.
      results: of results that are equal along the axes: ``'first'`` if the rule must get their cotangent at the first
        element only, ``'whole'`` if at each; ``''`` of results that vary.
      operands: ``'equal'`` if the operands are equal along the axes, and so is what the rule makes for them; ``'vary'``
        if they vary and what the rule makes does not; else ``''``.
    """

    spans: frozenset[Span]
    names: tuple[Any, ...]
    results: str
    operands: str

    def options(self, typed: bool) -> dict[str, str]:
        """The options of the helper that a rule needs; none if it may stay as it is."""
        results = self.results if self.results == ("first" if typed else "whole") else ""
        operands = self.operands if self.operands == ("vary" if typed else "equal") else ""
        return {key: value for key, value in (("results", results), ("operands", operands)) if value}


def rules_over(plan: CallPlan) -> list[RuleOver]:
    """The rules with collectives of each call of a function with such a rule."""
    found = []
    for site in plan.staged.sites:
        call = _jax.read(site.eqn)
        if isinstance(call, _jax.CustomVjp):
            rule = _rule_over(plan, site.eqn, call, [o.names for o in site.operands])
            found.extend([rule] if rule is not None else [])
    return list(dict.fromkeys(found))


def _rule_over(plan: CallPlan, eqn: Any, call: _jax.CustomVjp, operands: Sequence[Names]) -> RuleOver | None:
    placements, body = plan.staged.plan.placements, plan.staged.plan.body
    types = lambda avals: [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]  # noqa: E731
    forwarded, forward, backward = vjp_rules(eqn, lambda fun, avals: trace_flat(fun, types(avals), body))
    parts = (call.body, forward, backward)
    over = frozenset().union(*map(collectives_in, parts)) & frozenset(placements)
    if not over:
        return None
    checker = Checker(placements, plan.function)
    results = checker.results(parts[0], operands)
    made = checker.results(forward, operands)
    returned = iter(made)
    residuals = [next(returned) if k is None else operands[k] for k in forwarded]
    smooth = [k for k, v in enumerate(eqn.outvars) if _is_inexact(v)]
    collective = collectives_of_results(parts[0])
    kinds = {k: _kind(over, results[k], collective[k]) for k in smooth}
    cotangents = [results[k] | (over if kinds[k] == "first" else frozenset()) for k in smooth]
    outs = checker.results(backward, [*residuals, *cotangents])
    given = [names for v, names in zip(eqn.invars, operands) if _is_inexact(v)]
    spans = frozenset(span for part in parts for _, spans in collectives(part) for span in spans[:1])
    return RuleOver(
        spans,
        tuple(n for n in placements if n in over),
        _only(set(kinds.values()), "results"),
        _only({_operand_kind(over, names, out) for names, out in zip(given, outs)}, "operands"),
    )


def _kind(over: Names, names: Names, collective: Names) -> str:
    missing = over - names
    if missing and missing != over:
        raise NotWritable("a backward rule over several axes, along some of which its results are equal")
    if missing and missing & collective not in (missing, frozenset()):
        raise NotWritable("a backward rule over several axes, of which its results are made")
    return ("whole" if missing & collective else "first") if missing else ""


def _operand_kind(over: Names, names: Names, out: Names) -> str:
    equal, same = over - names, over - out
    if equal & same and equal & same != over:
        raise NotWritable("a backward rule over several axes, along some of which its operands are equal")
    return "equal" if equal & same else "vary" if same & names else ""


def _only(kinds: set[str], what: str) -> str:
    if len(kinds) > 1:
        raise NotWritable(f"a backward rule with collectives whose {what} differ in what they vary over")
    return next(iter(kinds), "")


def _is_inexact(v) -> bool:
    return jnp.issubdtype(v.aval.dtype, np.inexact)


def rule_at(rules: Sequence[RuleOver], file: str, ranges: Sequence[tuple[int, int]]) -> RuleOver | None:
    """The rule whose collectives are in one of the ranges of lines of a file."""
    inside = [
        rule
        for rule in rules
        if any(s[0] == file and any(a <= s[1] and s[3] <= b for a, b in ranges) for s in rule.spans)
    ]
    kinds = {(rule.results, rule.operands) for rule in inside}
    if len(kinds) > 1:
        raise NotWritable("a backward rule with collectives that is used in several ways")
    if not inside:
        return None
    names = dict.fromkeys(n for rule in inside for n in rule.names)
    return dataclasses.replace(inside[0], names=tuple(names), spans=frozenset().union(*(r.spans for r in inside)))
