"""The helper file, against NumPy, `jax.vmap` and `jax.shard_map` by hand."""

import ast
import collections
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from placements import IN_AXES, OUT_AXES, PLACEMENTS, arguments, mesh42

from xmap_compat import xmap
from xmap_compat.tools.leave.helper import named_axes as helper
from xmap_compat.tools.leave.helper.named_axes import SerialLoop, mapped
from xmap_compat.tools.leave.helper_text import FUNCTIONS, helper_text


def on_mesh(*shape):
    """In the scope of a mesh of the first devices."""
    devices = np.array(jax.devices()[: np.prod(shape)])
    names = ("x", "y", "z")[: len(shape)]
    mesh = jax.sharding.Mesh(devices.reshape(shape), names)
    return jax.set_mesh(mesh)


def along_i(body, resources):
    """A function of rows, whose first dimension is the axis i."""
    return mapped(body, ["i", ...], ["i", ...], axis_resources={"i": resources})


def rows(n):
    x = np.random.default_rng(n).normal(size=(n, n))
    return x.astype(np.float32)


def close(found, wanted, rtol=1e-5, atol=1e-5, **options):
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol, **options)


V = np.arange(8, dtype=np.float32)


# ------------------------------------------------------------------- values, against jax.vmap


def with_collectives(of):
    """Sums, extrema, indices and sizes over axes, in control flow too."""

    def body(x, u, w):
        mean = of.pmean(x * w, "a")
        top = of.pmax(lax.stop_gradient(x), ("a", "b"))

        def step(_, c):
            return c + of.psum(c * 0.1, "b")

        total = lax.fori_loop(0, 2, step, x)
        index = of.axis_index("a") / of.axis_size("a")
        return (x - mean) * u + top + total + index

    return body


def with_gradient(of):
    """A gradient that is taken in the body, as data-parallel training does."""

    def body(x, u, w):
        def loss(w):
            return jnp.sum((w * x - u) ** 2)

        gradient = jax.grad(loss)(w)
        return x - of.pmean(of.pmean(gradient, "a"), "b")

    return body


def by_vmap(body):
    over_b = jax.vmap(body, in_axes=(0, None, None), axis_name="b")
    return jax.vmap(over_b, in_axes=(0, 0, None), axis_name="a")


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("body", [with_collectives, with_gradient])
def test_values_and_gradients_from_outside_are_those_of_vmap(body, placement):
    a, b, resources = PLACEMENTS[placement]
    args = arguments(a, b)

    def everything(fun):
        def loss(*args):
            result = fun(*args)
            return jnp.sum(jnp.sin(result)), result

        gradient = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
        return jax.jit(gradient)(*args)

    fun = mapped(body(helper), IN_AXES, OUT_AXES, axis_resources=resources)
    with on_mesh(4, 2):
        found = everything(fun)
    wanted = everything(by_vmap(body(lax)))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(functools.partial(close, rtol=1e-4), found, wanted)


# ----------------------------------------------------------------- each function, against NumPy


