"""``lax.scan`` and ``lax.while_loop``, rebuilt around the evaluation of their bodies.

Where elements on a device stop at different iterations, the loop runs until none goes on.  Devices
stop by themselves, or all together if the loop holds collectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.bodies import carry_of
from xmap_compat.core.collectives import collectives_in
from xmap_compat.core.device import cast_as, laid_out
from xmap_compat.core.evaluate import Evaluator
from xmap_compat.core.names import Names, flow_through
from xmap_compat.core.structured.branches import select
from xmap_compat.core.structured.callables import communicates
from xmap_compat.core.values import NamedValue, split


def scan(
    ev: Evaluator, scan: _jax.Scan, operands: Sequence[NamedValue], eqn: Any
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
    consts, carry, xs = split(operands, scan.num_consts, scan.num_carry)
    names = flow_through(ev.checker, scan, [v.names for v in operands]).operands[carry_of(scan)]
    first = ev.laid_out(carry, names)

    def body(carry, slices):
        outs = ev.evaluate(scan.body, [*consts, *carry, *slices])
        return ev.laid_out(outs[: scan.num_carry], names), outs[scan.num_carry :]

    scanned = [_scanned_first(x) for x in xs]
    slices = lambda: [dataclasses.replace(x, data=x.data[0]) for x in scanned]  # noqa: E731
    first = _settled(ev, lambda carry: body(carry, slices())[0], first) if scan.length else first
    options = {"length": scan.length, "reverse": scan.reverse, "unroll": scan.unroll}
    last, ys = lax.scan(body, first, scanned, **options)
    return [*last, *(NamedValue(y.data, (None, *y.dims), y.names) for y in ys)]


def _settled(
    ev: Evaluator, step: Callable[..., list[NamedValue]], carry: list[NamedValue]
) -> list[NamedValue]:
    """The carry, cast to the mesh axes of the user's own ``shard_map`` that it varies over after
    any iteration.

    Its type must be the same in each iteration.  (The type check of the program finds the axes
    that the xmap binds.)
    """
    while ev.view.in_users_shard_map:
        before = [_jax.varying_axes(v.data) for v in carry]
        types = jax.make_jaxpr(step)(carry).out_avals
        after = [
            axes | _jax.varying_axes_of(aval) for axes, aval in zip(before, types, strict=True)
        ]
        if after == before:
            break
        carry = cast_as(ev.view, carry, after)
    return carry


def _scanned_first(value: NamedValue) -> NamedValue:
    """Move the first positional dimension to the front of the data and out of ``dims``: scan strips
    it.
    """
    at = value.positional_dims()[0]
    data = jnp.moveaxis(value.data, at, 0) if at else value.data
    return NamedValue(data, (*value.dims[:at], *value.dims[at + 1 :]), value.names)


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
    _, names, varying = flow_through(ev.checker, loop, [v.names for v in operands])
    ev = dataclasses.replace(ev, diverging=ev.diverging | varying)
    condition = lambda carry: ev.evaluate(loop.condition, [*condition_consts, *carry])[0]  # noqa: E731
    step = lambda carry: ev.laid_out(ev.evaluate(loop.body, [*body_consts, *carry]), names)  # noqa: E731
    first = ev.laid_out(init, names)
    together = communicates(ev, loop.condition, loop.body)
    batched = loop.condition.out_avals[0].shape or ev.view.local_names(varying)
    if not batched and not (varying and together):
        first = _settled(ev, step, first)
        return lax.while_loop(lambda carry: condition(carry).data, step, first)
    asked_again = any(not ev.view.is_bound(n) for n in collectives_in(loop.condition))
    return _while_any(_Condition(ev, condition, varying, together), step, first, asked_again)


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
        (pending,) = self.ev.laid_out([self.condition(carry)], [self.varying])
        left = pending.data.any()
        axes = self.ev.view.mesh_axes_of(self.varying) if self.together else ()
        return lax.pmax(left.astype(np.int32), axes) > 0 if axes else left, pending


def _while_any(condition: _Condition, step, first, asked_again: bool):
    """Run until no element goes on; stopped elements keep their value, and their condition is
    computed again.

    A loop (or ``vmap``) around this one may need the condition of stopped elements, if the
    condition has a collective
    over its axes: then the condition is computed where the loop needs it, and once more for the
    selection.
    """

    def advance(pending, carry):
        stepped = [
            select(condition.ev, pending, [old, new]) for old, new in zip(carry, step(carry))
        ]
        return [
            laid_out(condition.ev.view, new, old.dims, old.names)
            for old, new in zip(carry, stepped)
        ]

    first = _settled(condition.ev, lambda carry: advance(condition(carry)[1], carry), first)
    if asked_again:
        return lax.while_loop(
            lambda c: condition(c)[0], lambda c: advance(condition(c)[1], c), first
        )

    def body(current):
        _, pending, carry = current
        carry = advance(pending, carry)
        return *condition(carry), carry

    return lax.while_loop(lambda current: current[0], body, (*condition(first), first))[2]
