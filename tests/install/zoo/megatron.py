"""A Megatron trainer of 2022: shards of a feed-forward block by xmap, parameters and the state of optax placed by pjit,
parameter trees in the manner of haiku."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
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


schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-2, warmup_steps=2, decay_steps=8)
optimizer = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.scale_by_adam(b2=0.99),
    optax.add_decayed_weights(1e-2, mask=lambda params: jax.tree_map(lambda p: p.ndim > 1, params)),
    optax.scale_by_schedule(schedule),
    optax.scale(-1.0),
)


def apply(params, grads, state):
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def place(tree):
    """Shards of parameters and of what belongs to them; counters are everywhere."""
    return jax.tree_map(lambda leaf: P("mp") if getattr(leaf, "ndim", 0) else P(), tree)


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
    losses = []
    with mesh:
        shapes = jax.eval_shape(init, jax.random.PRNGKey(3))
        specs = place(shapes)
        state_specs = place(jax.eval_shape(optimizer.init, shapes))
        params = pjit(init, in_shardings=None, out_shardings=specs)(jax.random.PRNGKey(3))
        state = pjit(optimizer.init, in_shardings=(specs,), out_shardings=state_specs)(params)
        update = functools.partial(pjit, donate_argnums=())(
            apply, in_shardings=(specs, specs, state_specs), out_shardings=(specs, state_specs)
        )
        for _ in range(4):
            value, grads = gradients(params, x, y)
            params, state = update(params, grads, state)
            losses.append(float(value))
    sums = safe_map(lambda leaf: float(jnp.sum(leaf)), jax.tree_leaves(params))
    counts = [int(leaf) for leaf in jax.tree_leaves(state) if leaf.ndim == 0]
    norms = [float(optax.global_norm(tree)) for tree in (grads, params)]
    print(
        json.dumps(
            {
                "losses": losses,
                "sums": [a for a, _ in safe_zip(sums, sums)],
                "counts": counts,
                "norms": norms,
            }
        )
    )


if __name__ == "__main__":
    main()
