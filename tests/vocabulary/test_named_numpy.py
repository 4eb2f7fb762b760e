"""NumPy functions over named axes equal NumPy over the same dimension, under every placement."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xmap_compat import numpy as xnp
from xmap_compat import xmap

PLACEMENTS = [
    {},
    {"k": "x"},
    {"k": ("x", "y")},
    {"k": ("y", "x")},
    {"b": "y"},
    {"b": "x", "k": "y"},
]

# Each takes x of positional shape (3,), named {b: 8, k: 16}; the oracle has x of shape (8, 3, 16).
REDUCTIONS = {
    "prod": (lambda x: xnp.prod(x, "k"), lambda x: x.prod(2)),
    "prod mixed": (lambda x: xnp.prod(x, ("k", 0)), lambda x: x.prod((1, 2))),
    "any": (lambda x: xnp.any(x > 2, "k"), lambda x: (x > 2).any(2)),
    "all mixed": (lambda x: xnp.all(x > -3, (0, "k")), lambda x: (x > -3).all((1, 2))),
    "argmax": (lambda x: xnp.argmax(x, "k"), lambda x: x.argmax(2)),
    "argmin": (lambda x: xnp.argmin(x, axis="k"), lambda x: x.argmin(2)),
    "median": (lambda x: xnp.median(x, "k"), lambda x: np.median(x, 2)),
    "take": (lambda x: xnp.take(x, jnp.array([3, 0]), "k"), lambda x: np.moveaxis(x[:, :, [3, 0]], 2, 1)),
    "along": (
        lambda x: xnp.along(lambda v: jnp.percentile(v, 25.0, axis=0), "k", x),
        lambda x: np.percentile(x, 25.0, axis=2),
    ),
}

SCANS = {
    "cumsum": (lambda x: xnp.cumsum(x, "k"), lambda x: x.cumsum(2)),
    "cumprod": (lambda x: xnp.cumprod(x, "k"), lambda x: x.cumprod(2)),
    "sort": (lambda x: xnp.sort(x, "k"), lambda x: np.sort(x, 2)),
    "argsort": (lambda x: xnp.argsort(x, "k"), lambda x: np.argsort(x, 2)),
    "flip": (lambda x: xnp.flip(x, "k"), lambda x: x[:, :, ::-1]),
    "roll": (lambda x: xnp.roll(x, 5, "k"), lambda x: np.roll(x, 5, 2)),
    "roll along both kinds": (
        lambda x: xnp.roll(x, (5, 1, -3), ("k", 0, "b")),
        lambda x: np.roll(x, (5, 1, -3), (2, 1, 0)),
    ),
    "roll along names by one shift": (lambda x: xnp.roll(x, 2, ("k", "b")), lambda x: np.roll(x, 2, (0, 2))),
    "along": (
        lambda x: xnp.along(lambda v: v - v.mean(0), "k", x, keep=True),
        lambda x: x - x.mean(2, keepdims=True),
    ),
    "along fft": (
        lambda x: xnp.along(lambda v: jnp.fft.fft(v, axis=0).real, "k", x, keep=True),
        lambda x: np.fft.fft(x, axis=2).real,
    ),
}

IN = {0: "b", 2: "k"}


@pytest.fixture
def x(rng):
    return rng.normal(size=(8, 3, 16)).astype(np.float32)


@pytest.mark.parametrize("resources", PLACEMENTS, ids=str)
def test_reductions_equal_numpy(resources, x, mesh42):
    fun = xmap(lambda v: [f(v) for f, _ in REDUCTIONS.values()], IN, {0: "b"}, axis_resources=resources)
    with mesh42:
        results = fun(x)
    for name, result, (_, oracle) in zip(REDUCTIONS, results, REDUCTIONS.values()):
        np.testing.assert_allclose(result, oracle(x), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("resources", PLACEMENTS, ids=str)
def test_functions_that_keep_the_axis_equal_numpy(resources, x, mesh42):
    fun = xmap(lambda v: [f(v) for f, _ in SCANS.values()], IN, IN, axis_resources=resources)
    with mesh42:
        results = fun(x)
    for name, result, (_, oracle) in zip(SCANS, results, SCANS.values()):
        np.testing.assert_allclose(result, oracle(x), rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.sampled
@pytest.mark.parametrize("resources", PLACEMENTS, ids=str)
@pytest.mark.parametrize("case", ["prod", "median", "take", "cumsum", "sort", "roll", "along fft"])
def test_gradients_from_outside_equal_the_positional_ones(case, resources, x, mesh42):
    keeps = case in SCANS
    function, _ = (SCANS if keeps else REDUCTIONS)[case]
    positional = {
        "prod": lambda x: x.prod(2),
        "median": lambda x: jnp.median(x, 2),
        "take": lambda x: x[:, :, jnp.array([3, 0])],
        "cumsum": lambda x: jnp.cumsum(x, 2),
        "sort": lambda x: jnp.sort(x, 2),
        "roll": lambda x: jnp.roll(x, 5, 2),
        "along fft": lambda x: jnp.fft.fft(x, axis=2).real,
    }[case]
    fun = xmap(function, IN, IN if keeps else {0: "b"}, axis_resources=resources)
    with mesh42:
        gradient = jax.grad(lambda v: jnp.sum(jnp.sin(fun(v))))(x)
    np.testing.assert_allclose(gradient, jax.grad(lambda v: jnp.sum(jnp.sin(positional(v))))(x), rtol=1e-3, atol=1e-4)


def test_an_axis_without_resources_is_not_copied_to_be_reduced(x):
    """The named axis is a dimension already: no gather, nothing larger than the argument is made."""
    program = xmap(lambda v: xnp.prod(v, "k"), IN, {0: "b"}).lower(x).compile()
    assert not re.search(r" (all-gather|all-to-all|gather|scatter)\(", program.as_text())
    assert program.memory_analysis().temp_size_in_bytes <= x.nbytes


def test_a_split_axis_is_gathered_once_and_rolled_by_what_crosses(x, mesh42):
    with mesh42:
        gathered = xmap(lambda v: xnp.sort(v, "k"), IN, IN, axis_resources={"k": "x"}).lower(x).compile().as_text()
        rolled = xmap(lambda v: xnp.roll(v, 1, "k"), IN, IN, axis_resources={"k": "x"}).lower(x).compile().as_text()
    assert len(re.findall(r" all-gather\(", gathered)) == 1 and "all-to-all" not in gathered
    assert "all-gather" not in rolled
    # One slab of 8 x 3 elements leaves each device.
    assert re.findall(r"= f32\[([\d,]+)\]\S* collective-permute\(", rolled) in (["1,8,3"], ["8,3"])


def test_positional_axes_go_to_jax_numpy(x):
    np.testing.assert_allclose(xnp.cumsum(x, 1), x.cumsum(1), rtol=1e-5)
    np.testing.assert_allclose(xnp.prod(x, (0, 1)), x.prod((0, 1)), rtol=1e-4)
    np.testing.assert_array_equal(xnp.take(x, np.array([1]), 0), x[[1]])
    np.testing.assert_array_equal(xnp.roll(x, 1, 0), np.roll(x, 1, 0))
    np.testing.assert_array_equal(xnp.any(x > 2), (x > 2).any())


def test_a_function_that_loses_the_axis_is_refused():
    fun = xmap(lambda v: xnp.along(lambda u: u.sum(0), "k", v, keep=True), ["k", ...], ["k", ...])
    with pytest.raises(ValueError, match="its first dimension should be that axis"):
        fun(np.ones((4, 3)))


def test_several_axes_at_once_are_refused_where_one_is_meant():
    fun = xmap(lambda v: xnp.sort(v, ("k", 0)), ["k", ...], ["k", ...])
    with pytest.raises(TypeError, match=re.escape("sort takes one named axis, or one positional axis")):
        fun(np.ones((4, 3)))
