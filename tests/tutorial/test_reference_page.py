"""The reference page of xmap: its regression, and parameters that no other test has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tutorial_helpers import Assignment, assert_close, normal, one_axis, run, under

from xmap_compat import pdot, xmap

# ---------------------------------------------------------------- a linear regression

REGRESSION_AXES = (
    ["batch", "in_features", ...],
    ["batch", "out_features", ...],
    ["in_features", "out_features", ...],
    ["out_features", ...],
)

REGRESSION = [
    Assignment({}, None),
    Assignment({}),
    Assignment({"batch": "x"}, (8,)),
    Assignment({"in_features": "x"}, (8,)),
    Assignment({"out_features": "y"}),
    Assignment({"batch": "x", "out_features": "y"}),
    Assignment({"batch": ("y", "x")}),
    Assignment({"in_features": ("y", "x")}, (2, 2), reverse=True),
    Assignment({"batch": "z", "in_features": "x", "out_features": "y"}, (2, 3, 1)),
    Assignment({"batch": "x", "in_features": "y", "out_features": "z"}, (2, 2, 2)),
]


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
    with assignment.scope():
        value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(*data)
    assert_close(value, regression_by_numpy(*data))
    assert_close(gradients, jax.grad(positional_regression_loss, argnums=(0, 1, 2, 3))(*data))


# ---------------------------------------------------------------------------- axis_sizes


@under(one_axis("i", loops=False))
def test_axes_without_arguments_have_sizes(assignment):
    result = run(assignment, lambda: lax.axis_index("i") ** 2, (), ["i"], axis_sizes={"i": 8})
    np.testing.assert_array_equal(result, np.arange(8) ** 2)


# ------------------------------------------------------------------------ donate_argnums


@pytest.mark.parametrize("resources", [{}, {"i": "x"}], ids=str)
@pytest.mark.parametrize("donated", [(), 0, (1,), (0, 1)], ids=str)
def test_donated_arguments_are_gone(resources, donated, mesh42):
    step = xmap(
        lambda x, y: (x + y, x - y),
        in_axes=(["i"], ["i"]),
        out_axes=["i"],
        axis_resources=resources,
        donate_argnums=donated,
    )
    a, b = np.arange(8.0, dtype=np.float32), np.ones(8, np.float32)
    with mesh42:
        # Results of the same program lie where its arguments have to be.
        args = xmap(lambda x, y: (x + 0, y + 0), ["i"], ["i"], axis_resources=resources)(a, b)
        result = step(*args)
    assert_close(result, (a + b, a - b))
    expected = [k in np.atleast_1d(donated) for k in range(2)]
    assert [x.is_deleted() for x in args] == expected


# ------------------------------------------------------------------------------- backend


@pytest.mark.parametrize("resources", [{}, {"i": "x"}], ids=str)
def test_backend(resources, mesh42):
    with mesh42:
        result = xmap(lambda x: x + 1, ["i"], ["i"], axis_resources=resources, backend="cpu")(
            np.arange(8)
        )
    np.testing.assert_array_equal(result, np.arange(8) + 1)
    assert {d.platform for d in result.devices()} == {"cpu"}
