"""Arrays of xmapped functions when several processes share a mesh: each process passes and receives
its own part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xmap_compat import _jax
from xmap_compat.core.call import partition_spec
from xmap_compat.core.errors import axes_text, not_divisible, should_be
from xmap_compat.core.fit import broadcast_specs, check_argument, infer_sizes
from xmap_compat.core.mesh import devices_of, mesh_of_jax
from xmap_compat.core.placement import Scope, current_scope, parse_axis_resources, place_axes
from xmap_compat.core.specs import (
    AxisName,
    AxisSpec,
    argument_path,
    parse_axis_sizes,
    parse_specs,
    spec_names,
)


@_jax.api_boundary
def global_array(
    local: Any,
    in_axes: Any,
    axis_resources: Mapping[AxisName, Any] | None = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
    axis_sizes: Mapping[AxisName, int] | None = None,
) -> Any:
    """Make global arrays from this process's parts, with the sharding that an xmapped function
    expects.

    All processes make the call, each with its own part: with ``axis_resources={'batch': 'x'}`` the
    rows for those positions on ``x`` at which the process has devices, in their order.  A dimension
    that is not split between processes is whole in every part. Processes with the same rows must
    pass equal ones. With one process, the part is the whole array.

    Args:
      local: NumPy or JAX arrays of this process; a pytree of them.
      in_axes: which of their dimensions are named: the entry of this argument in the ``in_axes`` of
      :func:`xmap`.
      axis_resources: as for :func:`xmap`; axes that the arrays do not have are ignored.
      mesh: the mesh of all processes; by default the one in scope. The empty mesh counts as no
      mesh.
      axis_sizes: global sizes of axes. Along such an axis ``local`` may also be whole, although the
        process needs only a part (for example if each process has read the same file).

    Returns:
      For each array a ``jax.Array`` with the ``NamedSharding`` that :func:`xmap` gives a result of
      these axes. Without a mesh, the arrays are put on the default device of the process.

    Raises:
      TypeError, ValueError: as :func:`xmap` for specs, sizes and resources, and JAX's own error for
        a part that is neither the whole nor what the devices of this process need.

    Example:

      >>> import jax, numpy as np
      >>> from xmap_compat import Mesh, global_array
      >>> with Mesh(jax.devices()[:2], "x"):
      ...     rows = global_array(np.arange(6).reshape(2, 3), ["batch", ...], {"batch": "x"})
      >>> [shard.data.tolist() for shard in rows.addressable_shards]
      [[[0, 1, 2]], [[3, 4, 5]]]

    Source: ``jax.make_array_from_process_local_data``.  Legacy xmap took the parts themselves.
    """
    paths = [argument_path(path, "local") for path, _ in jax.tree_util.tree_leaves_with_path(local)]
    leaves = [x if hasattr(x, "shape") else np.asarray(x) for x in jax.tree.leaves(local)]
    specs = broadcast_specs(
        "in_axes", parse_specs("in_axes", in_axes), local, in_axes, root="local"
    )
    for spec, leaf, path in zip(specs, leaves, paths):
        check_argument(spec, leaf.shape, path, is_scalar=False)
    scope = current_scope()
    mesh = (
        scope.mesh if mesh is None and isinstance(scope.mesh, jax.sharding.AbstractMesh) else mesh
    )
    if mesh is not None:
        if not isinstance(mesh, jax.sharding.Mesh):
            raise should_be(
                "The mesh of global_array",
                "a Mesh (of xmap_compat or of jax.sharding) of devices",
                mesh,
            )
        scope = Scope(None if mesh.empty else mesh_of_jax(mesh), scope.loops)
    if scope.mesh is not None and not any(
        d.process_index == jax.process_index() for d in devices_of(scope.mesh)
    ):
        raise _process_without_devices(jax.process_index(), scope.mesh)
    names = spec_names(specs)
    resources = {
        n: entries for n, entries in parse_axis_resources(axis_resources).items() if n in names
    }
    sizes = {n: size for n, size in parse_axis_sizes(axis_sizes).items() if n in names}
    shapes = [
        _global_shape(spec, leaf.shape, resources, scope.mesh, sizes)
        for spec, leaf in zip(specs, leaves)
    ]
    placements = place_axes(infer_sizes(specs, shapes, paths, sizes), resources, scope)
    if scope.mesh is None:
        return jax.device_put(local)
    shardings = [
        jax.sharding.NamedSharding(scope.mesh, partition_spec(spec, placements)) for spec in specs
    ]
    arrays = map(jax.make_array_from_process_local_data, shardings, leaves, shapes)
    return jax.tree.unflatten(jax.tree.structure(local), arrays)


def _global_shape(
    spec: AxisSpec,
    local_shape: Sequence[int],
    resources: Mapping[AxisName, tuple[Any, ...]],
    mesh: jax.sharding.Mesh | None,
    sizes: Mapping[AxisName, int],
) -> tuple[int, ...]:
    """The shape of the global array: each size is given, or the total of the parts of all
    processes.
    """
    shape = list(local_shape)
    for dim, name in spec.names:
        here, everywhere = _positions(mesh, resources.get(name, ()))
        if name in sizes:
            shape[dim] = sizes[name]
        elif shape[dim] % here:
            raise not_divisible(
                name, shape[dim], resources[name], here, "This process's part of local"
            )
        else:
            shape[dim] = shape[dim] // here * everywhere
    return tuple(shape)


def _positions(mesh: jax.sharding.Mesh | None, entries: Sequence[Any]) -> tuple[int, int]:
    """The number of positions along mesh axes at which this process has devices, and the number of
    all positions.
    """
    if mesh is None:
        return 1, 1
    dims = [k for k, name in enumerate(mesh.axis_names) if name in entries]
    positions = {
        (*(index[k] for k in dims), d.process_index) for index, d in np.ndenumerate(mesh.devices)
    }
    here = jax.process_index()
    return sum(p[-1] == here for p in positions), len({p[:-1] for p in positions})


@_jax.api_boundary
def process_array(result: Any, *, whole: bool = False) -> Any:
    """This process's part of global arrays, as NumPy arrays: the inverse of :func:`global_array`.

    A dimension that is split between processes has the elements on the devices of this process, in
    their order; other dimensions are whole. (JAX refuses ``np.asarray`` of an array that is not
    whole here.)

    Args:
      result: a ``jax.Array``, or a pytree of them: results of an xmapped function, a training
      state.
      whole: give the whole arrays instead.  Each process then gathers all parts, so all processes
        of the mesh must make the call, and each needs memory for all of it.

    Returns:
      For each array a NumPy array (for typed PRNG keys a JAX array of keys on this process); other
      leaves as they are.

    Raises:
      ValueError: the devices of this process hold no rectangular part of the array, or none at all
        (use ``whole=True`` or ``array.addressable_shards``); or ``whole=True`` for an array without
        a mesh.

    Example:

      >>> import numpy as np
      >>> from xmap_compat import process_array, xmap
      >>> process_array(xmap(lambda x: x + 1, ["batch"], ["batch"])(np.arange(3)))  # one process has all of it
      array([1, 2, 3], dtype=int32)

      ``np.save(f"part{jax.process_index()}.npy", process_array(result))`` writes the part of each
      process.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _own_part(leaf, path, whole), result)


