"""Decoding in the manner of GPT-J: the state of each shard is returned without its axis, and fed back."""

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
from jax.core import Jaxpr, Primitive
from jax.experimental import maps
from jax.experimental.maps import thread_resources
from jax.sharding import Mesh

jax.config.update("jax_threefry_partitionable", True)
assert Primitive is not Jaxpr
VOCABULARY, WIDTH, SHARDS, LENGTH = 12, 8, 4, 6


class Transformer:
    """One layer of attention with a cache, its heads split over the shards."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.init_xmap = maps.xmap(
            self.init,
            in_axes=(["shard", ...],),
            out_axes=["shard", ...],
            axis_resources={"shard": "mp"},
        )
        self.start_xmap = maps.xmap(
            self.start,
            in_axes=(["shard", ...], [...]),
            out_axes=[...],
            axis_resources={"shard": "mp"},
        )
        self.generate_xmap = maps.xmap(
            self.generate_once,
            in_axes=(["shard", ...], [...], [...], [...]),
            out_axes=([...], [...]),
            axis_resources={"shard": "mp"},
        )

    @staticmethod
    def init(key):
        names = ["embed", "query", "key", "value", "out"]
        shapes = [(VOCABULARY, WIDTH), (WIDTH, 2), (WIDTH, 2), (WIDTH, 2), (2, VOCABULARY)]
        keys = jax.random.split(key, len(names))
        return {n: jax.random.normal(k, s) / s[0] ** 0.5 for n, k, s in zip(names, keys, shapes)}

    @staticmethod
    def start(params, prompt):
        x = params["embed"][prompt]
        cache = {
            name: jnp.zeros((LENGTH, 2)).at[: len(prompt)].set(x @ params[name])
            for name in ("key", "value")
        }
        return {"cache": cache, "tokens_decoded": jnp.asarray(len(prompt))}

    @staticmethod
    def generate_once(params, state, token, key):
        x, position = params["embed"][token], state["tokens_decoded"]
        cache = {n: state["cache"][n].at[position].set(x @ params[n]) for n in ("key", "value")}
        scores = cache["key"] @ (x @ params["query"])
        weights = jax.nn.softmax(jnp.where(jnp.arange(LENGTH) <= position, scores, -1e9))
        logits = lax.psum(weights @ cache["value"] @ params["out"], "shard")
        sampled = jax.random.categorical(key, logits)
        return sampled, {"cache": cache, "tokens_decoded": position + 1}


def main():
    mesh = Mesh(np.array(jax.devices()[:SHARDS]), ("mp",))
    with mesh:
        assert thread_resources.env.physical_mesh.shape["mp"] == SHARDS
        network = Transformer(mesh)
        params = network.init_xmap(jax.random.split(jax.random.PRNGKey(0), SHARDS))
        state = network.start_xmap(params, np.array([1, 5]))
        token, tokens = np.array(5), []
        for key in jax.random.split(jax.random.PRNGKey(1), 3):
            token, state = network.generate_xmap(params, state, token, key)
            tokens.append(int(token))
    shards = [np.asarray(s.data).sum() for s in state["cache"]["value"].addressable_shards]
    print(
        json.dumps(
            {
                "tokens": tokens,
                "decoded": int(state["tokens_decoded"]),
                "read": np.asarray(state["cache"]["key"]).round(4).tolist(),
                "shards": [float(s) for s in shards],
            }
        )
    )


if __name__ == "__main__":
    partial(main)()
