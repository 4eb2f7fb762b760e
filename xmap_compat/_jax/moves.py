"""Moves of data that need more than JAX's public functions, on some releases or for some types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad
from jax.sharding import NamedSharding, PartitionSpec

from xmap_compat._jax.types import explicit_spec
from xmap_compat._jax.version import VERSION


def reshaped(x: Any, shape: Sequence[int]) -> Any:
    """``lax.reshape`` that tells JAX how the result is sharded, where Explicit axes shard
    dimensions that it keeps.
    """
    spec = explicit_spec(x)
    if not any(spec):
        return lax.reshape(x, shape)
    front = _agreeing(x.shape, shape)
    back = _agreeing(x.shape[front:][::-1], shape[front:][::-1])
    if any(spec[front : len(spec) - back]):
        return lax.reshape(x, shape)
    kept = (*spec[:front], *(None,) * (len(shape) - front - back), *spec[len(spec) - back :])
    return lax.reshape(
        x, shape, out_sharding=NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*kept))
    )


def _agreeing(some, others):
    return next(
        (k for k, (one, other) in enumerate(zip(some, others)) if one != other),
        min(len(some), len(others)),
    )


def gather(x: Any, axes: Sequence[Any], to: str) -> Any:
    """Tiled ``lax.all_gather`` of the first dimension."""
    if VERSION >= (0, 10, 0) or to == "varying":
        return lax.all_gather(x, axes, tiled=True, **({"to": to} if VERSION >= (0, 10, 0) else {}))
    # It has no public function yet.
    primitive = next(p for p in ad.primitive_transposes if p.name == "all_gather_invariant")
    named = {"axis_name": tuple(axes), "axis_size": lax.axis_size(tuple(axes))}
    return primitive.bind(x, all_gather_dimension=0, tiled=True, **named)
