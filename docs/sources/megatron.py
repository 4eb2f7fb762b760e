"""Two layers split over devices, as Megatron does it: a pair of rules passes on and sums cotangents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import Mesh, xmap


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def copy_to(x, axis):
    """The same ``x`` for each element of an axis; their cotangents are summed."""
    return x


def copy_fwd(x, axis):
    return x, None


def copy_bwd(axis, _, ct):
    return (lax.psum(ct, axis),)


copy_to.defvjp(copy_fwd, copy_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def reduce_from(x, axis):
    """The sum over an axis; each element gets its cotangent as it is."""
    return lax.psum(x, axis)


def reduce_fwd(x, axis):
    return lax.psum(x, axis), None


def reduce_bwd(axis, _, ct):
    return (ct,)


reduce_from.defvjp(reduce_fwd, reduce_bwd)


def layers(params, x):
    hidden = jax.nn.gelu(copy_to(x, "shards") @ params["w_in"] + params["bias"])
    return jnp.tanh(reduce_from(hidden @ params["w_out"], "shards"))


def example():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    params = {"w_in": normal(4, 3, 5), "bias": normal(4, 5), "w_out": normal(4, 5, 3)}
    specs = {"w_in": ["shards", ...], "bias": ["shards", ...], "w_out": ["shards", ...]}
    resources = {"batch": "data", "shards": "model"}
    f = xmap(layers, (specs, ["batch", ...]), ["batch", ...], axis_resources=resources)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    return f, (params, normal(6, 3)), mesh
