"""Pytree classes whose auxiliary data says how large their arrays are: as ``jax.vmap``, or refused in words."""

import itertools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from placements import mesh42

from xmap_compat import xmap

MATRICES = np.stack([np.diag(row) for row in np.arange(1, 33, dtype=np.float32).reshape(8, 4)])


@jax.tree_util.register_pytree_with_keys_class
class Padded:
    """A vector of ``shape``, of which ``data`` holds the first elements."""

    def __init__(self, data, shape):
        self.data, self.shape = data, shape

    dtype = property(lambda self: self.data.dtype)

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("data"), self.data)], self.shape

    @classmethod
    def tree_unflatten(cls, shape, children):
        return cls(*children, shape)

    def used(self):
        return jnp.zeros(self.shape).at[..., : self.data.shape[-1]].set(self.data)


@jax.tree_util.register_pytree_node_class
class Boxed:
    """An array whose shape is that of what it holds."""

    def __init__(self, data):
        self.data = data

    shape, dtype = property(lambda self: self.data.shape), property(lambda self: self.data.dtype)
    tree_flatten, tree_unflatten = (
        lambda self: ([self.data], None),
        classmethod(lambda cls, _, leaves: cls(*leaves)),
    )

    def used(self):
        return self.data * 2


@jax.tree_util.register_pytree_node_class
class Layer:
    """Sizes of one element, and no shape, as modules of neural networks have them."""

    def __init__(self, data, sizes):
        self.data, self.sizes = data, sizes

    tree_flatten, tree_unflatten = (
        lambda self: ([self.data], self.sizes),
        classmethod(lambda cls, s, ls: cls(*ls, s)),
    )

    def used(self):
        return self.data.reshape(*self.data.shape[: -len(self.sizes)], -1)


class Pair(NamedTuple):
    first: jax.Array
    second: object


# For each class: one element from a diagonal matrix; all elements, with their dimension in front; what is done with it.
KINDS = {
    "BCOO": (
        lambda m: sparse.BCOO.fromdense(m, nse=4),
        lambda ms: sparse.BCOO.fromdense(ms, n_batch=1, nse=4),
    ),
    "BCSR": (
        lambda m: sparse.BCSR.fromdense(m, nse=4),
        lambda ms: sparse.BCSR.fromdense(ms, n_batch=1, nse=4),
    ),
    "Padded": (
        lambda m: Padded(jnp.diagonal(m), (6,)),
        lambda ms: Padded(np.diagonal(ms, 0, 1, 2).copy(), (8, 6)),
    ),
    "Boxed": (lambda m: Boxed(m), lambda ms: Boxed(ms)),
    "Layer": (lambda m: Layer(m, (4, 4)), lambda ms: Layer(ms, (4, 4))),
}
HOLD_A_SHAPE = {"BCOO", "BCSR", "Padded"}
PLACES = {  # how a container stands among others: a tree around it, how it is taken out, and its path
    "alone": (lambda c, s: c, lambda t: t, ""),
    "in a dict": (lambda c, s: {"a": s, "c": c}, lambda t: t["c"], "['c']"),
    "in a named tuple": (lambda c, s: Pair(s, c), lambda t: t.second, ".second"),
}
CELLS = pytest.mark.parametrize(
    ("kind", "place", "on"),
    [(k, p, r) for (k, p), r in zip(itertools.product(KINDS, PLACES), itertools.cycle([(), "x"]))],
)


def used(container):
    return container.used() if hasattr(container, "used") else container.todense()


def same(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-6)


def refusal(kind, path, where):
    return pytest.raises(
        TypeError,
        match=rf"^{re.escape(path)} is a {kind}, which holds a shape .*{where}.* its arrays",
    )


@CELLS
def test_as_an_argument(kind, place, on):
    one, many = KINDS[kind]
    around, out, path = PLACES[place]

    def body(tree, v):
        return used(out(tree)).sum() * v

    scalars = np.arange(8, dtype=np.float32)
    with mesh42():
        whole = around(one(MATRICES[0]), np.float32(2))
        unmapped = xmap(body, ({}, ["i"]), ["i"], axis_resources={"i": on})(whole, scalars)
        np.testing.assert_allclose(unmapped, body(whole, scalars))
        mapped, tree = (
            xmap(body, (["i", ...], ["i"]), ["i"], axis_resources={"i": on}),
            around(many(MATRICES), scalars),
        )
        if kind in HOLD_A_SHAPE:
            with refusal(kind, f"args[0]{path}", "in_axes"):
                mapped(tree, scalars)
        else:
            np.testing.assert_allclose(mapped(tree, scalars), jax.vmap(body)(tree, scalars))


@CELLS
def test_as_a_result(kind, place, on):
    one, _ = KINDS[kind]
    around, out, path = PLACES[place]

    def body(matrix):
        return around(one(matrix), matrix.sum())

    with mesh42():
        same(
            xmap(lambda m, v: body(m), ({}, ["i"]), {}, axis_resources={"i": on})(
                MATRICES[0], np.ones(8)
            ),
            body(MATRICES[0]),
        )
        mapped = xmap(body, ["i", ...], ["i", ...], axis_resources={"i": on})
        if kind in HOLD_A_SHAPE:
            with refusal(kind, f"result{path}", "out_axes"):
                mapped(MATRICES)
        else:
            got, want = mapped(MATRICES), jax.vmap(body)(MATRICES)
            same(got, want)
            np.testing.assert_allclose(used(out(got)), used(out(want)))


def test_the_arrays_of_a_sparse_matrix_are_passed_and_returned():
    def body(m, v):
        return (lambda b: (b.data, b.indices, b @ v))(sparse.BCOO.fromdense(m, nse=4))

    data, indices, product = xmap(body, (["i", ...], {}), ["i", ...])(
        MATRICES, np.ones(4, np.float32)
    )
    matrices = sparse.BCOO((data, indices), shape=MATRICES.shape)
    np.testing.assert_array_equal(matrices.todense(), MATRICES)
    apply = xmap(
        lambda d, k, v: sparse.BCOO((d, k), shape=(4, 4)) @ v,
        (["i", ...], ["i", ...], {}),
        ["i", ...],
    )
    np.testing.assert_array_equal(apply(data, indices, np.ones(4, np.float32)), product)
