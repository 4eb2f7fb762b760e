"""Two features at once: transformations between nested xmaps, several loops, collectives in rules of derivatives.

Each feature has its tests elsewhere; what is here needs two of them at once to go wrong.  Oracles are positional
functions under ``jax.vmap`` and NumPy.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_same
from equations import equations
from jax import lax
from placements import IN_AXES, PLACEMENTS, arguments

from xmap_compat import SerialLoop, pdot, serial_loop, xmap

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


def vmapped_last(f, t, s):
    return jax.vmap(f, (-1, None), (1, 0))(jnp.stack([t, 2 * t, t - 1], -1), s)


def vmapped_twice(f, t, s):
    return jax.vmap(jax.vmap(f, (0, None)), (None, 0), 1)(
        jnp.stack([t, 2 * t, t - 1]), jnp.stack([s, -s])
    )


def vmapped_gradient(f, t, s):
    def loss(t, s):
        return sum(v.sum() for v in f(t, s))

    return jax.vmap(jax.grad(loss, (0, 1)), (0, None))(jnp.stack([t, 2 * t]), s)


def pulled(f, t, s):
    outs, pull = jax.vjp(f, t, s)
    return outs, pull((outs[0] * 2, outs[1] + 1))


def linearized(f, t, s):
    return jax.linearize(f, t, s)[1](t - 1, s)


def checkpointed(f, t, s):
    return jax.grad(lambda t: jax.checkpoint(lambda t: f(jnp.sin(t), s)[1])(t).sum())(t)


def scanned(f, t, s):
    return lax.scan(lambda carry, r: (f(carry, r)[0], f(carry, r)[1]), t, jnp.stack([s, s * 2]))


def branched(f, t, s):
    return lax.cond(s.sum() > 0, lambda t: f(t, s), lambda t: f(-t, s + 1), t)


def jitted(f, t, s):
    g = jax.jit(f)
    return g(t, s), g(2 * t, s)


BETWEEN = (
    vmapped_last,
    vmapped_twice,
    vmapped_gradient,
    pulled,
    linearized,
    checkpointed,
    scanned,
    branched,
    jitted,
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "outer,inner",
    [
        ({}, {}),
        ({"a": "x"}, {"k": "y"}),
        ({}, {"k": ("y", "x")}),
        ({"a": "y"}, {"k": "x"}),
        ({"a": "y"}, {}),
    ],
    ids=str,
)
def test_transformations_between_nested_xmaps(outer, inner, mesh42):
    t, s = numbers(4, 8, 2), numbers(4, 2)

    def every_use(t, s):
        mapped = xmap(centred, (["k", ...], {}), (["k", ...], {}), axis_resources=inner)
        return {use.__name__: use(mapped, t, s) for use in BETWEEN}

    with mesh42:
        result = xmap(every_use, ["a", ...], ["a", ...], axis_resources=outer)(t, s)
    expected = jax.jit(
        jax.vmap(lambda t, s: {use.__name__: use(positional_centred, t, s) for use in BETWEEN})
    )(t, s)
    assert_same(result, expected)


# --------------------------------------------------- collectives in rules of derivatives


def ruled(function, residuals, backward):
    with_rule = jax.custom_vjp(function)
    with_rule.defvjp(lambda v, t: (function(v, t), residuals(v, t)), backward)
    return with_rule


def keep(v, t):
    return v, t


def summing(axes):
    """What a rule may or may not do by itself to the cotangent of what does not vary."""
    return lambda x: lax.psum(x, axes) if axes else x


def both_axes_rule(total):
    """A sum over both axes, and the square of another one over a."""

    def function(v, t):
        return lax.psum(v * t, ("a", "b")), lax.psum(v, "a") * t, t**2

    def residuals(v, t):
        return v, t, lax.psum(v, "a")

    def backward(r, ct):
        v, t, summed = r
        of_sum = total(ct[0] * v)
        # The second is the same for all elements of a: to be counted over b alone, by whoever sums.
        return ct[0] * t + ct[1] * t, of_sum + ct[1] * summed + 2 * t * ct[2]

    return ruled(function, residuals, backward)


def contraction_rule(total):
    return ruled(
        lambda v, t: pdot(v, v, "a", ((0,), (0,))) * t.sum(),
        lambda v, t: (v, t, pdot(v, v, "a", ((0,), (0,)))),
        lambda r, ct: (2 * ct * r[0] * r[1].sum(), ct * r[2] * jnp.ones_like(r[1])),
    )


def function_of(rule):
    """The function of a rule without it, to be differentiated by JAX."""
    return rule(summing(())).__wrapped__


FORWARD_SUMS = {
    "both axes, left to us": (both_axes_rule, ()),
    "both axes, by the rule": (both_axes_rule, ("a", "b")),
    "both axes, one by the rule": (both_axes_rule, "b"),
    "a contraction": (contraction_rule, ()),
}


def loss_of(function):
    def loss(x, u, w):
        results = function(x * u, w)
        return sum(
            jnp.sin(v).sum() for v in (results if isinstance(results, tuple) else (results,))
        )

    return loss


def losses_and_gradients(functions, mapped):
    def one(function, args):
        def total(*args):
            return (mapped(loss_of(function))(*args)).sum()

        return jax.value_and_grad(total, (0, 1, 2))(*args)

    return jax.jit(
        lambda *args: {name: one(function, args) for name, function in functions.items()}
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("placement", ["vectorized", "a:x", "a:yx", "a:x,b:y", "b:x"])
def test_sums_in_forward_rules(placement, mesh42):
    a, b, resources = PLACEMENTS[placement]
    rules = {name: make(summing(axes)) for name, (make, axes) in FORWARD_SUMS.items()}
    plain = {name: function_of(make) for name, (make, _) in FORWARD_SUMS.items()}

    # Of axes that the loss does not vary over its one value is repeated.
    def mapped(f):
        return xmap(f, IN_AXES, {0: "a", 1: "b"}, axis_resources=resources)

    def over_b(f):
        return jax.vmap(f, (0, None, None), axis_name="b")

    with mesh42:
        result = losses_and_gradients(rules, mapped)(*arguments(a, b))

    def vmapped(f):
        return jax.vmap(over_b(f), (0, 0, None), axis_name="a")

    assert_same(result, losses_and_gradients(plain, vmapped)(*arguments(a, b)))


@pytest.mark.parametrize("placement", ["vectorized", "a:x", "a:xy", "a:x,b:y"])
def test_a_rule_that_gathers_forward_and_scatters_backward(placement, mesh42):
    """As in sequence parallelism; the cotangent of the gathered array arrives once, and is not counted again."""
    a, b, resources = PLACEMENTS[placement]
    gather = jax.custom_vjp(lambda v: lax.all_gather(v, "a"))
    gather.defvjp(
        lambda v: (lax.all_gather(v, "a"), None), lambda _, ct: (lax.psum_scatter(ct, "a"),)
    )

    def loss(f):
        return lambda x, u, w: jnp.sin(f(x * u)).sum()

    x, u, w = arguments(a, b)
    with mesh42:
        mapped = xmap(loss(gather), IN_AXES, {0: "b"}, axis_resources=resources)
        result = jax.jit(jax.grad(lambda *args: mapped(*args).sum(), (0, 1)))(x, u, w)
    assert_same(result, jax.grad(lambda x, u: jnp.sin(x * u[:, None, None]).sum(), (0, 1))(x, u))


@pytest.mark.parametrize("placement", ["vectorized", "a:x", "a:x,b:y"])
def test_a_rule_may_make_a_cotangent_of_its_own(placement, mesh42):
    """As auxiliary losses do: the value passes, and each element takes what its own rule makes of the cotangent."""
    a, b, resources = PLACEMENTS[placement]
    watched = ruled(lambda v, t: t * 1, keep, lambda r, ct: ((ct * r[0]), ct))
    x, u, w = arguments(a, b)
    with mesh42:
        mapped = xmap(lambda x, u, w: watched(x * u, w), IN_AXES, {}, axis_resources=resources)
        dx, dw = jax.jit(jax.grad(lambda x, w: (mapped(x, u, w) * numbers(3)).sum(), (0, 1)))(x, w)
    np.testing.assert_allclose(dx, numbers(3) * x * u[:, None, None] ** 2, rtol=1e-5)
    np.testing.assert_allclose(dw, numbers(3), rtol=1e-5)


# --------------------------------------------------------------------- several loops at once


def nests_of(program, primitive):
    """The lengths of the scans around each equation of a primitive, outermost first."""
    for eqn, around in equations(program):
        if eqn.primitive.name == primitive:
            yield tuple(e.params["length"] for e in around if e.primitive.name == "scan")


NESTS = [
    ({"i": (SerialLoop(4), SerialLoop(2))}, (4, 2)),
    ({"i": (SerialLoop(2), SerialLoop(3))}, (2, 3)),
    ({"i": ("z", "c")}, (2, 3)),
    ({"i": ("c", "z")}, (3, 2)),
    ({"i": "z", "j": "c"}, (2, 3)),
    ({"i": "c", "j": "z"}, (3, 2)),
    ({"i": ("x", "z"), "j": ("y", "c")}, (2, 3)),
    ({"i": ("z", SerialLoop(2)), "j": (SerialLoop(6), "c")}, (2, 2, 6, 3)),
    ({"j": ("c", SerialLoop(2)), "i": ("x", "z", SerialLoop(3))}, (2, 3, 3, 2)),
]


@pytest.mark.parametrize("resources,lengths", NESTS, ids=str)
def test_loops_nest_in_the_order_given(resources, lengths, mesh42):
    """Of one axis as listed, of several in the order of the axes; elements keep their places."""
    u, v = numbers(24, 2), numbers(36)
    f = xmap(
        lambda u, v: (jnp.sin(u * v), u + 1),
        (["i", ...], ["j"]),
        (["j", "i", ...], ["i", ...]),
        axis_resources=resources,
    )
    with mesh42, serial_loop("z", 2), serial_loop("c", 3):
        table, column = f(u, v)
        assert list(nests_of(jax.make_jaxpr(f)(u, v), "sin")) == [lengths]
    np.testing.assert_allclose(table, np.sin(u * v[:, None, None]), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(column, u + 1)


def test_axes_may_have_the_same_loops_in_other_orders():
    """Each axis is cut in its own order, whichever loop is the outer one."""
    u, v = numbers(12, 2), numbers(18)
    resources = {"i": ("z", "c"), "j": ("c", "z")}
    f = xmap(
        lambda u, v: (u + 1, v * 2),
        (["i", ...], ["j"]),
        ([None, "i"], ["j"]),
        axis_resources=resources,
    )
    with serial_loop("z", 2), serial_loop("c", 3):
        first, second = f(u, v)
    np.testing.assert_array_equal(first, u.T + 1)
    np.testing.assert_array_equal(second, v * 2)


# ------------------------------------------------------------------- one function, many calls


def test_fresh_xmaps_with_other_axis_sizes_are_told_apart():
    def count():
        return lax.psum(1, "i") + lax.axis_index("i")

    sizes = [3, 5, 3]
    results = [xmap(count, (), ["i"], axis_sizes={"i": n})() for n in sizes]
    for n, result in zip(sizes, results):
        np.testing.assert_array_equal(result, n + np.arange(n))


# ------------------------------------------------------------------------- rules that hide names


def test_a_root_varies_over_an_axis_that_only_its_equation_names(mesh42):
    """Newton's method for ``r ** 2 == 2 + index``, from one unmapped guess."""

    def root(guess):
        def f(r):
            return r**2 - 2 - lax.axis_index("i")

        def newton(f, r):
            return lax.fori_loop(0, 30, lambda _, r: r - f(r) / (2 * r), r)

        return lax.custom_root(f, guess, newton, lambda g, y: y / g(jnp.float32(1)))

    for resources in ({}, {"i": "x"}):
        with mesh42:
            found = xmap(root, {}, ["i"], axis_sizes={"i": 8}, axis_resources=resources)(
                jnp.float32(1)
            )
        np.testing.assert_allclose(found, np.sqrt(2 + np.arange(8)), rtol=1e-6)


