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
from xmap_compat.tools.leave.helper.named_axes import SerialLoop, mapped
from xmap_compat.tools.leave.helper_text import FUNCTIONS, helper_text


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


# ------------------------------------------------------------------------------ whose name it is


SHARED = {
    "jit": lambda shared: jax.jit(shared),
    "scan": lambda shared: lambda v: lax.scan(lambda c, _: (shared(c), None), v, None, length=1)[0],
    "cond": lambda shared: lambda v: lax.cond(helper.psum(1, "a") > 0, shared, lambda v: v, v),
    "checkpoint": lambda shared: jax.checkpoint(shared),
    "jit of scan": lambda shared: jax.jit(SHARED["scan"](shared)),
}
OF_ONE = [{}, {"a": "x"}, {"a": "y"}, {"a": ("x", "y")}, {"a": ("y", "x")}]
OF_TWO = [
    *OF_ONE,
    {"b": "x"},
    {"b": "y"},
    {"b": ("x", "y")},
    {"b": ("y", "x")},
    {"a": "x", "b": "y"},
    {"a": "y", "b": "x"},
]


@pytest.mark.parametrize("placements", [OF_TWO, OF_TWO[::-1]], ids=["forth", "back"])
@pytest.mark.parametrize("kind", SHARED)
def test_what_placements_share_is_right_under_each(kind, placements):
    """After one placement and before another, JAX has traced the function already."""
    weights = np.arange(1, 5, dtype=np.float32)

    def summed(v):
        return v + helper.psum(v * helper.axis_index("a"), "a") - helper.pmean(v, "b")

    shared = SHARED[kind](summed)
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    wanted = x + (x * np.arange(4)[:, None]).sum(0) - x.mean(1, keepdims=True)
    for resources in placements:
        fun = mapped(lambda v: shared(v), ["a", "b"], ["a", "b"], axis_resources=resources)
        of_sum = jax.jit(jax.grad(lambda x, fun=fun: jnp.sum(fun(x) * weights)))
        with jax.set_mesh(square_mesh()):
            found = fun(x)
            gradient = of_sum(x)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=str(resources))
        of_numpy = weights + np.arange(4)[:, None] * 4 * weights - weights.mean()
        np.testing.assert_allclose(gradient, of_numpy, rtol=1e-5, err_msg=str(resources))


ONE_SPLIT = [{}, {"i": "x"}, {"i": ("x", "y")}, {"i": ("y", "x")}]


@pytest.mark.parametrize("resources", ONE_SPLIT, ids=str)
def test_the_innermost_binder_wins(resources):
    def body(v):
        inner = jax.vmap(lambda w: helper.psum(w, "i"), axis_name="i")(v * jnp.arange(3))
        return inner[0] + 0 * helper.psum(v, "i")

    fun = mapped(body, ["i"], ["i"], axis_resources=resources)
    v = np.arange(8, dtype=np.float32)
    with jax.set_mesh(plain_mesh()):
        np.testing.assert_allclose(fun(v), 3 * v)


@pytest.mark.parametrize("resources", [(), "x", ("y", "x")], ids=str)
@pytest.mark.parametrize("size", [8, 16])
def test_an_axis_may_have_the_name_of_a_mesh_axis(resources, size):
    """Of its own, or of another one."""

    def body(v, w):
        inner = jax.vmap(lambda k: helper.psum(k * v, "x"), axis_name="x")(jnp.arange(3))
        return v - helper.pmean(v, "x") + inner[0] + helper.psum(w, "y")

    specs = (["x", ...], ["y", ...])
    others = {"x": "y", ("y", "x"): (), (): "x"}[resources]
    fun = mapped(body, specs, ["x", ...], axis_resources={"x": resources, "y": others})
    x = rows(size)
    with jax.set_mesh(plain_mesh()):
        found = fun(x, x)
    np.testing.assert_allclose(found, x - x.mean(0) + 3 * x + x.sum(0), rtol=1e-4, atol=1e-4)


