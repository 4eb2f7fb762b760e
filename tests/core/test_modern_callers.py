"""Programs of today around xmapped functions: flax, optax, Equinox, jax.export, copies, jit with shardings and static
arguments, and types that carry shardings.

Each is compared with the same program around the positional function, a hand-written ``shard_map`` or ``vmap``.
"""

import copy
import dataclasses
import functools
import inspect
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_close
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import expressions

from xmap_compat import Xmapped, mesh, xmap

ROWS = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
TARGETS = np.sin(ROWS.sum(1))
ASSIGNMENTS = [{}, {"batch": "x", "hidden": "y"}, {"batch": ("x", "y")}]
X = np.arange(16, dtype=np.float32).reshape(8, 2)
CENTRED = X - X.mean(0)
I = ["i", ...]  # noqa: E741
XY = ("x", "y")


def square():
    return mesh(np.array(jax.devices()).reshape(4, 2), XY)


def centre(placement="x"):
    return xmap(lambda v: v - lax.pmean(v, "i"), I, I, axis_resources={"i": placement})


def over_x(body, out_axes=I):
    return xmap(body, I, out_axes, axis_resources={"i": "x"})


def squares(fun):
    return jax.grad(lambda v: jnp.sum(fun(v) ** 2))


# --------------------------------------------------------------------------------- flax

NETWORK = {
    "hidden": {"kernel": ["inputs", "hidden"], "bias": ["hidden"]},
    "out": {"kernel": ["hidden", ...], "bias": [...]},
}


def flax_network():
    """A linen module with the layers of NETWORK, and its parameters."""
    nn = pytest.importorskip("flax.linen")

    class Network(nn.Module):
        @nn.compact
        def __call__(self, row):
            return nn.Dense(1, name="out")(jnp.tanh(nn.Dense(8, name="hidden")(row)))[..., 0]

    network = Network()
    return network, network.init(jax.random.key(0), ROWS)["params"]


def named_error(params, row, target):
    """The mean squared error of flax's parameters, over names."""
    hidden = jnp.tanh(
        lax.pdot(row, params["hidden"]["kernel"], "inputs") + params["hidden"]["bias"]
    )
    (predicted,) = lax.pdot(hidden, params["out"]["kernel"], "hidden") + params["out"]["bias"]
    return lax.pmean((predicted - target) ** 2, "batch")


def trained(step, state, steps=5):
    step = jax.jit(step, donate_argnums=0)
    for _ in range(steps):
        state = jax.block_until_ready(step(state))
    return state


@pytest.mark.parametrize("resources", ASSIGNMENTS, ids=str)
def test_a_train_state_is_a_tree_of_specs(resources):
    """The loss and the update of a flax TrainState over names; the state stays where its specs put it."""
    optax = pytest.importorskip("optax")
    train_state = pytest.importorskip("flax.training.train_state")
    network, params = flax_network()
    create = functools.partial(
        train_state.TrainState.create, apply_fn=network.apply, tx=optax.adam(0.05)
    )
    state = create(params=jax.tree.map(jnp.array, params))
    adam = optax.ScaleByAdamState({}, NETWORK, NETWORK)
    specs = state.replace(step={}, params=NETWORK, opt_state=(adam, optax.EmptyState()))

    loss = xmap(
        named_error, (NETWORK, ["batch", "inputs"], ["batch"]), {}, axis_resources=resources
    )
    weights = {axis: placed for axis, placed in resources.items() if axis == "hidden"}
    update = xmap(
        lambda s, g: s.apply_gradients(grads=g), (specs, NETWORK), specs, axis_resources=weights
    )

    def step(state):
        return update(state, jax.grad(loss)(state.params, ROWS, TARGETS))

    def positional_step(state):
        def error(params):
            return jnp.mean((state.apply_fn({"params": params}, ROWS) - TARGETS) ** 2)

        return state.apply_gradients(grads=jax.grad(error)(state.params))

    with square():
        found = trained(step, state)
    expected = trained(positional_step, create(params=params))
    assert int(found.step) == 5
    assert_close((found.params, found.opt_state), (expected.params, expected.opt_state))
    if weights:
        for tree in (found.params, found.opt_state[0].mu):
            assert tree["hidden"]["kernel"].sharding.spec == P(None, "y")
            assert tree["out"]["kernel"].sharding.spec == P("y")


