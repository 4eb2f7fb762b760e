"""Operations of one device whose types JAX does not find, such as gathers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad

from xmap_compat._jax.batching import has_known_rules, jaxpr_of_equation, untyped_call_p
from xmap_compat._jax.jaxprs import HiPrim
from xmap_compat._jax.types import varying_axes_of, varying_like
from xmap_compat._jax.version import VERSION


def local_operation(eqn: Any, mesh_axes: Sequence[str]) -> tuple[Any, Mapping[str, Any]]:
    """An equation's primitive and parameters, fit for evaluation inside our typed ``shard_map``.

    Shardings that were recorded outside have no meaning there.  Operations that carry the types of
    their results must declare the mesh axes over which these vary.  JAX (as of 0.12) interprets
    Pallas kernels with loops that do not type-check there, nor would they in a ``shard_map``
    written by hand with ``check_vma=True``.
    """
    params = dict(eqn.params)
    for recorded in ("sharding", "out_sharding"):
        if recorded in params:
            params[recorded] = None
    if eqn.primitive.name == "call_hi_primitive":
        params["_prim"] = _varying_operation(params["_prim"], mesh_axes)
    if eqn.primitive.name == "pallas_call" and not params["interpret"]:
        params["out_avals"] = tuple(varying_like(aval, mesh_axes) for aval in params["out_avals"])
    if _needs_plain_types(eqn, params, mesh_axes):
        jaxpr = jaxpr_of_equation(eqn)
        # Before 0.11.2 an operation of jax.experimental.hijax can only be bound as it is.
        if not jaxpr.is_high:
            return untyped_call_p, {"jaxpr": jaxpr}
    return eqn.primitive, params


def _needs_plain_types(eqn, params, mesh_axes):
    """Whether an operation's lowering, or its derivative, does not type-check among values that
    vary over mesh axes.
    """
    primitive = eqn.primitive
    if primitive.name == "pallas_call":
        return params["interpret"]
    if primitive.name == "regularized_incomplete_beta":
        # Before 0.12 its lowering loops from constants to values that vary.
        return VERSION < (0, 12, 0)
    if not mesh_axes:
        return False
    if primitive.name in ("reduce", "cholesky_update", "erf", "erfc"):
        # Their derivatives hold the user's computation, constants or branches, whose types do not
        # vary.
        return True
    has_derivative = primitive in ad.primitive_jvps or primitive in ad.primitive_transposes
    if eqn.effects or not has_derivative:
        return False
    if not has_known_rules(primitive):
        return True  # derivatives of other libraries make constants, which do not vary
    if primitive not in _LOSES_MESH_AXES:
        operands = [varying_like(v.aval, mesh_axes) for v in eqn.invars]
        types, _ = primitive.abstract_eval(*operands, **params)
        if not primitive.multiple_results:
            types = [types]
        _LOSES_MESH_AXES[primitive] = not all(
            varying_axes_of(t).issuperset(mesh_axes) for t in types
        )
    return _LOSES_MESH_AXES[primitive]


# For each primitive, whether its results' types lack mesh axes that its operands vary over, as in
# other libraries.
_LOSES_MESH_AXES: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _varying_operation(operation, mesh_axes):
    """An operation that carries the types of its operands and results (``HiPrim``, since 0.11.2),
    on varying ones.
    """

    def vary(aval):
        return varying_like(aval, mesh_axes)

    varying = copy.copy(operation)
    varying.in_avals = jax.tree.map(vary, operation.in_avals)
    varying.out_aval = jax.tree.map(vary, operation.out_aval)
    HiPrim.__init__(varying)
    return varying


def gather(x: Any, axes: Sequence[Any], to: str) -> Any:
    """Tiled ``lax.all_gather`` of the first dimension."""
    if VERSION >= (0, 10, 0):
        return lax.all_gather(x, axes, tiled=True, to=to)
    if to == "varying":
        return lax.all_gather(x, axes, tiled=True)
    # It has no public function yet.
    by_name = {primitive.name: primitive for primitive in ad.primitive_transposes}
    return by_name["all_gather_invariant"].bind(
        x,
        all_gather_dimension=0,
        axis_name=tuple(axes),
        axis_size=lax.axis_size(tuple(axes)),
        tiled=True,
    )
