"""``named_shape(x)`` inside a body, and checkable annotations ``f32[(5,), {'batch': 20}]``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xmap_compat import _jax, errors
from xmap_compat.named_shapes import Checker
from xmap_compat.resources import Placement

Names = frozenset[Hashable]


class _Inputs(threading.local):
    def __init__(self):
        self.stack: list[_Known] = []


@dataclasses.dataclass(frozen=True)
class _Known:
    """The arguments of a body being traced: which trace they belong to, and their named axes."""

    trace: Any
    names: tuple[Names, ...]
    sizes: Mapping[Hashable, int]


_inputs = _Inputs()


@contextlib.contextmanager
def known_inputs(tracers: Sequence[Any], names: Sequence[Names], sizes: Mapping[Hashable, int]) -> Iterator[None]:
    """Remember the named axes of a body's arguments while it is traced."""
    trace = _jax.frame_of(tracers[0]) if tracers else None
    _inputs.stack.append(_Known(trace, tuple(names), sizes))
    try:
        yield
    finally:
        _inputs.stack.pop()


def named_shape(x: Any) -> dict[Hashable, int]:
    """The named axes that a value varies over, with their sizes: ``{'batch': 20}``.

    It is read off the operations that made the value, so it is exact: an axis that was reduced is
    gone.  ``x.named_shape`` is the same inside a body.

    Args:
      x: an array or scalar.  Constants, and everything outside of xmapped functions, have ``{}``.

    Raises:
      TypeError: it is no array (a pytree has no one named shape).
      ValueError: the value depends on the arguments of an inner function that JAX traces by itself
        (``jit``, the body of a ``scan``, a nested xmap): their named axes are not known there.

    Source: ``x.named_shape`` on tracers of ``jax.experimental.maps.xmap``.
    """
    if not _is_array(x):
        raise errors.not_an_array("named_shape", x)
    if not _inputs.stack:
        return {}
    sizes = {name: size for known in _inputs.stack for name, size in known.sizes.items()}
    checker = Checker({name: Placement(name, size) for name, size in sizes.items()}, "")
    names = _names_of(x, checker, {})
    return {name: size for name, size in sizes.items() if name in names}


def _is_array(x):
    try:
        jax.typeof(x)
    except TypeError:
        return False
    return True


def _names_of(x, checker, memo):
    """Walk back over the equations that made a value; iterative, for programs are long."""
    pending = [x]
    while pending:
        value = pending[-1]
        if id(value) in memo:
            pending.pop()
            continue
        kind, origin = _jax.tracer_origin(value)
        operands = list(origin[2]) if kind == "equation" else [origin] if kind in ("same", "closure") else []
        missing = [v for v in operands if id(v) not in memo]
        if missing:
            pending.extend(missing)
            continue
        memo[id(value)] = _step(kind, origin, [memo[id(v)] for v in operands], checker)
        pending.pop()
    return memo[id(x)]


def _step(kind, origin, operands, checker) -> Names:
    if kind == "constant":
        return frozenset()
    if kind in ("same", "closure"):
        return operands[0]
    if kind == "equation":
        eqn, index, _ = origin
        return checker.equation(eqn, operands)[index]
    if kind == "input":
        trace, index = origin
        for known in _inputs.stack:
            if known.trace is trace:
                return known.names[index]
        raise errors.named_shape_unknown(
            "it depends on an argument of a function that is traced by itself (under jit, in a loop, in a nested xmap)"
        )
    raise errors.named_shape_unknown("it belongs to a transformation that xmap_compat does not know")


# ----------------------------------------------------------------------- annotations


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """The type of an array: ``f32[(5,), {'batch': 20}]``.

    Attributes:
      dtype: the element type, or None for any.
      shape: the positional shape; None for any, and any named shape.
      named: the named shape; empty if none is written.
    """

    dtype: Any
    shape: tuple[int, ...] | None = None
    named: tuple[tuple[Hashable, int], ...] = ()

    def __getitem__(self, key: Any) -> ArrayType:
        has_named = isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], Mapping)
        shape, named = key if has_named else (key, {})
        sizes = (*shape, *named.values()) if isinstance(shape, (tuple, list)) else (None,)
        if not all(isinstance(size, (int, np.integer)) for size in sizes):
            raise errors.bad_array_type(key)
        return ArrayType(self.dtype, tuple(shape), tuple(sorted(named.items(), key=str)))

    def __str__(self) -> str:
        name = "any" if self.dtype is None else _short_name(self.dtype)
        if self.shape is None:
            return name
        named = f", {dict(self.named)}" if self.named else ""
        return f"{name}[{self.shape}{named}]"


def _short_name(dtype):
    """``f32`` for float32, as types are written."""
    name = str(dtype) if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).name
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


f32 = ArrayType(jnp.float32)
f64 = ArrayType(jnp.float64)
bf16 = ArrayType(jnp.bfloat16)
f16 = ArrayType(jnp.float16)
i32 = ArrayType(jnp.int32)
u8 = ArrayType(jnp.uint8)
bool_ = ArrayType(jnp.bool_)


def type_of(x: Any) -> ArrayType:
    """The full type of a value inside a body."""
    aval = jax.typeof(x)
    return ArrayType(aval.dtype, aval.shape, tuple(sorted(named_shape(x).items(), key=str)))


def check_type(x: Any, expected: ArrayType, what: str = "the value") -> Any:
    """Return ``x`` if it has the expected element type, shape and named shape.

    Raises:
      TypeError: it has not; the message shows both types.
    """
    if not _is_array(x):
        raise errors.type_of_no_array(what, expected, x)
    found = type_of(x)
    same_element = expected.dtype is None or expected.dtype == found.dtype
    same_shape = expected.shape is None or (expected.shape, expected.named) == (found.shape, found.named)
    if not (same_element and same_shape):
        raise errors.type_mismatch(what, expected, found)
    return x


def typed(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Check the annotations of a function that is called inside a body: arguments and result.

    Annotations that are no :class:`ArrayType` are left alone.
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
