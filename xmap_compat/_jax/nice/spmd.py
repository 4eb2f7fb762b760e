"""``jax.vmap(spmd_axis_name=...)`` around an xmap."""

from __future__ import annotations

from typing import Any

from jax._src.core import trace_ctx


def axes_of_spmd_vmap() -> frozenset[Any]:
    """The mesh axes of ``vmap(spmd_axis_name=...)`` that are being applied around what is
    traced.
    """
    return frozenset(trace_ctx.axis_env.spmd_axis_names)


axes_of_spmd_vmap()  # so that it fails here
