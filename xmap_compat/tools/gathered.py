"""Arguments that are sharded over more of the mesh than their specs say: they are gathered where
they enter the call.

Under ``jax.jit``, shardings are unknown while a call is traced, unless the types contain them
(Explicit axes).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat.core.call import PlacedCall, partition_spec
from xmap_compat.tools.staged import bytes_of
from xmap_compat.tools.text import listed


@dataclasses.dataclass(frozen=True)
class Gathered:
    """An argument of which each device holds less than it needs.

    Attributes:
      path: the argument.
      mesh_axes: the mesh axes over which it is sharded although its spec does not say so.
      dims: the dimensions that are sharded over them.
      bytes_received: the bytes that each device receives before it computes anything.
    """

    path: str
    mesh_axes: tuple[Any, ...]
    dims: tuple[int, ...]
    bytes_received: int

    @property
    def remedy(self) -> str:
        """The change to the program that avoids the gather."""
        return f"name dimension {listed(self.dims)} in in_axes, on {listed(self.mesh_axes)}"


def gathered_arguments(
    placed: PlacedCall, leaves: Sequence[Any], paths: Sequence[str]
) -> Iterator[Gathered]:
    """The arguments of a call that are gathered at entry, as far as arrays or their types have
    shardings.

    Args:
      leaves: arrays, tracers, or types that stand for them.
    """
    mesh = placed.scope.mesh
    if mesh is None or not placed.uses_mesh or placed.nested:
        return
    for leaf, spec, path in zip(leaves, placed.in_specs, paths):
        yield from _gathered(path, leaf, partition_spec(spec, placed.placements), mesh)


def gathered_in_step(jaxpr: Any, leaves: Sequence[Any], paths: Sequence[str]) -> Iterator[Gathered]:
    """The arguments that a staged step passes unchanged to its calls, and that are gathered where
    they enter them. Only arrays, and types with a sharding, are known.

    Args:
      leaves: the arguments of the step.
    """
    body, _ = _jax.open_jaxpr(jaxpr)
    yield from _entering(
        body, {v: (leaf, path) for v, leaf, path in zip(body.invars, leaves, paths)}
    )


def _entering(body: Any, given: dict[Any, tuple[Any, str]]) -> Iterator[Gathered]:
    known = lambda v: None if isinstance(v, _jax.Literal) else given.get(v)  # noqa: E731
    for eqn in body.eqns:
        found = _jax.read(eqn)
        if isinstance(found, (_jax.Call, _jax.Scan)):
            inner, _ = _jax.open_jaxpr(found.body)
            passed = eqn.invars[: found.num_consts] if isinstance(found, _jax.Scan) else eqn.invars
            inside = {v: known(operand) for v, operand in zip(inner.invars, passed)}
            yield from _entering(
                inner, {v: value for v, value in inside.items() if value is not None}
            )
        elif isinstance(found, _jax.ShardMap) and found.mapped.issuperset(
            found.mesh_shape
        ):  # others gather nothing
            for operand, spec in zip(eqn.invars, found.in_specs):
                leaf, path = known(operand) or (None, "")
                sharding = (
                    None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
                )
                mesh = getattr(sharding, "mesh", None)
                if mesh is not None and dict(mesh.shape) == dict(found.mesh_shape):
                    yield from _gathered(path, leaf, spec, mesh)


def _gathered(path: str, leaf: Any, spec: Any, mesh: Any) -> Iterator[Gathered]:
    """The gather of an argument whose sharding and spec differ, if any."""
    lies = _spec_of(leaf, mesh)
    wanted = {axis for entry in spec for axis in _jax.axes_of_entry(entry)}
    extra = [
        (d, axis)
        for d, entry in enumerate(lies)
        for axis in _jax.axes_of_entry(entry)
        if axis not in wanted
    ]
    if not extra:
        return
    kept = wanted.union(*(_jax.axes_of_entry(entry) for entry in lies)) - {
        axis for _, axis in extra
    }
    needed = bytes_of(jax.typeof(leaf)) // math.prod(mesh.shape[axis] for axis in kept)
    received = needed - needed // math.prod(mesh.shape[axis] for _, axis in extra)
    axes = tuple(dict.fromkeys(axis for _, axis in extra))
    yield Gathered(path, axes, tuple(dict.fromkeys(d for d, _ in extra)), received)


def _spec_of(leaf: Any, mesh: _jax.AnyMesh) -> tuple[Any, ...]:
    """The partition of an array over the mesh: that of the array if it is concrete, else that of
    its type.
    """
    if isinstance(leaf, jax.core.Tracer):
        return _jax.explicit_spec(leaf)
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or dict(sharding.mesh.shape) != dict(
        mesh.shape
    ):
        return ()
    return tuple(sharding.spec)
