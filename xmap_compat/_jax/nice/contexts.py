"""The state that ``with Mesh(...)`` of JAX sets, read and written."""

from __future__ import annotations

import inspect
from typing import Any

import jax
from jax._src import pjit
from jax._src.mesh import thread_resources

from xmap_compat._jax.patches import Patch, replaced

_create_sharding = pjit._create_sharding_for_array
if list(inspect.signature(_create_sharding).parameters) != ["mesh", "x", "name", "api_name"]:
    raise ImportError("pjit._create_sharding_for_array takes other arguments")


def innermost() -> tuple[Any, Any]:
    """What is in scope in this thread: an object for each context, and its mesh, which
    may be empty.
    """
    return thread_resources.env, thread_resources.env.physical_mesh


# All names are tried here: a context that fails while it is entered would stay entered by half.
thread_resources.stack[-1]._replace(physical_mesh=innermost()[1])
_exit_of_jax = jax.sharding.Mesh.__exit__


def push(mesh: jax.sharding.Mesh) -> Any:
    """Enter a mesh as ``with jax.sharding.Mesh(...)`` does, without its deprecation warning (since
    0.10.1).
    """
    thread_resources.stack.append(thread_resources.stack[-1])
    return replace(mesh)


def replace(mesh: jax.sharding.Mesh, base: bool = False) -> Any:
    """Put a mesh in the place of the innermost mesh, or of the mesh outside of all contexts."""
    made = thread_resources.env._replace(physical_mesh=mesh)
    at = 0 if base else -1
    thread_resources.stack[at] = made
    # Push and pop: JAX updates `env` and jit's cache key where a context ends.
    thread_resources.stack.append(thread_resources.stack[-1])
    pop()
    return made


def pop() -> None:
    """Leave the innermost context, as JAX does: what lies below is in scope, and all of it in jit's
    cache key, in whichever order contexts of JAX and of ours end.
    """
    _exit_of_jax(innermost()[1], None, None, None)


def bare_specs() -> list[Patch]:
    """Inside our mesh, ``jit(in_shardings=PartitionSpec(...))`` means that mesh, as it did then.

    Since 0.7 jit reads only ``jax.set_mesh``, which would also change where all other results live.
    """
    return [replaced(pjit, "_create_sharding_for_array", _create_sharding_in_mesh)]


def _create_sharding_in_mesh(mesh, x, name, api_name):
    if api_name == "jit" and mesh.empty and isinstance(x, jax.sharding.PartitionSpec):
        _, mesh = innermost()
    return _create_sharding(mesh, x, name, api_name)