def test_a_jitted_helper_of_a_rule_and_of_the_body_is_evaluated_for_each(mesh42):
    """Cotangents vary over what the body knows nothing of."""
    helper = jax.jit(
        lambda v: lax.scan(lambda carry, t: (carry + jnp.sin(t), None), jnp.float32(0), v)[0] * v
    )
    function = jax.custom_vjp(lambda v: helper(v) + helper(2 * v))
    function.defvjp(
        lambda v: (helper(v) + helper(2 * v), v), lambda v, ct: (helper(ct) + helper(ct * v),)
    )
    x = numbers(8, 3)

    def gradient(f):
        return jax.grad(lambda x: (f(x) * numbers(8, 3)).sum())(x)

    for resources in ({}, {"a": "x"}):
        with mesh42:
            result = gradient(
                xmap(
                    lambda v: function(v) + helper(v),
                    ["a", ...],
                    ["a", ...],
                    axis_resources=resources,
                )
            )
        assert_same(result, gradient(jax.vmap(lambda v: function(v) + helper(v))))


@pytest.mark.parametrize("resources", [{}, {"k": "y"}], ids=str)
def test_python_scalars_stay_weak_through_nested_xmaps_and_rules(resources, mesh42):
    """Else a product with bfloat16 would be float32."""
    scale = jax.custom_vjp(lambda v, s: v * s)
    scale.defvjp(
        lambda v, s: (v * s, (v, s)),
        lambda r, ct: (ct * r[1], (ct * r[0]).sum().astype(jnp.float32)),
    )

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
    for result, factor in zip(results, (4 * x, 3 * x, 9 * jnp.ones_like(x))):
        assert result.dtype == jnp.bfloat16
        np.testing.assert_array_equal(result, factor)


