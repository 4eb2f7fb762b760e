"""Control flow of a named program, rebuilt around the evaluation of its bodies.

Where elements of named axes take different branches, branches become selections, and loops run until none goes on.
Where devices do, and their branches hold collectives, devices stay together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.batch import bind_named
from xmap_compat.core.collectives import collectives_in
from xmap_compat.core.device import conform, conform_to_names, vary_alike, vary_as, vary_over
from xmap_compat.core.names import Names, scan_carry_names, while_names
from xmap_compat.core.rules.reductions import max_over
from xmap_compat.core.values import NamedValue, is_smooth, split, transposed, without

if TYPE_CHECKING:
    from xmap_compat.core.evaluate import Evaluator


def scan(ev: Evaluator, scan: _jax.Scan, operands: Sequence[NamedValue], eqn: Any) -> list[NamedValue]:
    """A ``lax.scan`` over the evaluated body.

    Args:
      operands: constants, the carry before the first iteration, and the scanned values, in any layout.

    Returns:
      The last carry, and the stacked results with their new dimension as the first positional one.  The carry has the
      names that it varies over after any number of iterations, in the canonical layout from the start, since its type
      must be the same in every iteration.
    """
    consts, carry, xs = split(operands, scan.num_consts, scan.num_carry)
    names = scan_carry_names(ev.checker, scan, [v.names for v in operands])
    first = ev.conformed(carry, names)

    def body(carry, slices):
        outs = ev.evaluate(scan.body, [*consts, *carry, *slices])
        return ev.conformed(outs[: scan.num_carry], names), outs[scan.num_carry :]

    scanned = [_scanned_first(x) for x in xs]
    slices = lambda: [dataclasses.replace(x, data=x.data[0]) for x in scanned]  # noqa: E731
    first = _settled(ev, lambda carry: body(carry, slices())[0], first) if scan.length else first
    options = {"length": scan.length, "reverse": scan.reverse, "unroll": scan.unroll}
    last, ys = lax.scan(body, first, scanned, **options)
    return [*last, *(NamedValue(y.data, (None, *y.dims), y.names) for y in ys)]


def _settled(ev: Evaluator, step: Callable[..., list[NamedValue]], carry: list[NamedValue]) -> list[NamedValue]:
    """The carry, cast to the foreign mesh axes of any iteration: its type must be the same in each.

    (The type check of the program finds the xmap's own axes.)
    """
    while ev.view.foreign:
        before = [_jax.varying_axes(v.data) for v in carry]
        types = jax.make_jaxpr(step)(carry).out_avals
        after = [axes | _jax.varying_axes_of(aval) for axes, aval in zip(before, types, strict=True)]
        if after == before:
            break
        carry = vary_as(ev.view, carry, after)
    return carry


def _scanned_first(value: NamedValue) -> NamedValue:
    """Move the first positional dimension to the front of the data and out of ``dims``: scan strips it."""
    at = value.positional_dims()[0]
    data = jnp.moveaxis(value.data, at, 0) if at else value.data
    return NamedValue(data, (*value.dims[:at], *value.dims[at + 1 :]), value.names)


def while_loop(ev: Evaluator, loop: _jax.While, operands: Sequence[NamedValue], eqn: Any) -> list[NamedValue]:
    """A ``lax.while_loop`` over the evaluated condition and body, as ``jax.vmap`` makes it for its elements.

    Args:
      operands: constants of the condition, constants of the body, and the carry before the first iteration.

    Returns:
      The last carry.  It varies over all names of the predicate, since elements stop at different iterations: one
      whose predicate is false keeps its value while others go on, and its predicate is computed again each time.
    """
    condition_consts, body_consts, init = split(operands, loop.num_condition_consts, loop.num_body_consts)
    names, varying = while_names(ev.checker, loop, [v.names for v in operands])
    ev = dataclasses.replace(ev, apart=ev.apart | varying)
    condition = lambda carry: ev.evaluate(loop.condition, [*condition_consts, *carry])[0]  # noqa: E731
    step = lambda carry: ev.conformed(ev.evaluate(loop.body, [*body_consts, *carry]), names)  # noqa: E731
    first = ev.conformed(init, names)
    together = ev.communicates(loop.condition, loop.body)
    batched = loop.condition.out_avals[0].shape or ev.view.local_names(varying)
    if not batched and not (varying and together):
        first = _settled(ev, step, first)
        return lax.while_loop(lambda carry: condition(carry).data, step, first)
    asked_again = any(not ev.view.is_own(n) for n in collectives_in(loop.condition))
    return _while_any(_Condition(ev, condition, varying, together), step, first, asked_again)


@dataclasses.dataclass(frozen=True)
class _Condition:
    """The condition of a loop in which some elements go on while others do not.

    Where the loop communicates, all devices must agree to go on: an all-reduce then tells whether any element
    is left.  Otherwise each device stops by itself.
    """

    ev: Evaluator
    condition: Callable[[Sequence[NamedValue]], NamedValue]
    varying: Names
    together: bool

    def __call__(self, carry: Sequence[NamedValue]) -> tuple[Any, NamedValue]:
        """Whether any element goes on, and which do."""
        (pending,) = self.ev.conformed([self.condition(carry)], [self.varying])
        left = pending.data.any()
        axes = self.ev.view.mesh_axes_of(self.varying) if self.together else ()
        return lax.pmax(left.astype(np.int32), axes) > 0 if axes else left, pending


def _while_any(condition: _Condition, step, first, asked_again: bool):
    """Run until no element goes on; stopped elements keep their value, and their condition is computed again.

    A loop (or ``vmap``) around this one may need the condition of stopped elements, if the condition has a collective
    over its axes: then the condition is computed where the loop needs it, and once more for the selection.
    """

    def advance(pending, carry):
        stepped = [_select(condition.ev, pending, [old, new]) for old, new in zip(carry, step(carry))]
        return [conform(condition.ev.view, new, old.dims, old.names) for old, new in zip(carry, stepped)]

    first = _settled(condition.ev, lambda carry: advance(condition(carry)[1], carry), first)
    if asked_again:
        return lax.while_loop(lambda c: condition(c)[0], lambda c: advance(condition(c)[1], c), first)

    def body(current):
        _, pending, carry = current
        carry = advance(pending, carry)
        return *condition(carry), carry

    return lax.while_loop(lambda current: current[0], body, (*condition(first), first))[2]


def _select(ev, which: NamedValue, cases: Sequence[NamedValue]) -> NamedValue:
    """The cases that ``which`` chooses; its positional dimensions are the first ones of each case."""
    trailing = cases[0].positional_shape()[which.dims.count(None) :] if None in which.dims else []
    if trailing:
        full = (*which.data.shape, *trailing)
        data = lax.broadcast_in_dim(which.data, full, range(which.data.ndim))
        which = NamedValue(data, (*which.dims, *(None for _ in trailing)), which.names)
    return bind_named(ev.view, lax.select_n_p, [which, *cases], {})[0]


def cond(ev: Evaluator, cond: _jax.Cond, operands: Sequence[NamedValue], eqn: Any) -> list[NamedValue]:
    """A ``lax.switch`` over the evaluated branches, or a selection among the results of all of them.

    Args:
      operands: the index of the branch, then the operands of every branch.

    Returns:
      Results that vary over the names of the index and of any branch's results.  It is a selection where
      elements on one device take different branches, and where devices might miss each other in a collective.
    """
    index, *operands = operands
    branches = cond.branches
    names = [n | index.names for n in map(frozenset().union, *(ev.names_of(b, operands) for b in branches))]
    ev = dataclasses.replace(ev, apart=ev.apart | index.names)
    if ev.view.local_names(index.names) or (index.names and ev.communicates(*branches)):
        return _cond_select(ev, branches, index, operands)
    ev = dataclasses.replace(ev, taken=None)

    def branch(jaxpr):
        return lambda *values: ev.conformed(ev.evaluate(jaxpr, values), names)

    if cond.platforms is not None:
        return _by_platform(cond.platforms, [branch(b) for b in branches], operands)
    # Operands are cast before the branches: a cast within a branch would become a sum within a branch of the gradient.
    operands = [vary_over(ev.view, v, index.names) for v in operands]
    return lax.switch(index.data, _alike(ev, [branch(b) for b in branches], operands), *operands)


def _alike(ev, branches, operands):
    """Branches whose results vary over the same foreign mesh axes."""
    if not ev.view.foreign:
        return branches
    types = [jax.make_jaxpr(branch)(*operands).out_avals for branch in branches]
    axes = [frozenset().union(*(_jax.varying_axes_of(aval) for aval in avals)) for avals in zip(*types)]
    return [lambda *values, branch=branch: vary_as(ev.view, branch(*values), axes) for branch in branches]


def _by_platform(platforms, branches, operands):
    """``lax.platform_dependent``: only the platform's branch is lowered, because others may not lower there.

    Args:
      platforms: for each branch the platforms that take it, or None for all others.
    """
    named = {name: branch for taken_by, branch in zip(platforms, branches) for name in taken_by or ()}
    default = next((branch for taken_by, branch in zip(platforms, branches) if taken_by is None), None)
    return lax.platform_dependent(*operands, default=default, **named)


def _cond_select(ev, branches, index, operands):
    taken = [dataclasses.replace(index, data=index.data == k) for k in range(len(branches))]
    if ev.taken is not None:
        taken = [bind_named(ev.view, lax.and_p, [ev.taken, own], {})[0] for own in taken]
    results = [dataclasses.replace(ev, taken=own).evaluate(b, operands) for b, own in zip(branches, taken)]
    return [_select(ev, index, cases) for cases in zip(*results)]


def run_where_taken(ev: Evaluator, eqns: Sequence[Any], env: dict[Any, NamedValue]) -> Mapping[Any, NamedValue]:
    """Run the equations of a branch that only the elements ``ev.taken`` take, so that others have no derivative of it.

    The others' cotangents are zero, and ``0 * inf`` would be NaN where the branch may not be differentiated.  So their
    gradient is cut, as ``jax.vmap`` does, except where values flow into a collective over an axis along which elements
    take different branches: from there they reach elements that take the branch.

    Args:
      env: the values of the inputs; receives all values that are computed without a cut.

    Returns:
      The values of all variables.
    """
    assert ev.taken is not None
    plain = dataclasses.replace(ev, taken=None)
    apart = lambda name: name not in ev.taken.names and ev.view.is_own(name)  # noqa: E731
    met = [frozenset(n for n in ev.collectives(eqn) if not apart(n)) for eqn in eqns]
    flowing = _flowing_into(eqns, met)
    kinds = [None if flows else _jax.read(eqn) for eqn, flows in zip(eqns, flowing)]
    divided = [isinstance(kind, (_jax.Call, _jax.Checkpoint, _jax.Cond)) for kind in kinds]
    whole = any(flowing) or any(axes and kind and not parts for axes, kind, parts in zip(met, kinds, divided))
    shared = _Cut(functools.partial(_cut, ev, frozenset().union(*met)), env) if whole else env
    own = _Cut(functools.partial(_cut, ev, frozenset()), shared)
    for eqn, axes, flows, parts in zip(eqns, met, flowing, divided):
        (ev if axes and parts else plain).run([eqn], shared if axes or flows else own)
    return own


def _flowing_into(eqns: Sequence[Any], met: Sequence[Names]) -> list[bool]:
    """For each equation, whether an equation that meets others in a collective needs its results."""
    needed: set[Any] = set()
    flows = []
    for eqn, axes in reversed(list(zip(eqns, met))):
        flows.append(not needed.isdisjoint(eqn.outvars))
        if axes or flows[-1]:
            needed.update(v for v in eqn.invars if not isinstance(v, _jax.Literal))
    return flows[::-1]


class _Cut(dict):
    """Values of variables; those of ``outside`` come in when they are first used, with their gradient cut."""

    def __init__(self, cut: Callable[[NamedValue], NamedValue], outside: Mapping[Any, NamedValue]):
        self._cut, self._outside = cut, outside

    def __missing__(self, variable: Any) -> NamedValue:
        value = self._outside[variable]
        return self.setdefault(variable, self._cut(value) if is_smooth(jax.typeof(value.data)) else value)


def _cut(ev: Evaluator, over: Names, value: NamedValue) -> NamedValue:
    """Cut the gradient of an element if neither it nor any element along the axes ``over`` takes the branch.

    It stays a linear function of the value, since JAX transposes the operators of solvers.
    """
    assert ev.taken is not None
    # It must not vary over more of those axes: a rule that sums over them relies on the names of its operands.
    names = ev.taken.names - over
    value = conform_to_names(ev.view, value, value.names | names)
    taken = dataclasses.replace(ev.taken, data=ev.taken.data.astype(np.int32)) if over else ev.taken
    axes = ev.view.mesh_axes_of(over) if ev.view.typed else ()
    if axes:
        taken = NamedValue(taken.data.max(taken.dims_of(over)), without(taken.dims, over), taken.names)
    elif over:
        taken = max_over(ev.view, taken, sorted(over, key=str))
    value, taken = vary_alike(ev.view, [value, taken])
    dims = [n for n in value.dims if n is not None]
    taken = transposed(taken, tuple(n for n in dims if n in taken.dims))
    local = lax.expand_dims(taken.data, [k for k, n in enumerate(dims) if n not in taken.dims])
    return dataclasses.replace(value, data=cut_p.bind(value.data, local, mesh_axes=axes))


def _cut_tangent(t, taken, *, mesh_axes):
    reached = lax.pmax(taken, mesh_axes) if mesh_axes else taken
    if missing := tuple(sorted(_jax.varying_axes(t) - _jax.varying_axes(reached))):
        reached = lax.pcast(reached, missing, to="varying")
    reached = lax.broadcast_in_dim(reached.astype(np.bool_), t.shape, range(reached.ndim))
    return lax.select(reached, t, lax.full_like(t, 0))


# Only the derivative needs other devices, so values are computed without them.
cut_p = _jax.define_cut("cut", _cut_tangent)
