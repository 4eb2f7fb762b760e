"""The tutorial's question: is my data replicated, or partitioned, and where is it?

With ``axis_resources={'a': 'x', 'b': 'y'}`` on a 2x3 mesh (6 of the 8 devices), for arrays of every type
that the text discusses: the chunk that each device holds of a result and of an argument, and how often
each element is computed.  A device's chunk is worked out here from its coordinates in the mesh.
"""

import collections
import math
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
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


def coordinates(reverse=False):
    """Each device's place in the mesh."""
    return {
        device: dict(zip("xy", place)) for place, device in np.ndenumerate(grid((2, 3), reverse))
    }


def chunk(place, size, mesh_axes):
    """The elements that a device holds of a dimension cut over mesh axes, the first being the major one."""
    index, parts = 0, 1
    for axis in mesh_axes:
        index, parts = index * SHAPE[axis] + place[axis], parts * SHAPE[axis]
    return slice(index * size // parts, (index + 1) * size // parts)


def assert_held(result, whole, cuts, reverse=False):
    """Every device of the mesh holds the chunk of ``whole`` that its coordinates say, and no other does.

    Args:
      whole: the NumPy array expected.
      cuts: the mesh axes over which each dimension is cut, as strings: ``("x", "")``.
    """
    cuts = [*cuts, *[""] * (whole.ndim - len(cuts))]
    places = coordinates(reverse)
    assert {shard.device for shard in result.addressable_shards} == set(places)
    for shard in result.addressable_shards:
        held = tuple(chunk(places[shard.device], size, cut) for size, cut in zip(whole.shape, cuts))
        assert tuple(slice(*i.indices(size)) for i, size in zip(shard.index, whole.shape)) == tuple(
            slice(*h.indices(size)) for h, size in zip(held, whole.shape)
        )
        assert shard.data.shape == whole[held].shape
        np.testing.assert_allclose(shard.data, whole[held], rtol=1e-6)


# ------------------------------------------------ the types of the text, as results

# positional shape, named axes, out_axes, mesh axes that cut each dimension of the result
TYPES = {
    "replicated over the mesh": ((5, 5), "", [...], ()),
    "partitioned over x": ((6,), "a", ["a", ...], ("x",)),
    "partitioned over x, in the last dimension": ((6,), "a", {1: "a"}, ("", "x")),
    "partitioned over y": ((6,), "b", ["b", ...], ("y",)),
    "c has no influence": ((), "ac", ["a", "c"], ("x",)),
    "c has no influence, transposed": ((), "ac", ["c", "a"], ("", "x")),
    "only c": ((2,), "c", ["c", ...], ()),
    "partitioned over the whole mesh": ((), "ab", ["a", "b"], ("x", "y")),
    "partitioned over the whole mesh, transposed": ((), "ab", ["b", "a"], ("y", "x")),
    "all three": ((2,), "abc", {0: "c", 1: "a", 3: "b"}, ("", "x", "", "y")),
}


def names_at(out_axes):
    return (
        out_axes
        if isinstance(out_axes, dict)
        else {k: n for k, n in enumerate(out_axes) if n is not ...}
    )


def laid_out(argument, positions, names, out_axes):
    """The argument, whose dimensions are ``names`` and then positions, laid out as ``out_axes`` says."""
    at = names_at(out_axes)
    free = iter(range(len(names), len(names) + len(positions)))
    return argument.transpose(
        [names.index(at[k]) if k in at else next(free) for k in range(argument.ndim)]
    )


@pytest.mark.parametrize("case", TYPES)
@pytest.mark.parametrize("reverse", [False, True])
def test_chunks_of_results(case, reverse):
    positions, names, out_axes, cuts = TYPES[case]
    argument = counting(*(SIZES[n] for n in names), *positions)
    result = on_mesh(lambda v: v + 1, [*names, ...], out_axes, argument, reverse=reverse)
    assert_held(result, laid_out(argument, positions, names, out_axes) + 1, cuts, reverse)
    assert isinstance(result.sharding, NamedSharding) and result.committed
    assert result.is_fully_replicated == (not any(cuts))


def copies_of_each_chunk(names):
    """How many devices hold one chunk: those that differ only along mesh axes that cut nothing."""
    cut = {A_ON_X_B_ON_Y[n] for n in names if n in A_ON_X_B_ON_Y}
    return math.prod(size for axis, size in SHAPE.items() if axis not in cut)


# -------------------------------------------- the types of the text, inside the program


def device_program_types(mapped, *args):
    """Shapes of the arguments and results of the program that each device runs, from XLA's own text."""
    with mesh23():
        header = mapped.lower(*args).compile().as_text().splitlines()[0]
    layout = re.search(r"entry_computation_layout=\{\((.*?)\)->(.*)\}", header)
    return [
        [
            tuple(map(int, filter(None, dims.split(","))))
            for dims in re.findall(r"f32\[([\d,]*)\]", part)
        ]
        for part in layout.groups()
    ]


@pytest.mark.parametrize("case", TYPES)
def test_each_device_computes_its_chunk_only(case):
    positions, names, out_axes, cuts = TYPES[case]
    shape = (*(SIZES[n] for n in names), *positions)
    mapped = xmap_ab(jnp.sin, [*names, ...], out_axes)
    inputs, results = device_program_types(mapped, counting(*shape))
    parts = {name: SHAPE[axis] for name, axis in A_ON_X_B_ON_Y.items()}
    assert inputs == [(*(SIZES[n] // parts.get(n, 1) for n in names), *positions)]
    whole = laid_out(counting(*shape), positions, names, out_axes).shape
    cuts = [*cuts, *[""] * (len(whole) - len(cuts))]
    assert results == [tuple(size // SHAPE.get(cut, 1) for size, cut in zip(whole, cuts))]


class Sightings:
    """Counts what a body reports through a callback."""

    def __init__(self):
        self.lock = threading.Lock()
        self.values = collections.Counter()
        self.shapes = set()

    def report(self, value):
        with self.lock:
            self.values[float(np.ravel(value)[0])] += 1
            self.shapes.add(np.shape(value))

    def body(self, x):
        jax.debug.callback(self.report, x)
        return x


@pytest.mark.parametrize(
    ("positions", "names"),
    [((5, 5), ""), ((6,), "a"), ((6,), "b"), ((), "ac"), ((), "ab")],
    ids=str,
)
def test_each_element_is_computed_once_on_each_device_that_holds_it(positions, names):
    """The body runs for all of its elements, each as often as there are copies of its chunk."""
    argument = counting(*(SIZES[n] for n in names), *positions)
    seen = Sightings()
    on_mesh(seen.body, [*names, ...], [*names, ...], argument)
    jax.effects_barrier()
    firsts = argument[(..., *[0] * len(positions))].ravel()
    assert seen.values == {float(value): copies_of_each_chunk(names) for value in firsts}
    assert seen.shapes == {positions}


# ------------------------------------------- types follow from operations on named axes

# A program on x: {'a': 8}, y: {'b': 12}, z: {}; its out_axes, NumPy's answer, and the cuts of the result.
PROPAGATION = {
    "union": (lambda x, y, z: x + y, ["a", "b"], lambda x, y, z: x[:, None] + y, ("x", "y")),
    "union with nothing": (lambda x, y, z: x * z, ["a"], lambda x, y, z: x * z, ("x",)),
    "sum loses the name": (lambda x, y, z: jnp.sum(x, "a"), [], lambda x, y, z: x.sum(), ()),
    "psum loses one name": (
        lambda x, y, z: lax.psum(x + y, "a"),
        ["b"],
        lambda x, y, z: x.sum() + 8 * y,
        ("y",),
    ),
    "gathering replicates": (lambda x, y, z: lax.all_gather(x, "a"), [...], lambda x, y, z: x, ()),
    "index has the name": (
        lambda x, y, z: lax.axis_index("b") + x,
        ["a", "b"],
        lambda x, y, z: x[:, None] + np.arange(12),
        ("x", "y"),
    ),
    "a name in out_axes only": (
        lambda x, y, z: y,
        ["a", "b"],
        lambda x, y, z: np.tile(y, (8, 1)),
        ("x", "y"),
    ),
    "a constant": (lambda x, y, z: jnp.ones(4), [...], lambda x, y, z: np.ones(4), ()),
}


@pytest.mark.parametrize("case", PROPAGATION)
def test_results_of_operations_are_held_as_their_names_say(case, rng):
    program, out_axes, by_numpy, cuts = PROPAGATION[case]
    args = normal(rng, 8), normal(rng, 12), np.float32(3)
    result = on_mesh(program, (["a"], ["b"], []), out_axes, *args)
    whole = by_numpy(*map(np.float64, args))
    assert_held_closely(result, whole, cuts)


def assert_held_closely(result, whole, cuts):
    np.testing.assert_allclose(result, whole, rtol=1e-5, atol=1e-5)
    assert_held(result, np.asarray(result), cuts)


# ------------------------------------------------------- other assignments of resources

# axis_resources, and the cuts of a result with out_axes ['a', 'b']
ASSIGNMENTS = [
    ({"a": ("x",)}, ("x", "")),
    ({"b": "y"}, ("", "y")),
    ({"b": "x"}, ("", "x")),
    ({"a": "x", "b": "y"}, ("x", "y")),
    ({"b": ("x", "y")}, ("", "xy")),
    ({"b": ("y", "x")}, ("", "yx")),
]


@pytest.mark.parametrize(("resources", "cuts"), ASSIGNMENTS, ids=str)
def test_chunks_follow_the_assignment(resources, cuts):
    x = counting(8, 12)
    assert_held(
        on_mesh(lambda v: 2 * v, ["a", "b"], ["a", "b"], x, resources=resources), 2 * x, cuts
    )


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
