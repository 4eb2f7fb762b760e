"""Assignments that are known to be right for a reason: a search does not call them dominated.

The meshes are abstract.  A textbook's answer keeps all devices busy, and nothing beats it in what is held and sent.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh

from xmap_compat import pdot, search, xmap

NODE = AbstractMesh((8,), ("x",))
TWO_NODES = AbstractMesh((2, 8), ("node", "gpu"))
bf16, f32 = jnp.bfloat16, np.float32


def shaped(*shape, dtype=bf16):
    return jax.ShapeDtypeStruct(shape, dtype)


def training(body, in_axes, trained=1):
    """A step of gradient descent on the first arguments."""

    def make(resources):
        loss = xmap(body, in_axes, {}, axis_resources=resources)

        def step(*args):
            gradients = jax.grad(loss, argnums=tuple(range(trained)))(*args)
            return [w - g.astype(w.dtype) for w, g in zip(args, gradients)]

        return step

    return make


def inference(body, in_axes, out_axes):
    return lambda resources: xmap(body, in_axes, out_axes, axis_resources=resources)


def two_layers(w, v, x):
    return pdot(jax.nn.relu(pdot(x, w, "inputs")), v, "hidden")


def loss_of_two(w, v, x):
    return lax.pmean(lax.psum(two_layers(w, v, x).astype(f32) ** 2, "outputs"), "batch")


TWO = (["inputs", "hidden"], ["hidden", "outputs"], ["batch", "inputs"])
REST = {"inputs": (), "outputs": ()}


def attention_layer(wq, wk, wv, wo, x, memory):
    seen = pdot(jax.nn.softmax(jnp.dot(x @ wq, memory @ wk), axis="key"), memory @ wv, "key")
    return lax.psum(seen @ wo, "heads")


def decoding(q, k, v):
    return pdot(jax.nn.softmax(pdot(q, k, "width"), axis="key"), v, "key")


def experts(w, v, tokens):
    """Each group of tokens sends to each expert its share, and gets it back."""
    there = lax.all_to_all(tokens, "expert", 0, 0)
    return lax.all_to_all(pdot(jax.nn.relu(pdot(there, w, "inputs")), v, "hidden"), "expert", 0, 0)


def logits(table, x):
    return jax.nn.log_softmax(pdot(x, table, "inputs"), axis="words")


def convolution(kernel, image):
    out = lax.conv(image[None], kernel, (1, 1), "SAME")[0]
    return lax.pmean(jnp.sum(out.astype(f32) ** 2), "batch")


def adam(loss, in_axes):
    """A training step whose state is four times as large as the weights: these, two moments, and the gradient."""

    def make(resources):
        mapped = xmap(loss, in_axes, {}, axis_resources=resources)

        def step(weights, first, second, x):
            gradients = jax.grad(lambda weights: mapped(*weights, x))(weights)
            first = [0.9 * m + 0.1 * g for m, g in zip(first, gradients)]
            second = [0.99 * m + 0.01 * g * g for m, g in zip(second, gradients)]
            return (
                [w - m / (jnp.sqrt(v) + 1e-8) for w, m, v in zip(weights, first, second)],
                first,
                second,
            )

        return step

    return make


def layers_of(up, down, x):
    @jax.checkpoint
    def layer(x, weights):
        up, down = (lax.all_gather(w.astype(bf16), "part", axis=k) for k, w in enumerate(weights))
        return x + jnp.einsum("f,fd->d", jax.nn.relu(jnp.einsum("d,df->f", x, up)), down), None

    return lax.pmean(jnp.sum(lax.scan(layer, x, (up, down))[0].astype(f32) ** 2), "batch")


def gpt(layers, width, tokens):
    """Weights and moments of ``layers`` layers, and the tokens of a batch."""
    weights = [
        shaped(layers, width, 4 * width, dtype=f32),
        shaped(layers, 4 * width, width, dtype=f32),
    ]
    return weights, weights, weights, shaped(tokens, width)


PARTS = ({1: "part"}, {2: "part"}, ["batch", ...])


CASES = {
    # name: (make, arguments, mesh, the textbook's answer, assignments that it dominates, fixed)
    "data parallel": (
        training(loss_of_two, TWO, 2),
        (shaped(1024, 4096), shaped(4096, 1024), shaped(1 << 18, 1024)),
        *(NODE, {"batch": "x"}, [], REST),
    ),
    "Megatron": (
        inference(two_layers, TWO, ["batch", "outputs"]),
        (shaped(16384, 65536), shaped(65536, 16384), shaped(8, 16384)),
        *(NODE, {"hidden": "x"}, [], REST),
    ),
    "data and tensor parallel": (
        training(loss_of_two, TWO, 2),
        (shaped(8192, 32768), shaped(32768, 8192), shaped(16384, 8192)),
        *(TWO_NODES, {"batch": "node", "hidden": "gpu"}, [{"batch": ("node", "gpu")}], REST),
    ),
    "FSDP": (
        adam(layers_of, PARTS),
        gpt(40, 4096, 1 << 18),
        *(AbstractMesh((64,), ("x",)), {"batch": "x", "part": "x"}, [{"batch": "x"}], {}),
    ),
    "FSDP over 64 x 64": (
        adam(layers_of, PARTS),
        gpt(232, 16384, 1 << 24),
        AbstractMesh((64, 64), ("x", "y")),
        *({"batch": ("x", "y"), "part": ("x", "y")}, [{"batch": ("x", "y")}], {}),
    ),
    "sequence parallel": (
        inference(
            attention_layer, (*[["heads", ...]] * 4, ["query", ...], ["key", ...]), ["query", ...]
        ),
        (
            *[shaped(1, 1024, 128)] * 3,
            shaped(1, 128, 1024),
            shaped(32768, 1024),
            shaped(32768, 1024),
        ),
        *(NODE, {"query": "x"}, [{"key": "x"}], {}),
    ),
    "heads before sequence": (
        inference(
            attention_layer, (*[["heads", ...]] * 4, ["query", ...], ["key", ...]), ["query", ...]
        ),
        (
            *[shaped(64, 8192, 128)] * 3,
            shaped(64, 128, 8192),
            shaped(4096, 8192),
            shaped(4096, 8192),
        ),
        *(NODE, {"heads": "x"}, [], {}),
    ),
    "expert parallel": (
        inference(
            experts,
            (
                ["expert", "inputs", "hidden"],
                ["expert", "hidden", "outputs"],
                {0: "expert", 3: "inputs"},
            ),
            {0: "expert", 3: "outputs"},
        ),
        (shaped(64, 4096, 16384), shaped(64, 16384, 4096), shaped(64, 64, 32, 4096)),
        *(NODE, {"expert": "x"}, [{"hidden": "x"}], REST),
    ),
    "rows before the contracted axis": (
        inference(lambda a, b: pdot(a, b, "k"), (["i", "k"], ["k", "j"]), ["i", "j"]),
        (shaped(65536, 8192), shaped(8192, 8192)),
        *(NODE, {"i": "x"}, [{"k": "x"}], {}),
    ),
    "words of a large table": (
        inference(logits, (["inputs", "words"], ["batch", "inputs"]), ["batch", "words"]),
        (shaped(8192, 262144), shaped(64, 8192)),
        *(NODE, {"words": "x"}, [{"inputs": "x"}], {}),
    ),
    "convolutions": (
        training(convolution, ({}, ["batch", ...])),
        (shaped(256, 256, 3, 3), shaped(1024, 256, 32, 32)),
        *(NODE, {"batch": "x"}, [], {}),
    ),
}


def candidate_of(found, resources):
    """The candidate that stands for an assignment."""
    for c in found:
        if {n: r for n, r in c.axis_resources.items() if r != ()} == resources:
            return c
    raise LookupError(resources)


@pytest.mark.parametrize("name", CASES)
def test_what_the_textbook_says_is_not_dominated(name):
    make, args, mesh, best, worse, fixed = CASES[name]
    found = search(make, *args, mesh=mesh, fixed=fixed)
    right = candidate_of(found, best)
    assert right.refused is None and not right.dominated, found
    for resources in worse:
        assert candidate_of(found, resources).dominated, found


def test_the_state_of_500_billion_parameters_needs_many_devices():
    """2 TB of weights in float32, of 4 bytes: more than 96 GB on each of 16 devices, half a GB on each of 4 096."""
    make, args, mesh, best, *_ = CASES["FSDP over 64 x 64"]
    weights, *_, x = args
    held = 4 * sum(np.prod(w.shape, dtype=float) for w in weights)
    assert held == pytest.approx(2e12, rel=0.01)
    found = search(make, *args, mesh=mesh)
    assert candidate_of(found, {"batch": ("x", "y")}).bytes_held > 96e9
    right = candidate_of(found, best)
    assert right.bytes_held == held / 4096 + 2 * np.prod(x.shape, dtype=float) / 4096 + 4


def test_what_moves_nothing_is_beside_each_other():
    """The attention of a decoder moves nothing, whether its batch or its heads are split."""
    make = inference(
        decoding,
        (["batch", "heads", "width"], *[["batch", "heads", "key", "width"]] * 2),
        ["batch", "heads", "width"],
    )
    args = shaped(64, 64, 128), *[shaped(64, 64, 4096, 128)] * 2
    found = search(make, *args, mesh=NODE, fixed={"width": (), "key": ()})
    usable = {c.name: (c.facts, c.dominated) for c in found if c.refused is None}
    assert usable["batch: x"] == usable["heads: x"] and usable["one device"][1]
