"""Layers under a jit with static arguments, in the body of an xmap; linear_util, a layer chosen by a string, and
host_callback imported for debugging that nobody switched on."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import json
import warnings
from functools import partial

warnings.simplefilter("ignore")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import host_callback as hcb
from jax.experimental.maps import xmap
from jax.sharding import Mesh

PRINTER = hcb  # for those who debug
ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh, "none": lambda x: x}


@partial(jax.jit, static_argnames=("names", "eps"))
def normalized(x, names, eps=1e-5):
    mean = lax.pmean(x, names)
    variance = lax.pmean((x - mean) ** 2, names)
    return (x - mean) * lax.rsqrt(variance + eps)


@partial(jax.jit, static_argnums=(0, 1))
def layer(activation, over, w, x):
    y = lax.pdot(x, w, "inputs")
    return ACTIVATIONS[activation](normalized(y, names=over))


def network(activation, over, weights, x, repeat=1):
    fun = xmap(
        partial(layer, activation, over),
        in_axes=(["inputs", "outputs"], ["batch", "inputs"]),
        out_axes=["batch", "outputs"],
    )
    for _ in range(repeat):
        for w in weights:
            x = fun(w, x)
    return x


def loss(weights, activation, x):
    return jnp.mean(network(activation, ("batch", "outputs"), weights, x) ** 2)


def main():
    rng = np.random.default_rng(3)
    weights = [rng.normal(size=(6, 6)).astype(np.float32) for _ in range(2)]
    x = rng.normal(size=(8, 6)).astype(np.float32)
    found = {}
    for activation in ACTIVATIONS:
        for over in ("batch", "outputs", ("batch", "outputs")):
            out = network(activation, over, weights, x, repeat=2)
            found[f"{activation} {over}"] = [float(jnp.sum(out)), float(jnp.sum(out**2))]
    with Mesh(np.array(jax.devices()), ("x",)):
        found["loss"] = [float(loss(weights, name, x)) for name in sorted(ACTIVATIONS)]
    wide, tall = jax.tree_map(np.shape, (weights, x), is_leaf=lambda v: isinstance(v, np.ndarray))
    print(json.dumps({"found": found, "shapes": [list(map(list, wide)), list(tall)]}))


if __name__ == "__main__":
    main()
