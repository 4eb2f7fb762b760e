"""A trainer that assigns its mesh to thread_resources, as forks of GPT-J did, instead of entering it."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import maps
from jax.experimental.maps import xmap
from jax.interpreters import pxla
from jax.sharding import Mesh, PartitionSpec

try:
    from jax.interpreters.pxla import ResourceEnv
except ImportError:
    from jax._src.mesh import ResourceEnv
if hasattr(maps, "ResourceEnv"):
    ResourceEnv = maps.ResourceEnv

WIDTH = 8


def constrain(x, *spec):
    mesh = pxla.thread_resources.env.physical_mesh
    if mesh.empty:
        return x
    return lax.with_sharding_constraint(x, PartitionSpec(*spec))


def loss(w, x, y):
    hidden = jnp.tanh(x @ w["first"])
    return jnp.mean((hidden @ w["second"] - y) ** 2)


@partial(
    xmap,
    in_axes=([...], ["batch", ...], ["batch", ...]),
    out_axes=([...], [...]),
    axis_resources={"batch": ("dp", "mp")},
    donate_argnums=(),
)
def train_step(w, x, y):
    value, slopes = jax.value_and_grad(loss)(w, x, y)
    slopes = lax.pmean(slopes, "batch")
    w = jax.tree_map(lambda p, g: p - 0.2 * g, w, slopes)
    return w, lax.pmean(value, "batch")


@jax.jit
def evaluate(w, x):
    return constrain(jnp.tanh(constrain(x, "dp") @ w["first"]) @ w["second"], "dp")


def main():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("dp", "mp"))
    before = pxla.thread_resources.env
    assert before.physical_mesh.empty
    pxla.thread_resources.env = ResourceEnv(mesh, ())
    assert maps.thread_resources.env.physical_mesh == mesh
    rng = np.random.default_rng(6)
    w = {
        "first": jnp.asarray(rng.normal(size=(3, WIDTH)), jnp.float32),
        "second": jnp.asarray(rng.normal(size=(WIDTH, 1)), jnp.float32),
    }
    x, y = (
        rng.normal(size=(8, 4, 3)).astype(np.float32),
        rng.normal(size=(8, 4, 1)).astype(np.float32),
    )
    losses = []
    for _ in range(4):
        w, value = train_step(w, x, y)
        losses.append(float(value))
    outputs = evaluate(w, x.reshape(32, 3))
    pxla.thread_resources.env = before
    assert pxla.thread_resources.env.physical_mesh.empty
    sizes = [leaf.size for leaf in jax.tree_util.tree_leaves(w)]
    print(
        json.dumps(
            {
                "losses": losses,
                "mean": float(jnp.mean(outputs)),
                "sizes": sizes,
                "on": len(outputs.sharding.device_set),
            }
        )
    )


if __name__ == "__main__":
    main()