# name: of the row v of an element: what NumPy gives of all rows x
EACH = """
psum: v - psum(v, "i"): x - x.sum(0)
psum of a number: v * psum(1, "i"): x * len(x)
pmean: v - pmean(v, "i"): x - x.mean(0)
axis_index: v + axis_index("i"): x + np.arange(len(x))[:, None]
axis_size: v * axis_size("i"): x * len(x)
sum: v - sum(v, ("i", 0)): x - x.sum()
mean: v - mean(v, axis="i"): x - x.mean(0)
var: v - var(v, axis="i"): x - x.var(0)
softmax: softmax(v, axis="i"): np.exp(x) / np.exp(x).sum(0)
softmax of all: softmax(v, ("i", 0)): np.exp(x) / np.exp(x).sum()
log_softmax: log_softmax(v, "i"): x - np.log(np.exp(x).sum(0))
logsumexp: v - logsumexp(v, axis=("i", 0)): x - np.log(np.exp(x).sum())
one_hot: v + one_hot(jnp.int32(3), psum(1, "i"), axis="i"): x + (np.arange(len(x)) == 3)[:, None]
all_gather: all_gather(v, "i", axis=1) @ v: x @ x
all_gather, tiled: all_gather(twice(v), "i", axis=1, tiled=True)[:, 3]: np.ones_like(x) * (x[1] + 1)
psum_scatter: psum_scatter(jnp.outer(v, v), "i", scatter_dimension=1): x.T @ x
psum_scatter, tiled: psum_scatter(twice(v).reshape(-1), "i", tiled=True): np.stack([x.sum(0), (x + 1).sum(0)], 1)
all_to_all: all_to_all(v, "i", 0, 0): x.T
all_to_all, tiled: all_to_all(twice(v), "i", 0, 1, tiled=True)[0]: np.stack([x.T, x.T + 1], 2).reshape(len(x), -1)
ppermute: ppermute(v, "i", [(k, (k + 3) % len(v)) for k in range(len(v))]): np.roll(x, 3, 0)
pshuffle: pshuffle(v, "i", [3 * k % len(v) for k in range(len(v))]): x[3 * np.arange(len(x)) % len(x)]
pdot: v @ pdot(v, 2 * v, "i"): x @ (2 * x.T @ x)
pdot of positions: v + pdot(v, v, "i", ((0,), (0,))): x + (x * x).sum()
pdot from the end: v + pdot(jnp.outer(v, v), v[:, None], "i", ((-2,), (-2,)))[:, 0]: \
    x + np.einsum("ni,nj,ni->j", x, x, x)
"""
# Without a derivative.
EXTREMA = """
pmax: v - pmax(v, "i"): x - x.max(0)
pmin: v - pmin({"a": v}, "i")["a"]: x - x.min(0)
max: v - max(v, (0, "i"), keepdims=True): x - x.max()
min: v - min(v, axis="i"): x - x.min(0)
min of positions: v - min(v): x - x.min(1, keepdims=True)
"""


def twice(v):
    return jnp.stack([v, v + 1], 1)


def computed(table, place, **names):
    """The values of a column of a table."""
    found = {}
    for line in filter(None, table.splitlines()):
        *parts, wanted = line.split(": ")
        text = [": ".join(parts[1:]), wanted][place]
        found[parts[0]] = eval(text, names)
    return found


def of_row(table):
    names = {**vars(helper), "jnp": jnp, "twice": twice}
    return lambda v: computed(table, 0, v=v, **names)


def over_rows(way):
    """How a function of rows is mapped: by the helper, or by JAX alone; and the mesh."""
    if way is jax.pmap:
        return contextlib.nullcontext(), lambda body: jax.pmap(body, axis_name="i")
    if way is jax.vmap:
        return on_mesh(4, 2), lambda body: jax.vmap(body, axis_name="i")
    if way is xmap:
        own = {"axis_resources": {"i": "x"}}
        return mesh42(), lambda body: xmap(body, ["i", ...], ["i", ...], **own)
    return on_mesh(4, 2), lambda body: along_i(body, way)


WAYS = [(), "x", ("x", "y"), ("y", "x"), jax.vmap, jax.pmap, xmap]


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: getattr(way, "__name__", str(way)))
def test_each_function_computes_what_numpy_does(way, size):
    if way is jax.pmap and size == 16:
        pytest.skip("8 devices")
    x = rows(size)
    mesh, over = over_rows(way)
    with mesh:
        found = over(of_row(EACH + EXTREMA))(x)
    by_numpy = computed(EACH + EXTREMA, 1, x=x, np=np)
    for name, wanted in by_numpy.items():
        close(found[name], wanted, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("resources", [(), "x", ("y", "x")], ids=str)
def test_derivatives_are_those_of_jax_without_names(resources):
    x = rows(16)

    def sines(y):
        of_all = jnp.sin(jnp.arange(y.size))
        return of_all.reshape(y.shape)

    def gradients(fun):
        results, pullback = jax.vjp(fun, x)
        zeros = jax.tree.map(jnp.zeros_like, results)
        found = {}
        for name, result in results.items():
            cotangents = {**zeros, name: sines(result)}
            [found[name]] = pullback(cotangents)
        return found

    with on_mesh(4, 2):
        of_each = gradients(along_i(of_row(EACH), resources))
    by_jax = gradients(lambda x: computed(EACH, 1, x=x, np=jnp))
    for name, wanted in by_jax.items():
        close(of_each[name], wanted, rtol=1e-4, atol=1e-3, err_msg=name)


def test_nan_is_never_lost():
    fun = mapped(lambda v: helper.pmax(v, "i"), ["i"], ["i"], axis_resources={"i": "x"})
    with on_mesh(4, 2):
        for bad in range(8):
            v = V.copy()
            v[bad] = np.nan
            assert np.isnan(fun(v)).all()


@pytest.mark.parametrize("name", ["sum", "mean", "logsumexp", "log_softmax", "softmax"])
def test_sums_of_sixteen_bits_are_those_of_jax(name):
    x = rows(16).astype(jnp.bfloat16)
    of_jax = getattr(jnp, name, None) or getattr(jax.nn, name)
    wanted = of_jax(x, axis=0)
    ours = functools.partial(getattr(helper, name), axis="i")
    out_axes = ["i", ...] if wanted.ndim == 2 else {}
    found = mapped(ours, ["i", ...], out_axes)(x)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, wanted)


