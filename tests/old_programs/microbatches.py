"""Data parallel training, more rows than devices; predictions of many rows in a serial loop on each device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.maps import Mesh, SerialLoop, xmap


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return (hidden @ params["w2"] - y) ** 2


@functools.partial(
    xmap,
    in_axes=([...], ["batch", ...], ["batch"]),
    out_axes=([...], [...]),
    axis_resources={"batch": "data"},
)
def train_step(params, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    loss, grads = jax.lax.pmean((loss, grads), axis_name="batch")
    return jax.tree_util.tree_map(lambda p, g: p - 0.1 * g, params, grads), loss


predict = xmap(
    lambda params, x: jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"],
    in_axes=([...], ["batch", ...]),
    out_axes=["batch", ...],
    axis_resources={"batch": ("data", SerialLoop(2))},
)

normalize = xmap(
    lambda row: (row - jax.lax.pmean(row, "batch")) / jnp.sqrt(jax.lax.pmean(row**2, "batch")),
    in_axes=["batch", ...],
    out_axes=["batch", ...],
)

if __name__ == "__main__":
    rng = np.random.default_rng(10)
    x = np.asarray(normalize(rng.normal(size=(16, 3)).astype(np.float32)))
    y = np.sin(x.sum(1))
    shapes = {"w1": (3, 4), "b1": (4,), "w2": (4,)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    own = params
    with Mesh(np.array(jax.devices()[:4]), ("data",)):
        for _ in range(3):
            params, loss = train_step(params, x, y)
        predicted = predict(params, x)
    for _ in range(3):
        expected, grads = jax.value_and_grad(
            lambda p: jnp.mean(jax.vmap(loss_fn, (None, 0, 0))(p, x, y))
        )(own)
        own = {name: own[name] - 0.1 * grads[name] for name in own}
    for name in own:
        np.testing.assert_allclose(params[name], own[name], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        predicted, np.tanh(x @ own["w1"] + own["b1"]) @ own["w2"], rtol=1e-3, atol=1e-4
    )
    print("loss", loss, expected)
