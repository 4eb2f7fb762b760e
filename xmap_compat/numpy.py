"""``from xmap_compat import numpy``: functions that take named axes beside positional ones.

``along`` is the general mechanism: it turns a named axis positional, applies any function, and
turns the axis back.  The other functions are ``jax.numpy``'s with axis names allowed.  In
``jax.numpy`` itself, ``sum``, ``mean``, ``max`` and the other reductions that collectives can do
already take axis names.

>>> import numpy as np
>>> from xmap_compat import numpy as xnp, xmap
>>> median = xmap(lambda x: xnp.median(x, axis="i"), ["i", ...], {})
>>> median(np.array([[1, 5], [2, 9], [3, 0]])).tolist()
[2.0, 5.0]
"""

from __future__ import annotations

import bisect
import builtins
import functools
import inspect
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import _jax
from xmap_compat.braces import einsum
from xmap_compat.core.device_primitives import bind, gather_p, take_p, vary_p
from xmap_compat.core.errors import should_be
from xmap_compat.core.placement import sizes_in_scope
from xmap_compat.core.specs import AxisNames
from xmap_compat.lax import axes_of_argument, check_names, position

# And the functions of the table, which _row adds.
__all__ = ["along", "einsum"]


def __dir__() -> list[str]:
    return __all__


@_jax.api_boundary
def along(fun: Callable[..., Any], axis_name: Hashable, *operands: Any, keep: bool = False) -> Any:
    """Apply a function of positional arrays along a named axis.

    Each operand gets the named axis as its first positional dimension (operands that do not vary
    over it are repeated).  On an axis without resources that costs nothing; on a split axis it is
    one all-gather for each operand.

    Args:
      fun: called with the operands; returns a pytree of arrays.
      axis_name: the axis, bound by an enclosing xmap or vmap.
      operands: arrays.
      keep: whether the results have the axis as their first dimension, to be named again.

    Returns:
      With ``keep``, arrays that vary over the axis, without that dimension.  Otherwise the results
      of ``fun``.

    Raises:
      ValueError: ``keep`` and a result whose first dimension is not the axis.
      NameError: the axis is not in scope.

    Example:

      >>> import jax.numpy as jnp
      >>> from xmap_compat import numpy as xnp, xmap
      >>> turned = xmap(lambda x: xnp.along(lambda v: v[::-1], "i", x, keep=True), ["i"], ["i"])
      >>> turned(jnp.array([5, 1, 2])).tolist()
      [2, 1, 5]
    """
    if not callable(fun):
        raise should_be("fun of along(fun, axis_name, *operands)", "a function", fun)
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    check_names("along", names)
    for name in names:
        if isinstance(name, int):
            advice = f"Call the function itself, with axis={name}"
            raise should_be("axis_name of along", "a named axis", name, advice=advice)
    results = fun(*(lax.all_gather(jnp.asarray(x), axis_name) for x in operands))
    if not keep:
        return results
    return jax.tree.map(lambda y: _named_again(jnp.asarray(y), axis_name, fun), results)


def _named_again(y, axis_name, fun):
    """The element of this position, of an array whose first dimension is the axis."""
    size = lax.axis_size(axis_name)
    if y.ndim == 0 or y.shape[0] != size:
        raise _lost_axis(getattr(fun, "__name__", repr(fun)), axis_name, size, y.shape)
    if size == 0:
        return jnp.zeros(y.shape[1:], y.dtype)
    return lax.dynamic_index_in_dim(y, lax.axis_index(axis_name), keepdims=False)


def _of_whole(fun, x, names, keep=False, options=()):
    """``along``, of a function that closes over nothing but ``options``."""
    if _is_of_whole(names, options):
        return _apply_to_whole(fun, x, names, keep)
    out = fun(functools.reduce(lax.all_gather, reversed(names), x))
    if not keep:
        return out
    return _named_again(out, names[0], fun)


def _logical(function, x, axes, options):
    is_true = (x != 0).astype(jnp.int8)
    if function is jnp.any:
        return jnp.max(is_true, axes, initial=0, **options) > 0
    return jnp.min(is_true, axes, initial=1, **options) > 0


def _extremum(function, x, axes, options):
    if options.get("initial") is None:
        for axis in axes:
            if _size_of(axis, x) == 0:
                raise _extremum_of_nothing(function.__name__, axis)
    extremum = jnp.min
    missing = jnp.inf
    if function is jnp.nanmax:
        extremum = jnp.max
        missing = -jnp.inf
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return extremum(x, axes, **options)
    found = extremum(jnp.where(jnp.isnan(x), missing, x), axes, **options)
    keepdims = options.get("keepdims", False)
    return jnp.where(all(jnp.isnan(x), axes, keepdims=keepdims), jnp.nan, found)


