"""A data-parallel training step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from xmap_compat import Mesh, xmap

RATE = 1e-2
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE))


class State(NamedTuple):
    params: dict
    optimizer: optax.OptState
    step: jax.Array


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"] - y) ** 2)


def train_step(state, x, y):
    value, grads = jax.value_and_grad(loss)(state.params, x, y)
    grads = jax.tree.map(lambda g: lax.pmean(g, "batch"), grads)
    updates, opt_state = optimizer.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    return State(params, opt_state, state.step + 1), lax.pmean(value, "batch")


def example():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    params = {"w": normal(4, 2), "b": normal(2)}
    state = State(params, optimizer.init(params), np.int32(0))
    f = xmap(train_step, ([...], ["batch", ...], ["batch", ...]), [...], axis_resources={"batch": "data"})
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    return f, (state, normal(16, 4), normal(16, 2)), mesh
