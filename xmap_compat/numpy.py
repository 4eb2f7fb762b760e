"""``from xmap_compat import numpy``: functions that take named axes beside positional ones.

``along`` is the general mechanism: it turns a named axis positional, applies any function, and turns
the axis back.  The other functions are ``jax.numpy``'s with axis names allowed.  Of ``jax.numpy`` itself ``sum``,
``mean``, ``max`` and the other reductions that its collectives can do take axis names already.

>>> import numpy as np
>>> from xmap_compat import numpy as xnp, xmap
>>> xmap(lambda x: xnp.median(x, axis="i"), ["i", ...], {})(np.array([[1, 5], [2, 9], [3, 0]])).tolist()
[2.0, 5.0]
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, SupportsIndex

import jax
import jax.numpy as jnp
from jax import lax

from xmap_compat import _jax
from xmap_compat.braces import einsum
from xmap_compat.core import errors
from xmap_compat.lax import check_integers, check_names, position

__all__ = [
    "all",
    "along",
    "any",
    "argmax",
    "argmin",
    "argsort",
    "cumprod",
    "cumsum",
    "einsum",
    "flip",
    "median",
    "prod",
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
      With ``keep``, arrays that vary over the axis, without that dimension.  Otherwise what ``fun`` returned.

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
        raise errors.no_function("along(fun, axis_name, *operands)", fun)
    check_names("along", axis_name if isinstance(axis_name, tuple) else (axis_name,))
    results = fun(*(lax.all_gather(jnp.asarray(x), axis_name) for x in operands))
    if not keep:
        return results
    return jax.tree.map(lambda y: _named_again(jnp.asarray(y), axis_name, fun), results)


def _named_again(y, axis_name, fun):
    size = lax.axis_size(axis_name)
    if y.ndim == 0 or y.shape[0] != size:
        raise errors.lost_axis(getattr(fun, "__name__", repr(fun)), axis_name, size, y.shape)
    # Element k of what everyone holds becomes the value at index k: no data needs to move.
    return lax.all_to_all(y, axis_name, 0, 0, tiled=True)[: 1 if size else 0].reshape(y.shape[1:])


# ---------------------------------------------------------------------- direct forms


def _is_named(axis: Any) -> bool:
    if axis is None or isinstance(axis, (int, tuple, list)):
        return False
    return isinstance(axis, str) or axis in _jax.bound_axis_names()


def _split_axes(fun: str, axis: Any, x: jax.Array) -> tuple[tuple[Hashable, ...], tuple[int, ...]]:
    """Names and positions of an ``axis`` argument; None means all positional dimensions."""
    if axis is None:
        return (), tuple(range(x.ndim))
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    axes = tuple(position(fun, a, "its operand", x.shape) if isinstance(a, int) else a for a in axes)
    for axis in axes:
        if axis is None or not isinstance(axis, Hashable):
            raise errors.axis_name_type(fun, axis)
    if len(set(axes)) < len(axes):
        raise errors.repeated_axis(fun, axes)
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
    for name in names:
        out = along(lambda v: jnp.prod(v, axis=0), name, out)
    return out


def any(x: jax.typing.ArrayLike, axis: Any = None) -> jax.Array:
    """``jnp.any`` over positional and named axes; bool.

    >>> import jax.numpy as jnp
    >>> from xmap_compat import numpy as xnp, xmap
    >>> xmap(lambda x: xnp.any(x > 3, axis="i"), ["i", ...], {})(jnp.array([[1, 2], [3, 4]])).tolist()
    [False, True]
    """
    return _logical(x, axis, jnp.any, lax.pmax)


def all(x: jax.typing.ArrayLike, axis: Any = None) -> jax.Array:
    """``jnp.all`` over positional and named axes; bool.

    >>> import jax.numpy as jnp
    >>> from xmap_compat import numpy as xnp, xmap
    >>> xmap(lambda x: xnp.all(x > 1, axis="i"), ["i", ...], {})(jnp.array([[1, 2], [3, 4]])).tolist()
    [False, True]
    """
    return _logical(x, axis, jnp.all, lax.pmin)


def _logical(x, axis, reduce, across):
    x = jnp.asarray(x)
    names, positions = _split_axes(reduce.__name__, axis, x)
    out = reduce(x, axis=positions)
    return across(out.astype(jnp.int8), names).astype(bool) if names else out


def _over_one_axis(name: str, keep: bool, shown: str) -> Callable[..., Any]:
    """``shown``: what the function makes of [3, 1, 2], for its example."""
    function = getattr(jnp, name)

    def over_axis(x, axis=None, **options):
        if not _is_named(axis):
            if axis is not None and not isinstance(axis, SupportsIndex):
                raise errors.mixed_axes(name, axis)
            return function(x, axis=axis, **options)
        return along(lambda v: function(v, axis=0, **options), axis, x, keep=keep)

    over_axis.__name__ = over_axis.__qualname__ = name
    kind = "keeps the axis" if keep else "removes the axis"
    over_axis.__doc__ = (
        f"``jnp.{name}`` along one positional or one named axis; along a named axis the result {kind}.\n\n"
        f"Options are those of ``jax.numpy.{name}``.  Source: xmap's tutorial, whose NumPy functions take named axes."
        "\n\n"
        ">>> import jax.numpy as jnp\n"
        ">>> from xmap_compat import numpy as xnp, xmap\n"
        f">>> over_i = xmap(lambda x: xnp.{name}(x, axis='i'), in_axes=['i'], out_axes={['i'] if keep else {}})\n"
        f">>> over_i(jnp.array([3, 1, 2])).tolist()\n"
        f"{shown}"
    )
    return over_axis


argmax = _over_one_axis("argmax", keep=False, shown="0")
argmin = _over_one_axis("argmin", keep=False, shown="1")
median = _over_one_axis("median", keep=False, shown="2.0")
cumsum = _over_one_axis("cumsum", keep=True, shown="[3, 4, 6]")
cumprod = _over_one_axis("cumprod", keep=True, shown="[3, 3, 6]")
sort = _over_one_axis("sort", keep=True, shown="[1, 2, 3]")
argsort = _over_one_axis("argsort", keep=True, shown="[1, 2, 0]")
flip = _over_one_axis("flip", keep=True, shown="[2, 1, 3]")


def roll(x: jax.typing.ArrayLike, shift: Any, axis: Any = None) -> jax.Array:
    """``jnp.roll`` along positional and named axes; over a split axis only what crosses devices moves.

    Along named axes the shifts are Python integers, one for all axes or one for each.

    >>> import jax.numpy as jnp
    >>> from xmap_compat import numpy as xnp, xmap
    >>> xmap(lambda x: xnp.roll(x, 1, axis="i"), ["i"], ["i"])(jnp.array([3, 1, 2])).tolist()
    [2, 3, 1]
    """
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    if not builtins.any(map(_is_named, axes)):
        return jnp.roll(x, shift, axis=axis)
    shifts = tuple(shift) if isinstance(shift, (tuple, list)) else (shift,) * len(axes)
    if len(shifts) != len(axes):
        raise errors.shifts_for_axes(shifts, axes)
    for one_shift, one_axis in zip(shifts, axes):
        x = _roll_named(x, one_shift, one_axis) if _is_named(one_axis) else jnp.roll(x, one_shift, one_axis)
    return jnp.asarray(x)


def _roll_named(x, shift, axis):
    if not isinstance(shift, SupportsIndex) or isinstance(shift, jax.core.Tracer):
        raise errors.bad_shift(shift)
    size, shift = lax.axis_size(axis), operator.index(shift)
    return lax.ppermute(jnp.asarray(x), axis, [(k, (k + shift) % size) for k in range(size)])


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
    indices = jnp.asarray(indices)
    check_integers("take", indices)
    return jnp.take(lax.all_gather(jnp.asarray(x), axis), indices, axis=0, mode="clip")
