"""The helper file, against NumPy, `jax.vmap` and `jax.shard_map` by hand."""

import ast
import collections
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from placements import IN_AXES, OUT_AXES, PLACEMENTS, arguments

import xmap_compat
from xmap_compat import xmap
from xmap_compat.tools.leave.helper import named_axes as helper
from xmap_compat.tools.leave.helper.named_axes import mapped
from xmap_compat.tools.leave.helper_text import FUNCTIONS, helper_text, is_helper


def plain_mesh():
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


def square_mesh():
    return jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


# ------------------------------------------------------------------- values, against jax.vmap


def with_collectives(of):
    """Sums, extrema, indices and sizes over axes, in control flow too."""

    def body(x, u, w):
        mean = of.pmean(x * w, "a")
        top = of.pmax(lax.stop_gradient(x), ("a", "b"))
        total = lax.fori_loop(0, 2, lambda _, c: c + of.psum(c * 0.1, "b"), x)
        index = of.axis_index("a") * 1.0
        return (x - mean) * u + top + total + index / of.axis_size("a")

    return body


def with_gradient(of):
    """A gradient that is taken in the body, as data-parallel training does."""

    def body(x, u, w):
        gradient = jax.grad(lambda w: jnp.sum((w * x - u) ** 2))(w)
        return x - of.pmean(of.pmean(gradient, "a"), "b")

    return body


