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
from xmap_compat.core.mesh import devices_of
from xmap_compat.core.placement import current_scope, parse_axis_resources, place_axes
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
    paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(local)
    paths = [argument_path(path, "local") for path, _ in paths_and_leaves]
    leaves = [_with_a_shape(leaf) for _, leaf in paths_and_leaves]
    declared = parse_specs("in_axes", in_axes)
    specs = broadcast_specs("in_axes", declared, local, in_axes, root="local")
    for spec, leaf, path in zip(specs, leaves, paths):
        check_argument(spec, leaf.shape, path, is_scalar=False)
    scope = current_scope()
    names = spec_names(specs)
    resources = _of_names(parse_axis_resources(axis_resources), names)
    sizes = _of_names(parse_axis_sizes(axis_sizes), names)
    if scope.mesh is not None:
        _check_that_this_process_has_a_device(scope.mesh)
    shapes = []
    for spec, leaf in zip(specs, leaves):
        shapes.append(_global_shape(spec, leaf.shape, resources, scope.mesh, sizes))
    placements = place_axes(infer_sizes(specs, shapes, paths, sizes), resources, scope)
    if scope.mesh is None:
        return jax.device_put(local)
    arrays = []
    for spec, leaf, shape in zip(specs, leaves, shapes):
        sharding = jax.sharding.NamedSharding(scope.mesh, partition_spec(spec, placements))
        arrays.append(jax.make_array_from_process_local_data(sharding, leaf, shape))
    return jax.tree.unflatten(tree, arrays)


def _with_a_shape(leaf):
    if hasattr(leaf, "shape"):
        return leaf
    return np.asarray(leaf)


def _of_names(mapping, names):
    """The entries of some axes."""
    return {name: value for name, value in mapping.items() if name in names}


def _check_that_this_process_has_a_device(mesh):
    if not isinstance(mesh, jax.sharding.Mesh):
        raise should_be("The mesh in scope of global_array", "a Mesh of devices", mesh)
    here = jax.process_index()
    for device in devices_of(mesh):
        if device.process_index == here:
            return
    raise _process_without_devices(here, mesh)


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
    here = set()
    everywhere = set()
    for index, device in np.ndenumerate(mesh.devices):
        position = tuple(index[k] for k in dims)
        everywhere.add(position)
        if device.process_index == jax.process_index():
            here.add(position)
    return len(here), len(everywhere)


@_jax.api_boundary
def process_array(result: Any) -> Any:
    """This process's part of global arrays, as NumPy arrays: the inverse of :func:`global_array`.

    A dimension that is split between processes has the elements on the devices of this process, in
    their order; other dimensions are whole. (JAX refuses ``np.asarray`` of an array that is not
    whole here.)

    Args:
      result: a ``jax.Array``, or a pytree of them: results of an xmapped function, a training
        state.

    Returns:
      For each array a NumPy array (for typed PRNG keys a JAX array of keys on this process); other
      leaves as they are.

    Raises:
      ValueError: the devices of this process hold no rectangular part of the array, or none at all
        (use ``array.addressable_shards``, or gather the whole array in every process, by
        ``jax.experimental.multihost_utils.process_allgather(array, tiled=True)``).

    Example:

      >>> import numpy as np
      >>> from xmap_compat import process_array, xmap
      >>> f = xmap(lambda x: x + 1, ["batch"], ["batch"])
      >>> process_array(f(np.arange(3)))  # one process has all of it
      array([1, 2, 3], dtype=int32)

      ``np.save(f"part{jax.process_index()}.npy", process_array(result))`` writes the part of each
      process.
    """

    def own_part(path, leaf):
        return _own_part(leaf, path)

    return jax.tree_util.tree_map_with_path(own_part, result)


def _own_part(leaf: Any, path: Sequence[Any]) -> Any:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return leaf
    where = argument_path(path, "result")
    if _jax.is_key(leaf):
        words = {}
        for bounds, keys in _shards(leaf).items():
            data = jax.random.key_data(keys)
            # The words of a key are one dimension more.
            words[*bounds, (0, data.shape[-1])] = data
        block = _block(words, leaf, where)
        return jax.random.wrap_key_data(block, impl=jax.random.key_impl(leaf))
    return _block(_shards(leaf), leaf, where)


def _shards(leaf):
    """The parts on this process: ``{((start, stop), ...): data}``; a part that several devices hold
    occurs once.
    """
    parts = {}
    for shard in leaf.addressable_shards:
        bounds = []
        for part, size in zip(shard.index, leaf.shape):
            start, stop, _ = part.indices(size)
            bounds.append((start, stop))
        parts[tuple(bounds)] = shard.data
    return parts


def _block(
    parts: Mapping[tuple[tuple[int, int], ...], Any], leaf: jax.Array, where: str
) -> np.ndarray:
    """Put parts together along each dimension, in the order of their positions."""
    if not parts:
        raise _no_part_here(where, jax.process_index())
    # Along each dimension: [(0, 2), (2, 4)].
    edges = [sorted(set(bounds)) for bounds in zip(*parts)]
    counts = [len(bounds) for bounds in edges]
    if len(parts) != math.prod(counts):
        raise _parts_are_no_block(where, leaf.sharding)
    blocks = np.empty(counts, dtype=object)
    for bounds, data in parts.items():
        position = tuple(e.index(b) for e, b in zip(edges, bounds))
        blocks[position] = np.asarray(data)
    return np.block(blocks.tolist())


# ----------------------------------------------------------------------------- messages


def _process_without_devices(process: int, mesh: Any) -> ValueError:
    return ValueError(
        f"Process {process} has no device on the mesh ({axes_text(mesh.shape)}), so it holds no "
        "part of an array. Include devices of all processes, or call global_array only in those "
        "that the mesh includes"
    )


def _no_part_here(path: str, process: int) -> ValueError:
    return ValueError(
        f"{path} has no part on devices of process {process}. "
        "Ask for it in processes of its mesh only"
    )


def _parts_are_no_block(path: str, sharding: Any) -> ValueError:
    return ValueError(
        f"The parts of {path} in this process ({sharding}) are no block of rows and columns. "
        "Take them one by one from array.addressable_shards, or take the whole array in every "
        "process: jax.experimental.multihost_utils.process_allgather(array, tiled=True)"
    )
