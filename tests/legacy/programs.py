"""Small programs over named axes that run from this one source under jax 0.4.30's own xmap and under xmap_compat."""

from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from program_table import (
    BOTH,
    FULL,
    NONE,
    ONE,
    ORDERS,
    PART,
    PROGRAMS,
    TWO,
    Arg,
    Differs,
    SerialLoop,
    add,
    f32,
    i32,
    note,
    pargmax,
    pargmin,
    pgather,
    program,
    xeinsum,
    xmap,
)

__all__ = ["PROGRAMS"]

BY_I, BY_J, BY_IJ = ["i", ...], ["j", ...], ["i", "j", ...]

LIMIT = Differs("legacy refuses this collective over an axis with several elements per device")
SOME_LIMIT = "legacy permutes some elements only where the axis fills its mesh axes"
WRONG_ORDER = Differs(
    "legacy's ppermute over mesh axes in another order than the mesh's gives wrong values"
)
HANGS = Differs("legacy hangs: devices disagree about a branch that communicates", hangs=True)


def everywhere(difference, *assignments):
    return dict.fromkeys(assignments, difference)


# ============================================================== specifications and shapes


def double(x):
    return x * 2


def swap(x, y):
    return {"sum": x + y, "pair": (y, x)}


add("list_spec", double, BY_I, BY_I, f32(8, 3), on=ORDERS)
add("tuple_spec", double, (("i", ...),), ("i", ...), f32(8, 3))
add("dict_spec", double, {0: "i"}, {0: "i"}, f32(8, 3), on=ONE)
add("dict_spec_of_a_later_dimension", double, {1: "i"}, {1: "i"}, f32(3, 8), on=ONE)
add("dict_spec_in_any_order", double, {2: "i", 0: "j"}, {0: "i", 2: "j"}, f32(4, 3, 8), on=BOTH)
add("none_in_a_list", double, [None, "i", ...], [None, "i", ...], f32(3, 8, 2), on=ONE)
add("none_last", double, ["i", None], ["i", None], f32(8, 3), on=ONE)
add("exact_rank", double, ["i"], ["i"], f32(8), on=ONE)
add("exact_rank_of_two", double, ["i", "j"], ["j", "i"], f32(8, 4), on=TWO)
add("empty_dict_names_nothing", double, {}, {}, f32(3), axis_sizes={"i": 8}, on=ONE)
add("ellipsis_alone_names_nothing", double, [...], [...], f32(2, 3), axis_sizes={"i": 8})
add("empty_list_asserts_a_scalar", lambda x, s: x * s, (BY_I, []), BY_I, f32(8, 3), f32(), on=ONE)
add("transposed_result", double, BY_IJ, ["j", "i", ...], f32(8, 4, 3), on=BOTH)
add("result_axes_inserted", double, BY_IJ, {1: "j", 2: "i"}, f32(8, 4, 3, 2), on=BOTH)
add("result_axis_last", double, BY_I, {1: "i"}, f32(8, 3), on=ORDERS)
add("result_axis_in_the_middle", double, BY_I, [None, "i", ...], f32(8, 3, 2), on=ORDERS)
add("outer_product", lambda x, y: x * y, (["i"], ["j"]), ["j", "i"], f32(8), f32(4), on=BOTH)
add(
    "positional_broadcasting",
    lambda x, y: x + y,
    (BY_I, BY_J),
    ["i", "j", ...],
    f32(8, 3, 1),
    f32(4, 2),
    on=BOTH,
)
add(
    "dot_gives_matmul",
    jnp.vdot,
    ({0: "i"}, {1: "j"}),
    ["i", "j", ...],
    f32(8, 3),
    f32(3, 4),
    on=BOTH,
)
add("one_spec_for_all_arguments", swap, BY_I, BY_I, f32(8, 3), f32(8, 3), on=ONE)
add("list_of_specs_is_the_tuple_of_arguments", swap, [BY_I, {1: "i"}], BY_I, f32(8, 3), f32(3, 8))
add("unmapped_argument", lambda x, w: x @ w, (BY_I, [...]), BY_I, f32(8, 3), f32(3, 2), on=ORDERS)
add("unmapped_argument_by_dict", lambda x, w: x @ w, (BY_I, {}), BY_I, f32(8, 3), f32(3, 2), on=ONE)
add(
    "result_that_does_not_vary_is_broadcast",
    lambda x: jnp.ones(2),
    BY_I,
    BY_I,
    f32(8, 3),
    on=ORDERS,
)
add(
    "input_returned_under_another_axis",
    lambda x, y: x,
    (BY_I, BY_J),
    BY_IJ,
    f32(8, 3),
    f32(4),
    on={"none": {}, "i:x": {"i": "x"}, "i:x j:y": {"i": "x", "j": "y"}},
)
add(
    "axis_only_in_axis_sizes",
    lambda x: x + lax.axis_index("i"),
    {},
    BY_I,
    f32(3),
    axis_sizes={"i": 8},
    on=ORDERS,
)
add("axis_sizes_agree_with_arguments", double, BY_I, BY_I, f32(8, 3), axis_sizes={"i": 8}, on=ONE)
add("unused_axis_in_axis_sizes", double, BY_I, BY_I, f32(8, 3), axis_sizes={"k": 5}, on=ONE)
add("size_one", double, BY_I, BY_I, f32(1, 3))
add(
    "prefix_over_a_dict",
    lambda t: {k: v + 1 for k, v in t.items()},
    BY_I,
    BY_I,
    {"a": f32(8), "b": f32(8, 2)},
    on=ONE,
)
add(
    "tree_of_specs",
    lambda t, s: (t["a"] * s, t["b"]),
    ({"a": BY_I, "b": {1: "i"}}, {}),
    (BY_I, {1: "i"}),
    {"a": f32(8, 3), "b": f32(2, 8)},
    f32(),
    on=ONE,
)
add(
    "prefix_of_results",
    swap,
    (BY_I, BY_I),
    {"sum": BY_I, "pair": {1: "i"}},
    f32(8, 3),
    f32(8, 3),
    on=ONE,
)
add("none_in_arguments", lambda t: t["a"] + 1, BY_I, BY_I, {"a": f32(8, 3), "b": None})
add("none_in_results", lambda x: (x, None, {"k": None}), BY_I, BY_I, f32(8, 3), on=PART)
add("empty_results", lambda x: (), BY_I, BY_I, f32(8, 3))
add("empty_containers", lambda x, t: (x, t), (BY_I, {}), (BY_I, {}), f32(8, 3), {"a": (), "b": []})

