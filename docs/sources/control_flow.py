"""Collectives in a scan, in branches and in a loop, in which all elements agree."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import Mesh, xmap


def relax(x, forces):
    def step(x, force):
        mean = lax.pmean(x, "i")
        x = lax.cond(lax.psum(force * x, "i") > 0, lambda v: v - mean, lambda v: v * jnp.cos(mean), x)
        return x + 0.1 * force, lax.psum(x**2, "i")

    x, energies = lax.scan(step, x, forces)
    turns, _ = lax.while_loop(
        lambda c: lax.pmax(jnp.abs(c[1]), "i") > 1e-2, lambda c: (c[0] + 1, c[1] / 2), (0, lax.stop_gradient(x))
    )
    return x * turns, energies


def example():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    f = xmap(relax, (["i"], [...]), (["i"], [...]), axis_resources={"i": "x"})
    return f, (normal(8), normal(3)), Mesh(np.array(jax.devices()[:8]), ("x",))
