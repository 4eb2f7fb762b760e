"""The tutorial's sections on introducing, eliminating and propagating named axes.

Named dimensions leave the shape that a body sees, come back where ``out_axes`` puts them, never mix with
positional ones, and meet each other by name; under every assignment, against NumPy and SciPy.
"""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jax.scipy.linalg import expm_frechet
from tutorial_helpers import Assignment, assert_close, normal, one_axis, run, two_axes, under

from xmap_compat import named_shape, xmap

# ----------------------------------------------------------- tensors with named axes


def recording(fun, seen):
    """``fun``, noting the type of each argument as the body sees it."""

    def body(*args):
        seen.extend((x.shape, x.ndim, x.size, x.dtype) for x in args)
        return fun(*args)

    return body


@under(
    [
        Assignment({}, None),
        Assignment({"batch": "x", "sequence": "y"}),
        Assignment({"batch": ("y", "x")}),
    ]
)
def test_body_sees_positional_dimensions_only(assignment):
    seen = []
    x = np.arange(8 * 5 * 6 * 7, dtype=np.float32).reshape(8, 5, 6, 7)
    body = recording(lambda v: v + 1, seen)
    result = run(assignment, body, {0: "batch", 2: "sequence"}, {0: "batch", 2: "sequence"}, x)
    assert_close(result, x + 1)
    assert set(seen) == {((5, 7), 2, 35, np.dtype("float32"))}


@under(two_axes("batch", "sequence"))
def test_positional_program_is_repeated_for_every_named_element(assignment, rng):
    """The small NumPy program of the text: a matrix product, then broadcasting against a longer array."""

    def program(x, y, w):
        return x.dot(y) + w

    x, y, w = normal(rng, 8, 2, 3), normal(rng, 3, 12, 5), normal(rng, 7, 1, 5)
    in_axes = (["batch", ...], {1: "sequence"}, [...])
    result = run(assignment, program, in_axes, {0: "sequence", 4: "batch"}, x, y, w)
    assert_close(result, np.einsum("bij,jsk->sikb", x, y)[:, None] + w[None, :, :, :, None])


@under(
    [
        Assignment({}, None),
        Assignment({"batch": "x", "sequence": "y"}),
        Assignment({"batch": ("y", "x")}),
    ]
)
def test_type_of_an_array_has_two_components(assignment):
    """The annotation of the text: a shape, and a named shape without an order."""
    seen = []

    def body(e):
        seen.extend([e.named_shape, named_shape(e), named_shape(jnp.ones(3))])
        return e

    run(
        assignment,
        body,
        {0: "batch", 2: "sequence"},
        {0: "batch", 2: "sequence"},
        np.ones((8, 5, 6, 7)),
    )
    assert seen[:3] == [{"batch": 8, "sequence": 6}, {"sequence": 6, "batch": 8}, {}]


# ------------------------------------------------- introducing and eliminating named axes

POSITIONS = list(itertools.product(range(2), range(2)))


@under(one_axis("batch"))
@pytest.mark.parametrize(("source", "target"), POSITIONS)
def test_identity_moves_a_dimension(assignment, source, target):
    x = np.arange(40, dtype=np.float32).reshape((8, 5) if source == 0 else (5, 8))
    seen = []
    result = run(assignment, recording(lambda v: v, seen), {source: "batch"}, {target: "batch"}, x)
    np.testing.assert_array_equal(result, np.moveaxis(x, source, target))
    assert {shape for shape, *_ in seen} == {(5,)}


@under([Assignment({}, None), Assignment({"batch": "x"})])
def test_dictionary_and_list_spell_the_same_mapping(assignment):
    x = np.arange(40, dtype=np.float32).reshape(8, 5)
    for in_axes, out_axes in itertools.product(
        [{0: "batch"}, ["batch", ...]], [{1: "batch"}, [None, "batch", ...]]
    ):
        np.testing.assert_array_equal(run(assignment, lambda v: v, in_axes, out_axes, x), x.T)


@under(two_axes("b", "x")[::3])
@pytest.mark.parametrize("order", ["bxn", "xbn", "bnx", "xnb", "nbx", "nxb"])
def test_identity_is_a_generalized_einsum(assignment, order):
    x = np.arange(8 * 12 * 3, dtype=np.float32).reshape(8, 12, 3)
    out_axes = {k: letter for k, letter in enumerate(order) if letter != "n"}
    result = run(assignment, lambda v: v, ["b", "x", ...], out_axes, x)
    np.testing.assert_array_equal(result, np.einsum(f"bxn->{order}", x))


@under(one_axis("i"))
def test_one_name_for_two_arguments_of_one_size(assignment):
    x, y = np.arange(8), np.arange(8)[::-1] - 3
    result = run(assignment, lambda x, y: x * y, (["i", ...], ["i", ...]), ["i", ...], x, y)
    np.testing.assert_array_equal(result, np.einsum("i,i->i", x, y))


