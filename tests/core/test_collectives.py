"""Every collective, over every kind of placement, gives what NumPy gives.

A cell is one collective (a :class:`Case`) under one placement of the axes ``a`` and ``b``.  A case is a
call, made with ``jax.lax`` (or ``jax.numpy``) inside an xmapped function and with the NumPy model of
``oracles.py`` on whole arrays; which axes its result may vary over is declared to xmap, which enforces it.
All cases of a family are computed by one xmapped function per placement.  The rest proves that
the table of rules has an oracle and a case for each rule, and that gradients, from outside and inside
the body, are those of positional functions and of legacy's convention.
"""

import functools
import itertools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax import lax

import xmap_compat
from xmap_compat import xmap
from xmap_compat.core import device_primitives as devices
from xmap_compat.core.collectives import COLLECTIVES
from xmap_compat.core.parameters import check_permutation
from xmap_compat.core.rules.table import TRANSLATIONS

# ------------------------------------------------------------------------------- placements

MESHES = {
    "4x2": ((4, 2), ("x", "y")),
    "4x1x2": ((4, 1, 2), ("x", "o", "y")),
}
PARTIAL = (16, 8)  # the sizes of a and b; b fills the 4x2 mesh, every other placement is partial
FILLS_X = (4, 8)  # a fills x


class Placement(NamedTuple):
    resources: dict[str, Any]
    sizes: tuple[int, int] = PARTIAL
    mesh: str = "4x2"

    def __str__(self):
        axes = [f"{name}:{'x'.join(r) if isinstance(r, tuple) else r}" for name, r in self.resources.items()]
        tail = [] if self.mesh == "4x2" else [self.mesh]
        return "+".join(axes or ["none"]) + "".join(f"@{t}" for t in [*tail, *self._size_text()])

    def _size_text(self):
        return [] if self.sizes == PARTIAL else ["a{}b{}".format(*self.sizes)]

    def __hash__(self):
        return hash(str(self))


BOTH_FILLED = [Placement({"a": "x", "b": "y"}, sizes=(4, 2)), Placement({"a": "y", "b": "x"}, sizes=(2, 4))]
PLACEMENTS = [
    Placement({}),
    Placement({"a": "x"}),
    Placement({"a": "y"}),
    Placement({"a": ("x", "y")}),
    Placement({"a": ("y", "x")}),
    Placement({"b": ("x", "y")}),
    Placement({"b": ("y", "x")}),
    Placement({"a": "x", "b": "y"}),
    Placement({"a": "y", "b": "x"}),
    Placement({"a": "o"}, mesh="4x1x2"),
    Placement({"a": ("o", "x"), "b": "y"}, mesh="4x1x2"),
    Placement({"a": ("y", "o", "x")}, mesh="4x1x2"),
    Placement({"a": "x", "b": "y"}, sizes=FILLS_X),
    BOTH_FILLED[0],
    Placement({"a": "o", "b": ("y", "x")}, sizes=(1, 8), mesh="4x1x2"),
]
FEW_PLACEMENTS = [PLACEMENTS[k] for k in (0, 1, 4, 6, 8, 12)]


def mesh_of(placement):
    shape, names = MESHES[placement.mesh]
    return xmap_compat.Mesh(np.array(jax.devices()).reshape(shape), names)


# ----------------------------------------------- permutations and groups of an axis of n elements


def rotation(k):
    return lambda n: [(i, (i + k) % n) for i in range(n)]


def reversal(n):
    return [(i, n - 1 - i) for i in range(n)]


def sources(n):
    return np.random.default_rng(0).permutation(n).tolist()


def shuffled(n):
    return list(zip(np.random.default_rng(1).permutation(n).tolist(), range(n)))


def chain(n):
    """Partial: the first receives nothing, the last sends nothing."""
    return [(i, i + 1) for i in range(n - 1)]


