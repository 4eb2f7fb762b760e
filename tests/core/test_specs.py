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
from tables import expressions

from xmap_compat import SerialLoop, xmap

# One axis ``i`` of eight elements on the 4x2 mesh.
PLACEMENTS = {
    "none": (),
    "part": "x",
    "full": ("x", "y"),
    "permuted": ("y", "x"),
    "loop": SerialLoop(2),
    "part and loop": ("x", SerialLoop(2)),
}
MESH_PLACEMENTS = {name: PLACEMENTS[name] for name in ("none", "part", "full", "permuted")}


def over(placements):
    return pytest.mark.parametrize("placement", placements.values(), ids=placements.keys())


@dataclasses.dataclass
class Layer:
    w: object
    b: object


jax.tree_util.register_dataclass(Layer, data_fields=["w", "b"], meta_fields=[])
Pair = collections.namedtuple("Pair", ["first", "second"])


def assert_trees_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_array_equal(a, b)


def assert_same_types(got, want):
    """Equal values, dtypes and weak types."""
    assert_trees_equal(got, want)

    def types(tree):
        return [(x.shape, x.dtype, x.weak_type) for x in map(jax.typeof, jax.tree.leaves(tree))]

    assert types(got) == types(want)


# ------------------------------------------------------------------ trees of specifications

I = ["i", ...]  # noqa: E741
ROWS = np.arange(8, dtype=np.float32).reshape(4, 2)
OTHER = np.arange(3, dtype=np.float32)

# in_axes, arguments, and for every leaf of the arguments the position of ``i`` (None: not mapped).
TREES = {
    "named tuple of specs": ((Pair(I, {}),), (Pair(ROWS, OTHER),), (Pair(0, None),)),
    "spec for a whole named tuple": ((I,), (Pair(ROWS, ROWS),), (Pair(0, 0),)),
    "dataclass of specs": (
        (Layer(w={1: "i"}, b=[...]),),
        (Layer(ROWS.T, OTHER),),
        (Layer(1, None),),
    ),
    "dataclass in a dict in a list": (
        ([{"a": Layer(w=I, b={})}, {}],),
        ([{"a": Layer(ROWS, OTHER)}, OTHER],),
        ([{"a": Layer(0, None)}, None],),
    ),
}


def centred(leaf, position):
    return leaf if position is None else leaf - leaf.mean(position, keepdims=True)


@pytest.mark.sampled
@pytest.mark.parametrize("placement", [(), "x"], ids=["none", "full"])
@pytest.mark.parametrize(("in_axes", "args", "positions"), TREES.values(), ids=TREES.keys())
def test_trees_of_specs(in_axes, args, positions, placement, mesh42):
    leaves, where = jax.tree.leaves(args), _positions(args, positions)

    def body(*args):
        def subtract(v, at):
            return v if at is None else v - lax.pmean(v, "i")

        flat, tree = jax.tree.flatten(args)
        return jax.tree.unflatten(tree, map(subtract, flat, where))

    out_axes = tuple(in_axes) if isinstance(in_axes, list) and in_axes is not I else in_axes
    with mesh42:
        result = xmap(body, in_axes, out_axes, axis_resources={"i": placement})(*args)
    assert jax.tree.structure(result) == jax.tree.structure(args)
    for got, leaf, position in zip(jax.tree.leaves(result), leaves, where):
        np.testing.assert_allclose(got, centred(leaf, position), atol=1e-6)


def _positions(args, positions):
    """The positions in the order of the leaves of ``args``."""

    def is_none(x):
        return x is None

    pairs = zip(jax.tree.leaves(args, is_leaf=is_none), jax.tree.leaves(positions, is_leaf=is_none))
    return [at for leaf, at in pairs if leaf is not None]


# -------------------------------------------------------------------------------- sizes


def test_an_axis_of_axis_sizes_may_have_no_elements():
    count = xmap(
        lambda: (lax.axis_index("i"), lax.psum(1, "i")), (), (["i"], []), axis_sizes={"i": 0}
    )
    index, size = count()
    assert (index.shape, index.dtype, int(size)) == ((0,), np.int32, 0)


