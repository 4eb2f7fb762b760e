"""Collectives under a ``jax.vmap`` inside a body: every collective, every ``in_axes`` and ``out_axes``.

Over the xmap's axes the oracle is a loop over the slices, in the same body.  Over the vmap's own axis, alone and beside
one of the xmap's, it is the xmapped function in which both axes are the xmap's.  Batching rules apply while a body is
traced, before anything is placed: resources matter in the last tests only.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tables import expressions

from xmap_compat import xmap

SIZE_I, SIZE_J, SIZE_K, BATCH = 4, 2, 3, 2
GROUPS = [[0, 2], [3, 1]]
ROTATION, PARTIAL = [(0, 1), (1, 3), (3, 2), (2, 0)], [(0, 1), (2, 0)]


def scatters():
    for at in range(3):
        of_group = f"lax.slice_in_dim(z, 0, 2, axis={at})"
        for z, groups in [("z", "None"), (of_group, "GROUPS")]:
            options = f"scatter_dimension={at}, axis_index_groups={groups}"
            yield f"lax.psum_scatter(z, 'i', tiled=True, {options})"
            yield f"lax.psum_scatter({z}, 'i', {options})"


def gathers():
    for at in range(3):
        for groups in ("None", "GROUPS"):
            for tiled in (True, False):
                options = f"axis={at}, tiled={tiled}, axis_index_groups={groups}"
                yield f"lax.all_gather(z, 'i', {options})"
        yield f"lax.all_gather(z, ('j', 'i'), axis={at})"


def exchanges():
    for split in range(3):
        for concat in range(3):
            for tiled in (True, False):
                yield f"lax.all_to_all(z, 'i', {split}, {concat}, tiled={tiled})"


def reductions():
    for name in ("psum", "pmax", "pmin"):
        for axes in ("i", ("j", "i"), ("i", 1)):
            yield f"lax.{name}(z, {axes!r})"
        yield f"lax.{name}(z, 'i', axis_index_groups=GROUPS)"
    yield "lax.pmean(z, ('i', 'j'))"


MOVES = [
    "lax.ppermute(z, 'i', ROTATION)",
    "lax.ppermute(z, 'i', PARTIAL)",
    "lax.ppermute(z, ('j', 'i'), [(0, 5), (5, 0), (1, 2)])",
    "lax.pshuffle(z, 'i', [2, 0, 3, 1])",
    "lax.pbroadcast(z, 'i', 2)",
    "lax.axis_index('i') + z",
]
CONTRACTIONS = [
    "lax.pdot(z, z, 'i', pos_contract=((1,), (0,)))",
    "lax.pdot(z, jnp.sin(z), ('i', 'j'), pos_contract=((1,), (1,)), pos_batch=((0,), (0,)))",
    "lax.pgather(z, jnp.array([1, 3, 0]), ('i', 1))",
    "jnp.sum(z, axis=('i', 1))",
    "jax.nn.softmax(z, axis='i')",
]


def functions(texts):
    return [eval(f"lambda z: {text}", globals()) for text in texts]


FAMILIES = {
    "psum_scatter": functions(scatters()),
    "all_gather": functions(gathers()),
    "all_to_all": functions(exchanges()),
    "reductions": functions(reductions()),
    "moves": functions(MOVES),
    "contractions": functions(CONTRACTIONS),
}


def operand(batch_at):
    cube = np.random.default_rng(3).normal(size=(SIZE_I, SIZE_J, 4, 4, 4)).astype(np.float32)
    return np.stack([cube, np.cos(3 * cube)], 2 + batch_at)


def everywhere(collective, u, batch_at):
    """The collective of each slice, and under a vmap with every ``out_axes``, moved to the front."""
    looped = jnp.stack(
        [collective(lax.index_in_dim(u, k, batch_at, keepdims=False)) for k in range(BATCH)]
    )
    return looped, [
        jnp.moveaxis(jax.vmap(collective, batch_at, out)(u), out, 0) for out in range(looped.ndim)
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("batch_at", range(4))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_vmapped_collective_equals_a_loop_over_the_slices(family, batch_at):
    collectives = FAMILIES[family]

    def body(u):
        return [everywhere(collective, u, batch_at) for collective in collectives]

    for looped, vmapped in xmap(body, ["i", "j", ...], ["i", "j", ...])(operand(batch_at)):
        for result in vmapped:
            np.testing.assert_allclose(result, looped, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["psum_scatter", "all_gather"])
def test_gradients_of_vmapped_collectives_equal_those_of_a_loop(family):
    batch_at = 2

    def slopes(collective, u):
        def loss(out):
            return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape))

        def looped(u):
            return loss(everywhere(collective, u, batch_at)[0])

        return jax.grad(looped)(u), jax.grad(lambda u: loss(jax.vmap(collective, batch_at)(u)))(u)

    def body(u):
        return [slopes(collective, u) for collective in FAMILIES[family]]

    for expected, result in xmap(body, ["i", "j", ...], ["i", "j", ...])(operand(batch_at)):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------- the vmap's own axis


def over_bound_axis(names):
    """Collectives that JAX (to 0.12) can vmap over the vmap's own axis."""
    count = SIZE_K if names == "k" else SIZE_K * SIZE_I
    yield f"lax.psum(z, {names!r})"
    yield f"lax.pmax(z, {names!r})"
    yield f"lax.axis_index({names!r}) + z"
    yield f"lax.all_to_all(z[:{count}], {names!r}, 0, 1)"
    yield f"lax.all_to_all(z[:, :{count}], {names!r}, 1, 0, tiled=True)"
    yield f"lax.pdot(z, z, {names!r}, pos_contract=((1,), (0,)))"
    if names != "k":
        return
    yield "lax.ppermute(z, 'k', [(0, 1), (1, 0), (2, 2)])"
    yield "lax.pshuffle(z, 'k', [1, 0, 2])"
    for at, tiled in ((0, False), (1, True)):
        part = f"lax.slice_in_dim(z, 0, {count}, axis={at})"
        yield f"lax.all_gather(z, 'k', axis={at}, tiled={tiled})"
        yield f"lax.psum_scatter({part}, 'k', scatter_dimension={at}, tiled={tiled})"


