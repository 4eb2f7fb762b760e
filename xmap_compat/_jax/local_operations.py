"""Operations of one device whose types JAX does not find by itself, gathers and reshapes among them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad
from jax.sharding import NamedSharding, PartitionSpec

from xmap_compat._jax.batching import is_of_jax, jaxpr_of_equation, untyped_call_p
from xmap_compat._jax.jaxprs import HiPrim
from xmap_compat._jax.types import explicit_spec, varying_axes_of, varying_like
from xmap_compat._jax.version import VERSION


def local_operation(eqn: Any, mesh_axes: Sequence[str]) -> tuple[Any, Mapping[str, Any]]:
    """An equation's primitive and parameters, fit for evaluation inside our typed ``shard_map``.

    Shardings that were recorded outside have no meaning there.  Operations that carry the types of
    their results must declare the mesh axes over which these vary.  JAX (as of 0.12) interprets
    Pallas kernels with loops that do not type-check there, nor would they in a ``shard_map``
    written by hand with ``check_vma=True``.
    """
    params: dict[str, Any] = {
        k: None if k in ("sharding", "out_sharding") else v for k, v in eqn.params.items()
    }
    if eqn.primitive.name == "call_hi_primitive":
        params["_prim"] = _varying_operation(params["_prim"], mesh_axes)
    if eqn.primitive.name == "pallas_call" and not params["interpret"]:
        params["out_avals"] = tuple(varying_like(aval, mesh_axes) for aval in params["out_avals"])
    if _needs_plain_types(eqn, params, mesh_axes):
        return untyped_call_p, {"jaxpr": jaxpr_of_equation(eqn)}
    return eqn.primitive, params


def _needs_plain_types(eqn, params, mesh_axes):
    """Whether an operation's lowering, or its derivative, does not type-check among values that
    vary over mesh axes.
    """
    primitive = eqn.primitive
    if primitive.name == "pallas_call":
        return params["interpret"]
    if primitive.name in ("reduce", "cholesky_update", "erf", "erfc"):
        return bool(
            mesh_axes
        )  # the user's computation in the derivative, constants or branches do not vary
    if primitive.name == "regularized_incomplete_beta":
        # Before 0.12 its lowering loops from constants to values that vary.
        return not VERSION >= (0, 12, 0)
    if (
        eqn.effects
        or not mesh_axes
        or not (primitive in ad.primitive_jvps or primitive in ad.primitive_transposes)
    ):
        return False
    if not is_of_jax(primitive):
        return True  # derivatives of other libraries make constants, which do not vary
    if primitive not in _FORGETFUL:
        types, _ = primitive.abstract_eval(
            *(varying_like(v.aval, mesh_axes) for v in eqn.invars), **params
        )
        types = types if primitive.multiple_results else [types]
        _FORGETFUL[primitive] = any(
            not varying_axes_of(aval).issuperset(mesh_axes) for aval in types
        )
    return _FORGETFUL[primitive]


# Whether the types of a primitive's results lack the mesh axes of its operands, as those of other
# libraries do.
_FORGETFUL: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _varying_operation(operation, mesh_axes):
    """An operation that carries the types of its operands and results (``HiPrim``, since 0.11.2),
    on varying ones.
    """
    vary = lambda avals: jax.tree.map(lambda aval: varying_like(aval, mesh_axes), avals)  # noqa: E731
    varying = copy.copy(operation)
    varying.in_avals, varying.out_aval = vary(operation.in_avals), vary(operation.out_aval)
    HiPrim.__init__(varying)
    return varying


def reshaped(x: Any, shape: Sequence[int]) -> Any:
    """``lax.reshape`` that tells JAX how the result is sharded, where Explicit axes shard
    dimensions that it keeps.
    """
    spec = explicit_spec(x)
    if not any(spec):
        return lax.reshape(x, shape)
    front = _agreeing(x.shape, shape)
    back = _agreeing(x.shape[front:][::-1], shape[front:][::-1])
    if any(spec[front : len(spec) - back]):
        return lax.reshape(x, shape)
    kept = (*spec[:front], *(None,) * (len(shape) - front - back), *spec[len(spec) - back :])
    return lax.reshape(
        x, shape, out_sharding=NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*kept))
    )


def _agreeing(some, others):
    return next(
        (k for k, (one, other) in enumerate(zip(some, others)) if one != other),
        min(len(some), len(others)),
    )


def gather(x: Any, axes: Sequence[Any], to: str) -> Any:
    """Tiled ``lax.all_gather`` of the first dimension."""
    if VERSION >= (0, 10, 0) or to == "varying":
        return lax.all_gather(x, axes, tiled=True, **({"to": to} if VERSION >= (0, 10, 0) else {}))
    # It has no public function yet.
    primitive = next(p for p in ad.primitive_transposes if p.name == "all_gather_invariant")
    named = {"axis_name": tuple(axes), "axis_size": lax.axis_size(tuple(axes))}
    return primitive.bind(x, all_gather_dimension=0, tiled=True, **named)
