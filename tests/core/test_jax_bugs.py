"""Bugs of JAX that the package goes around, in plain JAX.

A test that fails here says that a JAX has mended one: the function of the package that it names can go once that JAX is
the oldest one supported.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse
from jax.sharding import PartitionSpec as P

bug_of_jax = pytest.mark.xfail(strict=True, raises=(AssertionError, NotImplementedError, TypeError, ValueError))


def over_i(body, x):
    return np.asarray(jax.jit(jax.vmap(body, axis_name="i"))(x))


def numbers(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@bug_of_jax
def test_psum_scatter_under_a_vmap_of_a_later_dimension():
    """``_jax.patches._batch_scatter``"""
    x = numbers(4, 4, 4, 4, 4)
    out = over_i(lambda u: jax.vmap(lambda z: lax.psum_scatter(z, "i"), in_axes=1)(u), x)
    np.testing.assert_allclose(out, x.sum(0), rtol=1e-5)


@bug_of_jax
def test_all_to_all_in_groups_under_a_vmap():
    """``_jax.patches._batch_exchange``"""
    exchange = lambda z: lax.all_to_all(z, "i", 0, 0, axis_index_groups=[[0, 1], [2, 3]])
    over_i(lambda u: jax.vmap(exchange)(u), numbers(4, 3, 2))


@bug_of_jax
def test_ppermute_over_the_axis_of_a_vmap_and_another_one():
    """``_jax.patches._batch_own_permutation``"""
    x = numbers(4, 3)
    out = over_i(lambda u: jax.vmap(lambda z: lax.ppermute(z, ("k", "i"), [(0, 1)]), axis_name="k")(u), x)
    expected = np.zeros_like(x)
    expected[1, 0] = x[0, 0]
    np.testing.assert_array_equal(out, expected)


@bug_of_jax
def test_pbroadcast_over_the_axis_of_a_vmap():
    """``_jax.patches._batch_own_broadcast``"""
    np.testing.assert_array_equal(over_i(lambda v: lax.pbroadcast(v, "i", 1), numbers(4)), numbers(4)[[1] * 4])


@bug_of_jax
def test_the_gradient_of_a_sparse_product_in_a_typed_shard_map():
    """``_jax.local_operations._needs_plain_types``, and ``_jax.untyped`` for it"""
    matrix = sparse.BCOO.fromdense(jnp.eye(3))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "x")
    product = lambda v: jax.vmap(lambda row: (matrix @ row).sum())(v)
    mapped = jax.shard_map(
        lambda v: lax.pcast(product(v), "x", to="varying"), mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )
    slope = jax.jit(jax.grad(lambda v: mapped(v).sum()))(numbers(8, 3))
    np.testing.assert_array_equal(slope, np.ones((8, 3)))
