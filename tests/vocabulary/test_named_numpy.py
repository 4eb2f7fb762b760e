"""Options, ties and several axes of NumPy's functions over named axes; test_matrix.py has each under all placements."""

import contextlib
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xmap_compat import numpy as xnp
from xmap_compat import xmap

PLACEMENTS = [
    {},
    {"k": "x"},
    {"k": ("x", "y")},
    {"k": ("y", "x")},
    {"b": "y"},
    {"b": "x", "k": "y"},
]

IN = {0: "b", 2: "k"}
OF_B = {0: "b"}


def assert_close(found, wanted, rtol=1e-4, atol=1e-4, **options):
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol, **options)


@pytest.fixture
def x(rng):
    return rng.normal(size=(8, 3, 16)).astype(np.float32)


ROLLS = {(5, "k"): (5, 2), (-3, ("b",)): (-3, 0)}


@pytest.mark.parametrize("resources", PLACEMENTS, ids=str)
def test_rolls_equal_numpy(resources, x, mesh42):
    def body(v):
        return [xnp.roll(v, *along) for along in ROLLS]

    fun = xmap(body, IN, IN, axis_resources=resources)
    with mesh42:
        results = fun(x)
    for result, along in zip(results, ROLLS.values()):
        np.testing.assert_array_equal(result, np.roll(x, *along))


# With the functions of ``f``: of jax.numpy for whole arrays, of ours in a body.
AS_JAX = """
median: f.median(x, axis)
nanmax: f.nanmax(x, axis)
nanmin: f.nanmin(x, axis)
nanmax of gaps: f.nanmax(jnp.where(x < 0, x, jnp.nan), axis)
nanmin of gaps: f.nanmin(jnp.where(x > 0, x, jnp.nan), axis)
quantiles, linear: f.quantile(x, QUANTILES, axis, method="linear")
quantiles, lower: f.quantile(x, QUANTILES, axis, method="lower")
quantiles, higher: f.quantile(x, QUANTILES, axis, method="higher")
quantiles, midpoint: f.quantile(x, QUANTILES, axis, method="midpoint")
quantiles, nearest: f.quantile(x, QUANTILES, axis, method="nearest")
norm None: norm(x, None, axis)
norm 0: norm(x, 0, axis)
norm 1: norm(x, 1, axis)
norm 3: norm(x, 3, axis)
norm -2: norm(x, -2, axis)
norm inf: norm(x, np.inf, axis)
norm -inf: norm(x, -np.inf, axis)
average: f.average(x, axis, returned=True)
weighted average: f.average(x, axis, weights=x * x + 1, returned=True)
"""
AS_JAX = dict(line.split(": ") for line in AS_JAX.strip().splitlines())
QUANTILES = np.array([0.25, 0.8], np.float32)
# With ord over several axes it is the norm of a matrix; ties share alike or not by the order of the dimensions.
OVER_ONE_AXIS = re.compile("norm [^N]|median|quantiles")


def as_jax(text, f, axis):
    """A text of the table as a function of x."""
    norm = getattr(f, "linalg", f).norm
    return eval(f"lambda x: {text}", {**globals(), "f": f, "axis": axis, "norm": norm})


def values_and_gradient(calls, x):
    """Results, and the gradient of a sum of sines of each."""

    def with_gradient(call, x):
        def loss(v):
            sines = jax.tree.map(jnp.sin, call(v))
            return sum(map(jnp.sum, jax.tree.leaves(sines)))

        return call(x), jax.grad(loss)(x)

    def of_all(x):
        return {name: with_gradient(call, x) for name, call in calls.items()}

    return jax.jit(of_all)(x)


def ties_and_zeros():
    x = np.random.default_rng(0).integers(-2, 3, size=(8, 3, 16))
    x[0] = 0
    x[1, 0] = 2
    return x.astype(np.float32)


def as_jax_over(dims):
    if dims == 2:
        return AS_JAX
    return {name: text for name, text in AS_JAX.items() if not OVER_ONE_AXIS.match(name)}


@functools.cache
def values_and_gradient_by_jax(dims):
    calls = {name: as_jax(text, jnp, dims) for name, text in as_jax_over(dims).items()}
    return values_and_gradient(calls, ties_and_zeros())


SPLIT_OVER_TWO = {"k": ("y", "x")}
# One axis under each kind of placement, and several axes where one mesh axis or two are to be gathered.
REDUCED = [
    ("k", 2, {}),
    ("k", 2, {"k": "x"}),
    ("k", 2, SPLIT_OVER_TWO),
    (("k", 0), (2, 1), SPLIT_OVER_TWO),
    ((-1, "k"), (1, 2), {"k": "x"}),
]


@pytest.mark.parametrize(("axis", "dims", "resources"), REDUCED, ids=str)
def test_values_and_gradients_equal_those_of_jax_numpy_at_ties_and_zeros(
    axis, dims, resources, mesh42
):
    named = {}
    for name, text in as_jax_over(dims).items():
        out_axes = {1: "b"} if "quantiles" in name else OF_B
        body = as_jax(text, xnp, axis)
        named[name] = xmap(body, IN, out_axes, axis_resources=resources)
    with mesh42:
        found = values_and_gradient(named, ties_and_zeros())
    whole = values_and_gradient_by_jax(dims)
    for name in named:
        close = functools.partial(assert_close, err_msg=name)
        jax.tree.map(close, found[name], whole[name])