Pair = namedtuple("Pair", "left right")
add(
    "namedtuple",
    lambda p: Pair(p.right, p.left * 2),
    (Pair(BY_I, {1: "i"}),),
    Pair({1: "i"}, BY_I),
    Pair(f32(8, 3), f32(3, 8)),
    on=ONE,
)
EmptyState = namedtuple("EmptyState", "")
PAIR = lambda *args: (args[0] * 2, args[1])
# ``()`` is ``[]``, a scalar without names, anywhere below the whole of in_axes and out_axes.
EMPTY_TUPLES = {
    "one_of_several_results": ((BY_I, {}), (BY_I, ()), (f32(8, 3), f32()), PAIR),
    "the_only_result": ((BY_I, {}), ((),), (f32(8, 3), f32()), lambda x, s: (s * 2,)),
    "in_a_dict_of_results": (
        (BY_I, {}),
        {"x": BY_I, "s": ()},
        (f32(8, 3), f32()),
        lambda x, s: {"x": x, "s": s + 1},
    ),
    "in_a_list_of_results": ((BY_I, {}), [BY_I, ()], (f32(8, 3), f32()), lambda x, s: [x, s]),
    "below_a_tuple_of_results": (
        (BY_I, {}),
        ((BY_I, ()), ()),
        (f32(8, 3), f32()),
        lambda x, s: ((x, s), s),
    ),
    "a_prefix_of_results": (
        (BY_I, {}),
        (BY_I, ()),
        (f32(8, 3), f32()),
        lambda x, s: (x, {"a": s, "b": (s, 1.0)}),
    ),
    "an_argument": ((BY_I, ()), BY_I, (f32(8, 3), f32()), lambda x, s: x * s),
    "the_only_argument": (((),), BY_I, (f32(),), lambda s: s + lax.axis_index("i")),
    "an_argument_of_a_list": ([BY_I, ()], BY_I, (f32(8, 3), f32()), lambda x, s: x * s),
    "in_a_dict_of_arguments": (
        ({"x": BY_I, "s": ()},),
        BY_I,
        ({"x": f32(8, 3), "s": f32()},),
        lambda t: t["x"] * t["s"],
    ),
    "a_prefix_of_arguments": (
        (BY_I, ()),
        BY_I,
        (f32(8, 3), {"a": f32(), "b": f32()}),
        lambda x, t: x * t["a"] + t["b"],
    ),
    "in_a_named_tuple": (
        (Pair(BY_I, ()),),
        Pair((), BY_I),
        (Pair(f32(8, 3), f32()),),
        lambda p: Pair(p.right, p.left),
    ),
    "an_argument_of_rank_one": ((BY_I, ()), BY_I, (f32(8, 3), f32(3)), lambda x, s: x * s),
    "a_result_of_rank_one": ((BY_I, {}), (BY_I, ()), (f32(8, 3), f32(3)), PAIR),
    "an_empty_tuple": ((BY_I, ()), (BY_I, ()), (f32(8, 3), ()), PAIR),
    "an_empty_dict": ((BY_I, ()), (BY_I, ()), (f32(8, 3), {}), PAIR),
    "a_tree_without_arrays": ((BY_I, ()), (BY_I, ()), (f32(8, 3), {"a": (), "b": None}), PAIR),
    "an_empty_state": ((BY_I, ()), (BY_I, ()), (f32(8, 3), EmptyState()), PAIR),
    "an_empty_state_as_its_own_spec": (
        (BY_I, EmptyState()),
        (BY_I, EmptyState()),
        (f32(8, 3), EmptyState()),
        PAIR,
    ),
    "an_empty_state_as_the_spec_of_a_scalar": (
        (BY_I, EmptyState()),
        (BY_I, EmptyState()),
        (f32(8, 3), f32()),
        PAIR,
    ),
    "all_of_no_arguments": ((), BY_I, (), lambda: lax.axis_index("i")),
    "all_of_one_argument": ((), BY_I, (f32(),), lambda s: s),
    "all_of_the_results": ((BY_I,), (), (f32(8, 3),), lambda x: ()),
}
for where, (in_axes, out_axes, args, body) in EMPTY_TUPLES.items():
    add(f"empty_tuple:{where}", body, in_axes, out_axes, *args, axis_sizes={"i": 8}, on=PART)
add("argument_twice_in_the_results", lambda x: (x, x), BY_I, (BY_I, {1: "i"}), f32(8, 3), on=ONE)
add("constant_results", lambda x: (1, 2.5, jnp.arange(3)), BY_I, ({}, {}, {}), f32(8, 3), on=ONE)


@program(BY_I, (BY_I, {}), f32(8, 3), on=ORDERS)
def mixed_results(x):
    return x - lax.pmean(x, "i"), lax.psum(x.sum(), "i")


@program((BY_I, BY_J), (BY_I, BY_J, BY_IJ, {}), f32(8), f32(4), on=BOTH)
def each_result_with_its_own_axes(x, y):
    return x + 1, y + 1, x * y, lax.psum(x, "i") + lax.psum(y, "j")


# =================================================================== types of the values


def arithmetic(x):
    return x + 1, x * x, jnp.sum(x)


for dtype in ("bfloat16", "float16", "uint8", "int32", "complex64"):
    add(f"arithmetic_{dtype}", arithmetic, BY_I, BY_I, Arg((8, 3), dtype), on=PART)
    add(f"psum_{dtype}", lambda x: lax.psum(x, "i"), BY_I, {}, Arg((8, 3), dtype), on=FULL)

