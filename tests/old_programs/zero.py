"""A step of ZeRO: gradients are scattered, each device updates a part of the weights, and the parts are gathered."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.maps import Mesh, xmap

LR = 0.1


def predict(w, x):
    return jnp.tanh(x @ w.reshape(4, 2))


def step(w, momentum, x, y):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((predict(w, x) - y) ** 2))(w)
    n = jax.lax.psum(1, "data")
    mine = jax.lax.psum_scatter(grad, "data", tiled=True) / n
    momentum = 0.9 * momentum + mine
    index = jax.lax.axis_index("data")
    part = jax.lax.dynamic_slice_in_dim(w, index * mine.shape[0], mine.shape[0]) - LR * momentum
    return jax.lax.all_gather(part, "data", tiled=True), momentum, jax.lax.pmean(loss, "data")


zero_step = xmap(
    step,
    in_axes=([...], ["data", ...], ["data", ...], ["data", ...]),
    out_axes=(["data", ...], ["data", ...], [...]),
    axis_resources={"data": "d"},
)

if __name__ == "__main__":
    rng = np.random.default_rng(6)
    w, x, y = rng.normal(size=8), rng.normal(size=(4, 3, 4)), rng.normal(size=(4, 3, 2))
    w, x, y = (a.astype(np.float32) for a in (w, x, y))
    own, momentum, state = jnp.array(w), np.zeros((4, 2), np.float32), jnp.zeros(8)
    with Mesh(np.array(jax.devices()[:4]), ("d",)):
        for _ in range(3):
            copies, momentum, loss = zero_step(w, momentum, x, y)
            w = copies[0]
    for _ in range(3):
        expected, grad = jax.value_and_grad(lambda w: jnp.mean((predict(w, x) - y) ** 2))(own)
        state = 0.9 * state + grad
        own = own - LR * state
    np.testing.assert_allclose(w, own, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    print("loss", loss)