def test_a_mesh_axis_that_a_vmap_binds_again_is_refused():
    def body(v):
        return jax.vmap(lambda w: helper.psum(w, "i"), axis_name="x")(v * jnp.arange(3))[0]

    fun = mapped(body, ["i"], ["i"], axis_resources={"i": "x"})
    with jax.set_mesh(plain_mesh()), pytest.raises(ValueError, match="vmap binds here"):
        fun(np.arange(8.0))


def test_an_axis_that_is_bound_around_is_refused():
    inner = mapped(lambda w: w * 2, ["i"], ["i"], axis_resources={"i": "x"})
    v = np.ones((8, 8))
    mapped_again = mapped(lambda v: inner(v), ["i", ...], ["i", ...], axis_resources={"i": "y"})
    chunked = mapped(inner, ["i", ...], ["i", ...], axis_resources={"i": SerialLoop(2)})
    without = mapped(
        mapped(lambda w: w, ["i"], ["i"]), ["i", ...], ["i", ...], axis_resources={"i": "x"}
    )
    for_unsplit = mapped(lambda v: without(v), ["i", ...], ["i", ...])
    around = [mapped_again, chunked, without, for_unsplit]
    around += [jax.vmap(inner, axis_name="i"), jax.vmap(inner, axis_name="x")]
    for fun in around:
        with jax.set_mesh(plain_mesh()), pytest.raises(ValueError, match="is bound: rename one"):
            fun(v)


@pytest.mark.parametrize("resources", [SerialLoop(2), ("x", SerialLoop(2))], ids=str)
def test_there_are_no_collectives_over_chunks(resources):
    v = np.arange(16, dtype=np.float32)
    own = {"axis_resources": {"i": resources}}
    refused = mapped(lambda v: helper.psum(v, "i"), ["i"], ["i"], **own)
    inner = mapped(
        lambda v: jax.vmap(lambda w: helper.psum(w, "i"), axis_name="i")(v * jnp.arange(3))[0],
        ["i"],
        ["i"],
        **own,
    )
    with jax.set_mesh(plain_mesh()):
        with pytest.raises(ValueError, match="which a SerialLoop computes in chunks"):
            refused(v)
        np.testing.assert_allclose(inner(v), 3 * v)


@jax.custom_vjp
def centred(v):
    return v - helper.pmean(v, "i")


centred.defvjp(
    lambda v: (v - helper.pmean(v, "i"), None), lambda _, ct: (ct - helper.pmean(ct, "i"),)
)


@pytest.mark.parametrize("resources", ONE_SPLIT[1:], ids=str)
def test_rules_that_jax_traces_late_are_refused_in_words(resources):
    fun = mapped(centred, ["i"], ["i"], axis_resources=resources)
    v = np.arange(8.0)

    def total(v):
        return jnp.sum(fun(v))

    late = {
        "grad": lambda: jax.grad(total)(v),
        "jit": lambda: jax.jit(jax.grad(total))(v),
        "vmap of the pullback": lambda: jax.vmap(jax.vjp(fun, v)[1], axis_name="i")(rows(8)),
    }
    for gradient in late.values():
        with jax.set_mesh(plain_mesh()), pytest.raises(NameError, match="In a rule of a jax"):
            gradient()
    with jax.set_mesh(plain_mesh()), pytest.raises(ValueError, match="rename one"):
        jax.vmap(jax.grad(total), axis_name="i")(rows(8))


def test_rules_over_axes_without_resources_work_late_too():
    """As far as they do in `jax.vmap`: not with what reads the size of the axis."""
    weights = np.arange(8, dtype=np.float32)

    @jax.custom_vjp
    def rule(v):
        return v * helper.psum(v, "i")

    def forward(v):
        return rule(v), (v, helper.psum(v, "i"))

    def backward(saved, ct):
        return (ct * saved[1] + helper.psum(ct * saved[0], "i"),)

    rule.defvjp(forward, backward)
    fun = mapped(rule, ["i"], ["i"])
    found = jax.jit(jax.grad(lambda v: jnp.sum(fun(v) * weights)))(weights)
    wanted = jax.grad(lambda v: jnp.sum(v * jnp.sum(v) * weights))(weights)
    np.testing.assert_allclose(found, wanted)


