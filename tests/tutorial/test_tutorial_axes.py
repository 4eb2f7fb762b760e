"""The tutorial's sections on introducing, eliminating and propagating named axes.

Named dimensions leave the shape that a body sees, come back where ``out_axes`` puts them, and are paired by name;
under every assignment, against NumPy.
"""

import functools

import numpy as np
import pytest
from tutorial_helpers import assert_close, assignments, normal, run, two_axes, under

from xmap_compat import named_shape

# ----------------------------------------------------------- tensors with named axes


SOME = """
{}
{"batch": "x", "sequence": "y"} on 4x2
{"batch": ("y", "x")} on 4x2
"""


@under(assignments(SOME))
def test_body_sees_positional_dimensions_only(assignment):
    seen = []

    def body(v):
        seen.append((v.shape, v.ndim, v.size, v.dtype))
        return v + 1

    axes = {0: "batch", 2: "sequence"}
    x = np.arange(8 * 5 * 6 * 7, dtype=np.float32).reshape(8, 5, 6, 7)
    assert_close(run(assignment, body, axes, axes, x), x + 1)
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


# ------------------------------------------------- introducing and eliminating named axes


@under(two_axes("b", "x")[::3])
@pytest.mark.parametrize("order", ["bxn", "xbn", "bnx", "xnb", "nbx", "nxb"])
def test_identity_is_a_generalized_einsum(assignment, order):
    x = np.arange(8 * 12 * 3, dtype=np.float32).reshape(8, 12, 3)
    out_axes = {k: letter for k, letter in enumerate(order) if letter != "n"}
    result = run(assignment, lambda v: v, ["b", "x", ...], out_axes, x)
    np.testing.assert_array_equal(result, np.einsum(f"bxn->{order}", x))


# ------------------------------------------------------------------------ broadcasting


def named_broadcasting(seen, x, y, z):
    i = x + y
    j = y + z
    k = i + j
    seen.extend((v.shape, named_shape(v)) for v in (i, j, k))
    return k


BROADCASTING = """
{}
{"a": "x"} on 2
{"a": "x", "b": "y"} on 2x3
{"c": "x", "a": "y"} on 4x2
{"a": "y", "c": ("z", "x")} on 2x2x2
{"c": ("y", "x")} on 4x2
"""


@under(assignments(BROADCASTING))
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
