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


@pytest.fixture
def x(rng):
    return rng.normal(size=(8, 3, 16)).astype(np.float32)


ROLLS = {(5, "k"): (5, 2), (-3, ("b",)): (-3, 0)}


@pytest.mark.parametrize("resources", PLACEMENTS, ids=str)
def test_rolls_equal_numpy(resources, x, mesh42):
    fun = xmap(lambda v: [xnp.roll(v, *along) for along in ROLLS], IN, IN, axis_resources=resources)
    with mesh42:
        results = fun(x)
    for result, along in zip(results, ROLLS.values()):
        np.testing.assert_array_equal(result, np.roll(x, *along))


# ``(x, axis) -> result`` with the functions of ``f``: of jax.numpy for whole arrays, of ours in a body.
AS_JAX = {
    **{
        name: lambda f, x, axis, name=name: getattr(f, name)(x, axis)
        for name in ["median", "nanmax", "nanmin"]
    },
    **{
        f"{name} of gaps": lambda f, x, axis, name=name, sign=sign: getattr(f, name)(
            jnp.where(x * sign > 0, x, jnp.nan), axis
        )
        for name, sign in [("nanmax", -1), ("nanmin", 1)]
    },
    **{
        f"quantiles, {method}": lambda f, x, axis, method=method: f.quantile(
            x, QUANTILES, axis, method=method
        )
        for method in ["linear", "lower", "higher", "midpoint", "nearest"]
    },
    **{
        f"norm {ord}": lambda f, x, axis, ord=ord: getattr(f, "linalg", f).norm(x, ord, axis)
        for ord in [None, 0, 1, 3, -2, np.inf, -np.inf]
    },
    "average": lambda f, x, axis: f.average(x, axis, returned=True),
    "weighted average": lambda f, x, axis: f.average(x, axis, weights=x * x + 1, returned=True),
}
QUANTILES = np.array([0.25, 0.8], np.float32)
# With ord over several axes it is the norm of a matrix; ties share alike or not by the order of the dimensions.
OVER_ONE_AXIS = re.compile("norm [^N]|median|quantiles")


def values_and_gradient(calls, x):
    """Results, and the gradient of a sum of sines of each."""
    loss = lambda call: lambda v: sum(jnp.sum(jnp.sin(r)) for r in jax.tree.leaves(call(v)))
    return jax.jit(
        lambda v: {name: (call(v), jax.grad(loss(call))(v)) for name, call in calls.items()}
    )(x)


def ties_and_zeros():
    x = np.random.default_rng(0).integers(-2, 3, size=(8, 3, 16)).astype(np.float32)
    x[0], x[1, 0] = 0, 2
    return x


def as_jax_over(dims):
    if dims == 2:
        return AS_JAX
    return {name: f for name, f in AS_JAX.items() if not OVER_ONE_AXIS.match(name)}


@functools.cache
def values_and_gradient_by_jax(dims):
    calls = {name: lambda v, f=f: f(jnp, v, dims) for name, f in as_jax_over(dims).items()}
    return values_and_gradient(calls, ties_and_zeros())


SPLIT_OVER_TWO = {"k": ("y", "x")}


# One axis under each kind of placement, and several axes where one mesh axis or two are to be gathered.
@pytest.mark.parametrize(
    ("axis", "dims", "resources"),
    [
        ("k", 2, {}),
        ("k", 2, {"k": "x"}),
        ("k", 2, SPLIT_OVER_TWO),
        (("k", 0), (2, 1), SPLIT_OVER_TWO),
        ((-1, "k"), (1, 2), {"k": "x"}),
    ],
    ids=str,
)
def test_values_and_gradients_equal_those_of_jax_numpy_at_ties_and_zeros(
    axis, dims, resources, mesh42
):
    x, cases = ties_and_zeros(), as_jax_over(dims)
    named = {
        name: xmap(
            lambda v, f=f: f(xnp, v, axis),
            IN,
            {0: "b"} if "quantiles" not in name else {1: "b"},
            axis_resources=resources,
        )
        for name, f in cases.items()
    }
    with mesh42:
        found = values_and_gradient(named, x)
    whole = values_and_gradient_by_jax(dims)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    for name in cases:
        jax.tree.map(functools.partial(close, err_msg=name), found[name], whole[name])


