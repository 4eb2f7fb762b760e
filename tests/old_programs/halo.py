"""Heat in a rod: each block of points exchanges its ends with its neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.maps import Mesh, xmap
from jax.lax import ppermute, psum

BLOCKS = 8
RIGHT = [(k, (k + 1) % BLOCKS) for k in range(BLOCKS)]
LEFT = [(b, a) for a, b in RIGHT]


def with_halo(u):
    """A block between the last point of its left neighbour and the first of its right one."""
    left, right = ppermute(u[-1:], "block", RIGHT), ppermute(u[:1], "block", LEFT)
    return jnp.concatenate([left, u, right])


def step(u, alpha):
    padded = with_halo(u)
    new = u + alpha * (padded[2:] - 2 * u + padded[:-2])
    return new, psum(jnp.sum(jnp.abs(new - u)), "block")


spread = xmap(
    step, in_axes=(["block", ...], {}), out_axes=(["block", ...], {}), axis_resources={"block": "x"}
)


def simulate(u, alpha, steps):
    def body(u, _):
        u, change = spread(u, alpha)
        return u, change

    return jax.lax.scan(body, u, None, length=steps)


if __name__ == "__main__":
    u = np.random.default_rng(3).uniform(size=(BLOCKS, 5)).astype(np.float32)
    with Mesh(np.array(jax.devices()[:4]), ("x",)):  # two blocks on each device
        final, changes = jax.jit(simulate, static_argnums=2)(u, 0.25, 6)
        d_alpha = jax.grad(lambda alpha: jnp.sum(simulate(u, alpha, 2)[0] ** 2))(0.25)
    flat = u.reshape(-1).astype(np.float64)
    for _ in range(6):
        flat = flat + 0.25 * (np.roll(flat, -1) - 2 * flat + np.roll(flat, 1))
    np.testing.assert_allclose(np.reshape(final, -1), flat, rtol=1e-4)

    def energy(alpha):
        v = u.reshape(-1).astype(np.float64)
        for _ in range(2):
            v = v + alpha * (np.roll(v, -1) - 2 * v + np.roll(v, 1))
        return np.sum(v**2)

    np.testing.assert_allclose(d_alpha, (energy(0.251) - energy(0.249)) / 0.002, rtol=1e-3)
    print("changes", changes)
