"""Assignments that are known to be right for a reason (docs/costs.md has them): each is in the first tie of a search.

The meshes are abstract and the hardware published.  Each case names an assignment that is wrong, which must be worse by
more than the margin of the estimates, or refused.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh

from xmap_compat import Hardware, pdot, search, xmap

H100, A100, V5P = (
    Hardware.of("H100", per_host=8),
    Hardware.of("A100", per_host=8),
    Hardware.of("TPU v5p", per_host=4096),
)
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
            return [w - m / (jnp.sqrt(v) + 1e-8) for w, m, v in zip(weights, first, second)], first, second

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
    weights = [shaped(layers, width, 4 * width, dtype=f32), shaped(layers, 4 * width, width, dtype=f32)]
    return weights, weights, weights, shaped(tokens, width)


PARTS = ({1: "part"}, {2: "part"}, ["batch", ...])


@dataclasses.dataclass
class Case:
    make: Callable[..., Any]
    args: tuple
    mesh: Any
    hardware: Hardware
    best: dict
    against: list
    fixed: dict = dataclasses.field(default_factory=dict)


CASES = {
    "data parallel for small weights": Case(
        training(loss_of_two, TWO, 2),
        (shaped(1024, 4096), shaped(4096, 1024), shaped(1 << 18, 1024)),
        *(NODE, H100, {"batch": "x"}, [{"hidden": "x"}, {}], REST),
    ),
    "Megatron for large layers at inference": Case(
        inference(two_layers, TWO, ["batch", "outputs"]),
        (shaped(16384, 65536), shaped(65536, 16384), shaped(8, 16384)),
        *(NODE, H100, {"hidden": "x"}, [{"batch": "x"}, {}], REST),
    ),
    "the same on TPUs": Case(
        inference(two_layers, TWO, ["batch", "outputs"]),
        (shaped(16384, 65536), shaped(65536, 16384), shaped(8, 16384)),
        *(AbstractMesh((8,), ("x",)), V5P, {"hidden": "x"}, [{"batch": "x"}, {}], REST),
    ),
    "the slow axis is avoided": Case(
        inference(two_layers, TWO, ["batch", "outputs"]),
        (shaped(8192, 32768), shaped(32768, 8192), shaped(16384, 8192)),
        *(TWO_NODES, H100, {"batch": "node", "hidden": "gpu"}, [{"hidden": "node", "batch": "gpu"}], REST),
    ),
    "data parallel before tensor parallel over two nodes": Case(
        training(loss_of_two, TWO, 2),
        (shaped(4096, 16384, dtype=f32), shaped(16384, 4096, dtype=f32), shaped(262144, 4096, dtype=f32)),
        *(AbstractMesh((2, 4), ("node", "gpu")), Hardware.of("H100", per_host=4)),
        *({"batch": ("node", "gpu")}, [{"hidden": ("node", "gpu")}, {"batch": "gpu"}], REST),
    ),
    "rows before the contracted axis": Case(
        inference(lambda a, b: pdot(a, b, "k"), (["i", "k"], ["k", "j"]), ["i", "j"]),
        (shaped(65536, 8192), shaped(8192, 8192)),
        *(NODE, A100, {"i": "x"}, [{"k": "x"}, {}]),
    ),
    "heads before sequence": Case(
        inference(
            attention_layer,
            (*[["heads", ...]] * 4, ["query", ...], ["key", ...]),
            ["query", ...],
        ),
        (*[shaped(64, 8192, 128)] * 3, shaped(64, 128, 8192), shaped(4096, 8192), shaped(4096, 8192)),
        *(NODE, H100, {"heads": "x"}, [{"query": "x"}, {"key": "x"}, {}]),
    ),
    "sequence before one device where there is one head": Case(
        inference(attention_layer, (*[["heads", ...]] * 4, ["query", ...], ["key", ...]), ["query", ...]),
        (*[shaped(1, 1024, 128)] * 3, shaped(1, 128, 1024), shaped(32768, 1024), shaped(32768, 1024)),
        *(NODE, H100, {"query": "x"}, [{}]),
    ),
    "experts by all_to_all": Case(
        inference(
            experts,
            (["expert", "inputs", "hidden"], ["expert", "hidden", "outputs"], {0: "expert", 3: "inputs"}),
            {0: "expert", 3: "outputs"},
        ),
        (shaped(64, 4096, 16384), shaped(64, 16384, 4096), shaped(64, 64, 32, 4096)),
        *(NODE, H100, {"expert": "x"}, [{"hidden": "x"}, {}], REST),
    ),
    "words before the batch where the table is large": Case(
        inference(logits, (["inputs", "words"], ["batch", "inputs"]), ["batch", "words"]),
        (shaped(8192, 262144), shaped(64, 8192)),
        *(NODE, H100, {"words": "x"}, [{"batch": "x"}, {"inputs": "x"}, {}]),
    ),
    "convolutions: data parallel": Case(
        training(convolution, ({}, ["batch", ...])),
        (shaped(256, 256, 3, 3), shaped(1024, 256, 32, 32)),
        *(NODE, A100, {"batch": "x"}, [{}]),
    ),
    "ZeRO when memory forces it": Case(
        adam(layers_of, PARTS),
        gpt(40, 4096, 1 << 18),
        *(AbstractMesh((64,), ("x",)), H100, {"batch": "x", "part": "x"}, [{"batch": "x"}, {"part": "x"}, {}]),
    ),
    "64 x 64 for 500 B parameters": Case(
        adam(layers_of, PARTS),
        gpt(232, 16384, 1 << 24),
        *(AbstractMesh((64, 64), ("x", "y")), V5P),
        {"batch": ("x", "y"), "part": ("x", "y")},
        [{"batch": ("x", "y"), "part": "x"}, {"batch": ("x", "y")}],
        {"batch": ("x", "y")},
    ),
    "tiny: one device": Case(
        inference(lambda v: lax.psum(v * v, "i"), (["i", ...],), {}),
        (shaped(64, 8),),
        *(NODE, H100, {}, [{"i": "x"}]),
    ),
}


def searched(case):
    return search(case.make, *case.args, mesh=case.mesh, hardware=case.hardware, fixed=case.fixed)


def candidate_of(found, resources):
    """The candidate that stands for an assignment."""
    for c in found:
        for own in (c.axis_resources, *c.alike):
            if {n: r for n, r in own.items() if r != ()} == resources:
                return c
    raise LookupError(resources)


@pytest.mark.parametrize("name", CASES)
def test_what_the_textbook_says_is_in_the_first_tie(name):
    case = CASES[name]
    found = searched(case)
    assert candidate_of(found, case.best).place == 1, found
    for resources in case.against:
        worse = candidate_of(found, resources)
        assert worse.refused is not None or worse.place > 1, found


def test_the_state_of_500_billion_parameters_needs_all_4096_devices():
    """8 TB of weights, moments and gradients: 125 GB a device over 64, where a TPU v5p has 96; 2 GB over 4 096."""
    case = CASES["64 x 64 for 500 B parameters"]
    weights, *_ = case.args
    assert 16 * sum(np.prod(w.shape, dtype=float) for w in weights) == pytest.approx(8e12, rel=0.01)
    found = searched(case)
    assert [c.axis_resources for c in found if c.refused is None] == [case.best, {**case.best, "part": ("y", "x")}]
    assert "more than memory, 96 GB" in candidate_of(found, {"batch": ("x", "y"), "part": "x"}).refused


def test_what_costs_the_same_is_a_tie():
    """The attention of a decoder moves nothing, whether its batch or its heads are split."""
    make = inference(
        decoding, (["batch", "heads", "width"], *[["batch", "heads", "key", "width"]] * 2), ["batch", "heads", "width"]
    )
    args = shaped(64, 64, 128), *[shaped(64, 64, 4096, 128)] * 2
    found = search(make, *args, mesh=NODE, hardware=H100, fixed={"width": (), "key": ()})
    assert {c.name: c.place for c in found if c.refused is None} == {"batch: x": 1, "heads: x": 1, "one device": 3}


def test_a_loop_is_found_where_one_device_lacks_the_memory():
    make = lambda resources: xmap(
        lambda x: jnp.tanh(jnp.outer(x, x)) @ x, ["batch", ...], ["batch", ...], axis_resources=resources
    )
    found = search(make, shaped(4096, 4096), mesh=AbstractMesh((1,), ("x",)), hardware=H100)
    assert "loop" in found.best.name and any("more than memory" in (c.refused or "") for c in found)


def test_the_page_on_costs_has_every_case():
    page = (Path(__file__).parents[2] / "docs" / "costs.md").read_text()
    assert [name for name in CASES if f"| {name} |" not in page] == []
