"""Arguments that are sharded over more of the mesh than their specs say: they are gathered where
they enter a call.

Known are concrete arrays, types with a sharding, and types over Explicit axes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat.tools.staged import Entry, StagedProgram, Value, bytes_of
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
    program: StagedProgram, arguments: Mapping[Value, tuple[str, Any] | None]
) -> Iterator[Gathered]:
    """The arguments that a program passes unchanged to calls, and that are gathered there.

    Args:
      arguments: the path of each argument, and the array.
    """
    known: dict[Any, tuple[str, Any] | None] = dict(arguments)
    for operation in program.operations:
        given = [known.get(value) for value in operation.operands]
        if operation.name == "reshard":  # before a call over Explicit axes
            known[operation.results[0]] = given[0]
        if isinstance(operation.found, Entry) and given[0] is not None:
            yield from _gathered(*given[0], operation.found)
        if isinstance(operation.found, _jax.Scan):
            (body,) = operation.branches
            passed_on = zip(body.inputs, given[: operation.found.num_consts])
            yield from gathered_arguments(body, dict(passed_on))


def _gathered(path: str, leaf: Any, entry: Entry) -> Iterator[Gathered]:
    """The gather of an argument whose sharding and spec differ, if any."""
    wanted = _axes(entry.spec)
    lies = _spec_of(leaf, entry.mesh_shape)
    extra = [axis for axis in _axes(lies) if axis not in wanted]
    if not extra:
        return
    dims = []
    for k, axes in enumerate(lies):
        if not set(extra).isdisjoint(_jax.axes_of_entry(axes)):
            dims.append(k)
    kept = {*wanted, *_axes(lies)}.difference(extra)
    needed = bytes_of(jax.typeof(leaf)) // _devices(kept, entry)
    received = needed - needed // _devices(extra, entry)
    yield Gathered(path, tuple(extra), tuple(dims), received)


def _axes(spec: Any) -> list[Any]:
    """The mesh axes of a partition."""
    found: list[Any] = []
    for entry in spec:
        found.extend(_jax.axes_of_entry(entry))
    return found


def _devices(axes: Any, entry: Entry) -> int:
    return math.prod(entry.mesh_shape[axis] for axis in axes)


def _spec_of(leaf: Any, mesh_shape: Mapping[Any, int]) -> tuple[Any, ...]:
    """The partition of an array over a mesh: that of the array if it is concrete, else that of its
    type.
    """
    if isinstance(leaf, jax.core.Tracer):
        return _jax.explicit_spec(leaf)
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return ()
    if dict(sharding.mesh.shape) != dict(mesh_shape):
        return ()
    return tuple(sharding.spec)