def _own_part(leaf: Any, path: Sequence[Any], whole: bool) -> Any:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return leaf
    where = argument_path(path, "result")
    if whole and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        leaf = _gathered(leaf, where)
    if _jax.is_key(leaf):
        words = {bounds: jax.random.key_data(data) for bounds, data in _shards(leaf).items()}
        parts = {
            (*bounds, (0, data.shape[-1])): data for bounds, data in words.items()
        }  # the words are a dimension
        return jax.random.wrap_key_data(_block(parts, leaf, where), impl=jax.random.key_impl(leaf))
    return _block(_shards(leaf), leaf, where)


def _gathered(leaf, where):
    """The array, whole on every device of its mesh."""
    if not isinstance(leaf.sharding, jax.sharding.NamedSharding):
        raise _no_mesh_to_gather_over(where, leaf.sharding)
    everywhere = jax.sharding.NamedSharding(leaf.sharding.mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda x: x, out_shardings=everywhere)(leaf)


def _shards(leaf):
    """The parts on this process: ``{((start, stop), ...): data}``; a part that several devices hold
    occurs once.
    """
    return {
        tuple(k.indices(size)[:2] for k, size in zip(shard.index, leaf.shape)): shard.data
        for shard in leaf.addressable_shards
    }


def _block(
    parts: Mapping[tuple[tuple[int, int], ...], Any], leaf: jax.Array, where: str
) -> np.ndarray:
    """Put parts together along each dimension, in the order of their positions."""
    if not parts:
        raise _no_part_here(where, jax.process_index())
    edges = [sorted(set(of_dim)) for of_dim in zip(*parts)]
    if len(parts) != math.prod(map(len, edges)):
        raise _parts_are_no_block(where, leaf.sharding)
    blocks = np.empty([len(e) for e in edges], dtype=object)
    for bounds, data in parts.items():
        blocks[tuple(e.index(b) for e, b in zip(edges, bounds))] = np.asarray(data)
    return np.block(blocks.tolist())


# ----------------------------------------------------------------------------- messages


def _process_without_devices(process: int, mesh: Any) -> ValueError:
    return ValueError(
        f"Process {process} has no device on the mesh ({axes_text(mesh.shape)}), so it holds no part of an array. "
        "Include devices of all processes, or call global_array only in those that the mesh includes"
    )


def _no_part_here(path: str, process: int) -> ValueError:
    return ValueError(
        f"{path} has no part on devices of process {process}. Ask for it in processes of its mesh only"
    )


def _parts_are_no_block(path: str, sharding: Any) -> ValueError:
    return ValueError(
        f"The parts of {path} in this process ({sharding}) are no block of rows and columns. Take them one by one from "
        "array.addressable_shards, or take the whole array in every process: process_array(array, whole=True)"
    )


def _no_mesh_to_gather_over(path: str, sharding: Any) -> ValueError:
    return ValueError(
        f"{path} has {sharding}, but process_array(whole=True) gathers arrays that lie on a mesh. Put it on one, by "
        "jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))"
    )
