"""Kernels, libraries and services of one device in bodies, each beside the plain function.

``XMAP_COMPAT_GPU=1 python -m pytest tests/test_kernels.py`` runs them on the GPU that is there; without one, those run
that a CPU has too.
"""

import functools
import glob
import gzip

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning

from xmap_compat import Mesh, xmap

BACKEND = jax.default_backend()
gpu = pytest.mark.skipif(
    BACKEND != "gpu", reason="needs a GPU: set XMAP_COMPAT_GPU=1 where there is one"
)
PLACEMENTS = [pytest.param({}, id="vectorized"), pytest.param({"i": "x"}, id="mesh")]


def normal(*shape, dtype=jnp.float32, seed=0):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def mesh_of_one():
    return Mesh(np.array(jax.devices()[:1]), ("x",))


def mapped(fun, resources, count):
    """The function with its arguments' first dimensions named, called in a mesh of one device."""
    named = xmap(fun, (["i", ...],) * count, ["i", ...], axis_resources=resources)

    def call(*args):
        with mesh_of_one():
            return named(*args)

    return call


def total(fun):
    """A scalar, to take gradients of."""
    return lambda *args: fun(*args).astype(jnp.float32).sum()


def agree(fun, args, resources, rtol=1e-5, gradients=True):
    """Values, and gradients with regard to all arguments, beside ``jax.vmap`` of the plain function."""
    plain, named = jax.vmap(fun), mapped(fun, resources, len(args))
    as_numbers = functools.partial(np.asarray, dtype=np.float32)
    tolerance = {"rtol": rtol, "atol": rtol}
    np.testing.assert_allclose(as_numbers(named(*args)), as_numbers(plain(*args)), **tolerance)
    if not gradients:
        return
    argnums = tuple(range(len(args)))
    ours = jax.grad(total(named), argnums)(*args)
    theirs = jax.grad(total(plain), argnums)(*args)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(as_numbers(a), as_numbers(b), **tolerance)


# --------------------------------------------------------------------------------- kernels


@gpu
@pytest.mark.parametrize("resources", PLACEMENTS)
def test_attention_of_cudnn(resources):
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    args = [normal(2, 1, 64, 4, 64, dtype=jnp.bfloat16, seed=k) for k in range(3)]
    agree(attention, args, resources, rtol=2e-2)


@pytest.mark.parametrize("resources", PLACEMENTS)
def test_a_kernel_of_pallas(resources):
    """Triton's on a GPU; a CPU interprets it."""

    def kernel(x, y, out):
        out[...] = x[...] * y[...] + 1

    def scaled(x, y):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=BACKEND == "cpu")(x, y)

    agree(scaled, [normal(4, 128, seed=k) for k in range(2)], resources, gradients=False)


@pytest.mark.parametrize("resources", PLACEMENTS)
def test_ragged_products(resources):
    """Each element has groups of its own sizes."""
    sizes = np.array([[3, 5], [8, 0], [1, 7], [4, 4]], np.int32)
    rows, weights = normal(4, 8, 16), normal(4, 2, 16, 8)
    result = mapped(lax.ragged_dot, resources, 3)(rows, weights, jnp.asarray(sizes))
    by_group = np.asarray(rows)[:, None] @ np.asarray(weights)
    is_first = np.arange(8) < sizes[:, :1]
    expected = np.where(is_first[..., None], by_group[:, 0], by_group[:, 1])
    np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-4, atol=1e-4)


DECOMPOSITIONS = {
    "cholesky": lambda a: jnp.linalg.cholesky(a @ a.T + 8 * jnp.eye(8)),
    "qr": lambda a: jnp.abs(jnp.linalg.qr(a)[1]),
    "solve": lambda a: jnp.linalg.solve(a @ a.T + 8 * jnp.eye(8), a),
}


@pytest.mark.parametrize("resources", PLACEMENTS)
@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_linear_algebra(name, resources):
    agree(DECOMPOSITIONS[name], [normal(4, 8, 8)], resources, rtol=2e-3)


@pytest.mark.parametrize("resources", PLACEMENTS)
def test_random_numbers_of_the_generator_of_xla(resources):
    """Its numbers under ``jax.vmap`` are those of the first key: so the law is tested, not their values."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 4)
    draw = mapped(lambda key: jax.random.normal(key, (8,)), resources, 1)
    numbers = np.asarray(draw(keys))
    np.testing.assert_array_equal(numbers, np.asarray(draw(keys)))
    assert numbers.shape == (4, 8) and np.isfinite(numbers).all() and numbers.std() > 0.5


@pytest.mark.parametrize("resources", PLACEMENTS)
def test_functions_that_are_partitioned_by_hand(resources):
    """``jax.vmap`` has no rule for them; in a body they are their function, and their gradient is JAX's."""

    @custom_partitioning
    def doubled(x):
        return 2 * jnp.sin(x)

    def partition(mesh, args, result):
        shardings = tuple(arg.sharding for arg in args)
        return mesh, lambda x: 2 * jnp.sin(x), result.sharding, shardings

    doubled.def_partition(partition=partition, sharding_rule="a -> a")
    named = mapped(doubled, resources, 1)
    x = normal(4, 8)
    np.testing.assert_allclose(np.asarray(named(x)), 2 * np.sin(x), rtol=1e-5)


# -------------------------------------------------------------------------------- services


@pytest.mark.parametrize("resources", PLACEMENTS)
def test_a_donated_buffer_is_used_again(resources):
    with mesh_of_one():
        step = xmap(
            lambda v: v + 1, (["i", ...],), ["i", ...], axis_resources=resources, donate_argnums=0
        )
        state = jnp.zeros((8, 128))
        pointer = state.unsafe_buffer_pointer()
        result = step(state)
        assert state.is_deleted()
        np.testing.assert_array_equal(np.asarray(result), np.ones((8, 128)))
        if BACKEND == "gpu":
            assert result.unsafe_buffer_pointer() == pointer


@pytest.mark.parametrize("resources", PLACEMENTS)
def test_callbacks_see_every_element_once(resources, capfd):
    seen = []

    def body(v):
        io_callback(lambda value: seen.append(float(value)), None, v)
        jax.debug.print("element {}", v)
        return 2 * v

    result = mapped(body, resources, 1)(jnp.arange(4.0))
    jax.effects_barrier()
    np.testing.assert_array_equal(np.asarray(result), [0, 2, 4, 6])
    assert sorted(seen) == [0, 1, 2, 3]
    assert capfd.readouterr().out.count("element") == 4


def test_a_profile_names_the_function(tmp_path):
    def centred_rows(v):
        return v - lax.pmean(v, "i")

    named = mapped(centred_rows, {"i": "x"}, 1)
    x = normal(4, 8)
    named(x)
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(named(x))
    [trace] = glob.glob(f"{tmp_path}/**/*.trace.json.gz", recursive=True)
    with gzip.open(trace, "rt") as file:
        assert "centred_rows" in file.read()
