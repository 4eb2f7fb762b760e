"""Sampling with named shapes: parameters, noise for each element, and dropout."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import NamedShape
from jax.experimental.maps import xmap
from jax.sharding import Mesh

jax.config.update("jax_threefry_partitionable", True)
SIZES = {"batch": 8, "features": 4, "units": 6}


def shape(*positional, names=()):
    return NamedShape(*positional, **{name: SIZES[name] for name in names})


def init(key):
    first, second = jax.random.split(key)
    return {
        "kernel": jax.random.truncated_normal(first, -2.0, 2.0, shape(names=("features", "units")))
        * 0.7,
        "bias": jax.random.normal(second, shape(names=("units",))) * 0.1,
    }


def dropout(key, x, rate, names):
    keep = jax.random.bernoulli(key, 1 - rate, shape(names=names))
    return jnp.where(keep, x / (1 - rate), 0.0)


def forward(params, x, key):
    noisy = x + 0.1 * jax.random.truncated_normal(
        key, -2.0, 2.0, shape(names=("batch", "features"))
    )
    hidden = jnp.tanh(lax.pdot(noisy, params["kernel"], "features") + params["bias"])
    hidden = dropout(jax.random.fold_in(key, 1), hidden, 0.25, ("batch", "units"))
    jitter = jax.random.uniform(key, shape(3, names=("batch",)), minval=-1.0, maxval=1.0)
    return lax.psum(hidden, "units"), jitter


def main():
    x = np.random.default_rng(4).normal(size=(8, 4)).astype(np.float32)
    places = {"kernel": ["features", "units"], "bias": ["units"]}
    created = xmap(init, in_axes={}, out_axes=places, axis_sizes={"features": 4, "units": 6})
    params = created(jax.random.PRNGKey(0))
    outputs = []
    for resources in ({}, {"batch": "x"}, {"batch": "x", "units": "y"}):
        fun = xmap(
            forward,
            in_axes=(places, ["batch", "features"], {}),
            out_axes=(["batch"], ["batch", ...]),
            axis_resources=resources,
        )
        with Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")):
            out, jitter = fun(params, x, jax.random.PRNGKey(5))
        outputs.append(np.asarray(out).tolist())
    sums = {name: float(jnp.sum(leaf)) for name, leaf in params.items()}
    print(json.dumps({"outputs": outputs, "jitter": np.asarray(jitter).tolist(), "sums": sums}))


if __name__ == "__main__":
    main()
