"""Train a transformer block as in Megatron-LM: heads and hidden units over one mesh axis, the batch over another.

The block is written for one sequence, one head and one shard of the hidden units.  Two functions with gradient
rules of their own stand where the shards part and meet: ``copy_to`` (identity forward, psum backward) and
``reduce_from`` (psum forward, identity backward).  The gradient is taken from outside, of the xmapped loss.
The block learns to reverse sequences of digits; under every assignment its losses must be those of the same
block in plain JAX on whole arrays.

    python examples/megatron.py [--steps 60]
"""

import argparse
import functools
import os
import sys
import time

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import mesh, xmap

# Eight fake devices share few cores: every program is waited for before the next begins.
jax.config.update("jax_cpu_enable_async_dispatch", False)

DIGITS, LENGTH, BATCH = 10, 6, 32
FEATURES, HEADS, DEPTH, SHARDS, UNITS = 32, 4, 8, 4, 32
LEARNING_RATE = 0.01
MAX_LOSS, MAX_DIFFERENCE = 0.2, 1e-3

# The only thing that changes between the runs.  Heads and shards may share an axis: no array has both.
RUNS = {
    "one device": {},
    "batch over 8 devices": {"batch": ("data", "model")},
    "batch over 2, heads and hidden units over 4": {
        "batch": "data",
        "heads": "model",
        "shards": "model",
    },
}

# Which dimension of which array is which axis; what is not named is whole in every sequence, head and shard.
PARAMS = {
    "digits": [...],  # f32[digits, features]
    "positions": [...],  # f32[length, features]
    "query_key_value": ["heads", ...],  # f32[heads, 3, features, depth]
    "attention_out": ["heads", ...],  # f32[heads, depth, features]
    "hidden_in": ["shards", ...],  # f32[shards, features, units]
    "hidden_bias": ["shards", ...],  # f32[shards, units]
    "hidden_out": ["shards", ...],  # f32[shards, units, features]
    "logits": [...],  # f32[features, digits]
}
SEQUENCES = ["batch", ...]  # i32[batch, length]


# -------------------------------------------------------------- the Megatron pair, f and g


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def copy_to(x, axis):
    """The same ``x`` for each element of an axis; their cotangents are summed."""
    return x


