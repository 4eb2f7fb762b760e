"""``jax.random`` with named shapes: ``normal(key, NamedShape(2, i=3))`` samples along the axis
``i`` of an xmap.

Each name of a shape folds the index of its axis into the key, in the order of the names, so the
numbers are the same for every assignment of resources.  For ``normal``, ``uniform``,
``truncated_normal`` and ``bernoulli`` they are those of ``jax.random`` in jax 0.4.30; the other
functions took a named shape there, and gave every element the same numbers.  ``jax.random`` handles
shapes without names.

>>> import jax
>>> from xmap_compat import random, xmap
>>> @xmap(in_axes={}, out_axes=["i", ...], axis_sizes={"i": 3})
... def noise(key):
...     return random.normal(key, random.NamedShape(2, i=3))
>>> noise(jax.random.key(0)).shape
(3, 2)
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, ItemsView, KeysView, ValuesView
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xmap_compat import _jax
from xmap_compat.core import errors

__all__ = [
    "NamedShape",
    "ball",
    "bernoulli",
    "beta",
    "bits",
    "categorical",
    "cauchy",
    "choice",
    "dirichlet",
    "exponential",
    "fold_in_names",
    "gamma",
    "gumbel",
    "laplace",
    "logistic",
    "normal",
    "poisson",
    "rademacher",
    "randint",
    "truncated_normal",
    "uniform",
]


class NamedShape:
    """The shape of an array with positional dimensions and named ones: ``NamedShape(2, 3,
    batch=8)``.

    >>> from xmap_compat.random import NamedShape
    >>> shape = NamedShape(2, 3, batch=8)
    >>> shape.positional, shape["batch"], shape.rank, shape.total
    ((2, 3), 8, 3, 48)
    """

    @_jax.api_boundary
    def __init__(self, *positional: int, **named: int):
        try:
            self._positional = tuple(map(operator.index, positional))
            self._named = {name: operator.index(size) for name, size in named.items()}
        except TypeError:
            wanted = "integers, as in NamedShape(2, batch=8)"
            raise errors.should_be(
                "The sizes of a NamedShape", wanted, [*positional, *named.values()]
            ) from None

    @property
    def positional(self) -> tuple[int, ...]:
        return self._positional

    @property
    def positional_rank(self) -> int:
        return len(self._positional)

    @property
    def names(self) -> KeysView[str]:
        return self._named.keys()

    @property
    def named_sizes(self) -> ValuesView[int]:
        return self._named.values()

    @property
    def named_items(self) -> ItemsView[str, int]:
        return self._named.items()

    @property
    def named_rank(self) -> int:
        return len(self._named)

    @property
    def rank(self) -> int:
        return self.positional_rank + self.named_rank

    @property
    def total(self) -> int:
        return math.prod([*self._positional, *self._named.values()])

    def __getitem__(self, dimension: Any) -> int:
        return self._named[dimension] if isinstance(dimension, str) else self._positional[dimension]

    def __iter__(self):
        raise _not_for_samplers(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, tuple):
            return not self._named and self._positional == other
        if not isinstance(other, NamedShape):
            return NotImplemented
        return self._positional == other._positional and self._named == other._named

    def __hash__(self) -> int:
        return (
            hash((self._positional, frozenset(self._named.items())))
            if self._named
            else hash(self._positional)
        )

    def __repr__(self) -> str:
        return f"NamedShape({self._inside()})"

    def __str__(self) -> str:
        return f"({self._inside()})" if self._named else str(self._positional)

    def _inside(self) -> str:
        return ", ".join(
            [*map(str, self._positional), *(f"{name}={size}" for name, size in self._named.items())]
        )


def _not_for_samplers(shape: Any) -> TypeError:
    return TypeError(
        f"{shape!r} is a shape for the samplers of jax.random only and, under install(), for jax.nn.initializers. Give "
        "other functions shape.positional and, where they sample, the key xmap_compat.random.fold_in_names(key, shape)"
    )


@_jax.api_boundary
def fold_in_names(key: Any, shape: NamedShape) -> Any:
    """A key for each element of the named axes of a shape.

    >>> import jax
    >>> from xmap_compat import random, xmap
    >>> @xmap(in_axes={}, out_axes=["i"], axis_sizes={"i": 3})
    ... def keys(key):
    ...     return random.fold_in_names(key, random.NamedShape(i=3))
    >>> jax.eval_shape(keys, jax.random.key(0)).shape
    (3,)
    """
    for name, size in shape.named_items:
        actual = jax.lax.axis_size(name)
        if actual != size:
            raise _wrong_named_size(name, size, actual)
        key = jax.random.fold_in(key, jax.lax.axis_index(name))
    return key


def _wrong_named_size(name: str, size: int, actual: int) -> ValueError:
    return ValueError(
        f"The shape of axis {name} was specified as {size}, but it really is {actual}"
    )


# -------------------------------------------------------------------------------- samplers


def _of_named_shape(
    sample: Callable[..., Any], arguments: str = "", shown: str = "(4, 2)"
) -> Callable[..., Any]:
    """A function of ``jax.random`` that takes a named shape as well.

    ``arguments`` and ``shown`` are for its example: the arguments between key and shape, and the
    shape of the samples.
    """

    @_jax.api_boundary
    @functools.wraps(sample)
    def sampler(*args, **kwargs):
        shape = next((x for x in (*args, *kwargs.values()) if isinstance(x, NamedShape)), None)
        if shape is None:
            return sample(*args, **kwargs)
        given = inspect.signature(sample).bind(*args, **kwargs)
        given.apply_defaults()
        values = {
            name: shape.positional if x is shape else x for name, x in given.arguments.items()
        }
        dtype = values.get("dtype")
        if (
            sample is _jax_normal
            and dtype is not None
            and jnp.issubdtype(dtype, jnp.complexfloating)
        ):
            return _complex_normal(values["key"], shape, jnp.dtype(dtype))
        values["key"] = fold_in_names(values["key"], shape)
        return sample(**values)

    sampler.__module__ = __name__
    own, _, of_jax = (sample.__doc__ or "").partition("\n")
    sampler.__doc__ = f"""{own}  The shape may be a :class:`NamedShape`.

    >>> import jax
    >>> from xmap_compat import random, xmap
    >>> @xmap(in_axes={{}}, out_axes=["i", ...], axis_sizes={{"i": 4}})
    ... def sample(key):
    ...     return random.{sample.__name__}(key, {arguments and f"{arguments}, "}shape=random.NamedShape(2, i=4))
    >>> jax.eval_shape(sample, jax.random.key(0)).shape
    {shown}
{of_jax}"""
    return sampler


_jax_normal = jax.random.normal


def _complex_normal(key: Any, shape: NamedShape, dtype: Any) -> Any:
    """The two parts have keys of their own, and each of these keys is folded."""
    real_type = np.zeros((), dtype).real.dtype
    re, im = (
        _jax_normal(fold_in_names(part, shape), shape.positional, real_type).astype(dtype)
        for part in jax.random.split(key)
    )
    return (re + 1j * im) / np.sqrt(2).astype(dtype)


ball = _of_named_shape(jax.random.ball, "3", shown="(4, 2, 3)")
bernoulli = _of_named_shape(jax.random.bernoulli, "0.5")
beta = _of_named_shape(jax.random.beta, "1.0, 2.0")
bits = _of_named_shape(jax.random.bits)
categorical = _of_named_shape(jax.random.categorical, "jax.numpy.zeros(5)")
cauchy = _of_named_shape(jax.random.cauchy)
choice = _of_named_shape(jax.random.choice, "10")
dirichlet = _of_named_shape(jax.random.dirichlet, "jax.numpy.ones(3)", shown="(4, 2, 3)")
exponential = _of_named_shape(jax.random.exponential)
gamma = _of_named_shape(jax.random.gamma, "2.0")
gumbel = _of_named_shape(jax.random.gumbel)
laplace = _of_named_shape(jax.random.laplace)
logistic = _of_named_shape(jax.random.logistic)
normal = _of_named_shape(jax.random.normal)
poisson = _of_named_shape(jax.random.poisson, "4.0")
rademacher = _of_named_shape(jax.random.rademacher)
randint = _of_named_shape(jax.random.randint, "minval=0, maxval=10")
truncated_normal = _of_named_shape(jax.random.truncated_normal, "-2, 2")
uniform = _of_named_shape(jax.random.uniform)
