"""The tutorial's section on collectives: what worked under pmap works over names, against NumPy.

The text's example is a reversal by ``pshuffle``; the others are the rest of pmap's collectives, each with
several elements of the axis on a device as well as with one.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tutorial_helpers import Assignment, assert_close, normal, one_axis, run, two_axes, under

PLACES = one_axis("i", loops=False)
REVERSAL = list(reversed(range(8)))
SHUFFLES = [REVERSAL, [3, 1, 4, 0, 5, 2, 7, 6], list(range(8))]


@under(PLACES)
@pytest.mark.parametrize("permutation", SHUFFLES, ids=str)
def test_pshuffle(assignment, permutation):
    result = run(
        assignment,
        lambda x: lax.pshuffle(x, "i", permutation),
        ["i", ...],
        ["i", ...],
        np.arange(8) + 10,
    )
    np.testing.assert_array_equal(result, (np.arange(8) + 10)[permutation])


@under(two_axes("i", "j", loops=False))
def test_pshuffle_of_one_of_two_axes(assignment, rng):
    x = normal(rng, 8, 12, 2)
    result = run(
        assignment, lambda v: lax.pshuffle(v, "i", REVERSAL), ["i", "j", ...], ["j", "i", ...], x
    )
    np.testing.assert_array_equal(result, x[::-1].swapaxes(0, 1))


def rotated_by_two(x):
    return lax.ppermute(x, "i", [(k, (k + 2) % 8) for k in range(8)])


def pushed_off_the_end(x):
    return lax.ppermute(x, "i", [(k, k + 1) for k in range(7)])


def pushed_by_numpy(x):
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])


EVERYWHERE = (8, 8)  # The result is the same for all elements of i: broadcast along i by out_axes.

# The argument has the shape (8, 8): i and one position.  NumPy's functions take and give whole arrays.
COLLECTIVES = {
    "psum": (lambda x: lax.psum(x, "i"), lambda x: np.broadcast_to(x.sum(0), EVERYWHERE)),
    "pmean": (lambda x: lax.pmean(x, "i"), lambda x: np.broadcast_to(x.mean(0), EVERYWHERE)),
    "pmax": (lambda x: lax.pmax(x, "i"), lambda x: np.broadcast_to(x.max(0), EVERYWHERE)),
    "pmin": (lambda x: lax.pmin(x, "i"), lambda x: np.broadcast_to(x.min(0), EVERYWHERE)),
    "axis_index": (lambda x: x + lax.axis_index("i"), lambda x: x + np.arange(8)[:, None]),
    "axis_size": (lambda x: x / lax.psum(1, "i"), lambda x: x / 8),
    "ppermute": (rotated_by_two, lambda x: np.roll(x, 2, axis=0)),
    "ppermute_partial": (pushed_off_the_end, pushed_by_numpy),
    "all_gather": (lambda x: lax.all_gather(x, "i"), lambda x: np.broadcast_to(x, (8, 8, 8))),
    "all_gather_tiled": (
        lambda x: lax.all_gather(x, "i", axis=0, tiled=True),
        lambda x: np.broadcast_to(x.reshape(-1), (8, 64)),
    ),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "i"), lambda x: x.sum(0)),
    "pswapaxes": (lambda x: lax.pswapaxes(x, "i", 0), lambda x: x.T),
    "all_to_all": (lambda x: lax.all_to_all(x, "i", 0, 0), lambda x: x.T),
}


@under(PLACES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collectives_of_pmap(assignment, collective, rng):
    over_names, by_numpy = COLLECTIVES[collective]
    x = normal(rng, 8, 8)
    assert_close(run(assignment, over_names, ["i", ...], ["i", ...], x), by_numpy(x))


@under(PLACES[::2])
def test_a_ring_of_shifts_is_a_matrix_product(assignment, rng):
    """A drop-in for a pmapped ring: each element meets all others by passing them on."""
    x, weights = normal(rng, 8, 3), normal(rng, 8, 8)

    def ring(v, row):
        index, total = lax.axis_index("i"), jnp.zeros_like(v)
        for step in range(8):
            total = total + row[(index - step) % 8] * v
            v = lax.ppermute(v, "i", [(k, (k + 1) % 8) for k in range(8)])
        return total

    assert_close(run(assignment, ring, ["i", ...], ["i", ...], x, weights), weights @ x)


def test_names_that_are_not_in_scope_are_reported_with_those_that_are():
    with pytest.raises(NameError, match=r"unbound axis name: nope.*i: 8"):
        run(Assignment({"i": "x"}), lambda x: lax.psum(x, "nope"), ["i"], ["i"], np.arange(8))
