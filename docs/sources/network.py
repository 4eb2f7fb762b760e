"""A loss over named axes."""

import jax
import numpy as np
from jax import lax
from jax.nn import one_hot, relu
from jax.scipy.special import logsumexp

from xmap_compat import Mesh, xmap


def predict(params, image):
    hidden = relu(lax.pdot(image, params["w1"], "inputs") + params["b1"])
    logits = lax.pdot(hidden, params["w2"], "hidden") + params["b2"]
    return logits - logsumexp(logits, "classes")


def loss(params, image, label):
    target = one_hot(label, lax.psum(1, "classes"), axis="classes")
    return -lax.pmean(lax.psum(target * predict(params, image), "classes"), "batch")


WEIGHTS = {"w1": ["inputs", "hidden"], "b1": ["hidden"], "w2": ["hidden", "classes"], "b2": ["classes"]}


def example():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    params = {"w1": normal(6, 8), "b1": normal(8), "w2": normal(8, 4), "b2": normal(4)}
    resources = {"batch": "data", "hidden": "model"}
    f = xmap(loss, (WEIGHTS, ["batch", "inputs"], ["batch"]), {}, axis_resources=resources)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    return f, (params, normal(16, 6), np.arange(16, dtype=np.int32) % 4), mesh
