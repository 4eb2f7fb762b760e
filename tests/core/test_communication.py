"""A split axis moves no more between devices than it must.

Programs are compiled, and the collectives of the optimized HLO are read: their kind, how many elements each
device puts in, and which devices take part.  They are compared with what must cross, counted from where
each element lies; gradients of gathers are compared with hand-written ``jax.shard_map`` programs.
"""

import functools
import math
import re
from collections import Counter
from functools import partial
from typing import Any

import comparing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import Transfer, groups_over, transfers
from jax import lax
from jax.sharding import PartitionSpec as P
from tables import expressions

import xmap_compat
from xmap_compat import pdot, xmap

DEVICES = np.array(jax.devices()).reshape(4, 2)
SIZE = {"x": 4, "y": 2}
A, B = 16, 8
SLAB = (3, 16)  # the positional shape of one element of both axes

# ------------------------------------------------------------------------- programs to compile

MESH = xmap_compat.Mesh(DEVICES, ("x", "y"))


def compiled(body, resources, *, keep="ab", operand="ab", slab=SLAB, mesh=MESH, **options):
    """The HLO of one body on an operand that varies over the axes in ``operand``."""
    in_axes = [*operand, ...]
    mapped = xmap(
        body, in_axes, [*keep, ...], axis_resources=resources, axis_sizes=SIZES, **options
    )
    shape = [SIZES[name] for name in operand]
    with mesh:
        lowered = mapped.lower(np.zeros((*shape, *slab), np.float32))
    return lowered.compile().as_text()


SIZES = {"a": A, "b": B}


def per_device(resources, *, of="ab"):
    """Elements of both axes that one device holds, times those of a slab."""
    count = math.prod(SLAB)
    for name in of:
        count *= SIZES[name] // devices_along(resources, name)
    return count


def devices_along(resources, name):
    return math.prod(SIZE[axis] for axis in mesh_axes_of(resources, name))


def mesh_axes_of(resources, name):
    axes = resources.get(name, ())
    return list(axes) if isinstance(axes, tuple) else [axes]


PLACEMENTS: list[dict[str, Any]] = [
    {"a": "x"},
    {"a": "y"},
    {"a": ("x", "y")},
    {"a": ("y", "x")},
    {"a": "x", "b": "y"},
    {"a": "y", "b": "x"},
]
FULL: list[dict[str, Any]] = [{"b": ("x", "y")}, {"b": ("y", "x")}]

over_placements = pytest.mark.parametrize("resources", PLACEMENTS, ids=str)
# An axis and its resources, also where it fills its mesh axes.
over_axes = pytest.mark.parametrize(
    ("axis", "resources"), [*(("a", r) for r in PLACEMENTS), *(("b", r) for r in FULL)], ids=str
)

# ------------------------------------------------------------------------------- reductions

REDUCTIONS = expressions(
    """
psum: lax.psum(v, "a")
pmean: lax.pmean(v, "a")
pmax: lax.pmax(v, "a")
pmin: lax.pmin(v, "a")
jnp.sum: jnp.sum(v, axis="a")
pbroadcast: lax.pbroadcast(v, "a", 3)
""",
    "v",
    globals(),
)


@pytest.mark.sampled
@over_placements
@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_is_one_all_reduce_of_what_is_left(name, resources):
    """In groups of the axis' own mesh axes: what is split over others stays where it is."""
    hlo = compiled(REDUCTIONS[name], resources, keep="b")
    assert_one_transfer(hlo, "all-reduce", per_device(resources, of="b"), resources, "a")


# -------------------------------------------------------------------------------- permutations


def rotation(n, k):
    return [(i, (i + k) % n) for i in range(n)]


def shuffle(seed):
    return list(enumerate(np.random.default_rng(seed).permutation(A).tolist()))


PERMUTATIONS = expressions(
    """
rotate 1: rotation(A, 1)
rotate 3: rotation(A, 3)
rotate 8: rotation(A, 8)
rotate 13: rotation(A, 13)
reverse: [(k, A - 1 - k) for k in range(A)]
swap neighbours: [(k, k ^ 1) for k in range(A)]
shuffle: shuffle(0)
another shuffle: shuffle(1)
chain: [(k, k + 1) for k in range(A - 1)]
one pair: [(2, 13)]
identity: [(k, k) for k in range(A)]
""",
    "",
    globals(),
)


