"""diffuse as a program for plain JAX: call mapped_diffuse.

What changed in the functions:

  halo.py:13  lax.psum(1, name)
           -> lax.psum(1, axes_of(name))
  halo.py:14  lax.ppermute(v, name, [(i, (i + by) % n) for i in range(n)])
           -> ppermute(v, axes_of(name), [(i, (i + by) % n) for i in range(n)])
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
AXES = {"row": ("x", "row"), "column": ("y", "column")}
MESH_AXES = ("x", "y")


def axes_of(names):
    """What executes a named axis, or several of them."""
    names = names if isinstance(names, (tuple, list)) else (names,)
    return tuple(axis for name in names for axis in AXES.get(name, (name,)))


def split_axes(axes):
    """The axes of the mesh and those of jax.vmap."""
    axes = axes if isinstance(axes, tuple) else (axes,)
    across = tuple(axis for axis in axes if axis in MESH_AXES)
    return across, tuple(axis for axis in axes if axis not in MESH_AXES)


def gathered(x, local):
    """An array with a dimension for each axis of jax.vmap: gathering over one moves a dimension and nothing else."""
    for name in reversed(local):
        x = lax.all_gather(x, name)
    return x


def ppermute(x, axis_name, perm):
    """lax.ppermute over axes of the mesh and of jax.vmap; zeros where nothing is sent to.

    Only what changes device travels: one lax.ppermute for each distance between devices.
    """
    across, local = split_axes(axis_name)
    devices, slots = (lax.psum(1, names) if names else 1 for names in (across, local))
    here = lax.axis_index(across) if across else 0
    moves = [(*divmod(source, slots), *divmod(target, slots)) for source, target in perm]
    return jax.tree.map(functools.partial(moved, across, local, devices, slots, here, moves), x)


def moved(across, local, devices, slots, here, moves, x):
    """An array after moves from a device and a slot to a device and a slot."""
    block = gathered(x, local)
    block = block.reshape(slots, *jnp.shape(x))
    result = jnp.zeros_like(block)
    for distance in sorted({(target - source) % devices for source, _, target, _ in moves}):
        chosen = [move for move in moves if (move[2] - move[0]) % devices == distance]
        rows = {device: [(slot, place) for d, slot, _, place in chosen if d == device] for device in range(devices)}
        # Rows are filled up with moves to a place that does not exist.
        width = max(map(len, rows.values()))
        table = np.array([[*row, *[(0, slots)] * (width - len(row))] for row in rows.values()])
        slot, place = np.moveaxis(table, -1, 0)
        sent = block[jnp.asarray(slot)[here]]
        if distance:
            # lax.ppermute counts devices in the order of the mesh.
            order = sorted(across, key=MESH_AXES.index)
            sizes = [lax.psum(1, name) for name in order]
            places = np.arange(devices).reshape(sizes).transpose([order.index(name) for name in across]).ravel()
            pairs = [(int(places[k]), int(places[(k + distance) % devices])) for k in range(devices)]
            sent = lax.ppermute(sent, tuple(order), pairs)
        result = result.at[jnp.asarray(np.roll(place, distance, 0))[here]].set(sent, mode="drop")
    return result[lax.axis_index(local) if local else 0]


def shift(v, name, by):
    n = lax.psum(1, axes_of(name))
    return ppermute(v, axes_of(name), [(i, (i + by) % n) for i in range(n)])


RATE = 1e-1


def diffuse(u):
    around = sum(shift(u, name, by) for name in ("row", "column") for by in (1, -1))
    return u + RATE * (around - 4 * u)


def per_device(u):
    """What each device computes from its parts of the arguments."""
    mapped = jax.vmap(diffuse, axis_name="column")
    mapped = jax.vmap(mapped, axis_name="row")
    return mapped(u)


@jax.jit
def mapped_diffuse(u):
    """u: f32[8,6] -> f32[8,6]."""
    # Unchecked: types know no collectives over axes of jax.vmap, as "row".
    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=False)
    return mapped(u)