def test_positional_dimensions_of_size_zero():
    np.testing.assert_array_equal(xmap(jnp.sum, ["i", ...], ["i"])(np.zeros((4, 0))), np.zeros(4))


# ------------------------------------------------------------------------------- types

MAPPED = {
    "bool": np.arange(8) % 3 == 0,
    "int8": np.arange(-4, 4, dtype=np.int8),
    "bfloat16": (jnp.arange(8) / 3).astype(jnp.bfloat16),
    "float32": np.arange(8, dtype=np.float32) / 3,
    "complex64": (np.arange(8) * (1 - 2j)).astype(np.complex64),
    "weak float": jnp.broadcast_to(2.5, (8,)),
}
TYPED_PLACEMENTS = {name: PLACEMENTS[name] for name in ("none", "part", "full", "loop")}


@pytest.mark.sampled
@over(TYPED_PLACEMENTS)
@pytest.mark.parametrize("x", MAPPED.values(), ids=MAPPED.keys())
def test_mapped_values_keep_dtypes_and_weak_types(x, placement, mesh42):
    def body(v):
        return v, jnp.where(v == v, v, v), v[None], v * 2

    with mesh42:
        result = xmap(body, ["i"], ["i", ...], axis_resources={"i": placement})(x)
    assert_same_types(result, jax.vmap(body)(x))


UNMAPPED = {
    "int": 3,
    "bool": True,
    "numpy int8": np.int8(3),
    "numpy array of rank 0": np.array(2, np.uint8),
    "weak jax scalar": jnp.asarray(2.0),
    "bfloat16": jnp.bfloat16(2),
}


@pytest.mark.sampled
@over(TYPED_PLACEMENTS)
@pytest.mark.parametrize("scalar", UNMAPPED.values(), ids=UNMAPPED.keys())
def test_unmapped_scalars_are_what_they_are_under_vmap(scalar, placement, mesh42):
    def body(x, s):
        return x * s, s, s + 1, 4.0

    x = np.arange(8, dtype=np.float16)
    out_axes = (["i"], {}, {}, ["i"])
    with mesh42:
        result = xmap(body, (["i"], {}), out_axes, axis_resources={"i": placement})(x, scalar)
    expected = jax.vmap(body, in_axes=(0, None), out_axes=(0, None, None, 0))(
        x, jnp.asarray(scalar)
    )
    assert_same_types(result, expected)


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
@over({name: PLACEMENTS[name] for name in ("none", "part", "full")})
@pytest.mark.parametrize("x", [MAPPED["weak float"], MAPPED["float32"]], ids=["weak", "strong"])
@pytest.mark.parametrize("body", WEAK_PROGRAMS.values(), ids=WEAK_PROGRAMS.keys())
def test_programs_with_weak_scalars_give_the_types_of_vmap(body, x, placement, mesh42):
    expected = jax.vmap(body, in_axes=(0, None), axis_name="i", axis_size=8)(x, 2.0)
    with mesh42:
        result = xmap(body, (["i"], {}), ["i", ...], axis_resources={"i": placement})(x, 2.0)
    assert_same_types(result, expected)


@over(MESH_PLACEMENTS)
@pytest.mark.parametrize("reduce", [lax.psum, lax.pmean, lax.pmax])
def test_reductions_of_weak_values_are_strong_as_in_legacy(reduce, placement, mesh42):
    def body(x, s):
        return (reduce(x, "i"), reduce(s, "i"))

    with mesh42:
        results = xmap(body, (["i"], {}), {}, axis_resources={"i": placement})(
            MAPPED["weak float"], 2.5
        )
    assert [(r.dtype, r.weak_type) for r in results] == [(np.float32, False)] * 2
    np.testing.assert_allclose(results, [8 * 2.5 if reduce is lax.psum else 2.5] * 2)


RESULTS = {
    "a namedtuple": (lambda x: Pair(x, 1.0), Pair(["i", ...], {}), Pair(ROWS, 1.0)),
    "a tuple, by a list": (
        lambda x: (x, x.sum()),
        [["i", ...], ["i"]],
        (ROWS, ROWS.sum(1)),
    ),
    "a dataclass": (lambda x: Layer(x, x.sum()), ["i", ...], Layer(ROWS, ROWS.sum(1))),
}