# ------------------------------------------------------------------------------ whose name it is


def in_scan(shared):
    def step(carry, _):
        return shared(carry), None

    return lambda v: lax.scan(step, v, None, length=1)[0]


def in_cond(shared):
    def body(v):
        size = helper.psum(1, "a")
        return lax.cond(size > 0, shared, lambda v: v, v)

    return body


SHARED = {
    "jit": jax.jit,
    "scan": in_scan,
    "cond": in_cond,
    "checkpoint": jax.checkpoint,
    "jit of scan": lambda shared: jax.jit(in_scan(shared)),
}
OF_ONE = [(), "x", "y", ("x", "y"), ("y", "x")]
OF_TWO = [{"a": entry} for entry in OF_ONE]
OF_TWO += [{"b": entry} for entry in OF_ONE[1:]]
OF_TWO += [{"a": "x", "b": "y"}, {"a": "y", "b": "x"}]


@pytest.mark.parametrize("placements", [OF_TWO, OF_TWO[::-1]], ids=["forth", "back"])
@pytest.mark.parametrize("kind", SHARED)
def test_what_placements_share_is_right_under_each(kind, placements):
    """After one placement and before another, JAX has traced the function already."""
    weights = np.arange(1, 5, dtype=np.float32)

    def summed(v):
        by_index = helper.psum(v * helper.axis_index("a"), "a")
        return v + by_index - helper.pmean(v, "b")

    shared = SHARED[kind](summed)
    x = rows(4)
    index = np.arange(4)[:, None]
    wanted = x + (x * index).sum(0) - x.mean(1, keepdims=True)
    of_numpy = weights + index * 4 * weights - weights.mean()
    for resources in placements:
        fun = mapped(lambda v: shared(v), ["a", "b"], ["a", "b"], axis_resources=resources)
        with on_mesh(2, 2):
            found, pullback = jax.vjp(jax.jit(fun), x)
            [gradient] = pullback(jnp.tile(weights, (4, 1)))
        close(found, wanted, err_msg=str(resources))
        close(gradient, of_numpy, err_msg=str(resources))


def thrice(v, name="i"):
    """The sum of 0, v and 2 v, along an axis of its own."""
    summed = jax.vmap(lambda w: helper.psum(w, "i"), axis_name=name)
    return summed(v * jnp.arange(3))[0]


@pytest.mark.parametrize("resources", OF_ONE, ids=str)
def test_the_innermost_binder_wins(resources):
    def body(v):
        return thrice(v) + 0 * helper.psum(v, "i")

    fun = along_i(body, resources)
    with on_mesh(2, 2):
        np.testing.assert_allclose(fun(V), 3 * V)


@pytest.mark.parametrize("own, other", [((), "x"), ("x", "y"), (("y", "x"), ())], ids=str)
@pytest.mark.parametrize("size", [8, 16])
def test_an_axis_may_have_the_name_of_a_mesh_axis(own, other, size):
    """Of its own, or of another one."""

    def body(v, w):
        over_three = jax.vmap(lambda k: helper.psum(k * v, "x"), axis_name="x")
        inner = over_three(jnp.arange(3))
        centred = v - helper.pmean(v, "x")
        return centred + inner[0] + helper.psum(w, "y")

    specs = (["x", ...], ["y", ...])
    fun = mapped(body, specs, ["x", ...], axis_resources={"x": own, "y": other})
    x = rows(size)
    with on_mesh(4, 2):
        found = fun(x, x)
    wanted = x - x.mean(0) + 3 * x + x.sum(0)
    close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_mesh_axis_that_a_vmap_binds_again_is_refused():
    fun = along_i(lambda v: thrice(v, "x"), "x")
    with on_mesh(4, 2), pytest.raises(ValueError, match="vmap binds here"):
        fun(V)


