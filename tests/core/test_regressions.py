"""Programs that once gave a wrong number, another number under other resources, or an exception of JAX's own.

Each is compared with the positional program, under every placement of its axis: eight elements over the 4x2
``mesh42``.  The last tests are programs that plain ``vmap`` gets wrong and xmap got right.
"""

import functools

import comparing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tables import expressions

from xmap_compat import Mesh, SerialLoop, xmap

N = 8
PLACEMENTS = {
    "none": {},
    "part": {"a": "x"},
    "full": {"a": ("x", "y")},
    "reversed": {"a": ("y", "x")},
}
LOOPS = {"loop": {"a": SerialLoop(2)}, "mesh_and_loop": {"a": ("y", SerialLoop(2))}}


def over(placements):
    """Each of the placements; where a test has other parameters too, some of all combinations are quick."""
    by_resources = pytest.mark.parametrize("resources", placements.values(), ids=placements)
    return lambda test: pytest.mark.sampled(by_resources(test))


over_placements, over_all = over(PLACEMENTS), over(PLACEMENTS | LOOPS)


def numbers(*shape):
    return np.random.RandomState(len(shape)).randn(*shape).astype(np.float32)


assert_close = functools.partial(comparing.assert_close, atol=1e-4)


def weighted_sum(tree):
    """A loss whose cotangents differ from element to element."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        factors = 1 + jnp.arange(leaf.size).reshape(leaf.shape)
        total += jnp.sum(jnp.sin(leaf) * factors)
    return total


def gradient(f, argnums=0):
    return jax.grad(lambda *args: weighted_sum(f(*args)), argnums)


# ------------------------------------------------------------------ arguments of collectives


LITERALS = expressions(
    """
all_gather: lax.all_gather(2.5, "a").sum()
pmax: lax.pmax(3, "a")
pmin: lax.pmin(2.5, "a")
pmean: lax.pmean(2.5, "a")
psum: lax.psum(2.5, "a")
ppermute: lax.ppermute(2.5, "a", [(i, i) for i in range(N)])
psum_scatter: lax.psum_scatter(np.ones(N, np.float32), "a")
max: jnp.max(3.0, axis="a")
sum: jnp.sum(3.0, axis="a")
""",
    "",
    globals(),
)
OF_LITERALS = {"all_gather": 2.5 * N, "psum": 2.5 * N, "psum_scatter": N, "sum": 3 * N}
OF_LITERALS |= {"pmax": 3, "max": 3} | dict.fromkeys(["pmin", "pmean", "ppermute"], 2.5)


@over_placements
@pytest.mark.parametrize("name", LITERALS)
def test_collectives_of_literals(mesh42, resources, name):
    def body(v):
        return LITERALS[name](), v * LITERALS[name]()

    with mesh42:
        f = xmap(body, ["a"], (["a"], ["a"]), axis_resources=resources)
        actual = f(np.ones(N, np.float32))
    expected = np.full(N, OF_LITERALS[name])
    assert_close(actual, (expected, expected))


@over_placements
def test_a_permutation_of_some_elements_gives_zeros_to_the_others(mesh42, resources):
    """As in ``shard_map``, where ``lax.pshuffle`` does not know how many elements the axis has."""
    f = xmap(
        lambda v: lax.pshuffle(v, "a", [1, 0]), ["a", ...], ["a", ...], axis_resources=resources
    )
    x = numbers(N, 3)
    with mesh42:
        assert_close(f(x), np.concatenate([x[[1, 0]], np.zeros_like(x[2:])]))


@pytest.mark.parametrize("shape", [(0,), (N, 0)], ids=str)
@pytest.mark.parametrize("resources", [{"a": "x"}, {"a": ("y", "x")}], ids=str)
def test_of_empty_arguments_there_may_be_full_results(mesh42, resources, shape):
    """Also where they are the same for all elements: jax 0.10.2 could not tell, as all came through one barrier."""

    def body(v):
        return (jnp.arange(5), v.sum() + 1, lax.psum(v.sum(), "a"), jnp.full(2, 3))

    f = xmap(body, ["a", ...], ([...], ["a"], [], ["a", ...]), axis_resources=resources)
    with mesh42:
        results = f(np.ones(shape, np.float32))
    full = np.full((shape[0], 2), 3)
    assert_close(results, (np.arange(5), np.ones(shape[0]), np.zeros(()), full))


# ---------------------------------------------------------------- around and inside others


def user_mesh():
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


BODIES = expressions(
    """
product: v @ w
collective: v + lax.psum(v @ w, "a")
scan: lax.scan(lambda c, _: (c @ w, c.sum()), v, None, length=2)[0]
cond: lax.cond(v.sum() > 0, lambda: v @ w, lambda: v)
""",
    "v, w",
    globals(),
)
BY_ROWS = expressions(
    """
product: x @ w
collective: x + (x @ w).sum(0)
scan: x @ w @ w
cond: jnp.where(x.sum(-1, keepdims=True) > 0, x @ w, x)
""",
    "x, w",
    globals(),
)


@over_placements
@pytest.mark.parametrize("name", BODIES)
def test_inside_shard_map(mesh42, resources, name):
    """Operands that vary over different axes of the user's own shard_map meet in the body."""
    x = numbers(N, 4, 3)
    w = numbers(3, 3)
    on_device = xmap(BODIES[name], (["a", ...], {}), ["a", ...], axis_resources=resources)

    specs = {"mesh": user_mesh(), "in_specs": (P(None, "x"), P()), "out_specs": P(None, "x")}

    def rows(x, w):
        return jnp.stack([BY_ROWS[name](x[:, k], w) for k in range(4)], 1)

    with mesh42:
        f = jax.shard_map(on_device_rows(on_device), **specs)
        assert_close(jax.jit(f)(x, w), rows(x, w))
        slopes = jax.jit(gradient(f, (0, 1)))(x, w)
    assert_close(slopes, gradient(rows, (0, 1))(x, w), 1e-3)


