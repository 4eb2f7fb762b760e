"""Every collective in a written program, over one axis and over two in either order, on devices, in vmaps and on both.

The proof of a source takes helpers for the collectives that they stand for: only running them shows what they compute.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.special import logsumexp
from test_source import normal, plan_of, run, source_of
from test_source_flagships import check_values_and_derivatives, first, second

from xmap_compat import pargmax, pargmin, pdot, xmap
from xmap_compat.lax import pgather

SIZES = {"a": 8, "b": 4}
X = normal(8, 4, 32, 6)
CELLS = {
    "a in a vmap": ("a", {}),
    "a on some devices": ("a", {"a": "y"}),
    "a on all devices, the minor ones first": ("a", {"a": ("y", "x")}),
    "both in vmaps": (("a", "b"), {}),
    "both on devices": (("a", "b"), {"a": "y", "b": "x"}),
    "the second on devices": (("b", "a"), {"a": "x"}),
    "parts of both on devices": (("b", "a"), {"a": "x", "b": "y"}),
}


def waves(*shape):
    return jnp.cos(jnp.arange(float(math.prod(shape)))).reshape(shape)


def bodies(n):
    """Functions over axes of an array ``[32, 6]`` in each element."""
    names = n if isinstance(n, tuple) else (n,)
    s = math.prod(SIZES[name] for name in names)
    front, back, turned = (*names, 0), (1, *names), [(7 * k + 3) % s for k in range(s)]
    blocks = lambda x, at: jnp.concatenate([x[:2] * k for k in range(s)], at)
    rows = lambda x, at: jnp.stack([x[:2] * k for k in range(s)], at)
    return {
        "all_gather": lambda x: lax.all_gather(x, n)[:, :2, :1].sum(0) * x.sum(),
        "all_gather, axis 1": lambda x: waves(6, s) * lax.all_gather(x[0], axis_name=n, axis=1),
        "all_gather, axis -1": lambda x: waves(6, s) * lax.all_gather(x[0], n, axis=-1),
        "all_gather, tiled": lambda x: waves(2, 3 * s) * lax.all_gather(x[:2, :3], n, axis=1, tiled=True),
        "ppermute": lambda x: lax.ppermute(x, n, [(k, (k + 5) % s) for k in range(s)]),
        "ppermute, in part": lambda x: lax.ppermute(x, n, perm=[(k, k + 1) for k in range(s - 1)]),
        "ppermute of a tree": lambda x: lax.ppermute({"a": x, "b": x[0]}, n, [(0, 3), (2, 1)])["a"] * 2,
        "ppermute, irregular": lambda x: lax.ppermute(x, axis_name=n, perm=[(k, turned[k]) for k in range(s) if k % 3]),
        "pshuffle": lambda x: lax.pshuffle(x, n, turned),
        "pbroadcast": lambda x: lax.pbroadcast(x, n, 2),
        "psum_scatter": lambda x: lax.psum_scatter(x[:s], n) * x[0],
        "psum_scatter, tiled": lambda x: lax.psum_scatter(x.T, axis_name=n, scatter_dimension=1, tiled=True) * x[0, 0],
        "all_to_all, to the back": lambda x: lax.all_to_all(rows(x, 0)[:, 0], n, 0, 1) * waves(6, s),
        "all_to_all, to the front": lambda x: lax.all_to_all(rows(x, 1), n, 1, 0)[0] * waves(2, 6),
        "all_to_all": lambda x: lax.all_to_all(rows(x, 0), axis_name=n, split_axis=0, concat_axis=0),
        "all_to_all, tiled, to the back": lambda x: lax.all_to_all(blocks(x, 0), n, 0, 1, tiled=True),
        "all_to_all, tiled": lambda x: lax.all_to_all(blocks(x, 0), n, 0, 0, tiled=True),
        "all_to_all, tiled, to the front": lambda x: lax.all_to_all(blocks(x, 0).T, n, 1, 0, tiled=True),
        "pswapaxes": lambda x: lax.pswapaxes(rows(x, 0), n, 0),
        "pswapaxes, axis 1": lambda x: lax.pswapaxes(rows(x, 1), axis_name=n, axis=1),
        "pdot": lambda x: pdot(x, x[0], n),
        "pdot of positions": lambda x: pdot(x, x[:, :2], axis_name=n, pos_contract=((0,), (-2,))),
        "pdot in batches": lambda x: pdot(x, x * 2, n, ((), ()), pos_batch=((0,), (0,)))[:4],
        "pgather": lambda x: pgather(x, jnp.arange(3) * 5, n) * x.sum(),
        "pgather of positions": lambda x: pgather(x, jnp.arange(7) * 5, (*names, 1)) * x.sum(),
        "pargmax": lambda x: x * pargmax(x[0], n),
        "pargmin": lambda x: x * pargmin(x[0], axis_name=n),
        "pmax": lambda x: x * lax.pmax(x, axis_name=n),
        "pmin with ties": lambda x: x * lax.pmin(jnp.round(x), n),
        "pmax of a tree": lambda x: x * lax.pmax({"a": x, "b": jnp.round(2 * x)}, n)["b"],
        "max and positions": lambda x: x * jnp.max(jnp.round(x), axis=front),
        "min and positions": lambda x: x * jnp.min(x, axis=back)[:, None],
        "a method": lambda x: x * x.max(axis=(*names, -1))[:, None],
        "logsumexp": lambda x: x * logsumexp(x, n),
        "logsumexp and positions": lambda x: x * logsumexp(x, axis=back)[:, None],
        "softmax": lambda x: jax.nn.softmax(x, axis=n),
        "softmax and the first position": lambda x: jax.nn.softmax(x[:6] * 3, axis=front),
        "softmax and the second position": lambda x: jax.nn.softmax(x[:6] * 3, axis=back),
        "log_softmax and positions": lambda x: jax.nn.log_softmax(x[:6], axis=back),
    }


# What is refused, with a reason: the proof does not see how axes and positions are merged, or indices of several axes.
REFUSED = {"pgather", "pgather of positions", "pargmax", "pargmin"}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", bodies("a"))
def test_a_collective_computes_what_it_computes_without_resources(name, cell):
    names, resources = CELLS[cell]
    axes = (["a", "b", ...], ["a", "b", ...])
    try:
        text = plan_of(bodies(names)[name], *axes, resources, (X,)).source(run=False)
    except NotImplementedError:
        assert name in REFUSED and (resources or isinstance(names, tuple))
        return
    orders = [] if "JAX cannot differentiate" in text else [first, second]
    check_values_and_derivatives(run(text), xmap(bodies(names)[name], *axes), (X,), orders)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("extremum", [lax.pmax, lax.pmin, jnp.max, jnp.min], ids=lambda f: f.__name__)
def test_an_extremum_keeps_nan(extremum, cell):
    """Of several devices XLA may lose it (tests/core/test_jax_bugs.py)."""
    names, resources = CELLS[cell]
    x = np.where(np.arange(96) % 41 == 3, np.nan, normal(96)).reshape(8, 4, 3).astype(np.float32)
    kept = run(source_of(lambda v: extremum(v, names), ["a", "b", ...], ["a", "b", ...], resources, (x,)))(x)
    numpys = {"a": 0, "b": 1}
    over = tuple(numpys[n] for n in (names if isinstance(names, tuple) else (names,)))
    reduced = (np.max if "max" in extremum.__name__ else np.min)(x, over, keepdims=True)
    np.testing.assert_array_equal(kept, np.broadcast_to(reduced, x.shape))
