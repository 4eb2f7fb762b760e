"""Jaxprs: their parts, effects and dead code, and parameters to bind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import hijax
from jax.extend import core as jex_core
from jax.interpreters import partial_eval

from xmap_compat._jax.version import VERSION

Literal = jex_core.Literal
# Operations that JAX, or a user, defines as classes: since 0.11.2.
HiPrim: Any = ()
if VERSION >= (0, 11, 2):
    HiPrim = getattr(hijax, "HiPrim")  # noqa: B009


# Objects that have no public name are taken from a program that has them.
def _sample_collectives(x):
    return jax.lax.pbroadcast(jax.lax.psum_scatter(x, "i", tiled=True), "i", 0)


_sample = jax.make_jaxpr(_sample_collectives, axis_env=[("i", 1)])(
    jax.ShapeDtypeStruct((1,), "float32")
)
reduce_scatter_p, pbroadcast_p = (eqn.primitive for eqn in _sample.eqns)
NamedAxisEffect: Any = type(next(iter(_sample.effects)))


def is_jax_or_this_package(module: str) -> bool:
    """Whether a module belongs to JAX or to this package."""
    return module.partition(".")[0] in ("jax", "xmap_compat")


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


_LEAVES = (str, int, float, type(None), np.dtype)


def subjaxprs(params: Any) -> Iterator[Any]:
    """Every jaxpr inside an equation's parameters, whatever container hides it."""
    if isinstance(params, (jex_core.Jaxpr, jex_core.ClosedJaxpr)):
        yield params
        return
    held: Iterable[Any] = ()
    if isinstance(params, (tuple, list)):
        held = params
    elif isinstance(params, (dict, Mapping)):  # quick for most, which are dicts
        held = params.values()
    elif isinstance(params, HiPrim):
        held = params.params.values()
    for value in held:
        if not isinstance(value, _LEAVES):  # most values: no call for each
            yield from subjaxprs(value)


def walk(held: Any, once: bool = False) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The equations of a jaxpr and of those in it, in order, each with the equations around it,
    outermost first.

    Args:
      held: a jaxpr, or the parameters of an equation, which may hold some.
      once: whether a jaxpr that occurs several times is entered only the first time.
    """
    return _walk(held, (), once, set())


def _walk(held, around, once, entered):
    for jaxpr in subjaxprs(held):
        if once and id(jaxpr) in entered:
            continue
        entered.add(id(jaxpr))
        for eqn in open_jaxpr(jaxpr)[0].eqns:
            yield eqn, around
            yield from _walk(eqn.params, (*around, eqn), once, entered)


def without_dead_code(jaxpr: Any) -> Any:
    """A jaxpr without the equations that no result needs, and that have no effect; it takes the
    same inputs.
    """
    body, _ = open_jaxpr(jaxpr)
    return partial_eval.dce_jaxpr(body, [True] * len(body.outvars), instantiate=True)[0]


def uses_references(eqn: Any) -> bool:
    """Whether an equation makes, reads or writes a reference (``jax.new_ref``)."""
    if not eqn.effects:  # which most equations lack
        return False
    types = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    return any(isinstance(aval, jax.ref.AbstractRef) for aval in types)


def is_reference(x: Any) -> bool:
    """Whether an argument is a reference (``jax.new_ref``)."""
    return isinstance(jax.typeof(x), jax.ref.AbstractRef)


def bind_params(primitive: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that bind an equation's primitive: ``subfuns``, if it holds functions, and the
    others.
    """
    bound = primitive.get_bind_params(dict(params))
    if VERSION >= (0, 9, 2):
        return bound
    functions, bound = bound  # the functions are arguments there, before the operands
    if functions:
        bound["subfuns"] = functions
    return bound


def has_side_effect(eqn: Any) -> bool:
    """Whether an equation must run even if nothing reads its results (callbacks, prints)."""
    return any(not isinstance(effect, NamedAxisEffect) for effect in eqn.effects)


def depends_on_axes(eqn: Any) -> bool:
    """Whether an equation says that it depends on named axes."""
    return any(isinstance(effect, NamedAxisEffect) for effect in eqn.effects)