def test_a_norm_without_ord_is_that_of_all_elements_over_any_number_of_axes(x, rng, mesh42):
    over_all = lambda keepdims: xmap(
        lambda v: xnp.norm(v, axis=("k", 0, "b"), keepdims=keepdims),
        IN,
        [...],
        axis_resources={"k": "x", "b": "y"},
    )
    cotangent = rng.normal()
    with mesh42:
        np.testing.assert_allclose(over_all(keepdims=True)(x), [np.linalg.norm(x)], rtol=1e-5)
        norm, pull = jax.vjp(over_all(keepdims=False), x)
        np.testing.assert_allclose(
            pull(jnp.float32(cotangent))[0], cotangent * x / norm, rtol=1e-4, atol=1e-6
        )


def test_weights_are_those_of_the_elements_or_one_for_each_element_of_the_axis(x, rng):
    of_k, of_all = rng.uniform(1, 2, 16), rng.uniform(1, 2, (8, 3, 16))
    average = lambda axis, names: xmap(
        lambda v, w: xnp.average(v, axis, weights=w), (IN, names), {0: "b"}
    )
    np.testing.assert_allclose(average("k", {0: "k"})(x, of_k), np.average(x, 2, of_k), rtol=1e-4)
    np.testing.assert_allclose(
        average(("k", 0), IN)(x, of_all), np.average(x, (1, 2), of_all), rtol=1e-4
    )
    with pytest.raises(
        TypeError, match=re.escape("weights along a named axis should be (3,), but got (16,)")
    ):
        average("k", {})(x, of_k)


def test_the_norm_of_a_matrix_is_left_to_along():
    with pytest.raises(TypeError, match="The axis of norm should be one, named or positional"):
        xmap(lambda v: xnp.norm(v, 1, ("i", 0)), ["i", ...], {})(np.ones((4, 3)))


def test_a_named_axis_leaves_no_dimension_to_keep(x):
    functions = [xnp.any, xnp.nanmax, xnp.median, xnp.norm, xnp.average]
    keep = xmap(lambda v: [f(v, axis=("k", 0), keepdims=True) for f in functions], IN, {0: "b"})
    assert {r.shape for r in keep(x)} == {(8, 1)}
    assert xmap(lambda v: xnp.argmax(v, "k", keepdims=True), IN, {0: "b"})(x).shape == (8, 3)
    quantiles = xmap(lambda v: xnp.quantile(v, QUANTILES, ("k", 0), keepdims=True), IN, {1: "b"})
    np.testing.assert_allclose(quantiles(x)[..., 0], np.quantile(x, QUANTILES, (1, 2)), rtol=1e-4)


def test_an_axis_without_resources_is_not_copied_to_be_reduced(x):
    """The named axis is a dimension already: no gather, nothing larger than the argument is made."""
    program = xmap(lambda v: xnp.prod(v, "k"), IN, {0: "b"}).lower(x).compile()
    assert not re.search(r" (all-gather|all-to-all|gather|scatter)\(", program.as_text())
    assert program.memory_analysis().temp_size_in_bytes <= x.nbytes


def test_a_split_axis_is_gathered_once_and_rolled_by_what_crosses(x, mesh42):
    with mesh42:
        gathered = (
            xmap(lambda v: xnp.sort(v, "k"), IN, IN, axis_resources={"k": "x"})
            .lower(x)
            .compile()
            .as_text()
        )
        rolled = (
            xmap(lambda v: xnp.roll(v, 1, "k"), IN, IN, axis_resources={"k": "x"})
            .lower(x)
            .compile()
            .as_text()
        )
    assert len(re.findall(r" all-gather\(", gathered)) == 1 and "all-to-all" not in gathered
    assert "all-gather" not in rolled
    # One slab of 8 x 3 elements leaves each device.
    assert re.findall(r"= f32\[([\d,]+)\]\S* collective-permute\(", rolled) in (["1,8,3"], ["8,3"])


