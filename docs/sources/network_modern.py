"""loss as a program for plain JAX: call mapped_loss.

What changed in the functions:

  network.py:13  lax.pdot(image, params["w1"], "inputs")
              -> pdot(image, params["w1"], "inputs")
  network.py:14  lax.pdot(hidden, params["w2"], "hidden")
              -> pdot(hidden, params["w2"], ("model", "hidden_local"))
  network.py:15  logsumexp(logits, "classes")
              -> logsumexp_over(logits, "classes")
  network.py:20  lax.pmean(lax.psum(target * predict(params, image), "classes"), "batch")
              -> lax.pmean(lax.psum(target * predict(params, image), "classes"), ("data", "batch_local"))
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import one_hot, relu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def split_axes(axes):
    """The axes of the mesh, in its order, and those of jax.vmap."""
    axes, across = axes if isinstance(axes, tuple) else (axes,), jax.sharding.get_abstract_mesh().axis_names
    return tuple(a for a in across if a in axes), tuple(a for a in axes if a not in across)


def gathered(x, local):
    """An array with a dimension for each axis of jax.vmap: gathering over one moves a dimension and nothing else."""
    for name in reversed(local):
        x = lax.all_gather(x, name)
    return x


def pdot(x, y, axis_name, pos_contract=((), ()), pos_batch=((), ()), precision=None, preferred_element_type=None):
    """Contract two arrays over axes and positions (see lax.dot_general): one dot, and one sum over the mesh."""
    across, local = split_axes(axis_name)
    x, y = jnp.asarray(x), jnp.asarray(y)
    if preferred_element_type is None:
        x, y = x.astype(jnp.result_type(x, y)), y.astype(jnp.result_type(x, y))
    n = len(local)
    contract = [(*range(n), *(d % z.ndim + n for d in dims)) for dims, z in zip(pos_contract, (x, y))]
    batch = [[d % z.ndim + n for d in dims] for dims, z in zip(pos_batch, (x, y))]
    x, y = gathered(x, local), gathered(y, local)
    product = lax.dot_general(x, y, (contract, batch), precision, preferred_element_type)
    return lax.psum(product, across) if across else product


def split_positions(x, axes):
    """The positions among axes, and the rest; None stands for all dimensions of an array."""
    axes = tuple(range(jnp.ndim(x))) if axes is None else axes if isinstance(axes, tuple) else (axes,)
    return tuple(a for a in axes if isinstance(a, int)), tuple(a for a in axes if not isinstance(a, int))


def reduced(x, axes, over=(jnp.sum, lax.psum)):
    """The sum over positions and axes, or another reduction; positions stay as dimensions of one element."""
    positions, names = split_positions(x, axes)
    return over[1](over[0](x, positions, keepdims=True), names)


def top_over(x, axes):
    """The maximum over axes and positions as a constant: JAX has no derivative of lax.pmax."""
    return reduced(lax.stop_gradient(x), axes, (jnp.max, lax.pmax))


def logsumexp_over(x, axes):
    """logsumexp over axes and positions."""
    top = top_over(x, axes)
    top = jnp.where(jnp.isfinite(top), top, 0)
    return (jnp.log(reduced(jnp.exp(x - top), axes)) + top).squeeze(split_positions(x, axes)[0])


def predict(params, image):
    hidden = relu(pdot(image, params["w1"], "inputs") + params["b1"])
    logits = pdot(hidden, params["w2"], ("model", "hidden_local")) + params["b2"]
    return logits - logsumexp_over(logits, "classes")


def loss(params, image, label):
    target = one_hot(label, lax.psum(1, "classes"), axis="classes")
    return -lax.pmean(lax.psum(target * predict(params, image), "classes"), ("data", "batch_local"))


@jax.jit
def mapped_loss(params, image, label):
    """Arrays: 6 -> 1."""
    mapped = jax.vmap(loss, in_axes=(None, 0, 0), out_axes=None, axis_name="batch_local")
    mapped = jax.vmap(
        mapped, in_axes=({"b1": None, "b2": None, "w1": 0, "w2": None}, 1, None), out_axes=None, axis_name="inputs"
    )
    mapped = jax.vmap(
        mapped, in_axes=({"b1": None, "b2": 0, "w1": None, "w2": 0}, None, None), out_axes=None, axis_name="classes"
    )
    mapped = jax.vmap(
        mapped, in_axes=({"b1": 0, "b2": None, "w1": 1, "w2": 0}, None, None), out_axes=None, axis_name="hidden_local"
    )
    # Unchecked: types know no collectives over axes of jax.vmap, as "hidden_local".
    mapped = jax.shard_map(
        mapped,
        mesh=mesh,
        in_specs=({"b1": P("model"), "b2": P(), "w1": P(None, "model"), "w2": P("model")}, P("data"), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    return mapped(params, image, label)
