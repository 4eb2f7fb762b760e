"""layers as a program for plain JAX: call mapped_layers.

What changed in the functions:

  megatron.py:24  lax.psum(ct, axis)
               -> lax.psum(ct, axes_of(axis))
  megatron.py:33  lax.psum(x, axis)
               -> lax.psum(x, axes_of(axis))
  megatron.py:37  lax.psum(x, axis)
               -> lax.psum(x, axes_of(axis))
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
AXES = {"shards": ("model",), "batch": ("data", "batch_local")}


def axes_of(names):
    """What executes a named axis, or several of them; a position stays, and None, which stands for all of them."""
    if names is None or isinstance(names, int):
        return names
    names = names if isinstance(names, (tuple, list)) else (names,)
    return tuple(axis for name in names for axis in AXES.get(name, (name,)))


def backward_over(rule, axes, cotangents=None, results=None):
    """A backward rule that sums over axes by itself, for cotangents that stand for all elements of an axis.

    Args:
      axes: or a function of the arguments that are not differentiated.
      cotangents: what is made of the rule's cotangents and the axes first.
      results: what is made of its results and the axes.
    """

    def backward(*args):
        *nondiff, residuals, given = args
        names = axes(*nondiff) if callable(axes) else axes
        found = rule(*nondiff, residuals, cotangents(given, names) if cotangents else given)
        return results(found, names) if results else found

    return backward


def at_first(tree, axes):
    """Arrays that are zero but for the first element along axes."""
    first = sum(map(lax.axis_index, axes)) == 0
    return jax.tree.map(lambda x: jnp.where(first, x, jnp.zeros_like(x)), tree)


def as_varying(tree, axes):
    """Arrays that are equal along axes of the mesh, of the type of those that differ."""
    return jax.tree.map(lambda x: lax.pcast(x, axes, to="varying"), tree)


def at_leaves(function, entries, tree):
    """A function of each leaf of a pytree, and of its entry in a prefix of this: a dimension, or None."""
    full = jax.tree.broadcast(entries, tree, is_leaf=lambda x: x is None)
    return jax.tree.map(lambda k, x: function(x, k), full, tree, is_leaf=lambda x: x is None)


def one_element(function, in_axes=0, out_axes=0):
    """jax.vmap over axes that fill axes of the mesh, so that a device has one element, whose dimension is removed."""

    def mapped(*args):
        found = function(*at_leaves(lambda x, k: x if k is None else jnp.squeeze(x, k), in_axes, args))
        return at_leaves(lambda x, k: x if k is None else jnp.expand_dims(x, k), out_axes, found)

    return mapped


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def copy_to(x, axis):
    """The same ``x`` for each element of an axis; their cotangents are summed."""
    return x


def copy_fwd(x, axis):
    return x, None


def copy_bwd(axis, _, ct):
    return (lax.psum(ct, axes_of(axis)),)


copy_to.defvjp(copy_fwd, backward_over(copy_bwd, ("model",), cotangents=at_first))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def reduce_from(x, axis):
    """The sum over an axis; each element gets its cotangent as it is."""
    return lax.psum(x, axes_of(axis))


def reduce_fwd(x, axis):
    return lax.psum(x, axes_of(axis)), None


def reduce_bwd(axis, _, ct):
    return (ct,)


reduce_from.defvjp(reduce_fwd, backward_over(reduce_bwd, ("model",), results=as_varying))


def layers(params, x):
    hidden = jax.nn.gelu(copy_to(x, "shards") @ params["w_in"] + params["bias"])
    return jnp.tanh(reduce_from(hidden @ params["w_out"], "shards"))


@jax.jit
def mapped_layers(params, x):
    """Arrays: 4 -> 1."""
    mapped = jax.vmap(layers, in_axes=(None, 0), axis_name="batch_local")
    mapped = one_element(mapped, in_axes=(0, None), out_axes=None)
    mapped = jax.shard_map(mapped, mesh=mesh, in_specs=(P("model"), P("data")), out_specs=P("data"))
    return mapped(params, x)
