"""Checkable annotations of values inside a body: ``f32[(5,), {'batch': 20}]``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xmap_compat.core.named_shape import is_array, named_shape


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """The type of an array: ``f32[(5,), {'batch': 20}]``.

    Attributes:
      dtype: the element type, or None for any.
      shape: the positional shape; None for any positional and any named shape.
      named: the named shape; empty if the annotation has none.
    """

    dtype: Any
    shape: tuple[int, ...] | None = None
    named: tuple[tuple[Hashable, int], ...] = ()

    def __getitem__(self, key: Any) -> ArrayType:
        has_named = isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], Mapping)
        shape, named = key if has_named else (key, {})
        sizes = (*shape, *named.values()) if isinstance(shape, (tuple, list)) else (None,)
        if not all(isinstance(size, (int, np.integer)) for size in sizes):
            raise TypeError(f"An array type is written like f32[(5,), {{'batch': 20}}], but got [{key!r}]")
        return ArrayType(self.dtype, tuple(shape), tuple(sorted(named.items(), key=str)))

    def __str__(self) -> str:
        name = "any" if self.dtype is None else jax.core.ShapedArray((), self.dtype).str_short(short_dtypes=True)[:-2]
        if self.shape is None:
            return name
        named = f", {dict(self.named)}" if self.named else ""
        return f"{name}[{self.shape}{named}]"


f32 = ArrayType(jnp.float32)
i32 = ArrayType(jnp.int32)
bool_ = ArrayType(jnp.bool_)


def type_of(x: Any) -> ArrayType:
    """The full type of a value inside a body."""
    aval = jax.typeof(x)
    return ArrayType(aval.dtype, aval.shape, tuple(sorted(named_shape(x).items(), key=str)))


def check_type(x: Any, expected: ArrayType, what: str = "the value") -> Any:
    """Return ``x`` if it has the expected element type, shape and named shape.

    Raises:
      TypeError: ``x`` has another type; the message shows both types.
    """
    if not is_array(x):
        raise TypeError(f"{what} should have the type {expected}, but is a {type(x).__name__}, not an array")
    found = type_of(x)
    same_element = expected.dtype is None or expected.dtype == found.dtype
    same_shape = expected.shape is None or (expected.shape, expected.named) == (found.shape, found.named)
    if not (same_element and same_shape):
        raise TypeError(f"{what} should have the type {expected}, but has the type {found}")
    return x


def typed(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Check the annotations of a function that is called inside a body: arguments and result.

    Annotations that are not an :class:`ArrayType` are ignored.
    """
    signature = inspect.signature(fun, eval_str=True)

    @functools.wraps(fun)
    def checked(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            _check_annotation(value, signature.parameters[name].annotation, f"argument {name} of {fun.__name__}")
        result = fun(*args, **kwargs)
        _check_annotation(result, signature.return_annotation, f"the result of {fun.__name__}")
        return result

    return checked


def _check_annotation(value, annotation, what):
    if isinstance(annotation, ArrayType):
        check_type(value, annotation, what)
