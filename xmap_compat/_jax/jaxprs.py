"""Jaxprs: their parts, calls inlined, references discharged."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core

from xmap_compat._jax.nice import part
from xmap_compat._jax.version import VERSION

references = part("references")

Jaxpr = jex_core.Jaxpr
Literal = jex_core.Literal
JaxprEqn = jex_core.JaxprEqn

# What has no public name is read off a program that has it.
_collective = lambda x: jax.lax.pbroadcast(jax.lax.psum(x, "i"), "i", 0)  # noqa: E731
_sample = jax.make_jaxpr(_collective, axis_env=[("i", 1)])(jax.ShapeDtypeStruct((), "float32"))
pbroadcast_p = _sample.eqns[-1].primitive
NamedAxisEffect: Any = type(next(iter(_sample.effects)))


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Split a closed or an open jaxpr into the object with ``eqns`` and its constants.

    Since 0.12 ``ClosedJaxpr`` is ``Jaxpr`` and constants live in ``consts``; before,
    a closed jaxpr wrapped an open one.
    """
    if VERSION >= (0, 12, 0):
        return jaxpr, tuple(jaxpr.consts)
    if isinstance(jaxpr, jex_core.ClosedJaxpr):
        return jaxpr.jaxpr, tuple(jaxpr.consts)
    return jaxpr, ()


def input_vars(jaxpr: Any) -> list[Any]:
    """The variables bound by ``[*consts, *args]``: ``all_invars`` since 0.12."""
    if VERSION >= (0, 12, 0):
        return list(jaxpr.all_invars)
    return [*jaxpr.constvars, *jaxpr.invars]


def is_jaxpr(value: Any) -> bool:
    return isinstance(value, (jex_core.Jaxpr, jex_core.ClosedJaxpr))


def subjaxprs(params: Any) -> Iterator[Any]:
    """Every jaxpr inside an equation's parameters, whatever container hides it."""
    if is_jaxpr(params):
        yield params
    elif isinstance(params, Mapping):
        for value in params.values():
            yield from subjaxprs(value)
    elif isinstance(params, (tuple, list)):
        for value in params:
            yield from subjaxprs(value)
    elif type(operation := params).__name__ == "CustomRoot":
        yield operation.solve_jaxpr  # since 0.12


def without_references(closed: Any, axis_env: Sequence[tuple[Hashable, int]]) -> Any:
    """A closed jaxpr that passes values on, instead of writing them to the references (``jax.new_ref``) that it makes.

    Returns None if it uses references that were made elsewhere, or if this JAX cannot do it.
    """
    if not _makes_or_takes_references(closed, set()):
        return closed
    if any(isinstance(v.aval, jax.ref.AbstractRef) for v in input_vars(open_jaxpr(closed)[0])):
        return None
    found: list[Any] = []

    def within(*args):
        found.append(references.discharged(closed))
        return [] if found[0] is None else jex_core.jaxpr_as_fun(found[0])(*args)

    passing_on = jax.make_jaxpr(within, axis_env=axis_env)(*closed.in_avals)
    return None if found[0] is None else passing_on


def _makes_or_takes_references(jaxpr, seen):
    if id(jaxpr) in seen:
        return False
    seen.add(id(jaxpr))
    body, _ = open_jaxpr(jaxpr)
    variables = [*input_vars(body), *(v for eqn in body.eqns for v in eqn.outvars)]
    return any(isinstance(v.aval, jax.ref.AbstractRef) for v in variables) or any(
        _makes_or_takes_references(sub, seen)
        for eqn in body.eqns
        if eqn.primitive.name != "pallas_call"
        for sub in subjaxprs(eqn.params)
    )


def has_side_effect(eqn: Any) -> bool:
    """Whether an equation must run even if nothing reads its results (callbacks, prints)."""
    return any(not isinstance(effect, NamedAxisEffect) for effect in eqn.effects)