# ------------------------------------------------------------------------------ Equinox


@pytest.mark.parametrize("resources", ASSIGNMENTS, ids=str)
def test_an_equinox_module_is_a_tree_of_specs(resources):
    """A module with a static field, which computes with names or without."""
    eqx = pytest.importorskip("equinox")

    class Layer(eqx.Module):
        w: Any
        b: Any
        activation: Callable = eqx.field(static=True)

    def named_error(layer, row, target):
        out = layer.activation(lax.pdot(row, layer.w, "inputs") + layer.b)
        return lax.pmean(lax.psum((out - target) ** 2, "hidden"), "batch")

    def error(layer, rows, targets):
        out = layer.activation(rows @ layer.w + layer.b)
        return jnp.mean(jnp.sum((out - targets[:, None]) ** 2, 1))

    specs = Layer(["inputs", "hidden"], ["hidden"], jnp.tanh)
    axes = (specs, ["batch", "inputs"], ["batch"])
    loss = xmap(named_error, axes, {}, axis_resources=resources)
    layer = Layer(np.arange(24, dtype=np.float32).reshape(3, 8) / 24, np.zeros(8), jnp.tanh)
    with square():
        found = eqx.filter_jit(eqx.filter_value_and_grad(loss))(layer, ROWS, TARGETS)
    assert isinstance(found[1], Layer)
    assert_close(found, eqx.filter_value_and_grad(error)(layer, ROWS, TARGETS))


# ------------------------------------------------------------------------------- export


def exported_again(function, *args, **options):
    """What another program reads from the bytes of an exported function."""
    pytest.importorskip("flatbuffers")
    made = jax.export.export(function, **options)(*args)
    return jax.export.deserialize(made.serialize(vjp_order=1))


@pytest.mark.parametrize("placement", ["x", ("y", "x")], ids=str)
def test_an_exported_function_on_a_mesh(placement):
    """It remembers its mesh: eight devices, and the parts that each had."""
    with square() as on:
        again = exported_again(jax.jit(centre(placement)), X)
    assert again.nr_devices == 8
    given = jax.device_put(X, NamedSharding(on, P("y")))
    found = jax.jit(again.call)(given)
    np.testing.assert_allclose(found, CENTRED, atol=1e-6)
    assert found.sharding.is_equivalent_to(NamedSharding(on, P(placement)), 2)

    slope = squares(again.call)(given)
    np.testing.assert_allclose(slope, 2 * CENTRED, atol=1e-5)


def test_an_exported_function_without_a_mesh():
    again = exported_again(centre(()), X, platforms=["cpu", "cuda", "tpu"])
    assert again.platforms == ("cpu", "cuda", "tpu") and again.nr_devices == 1
    np.testing.assert_allclose(again.call(X), CENTRED, atol=1e-6)


@pytest.mark.parametrize("axes", [I, [None, "i"]], ids=str)
def test_an_exported_function_with_a_symbolic_size(axes):
    """The size is not known when the body is traced (a collective that asks for it is refused, as under vmap)."""
    (size,) = jax.export.symbolic_shape("size")
    given = jax.ShapeDtypeStruct((size, 2), jnp.float32)
    again = exported_again(xmap(lambda v: jnp.sin(v) * 2, axes, axes), given)
    for rows in (X, X[:3]):
        np.testing.assert_allclose(again.call(rows), np.sin(rows) * 2, rtol=1e-6)


# --------------------------------------------------------------------- copies and pickles


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_copies_compute_the_same(make):
    """As copies of a jitted function do; the mesh is still the one at the call."""
    twin = make({"f": centre("x"), "spec": I})["f"]
    with square() as on:
        found = twin(X)
    np.testing.assert_allclose(found, CENTRED, atol=1e-6)
    assert found.sharding == NamedSharding(on, P("x"))


