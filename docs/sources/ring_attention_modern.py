"""ring_attention as a program for plain JAX: call mapped_ring_attention.

What changed in the functions:

  ring_attention.py:12  lax.psum(1, "seq")
                     -> lax.psum(1, ("ring", "seq"))
  ring_attention.py:18  lax.ppermute((k, v), "seq", ring)
                     -> ppermute((k, v), ("ring", "seq"), ring)
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()[:4]), ("ring",))
MESH_AXES = ("ring",)


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


def ring_attention(q, k, v):
    n = lax.psum(1, ("ring", "seq"))
    ring = [(i, (i + 1) % n) for i in range(n)]

    def turn(carry, _):
        k, v, total, norm = carry
        weight = jnp.exp(q @ k / np.sqrt(q.shape[-1]))
        k, v = ppermute((k, v), ("ring", "seq"), ring)
        return (k, v, total + weight * carry[1], norm + weight), None

    start = (k, v, jnp.zeros_like(v), jnp.zeros((), v.dtype))
    (_, _, total, norm), _ = lax.scan(turn, start, None, length=n)
    return total / norm


def per_device(q, k, v):
    """What each device computes from its parts of the arguments."""
    mapped = jax.vmap(ring_attention, axis_name="seq")
    return mapped(q, k, v)


@jax.jit
def mapped_ring_attention(q, k, v):
    """q: f32[8,4], k: f32[8,4], v: f32[8,5] -> f32[8,5]."""
    # Unchecked: types know no collectives over axes of jax.vmap, as "seq".
    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=P("ring"), out_specs=P("ring"), check_vma=False)
    return mapped(q, k, v)
