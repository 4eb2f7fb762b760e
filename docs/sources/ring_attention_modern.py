"""ring_attention as a program for plain JAX: call mapped_ring_attention.

What changed in the functions:

  ring_attention.py:12  lax.psum(1, "seq")
                     -> lax.psum(1, ("ring", "seq_local"))
  ring_attention.py:18  lax.ppermute((k, v), "seq", ring)
                     -> ppermute((k, v), ("ring", "seq_local"), ring)
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()[:4]), ("ring",))


def split_axes(axes):
    """The axes of the mesh, in its order, and those of jax.vmap."""
    axes, across = axes if isinstance(axes, tuple) else (axes,), jax.sharding.get_abstract_mesh().axis_names
    return tuple(a for a in across if a in axes), tuple(a for a in axes if a not in across)


def gathered(x, local):
    """An array with a dimension for each axis of jax.vmap: gathering over one moves a dimension and nothing else."""
    for name in reversed(local):
        x = lax.all_gather(x, name)
    return x


def slots(x, local):
    """An array with one dimension for all axes of jax.vmap."""
    return jnp.asarray(gathered(x, local)).reshape(lax.axis_size(local), *jnp.shape(x))


def by_place(x, axes, back=False):
    """The first dimension, in which parts count elements, so that they count devices and the slots on each; or back."""
    axes = axes if isinstance(axes, tuple) else (axes,)
    places = sum(split_axes(axes), ())
    axes, order = (places, axes) if back else (axes, places)
    parts = x.reshape(*map(lax.axis_size, axes), len(x) // lax.axis_size(axes), *x.shape[1:])
    return parts.transpose(*map(axes.index, order), *range(len(axes), parts.ndim)).reshape(x.shape)


def ppermute(x, axis_name, perm):
    """lax.ppermute over axes of the mesh and of jax.vmap; zeros where nothing is sent to.

    Only what changes device travels: one lax.ppermute for each distance between devices.
    """
    across, local = split_axes(axis_name)
    devices, size = lax.axis_size(across), lax.axis_size(local)
    elements = by_place(np.arange(devices * size), axis_name)
    places = {element: divmod(at, size) for at, element in enumerate(elements)}
    order = np.argsort(elements[::size])  # of the devices, as the axes count them
    rank = np.argsort(order)
    rounds: dict = {}
    for source, target in perm:
        (device, slot), (other, place) = places[source], places[target]
        rows = rounds.setdefault((rank[other] - rank[device]) % devices, [[] for _ in range(devices)])
        rows[device].append((slot, place))

    def moved(x):
        block, here = slots(x, local), lax.axis_index(across)
        result = jnp.zeros_like(block)
        for distance, rows in rounds.items():
            # Rows are filled up with moves to a place that does not exist.
            width = max(map(len, rows))
            table = np.array([row + [(0, size)] * (width - len(row)) for row in rows])
            senders = order[(rank - distance) % devices]
            sent = block[jnp.array(table[..., 0])[here]]
            if distance:
                sent = lax.ppermute(sent, across, [(k, to) for to, k in enumerate(senders.tolist()) if rows[k]])
            result = result.at[jnp.array(table[senders, :, 1])[here]].set(sent, mode="drop")
        return result[lax.axis_index(local)]

    return jax.tree.map(moved, x)


def ring_attention(q, k, v):
    n = lax.psum(1, ("ring", "seq_local"))
    ring = [(i, (i + 1) % n) for i in range(n)]

    def turn(carry, _):
        k, v, total, norm = carry
        weight = jnp.exp(q @ k / np.sqrt(q.shape[-1]))
        k, v = ppermute((k, v), ("ring", "seq_local"), ring)
        return (k, v, total + weight * carry[1], norm + weight), None

    start = (k, v, jnp.zeros_like(v), jnp.zeros((), v.dtype))
    (_, _, total, norm), _ = lax.scan(turn, start, None, length=n)
    return total / norm


@jax.jit
def mapped_ring_attention(q, k, v):
    """q: f32[8,4], k: f32[8,4], v: f32[8,5] -> f32[8,5]."""
    mapped = jax.vmap(ring_attention, axis_name="seq_local")
    # Unchecked: types know no collectives over axes of jax.vmap, as "seq_local".
    mapped = jax.shard_map(mapped, mesh=mesh, in_specs=P("ring"), out_specs=P("ring"), check_vma=False)
    return mapped(q, k, v)