def test_a_norm_without_ord_is_that_of_all_elements_over_any_number_of_axes(x, rng, mesh42):
    def over_all(**options):
        body = functools.partial(xnp.norm, axis=("k", 0, "b"), **options)
        return xmap(body, IN, [...], axis_resources={"k": "x", "b": "y"})

    cotangent = rng.normal()
    with mesh42:
        kept = over_all(keepdims=True)(x)
        norm, pull = jax.vjp(over_all(), x)
        [gradient] = pull(jnp.float32(cotangent))
    np.testing.assert_allclose(kept, [np.linalg.norm(x)], rtol=1e-5)
    expected = cotangent * x / norm
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


def test_weights_are_those_of_the_elements_or_one_for_each_element_of_the_axis(x, rng):
    of_k = rng.uniform(1, 2, 16)
    of_all = rng.uniform(1, 2, (8, 3, 16))

    def average(axis, weights, names):
        body = functools.partial(xnp.average, axis=axis)
        fun = xmap(lambda v, w: body(v, weights=w), (IN, names), OF_B)
        return fun(x, weights)

    assert_close(average("k", of_k, {0: "k"}), np.average(x, 2, of_k))
    assert_close(average(("k", 0), of_all, IN), np.average(x, (1, 2), of_all))
    message = "weights along a named axis should be (3,), but got (16,)"
    with pytest.raises(TypeError, match=re.escape(message)):
        average("k", of_k, {})


def test_the_norm_of_a_matrix_is_left_to_along():
    fun = xmap(lambda v: xnp.norm(v, 1, ("i", 0)), ["i", ...], {})
    message = "The axis of norm should be one, named or positional"
    with pytest.raises(TypeError, match=message):
        fun(np.ones((4, 3)))


def test_a_named_axis_leaves_no_dimension_to_keep(x):
    def kept(fun, *args, out_axes=OF_B):
        return xmap(lambda v: fun(v, *args, keepdims=True), IN, out_axes)(x)

    for fun in (xnp.any, xnp.nanmax, xnp.median, xnp.average):
        assert kept(fun, ("k", 0)).shape == (8, 1)
    assert kept(xnp.norm, None, ("k", 0)).shape == (8, 1)
    assert kept(xnp.argmax, "k").shape == (8, 3)
    quantiles = kept(xnp.quantile, QUANTILES, ("k", 0), out_axes={1: "b"})
    expected = np.quantile(x, QUANTILES, (1, 2))
    assert_close(quantiles[..., 0], expected)


def test_an_axis_without_resources_is_not_copied_to_be_reduced(x):
    """The named axis is a dimension already: no gather, nothing larger than the argument is made."""
    fun = xmap(lambda v: xnp.prod(v, "k"), IN, OF_B)
    program = fun.lower(x).compile()
    assert not re.search(r" (all-gather|all-to-all|gather|scatter)\(", program.as_text())
    assert program.memory_analysis().temp_size_in_bytes <= x.nbytes


def test_a_split_axis_is_gathered_once_and_rolled_by_what_crosses(x, mesh42):
    def program(body):
        fun = xmap(body, IN, IN, axis_resources={"k": "x"})
        with mesh42:
            return fun.lower(x).compile().as_text()

    gathered = program(lambda v: xnp.sort(v, "k"))
    rolled = program(lambda v: xnp.roll(v, 1, "k"))
    assert gathered.count(" all-gather(") == 1
    assert "all-to-all" not in gathered
    assert "all-gather" not in rolled
    # One slab of 8 x 3 elements leaves each device.
    slabs = re.findall(r"= f32\[([\d,]+)\]\S* collective-permute\(", rolled)
    assert slabs in (["1,8,3"], ["8,3"])


def test_positional_axes_go_to_jax_numpy(x):
    np.testing.assert_allclose(xnp.cumsum(x, 1), x.cumsum(1), rtol=1e-5)
    product = xnp.prod(x, (0, 1))
    np.testing.assert_allclose(product, x.prod((0, 1)), rtol=1e-4)
    second = xnp.take(x, np.array([1]), 0)
    np.testing.assert_array_equal(second, x[[1]])
    np.testing.assert_array_equal(xnp.roll(x, 1, 0), np.roll(x, 1, 0))
    np.testing.assert_array_equal(xnp.any(x > 2), (x > 2).any())


# --------------------------------------------------------------- what JAX's own functions do with a name


def functions_with_an_axis():
    for module in (jnp, jnp.linalg, jnp.fft, jax.nn, jax.scipy.special):
        for name in filter(re.compile("[a-z]").match, dir(module)):
            with contextlib.suppress(TypeError, ValueError):
                if "axis" in inspect.signature(getattr(module, name)).parameters:
                    yield f"{module.__name__}.{name}", getattr(module, name)


