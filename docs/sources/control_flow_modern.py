"""relax as a program for plain JAX: call mapped_relax. Traced and compared, not run: a while loop may never end.

What changed in the functions:

  control_flow.py:13  lax.pmean(x, "i")
                   -> lax.pmean(x, "x")
  control_flow.py:14  lax.psum(force * x, "i")
                   -> lax.psum(force * x, "x")
  control_flow.py:15  lax.psum(x**2, "i")
                   -> lax.psum(x**2, "x")
  control_flow.py:19  lax.pmax(jnp.abs(c[1]), "i")
                   -> max_over(jnp.abs(c[1]), "x")
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("x",))


def split_positions(x, axes):
    """The positions among axes, and the rest; None stands for all dimensions of an array."""
    axes = tuple(range(jnp.ndim(x))) if axes is None else axes if isinstance(axes, tuple) else (axes,)
    return tuple(a for a in axes if isinstance(a, int)), tuple(a for a in axes if not isinstance(a, int))


def reduced(x, axes, over=(jnp.sum, lax.psum)):
    """The sum over positions and axes, or another reduction; positions stay as dimensions of one element."""
    positions, names = split_positions(x, axes)
    return over[1](over[0](x, positions, keepdims=True), names)


def max_over(x, axes, *, over=(jnp.max, lax.pmax)):
    """The maximum over axes and positions, with a derivative, which lax.pmax does not have: ties share it."""

    @jax.custom_jvp
    def extremum(x):
        is_nan = reduced(jnp.isnan(x).astype(x.dtype), axes) > 0  # of several devices, XLA may lose it
        return jnp.where(is_nan, jnp.nan, reduced(x, axes, over))

    @extremum.defjvp
    def derivative(primals, tangents):
        (x,), (dx,) = primals, tangents
        found = extremum(x)
        ties = (x == found).astype(x.dtype)
        return found, reduced(ties * dx, axes) / reduced(ties, axes)

    def one(x):
        found = extremum(x) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else reduced(x, axes, over)
        return found.squeeze(split_positions(x, axes)[0])

    return jax.tree.map(one, x)


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


def relax(x, forces):
    def step(x, force):
        mean = lax.pmean(x, "x")
        x = lax.cond(lax.psum(force * x, "x") > 0, lambda v: v - mean, lambda v: v * jnp.cos(mean), x)
        return x + 0.1 * force, lax.psum(x**2, "x")

    x, energies = lax.scan(step, x, forces)
    turns, _ = lax.while_loop(
        lambda c: max_over(jnp.abs(c[1]), "x") > 1e-2, lambda c: (c[0] + 1, c[1] / 2), (0, lax.stop_gradient(x))
    )
    return x * turns, energies


@jax.jit
def mapped_relax(x, forces):
    """x: f32[8], forces: f32[3] -> f32[8], f32[3]."""
    mapped = one_element(relax, in_axes=(0, None), out_axes=(0, None))
    mapped = jax.shard_map(mapped, mesh=mesh, in_specs=(P("x"), P()), out_specs=(P("x"), P()))
    return mapped(x, forces)