add("bools", lambda x: (~x, x & True, x.any()), BY_I, BY_I, Arg((8, 3), "bool"), on=ONE)
add(
    "weak_types_of_results",
    lambda x: (1, 2.0, True, x.shape[0], jnp.float32(1)),
    BY_I,
    [...],
    f32(8, 3),
    on=ONE,
)
add(
    "weak_types_of_mapped_results",
    lambda x: (1, 2.0, lax.psum(1, "i")),
    BY_I,
    BY_I,
    f32(8, 3),
    on=ONE,
)
add(
    "unmapped_python_numbers",
    lambda x, a, b, c: (x * a, b, c),
    (BY_I, {}, {}, {}),
    (BY_I, {}, {}),
    f32(8, 3),
    2.5,
    3,
    True,
    on=ONE,
)
add(
    "python_number_is_a_tracer",
    lambda x, n: x * n + jnp.where(n > 2, 1, 0),
    (BY_I, {}),
    BY_I,
    i32(8),
    3,
)
add(
    "weak_types_promote",
    lambda x, s: (x + s, x + 1.5, s + 1),
    (BY_I, {}),
    (BY_I, BY_I, {}),
    Arg((8,), "bfloat16"),
    2.0,
)
add("numpy_scalars", lambda x, s: x + s, (BY_I, {}), BY_I, f32(8), np.float32(1.5))
add("typed_keys", lambda k: jax.random.key_data(k), BY_I, BY_I, Arg((8,), "key"), on=ONE)
add("typed_keys_as_results", lambda k: jax.random.fold_in(k, 1), BY_I, BY_I, Arg((8,), "key"))
add(
    "random_numbers_from_keys",
    lambda k: jax.random.uniform(k, (2,)),
    BY_I,
    BY_I,
    Arg((8,), "key"),
    on=ONE,
)
add("mixed_dtypes", lambda x, n: (x + n, n // 2, x > n), (BY_I, BY_I), BY_I, f32(8), i32(8), on=ONE)


# ============================================================================ collectives


@program(BY_I, {}, f32(8, 3), on=ORDERS)
def psum(x):
    return lax.psum(x, "i")


@program(BY_IJ, ({}, BY_I, BY_J), f32(8, 4, 3), on=BOTH)
def psum_over_each_and_both(x):
    return lax.psum(x, ("i", "j")), lax.psum(x, "j"), lax.psum(x, "i")


@program(BY_I, {}, {"a": f32(8), "b": (i32(8), Arg((8, 2), "bool"))}, on=ONE)
def psum_of_a_tree(t):
    return lax.psum(t, "i")


@program(BY_I, {}, f32(8), on=ONE)
def psum_of_python_numbers(x):
    return lax.psum(1, "i"), lax.psum(2.5, "i"), lax.psum(True, "i"), x.shape + (lax.psum(1, "i"),)


@program((BY_I, {}), {}, f32(8), f32(3), on=ONE)
def psum_of_what_does_not_vary(x, w):
    return lax.psum(w, "i"), lax.psum(jnp.ones(2), "i")


@program(BY_I, {}, f32(8, 3), on=ORDERS)
def pmax_pmin_pmean(x):
    return lax.pmax(x, "i"), lax.pmin(x, "i"), lax.pmean(x, "i")


@program(BY_IJ, {}, f32(8, 4), on=BOTH)
def extrema_over_both(x):
    return lax.pmax(x, ("i", "j")), lax.pmin(x, ("j", "i")), lax.pmean(x, ("i", "j"))


@program(BY_I, {}, i32(8, 3), on=ONE)
def reductions_of_integers(x):
    return lax.psum(x, "i"), lax.pmax(x, "i"), lax.pmean(x, "i")


@program(BY_IJ, (BY_I, BY_J), f32(8, 4), on=BOTH)
def axis_index(x):
    return lax.axis_index("i"), lax.axis_index("j")


@program(BY_I, BY_I, f32(8, 8, 3), on=ORDERS)
def pswapaxes(x):
    return lax.pswapaxes(x, "i", 0)


@program(BY_I, BY_I, f32(8, 2, 8), on=ONE)
def all_to_all(x):
    return lax.all_to_all(x, "i", 1, 0), lax.all_to_all(x, "i", 1, 1)


UNMAPPED = Differs(
    "legacy's all_to_all of what does not vary gives a wrong shape",
    lambda x, w: np.repeat(w[:, None], 8, axis=1),
)


@program((BY_I, {}), BY_I, f32(8), f32(8), on=ONE, differs=everywhere(UNMAPPED, "none", "i:x"))
def all_to_all_of_what_does_not_vary(x, w):
    return lax.all_to_all(w, "i", 0, 0)


@program(BY_I, BY_I, f32(8, 16, 3), on=ONE)
def all_to_all_tiled(x):
    return lax.all_to_all(x, "i", 0, 1, tiled=True)


ROTATION = [(k, (k + 3) % 8) for k in range(8)]
CHAIN = [(k, k + 1) for k in range(7)]


@program(BY_I, BY_I, f32(8, 3), on=ORDERS, differs={"i:x": LIMIT, "i:yx": WRONG_ORDER})
def ppermute(x):
    return lax.ppermute(x, "i", ROTATION)


def chained(x):
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])


@program(
    BY_I, BY_I, f32(8, 3), on=ONE, differs=everywhere(Differs(SOME_LIMIT, chained), "none", "i:x")
)
def ppermute_of_some(x):
    return lax.ppermute(x, "i", CHAIN)


@program(BY_I, BY_I, f32(8, 3), on=ORDERS, differs={"i:x": LIMIT, "i:yx": WRONG_ORDER})
def pshuffle(x):
    return lax.pshuffle(x, "i", [3, 1, 0, 2, 7, 6, 5, 4])