split = along_i(lambda w: w * 2, "x")
unsplit = along_i(lambda w: w, ())
AROUND = {
    "another mesh axis": along_i(lambda v: split(v), "y"),
    "chunks": along_i(split, SerialLoop(2)),
    "a mesh axis, inner without": along_i(unsplit, "x"),
    "nothing": along_i(along_i(unsplit, "x"), ()),
    "vmap": jax.vmap(split, axis_name="i"),
    "vmap of its mesh axis": jax.vmap(split, axis_name="x"),
}


@pytest.mark.parametrize("around", AROUND)
def test_an_axis_that_is_bound_around_is_refused(around):
    with on_mesh(4, 2), pytest.raises(ValueError, match="is bound: rename one"):
        AROUND[around](np.ones((8, 8)))


@pytest.mark.parametrize("resources", [SerialLoop(2), ("x", SerialLoop(2))], ids=str)
def test_there_are_no_collectives_over_chunks(resources):
    refused = along_i(lambda v: helper.psum(v, "i"), resources)
    with on_mesh(4, 2):
        with pytest.raises(ValueError, match="which a SerialLoop computes in chunks"):
            refused(V)
        found = along_i(thrice, resources)(V)
    np.testing.assert_allclose(found, 3 * V)


def rule_over(name):
    """v - pmean(v, name), with rules that have the collective."""

    @jax.custom_vjp
    def centred(v):
        return v - helper.pmean(v, name)

    def forward(v):
        return v - helper.pmean(v, name), None

    def backward(_, ct):
        return (ct - helper.pmean(ct, name),)

    centred.defvjp(forward, backward)
    return centred


# What a gradient from outside is of, by how it is taken.
LATE = {
    "grad": lambda total: jax.grad(total)(V),
    "jit": lambda total: jax.jit(jax.grad(total))(V),
    "vmap of the pullback": lambda total: jax.vmap(jax.vjp(total, V)[1], axis_name="i")(V),
}


@pytest.mark.parametrize("taken", LATE)
@pytest.mark.parametrize("resources", OF_ONE[1:], ids=str)
def test_rules_that_jax_traces_late_are_refused_in_words(resources, taken):
    fun = along_i(rule_over("i"), resources)
    with on_mesh(2, 2), pytest.raises(NameError, match="In a rule of a jax"):
        LATE[taken](lambda v: jnp.sum(fun(v)))


@pytest.mark.parametrize("resources", ["x", "y"])
def test_late_rules_over_an_axis_that_is_named_as_a_mesh_axis_are_refused(resources):
    fun = mapped(rule_over("x"), ["x"], ["x"], axis_resources={"x": resources})
    with on_mesh(2, 2), pytest.raises(NameError, match="In a rule of a jax"):
        jax.grad(lambda v: jnp.sum(fun(v)))(V)


@pytest.mark.parametrize("resources", [{}, {"a": "x"}], ids=str)
def test_rules_over_axes_without_resources_work_late_too(resources):
    """As far as they do in `jax.vmap`: not with what reads the size of the axis."""

    @jax.custom_vjp
    def rule(v):
        return v * helper.psum(v, "whole")

    def forward(v):
        return rule(v), (v, helper.psum(v, "whole"))

    def backward(saved, ct):
        v, total = saved
        of_total = helper.psum(ct * v, "whole")
        return (ct * total + of_total,)

    rule.defvjp(forward, backward)
    fun = mapped(rule, ["a", "whole"], ["a", "whole"], axis_resources=resources)
    x = rows(8)
    weights = x**2
    with on_mesh(2, 2):
        _, pullback = jax.vjp(fun, x)
        [found] = pullback(weights)
    _, pullback = jax.vjp(lambda x: x * x.sum(1, keepdims=True), x)
    [wanted] = pullback(weights)
    close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("resources", OF_ONE, ids=str)
def test_rules_whose_gradient_is_taken_inside_work(resources):
    centred = rule_over("i")

    def body(v):
        return jax.grad(lambda w: centred(w) * v)(v)

    fun = along_i(body, resources)
    with on_mesh(2, 2):
        np.testing.assert_allclose(fun(V), V - V.mean())


