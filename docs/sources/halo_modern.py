"""diffuse as a program for plain JAX: call mapped_diffuse.

What changed in the functions:

  halo.py:13  lax.psum(1, name)
           -> lax.psum(1, axes_of(name))
  halo.py:14  lax.ppermute(v, name, [(i, (i + by) % n) for i in range(n)])
           -> ppermute(v, axes_of(name), [(i, (i + by) % n) for i in range(n)])
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
AXES = {"row": ("x", "row_local"), "column": ("y", "column_local")}


def axes_of(names):
    """What executes a named axis, or several of them; a position stays, and None, which stands for all of them."""
    if names is None or isinstance(names, int):
        return names
    names = names if isinstance(names, (tuple, list)) else (names,)
    return tuple(axis for name in names for axis in AXES.get(name, (name,)))


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


def shift(v, name, by):
    n = lax.psum(1, axes_of(name))
    return ppermute(v, axes_of(name), [(i, (i + by) % n) for i in range(n)])


RATE = 1e-1


def diffuse(u):
    around = sum(shift(u, name, by) for name in ("row", "column") for by in (1, -1))
    return u + RATE * (around - 4 * u)


@jax.jit
def mapped_diffuse(u):
    """u: f32[8,6] -> f32[8,6]."""
    mapped = jax.vmap(diffuse, axis_name="column_local")
    mapped = jax.vmap(mapped, axis_name="row_local")
    # Unchecked: types know no collectives over axes of jax.vmap, as "row_local".
    mapped = jax.shard_map(mapped, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=False)
    return mapped(u)