def test_pickling_by_value_as_for_jit():
    """Closures are pickled by cloudpickle, with specs, resources and mesh contexts to come."""
    cloudpickle = pytest.importorskip("cloudpickle")
    shift = 3.0
    f = over_x(lambda v: v - lax.pmean(v, "i") + shift)
    again = pickle.loads(cloudpickle.dumps(f))
    assert again is not f
    with square():
        found = again(X)
    np.testing.assert_allclose(found, CENTRED + shift, atol=1e-6)


def module_level(v):
    return v * 2


def test_pickling_a_function_that_has_its_name_in_a_module():
    again = pickle.loads(pickle.dumps(xmap(module_level, ["i", ...], ["i", ...])))
    assert again.__wrapped__ is module_level
    np.testing.assert_array_equal(again(X), 2 * X)


# ------------------------------------------------------------------ what takes the result

# What JAX takes a jitted function for, beside the transformations of test_transformations.py.
TAKEN = expressions(
    """
jit, donated: jax.jit(f, donate_argnums=0)(X + 0)
eval_shape: CENTRED + np.zeros(jax.eval_shape(f, X).shape)
its own eval_shape: CENTRED + np.zeros(f.eval_shape(X).shape)
lower: f.lower(X).compile()(X)
trace: f.trace(X).lower().compile()(X)
make_jaxpr: jaxpr_as_fun(jax.make_jaxpr(f)(X))(X)[0]
named_call: jax.named_call(f, name="f")(X)
closure_convert: jax.closure_convert(lambda v: f(v), X)[0](X)
checkpoint: jax.checkpoint(f)(X)
partial: functools.partial(f, X)()
map: next(map(f, [X]))
""",
    "f",
    {**globals(), "jaxpr_as_fun": jaxpr_as_fun},
)


@pytest.mark.parametrize("resources", [(), "x"], ids=str)
@pytest.mark.parametrize("name", TAKEN)
def test_what_xmap_returns_is_taken_as_a_jitted_function(name, resources):
    with square():
        np.testing.assert_allclose(TAKEN[name](centre(resources)), CENTRED, atol=1e-5)


def test_what_xmap_returns_is_described_as_the_function():
    def scaled(v: jax.Array, by: jax.Array) -> jax.Array:
        """Scale."""
        return v * by

    f = xmap(scaled, (["i"], {}), ["i"])
    assert isinstance(f, jax.stages.Wrapped) and isinstance(f, Xmapped)
    assert inspect.signature(f) == inspect.signature(scaled)
    assert inspect.unwrap(f) is scaled
    assert weakref.ref(f)() is f
    assert (f.__name__, f.__doc__, f.__module__) == ("scaled", "Scale.", __name__)
    assert {f: 1}[f] == 1
    f.note = "kept"
    assert f.note == "kept" and vars(scaled) == {}


def test_what_is_forgotten_is_traced_again():
    traced = []

    def noted(v):
        traced.append(v.shape)
        return v * 2

    f = xmap(noted, ["i"], ["i"])
    f(np.ones(3))
    f(np.ones(3))
    once = len(traced)
    f.clear_cache()
    np.testing.assert_array_equal(f(np.ones(3)), np.full(3, 2.0))
    assert len(traced) == 2 * once


class Network:
    def __init__(self, scale):
        self.scale = scale

    @functools.partial(xmap, in_axes=({}, ["i", ...]), out_axes=["i", ...])
    def applied(self, v):
        return self.scale * v


jax.tree_util.register_pytree_node(
    Network, lambda network: ((network.scale,), None), lambda _, held: Network(*held)
)


def test_a_method_is_bound():
    network = Network(np.float32(3))
    np.testing.assert_array_equal(network.applied(X), 3 * X)
    assert list(inspect.signature(network.applied).parameters) == ["v"]
    assert repr(Network.applied).startswith("<xmap(applied, in_axes=({}, ['i', ...])")


def test_jax_is_as_it_was():
    """Nothing that jax.jit makes is changed by xmap; a subprocess has not made one yet."""
    code = "import jax; kind = type(jax.jit(abs)); before = dict(vars(kind)); "
    code += "from xmap_compat import xmap; xmap(abs, ['i'], ['i'])(jax.numpy.ones(2)); "
    code += "assert dict(vars(kind)) == before; print(repr(jax.jit(abs)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == repr(jax.jit(abs)), done.stderr


