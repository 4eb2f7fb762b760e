"""The functions over axes that JAX lacks or computes differently: the helper for each, and when it is needed."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xmap_compat import lax as named_lax

if TYPE_CHECKING:
    from xmap_compat.tools.leave.rewriting import CallOverAxes


def _mixed(call: CallOverAxes) -> bool:
    """Several axes of jax.vmap, or axes of both kinds."""
    return len(call.local) > 1 or bool(call.across and call.local)


def _permuted(call: CallOverAxes) -> bool:
    """Under ``jax.vmap``, an element to which no element sends gets element 0 in JAX; and JAX has no several axes."""
    permutations = {len(e.params["perm"]) for e in call.traced if e.primitive.name == "ppermute"}
    sizes = frozenset().union(*(call.names.sizes.get(n, ()) for n in call.over))
    return _mixed(call) or len(call.over) > 1 or (bool(call.local) and permutations != sizes)


def _exchanged(call: CallOverAxes) -> bool:
    """JAX is wrong for an untiled one under vmap, and for its derivative where split and new dimension differ."""
    split, concat = (ast.unparse(call.given[k]) if k in call.given else k for k in ("split_axis", "concat_axis"))
    untiled = "tiled" not in call.given or getattr(call.given["tiled"], "value", None) is False
    return _mixed(call) or (untiled and (bool(call.local) or split != concat))


def _differentiable(call: CallOverAxes) -> bool:
    """Extrema of numbers, at least in one trace, that are not constants for the derivative."""
    kinds = [jnp.issubdtype(v.aval.dtype, jnp.inexact) for e in call.traced for v in e.invars]
    x = next(iter(call.given.values()))
    constant = isinstance(x, ast.Call) and call.callee(x.func) is lax.stop_gradient
    return not constant and (any(kinds) or not kinds)  # those of a vmap inside leave none, and of what is not called


class Replacement(NamedTuple):
    """A function over axes, the helper that replaces it, and a test whether a call needs the helper."""

    function: Any
    helper: str
    needed: Callable[[CallOverAxes], bool] = lambda call: True


TABLE = (
    Replacement(lax.pmax, "max_over", _differentiable),
    Replacement(lax.pmin, "min_over", _differentiable),
    Replacement(jnp.max, "max_over", _differentiable),
    Replacement(jnp.min, "min_over", _differentiable),
    Replacement(jax.scipy.special.logsumexp, "logsumexp_over"),
    Replacement(jax.nn.logsumexp, "logsumexp_over"),
    Replacement(jax.nn.softmax, "softmax_over"),
    Replacement(jax.nn.log_softmax, "log_softmax_over"),
    Replacement(lax.all_gather, "all_gather", _mixed),
    Replacement(lax.ppermute, "ppermute", _permuted),
    Replacement(lax.pshuffle, "pshuffle", _permuted),
    Replacement(lax.psum_scatter, "psum_scatter", _mixed),
    Replacement(lax.all_to_all, "all_to_all", _exchanged),
    Replacement(lax.pswapaxes, "pswapaxes", lambda call: bool(call.local)),  # an untiled all_to_all
    Replacement(named_lax.pdot, "pdot"),
)
# Parameters that take axes, in the order of the search.
AXIS_PARAMETERS = ("axis_name", "axes", "axis")


def row_of(function: Any) -> Replacement | None:
    return next((row for row in TABLE if row.function is function), None)