def _size_of(axis, x):
    if isinstance(axis, int):
        return x.shape[axis]
    return lax.axis_size(axis)


def _over_whole(function, x, axes, options):
    """Apply a function over ordered axes to an array that has a leading dimension for each named
    one.
    """
    names = [axis for axis in axes if not isinstance(axis, int)]
    where = []
    for axis in axes:
        if isinstance(axis, int):
            where.append(axis + len(names))
        else:
            where.append(names.index(axis))

    def along_dimensions(v):
        return function(v, axis=tuple(where), **options)

    out = _of_whole(along_dimensions, x, names, options=options)
    if not options.get("keepdims"):
        return out
    # The dimensions of quantiles come first, then one for each named axis.
    quantiles = out.ndim - len(names) - x.ndim
    return out.squeeze(tuple(range(quantiles, quantiles + len(names))))


def _over_one(function, x, axes, options, keep=False):
    _check_one(function, axes)
    if not keep:
        # A named axis leaves no dimension to keep.
        options["keepdims"] = False
    return _of_whole(lambda v: function(v, axis=0, **options), x, axes, keep)


def _norm(function, x, axes, options):
    if options.get("ord") is None:
        options["ord"] = 2
    else:
        # Over two axes it is that of a matrix.
        _check_one(function, axes)
    x = x.astype(jnp.result_type(x, float))
    return jnp.linalg.vector_norm(x, axis=axes, **options)


def _average(function, x, axes, options):
    returned = options.pop("returned", False)
    weights = jnp.asarray(options.pop("weights", 1))
    if weights.shape not in ((), x.shape):
        what = "The shape of average's weights along a named axis"
        raise should_be(what, f"{x.shape}", weights.shape)
    weights = jnp.broadcast_to(weights, x.shape).astype(jnp.result_type(x, weights, float))
    total = jnp.sum(weights, axis=axes, **options)
    mean = jnp.sum(x * weights, axis=axes, **options) / total
    if returned:
        return mean, total
    return mean


def _reordered(function, x, axes, options):
    """The elements of a named axis, in the order that NumPy's function of the same name gives their
    numbers.
    """
    _check_one(function, axes)
    [axis] = axes
    options = {name: operator.index(value) for name, value in options.items()}
    of_numpy = getattr(np, function.__name__)
    # Which element comes to each position: [2, 0, 1].
    sources = of_numpy(np.arange(lax.axis_size(axis)), **options).tolist()
    pairs = [(source, position) for position, source in enumerate(sources)]
    return lax.ppermute(x, axis, sorted(pairs))


def _take(function, x, axes, options):
    _check_one(function, axes)
    return function(lax.all_gather(x, axes[0]), axis=0, **options)


def _check_one(function, axes):
    if len(axes) != 1:
        what = f"The axis of {function.__name__}"
        raise should_be(what, "one, named or positional", axes)


def _row(
    function: Callable[..., Any], compute: Callable[..., Any], kind: str, example: str
) -> Callable[..., Any]:
    """A function of ``jax.numpy`` that takes names; ``compute`` is for calls with at least one.

    ``example``: the arguments of a call after [3, 1, 2], its out_axes, and its result.
    """
    name = function.__name__
    signature = inspect.signature(function)
    operand = next(iter(signature.parameters))
    arguments, out_axes, shown = example.split(" -> ")

    @_jax.api_boundary
    def over_axes(*args, **kwargs):
        options = dict(signature.bind(*args, **kwargs).arguments)
        x = options.pop(operand)
        axis = options.pop("axis", None)
        axes = axes_of_argument(axis)
        if builtins.all(a is None or isinstance(a, SupportsIndex) for a in axes):
            return function(*args, **kwargs)
        x = jnp.asarray(x)
        from_the_front = []
        for each in axes:
            if isinstance(each, SupportsIndex):
                each = position(name, operator.index(each), "its operand", x.shape)
            from_the_front.append(each)
        check_names(name, from_the_front)
        return compute(function, x, tuple(from_the_front), options)

    over_axes.__name__ = over_axes.__qualname__ = name
    over_axes.__signature__ = signature  # type: ignore[attr-defined]
    over_axes.__doc__ = f"""``jnp.{name}`` along named axes, {kind}, or positional ones.

    The other arguments are those of ``jax.numpy``.  Source: xmap's tutorial, whose NumPy functions
    take named axes.

    >>> import jax.numpy as jnp
    >>> from xmap_compat import numpy as xnp, xmap
    >>> over_i = xmap(lambda x: xnp.{name}(x, {arguments}), in_axes=["i"], out_axes={out_axes})
    >>> over_i(jnp.array([3, 1, 2])).tolist()
    {shown}
    """
    bisect.insort(__all__, name)
    return over_axes


