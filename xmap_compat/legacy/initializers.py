"""Initializers that take named shapes, for ``jax.nn.initializers`` under ``install()``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from xmap_compat.random import NamedShape, fold_in_names, variance_scaling

# The initializers that are variance_scaling by another name: scale, mode and distribution.
SCALINGS = {
    "glorot_normal": (1.0, "fan_avg", "truncated_normal"),
    "glorot_uniform": (1.0, "fan_avg", "uniform"),
    "he_normal": (2.0, "fan_in", "truncated_normal"),
    "he_uniform": (2.0, "fan_in", "uniform"),
    "lecun_normal": (1.0, "fan_in", "truncated_normal"),
    "lecun_uniform": (1.0, "fan_in", "uniform"),
}
SAME = {"xavier_normal": "glorot_normal", "xavier_uniform": "glorot_uniform"}
SAME |= {"kaiming_normal": "he_normal", "kaiming_uniform": "he_uniform"}
INITIALIZERS = ("variance_scaling", *SCALINGS, *SAME, "normal", "uniform", "truncated_normal")


def initializer(name: str) -> Callable[..., Any]:
    """A function of ``jax.nn.initializers`` that makes an initializer, also of named shapes."""
    original = getattr(jax.nn.initializers, name)
    if name == "variance_scaling" or SAME.get(name, name) in SCALINGS:
        make = functools.partial(variance_scaling, *SCALINGS.get(SAME.get(name, name), ()))
        return functools.wraps(original)(lambda *args, **kwargs: make(*args, **kwargs))

    @functools.wraps(original)
    def of_keys(*args, **kwargs):
        init = original(*args, **kwargs)

        def init_by_folded_key(key, shape, *rest, **options):
            if isinstance(shape, NamedShape):
                key, shape = fold_in_names(key, shape), shape.positional
            return init(key, shape, *rest, **options)

        return init_by_folded_key

    return of_keys
