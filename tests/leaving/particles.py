"""Particles that attract each other; positions are put on the devices once, and stay there."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.maps import Mesh, xmap
from jax.sharding import NamedSharding, PartitionSpec

DT, EPS = 0.01, 1e-2


def acceleration(mine, others, masses):
    d = others - mine
    return (masses[:, None] * d / (jnp.sum(d * d, -1, keepdims=True) + EPS) ** 1.5).sum(0)


@partial(
    xmap,
    in_axes=(["particles", ...], ["particles", ...], ["particles"]),
    out_axes=(["particles", ...], ["particles", ...], {}),
    axis_resources={"particles": "d"},
)
def leapfrog(x, v, m):
    others, masses = lax.all_gather(x, "particles"), lax.all_gather(m, "particles")
    v = v + DT * acceleration(x, others, masses)
    energy = lax.psum(0.5 * m * jnp.sum(v * v), "particles")
    return x + DT * v, v, energy


def reference(x, v, m):
    v = v + DT * jax.vmap(lambda mine: acceleration(mine, x, m))(x)
    return x + DT * v, v, 0.5 * jnp.sum(m[:, None] * v * v)


def main():
    rng = np.random.default_rng(1)
    start = (
        rng.normal(size=(16, 2)).astype(np.float32),
        np.zeros((16, 2), np.float32),
        rng.uniform(1, 2, 16).astype(np.float32),
    )
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    x, v, m = (jax.device_put(a, NamedSharding(mesh, PartitionSpec("d"))) for a in start)
    a, b, _ = start
    with mesh:
        for _ in range(4):
            x, v, energy = leapfrog(x, v, m)
            a, b, expected = reference(a, b, m)
    print("energy", energy)
    np.testing.assert_allclose(x, a, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(energy, expected, rtol=1e-4)


main()
