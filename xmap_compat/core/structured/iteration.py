"""``lax.scan`` and ``lax.while_loop``, rebuilt around the evaluation of their bodies.

Where elements on a device stop at different iterations, the loop runs until none goes on.  Devices
stop by themselves, or all together if the loop holds collectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.bodies import carry_of
from xmap_compat.core.collectives import collective_axes_in
from xmap_compat.core.device import laid_out, laid_out_over
from xmap_compat.core.evaluate import Evaluator
from xmap_compat.core.names import Names, flow_through
from xmap_compat.core.structured.branches import select
from xmap_compat.core.structured.callables import communicates
from xmap_compat.core.values import NamedValue, names_of_each, split, without_dims


def scan(
    ev: Evaluator, held: _jax.Scan, operands: Sequence[NamedValue], eqn: Any
) -> list[NamedValue]:
    """A ``lax.scan`` over the evaluated body.

    Args:
      operands: constants, the carry before the first iteration, and the scanned values, in any
        layout.

    Returns:
      The last carry, and the stacked results with their new dimension as the first positional one.
      The carry has the names that it varies over after any number of iterations, in the canonical
      layout from the start, since its type must be the same in every iteration.
    """
    consts, carry, xs = split(operands, held.num_consts, held.num_carry)
    flow = flow_through(ev.checker, held, names_of_each(operands))
    names = flow.operands[carry_of(held)]
    first = ev.laid_out(carry, names)

    def body(carry, slices):
        outs = ev.evaluate(held.body, [*consts, *carry, *slices])
        return ev.laid_out(outs[: held.num_carry], names), outs[held.num_carry :]

    scanned = [_scanned_first(x) for x in xs]
    last, ys = lax.scan(
        body, first, scanned, length=held.length, reverse=held.reverse, unroll=held.unroll
    )
    stacked = [NamedValue(y.data, (None, *y.dims), y.names) for y in ys]
    return [*last, *stacked]


def _scanned_first(value: NamedValue) -> NamedValue:
    """Move the first positional dimension to the front of the data and out of ``dims``: scan strips
    it.
    """
    at = value.positional_dims()[0]
    data = value.data
    if at > 0:
        data = jnp.moveaxis(data, at, 0)
    return NamedValue(data, without_dims(value.dims, [at]), value.names)


def while_loop(
    ev: Evaluator, loop: _jax.While, operands: Sequence[NamedValue], eqn: Any
) -> list[NamedValue]:
    """A ``lax.while_loop`` over the evaluated condition and body, as ``jax.vmap`` makes it for its
    elements.

    Args:
      operands: constants of the condition, constants of the body, and the carry before the first
        iteration.

    Returns:
      The last carry.  It varies over all names of the predicate, since elements stop at different
      iterations: one whose predicate is false keeps its value while others go on, and its predicate
      is computed again each time.
    """
    condition_consts, body_consts, init = split(
        operands, loop.num_condition_consts, loop.num_body_consts
    )
    _, names, varying = flow_through(ev.checker, loop, names_of_each(operands))
    ev = dataclasses.replace(ev, diverging=ev.diverging | varying)

    def condition(carry):
        (pending,) = ev.evaluate(loop.condition, [*condition_consts, *carry])
        return pending

    def step(carry):
        return ev.laid_out(ev.evaluate(loop.body, [*body_consts, *carry]), names)

    first = ev.laid_out(init, names)
    together = communicates(ev, loop.condition, loop.body)
    (pending_type,) = loop.condition.out_avals
    batched = pending_type.shape or ev.view.local_names(varying)
    if not batched and not (varying and together):
        return lax.while_loop(lambda carry: condition(carry).data, step, first)
    outer_collective = not all(map(ev.view.is_bound, collective_axes_in(loop.condition)))
    return _while_any(_Condition(ev, condition, varying, together), step, first, outer_collective)


@dataclasses.dataclass(frozen=True)
class _Condition:
    """The condition of a loop in which some elements go on while others do not.

    Where the loop communicates, all devices must agree to go on: an all-reduce then tells whether
    any element is left.  Otherwise each device stops by itself.
    """

    ev: Evaluator
    condition: Callable[[Sequence[NamedValue]], NamedValue]
    varying: Names
    together: bool

    def __call__(self, carry: Sequence[NamedValue]) -> tuple[Any, NamedValue]:
        """Whether any element goes on, and which do."""
        view = self.ev.view
        pending = laid_out_over(view, self.condition(carry), self.varying)
        left = pending.data.any()
        axes = view.mesh_axes_of(self.varying)
        if self.together and axes:
            left = lax.pmax(left.astype(np.int32), axes) > 0
        return left, pending


def _while_any(condition: _Condition, step, first, outer_collective: bool):
    """Run until no element goes on; a stopped element keeps its value.

    The condition is computed at the end of each iteration and carried to the next.  But if it has a
    collective over an axis that is bound outside (``outer_collective``), what binds that axis must
    see it as the loop's own condition: then it is computed there, and again for the selection.
    """
    ev = condition.ev

    def advance(pending, carry):
        selected = []
        for old, new in zip(carry, step(carry)):
            selected.append(select(ev, pending, [old, new]))
        return [laid_out(ev.view, new, old.dims, old.names) for old, new in zip(carry, selected)]

    def step_all(carry):
        _, pending = condition(carry)
        return advance(pending, carry)

    if outer_collective:
        return lax.while_loop(lambda carry: condition(carry)[0], step_all, first)

    def body(current):
        _, pending, carry = current
        carry = advance(pending, carry)
        return *condition(carry), carry

    last = lax.while_loop(lambda current: current[0], body, (*condition(first), first))
    return last[2]