@pytest.mark.parametrize("names", ["k", ("k", "i"), ("i", "k")], ids=str)
def test_a_collective_over_the_axis_of_a_vmap_equals_one_over_an_axis_of_the_xmap(names):
    collectives = functions(over_bound_axis(names))
    x = np.random.default_rng(4).normal(size=(SIZE_I, SIZE_K, 12, 12)).astype(np.float32)

    def together(z):
        return [collective(z) for collective in collectives]

    expected = xmap(together, ["i", "k", ...], ["i", "k", ...])(x)
    for at in range(3):
        vmapped = xmap(
            lambda u, at=at: jax.vmap(together, at, axis_name="k")(u), ["i", ...], ["i", ...]
        )
        for one, other in zip(vmapped(np.moveaxis(x, 1, 1 + at)), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


REFUSED = expressions(
    """
all_gather: lax.all_gather(z, ("k", "i"))
reduce_scatter: lax.psum_scatter(z, ("i", "k"), tiled=True)
ppermute: lax.ppermute(z, ("k", "i"), [(0, 1)])
pbroadcast: lax.pbroadcast(z, "k", 1)
all_to_all: lax.all_to_all(z[:2], "i", 0, 0, axis_index_groups=GROUPS)
""",
    "z",
    globals(),
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_jax_gets_wrong_is_refused_in_words(case):
    x = np.ones((SIZE_I, SIZE_K, 12), np.float32)
    with pytest.raises(
        NotImplementedError, match=f"^{case} over .* Give the mapped dimension a name in in_axes"
    ):
        xmap(jax.vmap(REFUSED[case], axis_name="k"), ["i", ...], ["i", ...])(x)


# ----------------------------------------------------------------------------- placements


def scattered_columns(u):
    return jax.vmap(lambda z: lax.psum_scatter(z, "i"), in_axes=1)(u)


@pytest.mark.parametrize("resources", [{}, {"i": "x"}, {"i": ("y", "x")}], ids=str)
@pytest.mark.parametrize("shape", [(8, 8, 8, 8), (8, 8, 3, 2, 2)], ids=str)
def test_a_vmapped_psum_scatter_is_right_under_every_assignment(shape, resources, mesh42):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    with mesh42:
        result = xmap(scattered_columns, ["i", ...], ["i", ...], axis_resources=resources)(x)
    np.testing.assert_allclose(result, x.sum(0), rtol=1e-4, atol=1e-5)


def test_what_jax_made_of_a_jitted_function_outside_is_not_used_inside():
    """JAX's cache would give a body the jitted function that JAX's own rule has vmapped, with another result."""
    scatter = jax.jit(lambda z: lax.psum_scatter(z, "i"))

    def columns(u):
        return jax.vmap(scatter, in_axes=1)(u)

    x = np.random.default_rng(0).normal(size=(4, 4, 4, 4, 4)).astype(np.float32)
    jax.vmap(columns, axis_name="i")(x)
    np.testing.assert_allclose(
        xmap(columns, ["i", ...], ["i", ...])(x), x.sum(0), rtol=1e-4, atol=1e-5
    )
