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


def per_device(params, x):
    """What each device computes from its parts of the arguments."""
    params = jax.tree.map(lambda a: jnp.squeeze(a, 0), params)
    mapped = jax.vmap(layers, in_axes=(None, 0), axis_name="batch_local")
    return mapped(params, x)


@jax.jit
def mapped_layers(params, x):
    """Arrays: 4 -> 1."""
    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=(P("model"), P("data")), out_specs=P("data"))
    return mapped(params, x)