def permuted(v, perm):
    return lax.ppermute(v, "a", perm)


def crossing_slabs(resources, perm):
    """How many elements of a lie on one device before and on another after; each unused mesh axis has a copy."""
    chunks = devices_along(resources, "a")
    width = A // chunks
    crossing = [pair for pair in perm if pair[0] // width != pair[1] // width]
    return len(crossing) * (DEVICES.size // chunks)


def slab_elements(resources):
    """What one index of a weighs on one device: its part of b, and a slab for each."""
    return per_device(resources, of="b")


@pytest.mark.sampled
@over_placements
@pytest.mark.parametrize("name", PERMUTATIONS)
def test_a_permutation_sends_exactly_the_slabs_that_change_device(name, resources):
    perm = PERMUTATIONS[name]()
    found = transfers(compiled(partial(permuted, perm=perm), resources))
    sent = 0
    for transfer in found:
        assert transfer.kind == "collective-permute"
        assert all(source != target for source, target in transfer.groups)
        sent += transfer.elements * len(transfer.groups)
    assert sent == crossing_slabs(resources, perm) * slab_elements(resources)


@pytest.mark.sampled
@over_placements
@pytest.mark.parametrize("k", [1, 5, 15])
def test_a_rotation_takes_at_most_two_permutes(k, resources):
    found = transfers(compiled(partial(permuted, perm=rotation(A, k)), resources))
    local = A // devices_along(resources, "a")
    assert len(found) <= 2
    elements = sum(transfer.elements for transfer in found)
    assert elements == min(k, local, A - k) * slab_elements(resources)


def test_a_reversal_lies_in_place_on_arrival():
    body = partial(permuted, perm=PERMUTATIONS["reverse"]())
    reverse = xmap(body, ["a"], ["a"], axis_resources={"a": "x"})
    with MESH:
        staged = str(jax.make_jaxpr(reverse)(np.ones(A, np.float32)))
    assert re.findall(r"= (ppermute|slice|concatenate|rev|gather)\b", staged) == ["rev", "ppermute"]


# What a permutation is on a device.
PERMUTED = expressions(
    """
full: ({"a": "x"}, ["a", ...], {"ppermute": 1})
full, of some: ({"a": "x"}, ["a", ...], {"ppermute": 1})
vectorized: ({}, ["a", ...], {"slice": 2, "concatenate": 1})
of equal elements: ({"a": "x"}, [...], {})
""",
    "",
    globals(),
)
OPERATIONS = re.compile(r"= (ppermute|slice|concatenate|gather|select_n|dynamic_slice)\b")


@pytest.mark.parametrize("kind", PERMUTED)
def test_a_permutation_of_whole_elements_looks_nothing_up(kind):
    resources, in_axes, expected = PERMUTED[kind]()
    perm = rotation(4, 1)
    if "some" in kind:
        perm = perm[:3]
    body = partial(permuted, perm=perm)
    rotated = xmap(body, in_axes, ["a", ...], axis_sizes={"a": 4}, axis_resources=resources)
    with MESH:
        staged = str(jax.make_jaxpr(rotated)(np.ones((4, 3))))
    assert Counter(OPERATIONS.findall(staged)) == expected


# ---------------------------------------------------------------------------- gathers, exchanges


def assert_one_transfer(hlo, kind, elements, resources, axis):
    over = groups_over(mesh_axes_of(resources, axis))
    assert transfers(hlo) == [Transfer(kind, elements, over)]


@pytest.mark.sampled
@over_axes
@pytest.mark.parametrize("options", [{}, {"axis": 1}, {"axis": 1, "tiled": True}], ids=str)
def test_a_gather_is_one_all_gather_of_each_device_part(options, axis, resources):
    left = {"a": "b", "b": "a"}[axis]
    hlo = compiled(lambda v: lax.all_gather(v, axis, **options), resources, keep=left)
    assert_one_transfer(hlo, "all-gather", per_device(resources), resources, axis)


@pytest.mark.sampled
@over_axes
@pytest.mark.parametrize("concat", [0, 1])
def test_an_exchange_is_one_all_to_all(concat, axis, resources):
    def body(v):
        return lax.all_to_all(v, axis, 1, concat, tiled=axis == "b")

    hlo = compiled(body, resources)
    assert_one_transfer(hlo, "all-to-all", per_device(resources), resources, axis)


@pytest.mark.sampled
@over_axes
def test_a_scattered_sum_is_one_reduce_scatter_of_the_local_sum(axis, resources):
    def body(v):
        return lax.psum_scatter(v, axis, scatter_dimension=1, tiled=axis == "b")

    hlo = compiled(body, resources)
    local_sum = per_device(resources)
    if axis == "a":
        local_sum = per_device(resources, of="b")
    assert_one_transfer(hlo, "reduce-scatter", local_sum, resources, axis)


# ----------------------------------------------------------------------------------- contraction


def matmul_hlo(resources, mesh=MESH):
    layer = xmap(
        lambda v, w: pdot(v, w, "inputs"),
        (["batch", "inputs"], ["inputs", "outputs"]),
        ["batch", "outputs"],
        axis_resources=resources,
    )
    with mesh:
        lowered = layer.lower(np.zeros((32, 64), np.float32), np.zeros((64, 48), np.float32))
    return lowered.compile().as_text()


# What the axes lie on, the mesh axes of the all-reduce, and its elements.
MATMULS = expressions(
    """
vectorized: ({}, [], 32 * 48)
batch: ({"batch": "x"}, [], 0)
batch and outputs: ({"batch": "x", "outputs": "y"}, [], 0)
inputs: ({"inputs": "x"}, ["x"], 32 * 48)
inputs over both: ({"inputs": ("y", "x")}, ["x", "y"], 32 * 48)
batch and inputs: ({"batch": "x", "inputs": "y"}, ["y"], 8 * 48)
inputs and outputs: ({"inputs": "x", "outputs": "y"}, ["x"], 32 * 24)
""",
    "",
    globals(),
)


@pytest.mark.parametrize("name", MATMULS)
def test_a_contraction_is_one_dot_and_at_most_one_all_reduce(name):
    resources, over, elements = MATMULS[name]()
    hlo = matmul_hlo(resources)
    assert dots(hlo) == 1
    expected = []
    if over:
        expected = [Transfer("all-reduce", elements, groups_over(over))]
    assert transfers(hlo) == expected


def dots(hlo):
    return len(re.findall(r"= \S+ dot\(", hlo))


# ------------------------------------------------------------------------- nothing to communicate

CONSTANT = expressions(
    """
psum: lax.psum(v, "a")
pmean: lax.pmean(v, "a")
pmax: lax.pmax(v, "a")
jnp.var: jnp.var(v, axis="a")
softmax: jax.nn.softmax(v, axis="a")
all_gather: lax.all_gather(v, "a")
pbroadcast: lax.pbroadcast(v, "a", 3)
pdot: pdot(v, v, "a", pos_contract=((0,), (0,)))
axis_index: v * lax.axis_index("a")
rotation: lax.ppermute(v, "a", rotation(A, 1))
chain: lax.ppermute(v, "a", PERMUTATIONS["chain"]())
pshuffle: lax.pshuffle(v, "a", [target for _, target in shuffle(0)])
psum_scatter: lax.psum_scatter(v, "a", scatter_dimension=1)
all_to_all: lax.all_to_all(v, "a", 1, 0)
""",
    "v",
    globals(),
)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "resources", [{"a": "x"}, {"a": ("y", "x")}, {"a": "x", "b": "y"}], ids=str
)
@pytest.mark.parametrize("name", CONSTANT)
def test_values_that_do_not_vary_over_an_axis_need_no_communication(name, resources):
    assert transfers(compiled(CONSTANT[name], resources, operand="b")) == []


@pytest.mark.parametrize("name", CONSTANT)
def test_a_mesh_axis_of_one_device_needs_no_communication(name):
    """XLA may keep collectives in groups of one device; they move nothing."""
    mesh = xmap_compat.Mesh(np.array(jax.devices()).reshape(4, 1, 2), ("x", "o", "y"))
    found = transfers(compiled(CONSTANT[name], {"a": "o"}, mesh=mesh))
    for transfer in found:
        assert all(len(set(group)) == 1 for group in transfer.groups)


# ----------------------------------------------------------------------------------- gathers in gradients


def gathered_in_checkpoint(gather, w, x):
    return jnp.sum(jax.checkpoint(lambda w: jnp.tanh(x @ gather(w)))(w) ** 2)


def gathered_in_scan(gather, w, x):
    def turn(c, k):
        return (jnp.tanh(c @ gather(w * k) @ jnp.ones((4, 16), c.dtype)), None)

    return jnp.sum(lax.scan(turn, x, jnp.arange(1.0, 4.0))[0])


def gathered_in_cond(gather, w, x):
    whole = gather(w)
    return jnp.sum(lax.cond(jnp.sum(x) > 0, lambda u: jnp.tanh(x @ u), lambda u: x @ u, whole))


def gathered_and_used_twice(gather, w, x):
    whole = gather(w)
    return jnp.sum(jnp.tanh(x @ whole)) + jnp.sum(jnp.sin(x @ jnp.flip(whole, 0)))


GATHERED = {
    fun.__name__: fun
    for fun in [
        gathered_in_checkpoint,
        gathered_in_scan,
        gathered_in_cond,
        gathered_and_used_twice,
    ]
}
ROWS = np.cos(np.arange(16 * 4, dtype=np.float32)).reshape(16, 4)
BATCH = np.sin(np.arange(16 * 3 * 16, dtype=np.float32)).reshape(16, 3, 16) / 4


assert_close = functools.partial(comparing.assert_close, rtol=2e-3, atol=2e-3)


def gradient_by_names(loss, resources, names=("i", "i")):
    """The gradient of a loss over two arrays, each mapped along one axis."""
    rows, batch = names
    mapped = xmap(
        lambda w, x: loss(lambda w: lax.all_gather(w, rows), w, x),
        ([rows, ...], [batch, ...]),
        [batch, ...],
        axis_resources=resources,
    )
    return jax.jit(jax.grad(lambda w, x: mapped(w, x).sum(), argnums=(0, 1)))


def gradient_on_mesh(loss, axes):
    """The same by hand: a gather of what a device holds, whose transpose is JAX's."""

    def on_device(w, x):
        def gather(w):
            return lax.all_gather(w, axes, tiled=True)

        return jax.vmap(lambda x: loss(gather, w, x))(x)

    mapped = jax.shard_map(on_device, mesh=MESH.physical_mesh, in_specs=P(axes), out_specs=P(axes))
    return jax.jit(jax.grad(lambda w, x: mapped(w, x).sum(), argnums=(0, 1)))


def moved(gradient):
    """What crosses between devices."""
    with MESH:
        return Counter(transfers(gradient.lower(ROWS, BATCH).compile().as_text()))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("axes", ["x", ("x", "y")], ids=str)
@pytest.mark.parametrize("name", GATHERED)
def test_the_gradient_of_a_gathered_weight_is_one_reduce_scatter(name, axes):
    """As by hand; with equal numbers on one device, also where the batch is another axis on the same mesh axes."""
    loss = GATHERED[name]
    gradient = gradient_by_names(loss, {"i": axes})
    assert moved(gradient) == moved(gradient_on_mesh(loss, axes))
    assert {t.kind for t in moved(gradient)} == {"all-gather", "reduce-scatter"}
    other = gradient_by_names(loss, {"rows": axes, "batch": axes}, ("rows", "batch"))
    assert moved(other) == moved(gradient)
    expected = gradient_by_names(loss, {})(ROWS, BATCH)
    with MESH:
        for result in (gradient(ROWS, BATCH), other(ROWS, BATCH)):
            assert_close(result, expected)


def shrunk(gather, w, x):
    return jnp.sum(gather(w).sum(0) * w)


def met_by_a_larger_one(gather, w, x):
    return jnp.sum(jnp.sin(gather(w)[..., None] * lax.psum(x, "i").sum(0)) * w[:, None])


def carried(gather, w, x):
    whole, sums = lax.scan(lambda c, _: (c / 2, jnp.sum(c)), gather(w), None, length=2)
    return jnp.sum(x @ whole) * jnp.sum(sums)


def jitted_for_two_uses(gather, w, x):
    gather = jax.jit(gather)
    return jnp.sum(x @ gather(w)) + jnp.sum(lax.psum(gather(w) ** 2, "i"))


OTHERWISE = [shrunk, carried, jitted_for_two_uses]


def test_a_gather_may_meet_what_varies_and_leave_as_it_is():
    """In one program, as a jitted function that is called twice, behind a rule, and in a loop's carry."""

    def gathered(v):
        return lax.all_gather(v, "i")

    jitted, ruled = jax.jit(gathered), jax.custom_jvp(gathered)
    ruled.defjvps(lambda t, out, v: gathered(t))

    def step(v):
        return lambda c: (c[0] + 1, c[1] + gathered(v))

    def looped(v):
        return lax.while_loop(lambda c: c[0] < 3, step(v), (0, jnp.zeros((16, 4))))[1] / 3

    def body(v):
        return [(way(v) * v, way(v)) for way in (gathered, jitted, ruled, looped)]

    with MESH:
        results = xmap(body, ["i", ...], [(["i", ...], [...])] * 4, axis_resources={"i": "x"})(ROWS)
    for product, whole in results:
        np.testing.assert_allclose(product, ROWS * ROWS[:, None], rtol=1e-5)
        np.testing.assert_allclose(whole, ROWS, rtol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("axes", ["x", ("x", "y")], ids=str)
@pytest.mark.parametrize("loss", OTHERWISE)
def test_what_is_gathered_and_used_otherwise_is_summed_where_it_meets_what_varies(loss, axes):
    gradient = gradient_by_names(loss, {"i": axes})
    assert not {t.kind for t in moved(gradient)} - {"all-gather", "all-reduce"}
    with MESH:
        result = gradient(ROWS, BATCH)
    expected = gradient_by_names(loss, {})(ROWS, BATCH)
    assert_close(result, expected)


def test_what_is_gathered_and_shrunk_is_summed_small():
    """A reduce-scatter would carry all of it: 48 of 64 elements from each device, where the sum has 4."""
    assert [
        t.elements for t in moved(gradient_by_names(shrunk, {"i": "x"})) if t.kind == "all-reduce"
    ] == [4]


@pytest.mark.parametrize("axes", ["x", ("x", "y")], ids=str)
def test_what_is_gathered_and_met_by_a_larger_one_is_scattered(axes):
    """A sum where the two meet would carry the product: 1 024 elements, of which the gathered one has 64."""
    gradient = gradient_by_names(met_by_a_larger_one, {"i": axes})
    assert (
        max(t.elements for t in moved(gradient) if t.kind == "all-reduce") == 48
    )  # psum of the batch
    assert [t.elements for t in moved(gradient) if t.kind == "reduce-scatter"] == [64]
    with MESH:
        result = gradient(ROWS, BATCH)
    expected = gradient_by_names(met_by_a_larger_one, {})(ROWS, BATCH)
    assert_close(result, expected)


def test_the_result_of_a_nested_xmap_is_scattered():
    """Its axis lies over y, where the values that meet its result vary over another axis of the outer one."""
    rows = xmap(jnp.sin, ["k", ...], ["k", ...], axis_resources={"k": "y"})

    def gradient(resources):
        def loss(w, x):
            return jnp.sum(x @ rows(w))

        mapped = xmap(loss, ({}, ["i", ...]), ["i", ...], axis_resources=resources)
        return jax.jit(jax.grad(lambda w, x: mapped(w, x).sum()))

    expected = jax.grad(lambda w, x: jnp.sum(x @ jnp.sin(w)))(ROWS, BATCH)
    found = moved(gradient({"i": "y"}))
    assert Transfer("reduce-scatter", ROWS.size, groups_over(["y"])) in found
    with MESH:
        np.testing.assert_allclose(gradient({"i": "y"})(ROWS, BATCH), expected, atol=2e-3)
