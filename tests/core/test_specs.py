"""Containers, types, keys, names and scopes: what the calls of test_fuzz.py, of plain specs and numbers, do not have.

Every result is compared with NumPy, ``jax.vmap`` or the positional function; messages are in test_misuse.py.
"""

import collections
import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from placements import mesh42
from tables import expressions

from xmap_compat import SerialLoop, xmap

# One axis ``i`` of eight elements on the 4x2 mesh.
PLACEMENTS = {"none": (), "part": "x", "full": ("x", "y"), "loop": SerialLoop(2)}


def over(*names):
    return pytest.mark.parametrize("placement", [PLACEMENTS[name] for name in names], ids=names)


def call(body, in_axes, out_axes, *args, placement=(), name="i"):
    fun = xmap(body, in_axes, out_axes, axis_resources={name: placement})
    with mesh42():
        return fun(*args)


@dataclasses.dataclass
class Layer:
    w: object
    b: object


jax.tree_util.register_dataclass(Layer, data_fields=["w", "b"], meta_fields=[])
Pair = collections.namedtuple("Pair", ["first", "second"])


def assert_same_types(got, want):
    """Equal trees, values, dtypes and weak types."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_array_equal(a, b)
        types = [jax.typeof(x) for x in (a, b)]
        assert types[0].dtype == types[1].dtype
        assert types[0].weak_type == types[1].weak_type


# ------------------------------------------------------------------ trees of specifications

I = ["i", ...]  # noqa: E741
ROWS = np.arange(8, dtype=np.float32).reshape(4, 2)
OTHER = np.arange(3, dtype=np.float32)


def doubled(tree):
    return jax.tree.map(lambda leaf: 2 * leaf, tree)


TREES = expressions(
    """
named tuple of specs: (Pair(I, {}), Pair(ROWS, OTHER))
spec for a whole named tuple: (I, Pair(ROWS, ROWS))
dataclass of specs: (Layer(w={1: "i"}, b=[...]), Layer(ROWS.T, OTHER))
dataclass in a list: ([{"a": Layer(w=I, b={})}, {}], [{"a": Layer(ROWS, OTHER)}, OTHER])
""",
    "",
    globals(),
)


@over("none", "part")
@pytest.mark.parametrize("kind", TREES)
def test_trees_of_specs(kind, placement):
    specs, tree = TREES[kind]()
    result = call(doubled, (specs,), specs, tree, placement=placement)
    assert_same_types(result, jax.tree.map(jnp.asarray, doubled(tree)))


RESULTS = expressions(
    """
a namedtuple: (lambda x: Pair(x, 1.0), Pair(I, {}), Pair(ROWS, 1.0))
a tuple, by a list: (lambda x: (x, x.sum()), [I, ["i"]], (ROWS, ROWS.sum(1)))
a dataclass: (lambda x: Layer(x, x.sum()), I, Layer(ROWS, ROWS.sum(1)))
""",
    "",
    globals(),
)


@over("none", "part")
@pytest.mark.parametrize("kind", RESULTS)
def test_trees_of_results(kind, placement):
    body, out_axes, expected = RESULTS[kind]()
    result = call(body, I, out_axes, ROWS, placement=placement)
    assert_same_types(result, jax.tree.map(jnp.asarray, expected))


# -------------------------------------------------------------------------------- sizes


def test_an_axis_of_axis_sizes_may_have_no_elements():
    def body():
        return lax.axis_index("i"), lax.psum(1, "i")

    index, size = xmap(body, (), (["i"], []), axis_sizes={"i": 0})()
    assert (index.shape, index.dtype, int(size)) == ((0,), np.int32, 0)


def test_positional_dimensions_of_size_zero():
    np.testing.assert_array_equal(xmap(jnp.sum, I, ["i"])(np.zeros((4, 0))), np.zeros(4))


# ------------------------------------------------------------------------------- types

TYPES = expressions(
    """
bool: (np.arange(8) % 3 == 0, True)
int8: (np.arange(-4, 4, dtype=np.int8), np.int8(3))
bfloat16: ((jnp.arange(8) / 3).astype(jnp.bfloat16), jnp.bfloat16(2))
float32: (np.arange(8, dtype=np.float32) / 3, 3)
complex64: (np.arange(8, dtype=np.complex64) * (1 - 2j), jnp.asarray(2.0))
weak float: (jnp.broadcast_to(2.5, (8,)), np.array(2, np.uint8))
""",
    "",
    globals(),
)


@pytest.mark.sampled
@over(*PLACEMENTS)
@pytest.mark.parametrize("kind", TYPES)
def test_values_keep_dtypes_and_weak_types(kind, placement):
    x, scalar = TYPES[kind]()

    def body(v, s):
        return v, jnp.where(v == v, v, v), v[None], v * 2, s, v * s, 4.0

    found = call(body, (["i"], {}), I, x, scalar, placement=placement)
    assert_same_types(found, jax.vmap(body, (0, None))(x, jnp.asarray(scalar)))


@pytest.mark.parametrize("scalar", [3, 2.5, True, np.float32(2)], ids=repr)
def test_scalars_are_traced(scalar):
    seen = []
    xmap(lambda s: seen.append(s) or s, {}, {})(scalar)
    assert all(isinstance(s, jax.core.Tracer) and s.shape == () for s in seen)


RING = [(k, (k + 1) % 8) for k in range(8)]
WEAK_PROGRAMS = expressions(
    """