@pytest.mark.parametrize("placement", [(), "x"], ids=["none", "full"])
@pytest.mark.parametrize(("body", "out_axes", "expected"), RESULTS.values(), ids=RESULTS.keys())
def test_trees_of_results(body, out_axes, expected, placement, mesh42):
    with mesh42:
        result = xmap(body, ["i", ...], out_axes, axis_resources={"i": placement})(ROWS)
    assert_trees_equal(result, expected)


# ------------------------------------------------------------------------------- names


class Axis(enum.Enum):
    BATCH = "batch"
    MODEL = "model"


@dataclasses.dataclass(frozen=True)
class AxisId:
    number: int


NAMES = {
    "str": "out_features",
    "enum": Axis.BATCH,
    "object": object(),
    "frozen dataclass": AxisId(3),
    "frozenset": frozenset({1}),
    "function": len,
}
REDUCTIONS = {
    "psum": (lax.psum, lambda x: x.sum(0)),
    "sum with a position": (lambda v, name: jnp.sum(v, axis=(name, 0)), np.sum),
    "method": (lambda v, name: v.mean(name), lambda x: x.mean(0)),
}


@pytest.mark.sampled
@over(MESH_PLACEMENTS)
@pytest.mark.parametrize(("reduce", "oracle"), REDUCTIONS.values(), ids=REDUCTIONS.keys())
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_any_hashable_names_an_axis(name, reduce, oracle, placement, mesh42):
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    fun = xmap(lambda v: reduce(v, name), [name, ...], {}, axis_resources={name: placement})
    with mesh42:
        np.testing.assert_allclose(fun(x), oracle(x))


@over(PLACEMENTS)
def test_ints_name_axes_for_vectorizing(placement, mesh42):
    x = np.arange(48.0, dtype=np.float32).reshape(8, 2, 3)
    fun = xmap(jnp.sum, [0, 7, ...], [7, 0], axis_resources={0: placement})
    with mesh42:
        np.testing.assert_array_equal(fun(x), x.sum(2).T)


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


@over(MESH_PLACEMENTS)
def test_a_vmap_inside_may_take_a_name_and_wins(placement, mesh42):
    x = np.arange(24.0, dtype=np.float32).reshape(8, 3)

    def body(v):
        return jax.vmap(lambda w: w / lax.psum(w, "i"), axis_name="i")(v + 1)

    with mesh42:
        result = xmap(body, ["i", ...], ["i", ...], axis_resources={"i": placement})(x)
    np.testing.assert_allclose(result, (x + 1) / (x + 1).sum(1, keepdims=True), rtol=1e-6)


def test_an_xmap_inside_a_vmap_of_the_same_name_wins():
    x = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(jax.vmap(xmap(sum_over_i, ["i"], []), axis_name="i")(x), x.sum(1))


class Keyless:
    """A pytree node that is registered without keys."""

    def __init__(self, *children):
        self.children = children


jax.tree_util.register_pytree_node(
    Keyless, lambda pair: (pair.children, None), lambda _, children: Keyless(*children)
)


def test_paths_through_classes_without_keys_are_in_words():
    f = xmap(lambda tree: tree, ["i", ...], ["i", ...])
    tree = {"w": Keyless(np.ones(3), Keyless(np.ones(3), np.float32(1)))}
    with pytest.raises(ValueError, match=r"^args\[0\]\['w'\]\.<child 1>\.<child 1> has shape \(\)"):
        f(tree)
    (path,) = [a.path for a in f.plan(Keyless(Keyless(np.ones(3)))).arguments]
    assert path == "tree.<child 0>.<child 0>"


def test_the_order_in_which_a_dictionary_is_written_says_nothing():
    """A dictionary of positions is the same specification, and the same plan, in any order."""
    orders = {0: "i", 1: "j"}, {1: "j", 0: "i"}
    plans = [str(xmap(lambda v: v * 2, spec, spec).plan(np.ones((4, 3)))) for spec in orders]
    assert plans[0] == plans[1]
