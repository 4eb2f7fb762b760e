"""How functions and their bodies are traced."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
from jax._src.core import trace_ctx

from xmap_compat._jax.version import trace_state


def jit(fun: Callable[..., Any], backend: str | None, **options: Any) -> Any:
    """``jax.jit``, on a backend if one is named; jit's parameter for it warns since 0.8."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return jax.jit(fun, backend=backend, **options)


def traced_as(shown: Any, fun: Callable[..., Any]) -> Callable[..., Any]:
    """Let JAX's errors say that it traced ``shown``, the user's function, and not ``fun``."""
    fun.__signature__ = inspect.signature(fun)  # type: ignore[attr-defined]
    fun.__wrapped__ = shown  # type: ignore[attr-defined]
    return fun


_UNCHECKED = jax.sharding.AbstractMesh((1,), ("xmap_compat_unchecked",))


def plainly(make: Callable[[], Any], in_our_shard_map: bool = False) -> Any:
    """The result of ``make``, which traces as at top level: without manual or explicit meshes and
    their checks.

    A named program must not depend on where it will run; a custom rule of the user is
    traced late, from within our typed ``shard_map``, and must see neither that nor its mesh axes.
    """
    current = jax.sharding.get_abstract_mesh()
    mesh = current
    if current.empty or not current.are_all_axes_auto:
        mesh = jax.sharding.AbstractMesh((), ())
    results: list[Any] = []

    def plain():
        with jax.sharding.use_abstract_mesh(mesh):
            results.append(make())

    # The checks of an enclosing shard_map end within one without checks, which is traced for this
    # purpose only.
    unchecked = jax.shard_map(
        plain, mesh=_UNCHECKED, in_specs=(), out_specs=jax.P(), check_vma=False
    )
    with _without_mesh_axes(in_our_shard_map), jax.sharding.use_abstract_mesh(mesh):
        if current.manual_axes:
            jax.eval_shape(unchecked)
        else:
            plain()
    return results[0]


@contextlib.contextmanager
def _without_mesh_axes(in_our_shard_map: bool) -> Iterator[None]:
    """The context in which collectives do not see the mesh axes of our ``shard_map`` around."""
    before = trace_ctx.axis_env
    try:
        if in_our_shard_map:
            for name in filter(is_bound, jax.sharding.get_abstract_mesh().manual_axes):
                trace_ctx.set_axis_env(trace_ctx.axis_env.pop_pure(name))
        yield
    finally:
        trace_ctx.set_axis_env(before)


def current_trace() -> Any:
    """A stand-in for the trace that primitives are bound in now: the same trace has an equal
    one.
    """
    return trace_state.get_opaque_trace_state()


def is_bound(name: Hashable) -> bool:
    """Whether collectives can see an axis here: one of an outer vmap, shard_map or xmap."""
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True
