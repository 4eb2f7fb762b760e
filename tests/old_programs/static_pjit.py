"""A whole step under a pjit with static arguments: the xmap, its axis resources and its depth are chosen by them."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import json
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, tree_leaves, tree_map
from jax.experimental.maps import xmap
from jax.experimental.pjit import pjit
from jax.sharding import Mesh


class Config(NamedTuple):
    """Hashable, so that it can be static."""

    layers: int
    activation: str
    resources: tuple[tuple[str, str], ...] = ()


class Network:
    axes = (["features", "units"], ["batch", "features"])

    def __init__(self, config):
        self.config = config

    def layer(self, w, x):
        y = lax.pdot(x, w, "features")
        return getattr(jax.nn, self.config.activation)(y - lax.pmean(y, ("batch", "units")))

    @partial(pjit, static_argnums=(0, 3), static_argnames=("scale",))
    def __call__(self, weights, x, repeat, scale=1.0):
        fun = xmap(
            self.layer,
            in_axes=self.axes,
            out_axes=["batch", "units"],
            axis_resources=dict(self.config.resources),
        )
        assert isinstance(repeat, int) and isinstance(scale, float)
        for _ in range(repeat):
            for k in range(self.config.layers):
                x = scale * fun(weights[k], x)
        return x


@partial(pjit, static_argnums=1)
def spread(x, config):
    """An xmap in a loop in a pjit."""
    centre = xmap(
        lambda v: v - lax.pmean(v, "batch"),
        in_axes=["batch", ...],
        out_axes=["batch", ...],
        axis_resources=dict(config.resources[:1]),
    )
    return lax.fori_loop(0, config.layers, lambda _, v: centre(v) * 2, x).std()


def main():
    rng = np.random.default_rng(9)
    weights = tree_map(lambda k: jnp.asarray(rng.normal(size=(6, 6)).astype(np.float32)), [0, 1])
    x = rng.normal(size=(8, 6)).astype(np.float32)
    found, networks = {}, []
    with Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")):
        for resources in ((), (("batch", "x"),), (("batch", "x"), ("units", "y"))):
            config = Config(2, "relu" if not resources else "tanh", resources)
            networks.append(Network(config))
            out = networks[-1](weights, x, 2, scale=0.5)
            again = networks[-1](weights, x, 1)
            key = "+".join(name for name, _ in resources) or "none"
            found[key] = [float(jnp.sum(leaf**2)) for leaf in tree_leaves((out, again))] + [
                float(spread(x, config))
            ]
    print(json.dumps({"found": found, "different": len({network.config for network in networks})}))


if __name__ == "__main__":
    main()
