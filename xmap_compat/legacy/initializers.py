"""``jax.nn.initializers`` with named shapes, as jax 0.4.30 had them: fans are counted over named
and positional dimensions.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.nn.initializers as of_jax
import jax.numpy as jnp

from xmap_compat import random
from xmap_compat.core.errors import LEGACY
from xmap_compat.random import NamedShape

Sample = Callable[[Mapping[str, Any], Any, NamedShape, Any], Any]


def _taking_names(factory: Callable[..., Any], sample: Sample) -> Callable[..., Any]:
    """A function of ``jax.nn.initializers`` whose initializers take a named shape as well.

    Args:
      sample: ``(arguments of the factory, key, shape, dtype) -> samples``.
    """

    @functools.wraps(factory)
    def make(*args, **kwargs):
        initialize = factory(*args, **kwargs)
        given = inspect.signature(factory).bind(*args, **kwargs)
        given.apply_defaults()
        settings = given.arguments

        @functools.wraps(initialize)
        def init(key, shape, dtype=settings["dtype"], *others, **options):
            if not isinstance(shape, NamedShape):
                return initialize(key, shape, dtype, *others, **options)
            if dtype is None:
                dtype = float
            return sample(settings, key, shape, jax.dtypes.canonicalize_dtype(dtype))

        return init

    return make


def _uniform(given, key, shape, dtype):
    return random.uniform(key, shape, dtype) * jnp.array(given["scale"], dtype)


def _normal(given, key, shape, dtype):
    return random.normal(key, shape, dtype) * jnp.array(given["stddev"], dtype)


def _truncated_normal(given, key, shape, dtype):
    within = random.truncated_normal(key, given["lower"], given["upper"], shape, dtype)
    return within * jnp.array(given["stddev"], dtype)


def _variance_scaling(given, key, shape, dtype):
    fan_in, fan_out = fans(shape, given["in_axis"], given["out_axis"], given["batch_axis"])
    fan_of_mode = {
        "fan_in": fan_in,
        "fan_out": fan_out,
        "fan_avg": (fan_in + fan_out) / 2,
        "fan_geo_avg": (fan_in * fan_out) ** 0.5,
    }
    fan = fan_of_mode[given["mode"]]
    variance = jnp.array(given["scale"] / fan, dtype)
    scaled = _DISTRIBUTIONS[given["distribution"]]
    return scaled(key, shape, dtype, variance)


def _of_fixed_scale(scale: float, mode: str, distribution: str) -> Sample:
    fixed = {"scale": scale, "mode": mode, "distribution": distribution}

    def sample(given, key, shape, dtype):
        return _variance_scaling({**fixed, **given}, key, shape, dtype)

    return sample


# ------------------------------------------------------------------------------ distributions


def _scaled_normal(key, shape, dtype, variance):
    return random.normal(key, shape, dtype) * jnp.sqrt(variance)


def _scaled_uniform(key, shape, dtype, variance):
    if _is_complex(dtype):
        squared_radius, direction = _of_disk(key, shape, dtype)
        radius = jnp.sqrt(2 * squared_radius).astype(dtype)
        return radius * direction * jnp.sqrt(variance)
    return random.uniform(key, shape, dtype, -1) * jnp.sqrt(3 * variance)


# The standard deviations of normal distributions, of real and of complex numbers, within 2.
_REAL_WITHIN_2 = 0.87962566103423978
_COMPLEX_WITHIN_2 = 0.95311164380491208


def _scaled_truncated_normal(key, shape, dtype, variance):
    if _is_complex(dtype):
        uniform, direction = _of_disk(key, shape, dtype)
        missing = (1 - jnp.exp(jnp.array(-(2**2), dtype))) * uniform.astype(dtype)
        radius = jnp.sqrt(-jnp.log(1 - missing))
        stddev = jnp.sqrt(variance) / jnp.array(_COMPLEX_WITHIN_2, dtype)
        return radius * direction * stddev
    stddev = jnp.sqrt(variance) / jnp.array(_REAL_WITHIN_2, dtype)
    return random.truncated_normal(key, -2, 2, shape, dtype) * stddev


_DISTRIBUTIONS = {
    "normal": _scaled_normal,
    "uniform": _scaled_uniform,
    "truncated_normal": _scaled_truncated_normal,
}


def _of_disk(key, shape, dtype):
    """A uniform sample, for the radius, and complex numbers of size 1 in all directions."""
    of_radius, of_angle = jax.random.split(key)
    real = jnp.zeros((), dtype).real.dtype
    fraction = random.uniform(of_angle, shape, real).astype(dtype)
    angle = 2 * jnp.pi * fraction
    return random.uniform(of_radius, shape, real), jnp.exp(1j * angle)


def _is_complex(dtype):
    return jnp.issubdtype(dtype, jnp.complexfloating)


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


# ---------------------------------------------------------------------------------- the table

_SAMPLES: dict[str, Sample] = {
    "uniform": _uniform,
    "normal": _normal,
    "truncated_normal": _truncated_normal,
    "variance_scaling": _variance_scaling,
}
for _name, _scale, _mode in (
    ("glorot", 1.0, "fan_avg"),
    ("xavier", 1.0, "fan_avg"),
    ("lecun", 1.0, "fan_in"),
    ("he", 2.0, "fan_in"),
    ("kaiming", 2.0, "fan_in"),
):
    _SAMPLES[f"{_name}_uniform"] = _of_fixed_scale(_scale, _mode, "uniform")
    _SAMPLES[f"{_name}_normal"] = _of_fixed_scale(_scale, _mode, "truncated_normal")

INITIALIZERS = {
    name: _taking_names(getattr(of_jax, name), sample) for name, sample in _SAMPLES.items()
}