def test_positional_axes_go_to_jax_numpy(x):
    np.testing.assert_allclose(xnp.cumsum(x, 1), x.cumsum(1), rtol=1e-5)
    np.testing.assert_allclose(xnp.prod(x, (0, 1)), x.prod((0, 1)), rtol=1e-4)
    np.testing.assert_array_equal(xnp.take(x, np.array([1]), 0), x[[1]])
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
        return next(
            (note for note in error.__notes__ if "does not take the name" in note),
            "an error without a note",
        )
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
    results = xmap(
        lambda v: {path: call(v, axis) for path, call in calls.items()}, ["i", ...], out_axes
    )(x)
    expected = jax.jit(lambda v: {path: call(v, dims) for path, call in calls.items()})(x)
    for path, result in results.items():
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, err_msg=path)
        jax.tree.map(close, result, expected[path])


@pytest.mark.parametrize("resources", [{}, {"i": "x"}], ids=str)
def test_any_and_all_of_nothing(resources, mesh42):
    with mesh42:
        for fun, expected in ((xnp.any, np.any(np.zeros(0))), (xnp.all, np.all(np.zeros(0)))):
            of_nothing = xmap(
                lambda v, fun=fun: fun(v > 0, "i"), ["i"], {}, axis_resources=resources
            )
            assert bool(of_nothing(np.zeros(0, np.float32))) == expected


def test_a_traced_option_and_an_axis_of_a_vmap(rng):
    x = rng.normal(size=6).astype(np.float32)
    quantile = xmap(lambda v, q: xnp.quantile(v, q, axis="i"), (["i"], {}), {})
    np.testing.assert_allclose(quantile(x, 0.3), np.quantile(x, 0.3), rtol=1e-6)
    sums = jax.vmap(lambda v: xnp.cumsum(v, axis="i"), axis_name="i")
    np.testing.assert_allclose(sums(x), np.cumsum(x), rtol=1e-5)
    assert sums(x[:0]).shape == (0,)


OF_WHOLE = {
    "cumsum": (xnp.cumsum, jnp.cumsum),
    "cumprod": (xnp.cumprod, jnp.cumprod),
    "sort": (xnp.sort, jnp.sort),
    "flip": (xnp.flip, jnp.flip),
    "prod": (xnp.prod, jnp.prod),
    "median": (xnp.median, jnp.median),
}


@pytest.mark.parametrize("resources", [{}, {"k": "x"}, {"k": ("x", "y")}], ids=str)
@pytest.mark.parametrize("name", OF_WHOLE)
def test_gradients_inside_are_those_of_the_sum_over_all_elements(name, resources, rng, mesh42):
    """Also where an inner vmap binds the same name, which must not reach the axis of the xmap."""
    named, whole = OF_WHOLE[name]
    keeps = name not in ("prod", "median")
    x, c = rng.normal(size=(2, 16, 3)).astype(np.float32)
    _, pull = jax.vjp(lambda v: whole(v, axis=0), x)
    expected = pull(c if keeps else c.sum(0))[0]

    def inside(v, c):
        return jax.vjp(lambda v: named(v, axis="k"), v)[1](c)[0]

    def shadowed(v, c):
        return jax.vmap(inside, axis_name="k")(v, c)

    with mesh42:
        found = xmap(inside, ["k", ...], ["k", ...], axis_resources=resources)(x, c)
        rows = xmap(shadowed, ["k", ...], ["k", ...], axis_resources=resources)(
            *(np.stack([v] * 16) for v in (x, c))
        )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rows, np.stack([expected] * 16), rtol=1e-4, atol=1e-5)
