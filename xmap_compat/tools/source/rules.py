"""Backward rules with collectives: what plain JAX gives them, and takes from them, other than xmap does.

A cotangent of a result that is equal along an axis is one for all elements.  Under ``jax.vmap``, and where the types
of a ``shard_map`` are checked, a rule gets their sum; without types each device gets a part of it.  A rule that
sums over the axis by itself may count neither twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xmap_compat import _jax
from xmap_compat.core.names import NONE, Checker, Names
from xmap_compat.core.placement import Placement
from xmap_compat.core.rules.cotangents import collectives_of_results
from xmap_compat.core.rules.parameters import mentioned_names
from xmap_compat.core.rules.table import collectives_in
from xmap_compat.core.trace import trace_flat
from xmap_compat.core.values import COTANGENT
from xmap_compat.tools.source.proof import vjp_rules
from xmap_compat.tools.source.text import NotWritable, literal
from xmap_compat.tools.source.user_code import Span, collectives

if TYPE_CHECKING:
    from xmap_compat.tools.plan import CallPlan
    from xmap_compat.tools.source.module import Module


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
      gathered: whether the function gathers: its result is equal along the axes, and by the types of JAX it varies.
    """

    spans: frozenset[Span]
    names: tuple[Any, ...]
    results: str
    operands: str
    gathered: bool

    def options(self, typed: bool) -> dict[str, str]:
        """The options of the helper that a rule needs; none if it may stay as it is."""
        if typed and self.gathered and self.results == "whole":
            raise NotWritable("a gathered result as one that varies, and its backward rule a part of the cotangent")
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
    if "whole" in kinds.values():
        _refuse_repeated_sums(checker, backward, residuals, [results[k] for k in smooth])
    outs = checker.results(backward, [*residuals, *cotangents])
    given = [names for v, names in zip(eqn.invars, operands) if _is_inexact(v)]
    spans = frozenset(span for part in parts for _, spans in collectives(part) for span in spans[:1])
    return RuleOver(
        spans,
        tuple(n for n in placements if n in over),
        _only(set(kinds.values()), "results"),
        _only({_operand_kind(over, names, out) for names, out in zip(given, outs)}, "operands"),
        any(eqn.primitive.name == "all_gather" for eqn, _ in _recorded(checker, parts[0], operands)),
    )


@dataclasses.dataclass(frozen=True)
class _Recorder(Checker):
    """A checker that keeps each equation, and what its operands vary over."""

    found: list[tuple[Any, Sequence[Names]]] = dataclasses.field(default_factory=list)

    def equation(self, eqn: Any, inputs: Sequence[Names]) -> list[Names]:
        self.found.append((eqn, inputs))
        return super().equation(eqn, inputs)


def _recorded(checker: Checker, jaxpr: Any, inputs: Sequence[Names]) -> list[tuple[Any, Sequence[Names]]]:
    """The equations of a program at any depth, each with what its operands vary over."""
    recorder = _Recorder({**checker.placements, COTANGENT: Placement(COTANGENT, 1)}, checker.fun)
    recorder.results(jaxpr, inputs)
    return recorder.found


def _refuse_repeated_sums(checker: Checker, backward: Any, residuals: Sequence[Names], results: Sequence[Names]):
    """Refuse a rule that sums the cotangent of a collective: xmap has summed it already, JAX would do so again."""
    for eqn, inputs in _recorded(checker, backward, [*residuals, *(names | {COTANGENT} for names in results)]):
        summed = frozenset(mentioned_names(eqn.params)) & checker.own if eqn.primitive.name in _SUMS else NONE
        held = NONE.union(*inputs)
        instead = _OWN_PART if eqn.primitive.name == "reduce_scatter" else _NO_SUM
        if COTANGENT in held and summed - held:
            raise NotWritable(
                f"a backward rule that sums a cotangent at {checker.where(eqn)}, which is the sum over "
                f"{', '.join(sorted(map(str, summed - held)))} already, as its function ends with a collective: "
                f"plain JAX would count it for each element. {instead}: xmap gives the same then"
            )


_SUMS = ("psum", "psum_invariant", "reduce_scatter", "pdot")
_NO_SUM = "Leave this sum out of the rule"
_OWN_PART = "Take the element's own part in its place (`ct[lax.axis_index(name)]`)"


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


class Wrapped(NamedTuple):
    """What a written rule and its function need for the cotangents of plain JAX.

    Attributes:
      helper: what makes a rule out of the user's; "" if that may stay.
      axes: of its collectives, or a function of the argument that has their name, as text.
      options: of the helper, as text.
      differ: whether the arguments of the function must differ along the axes of ``jax.vmap``.
    """

    helper: str
    axes: str
    options: str
    differ: bool


def wrapped(module: Module, file: str, nodes: Sequence[Any]) -> Wrapped:
    """What a rule in a file needs.

    Args:
      nodes: its function, and itself.
    """
    ranges = [(node.lineno, node.end_lineno) for node in nodes]
    within = lambda span: span[0] == file and any(a <= span[1] and span[3] <= b for a, b in ranges)  # noqa: E731
    inside = [rule for rule in module.rules if any(map(within, rule.spans))]
    if not inside:
        return Wrapped("", "", "", False)
    over, names = inside[0], dict.fromkeys(rule.names for rule in inside)
    own = [a.arg for a in nodes[1].args.args[:-2]]
    if len({(rule.results, rule.operands) for rule in inside}) > 1 or (len(names) > 1 and len(own) != 1):
        raise NotWritable("a backward rule with collectives that is used in several ways")
    if len(names) > 1:
        axes = f"lambda {own[0]}: {module.helper('axes_of')}({own[0]})"
    else:
        axes = literal(tuple(p for n in over.names for p in module.names.parts(n)))
    gathered = any(rule.gathered for rule in inside)
    options = dataclasses.replace(over, gathered=gathered).options(module.typed)
    differ = over.results == "first" and not module.typed and any(module.names.local[n] for ns in names for n in ns)
    helper = "typed_backward_over" if module.typed else "backward_over"
    return Wrapped(
        helper if options else "", axes, "".join(f", {key}={literal(value)}" for key, value in options.items()), differ
    )