def by_vmap(body):
    over_b = jax.vmap(body, in_axes=(0, None, None), axis_name="b")
    return jax.vmap(over_b, in_axes=(0, 0, None), axis_name="a")


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("body", [with_collectives, with_gradient])
def test_values_are_those_of_vmap(body, placement):
    a, b, resources = PLACEMENTS[placement]
    fun = mapped(body(helper), IN_AXES, OUT_AXES, axis_resources=resources)
    with jax.set_mesh(plain_mesh()):
        found = fun(*arguments(a, b))
    wanted = by_vmap(body(lax))(*arguments(a, b))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gradients_from_outside_are_those_of_vmap(placement):
    a, b, resources = PLACEMENTS[placement]

    def gradients(fun):
        return jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(fun(*args))), argnums=(0, 1, 2)))

    fun = mapped(with_collectives(helper), IN_AXES, OUT_AXES, axis_resources=resources)
    with jax.set_mesh(plain_mesh()):
        found = gradients(fun)(*arguments(a, b))
    wanted = gradients(by_vmap(with_collectives(lax)))(*arguments(a, b))
    for each, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(each, expected, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------- each function, against NumPy


def _tiled(v):
    return jnp.stack([v, v + 1], 1)


# name: (of the row of an element, what NumPy gives of all rows)
FUNCTIONS_OF_ROWS = {
    "psum": (lambda v: v - helper.psum(v, "i"), lambda x: x - x.sum(0)),
    "psum of a number": (lambda v: v * helper.psum(1, "i"), lambda x: x * len(x)),
    "pmean": (lambda v: v - helper.pmean(v, "i"), lambda x: x - x.mean(0)),
    "pmax": (lambda v: v - helper.pmax(v, "i"), lambda x: x - x.max(0)),
    "pmin": (lambda v: v - helper.pmin({"a": v}, "i")["a"], lambda x: x - x.min(0)),
    "axis_index": (
        lambda v: v + helper.axis_index("i"),
        lambda x: x + np.arange(len(x))[:, None],
    ),
    "axis_size": (lambda v: v * helper.axis_size("i"), lambda x: x * len(x)),
    "sum": (lambda v: v - helper.sum(v, ("i", 0)), lambda x: x - x.sum()),
    "mean": (lambda v: v - helper.mean(v, axis="i"), lambda x: x - x.mean(0)),
    "var": (lambda v: v - helper.var(v, axis="i"), lambda x: x - x.var(0)),
    "std": (lambda v: v - helper.std(v, axis="i"), lambda x: x - x.std(0)),
    "max": (lambda v: v - helper.max(v, (0, "i"), keepdims=True), lambda x: x - x.max()),
    "min": (lambda v: v - helper.min(v, axis="i"), lambda x: x - x.min(0)),
    "min of positions": (lambda v: v - helper.min(v), lambda x: x - x.min(1, keepdims=True)),
    "softmax": (lambda v: helper.softmax(v, axis="i"), lambda x: np.exp(x) / np.exp(x).sum(0)),
    "softmax of all": (
        lambda v: helper.softmax(v, ("i", 0)),
        lambda x: np.exp(x) / np.exp(x).sum(),
    ),
    "log_softmax": (
        lambda v: helper.log_softmax(v, "i"),
        lambda x: x - np.log(np.exp(x).sum(0)),
    ),
    "logsumexp": (
        lambda v: v - helper.logsumexp(v, axis=("i", 0)),
        lambda x: x - np.log(np.exp(x).sum()),
    ),
    "one_hot": (
        lambda v: v + helper.one_hot(jnp.int32(3), helper.psum(1, "i"), axis="i"),
        lambda x: x + (np.arange(len(x)) == 3)[:, None],
    ),
    "all_gather": (
        lambda v: helper.all_gather(v, "i", axis=1)[:, 1],
        lambda x: np.tile(x[1], (len(x), 1)),
    ),
    "all_gather, tiled": (
        lambda v: helper.all_gather(_tiled(v), "i", axis=1, tiled=True)[:, 3],
        lambda x: np.tile(x[1] + 1, (len(x), 1)),
    ),
    "psum_scatter": (
        lambda v: helper.psum_scatter(jnp.outer(v, v), "i", scatter_dimension=1),
        lambda x: x.T @ x,
    ),
    "psum_scatter, tiled": (
        lambda v: helper.psum_scatter(_tiled(v).reshape(-1), "i", tiled=True),
        lambda x: np.stack([x.sum(0), (x + 1).sum(0)], 1),
    ),
    "all_to_all": (lambda v: helper.all_to_all(v, "i", 0, 0), lambda x: x.T),
    "all_to_all, tiled": (
        lambda v: helper.all_to_all(_tiled(v), "i", 0, 1, tiled=True)[0],
        lambda x: np.stack([x.T, x.T + 1], 2).reshape(len(x), -1),
    ),
    "pswapaxes": (lambda v: helper.pswapaxes(_tiled(v), "i", 0)[:, 1], lambda x: x.T + 1),
    "ppermute": (
        lambda v: helper.ppermute(v, "i", [(k, k + 1) for k in range(7)]),
        lambda x: np.concatenate([0 * x[:1], x[:7], 0 * x[8:]]),
    ),
    "ppermute, back": (
        lambda v: helper.ppermute(v, "i", [(k, len(v) - 1 - k) for k in range(len(v))]),
        lambda x: x[::-1],
    ),
    "pshuffle": (
        lambda v: helper.pshuffle(v, "i", [3 * k % len(v) for k in range(len(v))]),
        lambda x: x[3 * np.arange(len(x)) % len(x)],
    ),
    "pdot": (
        lambda v: v @ helper.pdot(v, 2 * v, "i"),
        lambda x: x @ (2 * x.T @ x),
    ),
    "pdot of positions": (
        lambda v: v + helper.pdot(v, v, "i", ((0,), (-1,))),
        lambda x: x + (x * x).sum(),
    ),
}


def rows(n):
    return np.random.default_rng(n).normal(size=(n, n)).astype(np.float32)


def over_rows(resources):
    """How a function of rows is mapped: by the helper, or by JAX alone."""
    if resources in (jax.vmap, jax.pmap):
        return lambda body: resources(body, axis_name="i")
    if resources is xmap:
        return lambda body: xmap(body, ["i", ...], ["i", ...], axis_resources={"i": "x"})
    return lambda body: mapped(body, ["i", ...], ["i", ...], axis_resources={"i": resources})


def mesh_for(resources):
    if resources is jax.pmap:
        return contextlib.nullcontext()
    if resources is xmap:
        return xmap_compat.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    return jax.set_mesh(plain_mesh())


def each_of_rows(v):
    return {name: body(v) for name, (body, _) in FUNCTIONS_OF_ROWS.items()}


WAYS = [(), "x", ("x", "y"), ("y", "x"), jax.vmap, jax.pmap, xmap]


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("resources", WAYS, ids=lambda of: getattr(of, "__name__", str(of)))
def test_each_function_computes_what_numpy_does(resources, size):
    if resources is jax.pmap and size == 16:
        pytest.skip("8 devices")
    x = rows(size)
    fun = over_rows(resources)
    with mesh_for(resources):
        found = fun(each_of_rows)(x)
    for name, (_, wanted) in FUNCTIONS_OF_ROWS.items():
        np.testing.assert_allclose(found[name], wanted(x), rtol=1e-4, atol=1e-4, err_msg=name)


def test_one_text_serves_one_element_and_several():
    fun = mapped(lambda v: v / helper.psum(v, "i"), ["i"], ["i"], axis_resources={"i": "x"})
    with jax.set_mesh(plain_mesh()):
        for size in (4, 8, 24):
            v = np.arange(1, size + 1, dtype=np.float32)
            np.testing.assert_allclose(fun(v), v / v.sum(), rtol=1e-6)


class State(collections.namedtuple("State", "weights step")):
    """A container of the user's, which holds arrays, or their specs."""


TREES = {
    "named tuple": (State([...], []), State({}, {})),
    "prefix": ([...], [...]),
    "dictionary of positions": (State({}, {}), State({}, {})),
}


@pytest.mark.parametrize(("given", "gives"), TREES.values(), ids=TREES)
def test_specs_may_stand_in_containers(given, gives):
    def step(state, row):
        total = helper.psum(row, "i")
        return State(state.weights + total, state.step + 1), row - total

    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    fun = mapped(step, (given, {0: "i"}), [gives, ["i", ...]], axis_resources={"i": "x"})
    with jax.set_mesh(plain_mesh()):
        state, rest = fun(State(jnp.ones(3), jnp.int32(0)), rows)
    np.testing.assert_allclose(state.weights, 1 + rows.sum(0))
    assert state.step == 1
    np.testing.assert_allclose(rest, rows - rows.sum(0))


def test_sizes_of_axes_that_no_argument_has():
    fun = mapped(
        lambda v: v * helper.axis_index("i"),
        {},
        {1: "i"},
        axis_sizes={"i": 8},
        axis_resources={"i": "x"},
    )
    with jax.set_mesh(plain_mesh()):
        np.testing.assert_array_equal(fun(np.arange(3)), np.arange(3)[:, None] * np.arange(8))


def test_keys_and_donated_arguments():
    fun = mapped(
        lambda key, v: (key, jax.random.normal(key) + v),
        (["i"], ["i"]),
        (["i"], ["i"]),
        axis_resources={"i": "x"},
        donate_argnums=1,
        backend=None,
    )
    keys = jax.random.split(jax.random.key(0), 8)
    v = jax.device_put(
        np.arange(8.0), jax.sharding.NamedSharding(plain_mesh(), jax.sharding.PartitionSpec("x"))
    )
    wanted = jax.vmap(jax.random.normal)(keys) + np.arange(8)
    with jax.set_mesh(plain_mesh()):
        same, found = fun(keys, v)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_array_equal(jax.random.key_data(same), jax.random.key_data(keys))
    assert v.is_deleted()


def test_the_mesh_may_be_that_of_with_or_have_explicit_axes_or_other_devices():
    v = np.arange(8, dtype=np.float32)
    fun = mapped(lambda v: v - helper.pmean(v, "i"), ["i"], ["i"], axis_resources={"i": "x"})
    with xmap_compat.Mesh(np.array(jax.devices()[:2]), ("x",)):
        np.testing.assert_allclose(fun(v), v - 3.5)
    explicit = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        elsewhere = jax.device_put(
            v, jax.sharding.NamedSharding(explicit, jax.sharding.PartitionSpec("y"))
        )
        np.testing.assert_allclose(fun(elsewhere), v - 3.5)
    for devices in (jax.devices()[:4], jax.devices()[:3:-1]):  # one trace serves both
        with jax.set_mesh(jax.sharding.Mesh(np.array(devices), ("x",))):
            result = fun(v)
        assert [shard.device for shard in result.addressable_shards] == devices
        np.testing.assert_allclose(result, v - 3.5)


UNDECLARED = {
    "one element on a device": (lambda v: v * 2, 4, "name the axis in out_axes, or reduce"),
    "several": (lambda v: v * 2, 8, "name the axis in out_axes, or reduce"),
    "reduced over the elements of a device only": (
        lambda v: lax.psum(v, "i over ('x',)"),
        8,
        "name the axis in out_axes",
    ),
    "by its index": (
        lambda v: helper.psum(v, "i") + lax.axis_index("x"),
        8,
        "name the axis in out_axes",
    ),
}


@pytest.mark.parametrize(("body", "size", "words"), UNDECLARED.values(), ids=UNDECLARED)
def test_an_undeclared_result_is_an_error(body, size, words):
    fun = mapped(body, ["i"], {}, axis_resources={"i": "x"})
    with jax.set_mesh(plain_mesh()), pytest.raises(ValueError, match=words):
        fun(np.arange(size, dtype=np.float32))


def test_a_callback_that_vmap_refuses_runs_all_the_same():
    seen = []

    def body(v):
        jax.debug.callback(lambda v: seen.append(float(v)), v, ordered=False)
        return v + 1

    fun = mapped(body, ["i"], ["i"], axis_resources={"i": "x"})
    with jax.set_mesh(plain_mesh()):
        np.testing.assert_array_equal(fun(np.arange(4.0)), np.arange(4.0) + 1)
    jax.effects_barrier()
    assert sorted(set(seen)) == [0, 1, 2, 3]


# -------------------------------------------------------------------------- the text of the file


def test_a_helper_has_what_is_used_and_grows_by_what_it_lacks():
    small = helper_text(["axis_index"])
    assert "def mapped" not in small and "def psum" not in small
    edited = small.replace("def axis_index", "def other():\n    pass\n\n\ndef axis_index")
    grown = helper_text(["mapped", "pmax", "SerialLoop"], edited)
    assert helper_text(["pmax"], grown) == grown
    of_both: dict = {}
    exec(grown, of_both)
    assert {"mapped", "pmax", "other", "SerialLoop"} <= of_both.keys()
    assert is_helper(grown) and not is_helper("def psum(x): pass")
    lines = grown.split("\n")
    kept = [line for line in edited.split("\n") if line in lines]
    assert kept == edited.split("\n")


@pytest.mark.parametrize("name", sorted({*FUNCTIONS.values(), "mapped"}))
def test_each_function_stands_alone(name):
    alone: dict = {}
    exec(helper_text([name]), alone)
    text = ast.parse(helper_text([name]))
    read = {n.id for n in ast.walk(text) if isinstance(n, ast.Name) and n.id in vars(helper)}
    assert read <= alone.keys()
