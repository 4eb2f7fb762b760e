"""The functions over axes that JAX lacks or computes differently: the helper for each, and when it is needed."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xmap_compat import braces as named_einsum
from xmap_compat import lax as named_lax

if TYPE_CHECKING:
    from xmap_compat.tools.source.rewrite import CallOverAxes


def _mixed(call: CallOverAxes) -> bool:
    """Several axes of jax.vmap, or axes of both kinds."""
    return len(call.local) > 1 or bool(call.across and call.local)


def _permuted(call: CallOverAxes) -> bool:
    in_order = list(call.across) == [m for m in call.names.order if m in call.across]
    permutations = [e.params["perm"] for e in call.traced if e.primitive.name == "ppermute"]
    # Under vmap, an element to which no element sends gets element 0 in JAX.
    partial = bool(call.local) and {*map(len, permutations)} != {call.names.sizes.get(n) for n in call.over}
    return _mixed(call) or partial or not in_order


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
    # The collectives of a vmap inside are gone.
    inside = not any(n in call.names.mesh and n not in call.names.inner for n in call.over)
    return not constant and (any(kinds) if kinds else inside)


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
    Replacement(lax.pbroadcast, "pbroadcast"),
    Replacement(lax.psum_scatter, "psum_scatter", _mixed),
    Replacement(lax.all_to_all, "all_to_all", _exchanged),
    Replacement(lax.pswapaxes, "pswapaxes", lambda call: bool(call.local)),  # an untiled all_to_all
    Replacement(named_lax.pdot, "pdot"),
    Replacement(named_lax.pgather, "pgather"),
    Replacement(named_lax.pargmax, "pargmax"),
    Replacement(named_lax.pargmin, "pargmin"),
)
EINSUMS = (named_einsum.xeinsum, named_einsum.einsum, jnp.einsum)
# Parameters that take axes, in the order of the search.
AXIS_PARAMETERS = ("axis_name", "axes", "axis")


def row_of(function: Any) -> Replacement | None:
    return next((row for row in TABLE if row.function is function), None)


# --------------------------------------------------- where a generated program is compared with a plan


def _einsum_over(subscripts, *operands, local: Mapping[str, Any] = types.MappingProxyType({}), across=(), **options):
    inputs, output = subscripts.split("->")
    terms = []
    for k, term in enumerate(inputs.split(",")):
        named = [*(across if not k else ()), *(name for letter, name in local.items() if letter in term)]
        letters = "".join(letter for letter in term if letter not in local)
        terms.append(letters + (f"{{{','.join(named)}}}" if named else ""))
    return named_einsum.einsum(f"{','.join(terms)}->{output}", *operands, **options)


def _extremum(over_names, over_all):
    kinds = lambda axes: {*map(type, axes if isinstance(axes, tuple) else (axes,))}  # noqa: E731
    return lambda x, axes: over_all(x, axes) if kinds(axes) & {int, type(None)} else over_names(x, axes)


def _of_axes(function):
    return lambda x, axes: function(x, axes)


# The function that each helper of a generated program stands for.
STAND_INS: dict[str, Callable[..., Any]] = {
    **{row.helper: _of_axes(row.function) if row.helper.endswith("_over") else row.function for row in TABLE},
    "max_over": _extremum(lax.pmax, jnp.max),
    "min_over": _extremum(lax.pmin, jnp.min),
    "pdot_inside": named_lax.pdot,
    "einsum_over": _einsum_over,
    "einsum_inside": _einsum_over,
    # How cotangents are treated in a derivative from outside does not change the program itself.
    "backward_over": lambda rule, axes, **options: rule,
    "varying_over": lambda function, *axes: function,
}


def nested_xmaps(calls: Sequence[tuple[Any, Any, Any]]) -> dict[str, Any]:
    """A function for each nested xmap of a module, for the proof."""
    xmap = sys.modules["xmap_compat.api"].xmap  # the xmap that made the plan
    stand_in = lambda given, results, places: lambda f: xmap(f, given, results, axis_resources=places)  # noqa: E731
    return {f"nested_xmap_{k}": stand_in(*call) for k, call in enumerate(calls, 1)}
