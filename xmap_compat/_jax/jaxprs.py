"""Jaxprs: their parts, calls inlined, references discharged."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src import core, source_info_util
from jax._src.state import discharge
from jax._src.state import types as state_types
from jax.extend import core as jex_core

from xmap_compat._jax.version import VERSION

Jaxpr = jex_core.Jaxpr
Literal = jex_core.Literal
JaxprEqn = jex_core.JaxprEqn
NamedAxisEffect = core.NamedAxisEffect


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
    elif type(params).__name__ == "CustomRoot":
        yield params.solve_jaxpr  # since 0.12


def inline_calls(jaxpr: Any, kept: Container[Any]) -> Any:
    """An open jaxpr with the equations of jitted functions, under variables of their own, in the place of calls.

    Calls of the jaxprs in ``kept`` stay.
    """
    env: dict[Any, Any] = {}
    eqns = list(_inlined(jaxpr, kept, env, source_info_util.NameStack()))
    return jaxpr.replace(eqns=eqns, outvars=[_renamed(env, v) for v in jaxpr.outvars])


def _inlined(jaxpr, kept, env, stack):
    for eqn in jaxpr.eqns:
        operands = [_renamed(env, v) for v in eqn.invars]
        info = eqn.source_info.replace(name_stack=stack + eqn.source_info.name_stack)
        called = None
        if eqn.primitive.name in ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr"):
            called = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
        if called is not None and called not in kept:
            body, consts = open_jaxpr(called)
            literals = [Literal(c, jax.typeof(c)) for c in consts]
            inner = dict(zip(input_vars(body), [*literals, *operands], strict=True))
            yield from _inlined(body, kept, inner, info.name_stack)
            env.update(zip(eqn.outvars, [_renamed(inner, v) for v in body.outvars], strict=True))
        else:
            results = [jex_core.Var(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, results))
            yield eqn.replace(invars=operands, outvars=results, source_info=info)


def _renamed(env, atom):
    return atom if isinstance(atom, Literal) else env.get(atom, atom)


def without_references(closed: Any, axis_env: Sequence[tuple[Hashable, int]]) -> Any:
    """A closed jaxpr that passes values on, instead of writing them to the references (``jax.new_ref``) that it makes.

    Returns None if it uses references that were made elsewhere.
    """
    if not _makes_or_takes_references(closed, set()):
        return closed
    if any(isinstance(v.aval, state_types.AbstractRef) for v in input_vars(open_jaxpr(closed)[0])):
        return None
    with core.extend_axis_env_nd(axis_env):
        if VERSION >= (0, 10, 2):
            # By itself it would expand operations like ``lax.custom_root``.
            return discharge.discharge_state(closed, lower=False)
        return discharge.discharge_state2(closed)


def _makes_or_takes_references(jaxpr, seen):
    if id(jaxpr) in seen:
        return False
    seen.add(id(jaxpr))
    body, _ = open_jaxpr(jaxpr)
    variables = [*input_vars(body), *(v for eqn in body.eqns for v in eqn.outvars)]
    return any(isinstance(v.aval, state_types.AbstractRef) for v in variables) or any(
        _makes_or_takes_references(sub, seen)
        for eqn in body.eqns
        if eqn.primitive.name != "pallas_call"
        for sub in subjaxprs(eqn.params)
    )


def has_side_effect(eqn: Any) -> bool:
    """Whether an equation must run even if nothing reads its results (callbacks, prints)."""
    return any(not isinstance(effect, NamedAxisEffect) for effect in eqn.effects)


def has_named_axis_effect(jaxpr: Any) -> bool:
    return any(isinstance(effect, NamedAxisEffect) for effect in jaxpr.effects)
