"""Facts about the variables of a jaxpr: one pass over its equations forward, and one backward.

A transfer function says how an equation passes facts on.  Programs in an equation are its concern.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from xmap_compat import _jax

# What is known of a variable by the variables that it is computed from: a set, empty for constants.
Fact = frozenset[Hashable]
NOTHING: Fact = frozenset()


def forward(
    jaxpr: Any,
    inputs: Sequence[Fact],
    transfer: Callable[[Any, list[Fact]], Sequence[Fact]],
) -> dict[Any, Fact]:
    """The facts about every variable of a jaxpr.

    Args:
      inputs: the facts about its inputs; those of constants, the first ones, may be left out.
      transfer: ``(equation, facts about its operands) -> facts about its results``.
    """
    body, _ = _jax.open_jaxpr(jaxpr)
    variables = _jax.input_vars(body)
    first = len(variables) - len(inputs)
    facts = dict.fromkeys(variables, NOTHING)
    facts.update(zip(variables[first:], inputs))
    for eqn in body.eqns:
        operands = [fact_of(facts, atom) for atom in eqn.invars]
        facts.update(zip(eqn.outvars, transfer(eqn, operands)))
    return facts


def fact_of(facts: Mapping[Any, Fact], atom: Any) -> Fact:
    """The fact about a variable or a literal."""
    if isinstance(atom, _jax.Literal):
        return NOTHING
    return facts[atom]


def backward(
    eqns: Sequence[Any],
    results: Iterable[tuple[Any, Any]],
    transfer: Callable[[Any, list[list[Any]]], Iterable[Any]],
) -> Mapping[Any, list[Any]]:
    """The uses of every variable.

    Args:
      results: ``(variable, use)`` for each use by the results.
      transfer: ``(equation, uses of each of its results) -> the use of each operand``, or nothing.
    """
    uses: dict[Any, list[Any]] = collections.defaultdict(list)

    def add(atoms_and_uses):
        for atom, use in atoms_and_uses:
            if not isinstance(atom, _jax.Literal):
                uses[atom].append(use)

    add(results)
    for eqn in reversed(eqns):
        after = [uses[variable] for variable in eqn.outvars]
        add(zip(eqn.invars, transfer(eqn, after)))
    return uses


def flowing(
    eqns: Sequence[Any], results: Iterable[Any], uses_all: Callable[[Any], object]
) -> list[bool]:
    """For each equation, whether ``results``, or the equations that ``uses_all`` picks, depend on
    its results.
    """
    flows = []

    def transfer(eqn, uses):
        flows.append(any(uses))
        return eqn.invars if flows[-1] or uses_all(eqn) else ()

    backward(eqns, ((variable, True) for variable in results), transfer)
    return flows[::-1]
