"""The advice of check is right: each one is followed here, and what it computes is compared with NumPy, or by hand."""

import functools

import jax
import jax.extend.linear_util
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import xmap_compat
from xmap_compat import xmap
from xmap_compat.legacy import removed
from xmap_compat.tools.check import arrays

X, ROWS = np.array([3.0, 1.0, 2.0], np.float32), np.arange(24, dtype=np.float32).reshape(8, 3) / 10
KEY = jax.random.key(0)
MESH = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
WHOLE, SPLIT = NamedSharding(MESH, P()), NamedSharding(MESH, P("x"))


def loss(w, row):
    """The loss of one example of a batch: reduce_axes summed its gradient over the batch."""
    return jnp.sum((row @ w - 1) ** 2)


def outside(reduce):
    """The gradient of an xmapped loss, from outside of it."""
    return jax.grad(xmap(lambda w, row: reduce(loss(w, row), "batch"), ({}, ["batch", ...]), {}))(X, ROWS)


def by_hand(total):
    """The gradient of a sum or a mean of squares, by NumPy."""
    return total(2 * (ROWS @ X - 1)[:, None] * ROWS, axis=0)


@jax.custom_vjp
def cube(x):
    return x**3


cube.defvjp(lambda x: (x**3, x), lambda x, ct: (3 * x**2 * ct,))


@jax.custom_jvp
def square(x):
    return x * x


square.defjvp(lambda primals, tangents: (primals[0] ** 2, 2 * primals[0] * tangents[0]))


def called_back():
    found = []
    jax.jit(lambda x: jax.debug.callback(found.append, x))(X)
    jax.jit(lambda x: io_callback(found.append, None, x))(X + 1)
    pure = jax.pure_callback(np.sort, jax.ShapeDtypeStruct(X.shape, X.dtype), X)
    jax.effects_barrier()
    return [*found, pure]


def concrete(x):
    return 0 if isinstance(x, jax.core.Tracer) else float(x)


def in_double(value):
    with jax.enable_x64(value):
        return jnp.zeros(1).dtype.itemsize


def wrapped():
    debug = jax.api_util.debug_info("f", np.negative, (X,), {})
    return jax.extend.linear_util.wrap_init(np.negative, debug_info=debug).call_wrapped(X)


# Of each advice of the table and its keywords: what following it gives, and what the old program gave.
def traces(x):
    try:
        jax.sharding.get_mesh()
    except ValueError:
        return 1
    return 0


