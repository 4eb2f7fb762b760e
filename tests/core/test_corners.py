"""Where several mechanisms of the core meet: loops of several axes, unmapped values, transformations between xmaps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xmap_compat import SerialLoop, serial_loop, xmap

PLACEMENTS = [{}, {"i": "x"}, {"i": "y", "j": "x"}, {"i": ("y", "x")}]
over_placements = pytest.mark.parametrize("resources", PLACEMENTS, ids=str)
ROWS, COLUMNS = np.arange(8, dtype=np.float32), np.arange(4, dtype=np.float32)


def test_a_callback_runs_in_the_loops_of_its_own_value_only():
    seen = []

    def body(u, v):
        jax.debug.callback(lambda x: seen.append(float(x)), u)
        return u * v

    loops = {"i": SerialLoop(4), "j": SerialLoop(2)}
    out = xmap(body, (["i"], ["j"]), ["i", "j"], axis_resources=loops)(ROWS, COLUMNS)
    jax.effects_barrier()
    np.testing.assert_array_equal(out, np.outer(ROWS, COLUMNS))
    assert sorted(seen) == ROWS.tolist()


def test_loops_are_nested_in_the_order_given():
    x = np.arange(48, dtype=np.float32).reshape(12, 4)
    with serial_loop("m", 2), serial_loop("l", 3), serial_loop("k", 2):
        for resources in ({"i": ("m", "l"), "j": "k"}, {"j": "m", "i": ("l", "k")}):
            out = xmap(lambda v, i: v * 2 + i, ({0: "i", 1: "j"}, ["i"]), ["j", "i"], axis_resources=resources)
            np.testing.assert_array_equal(out(x, x[:, 0]), (x * 2 + x[:, :1]).T)


@over_placements
def test_unmapped_values_are_permuted_over_several_axes(resources, mesh42):
    perm = [(3, 30), (31, 0), (5, 5), (8, 17)]
    expected = np.zeros(32, np.float32)
    expected[[d for _, d in perm]] = 7
    with mesh42:
        out = xmap(
            lambda u, v, c: lax.ppermute(c, ("i", "j"), perm),
            (["i"], ["j"], {}),
            ["i", "j"],
            axis_resources=resources,
        )(ROWS, COLUMNS, np.float32(7))
    np.testing.assert_array_equal(out, expected.reshape(8, 4))


@pytest.mark.parametrize("at", [0, 1])
def test_a_vmap_between_nested_xmaps_over_mesh_axes(at, mesh42):
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    inner = xmap(lambda w: w - lax.psum(w, "j"), ["j"], ["j"], axis_resources={"j": "y"})
    batch = rows if at == 0 else rows.T
    body = lambda v: jax.vmap(inner, at, at)(v * batch)
    outer = xmap(body, ["i"], ["i", ...], axis_resources={"i": "x"})
    with mesh42:
        out = outer(ROWS)
    scaled = ROWS[:, None, None] * rows
    expected = scaled - scaled.sum(2, keepdims=True)
    np.testing.assert_allclose(out, expected if at == 0 else expected.transpose(0, 2, 1))


@jax.custom_vjp
def gathered(x):
    return lax.all_gather(x, "i")


gathered.defvjp(lambda x: (gathered(x), None), lambda _, ct: (lax.psum_scatter(ct, "i"),))


@over_placements
def test_a_backward_rule_that_scatters_the_sum_of_a_cotangent(resources, mesh42):
    placed = {k: v for k, v in resources.items() if k == "i"}
    with mesh42:
        total = xmap(lambda x, w: jnp.sum(gathered(x) * w), (["i"], {}), {}, axis_resources=placed)
        gradient = jax.grad(total)(ROWS, ROWS[::-1].copy())
    np.testing.assert_allclose(gradient, ROWS[::-1])


@over_placements
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_all_implementations_are_gathered(impl, resources, mesh42):
    keys = jax.random.split(jax.random.key(1, impl=impl), 8)
    placed = {k: v for k, v in resources.items() if k == "i"}
    with mesh42:
        out = xmap(lambda k: lax.all_gather(k, "i"), ["i"], {}, axis_resources=placed)(keys)
    assert out.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(out), jax.random.key_data(keys))


@over_placements
def test_a_root_that_only_its_solver_makes_vary(resources, mesh42):
    placed = {k: v for k, v in resources.items() if k == "i"}
    solve = lambda f, guess: guess + lax.axis_index("i")
    find = lambda c: lax.custom_root(lambda x: x - c, c, solve, lambda g, y: y)
    with mesh42:
        out = xmap(find, {}, ["i"], axis_sizes={"i": 8}, axis_resources=placed)(np.float32(2))
    np.testing.assert_allclose(out, ROWS + 2)


@jax.custom_vjp
def weighted_total(x, c):
    return lax.psum(x * c, "i")


def _weighted_total_bwd(saved, ct):
    x, c = saved
    return ct * c, lax.psum(ct * x, "i")


weighted_total.defvjp(lambda x, c: (weighted_total(x, c), (x, c)), _weighted_total_bwd)


@over_placements
def test_a_rule_that_sums_in_both_directions(resources, mesh42):
    """The forward rule sums x, and the backward rule what it makes for a weight that does not vary."""
    placed = {k: v for k, v in resources.items() if k == "i"}
    with mesh42:
        mapped = xmap(weighted_total, (["i"], {}), {}, axis_resources=placed)
        of_x, of_c = jax.grad(mapped, argnums=(0, 1))(ROWS, np.float32(3))
    np.testing.assert_allclose(of_x, np.full(8, 3.0))
    np.testing.assert_allclose(of_c, ROWS.sum())