def test_a_hand_written_shard_map_and_a_vmap_in_it_call_the_same_functions():
    x = rows(16)

    def on_device(v):
        over_it = jax.vmap(
            lambda w: (helper.psum(w, "in it"), helper.pdot(w, w, "in it")), axis_name="in it"
        )
        return v - helper.pmean(v, "z"), *over_it(v)

    spec = PartitionSpec("z")
    with on_mesh(1, 1, 8):
        fun = jax.shard_map(on_device, in_specs=spec, out_specs=spec, check_vma=False)
        found, sums, dots = fun(x)
    blocks = x.reshape(8, 2, 16)
    centred = blocks - blocks.mean(0)
    close(found, centred.reshape(16, 16))
    close(sums, blocks.sum(1).repeat(2, 0), rtol=1e-4)
    close(dots, np.einsum("bki,bkj->bij", blocks, blocks).repeat(2, 0), rtol=1e-4)


def test_in_the_body_of_another_one_each_device_computes_its_part():
    x, u, _ = arguments(8, 4)

    def inner_body(v, w):
        return v - helper.pmean(v, "k") + helper.psum(w, "b")

    def body(x, u):
        inner = mapped(inner_body, (["k"], {}), ["k"], axis_resources={"k": "y"})
        doubled = jnp.tile(u * x, 2)
        return inner(doubled[:6], x[0])

    specs = ({0: "a", 1: "b"}, {0: "a"})
    fun = mapped(body, specs, specs[0], axis_resources={"a": "x"})
    scaled = np.tile(x * u[:, None, None], 2)
    centred = scaled - scaled.mean(2, keepdims=True)
    total = x[:, :, 0].sum(1)
    with on_mesh(4, 2):
        close(fun(x, u), centred + total[:, None, None])


@pytest.mark.parametrize("resources", [("y", "z"), ("z", "y")], ids=str)
def test_a_part_over_two_mesh_axes_comes_back_in_order(resources):
    inner = mapped(lambda v: 2 * v, ["k"], ["k"], axis_resources={"k": resources})
    x = rows(8)
    with on_mesh(2, 2, 2):
        np.testing.assert_array_equal(along_i(inner, "x")(x), 2 * x)


def test_a_device_with_one_element_takes_one_branch():
    def body(v):
        return lax.cond(v > 3, jnp.sin, jnp.cos, v)

    fun = along_i(body, ("x", "y"))
    with on_mesh(4, 2):
        jaxpr = jax.make_jaxpr(fun)(V)
    assert "cond[" in str(jaxpr)


SERIAL = {
    "alone": {"a": SerialLoop(2)},
    "beside a mesh axis": {"a": ("x", SerialLoop(2))},
    "around a mesh axis": {"a": SerialLoop(4), "b": "y"},
}


@pytest.mark.parametrize("loops", SERIAL)
def test_loops_compute_each_element(loops):
    x, u, w = arguments(8, 4)

    def body(x, u, w):
        total = helper.psum(w * x, "b")
        return x * u + total

    fun = mapped(body, IN_AXES, {1: "a", 2: "b"}, axis_resources=SERIAL[loops])
    total = (w * x).sum(1, keepdims=True)
    wanted = x * u[:, None, None] + total
    with on_mesh(4, 2):
        found, pullback = jax.vjp(fun, x, u, w)
        _, of_u, _ = pullback(jnp.ones_like(found))
    close(found, wanted.transpose(2, 0, 1))
    close(of_u, x.sum((1, 2)))


# ---------------------------------------------------------------------------------- containers


class State(collections.namedtuple("State", "weights step")):
    """A container of the user's, which holds arrays, or their specs."""


TREES = {
    "named tuple": (State([...], []), State({}, {})),
    "prefix": ([...], [...]),
    "dictionary of positions": (State({}, {}), State({}, {})),
}


@pytest.mark.parametrize("kind", TREES)
def test_specs_may_stand_in_containers(kind):
    def step(state, row):
        total = helper.psum(row, "i")
        after = State(state.weights + total, state.step + 1)
        return after, row - total

    given, gives = TREES[kind]
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    fun = mapped(step, (given, {0: "i"}), [gives, ["i", ...]], axis_resources={"i": "x"})
    with on_mesh(4, 2):
        state, rest = fun(State(jnp.ones(3), jnp.int32(0)), x)
    np.testing.assert_allclose(state.weights, 1 + x.sum(0))
    assert state.step == 1
    np.testing.assert_allclose(rest, x - x.sum(0))


