"""Assignments that are known to be right for a reason: a search does not call them dominated.

The meshes are abstract.  A textbook's answer keeps all devices busy, and nothing beats it in what is held and sent.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from placements import shaped

from xmap_compat import pdot, search, xmap

NODE = AbstractMesh((8,), ("x",))
TWO_NODES = AbstractMesh((2, 8), ("node", "gpu"))
MANY_NODES = AbstractMesh((64, 64), ("x", "y"))
REST = {"inputs": (), "outputs": ()}


def half(*shape):
    return shaped(*shape, dtype=jnp.bfloat16)


def two_layers(w, v, x):
    return pdot(jax.nn.relu(pdot(x, w, "inputs")), v, "hidden")


TWO = (["inputs", "hidden"], ["hidden", "outputs"], ["batch", "inputs"])


def training_of_two(resources):
    def loss(w, v, x):
        out = two_layers(w, v, x).astype(np.float32)
        return lax.pmean(lax.psum(out**2, "outputs"), "batch")

    gradient = jax.grad(xmap(loss, TWO, {}, axis_resources=resources), argnums=(0, 1))

    def step(w, v, x):
        dw, dv = gradient(w, v, x)
        return w - dw, v - dv

    return step


def inference_of_two(resources):
    return xmap(two_layers, TWO, ["batch", "outputs"], axis_resources=resources)


def attention(resources):
    def layer(wq, wk, wv, wo, x, memory):
        scores = jax.nn.softmax(jnp.dot(x @ wq, memory @ wk), axis="key")
        return lax.psum(pdot(scores, memory @ wv, "key") @ wo, "heads")

    in_axes = (*[["heads", ...]] * 4, ["query", ...], ["key", ...])
    return xmap(layer, in_axes, ["query", ...], axis_resources=resources)


def experts(resources):
    """Each group of tokens sends to each expert its share, and gets it back."""

    def layer(w, v, tokens):
        there = lax.all_to_all(tokens, "expert", 0, 0)
        return lax.all_to_all(two_layers(w, v, there), "expert", 0, 0)

    weights = ["expert", "inputs", "hidden"], ["expert", "hidden", "outputs"]
    in_axes = (*weights, {0: "expert", 3: "inputs"})
    return xmap(layer, in_axes, {0: "expert", 3: "outputs"}, axis_resources=resources)


def adam(resources):
    """The state is four times as large as the weights: these, two moments, and the gradient."""

    def loss(weights, x):
        @jax.checkpoint
        def layer(x, parts):
            up, down = parts
            up = lax.all_gather(up.astype(x.dtype), "part", axis=0)
            down = lax.all_gather(down.astype(x.dtype), "part", axis=1)
            return x + jax.nn.relu(x @ up) @ down, None

        last, _ = lax.scan(layer, x, weights)
        return lax.pmean(jnp.sum(last.astype(np.float32) ** 2), "batch")

    weights = ({1: "part"}, {2: "part"})
    mapped = xmap(loss, (weights, ["batch", ...]), {}, axis_resources=resources)

    def step(weights, first, second, x):
        gradients = jax.grad(mapped)(weights, x)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, second, gradients)
        update = lambda w, m, v: w - m / (jnp.sqrt(v) + 1e-8)
        return jax.tree.map(update, weights, first, second), first, second

    return step


SMALL = (half(1024, 4096), half(4096, 1024), half(1 << 18, 1024))
LARGE = (half(16384, 65536), half(65536, 16384), half(8, 16384))
WIDE = (half(8192, 32768), half(32768, 8192), half(16384, 8192))
HEADS = (*[half(1, 1024, 128)] * 3, half(1, 128, 1024))
LONG = (*HEADS, half(32768, 1024), half(32768, 1024))
TOKENS = (half(64, 4096, 16384), half(64, 16384, 4096), half(64, 64, 32, 4096))
GPT = (shaped(232, 16384, 65536), shaped(232, 65536, 16384))
STATE = (GPT, GPT, GPT, half(1 << 24, 16384))
FSDP = {"batch": ("x", "y"), "part": ("x", "y")}
BOTH = {"batch": "node", "hidden": "gpu"}

CASES = {
    # name: (make, arguments, mesh, fixed, the textbook's answer, an assignment that it dominates)
    "data parallel": (training_of_two, SMALL, NODE, REST, {"batch": "x"}, None),
    "Megatron": (inference_of_two, LARGE, NODE, REST, {"hidden": "x"}, None),
    "both": (training_of_two, WIDE, TWO_NODES, REST, BOTH, {"batch": ("node", "gpu")}),
    "FSDP": (adam, STATE, MANY_NODES, {}, FSDP, {"batch": ("x", "y")}),
    "sequence parallel": (attention, LONG, NODE, {}, {"query": "x"}, {"key": "x"}),
    "expert parallel": (experts, TOKENS, NODE, REST, {"expert": "x"}, {"hidden": "x"}),
}


def candidate_of(found, resources):
    for c in found:
        used = {n: r for n, r in c.axis_resources.items() if r != ()}
        if used == resources:
            return c
    raise LookupError(resources)


@pytest.mark.parametrize("name", CASES)
def test_what_the_textbook_says_is_not_dominated(name):
    make, args, mesh, fixed, best, worse = CASES[name]
    found = search(make, *args, mesh=mesh, fixed=fixed)
    right = candidate_of(found, best)
    assert right.refused is None and not right.dominated, found
    if worse is not None:
        assert candidate_of(found, worse).dominated, found


def test_the_state_of_500_billion_parameters_needs_many_devices():
    """2 TB of weights in float32, of 4 bytes: more than 96 GB on each of 16 devices, half a GB on each of 4 096."""
    held = 4 * sum(np.prod(w.shape, dtype=float) for w in GPT)
    assert held == pytest.approx(2e12, rel=0.01)
    found = search(adam, *STATE, mesh=MANY_NODES, fixed={"batch": ("x", "y")})
    assert candidate_of(found, {"batch": ("x", "y")}).bytes_held > 96e9
    tokens = 2 * np.prod(STATE[-1].shape, dtype=float)
    assert candidate_of(found, FSDP).bytes_held == held / 4096 + tokens / 4096 + 4
