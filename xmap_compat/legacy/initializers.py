"""``jax.nn.initializers`` with named shapes, as jax 0.4.30 had them: fans are counted over named
and positional dimensions.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.nn.initializers as of_jax
import jax.numpy as jnp

from xmap_compat import random
from xmap_compat.core.errors import LEGACY
from xmap_compat.random import NamedShape


def _taking_names(name: str) -> Callable[..., Any]:
    """A function of ``jax.nn.initializers`` whose initializers take a named shape as well.

    Such an initializer is that of one element, with the index of each name folded into its key.
    """
    factory = getattr(of_jax, name)

    @functools.wraps(factory)
    def make(*args, **kwargs):
        initialize = factory(*args, **kwargs)
        given = inspect.signature(factory).bind(*args, **kwargs)
        given.apply_defaults()
        settings = {**_FIXED.get(name, {}), **given.arguments}

        @functools.wraps(initialize)
        def init(key, shape, dtype=settings["dtype"], *others, **options):
            if not isinstance(shape, NamedShape):
                return initialize(key, shape, dtype, *others, **options)
            if jnp.issubdtype(dtype, jnp.complexfloating):
                raise _complex_numbers(shape)
            of_element = initialize
            if "in_axis" in settings:
                of_element = _of_one_element(shape, settings)
            return of_element(random.fold_in_names(key, shape), shape.positional, dtype)

        return init

    return make


def _of_one_element(shape, settings):
    """JAX's initializer of the positional dimensions, by the fans of the whole shape."""
    fan_in, fan_out = fans(shape, settings["in_axis"], settings["out_axis"], settings["batch_axis"])
    fan_of_mode = {
        "fan_in": fan_in,
        "fan_out": fan_out,
        "fan_avg": (fan_in + fan_out) / 2,
        "fan_geo_avg": (fan_in * fan_out) ** 0.5,
    }
    scale = settings["scale"] / fan_of_mode[settings["mode"]]
    # All axes are batches, so the fans that JAX counts are 1.
    every_axis = tuple(range(shape.positional_rank))
    distribution = settings["distribution"]
    return of_jax.variance_scaling(scale, "fan_in", distribution, (), (), every_axis)


# ------------------------------------------------------------------------------------- fans


def fans(shape: NamedShape, in_axis: Any, out_axis: Any, batch_axis: Any) -> tuple[float, float]:
    """Effective input and output sizes; axes are positions, names, or sequences of them."""
    if shape.rank <= 1:
        raise _too_few_dimensions(shape)
    in_size = _size(shape, "in_axis", in_axis)
    out_size = _size(shape, "out_axis", out_axis)
    rest = shape.total / in_size / out_size / _size(shape, "batch_axis", batch_axis)
    return in_size * rest, out_size * rest


def _size(shape, argument, axes):
    if isinstance(axes, (int, str)):
        axes = (axes,)
    try:
        return math.prod(shape[axis] for axis in axes)
    except (IndexError, KeyError) as error:
        raise _axis_not_there(type(error), argument, axes, shape) from None


def _axis_not_there(
    kind: type[LookupError], argument: str, axes: Sequence[Any], shape: NamedShape
) -> LookupError:
    return kind(
        f"{argument} of the initializer is {tuple(axes)}, but the shape is {shape!r}. Pass a "
        f"position or a name that it has, such as {argument}={next(iter(shape.names), 0)!r}"
    )


def _too_few_dimensions(shape: NamedShape) -> ValueError:
    return ValueError(
        f"An initializer with fans needs two dimensions or more, but the shape is {shape!r}. Give "
        f"it a dimension of 1{LEGACY}Can't compute input and output sizes of a "
        f"{shape.rank}-dimensional weights tensor. Must be at least 2D."
    )


def _complex_numbers(shape: NamedShape) -> NotImplementedError:
    return NotImplementedError(
        f"Initializers of a named shape give real numbers, but got a complex dtype for {shape!r}. "
        "Make the real and the imaginary part each by one"
    )


# ---------------------------------------------------------------------------------- the table

# What functions with shorter names give to variance_scaling.
_FIXED: dict[str, dict[str, Any]] = {}
for _name, _scale, _mode in (
    ("glorot", 1.0, "fan_avg"),
    ("xavier", 1.0, "fan_avg"),
    ("lecun", 1.0, "fan_in"),
    ("he", 2.0, "fan_in"),
    ("kaiming", 2.0, "fan_in"),
):
    _of_both = {"scale": _scale, "mode": _mode}
    _FIXED[f"{_name}_uniform"] = {**_of_both, "distribution": "uniform"}
    _FIXED[f"{_name}_normal"] = {**_of_both, "distribution": "truncated_normal"}

_NAMES = ["uniform", "normal", "truncated_normal", "variance_scaling", *_FIXED]
INITIALIZERS = {name: _taking_names(name) for name in _NAMES}
