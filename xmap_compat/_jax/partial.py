"""A ``shard_map`` over some axes of a mesh; the compiler has the others."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad
from jax.sharding import NamedSharding, PartitionSpec

from xmap_compat._jax.mesh import axes_of_entry
from xmap_compat._jax.types import explicit_spec
from xmap_compat._jax.version import VERSION


def in_float32(collective: Callable[[Any], Any], x: Any) -> Any:
    """``collective(x)``, with bfloat16 sent as float32, in its transpose too, where a back end cannot sum it there.

    XLA's CPU compiler aborts the process, on all-reduces and reduce-scatters that come from JAX: those of ``psum`` and
    ``psum_scatter``, and of the transposes of ``pcast`` and ``all_gather``.  No release to 0.12.0 fixes it.  (Those
    that its own partitioner makes are fine, and so are floats of 16 and of 8 bits.)
    """
    if jax.typeof(x).dtype != jnp.bfloat16:
        return collective(x)
    return lax.convert_element_type(collective(lax.convert_element_type(x, jnp.float32)), jnp.bfloat16)


def partitioned_axes(axes: Container[Any]) -> int:
    """How many of these axes of the mesh in scope XLA has to partition over, by its own choice.

    Over Explicit axes JAX's types say how values lie.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return sum(mesh.shape[a] > 1 and a not in mesh.explicit_axes for a in mesh.axis_names if a in axes)


UNCONSTRAINED = PartitionSpec.UNCONSTRAINED


def constrained(x: Any, entries: Sequence[Any], axes: Container[Any]) -> Any:
    """``with_sharding_constraint`` over the axes that the compiler has, or ``reshard`` where they are Explicit.

    Args:
      entries: the entry of a PartitionSpec for each dimension; it may have other axes too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    wanted = _over(entries, axes)
    if not any(name in axes for name in mesh.explicit_axes):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*wanted)))
    now = explicit_spec(x)
    wanted = [had if entry is UNCONSTRAINED else entry for entry, had in zip(wanted, now, strict=True)]
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*wanted)))


def of_compiler(sharding: Any, axes: Container[Any]) -> Any:
    """The ``out_sharding`` of an operation over the axes that the compiler has; None if it has no Explicit ones."""
    mesh = jax.sharding.get_abstract_mesh()
    if not isinstance(sharding, NamedSharding) or not any(name in axes for name in mesh.explicit_axes):
        return None
    return NamedSharding(mesh, PartitionSpec(*_over(sharding.spec, axes)))


def _over(entries, axes):
    """Entries of a PartitionSpec with some axes only."""
    return [
        entry if entry is UNCONSTRAINED else tuple(a for a in axes_of_entry(entry) if a in axes) for entry in entries
    ]


def reshaped(x: Any, shape: Sequence[int]) -> Any:
    """``lax.reshape`` that tells JAX how the result is sharded, where Explicit axes shard dimensions that it keeps."""
    spec = explicit_spec(x)
    if not any(spec):
        return lax.reshape(x, shape)
    front = _agreeing(x.shape, shape)
    back = _agreeing(x.shape[front:][::-1], shape[front:][::-1])
    if any(spec[front : len(spec) - back]):
        return lax.reshape(x, shape)
    kept = (*spec[:front], *(None,) * (len(shape) - front - back), *spec[len(spec) - back :])
    return lax.reshape(x, shape, out_sharding=NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*kept)))


def _agreeing(some, others):
    return next((k for k, (one, other) in enumerate(zip(some, others)) if one != other), min(len(some), len(others)))


def sum_scatter(x: Any, axes: Sequence[Any]) -> Any:
    """Tiled ``lax.psum_scatter`` of the first dimension; JAX (to 0.12) cannot lower it for values that are Explicit."""
    if any(explicit_spec(x)):
        traded = lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
        devices = lax.axis_size(axes)
        return lax.reduce_sum(reshaped(traded, (devices, x.shape[0] // devices, *x.shape[1:])), [0])
    return lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True)


def gather(x: Any, axes: Sequence[Any], to: str) -> Any:
    """Tiled ``lax.all_gather`` of the first dimension.  JAX (to 0.12) cannot scatter cotangents of Explicit values.

    It is tiled because JAX mistypes untiled gathers of Explicit values, and batches their transpose wrongly.
    """
    to = "invarying" if any(explicit_spec(x)) else to
    if VERSION >= (0, 10, 0) or to == "varying":
        return lax.all_gather(x, axes, tiled=True, **({"to": to} if VERSION >= (0, 10, 0) else {}))
    # It has no public function yet.
    primitive = next(p for p in ad.primitive_transposes if p.name == "all_gather_invariant")
    named = {"axis_name": tuple(axes), "axis_size": lax.axis_size(tuple(axes))}
    return primitive.bind(x, all_gather_dimension=0, tiled=True, **named)
