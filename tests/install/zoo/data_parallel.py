"""Data-parallel training of a small network, as it was written in 2021: flax-like parameter trees, host_id, and an axis
for the batch."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax import config, lax, tree_map
from jax.experimental.maps import xmap
from jax.lib import xla_bridge
from jax.sharding import Mesh

config.update("jax_threefry_partitionable", True)
BATCH, WIDTH = 16, 6


def init(key):
    first, second = jax.random.split(key)
    return {
        "hidden": {"kernel": jax.random.normal(first, (4, WIDTH)) * 0.5, "bias": jnp.zeros(WIDTH)},
        "output": {"kernel": jax.random.normal(second, (WIDTH, 1)) * 0.5, "bias": jnp.zeros(1)},
    }


def apply(params, x):
    x = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return (x @ params["output"]["kernel"] + params["output"]["bias"])[..., 0]


class Momentum:
    """An optimizer over trees, in the manner of the time."""

    def __init__(self, rate, decay):
        self.rate, self.decay = rate, decay

    def init(self, params):
        return jax.tree_map(jnp.zeros_like, params)

    def apply_gradient(self, params, state, grads):
        state = tree_map(lambda m, g: self.decay * m + g, state, grads)
        return jax.tree_map(lambda p, m: p - self.rate * m, params, state), state


optimizer = Momentum(0.1, 0.9)


def train_step(params, state, x, y):
    def loss(params):
        return (apply(params, x) - y) ** 2

    value, grads = jax.value_and_grad(loss)(params)
    grads = tree_map(functools.partial(lax.pmean, axis_name="batch"), grads)
    params, state = optimizer.apply_gradient(params, state, grads)
    return params, state, lax.pmean(value, "batch")


def main():
    assert jax.process_index() == 0 and jax.host_id() == 0 and jax.host_count() == 1
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, 4)).astype(np.float32)
    y = np.sin(x.sum(axis=1))
    params = init(jax.random.PRNGKey(0))
    state = optimizer.init(params)
    step = xmap(
        train_step,
        in_axes=({}, {}, ["batch", ...], ["batch"]),
        out_axes=({}, {}, {}),
        axis_resources={"batch": "data"},
    )
    losses = []
    with Mesh(np.array(jax.devices()), ("data",)):
        for _ in range(5):
            params, state, value = step(params, state, x, y)
            losses.append(float(value))
    leaves, treedef = jax.tree_flatten(params)
    assert treedef == jax.tree_structure(state)
    print(
        json.dumps(
            {
                "platform": xla_bridge.get_backend().platform,
                "losses": losses,
                "norm": float(sum(jnp.sum(leaf**2) for leaf in jax.tree_leaves(params))),
                "leaves": len(leaves),
            }
        )
    )


if __name__ == "__main__":
    main()
