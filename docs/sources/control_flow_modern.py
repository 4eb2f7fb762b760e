"""relax as a program for plain JAX: call mapped_relax.

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

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("x",))


def split_positions(axes):
    """The positions among axes, and the rest."""
    axes = axes if isinstance(axes, tuple) else (axes,)
    return tuple(a for a in axes if isinstance(a, int)), tuple(a for a in axes if not isinstance(a, int))


def max_over(x, axes):
    """The maximum over axes and positions, with a derivative, which lax.pmax does not have."""
    return jax.tree.map(lambda a: extremum(lax.pmax, a, axes), x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 2))
def extremum(over, x, axes):
    positions, names = split_positions(axes)
    return over(x.max(positions) if over is lax.pmax else x.min(positions), names)


@extremum.defjvp
def extremum_jvp(over, axes, primals, tangents):
    """Ties share the derivative."""
    (x,), (dx,) = primals, tangents
    positions, names = split_positions(axes)
    found = extremum(over, x, axes)
    ties = (x == jnp.expand_dims(found, positions)).astype(x.dtype)
    return found, lax.psum((ties * dx).sum(positions), names) / lax.psum(ties.sum(positions), names)


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


def per_device(x, forces):
    """What each device computes from its parts of the arguments."""
    x = jnp.squeeze(x, 0)
    result = relax(x, forces)
    return jax.tree.map(jnp.expand_dims, result, (0, ()))


@jax.jit
def mapped_relax(x, forces):
    """x: f32[8], forces: f32[3] -> f32[8], f32[3]."""
    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=(P("x"), P()), out_specs=(P("x"), P()))
    return mapped(x, forces)
