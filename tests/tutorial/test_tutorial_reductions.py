"""The tutorial's section on reductions: a name is as good an ``axis`` as a position.

Names of one and of several letters, alone and mixed with positions in every order, for functions of
``jax.numpy`` and for methods of arrays, against NumPy.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from tutorial_helpers import Assignment, assert_close, normal, one_axis, run, two_axes, under

from xmap_compat import named_shape

# ------------------------------------------------- the program of the text: x: {'x': 8}, y: {'y': 12}, (5,)

IN_AXES = ({0: "x"}, {1: "y"})
ORDERS = [
    axis
    for axes in ((0, "x", "y"), ("x", "y"), (0, "x"), (0, "y"))
    for axis in itertools.permutations(axes)
]


@pytest.fixture
def operands(rng):
    return normal(rng, 8), normal(rng, 5, 12)


def summed(x, y, keep):
    """The sum of ``x + y`` over all but the letters in ``keep``: x and y are names, n is position 0."""
    return np.einsum(f"xyn->{keep}", np.float64(x)[:, None, None] + y.T[None])


def letters_kept(axis):
    reduced = {"n" if a == 0 else a for a in axis}
    return "".join(letter for letter in "xyn" if letter not in reduced)


def named_out(keep):
    return [*(letter for letter in keep if letter != "n"), ...]


@pytest.mark.parametrize("axis", ORDERS, ids=str)
@under(
    [Assignment({}, None), Assignment({"x": "x", "y": "y"}), Assignment({"y": ("y", "x")}, (2, 3))]
)
def test_names_and_positions_mix_in_every_order(assignment, axis, operands):
    keep = letters_kept(axis)
    result = run(
        assignment, lambda x, y: jnp.sum(x + y, axis=axis), IN_AXES, named_out(keep), *operands
    )
    assert_close(result, summed(*operands, keep))


@pytest.mark.parametrize("steps", list(itertools.permutations((0, "x", "y"))), ids=str)
@under([Assignment({}, None), Assignment({"x": "x", "y": "y"}), Assignment({"x": ("y", "x")})])
def test_reducing_in_steps(assignment, steps, operands):
    seen = []

    def in_steps(x, y):
        z = x + y
        for axis in steps:
            z = jnp.sum(z, axis=axis)
            seen.append((z.shape, named_shape(z)))
        return z

    assert_close(run(assignment, in_steps, IN_AXES, {}, *operands), summed(*operands, ""))
    left = [set("xyn") - {"n" if a == 0 else a for a in steps[: k + 1]} for k in range(3)]
    sizes = {"x": 8, "y": 12}
    assert seen[:3] == [
        ((5,) if "n" in names else (), {n: sizes[n] for n in names - {"n"}}) for names in left
    ]


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
@pytest.mark.parametrize(
    ("axis", "kept", "position"), [("out_features", "batch", 1), ("batch", "out_features", 0)]
)
def test_name_of_several_letters(assignment, axis, kept, position, table):
    def body(x):
        return [getattr(jnp, reduction)(x, axis=axis) for reduction in REDUCTIONS]

    assert_close(run(assignment, body, FEATURES, [kept, ...], table), by_numpy(table, position))


@under(FEATURE_PLACES[::3])
@pytest.mark.parametrize(
    ("axis", "kept", "position"), [("out_features", "batch", 1), ("batch", "out_features", 0)]
)
def test_as_a_method_of_the_array(assignment, axis, kept, position, table):
    def body(x):
        by_position = [getattr(x, reduction)(axis) for reduction in REDUCTIONS]
        by_keyword = [getattr(x, reduction)(axis=axis) for reduction in REDUCTIONS]
        return by_position, by_keyword

    expected = by_numpy(table, position)
    assert_close(run(assignment, body, FEATURES, [kept, ...], table), (expected, expected))


@pytest.mark.parametrize(
    "resources", [{}, {"ab": "x"}, {"a": "x", "ab": "y"}, {"b": ("y", "x")}], ids=str
)
@pytest.mark.parametrize("axis", ["ab", ("a", "b"), ("b", "ab"), ("ab", 0)], ids=str)
def test_name_is_not_read_letter_by_letter(resources, axis, rng):
    """Even where each letter is a name of its own."""
    x = normal(rng, 4, 8, 4, 3)
    names = ["a", "b", "ab"]
    reduced = axis if isinstance(axis, tuple) else (axis,)
    kept = [n for n in names if n not in reduced]
    result = run(
        Assignment(resources), lambda v: jnp.sum(v, axis=axis), [*names, ...], [*kept, ...], x
    )
    assert_close(result, x.sum(axis=tuple(3 if a == 0 else names.index(a) for a in reduced)))


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
        return (
            jnp.sum(y, axis="i"),
            jnp.mean(y, axis="i"),
            jnp.max(y, axis="i"),
            jnp.sum(x + y, axis="i"),
        )

    x, y = np.arange(8.0, dtype=np.float32), np.float32(2.5)
    results = run(assignment, body, (["i"], []), [], x, y)
    assert_close(results, (8 * y, y, y, x.sum() + 8 * y))


@under(one_axis("i", loops=False)[::2])
def test_keepdims_keeps_positions_only(assignment, rng):
    x = normal(rng, 8, 3, 4)
    result = run(
        assignment, lambda v: jnp.sum(v, axis=(1, "i"), keepdims=True), ["i", ...], [...], x
    )
    assert_close(result, x.sum(axis=(0, 2))[:, None])