# ------------------------------------------------------------- jit around: shardings, statics

SHARDINGS = [(P("x"), P("x")), (P(("y", "x")), None), (None, P(None, "y")), (P(), P(("y", "x")))]


@pytest.mark.sampled
@pytest.mark.parametrize("placement", ["x", ("x", "y"), ()], ids=str)
@pytest.mark.parametrize(("given", "wanted"), SHARDINGS, ids=str)
def test_shardings_of_a_jit_around(given, wanted, placement):
    f = centre(placement)
    with square() as on:
        shardings = {}
        for side, spec in (("in_shardings", given), ("out_shardings", wanted)):
            if spec is not None:
                shardings[side] = NamedSharding(on, spec)
        found = jax.jit(lambda v: 2 * f(v), **shardings)(X)
    np.testing.assert_allclose(found, 2 * CENTRED, atol=1e-6)
    if wanted is not None:
        assert found.sharding.is_equivalent_to(NamedSharding(on, wanted), found.ndim)


@dataclasses.dataclass(frozen=True)
class Options:
    axis: str
    power: int
    reduce: Callable


@pytest.mark.parametrize("placement", ["x", ()], ids=str)
def test_static_arguments_of_a_jit_around_reach_the_body(placement):
    """An axis name, a number and a collective, all in one hashable argument; others are traced again."""
    traced = []

    @functools.partial(jax.jit, static_argnums=1, static_argnames="scale")
    def outer(x, options, scale):
        def body(v):
            traced.append((options.power, scale))
            return scale * options.reduce(v**options.power, options.axis)

        return xmap(body, [options.axis, ...], [...], axis_resources={options.axis: placement})(x)

    def summed(options, scale=1, x=X):
        with square():
            return np.asarray(outer(x, options, scale=scale))

    for axis in ("i", "other"):
        found = summed(Options(axis, 2, lax.psum), scale=3)
        np.testing.assert_allclose(found, 3 * (X**2).sum(0))
    largest = Options("i", 3, lax.pmax)
    np.testing.assert_allclose(summed(largest), (X**3).max(0))
    before = len(traced)
    np.testing.assert_allclose(summed(largest, x=X + 1), ((X + 1) ** 3).max(0))
    assert len(traced) == before
    assert {(2, 3), (3, 1)} == set(traced)


# --------------------------------------------------------------- types that carry shardings

CONTEXTS = {
    "auto": (AxisType.Auto, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "explicit, auto": (AxisType.Explicit, AxisType.Auto),
}


def jax_mesh(context):
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=CONTEXTS[context])


def by_hand(placement, on):
    """``centre`` as a shard_map: local rows, and a mean over the mesh axes."""
    return jax.shard_map(
        lambda v: v - lax.pmean(v.mean(0), placement),
        mesh=on,
        in_specs=P(placement),
        out_specs=P(placement),
    )


@pytest.mark.sampled
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("placement", ["x", "y", ("x", "y"), ("y", "x")], ids=str)
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "y")], ids=str)
def test_the_type_of_a_result_carries_its_sharding(context, placement, spec):
    """What a shard_map of the same specs says, so that code after it can go on; and arrays lie as types say."""
    on = jax_mesh(context)
    seen = []

    def noting(f):
        @jax.jit
        def outer(v):
            out = f(v)
            seen.append(jax.typeof(out).sharding)
            return out * 2

        return outer

    with jax.set_mesh(on):
        # shard_map wants arguments that lie as its in_specs say; an xmapped function takes any.
        expected = noting(by_hand(placement, on))(jax.device_put(X, P(placement)))
        found = noting(centre(placement))(jax.device_put(X, spec))
    assert seen[0] == seen[1]
    assert found.sharding.is_equivalent_to(expected.sharding, 2)
    np.testing.assert_allclose(found, 2 * CENTRED, atol=1e-6)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("out_axes", [I, [None, "i"], {1: "i"}], ids=str)
