"""The reference page of xmap: its regression, and parameters that no other test has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tutorial_helpers import assert_close, assignments, normal, one_axis, run, under

from xmap_compat import pdot, xmap

# ---------------------------------------------------------------- a linear regression

REGRESSION_AXES = (
    ["batch", "in_features", ...],
    ["batch", "out_features", ...],
    ["in_features", "out_features", ...],
    ["out_features", ...],
)

REGRESSION = assignments(
    """
{}
{} on 4x2
{"batch": "x"} on 8
{"in_features": "x"} on 8
{"batch": "x", "out_features": "y"} on 4x2
{"in_features": ("y", "x")} on 2x2 reversed
{"batch": "z", "in_features": "x", "out_features": "y"} on 2x3x1
{"batch": "x", "in_features": "y", "out_features": "z"} on 2x2x2
"""
)


def regression_loss(x, y, w, b):
    error = y - (pdot(x, w, "in_features") + b)
    return jnp.mean(jnp.sum(error**2, axis="out_features"), axis="batch")


def positional_regression_loss(x, y, w, b):
    return jnp.mean(jnp.sum((y - (x @ w + b)) ** 2, axis=1), axis=0)


def regression_by_numpy(x, y, w, b):
    return ((y - (np.float64(x) @ w + b)) ** 2).sum(axis=1).mean()


@pytest.fixture
def data(rng):
    return normal(rng, 16, 8), normal(rng, 16, 6), normal(rng, 8, 6), normal(rng, 6)


@under(REGRESSION)
def test_regression_loss_and_gradients(assignment, data):
    loss = xmap(regression_loss, REGRESSION_AXES, {}, axis_resources=assignment.resources)
    every_argument = (0, 1, 2, 3)
    with assignment.scope():
        value, gradients = jax.value_and_grad(loss, every_argument)(*data)
    assert_close(value, regression_by_numpy(*data))
    assert_close(gradients, jax.grad(positional_regression_loss, every_argument)(*data))


# ---------------------------------------------------------------------------- axis_sizes


@under(one_axis("i", loops=False))
def test_axes_without_arguments_have_sizes(assignment):
    result = run(assignment, lambda: lax.axis_index("i") ** 2, (), ["i"], axis_sizes={"i": 8})
    np.testing.assert_array_equal(result, np.arange(8) ** 2)


# ------------------------------------------------------------------------ donate_argnums


@pytest.mark.parametrize("resources", [{}, {"i": "x"}], ids=str)
@pytest.mark.parametrize("donated", [(), 0, (1,), (0, 1)], ids=str)
def test_donated_arguments_are_gone(resources, donated, mesh42):
    def over_i(body, **options):
        return xmap(body, ["i"], ["i"], axis_resources=resources, **options)

    step = over_i(lambda x, y: (x + y, x - y), donate_argnums=donated)
    a = np.arange(8.0, dtype=np.float32)
    b = np.ones(8, np.float32)
    with mesh42:
        # Results of the same program lie where its arguments have to be.
        args = over_i(lambda x, y: (x + 0, y + 0))(a, b)
        result = step(*args)
    assert_close(result, (a + b, a - b))
    for k, x in enumerate(args):
        assert x.is_deleted() == (k in np.atleast_1d(donated))


# ------------------------------------------------------------------------------- backend


@pytest.mark.parametrize("resources", [{}, {"i": "x"}], ids=str)
def test_backend(resources, mesh42):
    fun = xmap(lambda x: x + 1, ["i"], ["i"], axis_resources=resources, backend="cpu")
    with mesh42:
        result = fun(np.arange(8))
    np.testing.assert_array_equal(result, np.arange(8) + 1)
    assert {d.platform for d in result.devices()} == {"cpu"}
