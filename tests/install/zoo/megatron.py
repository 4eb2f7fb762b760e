"""A Megatron trainer of 2022: shards of a feed-forward block by xmap, optimizer state placed by pjit and a
hand-written Adam, parameter trees in the manner of haiku."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.maps import xmap
from jax.experimental.pjit import pjit
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.util import safe_map, safe_zip

jax.config.update("jax_threefry_partitionable", True)
jax.config.update("jax_spmd_mode", "allow_all")
MODEL, INNER, BATCH, SHARDS = 8, 16, 8, 2


@jax.custom_vjp
def enter(x):
    return x


def _enter_fwd(x):
    return x, None


def _enter_bwd(_, ct):
    return (lax.psum(ct, "shard"),)


enter.defvjp(_enter_fwd, _enter_bwd)


@jax.custom_vjp
def leave(x):
    return lax.psum(x, "shard")


def _leave_fwd(x):
    return leave(x), None


def _leave_bwd(_, ct):
    return (ct,)


leave.defvjp(_leave_fwd, _leave_bwd)


def init(key):
    up, down = jax.random.split(key)
    return {
        "mlp/~/up": {"w": jax.random.normal(up, (SHARDS, MODEL, INNER // SHARDS)) * 0.3},
        "mlp/~/down": {"w": jax.random.normal(down, (SHARDS, INNER // SHARDS, MODEL)) * 0.3},
    }


def block(params, x):
    hidden = jax.nn.relu(enter(x) @ params["mlp/~/up"]["w"])
    return x + leave(hidden @ params["mlp/~/down"]["w"])


def step(params, x, y):
    def loss(params):
        return jnp.mean((block(params, x) - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return lax.pmean(value, "batch"), jax.tree_map(lambda g: lax.pmean(g, "batch"), grads)


def adam(grads, state, rate=1e-2):
    count = state["count"] + 1
    mu = jax.tree_map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
    nu = jax.tree_map(lambda n, g: 0.999 * n + 0.001 * g**2, state["nu"], grads)
    scale = rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    return jax.tree_map(lambda m, n: -scale * m / (jnp.sqrt(n) + 1e-8), mu, nu), {"mu": mu, "nu": nu, "count": count}


def main():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("dp", "mp"))
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, BATCH, MODEL)).astype(np.float32)
    gradients = xmap(
        step,
        in_axes=(["shard", ...], ["batch", ...], ["batch", ...]),
        out_axes=({}, ["shard", ...]),
        axis_resources={"batch": "dp", "shard": "mp"},
    )
    update = functools.partial(pjit, donate_argnums=())(
        lambda params, grads, state: (lambda u, s: (jax.tree_map(jnp.add, params, u), s))(*adam(grads, state)),
        in_shardings=(P("mp"), P("mp"), None),
        out_shardings=(P("mp"), None),
    )
    losses = []
    with mesh:
        params = jax.jit(init)(jax.random.PRNGKey(3))
        zeros = jax.tree_map(jnp.zeros_like, params)
        state = {"mu": zeros, "nu": zeros, "count": jnp.zeros((), jnp.int32)}
        for _ in range(4):
            value, grads = gradients(params, x, y)
            params, state = update(params, grads, state)
            losses.append(float(value))
    sums = safe_map(lambda leaf: float(jnp.sum(leaf)), jax.tree_leaves(params))
    print(json.dumps({"losses": losses, "sums": [a for a, _ in safe_zip(sums, sums)], "count": int(state["count"])}))


if __name__ == "__main__":
    main()
