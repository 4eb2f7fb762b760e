"""Collectives that move elements, and groups, over every kind of placement, give what NumPy gives.

A cell is one collective (a :class:`Case`) under one placement of the axes ``a`` and ``b``.  A case is a
call, made with ``jax.lax`` inside an xmapped function and with the NumPy model of
``oracles.py`` on whole arrays; which axes its result may vary over is declared to xmap, which enforces it.
All cases of a family are computed by one xmapped function per placement.  Reductions, contractions and derivatives are
those of ``test_matrix.py``.
"""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax import lax
from tables import expressions

import xmap_compat
from xmap_compat import xmap

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
        axes = [
            f"{name}:{'x'.join(r) if isinstance(r, tuple) else r}"
            for name, r in self.resources.items()
        ]
        tail = [] if self.mesh == "4x2" else [self.mesh]
        return "+".join(axes or ["none"]) + "".join(f"@{t}" for t in [*tail, *self._size_text()])

    def _size_text(self):
        return [] if self.sizes == PARTIAL else ["a{}b{}".format(*self.sizes)]

    def __hash__(self):
        return hash(str(self))


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
    Placement({"a": "x", "b": "y"}, sizes=(4, 2)),
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
    return lambda n: (
        np.arange(n).reshape(shape).transpose(order or (0, 1)).tolist() if n > 1 else [[0]]
    )


REGULAR_HALVES = [regular((2, -1)), regular((-1, 2), 1, 0)]
REGULAR_PAIRS = [regular((-1, 2)), regular((2, -1), 1, 0)]


# ----------------------------------------------------------------------------------- operands

DTYPES = ["bfloat16", "int32", "int8", "uint8", "bool", "complex64"]


def of_half(size):
    """How many elements a group has."""
    return len(halves(size)[0])


# The named dimensions of each operand, and its positional shape given the sizes of a and b.
OPERANDS = expressions(
    """
x, ab: (3,)
x_ba, ba: (3,)
scalar, ab: ()
only_a, a: (3,)
only_b, b: (3,)
plain, : (3,)
matrix, ab: (3, 2)
ties, ab: (5,)
square_a, ab: (A, A)
cube_b, ab: (B, B, B)
line_ab, ab: (A * B, 2)
tiled_a, ab: (2 * A, 3)
tiled_b, ab: (3, 2 * B)
tiled_ab, ab: (2, 2 * A * B)
only_b_for_a, b: (A, 2)
only_a_for_ab, a: (A * B,)
plain_for_a, : (A, 2)
half, ab: (of_half(A), 2, of_half(A))
tiled_half, ab: (2 * of_half(A), 3)
only_b_half, b: (of_half(A), 2)
pair, ab: (len(pairs(A)[0]), 2)
""",
    "A, B",
    globals(),
)
SHAPES: dict[str, tuple[str, Callable[[int, int], tuple[int, ...]]]] = {}
for title, shape_of in OPERANDS.items():
    operand, names = title.split(", ")
    SHAPES[operand] = (names, shape_of)
for dtype in DTYPES:
    SHAPES[dtype] = ("ab", lambda A, B: (A,))


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
    if name == "ties":
        return rng.integers(0, 5, size=shape, dtype=np.int32)
    if name == "bool":
        return few > 1
    if name == "complex64":
        return (few + 1j * rng.integers(-2, 3, size=shape)).astype(name)
    if name in DTYPES:
        return (few * (0.5 if name == "bfloat16" else 30)).astype(jnp.dtype(name))
    return rng.normal(size=shape).astype(np.float32)


# ------------------------------------------------------------------------------------- cases


REDUCTIONS = ["psum", "pmax", "pmin", "pmean"]
REMOVE_AXES = {
    *REDUCTIONS,
    "all_gather",
    "pbroadcast",
}
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
        return getattr(collectives, self.function)(
            *(values[o] for o in self.operands), self.axis, **options
        )


def case(function, operands, axis, /, **options):
    return Case(function, tuple(operands.split()), axis, options)


def permutations():
    for perm in PERMUTATIONS.values():
        yield case("ppermute", "x", "a", perm=perm)
    for axis, name in itertools.product(
        ["b", *BOTH], ["rotate 1", "rotate 3", "reverse", "sparse"]
    ):
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
    for operand, axis, at in [
        ("square_a", "a", 0),
        ("square_a", "a", 1),
        ("cube_b", "b", 1),
        ("only_b_for_a", "a", 0),
    ]:
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
        yield case(
            "all_to_all",
            "half",
            "a",
            split_axis=split,
            concat_axis=concat,
            axis_index_groups=halves,
        )
    for concat in [0, 1]:
        options = {"split_axis": 0, "concat_axis": concat, "tiled": True}
        yield case("all_to_all", "tiled_half", "a", **options, axis_index_groups=halves)
    yield case("all_to_all", "pair", "a", split_axis=0, concat_axis=1, axis_index_groups=pairs)
    yield case(
        "all_to_all", "only_b_half", "a", split_axis=0, concat_axis=0, axis_index_groups=halves
    )
    yield case("pswapaxes", "half", "a", axis=2, axis_index_groups=halves)
    for dimension in [0, 2]:
        yield case(
            "psum_scatter", "half", "a", scatter_dimension=dimension, axis_index_groups=halves
        )
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


