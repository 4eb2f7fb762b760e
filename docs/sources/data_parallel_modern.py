"""train_step as a program for plain JAX: call mapped_train_step.

What changed in the functions:

  data_parallel.py:29  lax.pmean(g, "batch")
                    -> lax.pmean(g, ("data", "batch_local"))
  data_parallel.py:32  lax.pmean(value, "batch")
                    -> lax.pmean(value, ("data", "batch_local"))
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()[:4]), ("data",))


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"] - y) ** 2)


RATE = 1e-2
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE))


class State(NamedTuple):
    params: dict
    optimizer: optax.OptState
    step: jax.Array


def train_step(state, x, y):
    value, grads = jax.value_and_grad(loss)(state.params, x, y)
    grads = jax.tree.map(lambda g: lax.pmean(g, ("data", "batch_local")), grads)
    updates, opt_state = optimizer.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    return State(params, opt_state, state.step + 1), lax.pmean(value, ("data", "batch_local"))


@jax.jit
def mapped_train_step(state, x, y):
    """Arrays: 10 -> 9."""
    mapped = jax.vmap(train_step, in_axes=(None, 0, 0), out_axes=None, axis_name="batch_local")
    # Unchecked: types know no collectives over axes of jax.vmap, as "batch_local".
    mapped = jax.shard_map(mapped, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=False)
    return mapped(state, x, y)