def on_device_rows(f):
    """Each device has one row: without the dimension of one element."""
    return lambda x, w: f(x[:, 0], w)[:, None]


def test_a_nested_call_reaches_an_outer_axis_with_the_name_of_a_mesh_axis():
    x = numbers(N, 4, 3)

    def outer(v):
        def inner(u):
            return lax.psum(u, ("a", "b")) + lax.axis_index("a")

        return xmap(inner, ["b", ...], [...], axis_resources={"b": "a"})(v)

    with Mesh(np.array(jax.devices()).reshape(4, 2), ("b", "a")):
        actual = xmap(outer, ["a", ...], ["a", ...], axis_resources={"a": "b"})(x)
    assert_close(actual, x.sum((0, 1)) + np.arange(N, dtype=np.float32)[:, None])


@pytest.mark.parametrize(
    "named", [lambda v: v + lax.axis_index("v"), lambda v: lax.psum(v, ("a", "v"))]
)
def test_the_axis_of_a_vmap_around_is_reached_or_refused(mesh42, named):
    x = numbers(N, 4, 3)
    positional = [x + np.arange(4.0)[None, :, None], np.broadcast_to(x.sum((0, 1)), x.shape)]
    around = functools.partial(jax.vmap, in_axes=1, out_axes=1, axis_name="v")
    actual = around(xmap(named, ["a", ...], ["a", ...]))(x)
    assert any(np.allclose(actual, expected, atol=1e-4) for expected in positional)
    with mesh42, pytest.raises(NotImplementedError, match="`v`"):
        around(xmap(named, ["a", ...], ["a", ...], axis_resources={"a": "x"}))(x)


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (7 * ct * jnp.cos(x),), optimize_remat=True)


@over_all
@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.checkpoint, jax.jit], ids=["plain", "checkpoint", "jit"]
)
def test_custom_rules_that_optimize_rematerialization(mesh42, resources, wrap):
    x = numbers(N, 3)
    with mesh42:
        f = xmap(wrap(lambda v: sine(v) * v), ["a", ...], ["a", ...], axis_resources=resources)
        actual = jax.grad(lambda x: f(x).sum())(x)
    assert_close(actual, np.sin(x) + 7 * x * np.cos(x))


# ------------------------------------------------------------------------------- caches


def test_a_jitted_helper_follows_the_sizes_of_axes():
    helper = jax.jit(lambda v: lax.psum(1, "a") * v + lax.axis_index("a"))
    for size in (4, 8, 4):
        assert_close(
            xmap(helper, ["a"], ["a"])(np.ones(size, np.float32)),
            size + np.arange(size, dtype=np.float32),
        )


def test_a_jitted_helper_is_kept_once(mesh42):
    """A function that the user jitted is one function of the compiled program, however often it is called."""
    helper = jax.jit(lambda v: jnp.sin(v) * jnp.cos(v))

    def named(v):
        for _ in range(10):
            v = helper(v) + lax.pmean(v, "a")
        return v

    f = xmap(named, ["a", ...], ["a", ...], axis_resources={"a": "x"})
    with mesh42:
        text = f.lower(numbers(N, 3)).as_text()
    assert 1 <= text.count("stablehlo.sine") < 10


# ------------------------------------------------------------------------------- values

NOT_A_NUMBER = np.array([1, 2, 3, 0, 2, np.nan, 0, 1], np.float32)
EXTREMES = {"pmax": lax.pmax, "pmin": lax.pmin}


@over_placements
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_keep_nan(mesh42, resources, name):
    f = xmap(lambda v: EXTREMES[name](v, "a"), ["a"], [], axis_resources=resources)
    with mesh42:
        assert np.isnan(f(NOT_A_NUMBER)) and np.isnan(f(NOT_A_NUMBER[::-1]))


@over_placements
def test_typed_keys_are_exchanged(mesh42, resources):
    def exchanged(key):
        moved = lax.ppermute(key, "a", [(k, (k + 1) % N) for k in range(N)])
        return moved, lax.all_gather(key, "a")

    keys = jax.random.split(jax.random.key(3), N)
    with mesh42:
        results = xmap(exchanged, ["a"], (["a"], [...]), axis_resources=resources)(keys)
    for found, expected in zip(results, (jnp.roll(keys, 1), keys), strict=True):
        np.testing.assert_array_equal(*map(jax.random.key_data, (found, expected)))


# --------------------------------------------------------------------------------------- keys


@over_all
@pytest.mark.parametrize("impl", ["unsafe_rbg", "rbg", "threefry2x32"])
def test_keys_of_each_element(mesh42, resources, impl):
    """They are those of a Python loop, whatever generator makes them."""

    def draw(key, k):
        first, second = jax.random.split(jax.random.fold_in(key, k))
        return jax.random.bits(first, (2,)) ^ jax.random.bits(second, (2,))

    key = jax.random.key(1, impl=impl)
    with mesh42:
        f = xmap(draw, ({}, ["a"]), ["a", ...], axis_resources=resources)
        actual = f(key, np.arange(N))
    np.testing.assert_array_equal(actual, np.stack([draw(key, k) for k in range(N)]))
