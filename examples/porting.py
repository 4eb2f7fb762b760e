"""Porting positional code to named code: attention, one axis after the other.

The program begins as a causal multi-head attention layer on whole arrays.  In each step one more axis moves from
positions to names, and each step must have the loss and the gradient of the one before.  When every axis has a name,
``axis_resources`` runs the same function in several ways.

    python examples/porting.py
"""

import argparse
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

from xmap_compat import SerialLoop, mesh, xmap

# Eight fake devices share few cores: every program is waited for before the next begins.
jax.config.update("jax_cpu_enable_async_dispatch", False)

BATCH, TIME, FEATURES, HEADS, DEPTH = 8, 16, 12, 4, 6
MAX_DIFFERENCE = 1e-5


def init_params():
    rng = np.random.default_rng(0)
    shapes = dict.fromkeys(("query", "key", "value"), (FEATURES, HEADS, DEPTH)) | {
        "out": (HEADS, DEPTH, FEATURES)
    }
    return {
        name: rng.normal(0, FEATURES**-0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def load_data():
    """Sequences, and the sequences that they should become: each a running mean."""
    x = np.random.default_rng(1).normal(size=(BATCH, TIME, FEATURES)).astype(np.float32)
    return x, np.cumsum(x, axis=1) / np.arange(1, TIME + 1, dtype=np.float32)[:, None]


# ------------------------------------------------------------------ where it begins: positions only


def positional_loss(params, x, target):
    """x, target: f32[batch, time, features].  Every line must know the order of all dimensions."""
    query = jnp.einsum("btf,fhd->bhtd", x, params["query"])
    key = jnp.einsum("btf,fhd->bhtd", x, params["key"])
    value = jnp.einsum("btf,fhd->bhtd", x, params["value"])
    scores = jnp.einsum("bhtd,bhsd->bhts", query, key) / np.sqrt(DEPTH)
    causal = np.arange(TIME)[:, None] >= np.arange(TIME)
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    seen = jnp.einsum("bhts,bhsd->bhtd", weights, value)
    out = jnp.einsum("bhtd,hdf->btf", seen, params["out"])
    return jnp.mean((out - target) ** 2)


# ------------------------------------------------------------------ step 1: the batch gets a name
# A batch is the easiest: the function is written for one element, and only the loss looks at the others.


def named_batch(params, x, target):
    """x, target: f32[time, features] {batch}."""
    query = jnp.einsum("tf,fhd->htd", x, params["query"])
    key = jnp.einsum("tf,fhd->htd", x, params["key"])
    value = jnp.einsum("tf,fhd->htd", x, params["value"])
    scores = jnp.einsum("htd,hsd->hts", query, key) / np.sqrt(DEPTH)
    causal = np.arange(TIME)[:, None] >= np.arange(TIME)
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    seen = jnp.einsum("hts,hsd->htd", weights, value)
    out = jnp.einsum("htd,hdf->tf", seen, params["out"])
    return lax.pmean(jnp.mean((out - target) ** 2), "batch")


STEP_1 = xmap(named_batch, in_axes=({}, ["batch", ...], ["batch", ...]), out_axes={})


# ------------------------------------------------------------------ step 2: and the heads
# One head at a time.  The sum over heads, which was hidden in "htd,hdf->tf", is said aloud: psum.

HEAD_WEIGHTS = {
    "query": {1: "heads"},
    "key": {1: "heads"},
    "value": {1: "heads"},
    "out": {0: "heads"},
}


def named_heads(params, x, target):
    """x, target: f32[time, features] {batch};  weights: f32[features, depth] {heads}."""
    query, key, value = (x @ params[k] for k in ("query", "key", "value"))
    scores = query @ key.T / np.sqrt(DEPTH)
    causal = np.arange(TIME)[:, None] >= np.arange(TIME)
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    out = lax.psum(weights @ value @ params["out"], "heads")
    return lax.pmean(jnp.mean((out - target) ** 2), "batch")


STEP_2 = xmap(named_heads, in_axes=(HEAD_WEIGHTS, ["batch", ...], ["batch", ...]), out_axes={})


# ------------------------------------------------------------------ step 3: and time, which plays two parts
# Scores have time twice: who looks, and what is looked at.  A name can be there only once, so that the second part
# gets a name of its own, and the sequence is passed once for each.


def named_time(params, x, past, now, then, target):
    """x, target: f32[features] {batch, time};  past: f32[features] {batch, past};  now, then: i32[] {time}, {past}."""
    query = x @ params["query"]
    key, value = past @ params["key"], past @ params["value"]
    scores = jnp.where(now >= then, query @ key / np.sqrt(DEPTH), -jnp.inf)
    weights = jax.nn.softmax(scores, axis="past")
    out = lax.psum(lax.pdot(weights, value, "past") @ params["out"], "heads")
    return lax.pmean(jnp.mean((out - target) ** 2), ("batch", "time"))


STEP_3 = xmap(
    named_time,
    in_axes=(
        HEAD_WEIGHTS,
        ["batch", "time", ...],
        ["batch", "past", ...],
        ["time"],
        ["past"],
        ["batch", "time", ...],
    ),
    out_axes={},
)


# ------------------------------------------------------------------ step 4: and what is left
# Matrix products become contractions over names, and no line knows an order any more.

WEIGHTS = {
    "query": ["features", "heads", "depth"],
    "key": ["features", "heads", "depth"],
    "value": ["features", "heads", "depth"],
    "out": ["heads", "depth", "features"],
}
NAMED_AXES = (
    WEIGHTS,
    ["batch", "time", "features"],
    ["batch", "past", "features"],
    ["time"],
    ["past"],
    ["batch", "time", "features"],
)


def named_error(params, x, past, now, then, target):
    """The squared error of one feature, at one time, in one sequence.  Everything has the shape ()."""
    query = lax.pdot(x, params["query"], "features")
    key = lax.pdot(past, params["key"], "features")
    value = lax.pdot(past, params["value"], "features")
    scores = jnp.where(now >= then, lax.pdot(query, key, "depth") / np.sqrt(DEPTH), -jnp.inf)
    weights = jax.nn.softmax(scores, axis="past")
    seen = lax.pdot(weights, value, "past")
    out = lax.pdot(seen, params["out"], ("heads", "depth"))
    return (out - target) ** 2


def named_loss(params, x, past, now, then, target):
    return lax.pmean(named_error(params, x, past, now, then, target), ("batch", "time", "features"))


STEP_4 = xmap(named_loss, in_axes=NAMED_AXES, out_axes={})


# ------------------------------------------------------------------ and now, on several devices
# Only this table changes.  Each entry was a project of its own for the positional program.

ASSIGNMENTS = {
    "data parallel": {"batch": ("x", "y")},
    "data and tensor parallel": {"batch": "x", "heads": "y"},
    "sequence parallel: who looks": {"time": "x"},
    "sequence parallel: what is looked at": {"past": "x", "batch": "y"},
}


def compare(title, loss, args, expected):
    """The largest difference of a loss and its gradient from those of the positional program."""
    begin = time.perf_counter()
    found = jax.block_until_ready(jax.value_and_grad(loss)(*args))
    differences = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b))), found, expected)
    worst = max(jax.tree.leaves(differences))
    print(
        f"{title:55} loss {found[0]:.6f}  difference {worst:.0e}  ({time.perf_counter() - begin:.1f} s)"
    )
    assert worst <= MAX_DIFFERENCE, f"{title}: {differences}"


