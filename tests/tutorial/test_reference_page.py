"""The reference page of xmap: its two examples, and each statement about its parameters that can be tested."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tutorial_helpers import Assignment, assert_close, grid, normal, one_axis, run, under

from xmap_compat import Mesh, SerialLoop, pdot, xmap

# ------------------------------------------------------- inner products become a matrix

LEFT_RIGHT = ({0: "left"}, {1: "right"})


@under(
    [
        Assignment({}, None),
        Assignment({"left": "x", "right": "y"}, (2, 2)),
        Assignment({"left": "y", "right": "x"}, (2, 2), reverse=True),
        Assignment({"left": SerialLoop(2), "right": "x"}, (2,)),
    ]
)
def test_vdot_of_integers(assignment):
    x = jnp.arange(10).reshape((2, 5))
    result = run(assignment, jnp.vdot, LEFT_RIGHT, ["left", "right", ...], x, x.T)
    assert result.dtype == x.dtype
    np.testing.assert_array_equal(result, np.asarray(x) @ np.asarray(x).T)


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


@under(REGRESSION[::2])
def test_losses_of_single_examples(assignment, data):
    """Leaving a name in the result and in ``out_axes`` is all it takes to keep the batch."""

    def losses(x, y, w, b):
        return jnp.sum((y - pdot(x, w, "in_features") - b) ** 2, axis="out_features")

    x, y, w, b = data
    result = run(assignment, losses, REGRESSION_AXES, ["batch", ...], *data)
    assert_close(result, ((y - np.float64(x) @ w - b) ** 2).sum(axis=1))


# ------------------------------------------------------------------- pytrees of mappings


@under([Assignment({}, None), Assignment({"i": "x"})])
def test_one_mapping_for_all_arguments_and_results(assignment, rng):
    x, y = normal(rng, 8, 2), normal(rng, 8, 2)
    result = run(
        assignment, lambda x, y: {"sum": x + y, "both": (x, y)}, ["i", ...], ["i", ...], x, y
    )
    assert_close(result, {"sum": x + y, "both": (x, y)})


# ---------------------------------------------------------------------------- axis_sizes


@under(one_axis("i", loops=False))
def test_axes_without_arguments_have_sizes(assignment):
    result = run(assignment, lambda: lax.axis_index("i") ** 2, (), ["i"], axis_sizes={"i": 8})
    np.testing.assert_array_equal(result, np.arange(8) ** 2)


@under([Assignment({}, None), Assignment({"j": "x"}), Assignment({"i": "y", "j": "x"})])
def test_sizes_of_other_axes_are_inferred(assignment):
    x = np.arange(6)
    result = run(
        assignment, lambda v: v * lax.axis_index("j"), ["i"], ["i", "j"], x, axis_sizes={"j": 4}
    )
    np.testing.assert_array_equal(result, np.outer(x, np.arange(4)))


def test_every_axis_of_the_results_has_to_be_defined():
    message = "(?s)out_axes name `j`.*All axis names appearing in out_axes must also appear in in_axes or axis_sizes"
    with pytest.raises(ValueError, match=message):
        xmap(lambda v: v, ["i"], ["i", "j"])


# ------------------------------------------------------------------------ axis_resources


@pytest.mark.parametrize(
    "entry",
    ["x", ("x",), ("x", "y"), ("y", "x"), SerialLoop(2), (SerialLoop(2),), ("x", SerialLoop(2))],
    ids=str,
)
def test_one_or_more_resources_for_an_axis(entry, mesh42, rng):
    x = normal(rng, 16, 3)
    with mesh42:
        result = xmap(jnp.tanh, ["i", ...], {1: "i"}, axis_resources={"i": entry})(x)
    assert_close(result, np.tanh(np.float64(x)).T)


@under([Assignment({"a": "x", "b": "x"}, (2,)), Assignment({"a": ("x", "y"), "b": "y"}, (2, 2))])
def test_names_on_one_resource_must_not_meet(assignment):
    x = np.ones((4, 12), np.float32)
    with pytest.raises(TypeError, match="Axes `a` and `b` are both mapped to the resource"):
        run(assignment, lambda v: v, ["a", "b"], ["a", "b"], x)


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


# --------------------------------------------------------------- between vmap and pmap


@pytest.mark.parametrize("resources", [{}, {"i": "x"}], ids=str)
def test_the_same_program_as_vmap_and_as_a_map_over_devices(resources, rng):
    """As the page puts it: from ``vmap`` to a program on all devices, by one argument."""
    x = normal(rng, 8, 3)

    def normalize(v):
        return v / lax.psum(jnp.abs(v), "i")

    with Mesh(grid((8,)), "x"):
        result = xmap(normalize, ["i", ...], ["i", ...], axis_resources=resources)(x)
    assert_close(result, jax.vmap(normalize, axis_name="i")(x))
    assert_close(result, x / np.abs(x).sum(axis=0))
    assert len(result.devices()) == (8 if resources else 1)
