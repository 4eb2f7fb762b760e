"""The tutorial's section on reductions: a name is as good an ``axis`` as a position.

Names of one and of several letters, alone and mixed with positions in every order, for functions of
``jax.numpy`` and for methods of arrays, against NumPy.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from tutorial_helpers import assert_close, assignments, normal, one_axis, run, two_axes, under

from xmap_compat import named_shape, xmap

# ------------------------------------------------- the program of the text: x: {'x': 8}, y: {'y': 12}, (5,)

IN_AXES = ({0: "x"}, {1: "y"})
ORDERS = []
for _axes in ((0, "x", "y"), ("x", "y"), (0, "x"), (0, "y")):
    ORDERS.extend(itertools.permutations(_axes))
SOME = assignments(
    """
{}
{"x": "x", "y": "y"} on 4x2
{"y": ("y", "x")} on 2x3
"""
)


@pytest.fixture
def operands(rng):
    return normal(rng, 8), normal(rng, 5, 12)


def summed(x, y, keep):
    """The sum of ``x + y`` over all but the letters in ``keep``: x and y are names, n is position 0."""
    return np.einsum(f"xyn->{keep}", np.float64(x)[:, None, None] + y.T[None])


def left_after(axes):
    """Letters of what a reduction leaves of ``xyn``."""
    return "".join(letter for letter in "xyn" if {"n": 0}.get(letter, letter) not in axes)


@pytest.mark.parametrize("axis", ORDERS, ids=str)
@under(SOME)
def test_names_and_positions_mix_in_every_order(assignment, axis, operands):
    keep = left_after(axis)
    out_axes = [*keep.replace("n", ""), ...]

    def body(x, y):
        return jnp.sum(x + y, axis=axis)

    result = run(assignment, body, IN_AXES, out_axes, *operands)
    assert_close(result, summed(*operands, keep))


@pytest.mark.parametrize("steps", [*itertools.permutations((0, "x", "y"))], ids=str)
@under(SOME)
def test_reducing_in_steps(assignment, steps, operands):
    sizes = {"x": 8, "y": 12}

    def in_steps(x, y):
        z = x + y
        for done, axis in enumerate(steps, start=1):
            z = jnp.sum(z, axis=axis)
            left = left_after(steps[:done])
            assert z.shape == (5,) * left.count("n")
            assert named_shape(z) == {name: sizes[name] for name in left.replace("n", "")}
        return z

    assert_close(run(assignment, in_steps, IN_AXES, {}, *operands), summed(*operands, ""))


# ----------------------------------------------------- all reductions, names of several letters

REDUCTIONS = ["sum", "max", "min", "mean", "var", "std"]

FEATURES = (["batch", "out_features", ...],)
FEATURE_PLACES = two_axes("batch", "out_features", loops=False)


@pytest.fixture
def table(rng):
    return normal(rng, 8, 12, 3)


def by_numpy(table, axis):
    return [getattr(np, reduction)(np.float64(table), axis=axis) for reduction in REDUCTIONS]


@under(FEATURE_PLACES)
@pytest.mark.parametrize("position", [0, 1])
def test_name_of_several_letters(assignment, position, table):
    """As an argument of a function, and of a method by position and by keyword."""
    kept = ["batch", "out_features"]
    axis = kept.pop(position)

    def body(x):
        of_functions = [getattr(jnp, reduction)(x, axis=axis) for reduction in REDUCTIONS]
        of_methods = [getattr(x, reduction)(axis) for reduction in REDUCTIONS]
        return of_functions, of_methods, x.sum(axis=axis)

    results = run(assignment, body, FEATURES, [*kept, ...], table)
    expected = by_numpy(table, position)
    assert_close(results, (expected, expected, expected[0]))


@pytest.mark.parametrize(
    "resources", [{}, {"ab": "x"}, {"a": "x", "ab": "y"}, {"b": ("y", "x")}], ids=str
)
@pytest.mark.parametrize("axis", ["ab", ("a", "b"), ("b", "ab"), ("ab", 0)], ids=str)
def test_name_is_not_read_letter_by_letter(resources, axis, rng, mesh42):
    """Even where each letter is a name of its own."""
    x = normal(rng, 4, 8, 4, 3)
    names = ["a", "b", "ab"]
    reduced = axis if isinstance(axis, tuple) else (axis,)
    kept = [n for n in names if n not in reduced]
    fun = xmap(
        lambda v: jnp.sum(v, axis=axis), [*names, ...], [*kept, ...], axis_resources=resources
    )
    with mesh42:
        result = fun(x)
    positions = [[*names, 0].index(a) for a in reduced]
    assert_close(result, x.sum(axis=tuple(positions)))


@under(FEATURE_PLACES)
def test_deviation_from_the_mean_uses_names_on_both_sides(assignment, table):
    """A reduced value broadcasts back over the name that it lost."""

    def standardize(x):
        return (x - jnp.mean(x, axis="batch")) / jnp.max(jnp.abs(x), axis=("batch", "out_features"))

    result = run(assignment, standardize, FEATURES, ["batch", "out_features", ...], table)
    assert_close(result, (table - table.mean(axis=0)) / np.abs(table).max(axis=(0, 1)))


@under(one_axis("i", loops=False))
def test_value_without_the_name_counts_once_for_each_element(assignment):
    """As when a value is broadcast along a position before it is reduced over it."""

    def body(x, y):
        alone = [reduce(y, axis="i") for reduce in (jnp.sum, jnp.mean, jnp.max)]
        return *alone, jnp.sum(x + y, axis="i")

    x, y = np.arange(8.0, dtype=np.float32), np.float32(2.5)
    results = run(assignment, body, (["i"], []), [], x, y)
    assert_close(results, (8 * y, y, y, x.sum() + 8 * y))


@under(one_axis("i", loops=False)[::2])
def test_keepdims_keeps_positions_only(assignment, rng):
    x = normal(rng, 8, 3, 4)

    def body(v):
        return jnp.sum(v, axis=(1, "i"), keepdims=True)

    result = run(assignment, body, ["i", ...], [...], x)
    assert_close(result, x.sum(axis=(0, 2))[:, None])