@program(BY_I, {}, f32(8, 3), on=ORDERS, differs={"i:x": LIMIT})
def all_gather(x):
    return (
        lax.all_gather(x, "i"),
        lax.all_gather(x, "i", axis=1),
        lax.all_gather(x, "i", tiled=True),
    )


BOTH_LIMIT = Differs(
    "legacy gathers over two axes only where both fill their mesh axes",
    lambda x: (x.ravel(), x.T.ravel()),
)


@program(BY_IJ, {}, f32(8, 4), on=TWO, differs={"all": BOTH_LIMIT})
def all_gather_over_both(x):
    return lax.all_gather(x, ("i", "j")), lax.all_gather(x, ("j", "i"))


@program(BY_I, BY_I, f32(8, 16, 3), on=ORDERS, differs={"i:x": LIMIT})
def psum_scatter(x):
    return lax.psum_scatter(x[:8], "i"), lax.psum_scatter(x, "i", tiled=True)


@program(BY_I, BY_I, f32(8, 2, 8), on=FULL)
def psum_scatter_of_another_dimension(x):
    return lax.psum_scatter(x, "i", scatter_dimension=1)


@program((BY_I, BY_I), {}, f32(8, 3), f32(8, 3), on=ORDERS)
def pdot(x, y):
    return lax.pdot(x, y, "i")


@program(
    (["k", "i", ...], ["k", "j", ...]),
    {1: "i", 2: "j"},
    f32(4, 8, 2, 3),
    f32(4, 4, 3, 2),
    on={**BOTH, "k:x": {"k": "x"}},
)
def pdot_with_positions(x, y):
    return lax.pdot(x, y, "k", pos_contract=((1,), (0,)), pos_batch=((0,), (1,)))


@program((["i", "k"], ["k", "j"]), ["i", "j"], f32(8, 6), f32(6, 4), on=BOTH)
def named_einsum(x, y):
    return xeinsum("{i,k},{k,j}->{i,j}", x, y)


@program((["i", ...], ["i", ...]), {}, f32(8, 2, 3), f32(8, 3, 4), on=ORDERS)
def named_einsum_with_letters(x, y):
    return xeinsum("nk{i},km{i}->nm", x, y)


@program(BY_IJ, (BY_J, BY_I), f32(8, 4), on=BOTH)
def index_of_extremum(x):
    return pargmax(x, "i"), pargmin(x, "j")


@program((BY_I, {}), {}, f32(8, 3), i32(5))
def gather_of_elements(x, idx):
    return (
        pgather(x, idx % 8, "i"),
        pgather(x, idx[0] % 8, ("i",)),
        pgather(x, idx.reshape(5, 1) % 8, "i"),
    )


@program((BY_IJ, {}), ({}, BY_I, BY_IJ), f32(8, 4, 3), i32(2, 5))
def gather_of_elements_of_both(x, idx):
    """Indices count through all elements of the axes together."""
    return pgather(x, idx, ("i", "j")), pgather(x, idx, ("j", 0)), pgather(x, idx % 3, 0)


PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
GROUPS_LIMIT = Differs(
    "legacy has groups only where the axis fills its mesh axes",
    lambda x: (
        np.repeat(np.asarray(x).reshape(4, 2, 3).sum(1), 2, 0),
        np.repeat(np.asarray(x).reshape(4, 2, 3), 2, 0),
    ),
)


@program(BY_I, BY_I, f32(8, 3), on=ONE, differs=everywhere(GROUPS_LIMIT, "none", "i:x"))
def groups(x):
    return lax.psum(x, "i", axis_index_groups=PAIRS), lax.all_gather(
        x, "i", axis_index_groups=PAIRS
    )


# ---------------------------------------------------------------------- named reductions


@program(BY_IJ, ({}, BY_I, BY_J, BY_I), f32(8, 4, 3), on=TWO)
def named_sum(x):
    return jnp.sum(x, axis=("i", "j")), jnp.sum(x, axis="j"), x.sum("i"), jnp.sum(x, axis=("j", 0))


@program(BY_I, {}, f32(8, 3), on=ONE)
def named_statistics(x):
    return jnp.mean(x, axis="i"), jnp.var(x, axis="i"), jnp.std(x, axis=("i", 0)), x.mean(("i", 0))


@program(BY_I, ({}, BY_I, BY_I), f32(8, 3), on=ORDERS)
def named_softmax(x):
    return (
        jax.nn.logsumexp(x, axis="i"),
        jax.nn.softmax(x, axis="i"),
        jax.nn.log_softmax(x, axis=("i", 0)),
    )


ONE_HOT = Differs("legacy's one_hot fails over two mesh axes")


@program(({}, BY_I), BY_I, i32(3), f32(8), on={**ONE, "i:y": {"i": "y"}}, differs={"i:xy": ONE_HOT})
def named_one_hot(labels, x):
    return jax.nn.one_hot(labels, 8, axis="i")


LETTERS = Differs(
    "legacy reads a name of several letters letter by letter",
    lambda x: (np.sum(x, 0), np.mean(x, 0), np.max(x, 0)),
)


@program(
    ["batch", ...],
    {},
    f32(8, 3),
    on={"none": {}, "batch:x": {"batch": "x"}},
    differs={"all": LETTERS},
)
def names_of_several_letters(x):
    return jnp.sum(x, axis="batch"), jnp.mean(x, axis="batch"), jnp.max(x, axis="batch")


# ===================================================================== ordinary functions


@program((BY_I, BY_J), BY_IJ, i32(8), f32(4, 10), on=BOTH)
def indexing_by_another_axis(n, table):
    return table[n], lax.dynamic_slice(table, (n,), (2,))


@program((BY_I, BY_I), BY_I, f32(8, 5), i32(8), on=ONE)
def updates(x, n):
    return (
        x.at[n % 5].set(9),
        x.at[jnp.array([0, 2])].add(n),
        lax.dynamic_update_slice(x, jnp.ones(2), (n % 5,)),
    )


