"""``jax.random`` with named shapes: ``normal(key, NamedShape(2, i=3))`` samples along the axis
``i`` of an xmap.

Each name of a shape folds the index of its axis into the key, in the order of the names, so the
numbers are the same for every assignment of resources, and those of ``jax.random`` in jax 0.4.30.
Other functions of ``jax.random`` took a named shape there, and gave every element the same numbers:
call them with ``shape.positional`` and the key ``fold_in_names(key, shape)``.

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

# The functions of jax.random whose samples legacy xmap took along the axes of a named shape.
SAMPLERS = ["bernoulli", "normal", "truncated_normal", "uniform"]
__all__ = sorted(["NamedShape", "fold_in_names", *SAMPLERS])


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
        if isinstance(dimension, str):
            return self._named[dimension]
        return self._positional[dimension]

    def __iter__(self):
        raise _not_for_samplers(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, tuple):
            return not self._named and self._positional == other
        if not isinstance(other, NamedShape):
            return NotImplemented
        return self._positional == other._positional and self._named == other._named

    def __hash__(self) -> int:
        if not self._named:
            return hash(self._positional)  # it equals that tuple
        return hash((self._positional, frozenset(self._named.items())))

    def __repr__(self) -> str:
        return f"NamedShape({self._inside()})"

    def __str__(self) -> str:
        if not self._named:
            return str(self._positional)
        return f"({self._inside()})"

    def _inside(self) -> str:
        named = [f"{name}={size}" for name, size in self._named.items()]
        return ", ".join([*map(str, self._positional), *named])


def _not_for_samplers(shape: Any) -> TypeError:
    return TypeError(
        f"{shape!r} is a shape for {', '.join(SAMPLERS)} of xmap_compat.random only and, under "
        "install(), for those of jax.random and for jax.nn.initializers. Give other functions "
        "shape.positional and, where they sample, the key xmap_compat.random.fold_in_names(key, "
        "shape)"
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


def _of_named_shape(sample: Callable[..., Any], arguments: str = "") -> Callable[..., Any]:
    """A function of ``jax.random`` that takes a named shape as well.

    ``arguments``: those between key and shape, in its example.
    """

    @_jax.api_boundary
    @functools.wraps(sample)
    def sampler(*args, **kwargs):
        if not any(isinstance(x, NamedShape) for x in (*args, *kwargs.values())):
            return sample(*args, **kwargs)
        given = inspect.signature(sample).bind(*args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        shape = values["shape"]
        is_complex = jnp.issubdtype(values.get("dtype"), jnp.complexfloating)
        if sample is _jax_normal and is_complex:
            return _complex_normal(values["key"], shape, jnp.dtype(values["dtype"]))
        values["shape"] = shape.positional
        values["key"] = fold_in_names(values["key"], shape)
        return sample(**values)

    sampler.__module__ = __name__
    summary, _, of_jax = (sample.__doc__ or "").partition("\n")
    sampler.__doc__ = f"""{summary}  The shape may be a :class:`NamedShape`.

    >>> import jax
    >>> from xmap_compat import random, xmap
    >>> @xmap(in_axes={{}}, out_axes=["i", ...], axis_sizes={{"i": 4}})
    ... def sample(key):
    ...     return random.{sample.__name__}(key, {arguments}shape=random.NamedShape(2, i=4))
    >>> jax.eval_shape(sample, jax.random.key(0)).shape
    (4, 2)
{of_jax}"""
    return sampler


_jax_normal = jax.random.normal


def _complex_normal(key: Any, shape: NamedShape, dtype: Any) -> Any:
    """The two parts have different keys, and each of these keys is folded."""
    real_type = np.zeros((), dtype).real.dtype
    parts = []
    for part in jax.random.split(key):
        drawn = _jax_normal(fold_in_names(part, shape), shape.positional, real_type)
        parts.append(drawn.astype(dtype))
    real, imaginary = parts
    return (real + 1j * imaginary) / np.sqrt(2).astype(dtype)


bernoulli = _of_named_shape(jax.random.bernoulli, "0.5, ")
normal = _of_named_shape(jax.random.normal)
truncated_normal = _of_named_shape(jax.random.truncated_normal, "-2, 2, ")
uniform = _of_named_shape(jax.random.uniform)