def error_in_chunks(*args):
    """The same errors, for a quarter of the times at once: less memory for the scores.

    A looped axis cannot be reduced in the function, so that the mean is taken outside.
    """
    axes = {"batch": "x", "heads": "y", "time": SerialLoop(4)}
    errors = xmap(
        named_error, in_axes=NAMED_AXES, out_axes=["batch", "time", "features"], axis_resources=axes
    )
    return jnp.mean(errors(*args))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.parse_args()

    params = init_params()
    x, target = load_data()
    when = np.arange(TIME)
    once, twice = (params, x, target), (params, x, x, when, when, target)
    expected = jax.value_and_grad(positional_loss)(*once)
    compare("positional", positional_loss, once, expected)
    compare("step 1: batch", STEP_1, once, expected)
    compare("step 2: batch, heads", STEP_2, once, expected)
    compare("step 3: batch, heads, time, past", STEP_3, twice, expected)
    compare("step 4: every axis", STEP_4, twice, expected)

    with mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")):
        for title, resources in ASSIGNMENTS.items():
            loss = xmap(named_loss, in_axes=NAMED_AXES, out_axes={}, axis_resources=resources)
            compare(title, loss, twice, expected)
        compare("the same in chunks of time", error_in_chunks, twice, expected)
        resources = ASSIGNMENTS["data and tensor parallel"]
        plan = xmap(named_loss, in_axes=NAMED_AXES, out_axes={}, axis_resources=resources).plan(
            *twice
        )

    print(f"\n{plan}\n")
    print(f"passed: every difference from the positional program <= {MAX_DIFFERENCE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