EVERYWHERE = [permutations, gathers, exchanges, scatters]
SOMEWHERE = [groups, dtypes]
FAMILIES = {family.__name__: list(family()) for family in [*EVERYWHERE, *SOMEWHERE]}
CELLS = [
    *((family.__name__, placement) for family in EVERYWHERE for placement in PLACEMENTS),
    *((family.__name__, placement) for family in SOMEWHERE for placement in FEW_PLACEMENTS),
]

# ------------------------------------------------------------------------------ values: the matrix


def run(jitted, *arguments):
    return jax.device_get(jitted(*arguments))


def compute(placement, cases):
    """The results of cases under a placement, from one xmapped function."""
    used = sorted({name for case in cases for name in case.operands})
    mapped = xmap(
        lambda values: tuple(case(lax, values, placement.sizes) for case in cases),
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


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("family", "placement"), CELLS, ids=str)
def test_collectives_equal_numpy(family, placement):
    cases = FAMILIES[family]
    results = compute(placement, cases)
    compared = zip(cases, results, expected(placement.sizes, family), strict=True)
    wrong = {case.label: difference(result, oracle) for case, result, oracle in compared}
    assert {label: text for label, text in wrong.items() if text} == {}


# ----------------------------------------------------------------- constants, containers, long names


def of_every_ordered_type():
    """Arrays of all types that have an order and that XLA computes with on a CPU: those of 4 and 8 bits too, of which
    some are without infinity, or NaN."""
    values = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32) * 4
    arrays = {"bool": values > 0, "float4_e2m1fn": values.astype(jnp.float4_e2m1fn)}
    # jnp.max of float8_e8m0fnu, which has no sign, is NaN.
    floats = set(re.findall(r"\bb?float(?:16|32)\b|float8_\w+", " ".join(dir(jnp))))
    for name in floats - {"float8_e8m0fnu"}:
        arrays[name] = values.astype(getattr(jnp, name))
    for bits in (8, 16, 32):
        arrays[f"int{bits}"] = values.astype(f"int{bits}")
        arrays[f"uint{bits}"] = np.abs(values).astype(f"uint{bits}")
    return arrays


@pytest.mark.parametrize("resources", [{}, {"i": "x"}, {"i": "y"}, {"i": ("y", "x")}], ids=str)
def test_equal_elements_that_change_places_are_equal(resources, mesh42):
    """As in legacy, and under jax.vmap: the result does not vary over the axis."""
    rotate = [(k, (k + 1) % 8) for k in range(8)]
    others = [1, 0, 2, 3, 4, 5, 7, 6]

    def moved(v):
        square = lax.psum(v**2, "i")
        return lax.ppermute(square, "i", rotate) + 3 * lax.pshuffle(square, "i", others)

    def moved_in_part(v):
        return lax.ppermute(lax.psum(v, "i"), "i", rotate[1:])

    v = np.arange(8, dtype=np.float32)
    fun = xmap(moved, ["i"], {}, axis_resources=resources)
    inside = xmap(jax.grad(moved), ["i"], ["i"], axis_resources=resources)
    with mesh42:
        np.testing.assert_array_equal(fun(v), 4 * (v**2).sum())
        np.testing.assert_array_equal(jax.grad(fun)(v), 8 * v)
        np.testing.assert_array_equal(inside(v), 8 * 8 * v)
        with pytest.raises(TypeError, match="The result varies over `i`"):
            xmap(moved_in_part, ["i"], {})(v)


@pytest.mark.parametrize("resources", [{}, {"i": "x"}], ids=str)
@pytest.mark.parametrize("groups", [None, [[0, 3, 5, 1], [4, 2, 6, 7]]], ids=["whole", "groups"])
def test_extrema_of_every_type(groups, resources, mesh42):
    arrays = of_every_ordered_type()

    def body(arrays):
        return [
            {name: extremum(v, "i", axis_index_groups=groups) for name, v in arrays.items()}
            for extremum in (lax.pmax, lax.pmin)
        ]

    mapped = xmap(body, ["i", ...], ["i", ...], axis_resources=resources)
    with mesh42:
        results = mapped(arrays)
    for found, reduce in zip(results, (np.max, np.min), strict=True):
        for name, array in arrays.items():
            wide = array.astype(np.float32)
            expected = np.empty((8, 3), np.float32)
            for group in groups or [list(range(8))]:
                expected[group] = reduce(wide[group], 0)
            result = np.asarray(found[name])
            assert result.dtype == array.dtype
            np.testing.assert_array_equal(result.astype(np.float32), expected, name)
