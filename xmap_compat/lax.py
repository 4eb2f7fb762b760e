"""``from xmap_compat import lax``: the functions over named axes that ``jax.lax`` lost.

Inside an xmapped function the same functions are at their old places (``jax.lax.pdot``);
you can also import them from here.

>>> import numpy as np
>>> from xmap_compat import lax, xmap
>>> where_largest = xmap(lambda x: lax.pargmax(x, "i"), in_axes=["i", ...], out_axes={})
>>> where_largest(np.array([[1, 9], [5, 2]])).tolist()
[1, 0]
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xmap_compat import _jax
from xmap_compat.braces import xeinsum
from xmap_compat.core import errors
from xmap_compat.core.placement import sizes_in_scope
from xmap_compat.core.rules.contraction import (
    Subscripts,
    accumulation_type,
    bind_contraction,
    canonical_precision,
)

__all__ = ["pargmax", "pargmin", "pdot", "pgather", "xeinsum"]


def __dir__() -> list[str]:
    return __all__


Positions = tuple[Sequence[int], Sequence[int]]


@_jax.api_boundary
def pdot(
    x: jax.typing.ArrayLike,
    y: jax.typing.ArrayLike,
    axis_name: Hashable | Sequence[Hashable],
    pos_contract: Positions = ((), ()),
    pos_batch: Positions = ((), ()),
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """Contract two arrays over named axes, and over positional ones if asked: one ``dot``, one
    all-reduce.

    Args:
      x, y: arrays; each may or may not vary over the axes.
      axis_name: a name or a tuple of names; each product is summed over all their elements.
      pos_contract: positional dimensions of ``x`` and of ``y`` to contract as well.
      pos_batch: positional dimensions of ``x`` and of ``y`` that are batched together (leading in
        the result).
      precision: as in ``jax.lax.dot_general``.
      preferred_element_type: dtype of the result, and of sums unless the operands' is wider (then
        rounded once).

    Returns:
      An array of positional shape ``(*batch, *rest of x, *rest of y)``.  Its named shape is the
      union of the operands' without ``axis_name``.

    Raises:
      TypeError, ValueError: the contracted or batched dimensions do not fit.
      NameError: an axis is not in scope.

    Example:

      >>> import numpy as np
      >>> from xmap_compat import pdot, xmap
      >>> @xmap(in_axes=(["i", "k"], ["k", "j"]), out_axes=["i", "j"])
      ... def product(x, y):
      ...     return pdot(x, y, "k")
      >>> product(np.array([[1, 2], [3, 4]]), np.array([[1, 0], [1, 1]])).tolist()
      [[3, 2], [7, 4]]

    Source: ``jax.lax.pdot`` (until jax 0.4.30).
    """
    axes = axes_of_argument(axis_name)
    check_names("pdot", axes)
    for axis in axes:
        if isinstance(axis, int):
            raise _position_as_name(axis)
    x = jnp.asarray(x)
    y = jnp.asarray(y)
    contract = _normalized("pos_contract", pos_contract, x, y)
    batch = _normalized("pos_batch", pos_batch, x, y)
    _check_disjoint(contract, batch)
    dtype = jnp.result_type(x, y)
    if preferred_element_type is None:
        x = x.astype(dtype)
        y = y.astype(dtype)
    out = bind_contraction(
        x,
        y,
        axes=axes,
        subscripts=_subscripts(x.ndim, y.ndim, contract, batch),
        precision=canonical_precision(precision),
        preferred_element_type=accumulation_type(dtype, preferred_element_type),
        optimize="auto",
    )
    if preferred_element_type is None:
        return out
    return lax.convert_element_type(out, preferred_element_type)


@_jax.api_boundary
def pargmax(x: jax.typing.ArrayLike, axis_name: Hashable) -> jax.Array:
    """The smallest index over a named axis at which ``x`` is largest, or NaN; int32, without that
    axis.

    >>> import numpy as np
    >>> from xmap_compat import pargmax, xmap
    >>> xmap(lambda x: pargmax(x, "i"), ["i"], {})(np.array([1, 5, 5])).tolist()
    1

    Source: ``jax.lax.pargmax`` (until jax 0.4.30).
    """
    return _index_of_extremum(x, axis_name, lax.pmax)


@_jax.api_boundary
def pargmin(x: jax.typing.ArrayLike, axis_name: Hashable) -> jax.Array:
    """The smallest index over a named axis at which ``x`` is smallest, or NaN; int32, without that
    axis.

    >>> import numpy as np
    >>> from xmap_compat import pargmin, xmap
    >>> xmap(lambda x: pargmin(x, "i"), ["i"], {})(np.array([4, 1, 5])).tolist()
    1

    Source: ``jax.lax.pargmin`` (until jax 0.4.30).
    """
    return _index_of_extremum(x, axis_name, lax.pmin)


def _index_of_extremum(x, axis_name, extremum):
    x = lax.stop_gradient(jnp.asarray(x))
    size = lax.psum(1, axis_name)
    index = lax.axis_index(axis_name)
    found = jnp.where(x == extremum(x, axis_name), index, size)
    # NaN comes first, whether or not the extremum keeps it.
    is_nan = x != x
    first = lax.pmin(jnp.where(is_nan, index - size, found), axis_name)
    return first % size


@_jax.api_boundary
def pgather(src: jax.typing.ArrayLike, idx: jax.typing.ArrayLike, axes: Any) -> jax.Array:
    """Look up elements of ``src`` along named and positional axes.

    Args:
      src: the array to read.
      idx: integers; each counts row-major through ``axes`` in the order given.  Out-of-range
        indices clip.
      axes: axis names and positional dimensions of ``src``; a single one needs no tuple.

    Returns:
      An array of positional shape ``(*idx.shape, *the other dimensions of src)``, without the named
      ``axes`` unless ``idx`` varies over them.

    Example:

      >>> import numpy as np
      >>> from xmap_compat import pgather, xmap
      >>> @xmap(in_axes=(["i"], ["j"]), out_axes=["j"])
      ... def looked_up(table, index):
      ...     return pgather(table, index, "i")
      >>> looked_up(np.array([10, 20, 30]), np.array([2, 0])).tolist()
      [30, 10]

    Source: ``jax.lax.pgather`` (until jax 0.4.30), as measured; its docstring said otherwise.
    """
    axes = axes_of_argument(axes)
    src = jnp.asarray(src)
    idx = jnp.asarray(idx)
    positional = []
    names = []
    from_the_front = []
    for axis in axes:
        if isinstance(axis, int):
            axis = position("pgather", axis, "src", src.shape)
            positional.append(axis)
        else:
            names.append(axis)
        from_the_front.append(axis)
    check_names("pgather", from_the_front)
    check_integers("pgather", idx)
    table = jnp.moveaxis(src, positional, range(len(positional)))
    # What the first dimensions of the table are: an axis that is gathered becomes the first.
    order: list[Any] = list(positional)
    for name in names:
        table = lax.all_gather(table, name)
        order.insert(0, name)
    leading = [order.index(axis) for axis in from_the_front]
    table = lax.transpose(table, (*leading, *range(len(axes), table.ndim)))
    table = table.reshape(-1, *table.shape[len(axes) :])
    return jnp.take(table, idx, axis=0, mode="clip")


def axes_of_argument(axis: Any) -> tuple[Any, ...]:
    """The axes that an argument gives: one, or a tuple or list of them."""
    if isinstance(axis, (tuple, list)):
        return tuple(axis)
    return (axis,)


def check_integers(fun: str, indices: jax.Array) -> None:
    """Raise unless an array can be used as indices."""
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        what = f"The dtype of the indices of {fun}"
        raise errors.should_be(what, "an integer type", indices.dtype)


def check_names(fun, names):
    """Raise unless all names are bound and distinct."""
    for name in names:
        if name is None or not isinstance(name, Hashable):
            what = f"An axis name of {fun}"
            raise errors.should_be(what, "hashable, and not None", name, advice="Use a string")
        if not isinstance(name, int) and not _jax.is_bound(name):
            raise errors.unbound_name(f"unbound axis name: {name}", sizes_in_scope())
    if len(set(names)) < len(names):
        raise errors.repeated_axis(fun, names)


def position(fun: str, dim: int, what: str, shape: Sequence[int]) -> int:
    """A positional dimension counted from the front."""
    if not -len(shape) <= dim < len(shape):
        raise _dimension_out_of_range(fun, dim, what, shape)
    return dim % len(shape)


def _normalized(option, positions, x, y):
    try:
        left, right = (list(map(operator.index, side)) for side in positions)
    except (TypeError, ValueError):
        raise _bad_dimensions(option, positions) from None
    if len(left) != len(right):
        raise _bad_dimensions(option, positions)
    of_x = tuple(position("pdot", dim, "x", x.shape) for dim in left)
    of_y = tuple(position("pdot", dim, "y", y.shape) for dim in right)
    for a, b in zip(of_x, of_y):
        if x.shape[a] != y.shape[b]:
            raise _dot_sizes(option, a, b, x.shape, y.shape)
    return of_x, of_y


def _bad_dimensions(option, positions):
    wanted = "a pair of sequences of as many dimensions of x as of y, e.g. ((0,), (1,))"
    return errors.should_be(f"{option} of pdot", wanted, positions)


def _check_disjoint(contract, batch):
    for operand, contracted, batched in zip("xy", contract, batch):
        taken = [*contracted, *batched]
        for dim in taken:
            if taken.count(dim) > 1:
                raise _dot_overlap(operand, dim)


def _subscripts(x_ndim, y_ndim, contract, batch):
    """The result has the batch dimensions, then the rest of x, then the rest of y.

    A matrix product is ``(0, 1), (1, 3) -> (0, 3)``.
    """
    x = list(range(x_ndim))
    y = list(range(x_ndim, x_ndim + y_ndim))
    for left, right in [*zip(*contract), *zip(*batch)]:
        y[right] = x[left]
    batched = [x[dim] for dim in batch[0]]
    of_one = [label for label in (*x, *y) if not (label in x and label in y)]
    return Subscripts((tuple(x), tuple(y)), (*batched, *of_one))


# ----------------------------------------------------------------------------- messages


def _dimension_out_of_range(fun: str, dim: Any, what: str, shape: Sequence[int]) -> ValueError:
    return ValueError(
        f"{fun} was given the positional dimension {dim} of {what}, which has shape "
        f"{tuple(shape)}. Count without the named axes, which are not part of that shape"
    )


def _position_as_name(axis: int) -> TypeError:
    return TypeError(
        f"axis_name of pdot has the positional dimension {axis:d}, but should have names only. "
        f"Give positional dimensions in pos_contract, e.g. (({axis:d},), ({axis:d},))"
    )


def _dot_sizes(option: str, left: int, right: int, x: Sequence[int], y: Sequence[int]) -> TypeError:
    return TypeError(
        f"{option} of pdot pairs dimension {left} of x (shape {tuple(x)}) with dimension {right} "
        f"of y (shape {tuple(y)}), but they have different sizes. Pair dimensions of one size"
    )


def _dot_overlap(operand: str, dim: int) -> TypeError:
    return TypeError(
        f"pos_contract and pos_batch of pdot have dimension {dim} of {operand} twice. Name it once"
    )
