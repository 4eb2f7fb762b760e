"""The tutorial's question: is my data replicated, or partitioned, and where is it?

With ``axis_resources={'a': 'x', 'b': 'y'}`` on a 2x3 mesh (6 of the 8 devices), for arrays of every type
that the text discusses: the chunk that each device holds of a result and of an argument, and how often
each element is computed.  A device's chunk is worked out here from its coordinates in the mesh.
"""

import collections
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from tables import expressions
from tutorial_helpers import grid, normal

from xmap_compat import Mesh, xmap

SHAPE = {"x": 2, "y": 3}
SIZES = {"a": 8, "b": 12, "c": 7}
A_ON_X_B_ON_Y = {"a": "x", "b": "y"}


def mesh23(reverse=False):
    return Mesh(grid((2, 3), reverse), ("x", "y"))


def counting(*shape):
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def xmap_ab(fun, in_axes, out_axes, resources=A_ON_X_B_ON_Y):
    """An xmap that has the axes a and b, whatever its arguments have."""
    sizes = {"a": SIZES["a"], "b": SIZES["b"]}
    return xmap(fun, in_axes, out_axes, axis_sizes=sizes, axis_resources=resources)


def on_mesh(fun, in_axes, out_axes, *args, resources=A_ON_X_B_ON_Y, reverse=False):
    mapped = xmap_ab(fun, in_axes, out_axes, resources)
    with mesh23(reverse):
        return jax.block_until_ready(mapped(*args))


def assert_held(result, whole, cuts, reverse=False):
    """Every device of the mesh holds the chunk of ``whole`` that its coordinates say, and no other does.

    Args:
      whole: the NumPy array expected.
      cuts: the mesh axes over which each dimension is cut, as strings: ``("x", "")``.
    """
    held = {shard.device: np.asarray(shard.data) for shard in result.addressable_shards}
    assert len(held) == 6
    for place, device in np.ndenumerate(grid((2, 3), reverse)):
        chunk = whole
        for dimension, mesh_axes in enumerate(cuts):
            for axis in mesh_axes:  # the first is the major one
                parts = np.split(chunk, SHAPE[axis], dimension)
                chunk = parts[place["xy".index(axis)]]
        assert held[device].shape == chunk.shape
        np.testing.assert_allclose(held[device], chunk, rtol=1e-6)


# ------------------------------------------------ the types of the text, as results

# Names and positional shape of an argument, out_axes, and the mesh axes that cut each dimension of the result.
TYPES = expressions(
    """
replicated over the mesh: ("", (5, 5), {}, [])
partitioned over x: ("a", (6,), {0: "a"}, ["x"])
partitioned over x, in the last dimension: ("a", (6,), {1: "a"}, ["", "x"])
partitioned over y: ("b", (6,), {0: "b"}, ["y"])
c has no influence, transposed: ("ac", (), {0: "c", 1: "a"}, ["", "x"])
only c: ("c", (2,), {0: "c"}, [])
partitioned over the whole mesh: ("ab", (), {0: "a", 1: "b"}, ["x", "y"])
partitioned over the whole mesh, transposed: ("ab", (), {0: "b", 1: "a"}, ["y", "x"])
all three: ("abc", (2,), {0: "c", 1: "a", 3: "b"}, ["", "x", "", "y"])
""",
    "",
    globals(),
)


def argument_of(names, positions):
    """An array with these dimensions."""
    return counting(*(SIZES[name] for name in names), *positions)


def laid_out(argument, names, at):
    """The argument, whose dimensions are ``names`` and then positions, laid out as out_axes say."""
    free = iter(range(len(names), argument.ndim))
    order = []
    for dimension in range(argument.ndim):
        if dimension in at:
            order.append(names.index(at[dimension]))
        else:
            order.append(next(free))
    return argument.transpose(order)


@pytest.mark.parametrize("case", TYPES)
@pytest.mark.parametrize("reverse", [False, True])
def test_chunks_of_results(case, reverse):
    names, positions, out_axes, cuts = TYPES[case]()
    argument = argument_of(names, positions)
    result = on_mesh(lambda v: v + 1, [*names, ...], out_axes, argument, reverse=reverse)
    assert_held(result, laid_out(argument, names, out_axes) + 1, cuts, reverse)
    assert isinstance(result.sharding, NamedSharding) and result.committed
    assert result.is_fully_replicated == (not any(cuts))


def copies_of_each_chunk(names):
    """How many devices hold one chunk: those that differ only along mesh axes that cut nothing."""
    cut = {A_ON_X_B_ON_Y[n] for n in names if n in A_ON_X_B_ON_Y}
    return math.prod(size for axis, size in SHAPE.items() if axis not in cut)


# -------------------------------------------- the types of the text, inside the program


def shapes_on_a_device(mapped, *args):
    """Of the argument and the result of the program that each device runs, from XLA's own text."""
    with mesh23():
        header = mapped.lower(*args).compile().as_text().splitlines()[0]
    layout = re.search(r"entry_computation_layout=\{\((.*?)\)->(.*)\}", header)
    return [re.search(r"f32\[([\d,]*)\]", part).group(1) for part in layout.groups()]


def text_of(shape):
    return ",".join(map(str, shape))


