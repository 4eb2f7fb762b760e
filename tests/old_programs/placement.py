"""A trainer of early 2023 that places its state by pjit and axis resources, beside an xmap for its loss."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import functools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import linear_util as lu
from jax.config import config
from jax.experimental.maps import thread_resources, xmap
from jax.experimental.pjit import pjit, with_sharding_constraint
from jax.lib import xla_bridge
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

config.update("jax_threefry_partitionable", True)
Array = Any
KeyArray = jax.random.KeyArray


class State(NamedTuple):
    params: Any
    optimizer: Any
    step: Array


optimizer = optax.sgd(0.05, momentum=0.9)


def init(key: KeyArray) -> State:
    first, second = jax.random.split(key)
    params = {
        "wi": jax.random.normal(first, (8, 16)) * 0.2,
        "wo": jax.random.normal(second, (16, 8)) * 0.2,
    }
    return State(params, optimizer.init(params), jnp.zeros((), jnp.int32))


SPECS = {"wi": P(None, "mp"), "wo": P("mp", None)}


def specs_of(state: State) -> State:
    return jax.tree_map(
        lambda leaf: {(8, 16): P(None, "mp"), (16, 8): P("mp", None)}.get(leaf.shape), state
    )


def forward(params, x):
    x = with_sharding_constraint(x, P("dp", None))
    hidden = jax.nn.gelu(x @ params["wi"])
    return with_sharding_constraint(hidden, P("dp", "mp")) @ params["wo"]


distances = xmap(
    lambda a, b: jnp.sum((a - b) ** 2),
    in_axes=(["batch", ...], ["batch", ...]),
    out_axes=["batch"],
    axis_resources={"batch": "dp"},
)


@functools.partial(
    pjit,
    in_axis_resources=(SPECS, P("dp", None)),
    out_axis_resources=P("dp", None),
    static_argnums=(),
)
def predict(params, x):
    return forward(params, x)


def train_step(state: State, x, y):
    def loss(params):
        return jnp.mean((forward(params, x) - y) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    updates, opt = optimizer.update(grads, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), opt, state.step + 1), value


@lu.transformation
def doubled(*args):
    out = yield args, {}
    yield 2 * out


def main():
    assert xla_bridge.get_backend().platform == "cpu"
    rng = np.random.default_rng(12)
    x, y = rng.normal(size=(2, 8, 8)).astype(np.float32)
    with Mesh(np.array(jax.devices()).reshape(4, 2), ("dp", "mp")):
        assert thread_resources.env.physical_mesh.shape["mp"] == 2
        specs = specs_of(jax.eval_shape(init, jax.random.PRNGKey(0)))
        state = pjit(init, in_axis_resources=None, out_axis_resources=specs)(jax.random.PRNGKey(0))
        step = pjit(
            train_step,
            in_axis_resources=(specs, P("dp"), P("dp")),
            out_axis_resources=(specs, None),
        )
        losses = []
        for _ in range(3):
            state, value = step(state, x, y)
            losses.append(float(value))
        predicted = predict(state.params, x)
        apart = distances(np.asarray(predicted), y)
    twice = doubled(lu.wrap_init(jnp.sum)).call_wrapped(apart)
    leaves = jax.tree_util.tree_leaves(
        jax.tree_map(lambda p: float(jnp.abs(p).sum()), state.params)
    )
    clipped = jnp.clip(apart, a_min=0.5, a_max=9.0)
    assert isinstance(predicted, jax.Array) and state.step == 3
    print(
        json.dumps(
            {"losses": losses, "leaves": leaves, "clipped": clipped.tolist(), "twice": float(twice)}
        )
    )


if __name__ == "__main__":
    main()
