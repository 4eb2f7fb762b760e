"""The tutorial's section on parallelism: meshes, resources, and what they never change.

A matrix product written as an inner product over two names, on one device and on meshes of all shapes;
where resource names come from, and the errors when they are missing, or are shared by
names that meet.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tutorial_helpers import Assignment, assert_close, grid, normal, run, two_axes, under

from xmap_compat import Mesh, mesh, xmap

LEFT_RIGHT = ({0: "left"}, {1: "right"})
BOTH_MESH = {"left": "x", "right": "y"}


def matmul(**options):
    return xmap(jnp.vdot, in_axes=LEFT_RIGHT, out_axes=["left", "right", ...], **options)


@pytest.fixture
def square(rng):
    return normal(rng, 24, 24)


# ------------------------------------------------------------ local and distributed


@under(
    [
        *two_axes("left", "right"),
        Assignment({"left": "x", "right": "y"}, (2, 4)),
        Assignment({"left": "x", "right": "y"}, (2, 4), reverse=True),
        Assignment({"left": "y", "right": ("z", "x")}, (2, 2, 2)),
        Assignment({"left": ("x", "y", "z")}, (2, 2, 2)),
    ]
)
def test_inner_product_over_two_names_is_a_matrix_product(assignment, rng):
    left, right = normal(rng, 16, 5), normal(rng, 5, 12)
    result = run(assignment, jnp.vdot, LEFT_RIGHT, ["left", "right", ...], left, right)
    assert_close(result, np.float64(left) @ right)


@pytest.mark.parametrize("context", [Mesh, mesh])
def test_local_and_distributed_matmul(context, square):
    mesh_def = np.array(jax.devices()).reshape((2, 4)), ("x", "y")
    local = matmul()(square, square)
    with context(*mesh_def):
        distributed = matmul(axis_resources=BOTH_MESH)(square, square)
    assert_close(local, np.float64(square) @ square)
    assert_close(distributed, np.float64(square) @ square)
    assert len(local.sharding.device_set) == 1
    assert len(distributed.sharding.device_set) == 8


def test_one_function_follows_the_mesh_in_scope(square):
    distributed = matmul(axis_resources=BOTH_MESH)
    for shape in [(2, 4), (4, 2), (2, 2), (2, 4)]:
        with mesh(grid(shape), ("x", "y")):
            result = distributed(square, square)
        assert_close(result, np.float64(square) @ square)
        assert {s.data.shape for s in result.addressable_shards} == {
            (24 // shape[0], 24 // shape[1])
        }


@pytest.mark.parametrize("resources", [BOTH_MESH, {"left": "y"}, {"right": ("y", "x")}], ids=str)
def test_a_distributed_matmul_needs_no_communication(resources, square):
    with mesh(grid((2, 4)), ("x", "y")):
        compiled = matmul(axis_resources=resources).lower(square, square).compile().as_text()
    communication = [
        "all-reduce",
        "all-gather",
        "all-to-all",
        "collective-permute",
        "reduce-scatter",
    ]
    assert [c for c in communication if c in compiled] == []


# --------------------------------------------------------- where resource names come from


def missing_resources(names):
    return (
        "In-scope resources are insufficient to execute the xmapped function. "
        rf"The missing resources are: \{{{', '.join(map(repr, names))}\}}"
    )


def test_without_a_mesh_the_missing_resources_are_named(square):
    distributed = matmul(axis_resources=BOTH_MESH)
    with pytest.raises(ValueError, match=missing_resources("xy")):
        distributed(square, square)


def test_a_mesh_with_other_names_lacks_the_resource(square):
    distributed = matmul(axis_resources=BOTH_MESH)
    with mesh(grid((2, 4)), ("x", "z")), pytest.raises(ValueError, match=missing_resources("y")):
        distributed(square, square)


def test_a_mesh_as_a_decorator(square):
    @mesh(grid((2, 4)), ("x", "y"))
    def product(x):
        return matmul(axis_resources=BOTH_MESH)(x, x)

    assert_close(product(square), np.float64(square) @ square)


def test_a_mesh_needs_a_name_for_each_dimension():
    with pytest.raises(ValueError, match="one axis name for each dimension"):
        mesh(grid((2, 4)), ("x",))


# --------------------------------------------------------- two names on one mesh axis


def sum_two_args(x, y):
    return jnp.sum(x, axis="a") + jnp.sum(y, axis="b")


SHARED = [
    Assignment({"a": "x", "b": "x"}, (4,)),
    Assignment({"a": "x", "b": "x"}, (2, 3)),
    Assignment({"a": ("x", "y"), "b": "y"}, (2, 2)),
    Assignment({"a": ("y", "x"), "b": ("x", "y")}, (2, 2)),
]


@under(
    [Assignment({}, None), Assignment({"a": "x"}, (4,)), Assignment({"a": "y", "b": "x"}), *SHARED]
)
def test_names_that_never_meet_share_a_mesh_axis(assignment, rng):
    q, u = normal(rng, 4), normal(rng, 12)
    result = run(assignment, sum_two_args, (["a", ...], ["b", ...]), [...], q, u)
    assert_close(result, np.float64(q).sum() + u.sum())


@under(SHARED)
def test_names_that_meet_in_an_argument_are_refused(assignment):
    with pytest.raises(
        TypeError, match=r"Axes `a` and `b` are both mapped to the resource `.`, but they coincide"
    ):
        run(
            assignment,
            lambda x: x,
            ["a", "b", ...],
            ["a", "b", ...],
            np.ones((4, 12, 2, 8), np.float32),
        )


@under(SHARED)
def test_names_that_meet_in_an_operation_are_refused(assignment):
    message = (
        r"Axes `a` and `b` are both assigned .* the result of add at .*test_tutorial_parallelism"
    )
    with pytest.raises(TypeError, match=message):
        run(assignment, lambda x, y: x + y, (["a"], ["b"]), ["a", "b"], np.ones(4), np.ones(12))
