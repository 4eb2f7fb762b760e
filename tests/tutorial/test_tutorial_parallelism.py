"""The tutorial's section on parallelism: meshes, resources, and what they never change.

A matrix product written as an inner product over two names, on one device and on meshes of all shapes, and two names
on one mesh axis.
"""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from tutorial_helpers import assert_close, assignments, grid, normal, run, two_axes, under

from xmap_compat import mesh, xmap

LEFT_RIGHT = ({0: "left"}, {1: "right"})
BOTH_MESH = {"left": "x", "right": "y"}


def matmul(**options):
    return xmap(jnp.vdot, in_axes=LEFT_RIGHT, out_axes=["left", "right", ...], **options)


@pytest.fixture
def square(rng):
    return normal(rng, 24, 24)


# ------------------------------------------------------------ local and distributed


ON_OTHER_MESHES = assignments(
    """
{"left": "x", "right": "y"} on 2x4 reversed
{"left": "y", "right": ("z", "x")} on 2x2x2
{"left": ("x", "y", "z")} on 2x2x2
"""
)


@under(two_axes("left", "right") + ON_OTHER_MESHES)
def test_inner_product_over_two_names_is_a_matrix_product(assignment, rng):
    left, right = normal(rng, 16, 5), normal(rng, 5, 12)
    result = run(assignment, jnp.vdot, LEFT_RIGHT, ["left", "right", ...], left, right)
    assert_close(result, np.float64(left) @ right)


def test_one_function_follows_the_mesh_in_scope(square):
    distributed = matmul(axis_resources=BOTH_MESH)
    for shape in [(2, 4), (4, 2), (2, 2), (2, 4)]:
        with mesh(grid(shape), ("x", "y")):
            result = distributed(square, square)
        assert_close(result, np.float64(square) @ square)
        rows, columns = shape
        for shard in result.addressable_shards:
            assert shard.data.shape == (24 // rows, 24 // columns)


@pytest.mark.parametrize("resources", [BOTH_MESH, {"left": "y"}, {"right": ("y", "x")}], ids=str)
def test_a_distributed_matmul_needs_no_communication(resources, square):
    with mesh(grid((2, 4)), ("x", "y")):
        compiled = matmul(axis_resources=resources).lower(square, square).compile().as_text()
    collectives = r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    assert not re.search(collectives, compiled)


# --------------------------------------------------------- two names on one mesh axis


def sum_two_args(x, y):
    return jnp.sum(x, axis="a") + jnp.sum(y, axis="b")


SHARED = assignments(
    """
{"a": "x", "b": "x"} on 2x3
{"a": ("x", "y"), "b": "y"} on 2x2
{"a": ("y", "x"), "b": ("x", "y")} on 2x2
"""
)


@under(SHARED)
def test_names_that_never_meet_share_a_mesh_axis(assignment, rng):
    q, u = normal(rng, 4), normal(rng, 12)
    result = run(assignment, sum_two_args, (["a", ...], ["b", ...]), [...], q, u)
    assert_close(result, np.float64(q).sum() + u.sum())


@under(SHARED)
def test_names_that_meet_in_an_operation_are_refused(assignment):
    message = (
        r"Axes `a` and `b` are both assigned .* the result of add at .*test_tutorial_parallelism"
    )
    with pytest.raises(TypeError, match=message):
        run(assignment, lambda x, y: x + y, (["a"], ["b"]), ["a", "b"], np.ones(4), np.ones(12))
