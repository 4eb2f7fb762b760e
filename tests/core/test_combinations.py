"""Two features at once: transformations between nested xmaps, several loops, collectives in rules of derivatives.

Each feature has its tests elsewhere; what is here needs two of them at once to go wrong.  Oracles are positional
functions under ``jax.vmap`` and NumPy.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_same
from equations import equations
from jax import lax
from placements import IN_AXES, PLACEMENTS, arguments
from tables import expressions

from xmap_compat import SerialLoop, serial_loop, xmap

pytestmark = pytest.mark.usefixtures("end_a_hang")


def numbers(*shape):
    return np.cos(np.arange(math.prod(shape), dtype=np.float32)).reshape(shape)


# ----------------------------------------------------- transformations between nested xmaps


def centred(t, s):
    """Over an axis k: what varies over it, and what does not."""
    return jnp.sin(t * s) - lax.pmean(t, "k") + lax.axis_index("k"), lax.psum(t * s, "k") + s


def positional_centred(t, s):
    index = jnp.arange(t.shape[0], dtype=t.dtype).reshape(-1, *(1,) * (t.ndim - 1))
    return jnp.sin(t * s) - t.mean(0, keepdims=True) + index, (t * s).sum(0) + s


def loss(f, t, s):
    return sum(v.sum() for v in f(t, s))


def pulled(f, t, s):
    outs, pull = jax.vjp(f, t, s)
    return outs, pull((outs[0] * 2, outs[1] + 1))


BETWEEN = expressions(
    """
vmapped last: jax.vmap(f, (-1, None), (1, 0))(jnp.stack([t, 2 * t, t - 1], -1), s)
vmapped twice: jax.vmap(jax.vmap(f, (0, None)), (None, 0), 1)(jnp.stack([t, 2 * t]), jnp.stack([s, -s]))
vmapped gradient: jax.vmap(jax.grad(partial(loss, f), (0, 1)), (0, None))(jnp.stack([t, 2 * t]), s)
pulled: pulled(f, t, s)
linearized: jax.linearize(f, t, s)[1](t - 1, s)
checkpointed: jax.grad(lambda t: jax.checkpoint(lambda t: f(jnp.sin(t), s)[1])(t).sum())(t)
scanned: lax.scan(f, t, jnp.stack([s, s * 2]))
branched: lax.cond(s.sum() > 0, lambda t: f(t, s), lambda t: f(-t, s + 1), t)
jitted: [jax.jit(f)(t, s), jax.jit(f)(2 * t, s)]
""",
    "f, t, s",
    globals(),
)


def every_use(f, t, s):
    return {name: use(f, t, s) for name, use in BETWEEN.items()}


@pytest.mark.parametrize(
    "outer,inner", [({"a": "x"}, {"k": "y"}), ({}, {"k": ("y", "x")}), ({"a": "y"}, {})], ids=str
)
def test_transformations_between_nested_xmaps(outer, inner, mesh42):
    t = numbers(4, 8, 2)
    s = numbers(4, 2)

    def body(t, s):
        mapped = xmap(centred, (["k", ...], {}), (["k", ...], {}), axis_resources=inner)
        return every_use(mapped, t, s)

    with mesh42:
        result = xmap(body, ["a", ...], ["a", ...], axis_resources=outer)(t, s)
    vmapped = jax.vmap(partial(every_use, positional_centred))
    assert_same(result, jax.jit(vmapped)(t, s))


# --------------------------------------------------- collectives in rules of derivatives


@pytest.mark.parametrize("placement", ["vectorized", "a:x", "a:xy", "a:x,b:y"])
def test_a_rule_that_gathers_forward_and_scatters_backward(placement, mesh42):
    """As in sequence parallelism; the cotangent of the gathered array arrives once, and is not counted again."""
    a, b, resources = PLACEMENTS[placement]

    @jax.custom_vjp
    def gather(v):
        return lax.all_gather(v, "a")

    def forward(v):
        return gather(v), None

    def backward(_, ct):
        return (lax.psum_scatter(ct, "a"),)

    def gathered(x, u, w):
        return jnp.sin(gather(x * u)).sum()

    def positional(x, u):
        return jnp.sin(x * u[:, None, None]).sum()

    gather.defvjp(forward, backward)
    x, u, w = arguments(a, b)
    mapped = xmap(gathered, IN_AXES, {0: "b"}, axis_resources=resources)
    with mesh42:
        result = jax.jit(jax.grad(lambda *args: mapped(*args).sum(), (0, 1)))(x, u, w)
    assert_same(result, jax.grad(positional, (0, 1))(x, u))


@pytest.mark.parametrize("placement", ["vectorized", "a:x", "a:x,b:y"])
def test_a_rule_may_make_a_cotangent_of_its_own(placement, mesh42):
    """As auxiliary losses do: the value passes, and each element takes what its own rule makes of the cotangent."""
    a, b, resources = PLACEMENTS[placement]
    watched = jax.custom_vjp(lambda v, t: t * 1)
    watched.defvjp(lambda v, t: (t * 1, v), lambda v, ct: (ct * v, ct))

    def body(x, u, w):
        return watched(x * u, w)

    x, u, w = arguments(a, b)
    mapped = xmap(body, IN_AXES, {}, axis_resources=resources)

    def weighted(x, w):
        return (mapped(x, u, w) * numbers(3)).sum()

    with mesh42:
        dx, dw = jax.jit(jax.grad(weighted, (0, 1)))(x, w)
    np.testing.assert_allclose(dx, numbers(3) * x * u[:, None, None] ** 2, rtol=1e-5)
    np.testing.assert_allclose(dw, numbers(3), rtol=1e-5)


# --------------------------------------------------------------------- several loops at once


def nests_of(program, primitive):
    """The lengths of the scans around each equation of a primitive, outermost first."""
    for eqn, around in equations(program):
        if eqn.primitive.name == primitive:
            yield tuple(e.params["length"] for e in around if e.primitive.name == "scan")


# What the axes lie on, and the lengths of the loops, outermost first.
LOOP_2 = SerialLoop(2)
LOOP_3 = SerialLoop(3)
LOOP_6 = SerialLoop(6)
NESTS = expressions(
    """