def test_uses_of_one_weight_share_one_sum_in_the_staged_gradient(mesh42):
    """As where a weight is cast once by hand: cotangents are added on each device, and summed once."""

    def body(x, w):
        return (x * w).sum() + jnp.sin(x) @ w + (w * x * 2).sum()

    with mesh42:
        f = xmap(body, (["a", ...], {}), ["a"], axis_resources={"a": "x"})
        gradient = jax.make_jaxpr(jax.grad(lambda w, x: f(x, w).sum()))(numbers(3), numbers(8, 3))
    names = [eqn.primitive.name for eqn, _ in equations(gradient)]
    assert sum(name.startswith("psum") for name in names) == 1


# ------------------------------------------------------------------ branches that devices take differently

SIGNS = np.array([1, -2, 3, -4], np.float32)


# ------------------------------------------------------------------------ results of calls in other places


@pytest.mark.parametrize("rows", [SerialLoop(2), "x"], ids=str)
def test_a_call_with_a_result_that_does_not_vary_over_a_loop(rows, mesh42):
    call = jax.custom_jvp(lambda v, w: (v * w.sum(), 2 * w))
    call.defjvps(None, None)
    w = numbers(3)
    fun = xmap(lambda v, w: call(v, w), (["i"], [...]), (["i"], [...]), axis_resources={"i": rows})
    with mesh42:
        scaled, double = fun(SIGNS, w)
    np.testing.assert_allclose(scaled, SIGNS * w.sum(), rtol=1e-6)
    np.testing.assert_allclose(double, 2 * w, rtol=1e-6)


@pytest.mark.parametrize("resources", [{}, {"i": "x"}, {"j": "y"}, {"i": "x", "j": "y"}], ids=str)
def test_the_element_that_is_broadcast_over_two_axes(resources, mesh42):
    def body(v, w):
        return (lax.pbroadcast(v, ("i", "j"), 7), lax.pbroadcast(w, ("j", "i"), 7))

    x, w = numbers(4, 6, 2), numbers(6)
    with mesh42:
        of_both, of_one = xmap(
            body, (["i", "j", ...], ["j"]), ([...], []), axis_resources=resources
        )(x, w)
    np.testing.assert_array_equal(of_both, x[1, 1])  # 7 = 1 * 6 + 1
    np.testing.assert_array_equal(of_one, w[1])  # 7 = 1 * 4 + 3
