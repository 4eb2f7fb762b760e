"""``from xmap_compat import numpy``: functions that take named axes beside positional ones.

``along`` is the general mechanism: it turns a named axis positional, applies any function, and turns
the axis back.  The other functions are ``jax.numpy``'s with axis names allowed.  In ``jax.numpy`` itself, ``sum``,
``mean``, ``max`` and the other reductions that collectives can do already take axis names.

>>> import numpy as np
>>> from xmap_compat import numpy as xnp, xmap
>>> xmap(lambda x: xnp.median(x, axis="i"), ["i", ...], {})(np.array([[1, 5], [2, 9], [3, 0]])).tolist()
[2.0, 5.0]
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, SupportsIndex

import jax
import jax.numpy as jnp
from jax import lax

from xmap_compat import _jax, errors
from xmap_compat.braces import einsum
from xmap_compat.core import errors as core_errors
from xmap_compat.core.nested.whole import apply_to_whole, is_of_whole
from xmap_compat.lax import check_integers, check_names, position

__all__ = [
    "all",
    "along",
    "any",
    "argmax",
    "argmin",
    "argsort",
    "average",
    "count_nonzero",
    "cumprod",
    "cumsum",
    "einsum",
    "flip",
    "median",
    "nanmax",
    "nanmean",
    "nanmin",
    "nansum",
    "norm",
    "prod",
    "ptp",
    "quantile",
    "roll",
    "sort",
    "take",
]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        found = ": jax.numpy has it, and its sum, mean, max and other reductions take axis names" * (name in vars(jnp))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{found}")


Axis = Hashable


def along(fun: Callable[..., Any], axis_name: Hashable, *operands: Any, keep: bool = False) -> Any:
    """Apply a function of positional arrays along a named axis.

    Each operand gets the named axis as its first positional dimension (operands that do not vary over
    it are repeated).  On an axis without resources that costs nothing: it is a dimension
    of the array already.  On a split axis it is one all-gather for each operand.

    Args:
      fun: called with the operands; returns a pytree of arrays.
      axis_name: the axis, bound by an enclosing xmap or vmap.
      operands: arrays.
      keep: whether the results have the axis as their first dimension, to be named again.

    Returns:
      With ``keep``, arrays that vary over the axis, without that dimension.  Otherwise the results of ``fun``.

    Raises:
      ValueError: ``keep`` and a result whose first dimension is not the axis.
      NameError: the axis is not in scope.

    Example:

      >>> import jax.numpy as jnp
      >>> from xmap_compat import numpy as xnp, xmap
      >>> middle = xmap(lambda x: xnp.along(jnp.median, "i", x), ["i"], {})
      >>> middle(jnp.array([5, 1, 2])).tolist()
      2.0
      >>> turned = xmap(lambda x: xnp.along(lambda v: v[::-1], "i", x, keep=True), ["i"], ["i"])
      >>> turned(jnp.array([5, 1, 2])).tolist()
      [2, 1, 5]
    """
    if not callable(fun):
        raise core_errors.should_be("fun of along(fun, axis_name, *operands)", "a function", fun)
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    check_names("along", names)
    if positions := [name for name in names if not _is_named(name) and isinstance(name, int)]:
        raise errors.along_a_position(positions[0])
    results = fun(*(lax.all_gather(jnp.asarray(x), axis_name) for x in operands))
    if not keep:
        return results
    return jax.tree.map(lambda y: _named_again(jnp.asarray(y), axis_name, fun), results)


def _named_again(y, axis_name, fun):
    size, mine = lax.axis_size(axis_name), lax.axis_index(axis_name)
    if y.ndim == 0 or y.shape[0] != size:
        raise errors.lost_axis(getattr(fun, "__name__", repr(fun)), axis_name, size, y.shape)
    return lax.dynamic_index_in_dim(y, mine, keepdims=False) if size else jnp.zeros(y.shape[1:], y.dtype)


def _of_whole(fun, x, names, keep=False, options=()):
    """``along``, of a function that closes over nothing but ``options``."""
    if is_of_whole(names, options):
        return apply_to_whole(fun, x, names, keep)
    out = fun(functools.reduce(lax.all_gather, reversed(names), x))
    return _named_again(out, names[0], fun) if keep else out


# ---------------------------------------------------------------------- direct forms


def _is_named(axis: Any) -> bool:
    if axis is None or isinstance(axis, (int, tuple, list)):
        return False
    return isinstance(axis, str) or axis in _jax.bound_axis_names()


def _all_axes(fun: str, axis: Any, x: jax.Array) -> tuple[Hashable, ...]:
    """Names and positions (from the front) of an ``axis`` argument; None means all positional dimensions."""
    if axis is None:
        return tuple(range(x.ndim))
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    axes = tuple(position(fun, a, "its operand", x.shape) if isinstance(a, int) else a for a in axes)
    check_names(fun, axes)
    return axes


def _split_axes(fun: str, axis: Any, x: jax.Array) -> tuple[tuple[Hashable, ...], tuple[int, ...]]:
    axes = _all_axes(fun, axis, x)
    return tuple(a for a in axes if not isinstance(a, int)), tuple(a for a in axes if isinstance(a, int))


def prod(x: jax.typing.ArrayLike, axis: Any = None) -> jax.Array:
    """``jnp.prod`` over positional and named axes.

    >>> import jax.numpy as jnp
    >>> from xmap_compat import numpy as xnp, xmap
    >>> xmap(lambda x: xnp.prod(x, axis=("i", 0)), ["i", ...], {})(jnp.array([[1, 2], [3, 4]])).tolist()
    24
    """
    x = jnp.asarray(x)
    names, positions = _split_axes("prod", axis, x)
    out = jnp.prod(x, axis=positions) if positions else x
    return _of_whole(lambda v: jnp.prod(v, axis=range(len(names))), out, names)


def any(x: jax.typing.ArrayLike, axis: Any = None, **options: Any) -> jax.Array:
    """``jnp.any`` over positional and named axes; bool.  Options: keepdims, where.

    >>> import jax.numpy as jnp
    >>> from xmap_compat import numpy as xnp, xmap
    >>> xmap(lambda x: xnp.any(x > 3, axis="i"), ["i", ...], {})(jnp.array([[1, 2], [3, 4]])).tolist()
    [False, True]
    """
    return _logical(x, axis, jnp.any, lax.pmax, options)


def all(x: jax.typing.ArrayLike, axis: Any = None, **options: Any) -> jax.Array:
    """``jnp.all`` over positional and named axes; bool.  Options: keepdims, where.

    >>> import jax.numpy as jnp
    >>> from xmap_compat import numpy as xnp, xmap
    >>> xmap(lambda x: xnp.all(x > 1, axis="i"), ["i", ...], {})(jnp.array([[1, 2], [3, 4]])).tolist()
    [False, True]
    """
    return _logical(x, axis, jnp.all, lax.pmin, options)


def _logical(x, axis, reduce, across, options):
    x = jnp.asarray(x)
    _check_where(reduce.__name__, options)
    names, positions = _split_axes(reduce.__name__, axis, x)
    out = reduce(x, axis=positions, **options)
    return across(out.astype(jnp.int8), names) > 0 if names else out  # the extrema over an empty axis are far from 0


def _check_where(fun, options):
    if isinstance(options.get("where"), (str, tuple, list)):
        raise core_errors.should_be(f"where= of {fun}", "an array or a scalar", options["where"])


def _check_not_empty(fun, x, axes):
    for axis in axes:
        if not (x.shape[axis] if isinstance(axis, int) else lax.axis_size(axis)):
            raise errors.extremum_of_nothing(fun, axis)


def _documented(function: Callable[..., Any], name: str, kind: str, example: str) -> Callable[..., Any]:
    """``example``: a call on [3, 1, 2] along ``'i'`` in a body, its out_axes, and its result."""
    call, out_axes, shown = example.split(" -> ")
    function.__name__ = function.__qualname__ = name
    function.__doc__ = (
        f"``jnp.{name}`` {kind}.\n\n"
        f"Options are those of ``jax.numpy.{name}``.  Source: xmap's tutorial, whose NumPy functions take named axes."
        "\n\n"
        ">>> import jax.numpy as jnp\n"
        ">>> from xmap_compat import numpy as xnp, xmap\n"
        f">>> over_i = xmap(lambda x: xnp.{call}, in_axes=['i'], out_axes={out_axes})\n"
        f">>> over_i(jnp.array([3, 1, 2])).tolist()\n"
        f"{shown}"
    )
    return function


def _over_one_axis(name: str, keep: bool, shown: str, moves: Any = None) -> Callable[..., Any]:
    """``moves``: that of :func:`_moved`, for a function that only moves the elements of a named axis."""
    function = getattr(jnp, name)

    def over_axis(x, axis=None, **options):
        if not _is_named(axis):
            if axis is not None and not isinstance(axis, SupportsIndex):
                raise errors.mixed_axes(name, axis)
            return function(x, axis=axis, **options)
        check_names(name, (axis,))
        if moves is not None and not options:
            return _moved(x, axis, moves)
        options |= {} if keep else {"keepdims": False}  # a named axis leaves no dimension to keep
        return _of_whole(lambda v: function(v, axis=0, **options), jnp.asarray(x), (axis,), keep)

    kind = f"along one positional or one named axis; along a named axis the result {'keeps' if keep else 'removes'} it"
    return _documented(over_axis, name, kind, f"{name}(x, axis='i') -> {['i'] if keep else {}} -> {shown}")


argmax = _over_one_axis("argmax", keep=False, shown="0")
argmin = _over_one_axis("argmin", keep=False, shown="1")
cumsum = _over_one_axis("cumsum", keep=True, shown="[3, 4, 6]")
cumprod = _over_one_axis("cumprod", keep=True, shown="[3, 3, 6]")
sort = _over_one_axis("sort", keep=True, shown="[1, 2, 3]")
argsort = _over_one_axis("argsort", keep=True, shown="[1, 2, 0]")
flip = _over_one_axis("flip", keep=True, shown="[2, 1, 3]", moves=lambda k, size: size - 1 - k)


def _over_axes(name: str, shown: str) -> Callable[..., Any]:
    """A reduction whose steps are reductions of ``jax.numpy`` that take names."""
    function = getattr(jnp, name)

    def over_axes(x, axis=None, **options):
        x = jnp.asarray(x)
        _check_where(name, options)
        axes = _all_axes(name, axis, x)
        if name == "ptp":
            _check_not_empty(name, x, axes)
        return function(x, axis=axes, **options)

    return _documented(over_axes, name, "over positional and named axes", f"{name}(x, axis='i') -> {{}} -> {shown}")


ptp = _over_axes("ptp", shown="2")
count_nonzero = _over_axes("count_nonzero", shown="3")
nansum = _over_axes("nansum", shown="6")
nanmean = _over_axes("nanmean", shown="2.0")


def _nan_extremum(name: str, missing: float, shown: str) -> Callable[..., Any]:
    extremum = _over_axes(name.removeprefix("nan"), shown)

    def over_axes(x, axis=None, keepdims=False, **options):
        x = jnp.asarray(x)
        if options.get("initial") is None:
            _check_not_empty(name, x, _all_axes(name, axis, x))
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return extremum(x, axis, keepdims=keepdims, **options)
        is_nan = jnp.isnan(x)
        found = extremum(jnp.where(is_nan, missing, x), axis, keepdims=keepdims, **options)
        return jnp.where(all(is_nan, axis, keepdims=keepdims), jnp.nan, found)

    return _documented(over_axes, name, "over positional and named axes", f"{name}(x, axis='i') -> {{}} -> {shown}")


nanmax = _nan_extremum("nanmax", -math.inf, shown="3")
nanmin = _nan_extremum("nanmin", math.inf, shown="1")


def _over_whole(function, x, axis, keepdims, *args, **options):
    """Apply a function over ordered axes to an array that has a leading dimension for each named one."""
    x = jnp.asarray(x)
    axes = _all_axes(function.__name__, axis, x)
    names = [a for a in axes if not isinstance(a, int)]
    if not names:
        return function(x, *args, axis=axis, keepdims=keepdims, **options)
    check_names(function.__name__, names)
    where = tuple(a + len(names) if isinstance(a, int) else names.index(a) for a in axes)
    whole = lambda v: function(v, *args, axis=where, keepdims=keepdims, **options)  # noqa: E731
    out = _of_whole(whole, x, names, options=(args, options))
    ahead = out.ndim - len(names) - x.ndim  # dimensions of the quantiles that were asked for
    return out.squeeze(tuple(range(ahead, ahead + len(names)))) if keepdims else out


def median(x: jax.typing.ArrayLike, axis: Any = None, keepdims: bool = False) -> jax.Array:
    """``jnp.median`` over positional and named axes.

    >>> import jax.numpy as jnp
    >>> from xmap_compat import numpy as xnp, xmap
    >>> xmap(lambda x: xnp.median(x, axis="i"), ["i"], {})(jnp.array([3, 1, 2])).tolist()
    2.0
    """
    return _over_whole(jnp.median, x, axis, keepdims)


def quantile(x: jax.typing.ArrayLike, q: Any, axis: Any = None, keepdims: bool = False, **options: Any) -> jax.Array:
    """``jnp.quantile`` over positional and named axes; the dimensions of ``q`` come first.  Option: method.

    >>> import jax.numpy as jnp
    >>> from xmap_compat import numpy as xnp, xmap
    >>> xmap(lambda x: xnp.quantile(x, 0.25, axis="i"), ["i"], {})(jnp.array([3, 1, 2])).tolist()
    1.5
    """
    return _over_whole(jnp.quantile, x, axis, keepdims, q, **options)


def norm(x: jax.typing.ArrayLike, ord: Any = None, axis: Any = None, keepdims: bool = False) -> jax.Array:
    """``jnp.linalg.norm``: of vectors along one positional or named axis, of matrices over two.

    Without ``ord`` it is the 2-norm of all elements, over any number of axes.

    >>> import jax.numpy as jnp
    >>> from xmap_compat import numpy as xnp, xmap
    >>> xmap(lambda x: xnp.norm(x, axis="i"), ["i"], {})(jnp.array([3.0, 4.0])).tolist()
    5.0
    """
    x = jnp.asarray(x)
    axes = _all_axes("norm", axis, x)
    if ord is None or (len(axes) == 2 and ord in ("f", "fro")):
        ord = 2
    elif axis is None or len(axes) != 1:
        return _over_whole(jnp.linalg.norm, x, axis, keepdims, ord)
    x = x.astype(jnp.result_type(x, float))
    return jnp.linalg.vector_norm(x, axis=axes, keepdims=keepdims, ord=ord)


def average(
    x: jax.typing.ArrayLike, axis: Any = None, weights: Any = None, returned: bool = False, keepdims: bool = False
) -> Any:
    """``jnp.average`` over positional and named axes.

    The weights have the positional shape of ``x``, or that of its positional axes in ``axis``.  They may vary over the
    named axes.

    >>> import jax.numpy as jnp
    >>> from xmap_compat import numpy as xnp, xmap
    >>> weighted = xmap(lambda x, w: xnp.average(x, axis="i", weights=w), ["i", ...], {})
    >>> weighted(jnp.array([3.0, 1.0]), jnp.array([1.0, 3.0])).tolist()
    1.5
    """
    x = jnp.asarray(x)
    names, positions = _split_axes("average", axis, x)
    if not names:
        return jnp.average(x, axis, weights, returned, keepdims)
    axes: Any = (*names, *positions)
    if weights is None:
        mean = jnp.mean(x, axis=axes, keepdims=keepdims)
        count = math.prod([lax.axis_size(n) for n in names] + [x.shape[p] for p in positions])
        return (mean, jnp.full_like(mean, count)) if returned else mean
    weights = _like_operand(jnp.asarray(weights), x, positions)
    dtype = jnp.result_type(x, weights, float)
    x, weights = x.astype(dtype), weights.astype(dtype)
    total = jnp.sum(weights, axis=axes, keepdims=keepdims)
    mean = jnp.sum(x * weights, axis=axes, keepdims=keepdims) / total
    return (mean, total) if returned else mean


def _like_operand(weights, x, positions):
    """Weights in the positional shape of ``x``; weights for its positional axes alone are repeated."""
    if weights.shape == x.shape:
        return weights
    if weights.shape != tuple(x.shape[p] for p in positions):
        raise errors.bad_weights(weights.shape, x.shape, positions)
    weights = weights.transpose(sorted(range(len(positions)), key=positions.__getitem__))
    weights = jnp.expand_dims(weights, [d for d in range(x.ndim) if d not in positions])
    return jnp.broadcast_to(weights, x.shape)


def roll(x: jax.typing.ArrayLike, shift: Any, axis: Any = None) -> jax.Array:
    """``jnp.roll`` along positional and named axes; over a split axis only the elements that cross devices move.

    Along named axes the shifts are Python integers, one for all axes or one for each.

    >>> import jax.numpy as jnp
    >>> from xmap_compat import numpy as xnp, xmap
    >>> xmap(lambda x: xnp.roll(x, 1, axis="i"), ["i"], ["i"])(jnp.array([3, 1, 2])).tolist()
    [2, 3, 1]
    """
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    if not builtins.any(map(_is_named, axes)):
        return jnp.roll(x, shift, axis=axis)
    check_names("roll", [a for a in axes if _is_named(a)])
    shifts = tuple(shift) if isinstance(shift, (tuple, list)) else (shift,) * len(axes)
    if len(shifts) != len(axes):
        raise errors.shifts_for_axes(shifts, axes)
    for one_shift, one_axis in zip(shifts, axes):
        x = _roll_named(x, one_shift, one_axis) if _is_named(one_axis) else jnp.roll(x, one_shift, one_axis)
    return jnp.asarray(x)


def _roll_named(x, shift, axis):
    if not isinstance(shift, SupportsIndex) or isinstance(shift, jax.core.Tracer):
        raise core_errors.should_be(
            "The shift of roll along a named axis", "an integer that is known while tracing", shift
        )
    return _moved(x, axis, lambda k, size: (k + operator.index(shift)) % size)


def _moved(x, axis, to):
    """Each element of a named axis at ``to(index, size)``."""
    size = lax.axis_size(axis)
    return lax.ppermute(jnp.asarray(x), axis, [(k, to(k, size)) for k in range(size)])


def take(x: jax.typing.ArrayLike, indices: jax.typing.ArrayLike, axis: Any) -> jax.Array:
    """``jnp.take`` along one positional or named axis.

    Along a named axis the result has the shape ``(*indices.shape, *x.shape)`` and lacks the axis, unless
    ``indices`` varies over it.  Out-of-range indices clip.

    >>> import jax.numpy as jnp
    >>> from xmap_compat import numpy as xnp, xmap
    >>> xmap(lambda x: xnp.take(x, jnp.array([2, 0]), axis="i"), ["i"], {})(jnp.array([3, 1, 2])).tolist()
    [2, 3]
    """
    if not _is_named(axis):
        if axis is not None and not isinstance(axis, SupportsIndex):
            raise errors.mixed_axes("take", axis)
        return jnp.take(x, indices, axis=None if axis is None else operator.index(axis), mode="clip")
    check_names("take", (axis,))
    indices = jnp.asarray(indices)
    check_integers("take", indices)
    return jnp.take(lax.all_gather(jnp.asarray(x), axis), indices, axis=0, mode="clip")
