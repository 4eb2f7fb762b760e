"""``jax.vmap(spmd_axis_name=...)`` around an xmap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from jax._src.core import trace_ctx


def axes_of_spmd_vmap() -> frozenset[Any]:
    """The mesh axes of ``vmap(spmd_axis_name=...)`` that are being applied around what is traced."""
    return frozenset(trace_ctx.axis_env.spmd_axis_names)


def no_spmd_names() -> contextlib.AbstractContextManager[None]:
    """Hide the axes of ``vmap(spmd_axis_name=...)`` from batching rules: those of our own levels are no such vmap."""
    env = trace_ctx.axis_env
    return _axis_env(env, type(env)(env.axis_sizes, type(env.spmd_axis_names)(), env.explicit_mesh_axis_names))


@contextlib.contextmanager
def _axis_env(before, within) -> Iterator[None]:
    trace_ctx.set_axis_env(within)
    try:
        yield
    finally:
        trace_ctx.set_axis_env(before)