@pytest.mark.parametrize("case", TYPES)
def test_each_device_computes_its_chunk_only(case):
    names, positions, out_axes, _ = TYPES[case]()
    argument = argument_of(names, positions)
    mapped = xmap_ab(jnp.sin, [*names, ...], out_axes)
    parts = {"a": SIZES["a"] // 2, "b": SIZES["b"] // 3, "c": SIZES["c"]}
    chunk = np.empty((*(parts[name] for name in names), *positions))
    expected = [text_of(chunk.shape), text_of(laid_out(chunk, names, out_axes).shape)]
    assert shapes_on_a_device(mapped, argument) == expected


@pytest.mark.parametrize("names", ["", "a", "b", "ac", "ab"])
def test_each_element_is_computed_once_on_each_device_that_holds_it(names):
    """The body runs for all of its elements, each as often as there are copies of its chunk."""
    seen = []

    def body(x):
        jax.debug.callback(seen.append, x)
        return x

    argument = argument_of(names, (5,))
    on_mesh(body, [*names, ...], [*names, ...], argument)
    jax.effects_barrier()
    assert {np.shape(value) for value in seen} == {(5,)}
    counts = collections.Counter(float(value[0]) for value in seen)
    assert counts == dict.fromkeys(argument[..., 0].ravel(), copies_of_each_chunk(names))


# ------------------------------------------- types follow from operations on named axes

# Of x: {'a': 8}, y: {'b': 12}, z: {}: a program, its out_axes, NumPy's answer, and the cuts of the result.
PROPAGATION = expressions(
    """
union: (lambda x, y, z: x + y, ["a", "b"], lambda x, y, z: x[:, None] + y, ["x", "y"])
union with nothing: (lambda x, y, z: x * z, ["a"], lambda x, y, z: x * z, ["x"])
sum loses the name: (lambda x, y, z: jnp.sum(x, "a"), [], lambda x, y, z: x.sum(), [])
psum loses one name: (lambda x, y, z: lax.psum(x + y, "a"), ["b"], lambda x, y, z: x.sum() + 8 * y, ["y"])
gathering replicates: (lambda x, y, z: lax.all_gather(x, "a"), [...], lambda x, y, z: x, [])
a name in out_axes only: (lambda x, y, z: y, ["a", "b"], lambda x, y, z: np.tile(y, (8, 1)), ["x", "y"])
a constant: (lambda x, y, z: jnp.ones(4), [...], lambda x, y, z: np.ones(4), [])
""",
    "",
    {**globals(), "lax": lax},
)


@pytest.mark.parametrize("case", PROPAGATION)
def test_results_of_operations_are_held_as_their_names_say(case, rng):
    program, out_axes, by_numpy, cuts = PROPAGATION[case]()
    args = normal(rng, 8), normal(rng, 12), np.float32(3)
    result = on_mesh(program, (["a"], ["b"], []), out_axes, *args)
    np.testing.assert_allclose(result, by_numpy(*map(np.float64, args)), rtol=1e-5, atol=1e-5)
    assert_held(result, np.asarray(result), cuts)


# ------------------------------------------------------- other assignments of resources

# axis_resources, and the cuts of a result with out_axes ['a', 'b']
ASSIGNMENTS = [
    ({"a": ("x",)}, ("x",)),
    ({"b": "x"}, ("", "x")),
    ({"a": "x", "b": "y"}, ("x", "y")),
    ({"b": ("x", "y")}, ("", "xy")),
    ({"b": ("y", "x")}, ("", "yx")),
]


@pytest.mark.parametrize(("resources", "cuts"), ASSIGNMENTS, ids=str)
def test_chunks_follow_the_assignment(resources, cuts):
    x = counting(8, 12)
    result = on_mesh(lambda v: 2 * v, ["a", "b"], ["a", "b"], x, resources=resources)
    assert_held(result, 2 * x, cuts)


def test_order_of_mesh_axes_is_that_of_the_sharding():
    result = on_mesh(lambda v: v, ["b"], ["b"], counting(12), resources={"b": ("y", "x")})
    assert result.sharding == NamedSharding(mesh23().physical_mesh, PartitionSpec(("y", "x")))


@pytest.mark.parametrize("resources", [None, {}])
def test_without_resources_everything_stays_on_one_device(resources):
    result = on_mesh(lambda v: v + 1, ["a", "b"], ["b", "a"], counting(8, 12), resources=resources)
    assert result.sharding == SingleDeviceSharding(jax.devices()[0])
    assert not result.committed
    (shard,) = result.addressable_shards
    np.testing.assert_array_equal(shard.data, counting(8, 12).T + 1)


# ------------------------------------------------------ where arguments come from and go


@pytest.mark.parametrize(
    "spec",
    [PartitionSpec(), PartitionSpec("x"), PartitionSpec("x", "y"), PartitionSpec(None, ("x", "y"))],
    ids=str,
)
def test_arguments_move_to_where_their_names_say(spec):
    x = counting(12, 12)
    placed = jax.device_put(x, NamedSharding(mesh23().physical_mesh, spec))
    result = on_mesh(lambda v: v - 1, {1: "b"}, {1: "b"}, placed)
    assert_held(result, x - 1, ("", "y"))
