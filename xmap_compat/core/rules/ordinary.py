"""Common primitives over all their named axes at once: without these rules tracing takes 1.4 to
1.75 times as long.

The general way (``bind_named``) is one ``jax.vmap`` of the primitive for each named axis.  Most
equations of a
program are elementwise operations, reductions, dots and changes of shape: there named dimensions
only change numbers in the parameters.  A test compares each rule with the general way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.batch import bind_named, bind_per_element, dot_dimensions
from xmap_compat.core.device import DeviceView, cast_alike, cast_to
from xmap_compat.core.values import NamedValue

Params = Mapping[str, Any]
_OrdinaryRule = Callable[[DeviceView, Any, Sequence[NamedValue], Params], "list[NamedValue] | None"]
_GENERAL = None  # what a rule returns for operands that need the general way


def bind_ordinary(view: DeviceView, eqn: Any, operands: Sequence[NamedValue]) -> list[NamedValue]:
    """The results of an equation that knows nothing of names."""
    primitive, params = eqn.primitive, eqn.params
    if view.typed:
        names = frozenset().union(*(v.names for v in operands))
        primitive, params = _jax.local_operation(eqn, view.mesh_axes_of(names))
    operands = cast_alike(view, operands)
    if _jax.draws_from_rbg(primitive, operands):
        # Its batching rule draws one stream for a whole batch, so the bits would depend on the
        # placement.
        return bind_per_element(view, primitive, operands, params)
    rule = DIRECT.get(primitive.name) if _jax.is_of_jax(primitive) else _GENERAL
    results = _GENERAL if rule is None else rule(view, primitive, operands, params)
    return bind_named(view, primitive, operands, params) if results is _GENERAL else results


def _bind(view, primitive, data, params, dims, names):
    return [NamedValue(out, dims, names) for out in _jax.bind(primitive, data, params)]


# ---------------------------------------------------------------------- elementwise


def _elementwise(view, primitive, operands, params):
    """Align all operands to one layout; scalars may stay scalars, as they may in the program."""
    rank = max(v.dims.count(None) for v in operands)
    if any(v.dims and v.dims.count(None) != rank for v in operands):
        return _GENERAL
    dims = max((v.dims for v in operands), key=len)
    missing = [n for v in operands for n in v.dims if n is not None and n not in dims]
    dims = (*dict.fromkeys(missing), *dims)
    names = frozenset().union(*(v.names for v in operands))
    scalars_broadcast = rank > 0 or primitive.name not in _NO_SCALARS
    shape = next((v.positional_shape() for v in operands if v.dims.count(None)), ())
    data = [
        x if scalars_broadcast and not v.dims else _aligned(view, x, v.dims, dims, shape)
        for v, x in ((v, cast_to(view, v, names).data) for v in operands)
    ]
    return _bind(view, primitive, data, params, dims, names)


def _clamp(view, primitive, operands, params):
    """Bounds may be scalars, but a bound with local dimensions must take the operand's whole shape.

    So must any bound that may have a derivative: JAX (to 0.12) has one only for bounds of the
    operand's shape.
    """
    _, x, _ = operands
    names = frozenset().union(*(v.names for v in operands))
    dims = (
        *dict.fromkeys(n for v in operands for n in v.dims if n is not None and n not in x.dims),
        *x.dims,
    )
    shape = x.positional_shape()
    varied = [cast_to(view, v, names) for v in operands]
    data = [
        _aligned(view, v.data, v.dims, dims, shape)
        if k == 1 or isinstance(v.data, jax.core.Tracer)
        else v.data
        for k, v in enumerate(varied)
    ]
    return _bind(view, primitive, data, params, dims, names)


def _aligned(view, data, have, want, shape=()):
    """Transpose and broadcast to a layout; scalars gain the positional dimensions ``shape``."""
    if have == want:
        return data
    unnamed = [k for k, n in enumerate(have) if n is None]
    order = iter(unnamed)
    kept = [k for k, n in enumerate(want) if (unnamed if n is None else n in have)]
    permutation = [next(order) if want[k] is None else have.index(want[k]) for k in kept]
    data = data if hasattr(data, "shape") else np.asarray(data, jax.typeof(data).dtype)
    if permutation != sorted(permutation):
        data = lax.transpose(data, permutation)
    if len(kept) == len(want):
        return data
    sizes, positional = iter(data.shape), iter(shape)
    full = [
        next(sizes)
        if k in kept
        else next(positional)
        if n is None
        else view.placements[n].local_size
        for k, n in enumerate(want)
    ]
    return lax.broadcast_in_dim(data, full, kept)


# ------------------------------------------------------------------- shapes and sums


def _removing(param):
    """The rule of a reduction, or of squeeze: a parameter names the positional dimensions that are
    removed.
    """

    def rule(view, primitive, operands, params):
        (x,) = operands
        unnamed = x.positional_dims()
        gone = tuple(unnamed[d] for d in params[param])
        dims = tuple(n for k, n in enumerate(x.dims) if k not in gone)
        return _bind(view, primitive, [x.data], {**params, param: gone}, dims, x.names)

    return rule


def _transpose(view, primitive, operands, params):
    (x,) = operands
    unnamed = x.positional_dims()
    order = iter(unnamed[d] for d in params["permutation"])
    permutation = tuple(k if n is not None else next(order) for k, n in enumerate(x.dims))
    return _bind(view, primitive, [x.data], {**params, "permutation": permutation}, x.dims, x.names)


def _slice(view, primitive, operands, params):
    (x,) = operands
    at = x.positional_dims()
    bounds = {
        "start_indices": [0] * x.data.ndim,
        "limit_indices": list(x.data.shape),
        "strides": [1] * x.data.ndim,
    }
    for key, whole in bounds.items():
        for d, bound in zip(at, params[key] or ()):
            whole[d] = bound
    return _bind(
        view,
        primitive,
        [x.data],
        {key: tuple(whole) for key, whole in bounds.items()},
        x.dims,
        x.names,
    )


def _broadcast_in_dim(view, primitive, operands, params):
    (x, *dynamic) = operands
    named = [n for n in x.dims if n is not None]
    lead = len(named)
    if dynamic or any(n is not None for n in x.dims[lead:]):
        return _GENERAL
    sizes = [view.placements[n].local_size for n in named]
    shifted = {
        "shape": (*sizes, *params["shape"]),
        "broadcast_dimensions": (*range(lead), *(lead + d for d in params["broadcast_dimensions"])),
    }
    dims = (*named, *(None,) * len(params["shape"]))
    return _bind(view, primitive, [x.data], {**params, **shifted}, dims, x.names)


def _dot_general(view, primitive, operands, params):
    x, y = operands
    if params.get("out_sharding") is not None:
        return _GENERAL
    names = x.names | y.names
    numbers, dims = dot_dimensions(x, y, *params["dimension_numbers"])
    data = [cast_to(view, v, names).data for v in operands]
    return _bind(view, primitive, data, {**params, "dimension_numbers": numbers}, dims, names)


# --------------------------------------------------------------------------- table

_ELEMENTWISE = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clz complex conj copy cos cosh digamma "
    "div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le lgamma log "
    "log1p logistic lt max min mul ne neg nextafter not or pow real reduce_precision rem round rsqrt select_n "
    "shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor "
    "convert_element_type"
)

# Their operands must have one shape even where one is a scalar.
_NO_SCALARS = ("select_n", "add_any")

_REDUCTIONS = [
    "reduce_sum",
    "reduce_prod",
    "reduce_max",
    "reduce_min",
    "reduce_and",
    "reduce_or",
    "reduce_xor",
]

DIRECT: dict[str, _OrdinaryRule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_REDUCTIONS, _removing("axes")),
    "clamp": _clamp,
    "squeeze": _removing("dimensions"),
    "slice": _slice,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast_in_dim,
    "dot_general": _dot_general,
}