@under(
    [Assignment({}, None), Assignment({}), Assignment({"i": "x"}), Assignment({"i": ("y", "x")})]
)
def test_one_name_for_two_sizes_is_refused(assignment):
    message = (
        r"The size of axis i was previously inferred to be 5, but found an argument of shape \(7,\) with in_axes "
        r"specification \['i', (\.\.\.|Ellipsis)\]\. Shape mismatch occurs in dimension 0: 7 != 5"
    )
    with pytest.raises(ValueError, match=message):
        run(
            assignment,
            lambda x, y: x * y,
            (["i", ...], ["i", ...]),
            ["i", ...],
            jnp.arange(5),
            jnp.arange(7),
        )


# ----------------------------------------------------- interactions with positional axes

frechet = functools.partial(expm_frechet, compute_expm=False)


def frechet_by_scipy(a, e):
    return scipy.linalg.expm_frechet(np.float64(a), np.float64(e), compute_expm=False)


# The program is long to compile, so that a few assignments stand for all.
@under([Assignment({}, None), Assignment({"b": "y"}), Assignment({"b": ("y", "x")}, (2, 2))])
def test_frechet_derivative_of_a_batch(assignment, rng):
    a, e = 0.5 * normal(rng, 4, 3, 3), normal(rng, 4, 3, 3)
    result = run(assignment, frechet, (["b", ...], ["b", ...]), ["b", ...], a, e)
    assert_close(result, np.stack([frechet_by_scipy(*pair) for pair in zip(a, e)]), atol=1e-4)


@under([Assignment({}, None), Assignment({"ba": "y"}), Assignment({"ba": "x", "be": "y"}, (2, 3))])
def test_frechet_derivative_of_all_pairs(assignment, rng):
    a, e = 0.5 * normal(rng, 4, 3, 3), normal(rng, 3, 3, 3)
    result = run(assignment, frechet, (["ba", ...], ["be", ...]), ["ba", "be", ...], a, e)
    assert_close(result, np.stack([[frechet_by_scipy(x, y) for y in e] for x in a]), atol=1e-4)


# ------------------------------------------------------------------------ broadcasting


def named_broadcasting(seen, x, y, z):
    i = x + y
    j = y + z
    k = i + j
    seen.extend((v.shape, named_shape(v)) for v in (i, j, k))
    return k


BROADCASTING = [
    Assignment({}, None),
    Assignment({}),
    Assignment({"a": "x"}, (2,)),
    Assignment({"b": "y"}, (2, 3)),
    Assignment({"a": "x", "b": "y"}, (2, 3)),
    Assignment({"c": "x", "a": "y"}),
    Assignment({"a": "y", "c": ("z", "x")}, (2, 2, 2)),
    Assignment({"c": ("y", "x")}),
]


@under(BROADCASTING)
@pytest.mark.parametrize("out", ["abc", "cab"])
def test_axes_broadcast_by_name_next_to_positions(assignment, out, rng):
    x, y, z = normal(rng, 2, 2, 1, 1), normal(rng, 3, 1, 3, 1), normal(rng, 8, 1, 1, 5)
    seen = []
    body = functools.partial(named_broadcasting, seen)
    result = run(assignment, body, (["a", ...], ["b", ...], ["c", ...]), [*out, ...], x, y, z)
    by_name = x[:, None, None] + 2 * y[None, :, None] + z[None, None, :]
    assert_close(result, np.einsum(f"abcijk->{out}ijk", by_name))
    assert result.shape[3:] == (2, 3, 5)
    assert seen[:3] == [
        ((2, 3, 1), {"a": 2, "b": 3}),
        ((1, 3, 5), {"b": 3, "c": 8}),
        ((2, 3, 5), {"a": 2, "b": 3, "c": 8}),
    ]


@under(two_axes("a", "b"))
def test_order_of_names_has_no_meaning(assignment, rng):
    """Dimensions pair up by name, wherever each argument had them."""
    x, y = normal(rng, 8, 12), normal(rng, 12, 8)
    result = run(assignment, lambda x, y: x - y, (["a", "b"], ["b", "a"]), ["b", "a"], x, y)
    assert_close(result, x.T - y)


@under(two_axes("a", "b"))
def test_missing_names_broadcast_like_missing_positions(assignment, rng):
    """The recap of the text: pairs of one name are matched, all others are carried over."""
    x, y = normal(rng, 8, 2), normal(rng, 12)
    in_axes = (["a", ...], ["b", ...])
    result = run(assignment, lambda x, y: jnp.maximum(x, y), in_axes, ["b", "a", ...], x, y)
    assert_close(result, np.maximum(x[None], y[:, None, None]))


def test_the_wrapped_function_keeps_its_name():
    def my_func(x):
        """Does nothing."""
        return x

    mapped = xmap(my_func, {0: "batch"}, {1: "batch"})
    assert (mapped.__name__, mapped.__doc__, mapped.__wrapped__) == (
        "my_func",
        "Does nothing.",
        my_func,
    )
