"""One program through every stage, under every kind of placement."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xmap_compat import SerialLoop, pdot, xmap

PLACEMENTS = [
    {},
    {"batch": "x"},
    {"batch": ("x", "y")},
    {"batch": ("y", "x")},
    {"inputs": "y"},
    {"batch": "x", "inputs": "y"},
    {"batch": SerialLoop(4)},
    {"batch": ("x", SerialLoop(2)), "inputs": "y"},
]


def predict(image, weights):
    return jnp.tanh(pdot(image, weights, "inputs", pos_contract=((), ())))


@pytest.mark.parametrize("resources", PLACEMENTS, ids=str)
def test_named_layer_equals_numpy(resources, mesh42, rng):
    images = rng.normal(size=(16, 6)).astype(np.float32)
    weights = rng.normal(size=(6, 5)).astype(np.float32)
    layer = xmap(
        predict, (["batch", "inputs"], ["inputs", ...]), ["batch", ...], axis_resources=resources
    )
    with mesh42:
        result = layer(images, weights)
    np.testing.assert_allclose(result, np.tanh(images @ weights), rtol=1e-5, atol=1e-5)


def test_collective_over_a_split_axis_equals_numpy(mesh42, rng):
    x = rng.normal(size=(16, 3)).astype(np.float32)
    rotate = xmap(
        lambda v: lax.ppermute(v, "i", [(k, (k + 1) % 16) for k in range(16)]),
        ["i", ...],
        ["i", ...],
        axis_resources={"i": "x"},
    )
    with mesh42:
        np.testing.assert_array_equal(rotate(x), np.roll(x, 1, axis=0))
