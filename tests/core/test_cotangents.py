"""The worked example of ``core/structured/cotangents.py``: two devices, one weight, rules that sum and others.

The expected numbers are those of the positional function, worked out by hand.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xmap_compat import Mesh, SerialLoop, xmap

X, W = np.array([1.0, 2.0], np.float32), np.float32(3.0)


def with_rule(fun, bwd):
    function = jax.custom_vjp(fun)
    function.defvjp(lambda x, w: (fun(x, w), (x, w)), bwd)
    return function


def product(x, w):
    return x * w


def total(x, w):
    return lax.psum(x * w, "i")


def both(x, w):
    return x * w, w * w


def bent_total(x, w):
    return 2 * lax.psum(x * w, "i")


def rule_of_a_bent_collective(residuals, ct):
    x, w = residuals
    return 2 * lax.psum(ct, "i") * w, 2 * lax.psum(ct * x, "i")


def rule_that_leaves_the_sum(residuals, ct):
    x, w = residuals
    return ct * w, ct * x


def rule_that_sums(residuals, ct):
    x, w = residuals
    return ct * w, lax.psum(ct * x, "i")


def rule_of_a_collective(residuals, ct):
    x, w = residuals
    return lax.psum(ct, "i") * w, lax.psum(ct * x, "i")


def rule_of_both(residuals, cts):
    (x, w), (ct, du) = residuals, cts
    return ct * w, ct * x + du * 2 * w


# The function with its rule, out_axes, and the gradients of the sum of all results for x and w.
EXAMPLES = {
    "a rule that does not sum": (with_rule(product, rule_that_leaves_the_sum), ["i"], [3.0, 3.0], 3.0),
    "a rule that sums": (with_rule(product, rule_that_sums), ["i"], [3.0, 3.0], 3.0),
    "the cotangent of a collective": (with_rule(total, rule_of_a_collective), [], [3.0, 3.0], 3.0),
    "the cotangent of what a collective made": (with_rule(bent_total, rule_of_a_bent_collective), [], [6.0, 6.0], 6.0),
    "a cotangent that exists once": (with_rule(both, rule_of_both), (["i"], []), [3.0, 3.0], 9.0),
}
PLACEMENTS = {
    "no resources": {},
    "an element on each device": {"i": "x"},
    "a serial loop": {"i": SerialLoop(2)},
}


# A looped axis cannot be named in a collective.
WITH_COLLECTIVES = ("a rule that sums", "the cotangent of a collective", "the cotangent of what a collective made")
CASES = [(e, p) for e in EXAMPLES for p in PLACEMENTS if not (p == "a serial loop" and e in WITH_COLLECTIVES)]


@pytest.mark.parametrize(("example", "placement"), CASES)
def test_the_worked_example(example, placement):
    function, out_axes, gradient_of_x, gradient_of_w = EXAMPLES[example]
    mapped = xmap(function, (["i"], []), out_axes, axis_resources=PLACEMENTS[placement])
    loss = lambda x, w: sum(jnp.sum(out) for out in jax.tree.leaves(mapped(x, w)))
    with Mesh(np.array(jax.devices()[:2]), ("x",)):
        found = jax.grad(loss, argnums=(0, 1))(X, W)
    np.testing.assert_array_equal(found[0], gradient_of_x)
    np.testing.assert_array_equal(found[1], gradient_of_w)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_rule_may_return_another_precision_than_its_argument_has(placement):
    double = jax.custom_vjp(lambda x: 2 * x)
    double.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct.astype(jnp.float32),))
    mapped = xmap(double, ["i"], ["i"], axis_resources=PLACEMENTS[placement])
    with Mesh(np.array(jax.devices()[:2]), ("x",)):
        found = jax.grad(lambda x: mapped(x).sum())(jnp.ones(2, jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, [2, 2])


def test_a_tangent_that_varies_more_than_its_result_is_refused():
    double = jax.custom_jvp(lambda x: 2 * x)
    double.defjvp(lambda primals, tangents: (double(*primals), tangents[0] * lax.axis_index("i")))
    mapped = xmap(double, [], [], axis_sizes={"i": 2})
    with pytest.raises(TypeError, match="returns a tangent that varies over `i` for an output that does not"):
        jax.grad(mapped)(1.0)


# ------------------------------------------------ tangents of operands that a function ignores


@jax.custom_jvp
def ignoring(x, y):
    return jnp.sin(x)


ignoring.defjvp(lambda primals, ts: (ignoring(*primals), ts[0] * primals[1] + 3 * ts[1] * primals[0]))

keeping = jax.custom_jvp(lambda x, y: 1.0 * x)
keeping.defjvp(lambda primals, ts: (keeping(*primals), ts[0] + 0 * ts[1]))


@jax.custom_vjp
def with_a_rule_that_sums_and_ignores(x, y):
    return ignoring(x, y)


with_a_rule_that_sums_and_ignores.defvjp(
    lambda x, y: (ignoring(x, y), (x, y)),
    lambda res, ct: (keeping(lax.psum(ct * res[1], "j"), res[1]), 3 * ct * res[0]),
)

# name: a body, and what it is of the sine of x for each y, which has the derivative of ``ignoring``.
IGNORING = {
    "alone": (ignoring, lambda sines, y: sines),
    "in a jit": (jax.jit(lambda x, y: 2 * ignoring(x, y)), lambda sines, y: 2 * sines),
    "in a scan": (
        lambda x, y: lax.scan(lambda c, t: (c + t * ignoring(x, y), None), 0.0, jnp.arange(3.0))[0],
        lambda sines, y: 3 * sines,
    ),
    "summed": (lambda x, y: lax.psum(ignoring(x, y), "j") * y, lambda sines, y: sines.sum(1, keepdims=True) * y),
    "in a backward rule": (with_a_rule_that_sums_and_ignores, lambda sines, y: sines),
}
YS = np.array([2.0, 5.0], np.float32)


def by_hand_ignoring(positional):
    @jax.custom_jvp
    def sines(x, y):
        return jnp.broadcast_to(jnp.sin(x), (len(x), len(y)))

    sines.defjvp(lambda primals, ts: (sines(*primals), ts[0] * primals[1] + 3 * ts[1] * primals[0]))
    return lambda x, y: positional(sines(x[:, None], y), y)


@pytest.mark.parametrize("example", IGNORING)
@pytest.mark.parametrize("resources", [{}, {"i": "x"}, {"j": "x"}, {"i": "x", "j": "y"}], ids=str)
def test_a_rule_may_use_the_tangent_of_an_operand_that_its_function_ignores(example, resources):
    body, positional = IGNORING[example]
    mapped, expected = xmap(body, (["i"], ["j"]), ["i", "j"], axis_resources=resources), by_hand_ignoring(positional)
    ct = np.array([[1, 2], [3, 5], [7, 11], [13, 17]], np.float32)
    args = np.arange(1, 5, dtype=np.float32), YS
    gradient = lambda f: jax.grad(lambda x, y: (f(x, y) * ct).sum(), (0, 1))
    with Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y")):
        results = mapped(*args), gradient(mapped)(*args)
    wanted = jax.jit(lambda *args: (expected(*args), gradient(expected)(*args)))(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), results, wanted)


def test_what_the_tangent_of_an_ignored_operand_varies_over_must_be_in_every_result():
    """Without it the function gives its value as before, and the refusal says what to do; ``jax.vmap`` refuses too."""
    mapped = xmap(ignoring, (["i"], ["j"]), ["i"])
    np.testing.assert_allclose(mapped(X, YS), np.sin(X), rtol=1e-6)
    with pytest.raises(TypeError, match=r"varies over `j` for an output that does not.*name them in out_axes of each"):
        jax.grad(lambda x: mapped(x, YS).sum())(X)