FOLLOWED = {
    "jax.grad(xmap(loss, ...)): from outside it is exact": lambda: (
        [outside(lax.psum), outside(lax.pmean)],
        [by_hand(np.sum), by_hand(np.mean)],
    ),
    "static_argnums, or leave it out": lambda: (
        jax.checkpoint(lambda n, x: x * n if n > 1 else x, static_argnums=0)(2, X),
        X * 2,
    ),
    "jax.device_put": lambda: (jax.device_put(np.stack([X] * 8), SPLIT), np.stack([X] * 8)),
    "jax.jit(f).lower(*args)": lambda: ("stablehlo.sine" in jax.jit(jnp.sin).lower(X).as_text(), True),
    "xmap_compat.xmap": lambda: (
        xmap(lambda v: v / lax.psum(v, "i"), ["i"], ["i"])(X),
        X / X.sum(),
    ),
    "a jax.custom_vjp": lambda: (jax.vmap(jax.grad(cube))(X), 3 * X**2),
    "jax.custom_vjp": lambda: (jax.vmap(jax.grad(cube))(X), 3 * X**2),
    "jax.custom_jvp": lambda: (jax.vmap(jax.grad(square))(X), 2 * X),
    "jax.custom_jvp or jax.custom_vjp": lambda: (jax.vmap(jax.grad(square))(X), 2 * X),
    "jax.enable_x64(True)": lambda: (in_double(True), 8),
    "jax.enable_x64(False)": lambda: (in_double(False), 4),
    "jax.lax.with_sharding_constraint": lambda: (jax.jit(lambda x: lax.with_sharding_constraint(x, WHOLE))(X), X),
    "shardings": lambda: (jax.jit(lambda x: lax.with_sharding_constraint(x, shardings=WHOLE))(X), X),
    "in_shardings": lambda: (jax.jit(lambda x: x + 1, in_shardings=SPLIT)(ROWS), ROWS + 1),
    "out_shardings": lambda: (jax.jit(lambda x: x + 1, out_shardings=SPLIT)(ROWS), ROWS + 1),
    "jax.Array with jax.make_array_from_callback, or xmap_compat.global_array": lambda: (
        [
            jax.make_array_from_callback(ROWS.shape, SPLIT, lambda index: ROWS[index]),
            xmap_compat.global_array(ROWS, ["b", ...], {"b": "x"}, mesh=MESH),
        ],
        [ROWS, ROWS],
    ),
    "jax.sharding.NamedSharding": lambda: (jax.device_put(ROWS, SPLIT).addressable_shards[2].data, ROWS[2:3]),
    "jax.jit": lambda: (jax.jit(jnp.negative)(X), -X),
    "jax.random.permutation(key, x, independent=True)": lambda: (
        np.sort(jax.random.permutation(KEY, ROWS, independent=True), 0),
        np.sort(ROWS, 0),
    ),
    "jax.numpy.isin(x, y).ravel()": lambda: (jnp.isin(ROWS, X).ravel(), np.isin(ROWS, X).ravel()),
    "-jax.numpy.inf": lambda: (-jnp.inf, -np.inf),
    "jax.numpy.sort(x, axis=0)": lambda: (jnp.sort(ROWS[::-1], axis=0), ROWS),
    "the type as it is: jax.typeof(x)": lambda: (jax.typeof(jnp.array(X)).shape, (3,)),
    "jax.core.Tracer: what is no tracer is concrete": lambda: (
        [concrete(X[0]), jax.jit(concrete)(X[0])],
        [3.0, 0],
    ),
    "jax.lax.axis_size(name)": lambda: (xmap(lambda v: v * lax.axis_size("i"), ["i"], ["i"])(X), X * 3),
    "jax.extend.linear_util.wrap_init(f, debug_info=...)": lambda: (wrapped(), -X),
    removed.CALLBACK: lambda: (called_back(), [X, X + 1, np.sort(X)]),
    "jax.lax.fori_loop, scan or cond": lambda: (
        [lax.fori_loop(0, 3, lambda k, s: s + k, 0), lax.scan(lambda s, x: (s + x, s), 0.0, X)[0]],
        [3, X.sum()],
    ),
    "x.at[...]": lambda: (jnp.array(X).at[1:].get(), X[1:]),
    "x.at[index].set(values)": lambda: (jnp.array(X).at[1].set(9), [3, 9, 2]),
    "x.at[index].add(values)": lambda: (jnp.array(X).at[1].add(9), [3, 10, 2]),
    "x.at[index].multiply(values)": lambda: (jnp.array(X).at[0].multiply(9), [27, 1, 2]),
    "x.at[index].min(values)": lambda: (jnp.array(X).at[0].min(2), [2, 1, 2]),
    "x.at[index].max(values)": lambda: (jnp.array(X).at[1].max(2), [3, 2, 2]),
    "list(map(f, *lists)), for lists of one length": lambda: (list(map(max, [1, 5], [3, 4])), [3, 5]),
    "list(zip(*lists, strict=True))": lambda: (list(zip([1, 2], [3, 4], strict=True)), [[1, 3], [2, 4]]),
    "zip(*pairs)": lambda: (list(zip(*[(1, 2), (3, 4)])), [[1, 3], [2, 4]]),
    "slices of a list": lambda: ([[*X][:1], [*X][1:]], [[3], [1, 2]]),
    "functools.wraps": lambda: (len(functools.wraps(jnp.sin)(lambda x: x).__name__), len("sin")),
    "jax.sharding.get_mesh raises while JAX traces": lambda: (jax.jit(traces)(X) + traces(X), 1),
    "the second argument alone": lambda: (jax.jit(lambda x, y: y)(X, -X), -X),
    "the array as the first argument": lambda: (jnp.clip(X, max=2), [2, 1, 2]),
    "min": lambda: ([jnp.clip(X, min=2), jnp.array(X).clip(min=2)], [[3, 2, 2]] * 2),
    "max": lambda: ([jnp.clip(X, max=2), jnp.array(X).clip(max=2)], [[2, 1, 2]] * 2),
    "x.addressable_data(0)": lambda: (jnp.array(X).addressable_data(0), X),
    "x.addressable_shards": lambda: ([s.data for s in jax.device_put(ROWS, SPLIT).addressable_shards], ROWS[:, None]),
    "numpy.asarray(x)": lambda: (np.asarray(jnp.array(X)), X),
    "jax.device_put(x, device)": lambda: (jax.device_put(X, jax.devices()[1]), X),
}
# There is nothing to compute.
WORDS = {"code for each shape", removed.INSIDE, "jax.clear_caches", "jax.ffi.register_ffi_target"}
WORDS |= {row.now for row in removed.KEYWORDS if row.now.startswith("nothing: ")}
# What install() restores under another spelling: tests/install has these.
WORDS |= {"0.0", "-0.0", "shape", "method"}
WORDS |= {row.now for row in removed.KEYWORDS if row.now.startswith("vmap_method=")}


def test_every_advice_is_followed():
    rows = [row.now for row in removed.TABLE if row.kind in (removed.ADAPTER, removed.REFUSED)]
    rows += [row.now for row in removed.KEYWORDS]
    assert {*rows, *arrays.ATTRIBUTES.values(), *arrays.METHOD_KEYWORDS.values()} == FOLLOWED.keys() | WORDS


@pytest.mark.parametrize("advice", FOLLOWED)
def test_following_an_advice_gives_what_the_old_program_gave(advice):
    found, truth = FOLLOWED[advice]()
    several = isinstance(found, list)
    for one, other in zip(found if several else [found], truth if several else [truth], strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), np.asarray(other, np.float64), rtol=1e-5)


def test_a_sum_of_gradients_in_the_body_is_no_substitute_for_reduce_axes():
    """The transpose of psum in a body is psum: a loss that is summed in it has the gradient times the batch already."""
    summed = jax.grad(lambda w, row: lax.psum(loss(w, row), "batch"))
    inside = xmap(lambda w, row: lax.psum(summed(w, row), "batch"), ({}, ["batch", ...]), {})(X, ROWS)
    np.testing.assert_allclose(inside, 8 * by_hand(np.sum), rtol=1e-5)