@program(BY_I, BY_I, f32(8, 3), on=ONE)
def jitted_inside(x):
    return jax.jit(lambda v: v - jax.jit(lambda w: lax.psum(w, "i"))(v))(x)


@program(BY_I, BY_I, f32(8, 4, 3), on=ONE)
def vmap_inside(x):
    return jax.vmap(lambda v: v * lax.psum(v, "i"))(x), jax.vmap(
        lambda v: v - lax.pmean(v, "b"), axis_name="b"
    )(x)


@program(BY_I, {}, f32(8, 4, 3), on=ONE)
def vmap_inside_over_both(x):
    return jax.vmap(lambda v: lax.psum(v, ("b", "i")), axis_name="b", out_axes=None)(x)


# ============================================================================ control flow


@program(BY_I, (BY_I, BY_I), f32(8, 5), on=ONE)
def scan(x):
    return lax.scan(lambda c, v: (c + v, c * v), 0.0, x)


@program(BY_I, (BY_I, BY_I), f32(8, 5), on=ORDERS)
def scan_with_collectives(x):
    return lax.scan(lambda c, v: (c + lax.psum(v, "i"), c - lax.pmean(v, "i")), 0.0, x)


@program(BY_I, ({}, BY_I), f32(8, 5), on=ONE)
def scan_whose_carry_does_not_vary(x):
    return lax.scan(lambda c, v: (c + lax.psum(v, "i"), c + v), 0.0, x)


@program(BY_I, BY_I, f32(8, 3), on=ONE)
def fori_loop(x):
    return lax.fori_loop(0, 4, lambda k, v: v + k * lax.pmax(v, "i"), x)


@program((BY_I, {}), BY_I, f32(8, 3), 2, on=ONE)
def cond_on_what_all_share(x, n):
    return lax.cond(n > 1, lambda v: lax.psum(v, "i") + v, lambda v: v * 2, x)


@program(BY_I, BY_I, f32(8, 3), on=ORDERS)
def cond_on_what_differs(x):
    return lax.cond(x[0] > 0, jnp.sin, lambda v: v * 2, x)


@program(BY_I, BY_I, f32(8, 3), on=ORDERS, differs=everywhere(HANGS, "i:xy", "i:yx"))
def cond_on_what_differs_with_collectives(x):
    return lax.cond(lax.axis_index("i") < 3, lambda v: lax.psum(v, "i"), lambda v: v * 2, x)


@program((BY_I, {}), BY_I, f32(8, 3), 1, on=ONE)
def switch(x, n):
    return lax.switch(n, [jnp.sin, lambda v: v - lax.pmin(v, "i"), lambda v: -v], x)


@program(BY_I, BY_I, f32(8, 3), on=ONE)
def switch_on_the_index(x):
    return lax.switch(lax.axis_index("i") % 3, [jnp.sin, jnp.cos, lambda v: -v], x)


@program(BY_I, (BY_I, {}), f32(8, 3), on=ONE)
def while_on_what_all_share(x):
    return lax.while_loop(
        lambda c: c[1] < 3, lambda c: (c[0] + lax.psum(c[0], "i"), c[1] + 1), (x, 0)
    )


@program(BY_I, BY_I, i32(8), on=ORDERS)
def while_on_what_differs(n):
    return lax.while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 1, c[1] + 2), (n % 7, 0))


@program(BY_I, BY_I, i32(8), on=ORDERS, differs=everywhere(HANGS, "i:x", "i:xy", "i:yx"))
def while_on_what_differs_with_collectives(n):
    return lax.while_loop(
        lambda c: c[0] > 0, lambda c: (c[0] - 1, c[1] + lax.psum(c[0], "i")), (n % 7, 0)
    )


@program(BY_I, BY_I, f32(8, 3), on=ONE)
def checkpointed(x):
    return jax.checkpoint(lambda v: jnp.sin(v) * lax.psum(v, "i"))(x)


@program(BY_IJ, BY_IJ, f32(8, 4, 3), on=TWO)
def scan_in_a_cond_in_a_scan(x):
    def step(carry, v):
        turned = lax.cond(carry.sum() > 0, lambda c: c * 0.5, lambda c: c + 1.0, carry)
        return turned + lax.scan(lambda c, t: (c + t, None), 0.0, v * jnp.ones(2))[0], lax.psum(
            v, "j"
        )

    return lax.scan(step, jnp.zeros(2), x)


# ===================================================================== gradients inside


def inner_grad(name, function, shape=(8, 3), on=ONE, **options):
    add(
        f"grad_of_{name}",
        jax.grad(lambda x: jnp.sum(function(x))),
        BY_I,
        BY_I,
        f32(*shape),
        on=on,
        **options,
    )


inner_grad("positional", lambda x: jnp.sin(x) * x)
inner_grad("psum_of_squares", lambda x: lax.psum(x**2, "i"), on=ORDERS)
inner_grad("pmean_of_squares", lambda x: lax.pmean(x**2, "i"), on=ORDERS)
inner_grad("product_with_psum", lambda x: x * lax.psum(x, "i"))
inner_grad("named_sum", lambda x: jnp.sum(jnp.sin(x), axis=("i", 0)))
inner_grad("named_variance", lambda x: jnp.var(x, axis="i"))
inner_grad("pdot", lambda x: lax.pdot(x, jnp.cos(x), "i"))


def grad_of_chain(x):
    after = np.concatenate([x[1:], np.zeros_like(x[:1])])
    return np.sin(chained(x)) + np.cos(x) * after


inner_grad(
    "ppermute", lambda x: jnp.sin(lax.ppermute(x, "i", ROTATION)) * x, differs={"i:x": LIMIT}
)
inner_grad(
    "ppermute_of_some",
    lambda x: jnp.sin(lax.ppermute(x, "i", CHAIN)) * x,
    differs=everywhere(Differs(SOME_LIMIT, grad_of_chain), "none", "i:x"),
)

