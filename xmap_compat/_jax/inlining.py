"""Inline calls."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.extend import source_info_util

from xmap_compat._jax.equations import Call, read
from xmap_compat._jax.jaxprs import Literal, input_vars, open_jaxpr


def inline_calls(jaxpr: Any, kept: Container[Any]) -> Any:
    """An open jaxpr in which the equations of jitted functions, under variables of their own,
    replace their calls.

    Calls of the jaxprs in ``kept`` stay.
    """
    env: dict[Any, Any] = {}
    eqns = list(_inlined(jaxpr, kept, env, source_info_util.NameStack()))
    return jaxpr.replace(eqns=eqns, outvars=[_renamed(env, v) for v in jaxpr.outvars])


def _inlined(jaxpr, kept, env, stack):
    for eqn in jaxpr.eqns:
        operands = [_renamed(env, v) for v in eqn.invars]
        info = eqn.source_info.replace(name_stack=stack + eqn.source_info.name_stack)
        called = read(eqn)
        if isinstance(called, Call) and called.body not in kept:
            body, consts = open_jaxpr(called.body)
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
