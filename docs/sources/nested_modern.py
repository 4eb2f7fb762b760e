"""model as a program for plain JAX: call mapped_model.

What changed in the functions:

  nested.py:13  lax.pmean(scores, "batch")
             -> lax.pmean(scores, "data")
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("data",))


def head(weights, x):
    scores = jax.nn.softmax(weights @ x)
    return scores / lax.pmax(lax.stop_gradient(scores), "head") - lax.pmean(scores, "data")


heads = jax.vmap(head, in_axes=(0, None), out_axes=1, axis_name="head")


def model(weights, x):
    return jnp.sum(heads(weights, x) * jnp.arange(1.0, 4.0), axis=-1)


def per_device(weights, x):
    """What each device computes from its parts of the arguments."""
    x = jnp.squeeze(x, 0)
    result = model(weights, x)
    return jnp.expand_dims(result, 0)


@jax.jit
def mapped_model(weights, x):
    """weights: f32[3,5,4], x: f32[8,4] -> f32[8,5]."""
    # Unchecked: with types JAX gives AssertionError.
    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
    return mapped(weights, x)