inner_grad(
    "pshuffle",
    lambda x: lax.pshuffle(x, "i", [7, 6, 5, 4, 3, 2, 1, 0]) * x**2,
    differs={"i:x": LIMIT},
)
inner_grad(
    "psum_scatter", lambda x: lax.psum_scatter(jnp.sin(x), "i"), (8, 8), differs={"i:x": LIMIT}
)
inner_grad("all_gather", lambda x: jnp.sin(lax.all_gather(x, "i")), differs={"i:x": LIMIT})
inner_grad(
    "all_to_all",
    lambda x: jnp.sin(lax.all_to_all(x, "i", 0, 0)) * jnp.arange(8.0)[:, None],
    (8, 8, 2),
)
inner_grad(
    "pswapaxes", lambda x: jnp.sin(lax.pswapaxes(x, "i", 0)) * jnp.arange(8.0)[:, None], (8, 8, 2)
)
UNMAPPED_ALL_TO_ALL = (
    "legacy's all_to_all of what does not vary, here the cotangent, has a wrong shape"
)
inner_grad(
    "linear_all_to_all",
    lambda x: lax.all_to_all(x, "i", 0, 0) * jnp.arange(8.0)[:, None],
    (8, 8, 2),
    differs=everywhere(
        Differs(
            UNMAPPED_ALL_TO_ALL, lambda x: np.broadcast_to(np.arange(8.0)[:, None, None], (8, 8, 2))
        ),
        "none",
        "i:x",
    ),
)
inner_grad("axis_index", lambda x: x**2 * lax.axis_index("i"))
inner_grad("scan", lambda x: lax.scan(lambda c, v: (c * v + lax.psum(v, "i"), c), 1.0, x)[0])
inner_grad("cond", lambda x: lax.cond(x[0] > 0, jnp.sin, lambda v: v**2, x))
inner_grad(
    "cond_with_collectives",
    lambda x: lax.cond(lax.psum(1, "i") > 3, lambda v: lax.psum(v**2, "i"), jnp.sin, x),
)
inner_grad(
    "checkpoint", lambda x: jax.checkpoint(lambda v: jnp.sin(lax.psum(jnp.sin(v), "i")) * v)(x)
)
inner_grad("jit", lambda x: jax.jit(lambda v: lax.pmean(v**3, "i"))(x))
inner_grad("vmap", lambda x: jax.vmap(lambda v: v * lax.psum(v, "i"))(x))
inner_grad("one_minus_softmax_by_hand", lambda x: x - jnp.log(lax.psum(jnp.exp(x), "i")))
inner_grad("integer_power_of_mean", lambda x: lax.pmean(x, "i") ** 3 * x)

UNDIFFERENTIABLE = (
    "legacy does not differentiate pmax and pmin; ours does, with legacy's convention for psum"
)


def grad_of_named_max(x):
    """A share for each element that is largest, of the eight (equal) cotangents together."""
    largest = np.asarray(x) == np.max(x, 0)
    return 8 * largest.astype(np.float32) / largest.sum(0)


inner_grad(
    "pmax",
    lambda x: lax.pmax(x, "i"),
    differs={"all": Differs(UNDIFFERENTIABLE, grad_of_named_max)},
)
inner_grad(
    "named_max",
    lambda x: jnp.max(x, "i"),
    differs={"all": Differs(UNDIFFERENTIABLE, grad_of_named_max)},
)


@program((BY_I, {}), (BY_I, {}), f32(8, 3), f32(3), on=ONE)
def grad_of_an_unmapped_value(x, w):
    value, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.sin(x * w)))(w)
    return value, lax.pmean(grad, "i")


@program((BY_IJ, BY_J), (BY_IJ, BY_IJ), f32(8, 4), f32(4), on=BOTH)
def grads_between_axes(x, y):
    return jax.grad(lambda x, y: jnp.sin(x * y), argnums=(0, 1))(x, y)


@program((BY_I, BY_I), BY_I, f32(8, 3), f32(8, 3), on=ONE)
def vjp_of_psum_with_a_varying_cotangent(x, ct):
    return jax.vjp(lambda v: lax.psum(v, "i"), x)[1](ct)


@program((BY_I, BY_I), ({}, {}), f32(8, 3), f32(8, 3), on=ONE)
def jvp_of_psum(x, t):
    return jax.jvp(lambda v: lax.psum(jnp.sin(v), "i"), (x,), (t,))


@program(BY_I, BY_I, f32(8), on=ONE)
def second_derivative(x):
    return jax.grad(jax.grad(lambda v: jnp.sin(v) * lax.pmean(v**2, "i")))(x)


@program(BY_IJ, BY_IJ, f32(8, 4, 3), on=TWO)
def grad_of_nested_means(x):
    return jax.grad(lambda v: jnp.sum(lax.pmean(jnp.sin(v) * lax.pmean(v, "i"), "j")))(x)


# custom rules: the Megatron pair, and an ordinary one


@jax.custom_vjp
def copy_to_all(x):
    return x


copy_to_all.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, "i"),))


@jax.custom_vjp
def sum_from_all(x):
    return lax.psum(x, "i")


sum_from_all.defvjp(lambda x: (lax.psum(x, "i"), None), lambda _, ct: (ct,))


@jax.custom_jvp
def clipped_sine(x):
    return jnp.sin(x)


clipped_sine.defjvp(lambda primals, tangents: (clipped_sine(*primals), 0.5 * tangents[0]))

inner_grad("copy_to_all", lambda x: jnp.sin(copy_to_all(x)) * lax.axis_index("i"))
inner_grad("sum_from_all", lambda x: jnp.sin(sum_from_all(x**2)))
inner_grad("custom_jvp", lambda x: clipped_sine(x) * lax.pmean(x, "i"))


@program(
    (BY_I, ["i", ...], ["i", ...]),
    (["i", ...], ["i", ...]),
    f32(8, 3),
    f32(8, 3, 4),
    f32(8, 4, 3),
    on=ONE,
)
def megatron_layer(x, w1, w2):
    def loss(w1, w2):
        hidden = jnp.tanh(copy_to_all(lax.pmean(x, "i")) @ w1)
        return jnp.sum(sum_from_all(hidden @ w2) ** 2)

    return jax.grad(loss, argnums=(0, 1))(w1, w2)


