"""The worked example of ``core/structured/cotangents.py``: two devices, one weight, rules that sum and others.

The expected numbers are those of the positional function, worked out by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tables import expressions

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


def rule_that_sums_twice(residuals, ct):
    return lax.psum(lax.psum(ct, "i"), "i"), ct


# The function with its rule, out_axes, and the gradients of the sum of all results for x and w.
EXAMPLES = expressions(
    """
a rule that does not sum: (with_rule(product, rule_that_leaves_the_sum), ["i"], [3, 3], 3)
a rule that sums: (with_rule(product, rule_that_sums), ["i"], [3, 3], 3)
a sum of a sum: (with_rule(product, rule_that_sums_twice), ["i"], [4, 4], 2)
the cotangent of a collective: (with_rule(total, rule_of_a_collective), [], [3, 3], 3)
the cotangent of what a collective made: (with_rule(bent_total, rule_of_a_bent_collective), [], [6, 6], 6)
a cotangent that exists once: (with_rule(both, rule_of_both), (["i"], []), [3, 3], 9)
""",
    "",
    globals(),
)
WITHOUT_COLLECTIVES = ("a rule that does not sum", "a cotangent that exists once")
PLACEMENTS = {
    "no resources": {},
    "an element on each device": {"i": "x"},
    "a serial loop": {"i": SerialLoop(2)},
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_worked_example(example, placement):
    function, out_axes, gradient_of_x, gradient_of_w = EXAMPLES[example]()
    if placement == "a serial loop" and example not in WITHOUT_COLLECTIVES:
        pytest.skip("a looped axis cannot be named in a collective")
    mapped = xmap(function, (["i"], []), out_axes, axis_resources=PLACEMENTS[placement])

    def loss(x, w):
        return sum(jnp.sum(out) for out in jax.tree.leaves(mapped(x, w)))

    with Mesh(np.array(jax.devices()[:2]), ("x",)):
        of_x, of_w = jax.grad(loss, argnums=(0, 1))(X, W)
    np.testing.assert_array_equal(of_x, gradient_of_x)
    np.testing.assert_array_equal(of_w, gradient_of_w)


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

    @ignoring.defjvp
    def rule(primals, tangents):
        x, y = primals
        dx, dy = tangents
        return ignoring(x, y), dx * y + 3 * dy * x

    ys = np.array([2.0, 5.0], np.float32)
    mapped = xmap(ignoring, (["i"], ["j"]), ["i", "j"], axis_resources={"j": "x"})
    words = r"varies over `j` for an output that does not.*use the operand"
    with Mesh(np.array(jax.devices()[:2]), ("x",)):
        np.testing.assert_allclose(mapped(X, ys)[:, 0], np.sin(X), rtol=1e-6)
        with pytest.raises(TypeError, match=words):
            jax.grad(lambda x: mapped(x, ys).sum())(X)
