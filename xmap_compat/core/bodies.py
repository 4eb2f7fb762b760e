"""How structured equations wire their operands to the jaxprs that they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from xmap_compat import _jax


class _Subprogram(NamedTuple):
    """A jaxpr that a structured equation runs.

    Attributes:
      operands: which operands of the equation it gets; empty, and not used, for solves and hijax
        operations.
      repeats: how often it runs; None if that is unknown.
      is_condition: whether it is the condition of a loop; the results of any other body are those
        of the equation.
    """

    jaxpr: Any
    operands: Sequence[int]
    repeats: int | None = 1
    is_condition: bool = False


def bodies_of(held: Any) -> list[_Subprogram]:
    """The jaxprs that an equation runs; those of its rules and derivatives are left out."""
    if isinstance(held, _jax.Scan):
        return [_Subprogram(held.body, _positions(held.body), held.length)]
    if isinstance(held, _jax.While):
        # Operands: constants of the condition, those of the body, the carry.
        of_body = _positions(held.body, held.num_condition_consts)
        of_condition = [*range(held.num_condition_consts), *of_body[held.num_body_consts :]]
        return [
            _Subprogram(held.condition, of_condition, None, is_condition=True),
            _Subprogram(held.body, of_body, None),
        ]
    if isinstance(held, _jax.Cond):
        return [_Subprogram(branch, _positions(branch, 1)) for branch in held.branches]
    if isinstance(held, _jax.LinearSolve):
        return [_Subprogram(held.solve, ())]
    if isinstance(held, _jax.HijaxOperation):
        return [_Subprogram(body, ()) for body in held.bodies]
    if isinstance(held, _jax.Expanded):
        return []
    return [_Subprogram(held.body, _positions(held.body))]


def _positions(jaxpr, first=0):
    return range(first, first + len(_jax.open_jaxpr(jaxpr)[0].invars))


def carry_of(held: Any) -> slice:
    """The operands that a loop carries from one iteration to the next; the first results are their
    last values.
    """
    if isinstance(held, _jax.Scan):
        return slice(held.num_consts, held.num_consts + held.num_carry)
    if isinstance(held, _jax.While):
        return slice(held.num_condition_consts + held.num_body_consts, None)
    return slice(0)