def sparse(n):
    """Partial: about half of a random permutation."""
    return shuffled(n)[: (n + 1) // 2]


def one_pair(n):
    return [(n - 1, 0)]


def nothing(n):
    return []


PERMUTATIONS = {
    "rotate 1": rotation(1),
    "rotate 3": rotation(3),
    "rotate -1": rotation(-1),
    "reverse": reversal,
    "shuffled": shuffled,
    "sparse": sparse,
    "chain": chain,
    "one pair": one_pair,
    "nothing": nothing,
}


def halves(n):
    """Two interleaved groups, one of them listed backwards."""
    return [list(range(0, n, 2)), list(range(1, n, 2))[::-1]] if n > 1 else [[0]]


def pairs(n):
    return [[i, n - 1 - i] for i in range(n // 2)] if n > 1 else [[0]]


def regular(shape, *order):
    """Groups that are a reshape of all elements: blocks, or with the order (1, 0) every so many elements."""
    return lambda n: np.arange(n).reshape(shape).transpose(order or (0, 1)).tolist() if n > 1 else [[0]]


REGULAR_HALVES = [regular((2, -1)), regular((-1, 2), 1, 0)]
REGULAR_PAIRS = [regular((-1, 2)), regular((2, -1), 1, 0)]


# ----------------------------------------------------------------------------------- operands

DTYPES = ["bfloat16", "int32", "int8", "uint8", "bool", "complex64"]

#: The named dimensions of each operand, and its positional shape given the sizes of a and b.
SHAPES: dict[str, tuple[str, Callable[[int, int], tuple[int, ...]]]] = {
    "x": ("ab", lambda A, B: (3,)),
    "x_ba": ("ba", lambda A, B: (3,)),
    "scalar": ("ab", lambda A, B: ()),
    "only_a": ("a", lambda A, B: (3,)),
    "only_b": ("b", lambda A, B: (3,)),
    "plain": ("", lambda A, B: (3,)),
    "matrix": ("ab", lambda A, B: (3, 2)),
    "matrix_b": ("b", lambda A, B: (2, 3)),
    "ties": ("ab", lambda A, B: (5,)),
    "labels": ("b", lambda A, B: (2,)),
    "labels_a": ("a", lambda A, B: (2,)),
    # for scatters and exchanges
    "square_a": ("ab", lambda A, B: (A, A)),
    "cube_b": ("ab", lambda A, B: (B, B, B)),
    "line_ab": ("ab", lambda A, B: (A * B, 2)),
    "tiled_a": ("ab", lambda A, B: (2 * A, 3)),
    "tiled_b": ("ab", lambda A, B: (3, 2 * B)),
    "tiled_ab": ("ab", lambda A, B: (2, 2 * A * B)),
    "only_b_for_a": ("b", lambda A, B: (A, 2)),
    "only_a_for_ab": ("a", lambda A, B: (A * B,)),
    "plain_for_a": ("", lambda A, B: (A, 2)),
    # for scatters and exchanges within groups of a
    "half": ("ab", lambda A, B: (len(halves(A)[0]), 2, len(halves(A)[0]))),
    "tiled_half": ("ab", lambda A, B: (2 * len(halves(A)[0]), 3)),
    "only_b_half": ("b", lambda A, B: (len(halves(A)[0]), 2)),
    "pair": ("ab", lambda A, B: (len(pairs(A)[0]), 2)),
    **{dtype: ("ab", lambda A, B: (A,)) for dtype in DTYPES},
    "nans": ("ab", lambda A, B: (5,)),
}


@functools.cache
def operands(sizes):
    """``{name: array}``, the named dimensions first."""
    length = dict(zip("ab", sizes))
    rng = np.random.default_rng(sizes)
    return {
        name: _draw(rng, name, (*(length[n] for n in axes), *positional(*sizes)))
        for name, (axes, positional) in SHAPES.items()
    }


def _draw(rng, name, shape):
    """Normal numbers; for a dtype, values whose sums are exact, or wrap around as integers do."""
    few = rng.integers(0, 3, size=shape)
    if name in ("ties", "labels", "labels_a"):
        return rng.integers(0, 5, size=shape, dtype=np.int32)
    if name == "bool":
        return few > 1
    if name == "nans":
        return np.where(few == 2, np.nan, few).astype(np.float32)
    if name == "complex64":
        return (few + 1j * rng.integers(-2, 3, size=shape)).astype(name)
    if name in DTYPES:
        return (few * (0.5 if name == "bfloat16" else 30)).astype(jnp.dtype(name))
    return rng.normal(size=shape).astype(np.float32)


# ------------------------------------------------------------------------------------- cases


def over_devices(name, x, axis):
    """What an xmap inside an xmap becomes, for axes that fill one mesh axis each."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    return devices.bind(getattr(devices, f"{name}_p"), x, axes, tuple(map(lax.axis_size, axes)))


#: What a case may call inside a body: ``function(*operands, axis, **options)``, as the NumPy model has it.
JAX = SimpleNamespace(
    **{name: getattr(lax, name) for name in ["psum", "pmax", "pmin", "pmean", "axis_index", "pbroadcast"]},
    **{name: getattr(lax, name) for name in ["ppermute", "pshuffle", "all_gather", "all_to_all", "pswapaxes"]},
    **{name: getattr(jnp, name) for name in ["sum", "max", "min", "mean", "var", "std"]},
    **{name: getattr(jax.nn, name) for name in ["logsumexp", "softmax", "log_softmax"]},
    psum_scatter=lax.psum_scatter,
    pdot=xmap_compat.pdot,
    pargmax=xmap_compat.pargmax,
    pargmin=xmap_compat.pargmin,
    method=lambda x, axis, name: getattr(x, name)(axis),
    **{f"device_{name}": functools.partial(over_devices, name) for name in ["vary", "sum", "gather", "take"]},
    one_hot=lambda labels, axis, num_classes: jax.nn.one_hot(labels, num_classes, axis=axis),
)

REDUCTIONS = ["psum", "pmax", "pmin", "pmean"]
NUMPY = ["sum", "max", "min", "mean", "var", "std"]
REMOVE_AXES = {*REDUCTIONS, *NUMPY, "method", "logsumexp", "all_gather", "pbroadcast", "pargmax", "pargmin", "pdot"}
REMOVE_AXES |= {"device_sum", "device_gather"}
BOTH = [("a", "b"), ("b", "a")]
AXES = ["a", "b", *BOTH]


class Case(NamedTuple):
    """``function(*operands, axis, **options)``; options that are functions are given the axis' size."""

    function: str
    operands: tuple[str, ...]
    axis: Any
    options: dict[str, Any]

    @property
    def label(self):
        options = [f"{k}={getattr(v, '__name__', v)}" for k, v in self.options.items()]
        return f"{self.function}({', '.join([*self.operands, str(self.axis), *options])})"

    @property
    def keep(self):
        """The axes that the result may vary over."""
        named = {name for operand in self.operands for name in SHAPES[operand][0]}
        over = {name for name in self.axis if name in ("a", "b")}
        removed = self.function in REMOVE_AXES and "axis_index_groups" not in self.options
        return "".join(sorted(named - over if removed else named | over))

    def __call__(self, collectives, values, sizes):
        size = {"a": sizes[0], "b": sizes[1]}
        n = np.prod([size[name] for name in self.axis if name in size]).item()
        options = {k: v(n) if callable(v) else v for k, v in self.options.items()}
        return getattr(collectives, self.function)(*(values[o] for o in self.operands), self.axis, **options)


def case(function, operands, axis, /, **options):
    return Case(function, tuple(operands.split()), axis, options)


def reductions():
    for name, axis in itertools.product(REDUCTIONS, AXES):
        yield case(name, "x", axis)
    for name in REDUCTIONS:
        yield case(name, "x_ba", "a")
        yield case(name, "scalar", ("b", "a"))
        yield case(name, "only_b", "a")
        yield case(name, "only_b", ("a", "b"))
        yield case(name, "plain", ("b", "a"))
    for name in ["psum", "pmax", "pmin"]:
        yield case(name, "matrix", ("a", 0))
        yield case(name, "matrix", (1, "b", 0, "a"))
        yield case(name, "matrix_b", ("a", 1))


def indices():
    for axis in AXES:
        yield case("axis_index", "", axis)
    for name, operand, axis in itertools.product(["pargmax", "pargmin"], ["x", "ties", "nans", "only_b"], "ab"):
        yield case(name, operand, axis)
    for source, axis in itertools.product([lambda n: 0, lambda n: n // 2, lambda n: n - 1], "ab"):
        yield case("pbroadcast", "matrix", axis, source=source)
    for operand in ["ties", "only_b", "plain", "x_ba"]:
        yield case("pbroadcast", operand, "a", source=lambda n: n - 1)


def permutations():
    for perm in PERMUTATIONS.values():
        yield case("ppermute", "x", "a", perm=perm)
    for axis, name in itertools.product(["b", *BOTH], ["rotate 1", "rotate 3", "reverse", "sparse"]):
        yield case("ppermute", "x", axis, perm=PERMUTATIONS[name])
    for operand in ["scalar", "matrix", "ties", "x_ba", "only_a", "only_b", "plain"]:
        yield case("ppermute", operand, "a", perm=chain)
    yield case("ppermute", "only_b", ("a", "b"), perm=shuffled)
    for axis in AXES:
        yield case("pshuffle", "x_ba", axis, perm=sources)
    yield case("pshuffle", "only_b", "a", perm=sources)


def gathers():
    for at, tiled, axis in itertools.product([0, 1, -1], [False, True], AXES):
        yield case("all_gather", "matrix", axis, axis=at, tiled=tiled)
    for operand, axis in itertools.product(["scalar", "only_b"], AXES):
        yield case("all_gather", operand, axis)
    yield case("all_gather", "x_ba", "a", axis=1)
    yield case("all_gather", "plain", "a", axis=1)
    yield case("all_gather", "plain", ("b", "a"), axis=0, tiled=True)


def exchanges():
    for split, concat in itertools.product([0, 1], [0, 1]):
        yield case("all_to_all", "square_a", "a", split_axis=split, concat_axis=concat)
    for split, concat in itertools.product([0, 1, 2], [0, 1, 2]):
        yield case("all_to_all", "cube_b", "b", split_axis=split, concat_axis=concat)
    for concat in [0, 1]:
        yield case("all_to_all", "tiled_a", "a", split_axis=0, concat_axis=concat, tiled=True)
        yield case("all_to_all", "tiled_b", "b", split_axis=1, concat_axis=concat, tiled=True)
        for axis in BOTH:
            yield case("all_to_all", "line_ab", axis, split_axis=0, concat_axis=concat)
            yield case("all_to_all", "tiled_ab", axis, split_axis=1, concat_axis=concat, tiled=True)
    yield case("all_to_all", "only_b_for_a", "a", split_axis=0, concat_axis=1)
    yield case("all_to_all", "only_a_for_ab", ("b", "a"), split_axis=0, concat_axis=0)
    yield case("all_to_all", "plain_for_a", "a", split_axis=0, concat_axis=0)
    for operand, axis, at in [("square_a", "a", 0), ("square_a", "a", 1), ("cube_b", "b", 1), ("only_b_for_a", "a", 0)]:
        yield case("pswapaxes", operand, axis, axis=at)


def scatters():
    for operand, axis, dimension in [
        ("square_a", "a", 0),
        ("square_a", "a", 1),
        ("cube_b", "b", 0),
        ("cube_b", "b", 2),
    ]:
        yield case("psum_scatter", operand, axis, scatter_dimension=dimension)
    yield case("psum_scatter", "tiled_a", "a", tiled=True)
    yield case("psum_scatter", "tiled_b", "b", scatter_dimension=1, tiled=True)
    yield case("psum_scatter", "square_a", "a", tiled=True)
    for axis in BOTH:
        yield case("psum_scatter", "line_ab", axis)
        yield case("psum_scatter", "tiled_ab", axis, scatter_dimension=1, tiled=True)
    yield case("psum_scatter", "only_b_for_a", "a")
    yield case("psum_scatter", "only_a_for_ab", ("b", "a"))
    yield case("psum_scatter", "plain_for_a", "a")


def contractions():
    for axis in AXES:
        yield case("pdot", "matrix x", axis)
        yield case("pdot", "matrix x", axis, pos_contract=((0,), (0,)))
        yield case("pdot", "matrix x_ba", axis, pos_batch=((0,), (0,)))
        yield case("pdot", "matrix matrix_b", axis, pos_contract=((1,), (0,)), pos_batch=((0,), (1,)))
        yield case("pdot", "only_a only_b", axis)
    for names in ["scalar scalar", "only_a plain", "plain x", "plain only_b", "plain plain"]:
        yield case("pdot", names, "a")
    yield case("pdot", "int32 int32", "a", pos_contract=((0,), (0,)))
    yield case("pdot", "complex64 complex64", "b")
    yield case("pdot", "bfloat16 bfloat16", "b")
    yield case("pdot", "bfloat16 bfloat16", ("a", "b"), preferred_element_type=np.dtype("float32"))


def groups():
    for name in REDUCTIONS:
        yield case(name, "x", "a", axis_index_groups=halves)
        yield case(name, "x", "a", axis_index_groups=pairs)
        yield case(name, "only_b", "a", axis_index_groups=halves)
        yield case(name, "x_ba", "b", axis_index_groups=halves)
    for at, tiled in itertools.product([0, 1], [False, True]):
        yield case("all_gather", "matrix", "a", axis=at, tiled=tiled, axis_index_groups=halves)
    yield case("all_gather", "scalar", "a", axis_index_groups=pairs)
    for split, concat in [(0, 0), (0, 1), (0, 2), (2, 0), (2, 2)]:
        yield case("all_to_all", "half", "a", split_axis=split, concat_axis=concat, axis_index_groups=halves)
    for concat in [0, 1]:
        options = {"split_axis": 0, "concat_axis": concat, "tiled": True}
        yield case("all_to_all", "tiled_half", "a", **options, axis_index_groups=halves)
    yield case("all_to_all", "pair", "a", split_axis=0, concat_axis=1, axis_index_groups=pairs)
    yield case("all_to_all", "only_b_half", "a", split_axis=0, concat_axis=0, axis_index_groups=halves)
    yield case("pswapaxes", "half", "a", axis=2, axis_index_groups=halves)
    for dimension in [0, 2]:
        yield case("psum_scatter", "half", "a", scatter_dimension=dimension, axis_index_groups=halves)
    yield case("psum_scatter", "tiled_half", "a", tiled=True, axis_index_groups=halves)
    yield case("psum_scatter", "only_b_half", "a", axis_index_groups=halves)
    yield case("psum_scatter", "pair", "a", axis_index_groups=pairs)
    for two, many in zip(REGULAR_HALVES, REGULAR_PAIRS):
        for reduction, layout in itertools.product(["psum", "pmax"], [two, many]):
            yield case(reduction, "x", "a", axis_index_groups=layout)
        yield case("all_gather", "matrix", "a", axis=1, axis_index_groups=two)
        yield case("all_gather", "scalar", "a", axis_index_groups=many)
        yield case("all_to_all", "half", "a", split_axis=0, concat_axis=2, axis_index_groups=two)
        yield case("all_to_all", "pair", "a", split_axis=0, concat_axis=1, axis_index_groups=many)
        yield case("psum_scatter", "half", "a", scatter_dimension=0, axis_index_groups=two)


def dtypes():
    for dtype in DTYPES:
        yield case("psum", dtype, ("a", "b"))
        yield case("pmean", dtype, "b")
        if dtype != "complex64":
            yield case("pmax", dtype, "a")
            yield case("pmin", dtype, ("b", "a"))
        yield case("ppermute", dtype, "a", perm=chain)
        yield case("all_gather", dtype, "a", axis=1)
        yield case("all_to_all", dtype, "a", split_axis=0, concat_axis=0)
        yield case("pbroadcast", dtype, "a", source=lambda n: n - 1)
        if dtype != "bool":
            yield case("psum_scatter", dtype, "a")


def devices_of_nested_xmaps():
    for axis in AXES:
        yield case("device_vary", "only_b", axis)
        yield case("device_sum", "x", axis)
        yield case("device_gather", "matrix", axis)
    for operand, axis in [("square_a", "a"), ("only_b_for_a", "a"), ("cube_b", "b"), ("line_ab", ("b", "a"))]:
        yield case("device_take", operand, axis)


EVERYWHERE = [reductions, indices, permutations, gathers, exchanges, scatters, contractions]
SOMEWHERE = [groups, dtypes]
FAMILIES = {family.__name__: list(family()) for family in [*EVERYWHERE, *SOMEWHERE, devices_of_nested_xmaps]}
CELLS = [
    *((family.__name__, placement) for family in EVERYWHERE for placement in PLACEMENTS),
    *((family.__name__, placement) for family in SOMEWHERE for placement in FEW_PLACEMENTS),
    *(("devices_of_nested_xmaps", placement) for placement in BOTH_FILLED),
]

# ------------------------------------------------------------------------------ values: the matrix


def run(jitted, *arguments):
    return jax.device_get(jitted(*arguments))


def compute(placement, cases):
    """The results of cases under a placement, from one xmapped function."""
    used = sorted({name for case in cases for name in case.operands})
    mapped = xmap(
        lambda values: tuple(case(JAX, values, placement.sizes) for case in cases),
        ({name: [*SHAPES[name][0], ...] for name in used},),
        tuple([*case.keep, ...] for case in cases),
        axis_sizes=dict(zip("ab", placement.sizes)),
        axis_resources=placement.resources,
    )
    arguments = {name: operands(placement.sizes)[name] for name in used}
    with mesh_of(placement):
        return run(mapped, arguments)


@functools.cache
def expected(sizes, family):
    model = oracles.Model(**dict(zip("ab", sizes)))
    whole = {name: model.whole(array, SHAPES[name][0]) for name, array in operands(sizes).items()}
    return [model.part(case(model, whole, sizes), case.keep) for case in FAMILIES[family]]


def difference(result, oracle):
    """What is wrong with a result, or None."""
    if result.dtype != oracle.dtype or result.shape != oracle.shape:
        return f"{result.dtype}{result.shape} instead of {oracle.dtype}{oracle.shape}"
    exact = np.float32 if result.dtype.name == "bfloat16" else result.dtype
    tolerance = 1e-2 if result.dtype.name == "bfloat16" else 2e-5
    close = np.isclose(result.astype(exact), oracle.astype(exact), rtol=tolerance, atol=tolerance)
    return None if close.all() else f"{(~close).sum()} of {close.size} elements differ"


@pytest.mark.sampled
@pytest.mark.parametrize(("family", "placement"), CELLS, ids=str)
def test_collectives_equal_numpy(family, placement):
    cases = FAMILIES[family]
    results = compute(placement, cases)
    compared = zip(cases, results, expected(placement.sizes, family), strict=True)
    wrong = {case.label: difference(result, oracle) for case, result, oracle in compared}
    assert {label: text for label, text in wrong.items() if text} == {}


# -------------------------------------------------------------------- the table of rules is covered


def primitives_of(jaxpr):
    """The names of all primitives in a jaxpr, also of those in nested jaxprs."""
    return set(re.findall(r" = (\w+)", str(jaxpr)))


def test_every_rule_has_an_oracle():
    assert set(COLLECTIVES) == set(TRANSLATIONS) == set(oracles.PRIMITIVES)


def test_every_rule_has_a_case():
    values = {name: np.ones(positional(*FILLS_X), np.float32) for name, (_, positional) in SHAPES.items()}
    cases = [case for cases in FAMILIES.values() for case in cases]
    body = lambda values: [case(JAX, values, FILLS_X) for case in cases]
    assert set(COLLECTIVES) <= primitives_of(jax.make_jaxpr(body, axis_env=list(zip("ab", FILLS_X)))(values))


# ----------------------------------------------------------------- constants, containers, long names


@pytest.mark.sampled(3)
@pytest.mark.parametrize("placement", FEW_PLACEMENTS, ids=str)
def test_sums_of_python_numbers_are_python_numbers(placement):
    A, B = placement.sizes
    found = []

    def body(x):
        found.extend([lax.psum(1, "a"), lax.psum(2.5, "b"), lax.psum(-3, ("b", "a")), lax.axis_size("a")])
        return x

    with mesh_of(placement):
        xmap(body, ["a", "b"], ["a", "b"], axis_resources=placement.resources)(np.zeros((A, B)))
    assert found == [A, 2.5 * B, -3 * A * B, A]
    assert [type(value) for value in found] == [int, float, int, int]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("placement", FEW_PLACEMENTS, ids=str)
def test_collectives_of_constants(placement):
    """Arrays that the function closes over are not traced; JAX treats some of them specially."""
    A, B = placement.sizes
    constant = np.arange(A, dtype=np.float32)

    def body():
        return (
            lax.psum(constant, ("a", "b")),
            lax.pmax(constant, "a"),
            lax.all_gather(constant, "a"),
            lax.ppermute(constant, "a", chain(A)),
            lax.psum_scatter(constant, "a"),
            lax.pmean(constant, "b"),
        )

    mapped = xmap(
        body,
        (),
        ([...], [...], [...], ["a", ...], ["a", ...], [...]),
        axis_sizes={"a": A, "b": B},
        axis_resources=placement.resources,
    )
    with mesh_of(placement):
        total, largest, gathered, moved, scattered, mean = mapped()
    np.testing.assert_allclose(total, constant * A * B)
    np.testing.assert_array_equal(largest, constant)
    np.testing.assert_array_equal(gathered, np.tile(constant, (A, 1)))
    np.testing.assert_array_equal(moved, np.where(np.arange(A)[:, None] > 0, constant, 0))
    np.testing.assert_allclose(scattered, constant * A)
    np.testing.assert_allclose(mean, constant)


ON_TREES = {
    "psum": {},
    "pmax": {},
    "pmean": {},
    "ppermute": {"perm": chain},
    "pshuffle": {"perm": sources},
    "all_gather": {"axis": 1},
    "pbroadcast": {"source": lambda n: n - 1},
    "psum_scatter": {"tiled": True},
    "all_to_all": {"split_axis": 0, "concat_axis": 1, "tiled": True},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("placement", FEW_PLACEMENTS, ids=str)
def test_collectives_map_over_containers(placement):
    """A dictionary of tuples, with None in it, comes back as one, each leaf by itself."""
    values, model = operands(placement.sizes), oracles.Model(**dict(zip("ab", placement.sizes)))
    tree = {"u": (values["square_a"], None), "v": [values["int32"][..., None] * np.ones((1, 3), np.int32)]}
    calls = {name: Case(name, ("tree",), "a", options) for name, options in ON_TREES.items()}

    def body(tree):
        return {name: call(JAX, {"tree": tree}, placement.sizes) for name, call in calls.items()}

    mapped = xmap(body, ["a", "b", ...], ["a", "b", ...], axis_resources=placement.resources)
    with mesh_of(placement):
        results = mapped(tree)
    for name, call in calls.items():
        oracle = jax.tree.map(lambda leaf, call=call: call(model, {"tree": leaf}, placement.sizes), tree)
        assert jax.tree.structure(results[name]) == jax.tree.structure(tree)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), results[name], oracle)


def of_every_ordered_type():
    """Arrays of all types that have an order and that XLA computes with on a CPU: those of 4 and 8 bits too, of which
    some are without infinity, or NaN."""
    values = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32) * 4
    # jnp.max of float8_e8m0fnu, which has no sign, is NaN.
    eight_bits = [name for name in dir(jnp) if name.startswith("float8_") and name != "float8_e8m0fnu"]
    arrays = {name: values.astype(getattr(jnp, name)) for name in ["bfloat16", "float16", "float32", *eight_bits]}
    arrays |= {"float4_e2m1fn": values.astype(jnp.float4_e2m1fn)}
    arrays |= {name: values.astype(name) for name in ["int8", "int16", "int32"]}
    arrays |= {name: np.abs(values).astype(name) for name in ["uint8", "uint16", "uint32"]}
    return {**arrays, "bool": values > 0}


@pytest.mark.parametrize("reduce", [lax.psum, lax.pmax], ids=lambda reduce: reduce.__name__)
def test_a_reduction_in_groups_takes_work_linear_in_the_axis(reduce):
    def work(n):
        mapped = xmap(lambda v: reduce(v, "i", axis_index_groups=halves(n)), ["i"], ["i"])
        costs = mapped.lower(jax.ShapeDtypeStruct((n,), np.float32)).compile().cost_analysis()
        return np.array([costs["flops"], costs["bytes accessed"]])

    assert (work(2048) <= 8.5 * work(256)).all()


def test_a_permutation_is_checked_by_one_look_at_each_index():
    looks = 0

    class Index(int):
        def __eq__(self, other):
            nonlocal looks
            looks += 1
            return int(self) == int(other)

        __hash__ = int.__hash__

    perm = [(Index(k), Index(k + 1)) for k in range(999)]
    check_permutation({"perm": perm}, 1000, "here")
    assert looks <= 2 * len(perm)
    with pytest.raises(ValueError, match="destination index 7 of ppermute at here should be in one pair only"):
        check_permutation({"perm": [*perm, (Index(999), Index(7))]}, 1000, "here")


def test_a_reduction_in_groups_varies_over_the_axis():
    body = lambda v: lax.psum(v, "i", axis_index_groups=[[0, 1], [2, 3]])
    with pytest.raises(TypeError, match="actually mapped along more axes"):
        xmap(body, ["i"], [])(np.ones(4, np.float32))


@pytest.mark.parametrize("resources", [{}, {"i": "x"}], ids=str)
@pytest.mark.parametrize("groups", [None, [[0, 3, 5, 1], [4, 2, 6, 7]]], ids=["whole", "groups"])
def test_extrema_of_every_type(groups, resources, mesh42):
    arrays = of_every_ordered_type()

    def body(arrays):
        extrema = {"max": lax.pmax, "min": lax.pmin}
        return {k: jax.tree.map(lambda v, f=f: f(v, "i", axis_index_groups=groups), arrays) for k, f in extrema.items()}

    with mesh42:
        results = xmap(body, ["i", ...], ["i", ...], axis_resources=resources)(arrays)
    for kind, reduce in {"max": np.max, "min": np.min}.items():
        for name, array in arrays.items():
            wide, expected = array.astype(np.float32), np.empty((8, 3), np.float32)
            for group in groups or [list(range(8))]:
                expected[group] = reduce(wide[group], 0)
            assert results[kind][name].dtype == array.dtype
            np.testing.assert_array_equal(np.asarray(results[kind][name]).astype(np.float32), expected, name)


# ------------------------------------------------------------------------- gradients from outside


class Smooth(NamedTuple):
    """A differentiable collective: in the body, and as a function of whole positional arrays.

    Both compute on :func:`hidden`, so the gradient reaches operands over both axes, over one, and over none.
    """

    body: Callable[[Any], Any]
    keep: str
    positional: Callable[[Any], Any]


MEMBERS = np.zeros((16, 16), np.float32)
for _group in halves(16):
    MEMBERS[np.ix_(_group, _group)] = 1


def group_of_each(groups):
    """For each of 16 elements the members of its group."""
    return np.array([next(group for group in groups if k in group) for k in range(16)])


def hidden(v):
    """Varies over a and b, inside and outside: ``u`` varies over b only, ``w`` over neither."""
    return SimpleNamespace(
        h=jnp.tanh(v["x"] * v["w"] + v["u"]),
        g=jnp.sin(v["x"] + v["w"]),
        u=jnp.sin(v["u"]),
        w=jnp.cos(v["w"]),
        s=jnp.tanh(v["square"] * v["u"][..., :1]),
        us=jnp.sin(v["u_square"] * v["u"][..., :1]),
    )


SMOOTH = {
    "psum groups": Smooth(
        lambda v: lax.psum(v.h, "a", axis_index_groups=halves(16)),
        "ab",
        lambda v: jnp.einsum("ij,jbk->ibk", MEMBERS, v.h),
    ),
    "times its psum": Smooth(lambda v: v.h * lax.psum(v.h, "a"), "ab", lambda v: v.h * v.h.sum(0)),
    "pmax of ties": Smooth(
        lambda v: lax.pmax(jnp.abs(v.w) + 0 * v.h, "a"), "b", lambda v: (jnp.abs(v.w) + 0 * v.h).max(0)
    ),
    "ppermute of a constant": Smooth(
        lambda v: lax.ppermute(v.u, "a", one_pair(16)), "ab", lambda v: jnp.zeros((16, 8, 2)).at[0].set(v.u)
    ),
    "all_gather of a constant": Smooth(
        lambda v: lax.all_gather(v.u, "a", axis=1), "b", lambda v: jnp.repeat(v.u[:, :, None], 16, 2)
    ),
    "all_gather groups": Smooth(
        lambda v: lax.all_gather(v.h, "a", axis_index_groups=halves(16)),
        "ab",
        lambda v: v.h[group_of_each(halves(16))].transpose(0, 2, 1, 3),
    ),
    **{
        f"all_gather {kind}": Smooth(
            lambda v, groups=groups: lax.all_gather(v.h, "a", axis_index_groups=groups(16)),
            "ab",
            lambda v, groups=groups: v.h[group_of_each(groups(16))].transpose(0, 2, 1, 3),
        )
        for kind, groups in zip(["blocks", "stripes"], REGULAR_HALVES)
    },
    "all_to_all of a constant": Smooth(
        lambda v: lax.all_to_all(v.us, "a", 0, 0), "ab", lambda v: jnp.repeat(v.us.T[:, :, None], 16, 2)
    ),
    "psum_scatter of a constant": Smooth(lambda v: lax.psum_scatter(v.us, "a"), "ab", lambda v: 16 * v.us.T),
    "two in a row": Smooth(
        lambda v: lax.psum(lax.ppermute(v.h, "a", rotation(1)(16)) * v.h, "b"),
        "a",
        lambda v: (jnp.roll(v.h, 1, 0) * v.h).sum(1),
    ),
}

OUTSIDE_NAMES = {"x": "ab", "u": "b", "w": "", "square": "ab", "u_square": "b"}


@functools.cache
def outside_arguments():
    rng = np.random.default_rng(7)
    shapes = {"x": (16, 8, 2), "u": (8, 2), "w": (2,), "square": (16, 8, 16), "u_square": (8, 16)}
    draw = lambda: {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return draw(), draw()


def derivatives(functions, order):
    """For each function of the arguments: value, gradient and tangent of one loss, or the gradient of the tangent."""

    def of_loss(fun, at, along):
        def loss(values):
            out = fun(values)
            return (jnp.sin(out) * jnp.cos(jnp.arange(out.size, dtype=out.dtype).reshape(out.shape))).sum()

        forward = lambda values: jax.jvp(loss, (values,), (along,))[1]
        value, first = jax.value_and_grad(loss)(at)
        if order == 1:
            return {"value": value, "gradient": first, "tangent": forward(at)}
        return {"tangent": forward(at), "second": jax.grad(forward)(at)}

    return jax.jit(lambda at, along: {name: of_loss(fun, at, along) for name, fun in functions.items()})


@functools.cache
def positional_derivatives(order):
    functions = {name: lambda v, f=case.positional: f(hidden(v)) for name, case in SMOOTH.items()}
    return run(derivatives(functions, order), *outside_arguments())


def outside_derivatives_that_differ(placement, order):
    functions = {
        name: xmap(
            lambda v, f=case.body: f(hidden(v)),
            ({name: [*axes, ...] for name, axes in OUTSIDE_NAMES.items()},),
            [*case.keep, ...],
            axis_sizes={"a": 16, "b": 8},
            axis_resources=placement.resources,
        )
        for name, case in SMOOTH.items()
    }
    with mesh_of(placement):
        results = run(derivatives(functions, order), *outside_arguments())
    leaves = jax.tree.map(lambda r, o: np.allclose(r, o, rtol=1e-3, atol=1e-3), results, positional_derivatives(order))
    return [jax.tree_util.keystr(path) for path, equal in jax.tree_util.tree_leaves_with_path(leaves) if not equal]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", FEW_PLACEMENTS[:5], ids=str)
def test_outside_derivatives_are_those_of_the_positional_function(placement):
    """Forward and reverse, for operands over both axes, over one, and over none."""
    assert outside_derivatives_that_differ(placement, order=1) == []


@pytest.mark.slow
@pytest.mark.parametrize("placement", FEW_PLACEMENTS[:5], ids=str)
def test_second_outside_derivatives_are_those_of_the_positional_function(placement):
    assert outside_derivatives_that_differ(placement, order=2) == []


# ------------------------------------------------------------------------ gradients inside the body


class Inside(NamedTuple):
    """A gradient taken inside a body of ``v``, and what it is, by the NumPy model on whole arrays."""

    body: Callable[[Any, int], Any]
    expected: Callable[[oracles.Model, Any, int], Any]


def gradient(loss):
    """The gradient for the operand ``x`` of a loss that each element of the axes takes by itself."""
    return lambda v, n: jax.grad(lambda x: loss(x, v, n).sum())(v.x)


#: ``n`` is the size of a; ``k`` varies over both axes like ``x``; ``square``, ``other``: (n, n) for each element.
INSIDE = {
    "psum times x": Inside(gradient(lambda x, v, n: x * lax.psum(x, "a")), lambda m, v, n: 2 * m.psum(v.x, "a")),
    "psum twice": Inside(
        gradient(lambda x, v, n: lax.psum(x * lax.psum(x, "b"), "a")), lambda m, v, n: 2 * n * m.psum(v.x, "b")
    ),
    "second order": Inside(
        lambda v, n: jax.grad(lambda x: (jax.grad(lambda z: lax.psum(z**3, "a").sum())(x) * v.k).sum())(v.x),
        lambda m, v, n: n * 6 * v.x * v.k,
    ),
    "for a plain value": Inside(
        lambda v, n: jax.grad(lambda w: lax.psum(v.x * w, "a").sum())(v.plain), lambda m, v, n: n * v.x
    ),
    "jvp": Inside(
        lambda v, n: jax.jvp(lambda x: lax.psum(x**2, "a"), (v.x,), (v.k,))[1],
        lambda m, v, n: m.psum(2 * v.x * v.k, "a"),
    ),
    "pdot": Inside(gradient(lambda x, v, n: xmap_compat.pdot(x, v.k, "a", ((0,), (0,)))), lambda m, v, n: v.k),
    "pdot squared": Inside(
        gradient(lambda x, v, n: xmap_compat.pdot(x, x, "a", ((0,), (0,)))), lambda m, v, n: 2 * v.x
    ),
    "pdot times k": Inside(
        gradient(lambda x, v, n: v.k * xmap_compat.pdot(x, v.k, "a", pos_batch=((0,), (0,)))), lambda m, v, n: v.k**2
    ),
    "all_to_all tiled": Inside(
        lambda v, n: jax.grad(lambda s: (v.other[:1] * lax.all_to_all(s, "a", 0, 1, tiled=True)[:, :n]).sum())(
            v.square
        ),
        lambda m, v, n: m.all_to_all(_first_block(v.other, n), "a", 1, 0, tiled=True),
    ),
    "psum groups": Inside(
        gradient(lambda x, v, n: v.k * lax.psum(x, "a", axis_index_groups=halves(n))),
        lambda m, v, n: m.psum(v.k, "a", axis_index_groups=halves(n)),
    ),
    "pmax groups": Inside(
        gradient(lambda x, v, n: v.k * lax.pmax(x, "a", axis_index_groups=halves(n))),
        lambda m, v, n: m.psum(v.k, "a", axis_index_groups=halves(n)) * _winner_in_halves(m, v, n),
    ),
    "pmin groups, by a rule": Inside(
        gradient(lambda x, v, n: v.k * -_least_in_halves(-x, n)),
        lambda m, v, n: m.psum(v.k, "a", axis_index_groups=halves(n)) * _winner_in_halves(m, v, n),
    ),
    "jnp.max of ties": Inside(
        lambda v, n: jax.grad(lambda t: (v.k[0] * jnp.max(t, axis=("a", 0))).sum())(v.ties.astype(np.float32)),
        lambda m, v, n: _ties_gradient(m, v),
    ),
}

#: The transpose rules of JAX 0.10 to 0.12 raise for these, under vmap and shard_map alike.
INSIDE_BEYOND_JAX = {
    "all_to_all 0 -> 1": Inside(
        lambda v, n: jax.grad(lambda s: (v.other * lax.all_to_all(s, "a", 0, 1)).sum())(v.square),
        lambda m, v, n: m.all_to_all(v.other, "a", 1, 0),
    ),
    "pbroadcast": Inside(
        gradient(lambda x, v, n: v.k * lax.pbroadcast(x, "a", n - 1)),
        lambda m, v, n: m.psum(v.k, "a") * (m.axis_index("a")[..., None] == n - 1),
    ),
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _least_in_halves(x, n):
    return lax.pmin(x, "a", axis_index_groups=halves(n))


def _least_in_halves_bwd(n, x, ct):
    return jax.vjp(lambda x: lax.pmin(x, "a", axis_index_groups=halves(n)), x)[1](ct)


_least_in_halves.defvjp(lambda x, n: (_least_in_halves(x, n), x), _least_in_halves_bwd)


def _winner_in_halves(m, v, n):
    return v.x == m.pmax(v.x, "a", axis_index_groups=halves(n))


def _ties_gradient(m, v):
    """The largest elements share the sum of all cotangents equally."""
    winners = v.ties == m.max(v.ties, ("a", 0))[..., None]
    return winners * (m.psum(v.k[..., 0], "a") / m.sum(winners, ("a", 0)))[..., None]


def _first_block(other, n):
    """The first row of ``other`` as the first n columns of n times as many, the rest zero."""
    return np.concatenate([other[:, :, :1], np.zeros((*other.shape[:2], 1, n * n - n), np.float32)], 3)


@functools.cache
def inside_arguments(sizes):
    values = operands(sizes)
    other = np.random.default_rng(5).normal(size=values["square_a"].shape).astype(np.float32)
    return {
        "x": values["x"],
        "k": np.cos(np.arange(values["x"].size, dtype=np.float32)).reshape(values["x"].shape),
        "row": other[..., 0],
        "square": values["square_a"],
        "other": other,
        "ties": values["ties"],
        "plain": values["plain"],
    }


def gradients_inside_that_differ(cases, placement):
    n, arguments = placement.sizes[0], inside_arguments(placement.sizes)
    mapped = xmap(
        lambda v: {name: case.body(SimpleNamespace(**v), n) for name, case in cases.items()},
        ({name: [...] if name == "plain" else ["a", "b", ...] for name in arguments},),
        ["a", "b", ...],
        axis_resources=placement.resources,
    )
    with mesh_of(placement):
        results = run(mapped, arguments)
    model = oracles.Model(**dict(zip("ab", placement.sizes)))
    expected = {name: case.expected(model, SimpleNamespace(**arguments), n) for name, case in cases.items()}
    return [name for name in cases if not np.allclose(results[name], expected[name], rtol=1e-4, atol=1e-4)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_gradients_inside_follow_the_convention_of_legacy(placement):
    """The transpose of psum is psum, of all_gather psum_scatter; pdot uses its cotangent as it is."""
    assert gradients_inside_that_differ(INSIDE, placement) == []


@pytest.mark.sampled
@pytest.mark.parametrize("placement", FEW_PLACEMENTS, ids=str)
@pytest.mark.parametrize("name", INSIDE_BEYOND_JAX)
def test_gradients_inside_that_jax_itself_cannot_take(name, placement):
    assert gradients_inside_that_differ({name: INSIDE_BEYOND_JAX[name]}, placement) == []
