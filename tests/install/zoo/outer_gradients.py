"""Gradients of an xmapped function, from outside: saliency maps of each example, and a layer that is differentiated by
its data."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.maps import xmap
from jax.sharding import Mesh
from jax.tree_util import Partial

SIZE = 8


def score(w, x):
    hidden = jnp.tanh(x @ w["first"])
    return jax.nn.logsumexp(hidden @ w["second"])


def scores(resources):
    return xmap(
        score,
        in_axes=(["batch", ...], ["batch", ...]),
        out_axes=["batch"],
        axis_resources=resources,
    )


def rotated(resources):
    def body(x):
        other = lax.ppermute(x, "batch", [(k, (k + 1) % SIZE) for k in range(SIZE)])
        return jnp.sin(x) * lax.stop_gradient(other)

    return xmap(body, in_axes=["batch", ...], out_axes=["batch", ...], axis_resources=resources)


def main():
    rng = np.random.default_rng(11)
    w = {"first": rng.normal(size=(SIZE, 5, 6)), "second": rng.normal(size=(SIZE, 6, 3))}
    w = jax.tree_map(lambda leaf: jnp.asarray(leaf, jnp.float32), w)
    x = jnp.asarray(rng.normal(size=(SIZE, 5)), jnp.float32)
    found = {}
    with Mesh(np.array(jax.devices()).reshape(8, 1), ("x", "y")):
        for name, resources in (("vectorized", {}), ("devices", {"batch": "x"})):
            fun = scores(resources)
            saliency = jax.grad(lambda x, fun=fun: jnp.sum(fun(w, x) ** 2))(x)
            value, grads = jax.value_and_grad(Partial(lambda fun, w: fun(w, x).mean(), fun))(w)
            turned = rotated(resources)
            slopes = jax.grad(lambda x, turned=turned: jnp.sum(turned(x)))(x)
            _, tangent = jax.jvp(lambda x, fun=fun: fun(w, x), (x,), (jnp.ones_like(x),))
            found[name] = {
                "saliency": saliency.tolist(),
                "value": float(value),
                "grads": [float(jnp.sum(leaf**2)) for leaf in jax.tree_leaves(grads)],
                "slopes": slopes.tolist(),
                "tangent": tangent.tolist(),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
