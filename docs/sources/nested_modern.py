"""model as a program for plain JAX: call mapped_model.

What changed in the functions:

  nested.py:13  lax.pmean(scores, "batch")
             -> lax.pmean(scores, "data")
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("data",))


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


def head(weights, x):
    scores = jax.nn.softmax(weights @ x)
    return scores / lax.pmax(lax.stop_gradient(scores), "head") - lax.pmean(scores, "data")


heads = jax.vmap(head, in_axes=(0, None), out_axes=1, axis_name="head")


def model(weights, x):
    return jnp.sum(heads(weights, x) * jnp.arange(1.0, 4.0), axis=-1)


@jax.jit
def mapped_model(weights, x):
    """weights: f32[3,5,4], x: f32[8,4] -> f32[8,5]."""
    mapped = one_element(model, in_axes=(None, 0))
    # Unchecked: with types JAX gives AssertionError.
    mapped = jax.shard_map(mapped, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
    return mapped(weights, x)