@program((BY_I, BY_I, {}), {}, f32(8, 3), f32(8), f32(3), on=ORDERS)
def data_parallel_training(x, y, w):
    def step(w, _):
        grad = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        return w - 0.1 * lax.pmean(grad, "i"), None

    return lax.scan(step, w, None, length=3)[0]


# ============================================================================ inner xmaps


@program(BY_I, BY_I, f32(8, 4, 3), on=PART)
def xmap_inside(x):
    return xmap(lambda v: v - lax.pmean(v, "c"), ["c", ...], ["c", ...])(x)


@program(BY_I, BY_I, f32(8, 4, 3), on=ONE)
def xmap_inside_over_both(x):
    return xmap(lambda v: v - lax.psum(v, ("c", "i")), ["c", ...], ["c", ...])(x)


@program(BY_I, BY_I, f32(8, 4, 3), on=ONE)
def xmap_inside_that_transposes(x):
    return xmap(lambda v: v * lax.psum(v, "c"), {0: "c"}, {1: "c"})(x)


@program(BY_I, BY_I, f32(8, 4, 3), on={"none": {}, "i:y": {"i": "y"}})
def xmap_inside_on_the_mesh(x):
    return xmap(
        lambda v: v * lax.psum(v, "c") + lax.pmean(v, "i"),
        {0: "c"},
        {1: "c"},
        axis_resources={"c": "x"},
    )(x)


@program((BY_I, {}), BY_I, f32(8, 3), f32(4), on=ONE)
def xmap_inside_with_a_closure(x, y):
    return xmap(lambda v: x * v, ["c"], ["c", ...])(y)


@program(BY_I, BY_I, f32(8, 2, 3, 2), on=PART)
def xmaps_three_deep(x):
    inner = xmap(lambda v: v - lax.psum(v, ("d", "c", "i")), ["d", ...], ["d", ...])
    return xmap(inner, ["c", ...], ["c", ...])(x)


# ========================================================================== serial loops

add("serial_loop", jnp.sin, BY_I, BY_I, f32(8, 3), on={"loop": {"i": SerialLoop(4)}})
add(
    "serial_loop_of_single_elements",
    double,
    BY_I,
    {1: "i"},
    f32(8, 3),
    on={"loop": {"i": SerialLoop(8)}},
)
add(
    "serial_loop_after_a_mesh_axis",
    jnp.sin,
    BY_I,
    BY_I,
    f32(8, 3),
    on={"i:x+loop": {"i": ("x", SerialLoop(2))}},
)
add("named_loop", jnp.sin, BY_I, BY_I, f32(8, 3), on={"loop": {"i": "l"}}, loops={"l": 4})
add(
    "named_loop_after_a_mesh_axis",
    jnp.sin,
    BY_I,
    BY_I,
    f32(8, 3),
    on={"i:x+loop": {"i": ("x", "l")}},
    loops={"l": 2},
)
add(
    "loop_beside_a_mesh_axis",
    lambda x: x - lax.pmean(x, "j"),
    BY_IJ,
    BY_IJ,
    f32(8, 4),
    on={"i:loop j:x": {"i": SerialLoop(2), "j": "x"}},
)
add(
    "named_loop_of_two_axes",
    lambda x, y: (x * 2, y + 1),
    (BY_I, BY_J),
    (BY_I, BY_J),
    f32(8, 3),
    f32(4),
    on={"loop": {"i": "l", "j": "l"}},
    loops={"l": 2},
)
add(
    "collective_over_a_loop",
    lambda x: lax.psum(x, "i"),
    BY_I,
    {},
    f32(8),
    on={"loop": {"i": SerialLoop(2)}},
)


# ========================================================================= named shapes


@program((BY_I, BY_J), BY_IJ, f32(8, 3), f32(4, 3), on=BOTH)
def named_shapes_of_arithmetic(x, y):
    return note(note(x) + note(y) * 2)


@program(BY_IJ, BY_IJ, f32(8, 4), on=TWO)
def named_shapes_of_collectives(x):
    (
        note(lax.psum(x, "i")),
        note(lax.psum(x, ("i", "j"))),
        note(lax.all_gather(x, "j") if False else lax.pmax(x, "j")),
    )
    note(lax.axis_index("i") + 0.0)
    return note(x - lax.pmean(x, "j"))


@program((BY_I, BY_J), BY_IJ, f32(8, 3), f32(4, 3))
def named_shapes_of_shapes(x, y):
    (
        note(x.sum()),
        note(x.reshape(3, 1) * y),
        note(jnp.where(y > 0, x, 1.0)),
        note(jnp.concatenate([x, y])),
    )
    return x + y


# ==================================================================== around an xmap


def outer(name, function, in_axes, out_axes, *args, call, why=None, expected=None, **options):
    differs = {"all": Differs(why, expected)} if why else {}
    add(name, function, in_axes, out_axes, *args, call=call, differs=differs, **options)


POSITIONAL = "from outside, the gradient is the positional function's; legacy's is not"
WITHIN = "legacy's xmap does not work inside jit or control flow, or closing over their tracers"

