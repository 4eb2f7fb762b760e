"""The functions over axes that are written otherwise: their parameters, the one that takes axes, and helpers."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from xmap_compat import braces as named_einsum
from xmap_compat import lax as named_lax

if TYPE_CHECKING:
    from xmap_compat.tools.source.rewrite import Rewriter


@dataclasses.dataclass(frozen=True)
class Row:
    """A function over axes.

    Attributes:
      parameters: their names; ``axis`` is the one that takes axes.
      helper: what does it where JAX does not.
      needed: whether that is so, of the rewriter, the call, its arguments and its axes.
      bare: whether one axis may stand without a tuple.
      method: whether the function is a method, of its first argument.
    """

    function: Any
    parameters: tuple[str, ...]
    axis: str
    helper: str | None = None
    needed: Callable[..., bool] = lambda *_: True
    bare: bool = True
    method: bool = False

    def helper_for(self, r: Rewriter, node: ast.Call, bound: Mapping[str, ast.expr], names: Sequence[Any]):
        return self.helper if self.helper is not None and self.needed(r, node, bound, names) else None


def _kinds(r: Rewriter, names) -> tuple[list[Any], list[Any]]:
    parts = [p for n in names for p in r.names.parts(n)]
    return [p for p in parts if p in r.names.order], [p for p in parts if p not in r.names.order]


def _mixed(r: Rewriter, node, bound, names) -> bool:
    across, local = _kinds(r, names)
    return len(local) > 1 or bool(across and local)


def _permuted(r: Rewriter, node, bound, names) -> bool:
    across, local = _kinds(r, names)
    in_order = across == [m for m in r.names.order if m in across]
    permutations = [
        e.params["perm"] for e in r.module.calls.get(r.found.span(node), ()) if e.primitive.name == "ppermute"
    ]
    # Under vmap JAX takes element 0 where no one sends to an element.
    known = bool(permutations) and all(n in r.names.sizes for n in names)
    partial = bool(local) and not (known and all(len(p) == r.names.size(names) for p in permutations))
    return _mixed(r, node, bound, names) or partial or not in_order


def _exchanged(r: Rewriter, node, bound, names) -> bool:
    """An untiled one is wrong in JAX where the split and the new dimension differ: its derivative, or under vmap it."""
    same = bound.keys() >= {"split_axis", "concat_axis"} and r.text(bound["split_axis"]) == r.text(bound["concat_axis"])
    untiled = "tiled" not in bound or getattr(bound["tiled"], "value", None) is False
    _, local = _kinds(r, names)
    return _mixed(r, node, bound, names) or (untiled and (bool(local) or not same))


def _differentiable(r: Rewriter, node, bound, names) -> bool:
    """Extrema of numbers that are not held constant."""
    kinds = [v.aval.dtype for e in r.module.calls.get(r.found.span(node), ()) for v in e.invars]
    x = next(iter(bound.values()))
    constant = isinstance(x, ast.Call) and r.callee(x.func) is lax.stop_gradient
    # Of a vmap inside, whose collectives are gone.
    inside = not any(n in r.names.mesh and n not in r.names.inner for n in names)
    return not constant and (bool(kinds) or inside) and all(jnp.issubdtype(kind, jnp.inexact) for kind in kinds)


def _extremum(function, helper, parameters, axis):
    return Row(function, parameters, axis, helper, _differentiable, bare=axis == "axis_name")


_POSITIONAL = ("pos_contract", "pos_batch", "precision", "preferred_element_type")

TABLE = (
    Row(lax.psum, ("x", "axis_name"), "axis_name"),
    Row(lax.pmean, ("x", "axis_name"), "axis_name"),
    Row(lax.axis_index, ("axis_name",), "axis_name"),
    Row(lax.axis_size, ("axis_name",), "axis_name"),
    _extremum(lax.pmax, "max_over", ("x", "axis_name"), "axis_name"),
    _extremum(lax.pmin, "min_over", ("x", "axis_name"), "axis_name"),
    _extremum(jnp.max, "max_over", ("a", "axis"), "axis"),
    _extremum(jnp.min, "min_over", ("a", "axis"), "axis"),
    Row(jax.scipy.special.logsumexp, ("a", "axis"), "axis", "logsumexp_over"),
    Row(jax.nn.logsumexp, ("a", "axis"), "axis", "logsumexp_over"),
    Row(jax.nn.softmax, ("x", "axis"), "axis", "softmax_over"),
    Row(jax.nn.log_softmax, ("x", "axis"), "axis", "log_softmax_over"),
    Row(lax.all_gather, ("x", "axis_name", "axis", "tiled"), "axis_name", "all_gather", _mixed),
    Row(lax.ppermute, ("x", "axis_name", "perm"), "axis_name", "ppermute", _permuted),
    Row(lax.pshuffle, ("x", "axis_name", "perm"), "axis_name", "pshuffle", _permuted),
    Row(lax.pbroadcast, ("x", "axis_name", "source"), "axis_name", "pbroadcast"),
    Row(lax.psum_scatter, ("x", "axis_name", "scatter_dimension", "tiled"), "axis_name", "psum_scatter", _mixed),
    Row(
        lax.all_to_all,
        ("x", "axis_name", "split_axis", "concat_axis", "tiled"),
        "axis_name",
        "all_to_all",
        _exchanged,
    ),
    Row(lax.pswapaxes, ("x", "axis_name", "axis"), "axis_name", "pswapaxes", _mixed),
    Row(named_lax.pdot, ("x", "y", "axis_name", *_POSITIONAL), "axis_name", "pdot"),
    Row(named_lax.pgather, ("src", "idx", "axes"), "axes", "pgather", bare=False),
    Row(named_lax.pargmax, ("x", "axis_name"), "axis_name", "pargmax"),
    Row(named_lax.pargmin, ("x", "axis_name"), "axis_name", "pargmin"),
)
METHODS = {
    helper: Row(None, ("x", "axis"), "axis", helper, _differentiable, bare=False, method=True)
    for helper in ("max_over", "min_over")
}
OTHER, OTHER_LAX = Row(None, (), "axis", bare=False), Row(None, (), "axis")
EINSUMS = (named_einsum.xeinsum, named_einsum.einsum, jnp.einsum)
