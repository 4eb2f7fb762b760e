"""Collectives that JAX lacks, or does otherwise than xmap: functions that an edited program has
beside ``mapped``.

Each is copied as it stands here, with what it needs of the others.  Their axes are axes of the mesh
and of ``jax.vmap``, in the order in which they count elements, the major one first.  A device holds
a slot for each element along the latter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat.tools.leave.mapped import AXES, is_bound


def axes_of(names):
    """What executes a named axis, or several of them; a position stays, and None, which stands for
    all of them.
    """
    if names is None or isinstance(names, int):
        return names
    names = names if isinstance(names, (tuple, list)) else (names,)
    across = (
        jax.sharding.get_abstract_mesh().axis_names
    )  # of such a name, the axis of the mesh is only a part
    unbound = {
        name: AXES[name][0] if name in AXES and name in across else (name,) for name in names
    }
    return tuple(
        axis for name in names for axis in next(filter(is_bound, AXES.get(name, ())), unbound[name])
    )


def _split_axes(axes):
    """The axes of the mesh, in its order, and those of jax.vmap."""
    axes, across = (
        axes if isinstance(axes, tuple) else (axes,),
        jax.sharding.get_abstract_mesh().axis_names,
    )
    return tuple(a for a in across if a in axes), tuple(a for a in axes if a not in across)


def _with_all(x, local):
    """An array with a dimension for each axis of jax.vmap: gathering over one moves a dimension and
    nothing else.
    """
    for name in reversed(local):
        x = lax.all_gather(x, name)
    return x


def _slots(x, local):
    """An array with one dimension for all axes of jax.vmap."""
    return jnp.asarray(_with_all(x, local)).reshape(lax.axis_size(local), *jnp.shape(x))


def _by_place(x, axes, back=False):
    """The first dimension, in which parts count elements, so that they count devices and the slots
    on each; or back.
    """
    axes = axes if isinstance(axes, tuple) else (axes,)
    places = sum(_split_axes(axes), ())
    axes, order = (places, axes) if back else (axes, places)
    parts = x.reshape(*map(lax.axis_size, axes), len(x) // lax.axis_size(axes), *x.shape[1:])
    return parts.transpose(*map(axes.index, order), *range(len(axes), parts.ndim)).reshape(x.shape)


def _own_slot(x, local):
    """The part of an element's slot, of a first dimension in which parts count slots."""
    size = len(x) // lax.axis_size(local)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(local) * size, size)


def _of_trees(collective):
    """A collective over arrays as one over pytrees of them."""

    @functools.wraps(collective)
    def call(x, *args, **options):
        return jax.tree.map(lambda leaf: collective(leaf, *args, **options), x)

    return call


@_of_trees
def all_gather(x, axis_name, axis=0, tiled=False):
    """lax.all_gather over axes of the mesh and of jax.vmap."""
    across, local = _split_axes(axis_name)
    found = _by_place(lax.all_gather(_slots(x, local), across, tiled=True), axis_name, back=True)
    return jnp.concatenate(found, axis) if tiled else jnp.moveaxis(found, 0, axis)


@_of_trees
def psum_scatter(x, axis_name, scatter_dimension=0, tiled=False):
    """lax.psum_scatter over axes of the mesh and of jax.vmap."""
    across, local = _split_axes(axis_name)
    parts = _by_place(jnp.moveaxis(lax.psum(x, local), scatter_dimension, 0), axis_name)
    own = _own_slot(lax.psum_scatter(parts, across, tiled=True), local)
    return jnp.moveaxis(own, 0, scatter_dimension) if tiled else own.squeeze(0)


@_of_trees
def all_to_all(x, axis_name, split_axis, concat_axis, tiled=False):
    """lax.all_to_all over axes of the mesh and of jax.vmap, with the right derivative."""
    across, local = _split_axes(axis_name)
    parts = _by_place(jnp.moveaxis(_slots(x, local), split_axis + 1, 0), axis_name)
    own = _own_slot(lax.all_to_all(parts, across, 0, 1, tiled=True) if across else parts, local)
    found = _by_place(jnp.moveaxis(own, 1, 0), axis_name, back=True)
    if tiled:
        return jnp.concatenate(jnp.moveaxis(found, 1, split_axis + 1), concat_axis)
    return jnp.moveaxis(found.squeeze(1), 0, concat_axis)