outer(
    "vmap_outside",
    lambda x: x - lax.pmean(x, "i"),
    BY_I,
    BY_I,
    f32(5, 8, 3),
    call=lambda f, x: jax.vmap(f)(x),
)
outer(
    "jvp_outside",
    lambda x: jnp.sin(x) * 2,
    BY_I,
    BY_I,
    f32(8, 3),
    call=lambda f, x: jax.jvp(f, (x,), (x,)),
    on=PART,
)
outer(
    "grad_outside_without_collectives",
    jnp.sin,
    BY_I,
    BY_I,
    f32(8, 3),
    call=lambda f, x: jax.grad(lambda v: f(v).sum())(x),
)
outer(
    "grad_outside_of_psum",
    lambda x: lax.psum(x**2, "i"),
    BY_I,
    {},
    f32(8, 3),
    on=ONE,
    call=lambda f, x: jax.grad(lambda v: f(v).sum())(x),
    why=POSITIONAL,
    expected=lambda x: 2 * x,
)
outer(
    "grad_outside_of_parameters",
    lambda x, w: lax.psum(x @ w, "i"),
    (BY_I, {}),
    {},
    f32(8, 3),
    f32(3),
    on=ONE,
    call=lambda f, x, w: jax.grad(f, argnums=1)(x, w),
    why=POSITIONAL,
    expected=lambda x, w: np.sum(x, 0),
)
outer(
    "second_derivative_outside",
    lambda x: lax.psum(x**3, "i"),
    BY_I,
    {},
    f32(8),
    on=ONE,
    call=lambda f, x: jax.grad(lambda v: jax.grad(f)(v).sum())(x),
    why=POSITIONAL,
    expected=lambda x: 6 * x,
)
outer(
    "grad_outside_of_named_mean",
    lambda x: jnp.mean(jnp.sin(x), axis=("i", 0)),
    BY_I,
    {},
    f32(8, 3),
    on=ONE,
    call=lambda f, x: jax.grad(f)(x),
    why=POSITIONAL,
    expected=lambda x: np.cos(x) / 24,
)
outer(
    "jit_outside",
    lambda x: x - lax.pmean(x, "i"),
    BY_I,
    BY_I,
    f32(8, 3),
    on=ONE,
    call=lambda f, x: jax.jit(lambda v: f(v * 2))(x),
    why=WITHIN,
    expected=lambda x: 2 * x - 2 * np.mean(x, 0),
)
outer(
    "scan_outside",
    lambda x: x + lax.psum(x, "i"),
    BY_I,
    BY_I,
    f32(8, 3),
    on=ONE,
    why=WITHIN,
    call=lambda f, x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    expected=lambda x: x + 10 * np.sum(x, 0),
)
outer(
    "cond_outside",
    lambda x: -x,
    BY_I,
    BY_I,
    f32(8, 3),
    call=lambda f, x: lax.cond(True, f, lambda v: v, x),
    why=WITHIN,
    expected=lambda x: -x,
)
outer(
    "called_twice",
    lambda x: x + lax.psum(x, "i"),
    BY_I,
    BY_I,
    f32(8, 3),
    call=lambda f, x: f(f(x)),
    on=ORDERS,
)
outer(
    "sharded_argument",
    double,
    BY_I,
    BY_I,
    f32(8, 3),
    call=lambda f, x: f(jnp.asarray(x) + 1),
    on=PART,
)

UNDECLARED = (TypeError, "is actually mapped along more axes")
outer(
    "undeclared_result",
    double,
    BY_I,
    {},
    f32(8, 3),
    on=ORDERS,
    call=None,
    why="legacy returned the value at index 0, or vmap's error",
    expected=UNDECLARED,
)


# =============================================================================== errors


def worded(error, text):
    return Differs("the same error in other words", (error, text))


add("error_sizes_disagree", swap, BY_I, BY_I, f32(5), f32(6))
add("error_sizes_disagree_with_axis_sizes", double, BY_I, BY_I, f32(5), axis_sizes={"i": 6})
add("error_size_unknown", lambda: 1.0, (), BY_I, axis_sizes={}, on=NONE)
add("error_unknown_name_in_out_axes", double, BY_I, ["c", ...], f32(8))
add("error_repeated_name_in_in_axes", double, ["i", "i"], ["i"], f32(8, 8))
add("error_negative_position", double, {-1: "i"}, BY_I, f32(8))
add("error_rank_too_small", double, BY_IJ, BY_IJ, f32(8))
add("error_rank_asserted_of_argument", double, ["i", None], ["i", None], f32(8))
add("error_rank_asserted_of_result", lambda x: jnp.ones((2, 2)) * x, ["i"], ["i", None], f32(8))
add("error_result_rank_too_small", double, ["i"], {1: "i"}, f32(8))
add("error_no_results", double, BY_I, (), f32(8))
add("error_repeated_resource", double, BY_I, BY_I, f32(8), on={"i:xx": {"i": ("x", "x")}})
add("error_missing_resource", double, BY_I, BY_I, f32(8), on={"i:z": {"i": "z"}})
add("error_missing_mesh", double, BY_I, BY_I, f32(8), on=PART, mesh=None)
add("error_not_divisible", double, BY_I, BY_I, f32(5), axis_sizes={"i": 5}, on={"i:x": {"i": "x"}})
add("error_spec_tree_too_deep", double, (BY_I, BY_I), BY_I, f32(8))
add("error_spec_tree_of_another_type", double, ({"a": BY_I},), BY_I, f32(8))
add("error_spec_is_a_number", double, 3, {}, f32(8))
add("error_shadowing", lambda x: xmap(double, BY_I, BY_I)(x), BY_I, BY_I, f32(8, 8))
add(
    "error_two_axes_on_one_mesh_axis_in_a_value",
    lambda x, y: x + y,
    (BY_I, BY_J),
    BY_IJ,
    f32(8),
    f32(4),
    on={"i:x j:x": {"i": "x", "j": "x"}},
)
add(
    "error_result_broadcast_along_a_taken_mesh_axis",
    lambda x, y: x,
    (BY_I, BY_J),
    BY_IJ,
    f32(8),
    f32(4),
    on={"i:x j:x": {"i": "x", "j": "x"}},
)
add("error_shapes_inside", lambda x: x + jnp.ones(4), BY_I, BY_I, f32(8, 3))
add("error_from_the_body", lambda x: 1 / 0, BY_I, BY_I, f32(8))
add("error_loop_on_top_of_a_loop_name", double, BY_I, BY_I, f32(8), on={"missing": {"i": "l"}})
add(
    "resources_of_an_unknown_axis",
    double,
    BY_I,
    BY_I,
    f32(8),
    on={"b:x": {"b": "x"}},
)
