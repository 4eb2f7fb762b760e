"""`mapped`, which `leave` puts beside an edited program, against `xmap`: values, gradients, placements, meshes."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from placements import IN_AXES, OUT_AXES, PLACEMENTS, arguments, mesh42

import xmap_compat
from xmap_compat import xmap
from xmap_compat.tools.leave import collectives
from xmap_compat.tools.leave.mapped import SerialLoop, mapped


def plain_mesh():
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


def pairs(resources, names=("a", "b")):
    """What collectives name in the place of each axis."""
    across = {name: resources.get(name, ()) for name in names}
    across = {name: (axes,) if isinstance(axes, str) else axes for name, axes in across.items()}
    return {name: (*axes, f"{name}_local") if axes else (name,) for name, axes in across.items()}


def with_collectives(axes):
    """Sums, extrema, indices and sizes over axes, in control flow too."""

    def body(x, u, w):
        mean = lax.pmean(x * w, axes["a"])
        top = lax.pmax(lax.stop_gradient(x), axes["a"] + axes["b"])
        total = lax.fori_loop(0, 2, lambda _, c: c + lax.psum(c * 0.1, axes["b"]), x)
        index = lax.axis_index(axes["a"]) * 1.0
        return (x - mean) * u + top + total + index / lax.axis_size(axes["a"])

    return body


def with_gradient(axes):
    """A gradient that is taken in the body, as data-parallel training does."""

    def body(x, u, w):
        gradient = jax.grad(lambda w: jnp.sum((w * x - u) ** 2))(w)
        return x - lax.pmean(lax.pmean(gradient, axes["a"]), axes["b"])

    return body


def programs(body, placement):
    """The body under xmap and under `mapped`, each with its mesh, and their arguments."""
    a, b, resources = PLACEMENTS[placement]
    ours = xmap(body({"a": ("a",), "b": ("b",)}), IN_AXES, OUT_AXES, axis_resources=resources)
    theirs = mapped(body(pairs(resources)), IN_AXES, OUT_AXES, axis_resources=resources)
    return ours, theirs, arguments(a, b)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("body", [with_collectives, with_gradient])
def test_values_are_those_of_xmap(body, placement):
    ours, theirs, args = programs(body, placement)
    with mesh42():
        wanted = ours(*args)
    with jax.set_mesh(plain_mesh()):
        np.testing.assert_allclose(theirs(*args), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gradients_from_outside_are_those_of_xmap(placement):
    ours, theirs, args = programs(with_collectives, placement)

    def gradients(fun):
        return jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(fun(*args))), argnums=(0, 1, 2)))

    with mesh42():
        wanted = gradients(ours)(*args)
    with jax.set_mesh(plain_mesh()):
        found = gradients(theirs)(*args)
    for ours_of, theirs_of in zip(wanted, found, strict=True):
        np.testing.assert_allclose(theirs_of, ours_of, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axes, resources", [("i", {}), (("x", "i_local"), {"i": "x"})])
def test_the_collectives_beside_it_are_those_over_all_elements(axes, resources):
    def body(v):
        moved = (
            collectives.all_to_all(v, axes, 0, 0),
            collectives.all_to_all(v, axes, 0, 0, tiled=True),
        )
        moved += (
            collectives.ppermute(v, axes, [(k, k + 1) for k in range(7)]),
            v - collectives.max_over(v, axes),
        )
        moved += (collectives.ppermute(v, axes, [(k, 7 - k) for k in range(8)]),)
        moved += (collectives.all_gather(v, axes, tiled=True),)
        return (
            *moved,
            collectives.psum_scatter(v, axes),
            collectives.psum_scatter(v, axes, tiled=True),
        )

    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    shifted = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
    sums = x.sum(0)
    wanted = (
        x.T,
        x.T,
        shifted,
        x - x.max(0),
        x[::-1],
        np.tile(x.reshape(-1), (8, 1)),
        sums,
        sums[:, None],
    )
    with jax.set_mesh(plain_mesh()):
        found = mapped(body, ["i", ...], (["i", ...],) * 8, axis_resources=resources)(x)
    for each, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(each, expected, rtol=1e-5, atol=1e-6)


SERIAL = {
    "alone": {"a": SerialLoop(2)},
    "beside a mesh axis": {"a": ("x", SerialLoop(2))},
    "around a mesh axis": {"a": SerialLoop(4), "b": "y"},
}


@pytest.mark.parametrize("resources", SERIAL.values(), ids=SERIAL)
def test_loops_compute_each_element(resources):
    x, u, w = arguments(8, 4)
    over_b = pairs(resources)["b"]
    fun = mapped(
        lambda x, u, w: x * u + lax.psum(w * x, over_b), IN_AXES, OUT_AXES, axis_resources=resources
    )
    with jax.set_mesh(plain_mesh()):
        found = fun(x, u, w)
    np.testing.assert_allclose(
        found, x * u[:, None, None] + (w * x).sum(1, keepdims=True), rtol=1e-5
    )


def test_one_text_serves_one_element_and_several():
    fun = mapped(
        lambda v: v / lax.psum(v, ("x", "i_local")), ["i"], ["i"], axis_resources={"i": "x"}
    )
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
        total = lax.psum(row, ("x", "i_local"))
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
        lambda v: v * lax.axis_index(("x", "i_local")),
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
    fun = mapped(
        lambda v: v - lax.pmean(v, ("x", "i_local")), ["i"], ["i"], axis_resources={"i": "x"}
    )
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
        lambda v: lax.psum(v, "i_local"),
        8,
        "name the axis in out_axes",
    ),
    "by its index": (
        lambda v: lax.psum(v, ("x", "i_local")) + lax.axis_index("x"),
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