@pytest.mark.parametrize("name, resources", [("i", "x"), ("x", "x"), ("x", "y")])
def test_late_rules_over_an_axis_that_is_named_as_a_mesh_axis_are_refused(name, resources):
    @jax.custom_vjp
    def rule(v):
        return v

    rule.defvjp(lambda v: (v, None), lambda _, ct: (helper.psum(ct, name),))
    fun = mapped(rule, [name], [name], axis_resources={name: resources})
    with jax.set_mesh(plain_mesh()), pytest.raises(NameError, match="In a rule of a jax"):
        jax.grad(lambda v: jnp.sum(fun(v)))(np.arange(8.0))


@pytest.mark.parametrize("resources", ONE_SPLIT, ids=str)
def test_rules_whose_gradient_is_taken_inside_work(resources):
    weights = np.arange(8, dtype=np.float32)

    def body(v, w):
        return jax.grad(lambda v: centred(v) * w)(v)

    fun = mapped(body, (["i"], ["i"]), ["i"], axis_resources=resources)
    with jax.set_mesh(plain_mesh()):
        np.testing.assert_allclose(fun(weights, weights), weights - weights.mean())


def test_a_hand_written_shard_map_and_a_vmap_in_it_call_the_same_functions():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("by hand",))
    x = rows(16)

    def on_device(v):
        sums = jax.vmap(lambda w: helper.psum(w, "in it"), axis_name="in it")(v)
        return v - helper.pmean(v, "by hand"), sums

    spec = jax.sharding.PartitionSpec("by hand")
    fun = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    found, sums = fun(x)
    blocks = x.reshape(8, 2, 16)
    wanted = (blocks - blocks.mean(0)).reshape(16, 16)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums, blocks.sum(1).repeat(2, 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flag", [None, "x", ("x", "y"), SerialLoop(2)], ids=str)
def test_a_flag_may_choose_resources(flag):
    v = np.arange(16, dtype=np.float32)
    chosen = {"i": flag} if flag else {}
    over_j = mapped(
        lambda v, w: v - helper.pmean(w, "j"), (["i"], ["j"]), ["i"], axis_resources=chosen
    )
    with jax.set_mesh(plain_mesh()):
        np.testing.assert_allclose(over_j(v, v), v - v.mean())


def test_in_the_body_of_another_one_each_device_computes_its_part():
    x, u, _ = arguments(8, 4)
    inner = mapped(
        lambda v, w: v - helper.pmean(v, "k") + helper.psum(w, "b"),
        (["k"], {}),
        ["k"],
        axis_resources={"k": "y"},
    )
    fun = mapped(
        lambda x, u: inner(jnp.tile(u * x, 2)[:6], x[0]),
        ({0: "a", 1: "b"}, {0: "a"}),
        {0: "a", 1: "b"},
        axis_resources={"a": "x"},
    )
    scaled = np.tile(x * u[:, None, None], 2)
    wanted = scaled - scaled.mean(2, keepdims=True) + x[:, :, 0].sum(1)[:, None, None]
    with jax.set_mesh(plain_mesh()):
        np.testing.assert_allclose(fun(x, u), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("resources", [("y", "z"), ("z", "y")], ids=str)
def test_a_part_over_two_mesh_axes_comes_back_in_order(resources):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("x", "y", "z"))
    inner = mapped(lambda v: 2 * v, ["k"], ["k"], axis_resources={"k": resources})
    fun = mapped(inner, ["a", ...], ["a", ...], axis_resources={"a": "x"})
    x = rows(8)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(fun(x), 2 * x)


def test_a_device_with_one_element_takes_one_branch():
    def body(v):
        return lax.cond(v > 3, jnp.sin, jnp.cos, v)

    fun = mapped(body, ["i"], ["i"], axis_resources={"i": ("x", "y")})
    with jax.set_mesh(plain_mesh()):
        program = str(jax.make_jaxpr(fun)(np.arange(8.0)))
    assert "cond[" in program and "select_n" not in program


SERIAL = {
    "alone": {"a": SerialLoop(2)},
    "beside a mesh axis": {"a": ("x", SerialLoop(2))},
    "around a mesh axis": {"a": SerialLoop(4), "b": "y"},
}


@pytest.mark.parametrize("resources", SERIAL.values(), ids=SERIAL)
def test_loops_compute_each_element(resources):
    x, u, w = arguments(8, 4)
    out_axes = {1: "a", 2: "b"}
    fun = mapped(
        lambda x, u, w: x * u + helper.psum(w * x, "b"), IN_AXES, out_axes, axis_resources=resources
    )
    wanted = x * u[:, None, None] + (w * x).sum(1, keepdims=True)
    with jax.set_mesh(plain_mesh()):
        found, pullback = jax.vjp(fun, x, u, w)
        _, of_u, _ = pullback(jnp.ones_like(found))
    np.testing.assert_allclose(found, wanted.transpose(2, 0, 1), rtol=1e-5)
    np.testing.assert_allclose(of_u, x.sum((1, 2)), rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "max",
        "pmin",
        "softmax",
        "log_softmax",
        "logsumexp",
        "all_to_all",
        "psum_scatter",
        "ppermute",
        "pdot",
        "all_gather",
    ],
)
@pytest.mark.parametrize("resources", [(), "x", ("y", "x")], ids=str)
def test_derivatives_are_those_of_jax_without_names(name, resources):
    of_all = {
        "max": (lambda v: helper.max(v, ("i", 0)), lambda x: jnp.full(len(x), x.max())),
        "pmin": (lambda v: helper.pmin(v, "i"), lambda x: jnp.tile(x.min(0), (len(x), 1))),
        "softmax": (lambda v: helper.softmax(v, ("i", 0)), lambda x: jax.nn.softmax(x, (0, 1))),
        "log_softmax": (lambda v: helper.log_softmax(v, "i"), lambda x: jax.nn.log_softmax(x, 0)),
        "logsumexp": (
            lambda v: helper.logsumexp(v, "i"),
            lambda x: jnp.tile(jax.nn.logsumexp(x, 0), (len(x), 1)),
        ),
        "all_to_all": (lambda v: helper.all_to_all(v, "i", 0, 0), jnp.transpose),
        "psum_scatter": (lambda v: helper.psum_scatter(v, "i"), lambda x: x.sum(0)),
        "ppermute": (
            lambda v: helper.ppermute(v, "i", [(k, k + 2) for k in range(6)]),
            lambda x: jnp.zeros_like(x).at[2:8].set(x[:6]),
        ),
        "pdot": (lambda v: v @ helper.pdot(v, v, "i"), lambda x: x @ (x.T @ x)),
        "all_gather": (
            lambda v: helper.all_gather(v, "i").T @ v,
            lambda x: jax.vmap(lambda v: x.T @ v)(x),
        ),
    }
    body, of_jax = of_all[name]
    x = rows(16)
    x[3] = x[5]  # Ties share the derivative of an extremum.
    of_result = jnp.sin(jnp.arange(of_jax(x).size)).reshape(of_jax(x).shape)
    fun = mapped(body, ["i", ...], ["i", ...], axis_resources={"i": resources})
    with jax.set_mesh(plain_mesh()):
        found = jax.grad(lambda x: jnp.sum(fun(x) * of_result))(x)
    wanted = jax.grad(lambda x: jnp.sum(of_jax(x) * of_result))(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bad", range(8))
def test_nan_is_never_lost(bad):
    v = np.arange(8, dtype=np.float32)
    v[bad] = np.nan
    fun = mapped(lambda v: helper.pmax(v, "i"), ["i"], ["i"], axis_resources={"i": "x"})
    with jax.set_mesh(plain_mesh()):
        assert np.isnan(fun(v)).all()


def test_sums_of_sixteen_bits_are_those_of_jax():
    x = rows(16).astype(jnp.bfloat16)
    for name in ("sum", "mean", "logsumexp", "log_softmax", "softmax"):
        ours = getattr(helper, name)
        jaxs = getattr(jnp if name in ("sum", "mean") else jax.nn, name)
        fun = mapped(lambda v, ours=ours: ours(v, axis="i"), ["i", ...], ["i", ...])
        over = fun(x)[0] if jaxs(x, axis=0).ndim == 1 else fun(x)
        assert over.dtype == jnp.bfloat16
        np.testing.assert_array_equal(over, jaxs(x, axis=0))


# ---------------------------------------------------------------------------------- containers


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
