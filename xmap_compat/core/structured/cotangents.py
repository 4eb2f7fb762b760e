"""The cotangents of one ``custom_vjp``: those that its backward rule is applied to, and the meaning
of its results.

A rule is written for one element of each named axis.  It is applied on devices that hold many,
where some values are equal for all elements, and where their cotangents exist once.  Nothing may be
counted twice, whether the rule sums by itself or not.  Take an axis ``i`` of two elements on two
devices, ``x = [1, 2]`` mapped, one weight ``w = 3`` that is not, and cotangents 1.

*A rule that does not sum*: ``f(x, w) = x * w``, ``bwd(ct) = (ct * w, ct * x)``.  Device 0 computes
1 for the weight, device 1 computes 2.  The result varies over ``i`` and the weight does not, so
:func:`_cotangent_like` sums: 3, as it is for the positional function.

*A rule that sums*: ``bwd(ct) = (ct * w, psum(ct * x, 'i'))``.  Both devices have 3.  It does not
vary over ``i`` any more, and stays: 3.  (Without types, where a cotangent of an unmapped argument
is always summed, it would be 6.)

*A cotangent that exists once, of a collective*: ``g(x, w) = psum(x * w, 'i')`` is 9 for both
elements, and one cotangent arrives for both, 1.  A rule may say ``bwd(ct) = (psum(ct, 'i') * w,
...)``, as the transpose of a psum is a psum where each element has its own cotangent, which add up
to what arrived here as 1.  Summing the one value over two elements would give 2.  Or it may say
``(ct * w, ...)``, as each element's ``x`` has its part in the one sum.  Both mean ``[3, 3]``.  So:

    A value that is made from the cotangent, and does not vary over the axis, stands in a collective
    over it for the elements' own values, which add up to it.  Where it meets a varying value first,
    each element uses the whole.  What a collective has made is a value as any other.

So ``psum(ct)``, ``all_gather(ct).sum()`` and ``psum(ppermute(ct))`` are 1, ``psum(psum(ct))`` is 2,
and ``psum(ct * x)`` is 3, the whole times each element of ``x``.  A psum returns the whole; in any
other collective each element puts in an equal part (:func:`~xmap_compat.core.device.equal_parts`).
The names of values say which these are: :mod:`xmap_compat.core.once`.

*A cotangent that exists once, and no collective*: ``h(x, w) = (x * w, w * w)``, ``bwd(ct, du) = (ct
* w, ct * x + du * 2 * w)``. Device 0 would compute 1 + 6 for the weight, device 1 computes 2 + 6,
and the sum 15 has counted ``du`` twice.  Every element's call returned the same second result, so
one of them takes its cotangent (:func:`_at_first_element`): 1 + 6 and 2 + 0, which is 9.

*A rule that sums, and has a term besides*: ``f(w) = psum(w, 'i') + w``, ``bwd(ct) = psum(ct, 'i') +
ct``.  Nothing varies, and one cotangent arrives, 1.  For an element the rule means the sum of all
cotangents, plus the cotangent of that element.  So:

    If one result of the rule depends on the cotangent by a collective in which it stands for the
    elements' own, and without any collective, each element has its own value, an equal part, in all
    of that result.  This is decided for each result and each axis.

Both elements have 1 + 1/2, which varies, and adds up to 3.  A ring of ``ppermute`` that adds up
what comes by is of this kind, too, and so is a collective of what exists once and of what another
collective made, or of a cotangent that varies: ``psum(psum(ct) + ct)``.

What depends on how the cotangent is divided among the elements, as ``psum(ct) + ct`` for a mapped
operand, has no right value.  It has one value under all placements, by equal parts.

Where results of both kinds meet in one function, the rule, which is linear in its cotangents, is
applied to each kind by itself, and the results are added (:func:`_cases_of`, :func:`_apply_rule`).
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from xmap_compat import _jax
from xmap_compat.core import once
from xmap_compat.core.batch import kept_where
from xmap_compat.core.collectives import collective_axes_in, collective_axes_of
from xmap_compat.core.device import equal_parts, laid_out, laid_out_over
from xmap_compat.core.evaluate import Evaluator
from xmap_compat.core.names import NONE, Names
from xmap_compat.core.passes import fact_of, forward
from xmap_compat.core.placement import is_mesh_axis
from xmap_compat.core.rules.reductions import sum_over
from xmap_compat.core.structured.callables import (
    evaluate_staged,
    is_no_array,
    only_arrays,
    positional_zero,
    staged_callable,
)
from xmap_compat.core.values import NamedValue, common, names_of_each, split, union_of_names


def cotangents_of_operands(
    ev: Evaluator, jaxpr, rule, residuals, cotangents, wanted
) -> dict[int, NamedValue | None]:
    """The cotangents of a function's operands; ``wanted``: dims, names, dtype of each that is
    differentiated.
    """
    summands: dict[int, list[NamedValue | None]] = {k: [] for k in wanted}
    alike: dict[Names, list[int]] = {}  # the operands that vary over the same names
    for k, (_, names, _) in wanted.items():
        alike.setdefault(names, []).append(k)
    for names, operands in alike.items():
        for case in _cases_of(ev.view, jaxpr, residuals, cotangents, names):
            outs = _apply_rule(ev, rule, residuals, cotangents, case, operands)
            for k in operands:
                summands[k].append(_cotangent_like(ev, outs[k], *wanted[k]))
    return {k: _added(terms) for k, terms in summands.items()}


def _cases_of(view, jaxpr, residuals, cotangents, operand_names) -> list[dict[int, NamedValue]]:
    """The cotangents to apply a backward rule to, in cases whose results add up, for an operand
    over ``operand_names``.

    The cotangent of a result that does not vary over an axis arrives summed over it.  If the
    operand does not vary over the axis either, and anything in the rule does, the rule's results
    are summed as well, and must not count the cotangent for every element.  If no collective over
    the axis made the result, every element's call returned the same value: one of them takes the
    cotangent.  Otherwise the rule may sum by itself or leave that to us: it is applied to that
    cotangent only, and the names of its results say which.

    Returns:
      Cases, each with cotangents by the number of their result; missing ones are zero.  There is at
      least one case; cotangents of integers, and those known to be zero, are in none.
    """
    together = union_of_names([*residuals, *cotangents]) - operand_names
    cases: dict[Names, dict[int, NamedValue]] = {}
    axes_of_results = _collective_axes_of_results(jaxpr)
    for k, (ct, collective_axes) in enumerate(zip(cotangents, axes_of_results, strict=True)):
        if is_no_array(ct):
            continue
        summed = together - ct.names
        case = cases.setdefault(summed & collective_axes, {})
        case[k] = _at_first_element(view, ct, summed - collective_axes)
    return list(cases.values()) or [{}]


def _apply_rule(ev, rule, residuals, cotangents, case, wanted):
    """The results of a backward rule for the operands ``wanted``, by their numbers.

    The rule is linear in the cotangents: where some of them are zero, its derivative along the
    others is used.
    """
    zeros = {k: positional_zero(ct) for k, ct in enumerate(cotangents)}
    # The numbers of the cotangents that may not be zero.
    nonzero = {k for k, ct in enumerate(cotangents) if not is_no_array(ct)}

    def rule_of_case(*args):
        fixed, seeds = split(args, len(residuals))

        def of_seeds(*seeds):
            everything = {**zeros, **dict(zip(case, seeds))}
            return rule(*fixed, *everything.values())

        if nonzero <= case.keys():
            return of_seeds(*seeds)
        apply, restore = only_arrays(of_seeds)
        _, tangents = jax.jvp(apply, list(map(jnp.zeros_like, seeds)), seeds)
        return restore(tangents)

    rule_of_case = _jax.traced_as(rule, rule_of_case)
    staged = staged_callable(ev, rule_of_case, [*residuals, *case.values()])
    # The collectives of nested xmaps over devices count each device, as these have it.
    bound_axes = frozenset(itertools.filterfalse(is_mesh_axis, ev.view.placements))
    axes = collective_axes_in(staged.jaxpr) & bound_axes
    first = len(staged.operands) - len(case)
    if all(axes <= ct.names for ct in staged.operands[first:]):
        return staged.restore(evaluate_staged(ev, staged.jaxpr, staged.operands))
    knowing_once = ev.placing({**ev.view.placements, **once.placements_of_once(axes)})
    return _apply_where_once(knowing_once, staged, first, axes, wanted)


def _apply_where_once(ev, staged, first, axes, wanted):
    """The results of a backward rule whose cotangents, from operand ``first`` on, exist once along
    some axes.
    """

    def operands_divided_over(divided):
        cts = [_once_in(ev.view, ct, axes, divided) for ct in staged.operands[first:]]
        return [*staged.operands[:first], *cts]

    inputs = names_of_each(operands_divided_over(NONE))
    names = ev.checker.check(staged.jaxpr, inputs)
    both_ways = staged.restore([once.used_both_ways(n) for n in names])
    outs: dict[Names, list[NamedValue | None]] = {}
    found = {}
    for k in wanted:
        divided = both_ways[k] or NONE
        if divided not in outs:
            results = evaluate_staged(ev, staged.jaxpr, operands_divided_over(divided))
            outs[divided] = staged.restore(results)
        found[k] = outs[divided][k]
    return found


def _once_in(view, cotangent, axes, divided):
    """A cotangent that exists once along ``axes``; along ``divided`` each element has its part."""
    names = once.with_once(cotangent.names, axes)
    existing = NamedValue(cotangent.data, cotangent.dims, names)
    missing = (axes - cotangent.names) & divided
    if not missing:
        return existing
    parts = equal_parts(view, existing, missing)
    return laid_out_over(view, parts, parts.names | missing)


def _added(values):
    first, *others = values
    if first is None:
        return None
    total = first.data
    for other in others:
        total = total + other.data
    return first.with_data(total)


def _collective_axes_of_results(jaxpr) -> list[Names]:
    """The axes of the collectives that each result depends on."""

    def depends_on(eqn, operands):
        return [collective_axes_of(eqn).union(*operands)] * len(eqn.outvars)

    body, _ = _jax.open_jaxpr(jaxpr)
    axes = forward(body, [NONE] * len(body.invars), depends_on)
    return [fact_of(axes, atom) for atom in body.outvars]


def _at_first_element(view, value, names):
    """A value that is set to zero except at the first element of axes that it did not vary over."""
    if not names:
        return value
    ordered = common(view.placements, names)
    return kept_where(view, value, ordered, lambda index: index == 0)


def _cotangent_like(ev, cotangent: NamedValue | None, dims, names, dtype) -> NamedValue | None:
    """Sum a cotangent over axes that its primal does not vary over; one that was summed already
    stays.

    A rule may return another precision than its primal has, as under ``jax.vmap``.
    """
    if cotangent is None:
        return None
    varied = once.without_once(cotangent.names)
    cotangent = NamedValue(cotangent.data, cotangent.dims, varied)
    extra = varied - names
    if extra:
        cotangent = sum_over(ev.view, cotangent, sorted(extra, key=str))
    cotangent = laid_out(ev.view, cotangent, dims, names)
    return cotangent.with_data(lax.convert_element_type(cotangent.data, dtype))