def ppermute(x, axis_name, perm):
    """lax.ppermute over axes of the mesh and of jax.vmap; zeros where nothing is sent to.

    Only what changes device is sent: one lax.ppermute for each distance between devices.
    """
    across, local = _split_axes(axis_name)
    devices, size = lax.axis_size(across), lax.axis_size(local)
    elements = _by_place(np.arange(devices * size), axis_name)
    places = {element: divmod(at, size) for at, element in enumerate(elements)}
    order = np.argsort(elements[::size])  # of the devices, as the axes count them
    rank = np.argsort(order)
    rounds: dict = {}
    for source, target in perm:
        (device, slot), (other, place) = places[source], places[target]
        rows = rounds.setdefault(
            (rank[other] - rank[device]) % devices, [[] for _ in range(devices)]
        )
        rows[device].append((slot, place))

    def moved(x):
        block, here = _slots(x, local), lax.axis_index(across)
        result = jnp.zeros_like(block)
        for distance, rows in rounds.items():
            # Rows are filled up with moves to a place that does not exist.
            width = max(map(len, rows))
            table = np.array([row + [(0, size)] * (width - len(row)) for row in rows])
            senders = order[(rank - distance) % devices]
            sent = block[jnp.array(table[..., 0])[here]]
            if distance:
                sent = lax.ppermute(
                    sent, across, [(k, to) for to, k in enumerate(senders.tolist()) if rows[k]]
                )
            result = result.at[jnp.array(table[senders, :, 1])[here]].set(sent, mode="drop")
        return result[lax.axis_index(local)]

    return jax.tree.map(moved, x)


def pdot(
    x,
    y,
    axis_name,
    pos_contract=((), ()),
    pos_batch=((), ()),
    precision=None,
    preferred_element_type=None,
):
    """Contract two arrays over axes and positions (see lax.dot_general): one dot, and one sum over
    the mesh.
    """
    across, local = _split_axes(axis_name)
    x, y = jnp.asarray(x), jnp.asarray(y)
    if preferred_element_type is None:
        x, y = x.astype(jnp.result_type(x, y)), y.astype(jnp.result_type(x, y))
    n = len(local)
    contract = [
        (*range(n), *(d % z.ndim + n for d in dims)) for dims, z in zip(pos_contract, (x, y))
    ]
    batch = [[d % z.ndim + n for d in dims] for dims, z in zip(pos_batch, (x, y))]
    x, y = _with_all(x, local), _with_all(y, local)
    product = lax.dot_general(x, y, (contract, batch), precision, preferred_element_type)
    return lax.psum(product, across) if across else product


def _split_positions(x, axes):
    """The positions among axes, and the rest; None stands for all dimensions of an array."""
    axes = (
        tuple(range(jnp.ndim(x))) if axes is None else axes if isinstance(axes, tuple) else (axes,)
    )
    return tuple(a for a in axes if isinstance(a, int)), tuple(
        a for a in axes if not isinstance(a, int)
    )


def _reduced(x, axes, over=(jnp.sum, lax.psum)):
    """The sum over positions and axes, or another reduction; positions stay as dimensions of one
    element.

    Numbers of 16 bits are added in float32, as jax.numpy does.
    """
    positions, names = _split_positions(x, axes)
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    wide = x.astype(jnp.float32) if is_narrow else x
    return over[1](over[0](wide, positions, keepdims=True), names).astype(x.dtype)


def _top_over(x, axes):
    """The maximum over axes and positions as a constant: JAX has no derivative of lax.pmax."""
    return _reduced(lax.stop_gradient(x), axes, (jnp.max, lax.pmax))


def max_over(x, axes, *, over=(jnp.max, lax.pmax)):
    """The maximum over axes and positions, with a derivative, which lax.pmax does not have: ties
    share it.
    """

    @jax.custom_jvp
    def extremum(x):
        is_nan = (
            _reduced(jnp.isnan(x).astype(x.dtype), axes) > 0
        )  # of several devices, XLA may lose it
        return jnp.where(is_nan, jnp.nan, _reduced(x, axes, over))

    @extremum.defjvp
    def derivative(primals, tangents):
        (x,), (dx,) = primals, tangents
        found = extremum(x)
        ties = (x == found).astype(x.dtype)
        return found, _reduced(ties * dx, axes) / _reduced(ties, axes)

    def one(x):
        found = (
            extremum(x)
            if jnp.issubdtype(jnp.result_type(x), jnp.inexact)
            else _reduced(x, axes, over)
        )
        return found.squeeze(_split_positions(x, axes)[0])

    return jax.tree.map(one, x)


def min_over(x, axes):
    """The minimum over axes and positions, with a derivative, which lax.pmin does not have: ties
    share it.
    """
    return max_over(x, axes, over=(jnp.min, lax.pmin))


def logsumexp_over(x, axes):
    """logsumexp over axes and positions."""
    top = _top_over(x, axes)
    top = jnp.where(jnp.isfinite(top), top, 0)
    return (jnp.log(_reduced(jnp.exp(x - top), axes)) + top).squeeze(_split_positions(x, axes)[0])


def softmax_over(x, axes):
    """softmax over axes and positions."""
    unnormalized = jnp.exp(x - _top_over(x, axes))
    return unnormalized / _reduced(unnormalized, axes)


def log_softmax_over(x, axes):
    """log_softmax over axes and positions."""
    shifted = x - _top_over(x, axes)
    return shifted - jnp.log(_reduced(jnp.exp(shifted), axes))