def test_sizes_of_axes_that_no_argument_has():
    own = {"axis_sizes": {"i": 8}, "axis_resources": {"i": "x"}}
    fun = mapped(lambda v: v * helper.axis_index("i"), {}, {1: "i"}, **own)
    with on_mesh(4, 2):
        found = fun(np.arange(3))
    wanted = np.outer(np.arange(3), np.arange(8))
    np.testing.assert_array_equal(found, wanted)


def test_keys_and_donated_arguments():
    def noisy(key, v):
        return [key, jax.random.normal(key) + v]

    both = (["i"], ["i"])
    fun = mapped(noisy, both, both, axis_resources={"i": "x"}, donate_argnums=1, backend=None)
    keys = jax.random.split(jax.random.key(0), 8)
    wanted = jax.vmap(jax.random.normal)(keys) + V
    with on_mesh(4, 2):
        v = jax.device_put(V, PartitionSpec("x"))
        same, found = fun(keys, v)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert (same == keys).all()
    assert v.is_deleted()


def test_the_mesh_may_be_that_of_with_or_have_explicit_axes_or_other_devices():
    fun = along_i(lambda v: v - helper.pmean(v, "i"), "x")
    wanted = V - 3.5
    with mesh42():
        np.testing.assert_allclose(fun(V), wanted)
    types = (jax.sharding.AxisType.Explicit,) * 2
    explicit = jax.make_mesh((4, 2), ("x", "y"), axis_types=types)
    with jax.set_mesh(explicit):
        elsewhere = jax.device_put(V, NamedSharding(explicit, PartitionSpec("y")))
        np.testing.assert_allclose(fun(elsewhere), wanted)
    for devices in (jax.devices()[:4], jax.devices()[:3:-1]):  # one trace serves both
        mesh = jax.sharding.Mesh(np.array(devices), ("x",))
        with jax.set_mesh(mesh):
            result = fun(V)
        assert [shard.device for shard in result.addressable_shards] == devices
        np.testing.assert_allclose(result, wanted)


UNDECLARED = {
    "one element on a device": (lambda v: v * 2, 4),
    "several": (lambda v: v * 2, 8),
    "reduced over the elements of a device only": (lambda v: lax.psum(v, "i over ('x',)"), 8),
    "by its index": (lambda v: helper.psum(v, "i") + lax.axis_index("x"), 8),
}


@pytest.mark.parametrize("how", UNDECLARED)
def test_an_undeclared_result_is_an_error(how):
    body, size = UNDECLARED[how]
    fun = mapped(body, ["i"], {}, axis_resources={"i": "x"})
    with on_mesh(4, 2), pytest.raises(ValueError, match="name the axis in out_axes, or reduce"):
        fun(V[:size])


def test_a_callback_that_vmap_refuses_runs_all_the_same():
    seen = []

    def body(v):
        jax.debug.callback(lambda v: seen.append(float(v)), v, ordered=False)
        return v + 1

    v = V[:4]
    with on_mesh(4, 2):
        found = along_i(body, "x")(v)
    np.testing.assert_array_equal(found, v + 1)
    jax.effects_barrier()
    assert sorted(set(seen)) == [0, 1, 2, 3]


# -------------------------------------------------------------------------- the text of the file


def test_a_helper_has_what_is_used_and_grows_by_what_it_lacks():
    small = helper_text(["axis_index"])
    assert "def psum" not in small
    edited = small.replace("def axis_index", "def other():\n    pass\n\n\ndef axis_index")
    grown = helper_text(["mapped", "pmax", "SerialLoop"], edited)
    assert grown.startswith(edited.rstrip()) and "def softmax" not in grown
    assert helper_text(["pmax"], grown) == grown
    of_both: dict = {}
    exec(grown, of_both)
    assert {"mapped", "pmax", "other", "SerialLoop"} <= of_both.keys()


@pytest.mark.parametrize("name", sorted({*FUNCTIONS.values(), "mapped"}))
def test_each_function_stands_alone(name):
    alone: dict = {}
    text = helper_text([name])
    exec(text, alone)
    nodes = ast.walk(ast.parse(text))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    assert used & vars(helper).keys() <= alone.keys()