copy_to.defvjp(lambda x, axis: (x, None), lambda axis, _, ct: (lax.psum(ct, axis),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def reduce_from(x, axis):
    """The sum over an axis; each element gets its cotangent as it is."""
    return lax.psum(x, axis)


reduce_from.defvjp(lambda x, axis: (lax.psum(x, axis), None), lambda axis, _, ct: (ct,))


# ---------------------------------------------------- the block, for one sequence, head and shard


def normalize(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(params, x):
    """One head's part of f32[length, features], summed over the heads."""
    query, key, value = copy_to(x, "heads") @ params["query_key_value"]
    weights = jax.nn.softmax(query @ key.T / np.sqrt(DEPTH))
    return reduce_from(weights @ value @ params["attention_out"], "heads")


def hidden_layer(params, x):
    """One shard's part of f32[length, features], summed over the shards."""
    hidden = jax.nn.gelu(copy_to(x, "shards") @ params["hidden_in"] + params["hidden_bias"])
    return reduce_from(hidden @ params["hidden_out"], "shards")


def named_loss(params, sequence):
    """The mean cross-entropy over the batch."""
    x = params["digits"][sequence] + params["positions"]
    x = x + attention(params, normalize(x))
    x = x + hidden_layer(params, normalize(x))
    log_probabilities = jax.nn.log_softmax(normalize(x) @ params["logits"])
    target = jax.nn.one_hot(sequence[::-1], DIGITS)
    return -lax.pmean(jnp.sum(target * log_probabilities) / LENGTH, "batch")


# --------------------------------------------------------------- the block on whole arrays


def positional_loss(params, sequences):
    """The same in plain JAX: no names, no rules, each letter a dimension."""
    x = params["digits"][sequences] + params["positions"]
    query, key, value = jnp.einsum("blf,hcfd->cbhld", normalize(x), params["query_key_value"])
    weights = jax.nn.softmax(jnp.einsum("bhld,bhmd->bhlm", query, key) / np.sqrt(DEPTH))
    x = x + jnp.einsum("bhlm,bhmd,hdf->blf", weights, value, params["attention_out"])
    hidden = jnp.einsum("blf,sfu->blsu", normalize(x), params["hidden_in"]) + params["hidden_bias"]
    x = x + jnp.einsum("blsu,suf->blf", jax.nn.gelu(hidden), params["hidden_out"])
    log_probabilities = jax.nn.log_softmax(normalize(x) @ params["logits"])
    target = jax.nn.one_hot(sequences[:, ::-1], DIGITS)
    return -jnp.mean(jnp.sum(target * log_probabilities, -1))


# ------------------------------------------------------------------------------- training


def init_params():
    rng = np.random.default_rng(0)

    def normal(*shape, fan_in):
        return rng.normal(0, fan_in**-0.5, shape).astype(np.float32)

    return {
        "digits": normal(DIGITS, FEATURES, fan_in=1),
        "positions": normal(LENGTH, FEATURES, fan_in=1),
        "query_key_value": normal(HEADS, 3, FEATURES, DEPTH, fan_in=FEATURES),
        "attention_out": normal(HEADS, DEPTH, FEATURES, fan_in=HEADS * DEPTH),
        "hidden_in": normal(SHARDS, FEATURES, UNITS, fan_in=FEATURES),
        "hidden_bias": np.zeros((SHARDS, UNITS), np.float32),
        "hidden_out": normal(SHARDS, UNITS, FEATURES, fan_in=SHARDS * UNITS),
        "logits": normal(FEATURES, DIGITS, fan_in=FEATURES),
    }


def adam(params, grads, means, squares, step):
    """One step of Adam with its usual constants."""
    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, grads)
    squares = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g**2, squares, grads)
    rate = LEARNING_RATE * jnp.sqrt(1 - 0.99**step) / (1 - 0.9**step)
    return (
        jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-6), params, means, squares),
        means,
        squares,
    )


def train(loss, steps):
    """The loss of each step, and the trained parameters."""

    @jax.jit
    def train_step(params, means, squares, step, sequences):
        value, grads = jax.value_and_grad(loss)(params, sequences)
        return *adam(params, grads, means, squares, step), value

    params = init_params()
    means = squares = jax.tree.map(np.zeros_like, params)
    losses = []
    for step in range(1, steps + 1):
        sequences = (
            np.random.default_rng(step).integers(DIGITS, size=(BATCH, LENGTH)).astype(np.int32)
        )
        params, means, squares, value = jax.block_until_ready(
            train_step(params, means, squares, np.float32(step), sequences)
        )
        losses.append(float(value))
        if step % max(steps // 4, 1) == 0:
            print(f"  step {step:4d}  loss {losses[-1]:.4f}")
    return np.array(losses), params


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="training steps of each run")
    steps = max(parser.parse_args().steps, 1)
    print("plain JAX")
    expected, _ = train(positional_loss, steps)
    differences = []
    with mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model")):
        for title, resources in RUNS.items():
            print(f"{title}: axis_resources={resources}")
            begin = time.perf_counter()
            losses, params = train(
                xmap(named_loss, (PARAMS, SEQUENCES), {}, axis_resources=resources), steps
            )
            differences.append(np.abs(losses - expected).max())
            part = params["hidden_in"].addressable_shards[0].data.shape
            print(f"  hidden_in: parts of {part}  ({time.perf_counter() - begin:.1f} s)")
    print(f"largest difference from the losses of plain JAX: {max(differences):.1e}")
    if expected[-1] < MAX_LOSS and max(differences) <= MAX_DIFFERENCE:
        print(f"passed: {max(differences):.1e} <= {MAX_DIFFERENCE}")
        return 0
    print(f"FAILED: want a last loss under {MAX_LOSS} and a difference of at most {MAX_DIFFERENCE}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