6 2: {"i": (LOOP_6, LOOP_2)}
2 3: {"i": ("z", "c")}
3 2: {"i": "c", "j": "z"}
2 3, on devices: {"i": ("x", "z"), "j": ("y", "c")}
2 2 6 3: {"i": ("z", LOOP_2), "j": (LOOP_6, "c")}
2 3 3 2: {"j": ("c", LOOP_2), "i": ("x", "z", LOOP_3)}
""",
    "",
    globals(),
)


@pytest.mark.parametrize("nest", NESTS)
def test_loops_nest_in_the_order_given(nest, mesh42):
    """Of one axis as listed, of several in the order of the axes; elements keep their places."""
    u = numbers(24, 2)
    v = numbers(36)

    def body(u, v):
        return jnp.sin(u * v), u + 1

    out_axes = (["j", "i", ...], ["i", ...])
    f = xmap(body, (["i", ...], ["j"]), out_axes, axis_resources=NESTS[nest]())
    with mesh42, serial_loop("z", 2), serial_loop("c", 3):
        table, column = f(u, v)
        (lengths,) = nests_of(jax.make_jaxpr(f)(u, v), "sin")
    assert lengths == tuple(map(int, nest.partition(",")[0].split()))
    np.testing.assert_allclose(table, np.sin(u * v[:, None, None]), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(column, u + 1)


# ------------------------------------------------------------------------- weak types, shared sums


@pytest.mark.parametrize("resources", [{}, {"k": "y"}], ids=str)
def test_python_scalars_stay_weak_through_nested_xmaps_and_rules(resources, mesh42):
    """Else a product with bfloat16 would be float32."""

    @jax.custom_vjp
    def scale(v, s):
        return v * s

    def backward(kept, ct):
        v, s = kept
        return ct * s, (ct * v).sum().astype(jnp.float32)

    scale.defvjp(lambda v, s: (v * s, (v, s)), backward)

    def inner(t, s):
        return (scale(t, s) * s, s + 1)

    def body(x):
        mapped = xmap(inner, (["k"], {}), (["k"], {}), axis_resources=resources)
        first, second = mapped(x, 2.0)
        slope = jax.grad(lambda x: scale(x, 3.0).sum().astype(jnp.float32))(x)
        return first, x * second, slope * second

    x = numbers(8, 4).astype(jnp.bfloat16)
    with mesh42:
        results = xmap(body, ["a", ...], ["a", ...], axis_resources={"a": "x"})(x)
    for result, expected in zip(results, (4 * x, 3 * x, 9 * jnp.ones_like(x))):
        assert result.dtype == jnp.bfloat16
        np.testing.assert_array_equal(result, expected)


def test_uses_of_one_weight_share_one_sum_in_the_staged_gradient(mesh42):
    """As where a weight is cast once by hand: cotangents are added on each device, and summed once."""

    def body(x, w):
        return (x * w).sum() + jnp.sin(x) @ w + (w * x * 2).sum()

    with mesh42:
        f = xmap(body, (["a", ...], {}), ["a"], axis_resources={"a": "x"})
        gradient = jax.make_jaxpr(jax.grad(lambda w, x: f(x, w).sum()))(numbers(3), numbers(8, 3))
    names = [eqn.primitive.name for eqn, _ in equations(gradient)]
    assert sum(name.startswith("psum") for name in names) == 1
