"""``jax.vmap(spmd_axis_name=...)`` around an xmap."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

from jax._src.core import trace_ctx

from xmap_compat._jax.version import RELEASE, VERSION


def axes_of_spmd_vmap() -> frozenset[Any]:
    """The mesh axes of ``vmap(spmd_axis_name=...)`` that are being applied around what is traced."""
    axes = frozenset(trace_ctx.axis_env.spmd_axis_names)
    if axes and not VERSION >= (0, 10, 0):  # the batching rules of 0.9 give types that do not fit together
        raise NotImplementedError(
            f"A vmap with spmd_axis_name={sorted(axes)} around an xmapped function with mesh resources needs jax 0.10, "
            f"but found jax {RELEASE}. Upgrade jax, or leave spmd_axis_name out"
        )
    return axes


def no_spmd_names() -> contextlib.ExitStack:
    """Hide the axes of ``vmap(spmd_axis_name=...)`` from batching rules: our own levels are no such vmap."""
    env = trace_ctx.axis_env
    parts = {name: getattr(env, name) for name in inspect.signature(type(env)).parameters}
    hidden = contextlib.ExitStack()
    hidden.callback(trace_ctx.set_axis_env, env)
    # Set here, not where the context is entered: only what a part does while it is called can turn it off.
    trace_ctx.set_axis_env(type(env)(**{**parts, "spmd_axis_names": type(env.spmd_axis_names)()}))
    return hidden