# Arguments after the array; the others need none.
ARGUMENTS = {
    **dict.fromkeys(["append", "cross", "vecdot"], (np.ones(3, np.float32),)),
    **dict.fromkeys(["delete", "take", "take_along_axis"], (np.array([0]),)),
    **dict.fromkeys(["argpartition", "array_split", "partition", "repeat", "roll", "split"], (1,)),
    **dict.fromkeys(["nanpercentile", "nanquantile", "percentile", "quantile"], (0.5,)),
    "insert": (0, 1.0),
}
#: They have another first argument, or read no axis of what has one positional dimension; one_hot is in the matrix.
OTHERS = r"apply_along_axis|compress|geomspace|lexsort|linspace|logspace|one_hot|put_along_axis|rot90|top_k"
FUNCTIONS = {
    name: f for name, f in functions_with_an_axis() if not re.search(rf"\.({OTHERS})$", name)
}
KEEP_THE_AXIS = ("log_softmax", "softmax", "standardize")


def note_on(call, x, out_axes):
    """Our note on the error of a function of JAX along ``i``, or None where it takes the name."""
    try:
        xmap(call, ["i", ...], out_axes).eval_shape(x)
    except (NotImplementedError, TypeError, ValueError) as error:
        notes = [note for note in error.__notes__ if "does not take the name" in note]
        return notes[0] if notes else "an error without a note"
    return None


@pytest.mark.parametrize(
    ("axis", "dims"), [("i", 0), (("i", 0), (0, 1))], ids=["a name", "a name and a position"]
)
def test_every_function_of_jax_takes_a_name_or_the_note_says_what_to_call(axis, dims):
    x = np.arange(24, dtype=np.float32).reshape(8, 3) % 5
    calls, out_axes = {}, {}
    for path, function in FUNCTIONS.items():
        name = path.split(".")[-1]
        call = lambda v, axis, f=function, name=name: f(v, *ARGUMENTS.get(name, ()), axis=axis)
        specs = ["i", ...] if name in KEEP_THE_AXIS else {}
        note = note_on(functools.partial(call, axis=axis), x, specs)
        if note is None:
            calls[path], out_axes[path] = call, specs
        else:
            assert note.startswith(f"{name} does not take the name of an axis here")
            assert "xmap_compat.numpy.along(fun, 'i', x)" in note
    working = {path.split(".")[-1] for path in calls}
    assert {"sum", "max", "var", "nansum", "logsumexp", "softmax", "vector_norm"} <= working

    def of_all(v, axis):
        return {path: call(v, axis) for path, call in calls.items()}

    results = xmap(lambda v: of_all(v, axis), ["i", ...], out_axes)(x)
    expected = jax.jit(lambda v: of_all(v, dims))(x)
    for path, result in results.items():
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, err_msg=path)
        jax.tree.map(close, result, expected[path])


@pytest.mark.parametrize("resources", [{}, {"i": "x"}], ids=str)
def test_any_and_all_of_nothing(resources, mesh42):
    def body(v):
        return xnp.any(v > 0, "i"), xnp.all(v > 0, "i")

    fun = xmap(body, ["i"], {}, axis_resources=resources)
    nothing = np.zeros(0, np.float32)
    with mesh42:
        found = fun(nothing)
    assert tuple(map(bool, found)) == (np.any(nothing), np.all(nothing))


def test_a_traced_option_and_an_axis_of_a_vmap(rng):
    x = rng.normal(size=6).astype(np.float32)

    def of_i(v, q):
        return xnp.quantile(v, q, axis="i")

    quantile = xmap(of_i, (["i"], {}), {})
    np.testing.assert_allclose(quantile(x, 0.3), np.quantile(x, 0.3), rtol=1e-6)
    sums = jax.vmap(lambda v: xnp.cumsum(v, axis="i"), axis_name="i")
    np.testing.assert_allclose(sums(x), np.cumsum(x), rtol=1e-5)
    assert sums(x[:0]).shape == (0,)


@pytest.mark.parametrize("resources", [{}, {"k": "x"}, {"k": ("x", "y")}], ids=str)
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "sort", "flip", "prod", "median"])
def test_gradients_inside_are_those_of_the_sum_over_all_elements(name, resources, rng, mesh42):
    """Also where an inner vmap binds the same name, which must not reach the axis of the xmap."""
    named = getattr(xnp, name)
    whole = getattr(jnp, name)
    keeps = name not in ("prod", "median")
    x, c = rng.normal(size=(2, 16, 3)).astype(np.float32)
    _, pull = jax.vjp(lambda v: whole(v, axis=0), x)
    [expected] = pull(c if keeps else c.sum(0))

    def inside(v, c):
        _, pull = jax.vjp(lambda v: named(v, axis="k"), v)
        [gradient] = pull(c)
        return gradient

    def over_k(body):
        return xmap(body, ["k", ...], ["k", ...], axis_resources=resources)

    shadowed = over_k(jax.vmap(inside, axis_name="k"))
    with mesh42:
        found = over_k(inside)(x, c)
        rows = shadowed(np.stack([x] * 16), np.stack([c] * 16))
    assert_close(found, expected, atol=1e-5)
    assert_close(rows, np.stack([expected] * 16), atol=1e-5)
