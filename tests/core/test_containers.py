"""Pytree classes whose auxiliary data says how large their arrays are: as ``jax.vmap``, or refused in words."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from placements import mesh42
from tables import expressions

from xmap_compat import xmap

MATRICES = np.stack([np.diag(row) for row in np.arange(1, 33, dtype=np.float32).reshape(8, 4)])
ROWS = ["i", ...]


class Padded:
    """A vector of ``shape``, of which ``data`` holds the first elements."""

    def __init__(self, data, shape):
        self.data, self.shape = data, shape

    dtype = property(lambda self: self.data.dtype)

    def used(self):
        return jnp.zeros(self.shape).at[..., : self.data.shape[-1]].set(self.data)


class Boxed:
    """An array whose shape is that of what it holds."""

    def __init__(self, data):
        self.data = data

    shape = property(lambda self: self.data.shape)
    dtype = property(lambda self: self.data.dtype)

    def used(self):
        return self.data * 2


class Layer:
    """Sizes of one element, and no shape, as modules of neural networks have them."""

    def __init__(self, data, sizes):
        self.data, self.sizes = data, sizes

    def used(self):
        return self.data.reshape(*self.data.shape[: -len(self.sizes)], -1)


jax.tree_util.register_dataclass(Padded, ["data"], ["shape"])
jax.tree_util.register_dataclass(Boxed, ["data"], [])
jax.tree_util.register_dataclass(Layer, ["data"], ["sizes"])


class Pair(NamedTuple):
    first: jax.Array
    second: object


# One element from a diagonal matrix, and all elements, with their dimension in front.
KINDS = expressions(
    """
BCOO: (sparse.BCOO.fromdense(m, nse=4), sparse.BCOO.fromdense(ms, n_batch=1, nse=4))
BCSR: (sparse.BCSR.fromdense(m, nse=4), sparse.BCSR.fromdense(ms, n_batch=1, nse=4))
Padded: (Padded(jnp.diagonal(m), (6,)), Padded(np.diagonal(ms, 0, 1, 2).copy(), (8, 6)))
Boxed: (Boxed(m), Boxed(ms))
Layer: (Layer(m, (4, 4)), Layer(ms, (4, 4)))
""",
    "m, ms=MATRICES",
    globals(),
)
HOLD_A_SHAPE = {"BCOO", "BCSR", "Padded"}
# How a container stands among others: a tree around it, how it is taken out, and its path.
PLACES = {
    "": (lambda c, s: c, lambda t: t),
    "['c']": (lambda c, s: {"a": s, "c": c}, lambda t: t["c"]),
    ".second": (lambda c, s: Pair(s, c), lambda t: t.second),
}
kinds = pytest.mark.parametrize("kind", KINDS)
places = pytest.mark.parametrize(("path", "resources"), [*zip(PLACES, [(), "x", ()])])


def used(container):
    if hasattr(container, "used"):
        return container.used()
    return container.todense()


def assert_same(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-6)


def check(kind, place, where, mapped, args, body):
    """As ``jax.vmap`` of the body, or refused if the container at a place holds a shape."""
    if kind not in HOLD_A_SHAPE:
        assert_same(mapped(*args), jax.vmap(body)(*args))
        return
    words = rf"^{re.escape(place)} is a {kind}, which holds a shape .*{where}.* its arrays"
    with pytest.raises(TypeError, match=words):
        mapped(*args)


@kinds
@places
def test_as_an_argument(kind, path, resources):
    around, out = PLACES[path]

    def body(tree, v):
        return used(out(tree)).sum() * v

    options = {"axis_resources": {"i": resources}}
    scalars = np.arange(8, dtype=np.float32)
    one, many = KINDS[kind](MATRICES[0])
    with mesh42():
        whole = around(one, np.float32(2))
        unmapped = xmap(body, ({}, ["i"]), ["i"], **options)(whole, scalars)
        np.testing.assert_allclose(unmapped, body(whole, scalars))
        mapped = xmap(body, (ROWS, ["i"]), ["i"], **options)
        args = (around(many, scalars), scalars)
        check(kind, f"args[0]{path}", "in_axes", mapped, args, body)


@kinds
@places
def test_as_a_result(kind, path, resources):
    around, _ = PLACES[path]

    def body(matrix):
        one, _ = KINDS[kind](matrix)
        return around(one, matrix.sum())

    options = {"axis_resources": {"i": resources}}
    with mesh42():
        whole = xmap(lambda m, v: body(m), ({}, ["i"]), {}, **options)(MATRICES[0], np.ones(8))
        assert_same(whole, body(MATRICES[0]))
        mapped = xmap(body, ROWS, ROWS, **options)
        check(kind, f"result{path}", "out_axes", mapped, (MATRICES,), body)


def test_the_arrays_of_a_sparse_matrix_are_passed_and_returned():
    v = np.ones(4, np.float32)

    def taken_apart(m, v):
        matrix = sparse.BCOO.fromdense(m, nse=4)
        return matrix.data, matrix.indices, matrix @ v

    def product_of(data, indices, v):
        return sparse.BCOO((data, indices), shape=(4, 4)) @ v

    data, indices, product = xmap(taken_apart, (ROWS, {}), ROWS)(MATRICES, v)
    matrices = sparse.BCOO((data, indices), shape=MATRICES.shape)
    np.testing.assert_array_equal(matrices.todense(), MATRICES)
    again = xmap(product_of, (ROWS, ROWS, {}), ROWS)(data, indices, v)
    np.testing.assert_array_equal(again, product)