where: jnp.where(x > 2, 1.0, s)
cond: lax.cond(x > 2, lambda: s, lambda: x)
scan: lax.scan(lambda c, _: (c * 2.0, c), x, None, length=2)
while: lax.while_loop(lambda c: c < 3, lambda c: c + s, x)
jit: jax.jit(jnp.multiply)(x, s)
grad: jax.grad(lambda v: v * s)(x)
sort: jnp.sort(jnp.stack([x, s]))
axis_index: lax.axis_index("i") * s
ppermute: lax.ppermute(x, "i", RING)
all_gather: lax.all_gather(x, "i")
""",
    "x, s",
    globals(),
)


@pytest.mark.sampled
@over("none", "part", "full")
@pytest.mark.parametrize("kind", ["weak float", "float32"])
@pytest.mark.parametrize("body", WEAK_PROGRAMS.values(), ids=WEAK_PROGRAMS.keys())
def test_programs_with_weak_scalars_give_the_types_of_vmap(body, kind, placement):
    x, _ = TYPES[kind]()
    found = call(body, (["i"], {}), I, x, 2.0, placement=placement)
    mapped = jax.vmap(body, in_axes=(0, None), axis_name="i", axis_size=8)
    assert_same_types(found, mapped(x, 2.0))


@over("none", "part", "full")
@pytest.mark.parametrize("reduce", [lax.psum, lax.pmean, lax.pmax])
def test_reductions_of_weak_values_are_strong_as_in_legacy(reduce, placement):
    def body(x, s):
        return reduce(x, "i"), reduce(s, "i")

    x, _ = TYPES["weak float"]()
    results = call(body, (["i"], {}), {}, x, 2.5, placement=placement)
    expected = 20.0 if reduce is lax.psum else 2.5
    for result in results:
        assert (result.dtype, result.weak_type) == (np.float32, False)
        np.testing.assert_allclose(result, expected)


# ------------------------------------------------------------------------------- names


class Axis(enum.Enum):
    BATCH = "batch"
    MODEL = "model"


NAMES = ["out_features", Axis.BATCH, object(), Pair(1, 2).__class__, frozenset({1}), len]
# In a body, and of the whole array.
REDUCTIONS = [
    (lax.psum, lambda x: x.sum(0)),
    (lambda v, name: jnp.sum(v, axis=(name, 0)), np.sum),
    (lambda v, name: v.mean(name), lambda x: x.mean(0)),
]


@pytest.mark.sampled
@over("none", "part", "full")
@pytest.mark.parametrize(("reduce", "oracle"), REDUCTIONS, ids=["psum", "sum", "method"])
@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_any_hashable_names_an_axis(name, reduce, oracle, placement):
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    found = call(lambda v: reduce(v, name), [name, ...], {}, x, placement=placement, name=name)
    np.testing.assert_allclose(found, oracle(x))


@over(*PLACEMENTS)
def test_ints_name_axes_for_vectorizing(placement):
    x = np.arange(48.0, dtype=np.float32).reshape(8, 2, 3)
    found = call(jnp.sum, [0, 7, ...], [7, 0], x, placement=placement, name=0)
    np.testing.assert_array_equal(found, x.sum(2).T)


def test_a_collective_reads_an_int_as_a_position():
    x = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(xmap(lambda v: lax.psum(v, 0), [0, ...], [0])(x), x.sum(1))


# ------------------------------------------------------------------------------- scope


def sum_over_i(v):
    return lax.psum(v, "i")


def test_one_name_may_be_used_by_xmaps_side_by_side():
    x = np.arange(6.0).reshape(2, 3)
    inner = xmap(sum_over_i, ["i"], [])
    result = xmap(lambda v: inner(v) * inner(v + 1), ["j", ...], ["j"])(x)
    np.testing.assert_array_equal(result, x.sum(1) * (x + 1).sum(1))


@over("none", "part", "full")
def test_a_vmap_inside_may_take_a_name_and_wins(placement):
    x = np.arange(1, 25, dtype=np.float32).reshape(8, 3)

    def body(v):
        return jax.vmap(lambda w: w / lax.psum(w, "i"), axis_name="i")(v)

    result = call(body, I, I, x, placement=placement)
    np.testing.assert_allclose(result, x / x.sum(1, keepdims=True), rtol=1e-6)


def test_an_xmap_inside_a_vmap_of_the_same_name_wins():
    x = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(jax.vmap(xmap(sum_over_i, ["i"], []), axis_name="i")(x), x.sum(1))


def test_the_order_in_which_a_dictionary_is_written_says_nothing():
    """A dictionary of positions is the same specification, and the same plan, in any order."""
    plans = []
    for spec in ({0: "i", 1: "j"}, {1: "j", 0: "i"}):
        plans.append(str(xmap(lambda v: v * 2, spec, spec).plan(np.ones((4, 3)))))
    assert plans[0] == plans[1]