def test_the_type_of_a_result_follows_its_out_axes(context, out_axes):
    place = over_x(lambda v: v, out_axes)
    expected = P("x") if out_axes == I else P(None, "x")
    with jax.set_mesh(jax_mesh(context)):
        found = jax.eval_shape(place, jax.device_put(X, P("x")))
        by_hand = jax.eval_shape(lambda v: v, jax.device_put(np.zeros(found.shape), expected))
    if context == "explicit":
        assert found.sharding == by_hand.sharding


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("spec", [P(), P("x"), P("x", "y")], ids=str)
def test_types_without_resources_are_those_of_positional_code(context, spec):
    types = []

    def noted(f):
        @jax.jit
        def outer(v):
            out = f(v)
            types.append(jax.typeof(out))
            return out

        return outer

    with jax.set_mesh(jax_mesh(context)) as _:
        x = jax.device_put(X, spec)
        found = noted(centre(()))(x)
        expected = noted(lambda v: v - v.mean(0))(x)
    assert types[0] == types[1]
    assert types[0].sharding == types[1].sharding
    assert_close(found, expected)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("spec", [P("x"), P(), P(("x", "y"))], ids=str)
def test_gradients_have_the_types_of_what_they_are_gradients_of(context, spec):
    """jax.grad under Explicit axes: the cotangent is sharded as the argument was, whatever the xmap used."""
    with jax.set_mesh(jax_mesh(context)):
        x = jax.device_put(X, spec)
        grad = jax.jit(jax.grad(lambda v: jnp.sum(centre("x")(v) ** 2)))(x)
        if context == "explicit":
            assert jax.typeof(grad).sharding == jax.typeof(x).sharding
    np.testing.assert_allclose(grad, 2 * CENTRED, atol=1e-5)


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_carry_keeps_its_type(context):
    """lax.scan compares the types of carries, shardings included."""
    smooth = over_x(lambda v: 0.5 * v + 0.5 * lax.pmean(v, "i"))

    @jax.jit
    def three_times(v):
        return lax.scan(lambda c, _: (smooth(c), None), v, None, length=3)[0]

    with jax.set_mesh(jax_mesh(context)):
        found = three_times(jax.device_put(X, P("x")))
    np.testing.assert_allclose(found, X.mean(0) + CENTRED / 8, rtol=1e-5)


# ------------------------------------------------------------------- placement in bodies, and in types

PLACING = expressions(
    """
device_put: jax.device_put(v, sharding)
device_put of a tree: jax.device_put({"v": v, "w": 2 * v}, sharding)["v"]
with_sharding_constraint: lax.with_sharding_constraint(v, sharding)
a bare spec: lax.with_sharding_constraint(v, sharding.spec)
in_shardings: jax.jit(lambda v: v, in_shardings=sharding)(v)
out_shardings: jax.jit(lambda v: v, out_shardings=sharding)(v)
device_put to a device: jax.device_put(v, jax.devices()[0])
""",
    "v, sharding",
    globals(),
)


def assert_doubles(fun):
    np.testing.assert_allclose(fun(X), 2 * X)
    np.testing.assert_allclose(jax.grad(lambda x: fun(x).sum())(X), np.full_like(X, 2))


@pytest.mark.sampled
@pytest.mark.parametrize("placement", [(), "x", ("x", "y")], ids=str)
@pytest.mark.parametrize("spec", [P(), P("y")], ids=str)
@pytest.mark.parametrize("name", PLACING)
def test_placing_a_value_in_a_body_changes_no_result(name, spec, placement):
    """Each device of a split axis holds its part already; without resources it is JAX's affair."""
    with square() as m:
        sharding = NamedSharding(m, spec)

        def body(v):
            return PLACING[name](v * 2, sharding)

        assert_doubles(xmap(body, I, I, axis_resources={"i": placement}))


def test_resharding_a_value_in_a_body_changes_no_result():
    m = jax_mesh("explicit")
    with jax.set_mesh(m):
        assert_doubles(over_x(lambda v: jax.sharding.reshard(v * 2, NamedSharding(m, P("y")))))
