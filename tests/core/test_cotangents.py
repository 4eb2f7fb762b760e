"""The worked example of ``core/structured/cotangents.py``: two devices, one weight, rules that sum and others.

The expected numbers are those of the positional function, worked out by hand.
"""

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
    "a rule that does not sum": (
        with_rule(product, rule_that_leaves_the_sum),
        ["i"],
        [3.0, 3.0],
        3.0,
    ),
    "a rule that sums": (with_rule(product, rule_that_sums), ["i"], [3.0, 3.0], 3.0),
    "a sum of a sum": (
        with_rule(product, lambda _, ct: (lax.psum(lax.psum(ct, "i"), "i"), ct)),
        ["i"],
        [4.0, 4.0],
        2.0,
    ),
    "the cotangent of a collective": (with_rule(total, rule_of_a_collective), [], [3.0, 3.0], 3.0),
    "the cotangent of what a collective made": (
        with_rule(bent_total, rule_of_a_bent_collective),
        [],
        [6.0, 6.0],
        6.0,
    ),
    "a cotangent that exists once": (with_rule(both, rule_of_both), (["i"], []), [3.0, 3.0], 9.0),
}
PLACEMENTS = {
    "no resources": {},
    "an element on each device": {"i": "x"},
    "a serial loop": {"i": SerialLoop(2)},
}


# A looped axis cannot be named in a collective.
WITH_COLLECTIVES = (
    "a rule that sums",
    "a sum of a sum",
    "the cotangent of a collective",
    "the cotangent of what a collective made",
)
CASES = [
    (e, p)
    for e in EXAMPLES
    for p in PLACEMENTS
    if not (p == "a serial loop" and e in WITH_COLLECTIVES)
]


@pytest.mark.parametrize(("example", "placement"), CASES)
def test_the_worked_example(example, placement):
    function, out_axes, gradient_of_x, gradient_of_w = EXAMPLES[example]
    mapped = xmap(function, (["i"], []), out_axes, axis_resources=PLACEMENTS[placement])

    def loss(x, w):
        return sum(jnp.sum(out) for out in jax.tree.leaves(mapped(x, w)))

    with Mesh(np.array(jax.devices()[:2]), ("x",)):
        found = jax.grad(loss, argnums=(0, 1))(X, W)
    np.testing.assert_array_equal(found[0], gradient_of_x)
    np.testing.assert_array_equal(found[1], gradient_of_w)


def test_a_rule_may_call_an_xmap_over_another_mesh_axis():
    def six(u):
        return xmap(lambda k: k * u, ["k"], ["k"], axis_resources={"k": "y"})(jnp.arange(4.0)).sum()

    mapped = xmap(
        with_rule(product, lambda _, ct: (six(ct), ct)),
        (["i"], []),
        ["i"],
        axis_resources={"i": "x"},
    )
    with Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y")):
        np.testing.assert_array_equal(jax.grad(lambda x: mapped(x, W).sum())(X), [6, 6])


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
    with pytest.raises(
        TypeError, match="returns a tangent that varies over `i` for an output that does not"
    ):
        jax.grad(mapped)(1.0)


# ------------------------------------------------ tangents of operands that a function ignores


def test_the_tangent_of_an_operand_that_the_function_ignores_is_refused():
    """The function gives its value, and the refusal says what to do; ``jax.vmap`` refuses too."""
    ignoring = jax.custom_jvp(lambda x, y: jnp.sin(x))
    ignoring.defjvp(
        lambda primals, ts: (ignoring(*primals), ts[0] * primals[1] + 3 * ts[1] * primals[0])
    )
    ys = np.array([2.0, 5.0], np.float32)
    for resources, out_axes in [({}, ["i"]), ({"j": "x"}, ["i", "j"])]:
        mapped = xmap(ignoring, (["i"], ["j"]), out_axes, axis_resources=resources)
        with Mesh(np.array(jax.devices()[:2]), ("x",)):
            np.testing.assert_allclose(
                mapped(X, ys).reshape(len(X), -1)[:, 0], np.sin(X), rtol=1e-6
            )
            with pytest.raises(
                TypeError, match=r"varies over `j` for an output that does not.*use the operand"
            ):
                jax.grad(lambda x: mapped(x, ys).sum())(X)  # noqa: B023