ANY = "of which the result has none"
ONE = "one at a time, which the result lacks"
KEPT = "one at a time, kept"
_kept = functools.partial(_over_one, keep=True)

all = _row(jnp.all, _logical, ANY, "axis='i' -> {} -> True")
any = _row(jnp.any, _logical, ANY, "axis='i' -> {} -> True")
argmax = _row(jnp.argmax, _over_one, ONE, "axis='i' -> {} -> 0")
argmin = _row(jnp.argmin, _over_one, ONE, "axis='i' -> {} -> 1")
argsort = _row(jnp.argsort, _kept, KEPT, "axis='i' -> ['i'] -> [1, 2, 0]")
average = _row(
    jnp.average, _average, f"{ANY}, weights in the shape of the array", "axis='i' -> {} -> 2.0"
)
cumprod = _row(jnp.cumprod, _kept, KEPT, "axis='i' -> ['i'] -> [3, 3, 6]")
cumsum = _row(jnp.cumsum, _kept, KEPT, "axis='i' -> ['i'] -> [3, 4, 6]")
flip = _row(jnp.flip, _reordered, KEPT, "axis='i' -> ['i'] -> [2, 1, 3]")
median = _row(jnp.median, _over_whole, f"{ANY}, gathered", "axis='i' -> {} -> 2.0")
nanmax = _row(jnp.nanmax, _extremum, ANY, "axis='i' -> {} -> 3")
nanmin = _row(jnp.nanmin, _extremum, ANY, "axis='i' -> {} -> 1")
norm = _row(
    jnp.linalg.norm, _norm, f"{ANY}, with ord one at a time", "ord=1, axis='i' -> {} -> 6.0"
)
prod = _row(jnp.prod, _over_whole, f"{ANY}, gathered", "axis='i' -> {} -> 6")
quantile = _row(jnp.quantile, _over_whole, f"{ANY}, gathered", "q=0.25, axis='i' -> {} -> 1.5")
roll = _row(
    jnp.roll, _reordered, f"{KEPT}, by a Python integer", "shift=1, axis='i' -> ['i'] -> [2, 3, 1]"
)
sort = _row(jnp.sort, _kept, KEPT, "axis='i' -> ['i'] -> [1, 2, 3]")
take = _row(jnp.take, _take, ONE, "jnp.array([2, 0]), axis='i' -> {} -> [2, 3]")


# Functions of a whole axis, such as ``cumsum``, are applied once for all elements, and so are their
# transposes.  For the transpose the cotangents of all elements are gathered as the elements were
# (or summed, if all have one result), and each element takes its slice of what it makes.  After an
# ``all_gather`` each element would apply the transpose to its cotangent only.


def _is_of_whole(names: AxisNames, options: Any) -> bool:
    """Whether these are axes of an xmap, not empty, and no option is traced: it might vary, or have
    a derivative.
    """
    if builtins.any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(options)):
        return False
    if not sizes_in_scope().keys() >= set(names):
        return False
    return math.prod(map(lax.axis_size, names)) > 0


def _apply_to_whole(fun: Callable[[Any], Any], x: Any, names: AxisNames, keep: bool = False) -> Any:
    """Apply ``fun`` to all elements, in first dimensions; with ``keep`` each gets its slice of the
    result only.
    """
    sizes = [lax.axis_size(name) for name in names]
    for name, size in reversed(list(zip(names, sizes))):
        x = bind(gather_p, x, (name,), (size,))
    out = fun(x)
    to_each = take_p if keep else vary_p
    for name, size in zip(names, sizes):
        out = bind(to_each, out, (name,), (size,))
    return out


# ----------------------------------------------------------------------------- messages


def _extremum_of_nothing(fun: str, axis: Any) -> ValueError:
    return ValueError(
        f"{fun} got the axis {axis!r} of size 0 (a zero-size array). Leave {fun} out where it is "
        "empty"
    )


def _lost_axis(fun: str, axis: Hashable, size: int, shape: Sequence[int]) -> ValueError:
    return ValueError(
        f"{fun} was applied along the named axis `{axis}` of size {size} with keep=True, but "
        f"returned an array of shape {tuple(shape)}: its first dimension should be that axis. Use "
        "keep=False if it reduces the axis"
    )
