"""Derivatives of branches that some elements do not take, with custom rules and collectives in them.

Where a branch has no collective, the oracle is ``jax.vmap``.  Where it has one, elements that do not take it contribute
to those that do: the oracle is the positional function, written by hand so that only what is used is computed.
"""

import functools

import comparing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import equations
from jax import lax
from placements import IN_AXES, OUT_AXES, PLACEMENTS, arguments, mesh42, vmapped
from tables import expressions

from xmap_compat import xmap

pytestmark = pytest.mark.usefixtures("end_a_hang")


assert_near = functools.partial(comparing.assert_close, rtol=2e-3, atol=2e-4)


# ------------------------------------------------------------------------ without collectives


def with_tangent(function, rule):
    f = jax.custom_jvp(function)
    f.defjvp(lambda primals, tangents: (f(*primals), rule(*primals, *tangents)))
    return f


def with_cotangent(function, rule):
    f = jax.custom_vjp(function)
    f.defvjp(lambda z: (function(z), z), lambda z, ct: (rule(z, ct),))
    return f


half_tangent = with_tangent(jnp.sin, lambda z, t: jax.nn.relu(jnp.cos(z)) * t / 2)
half_cotangent = with_cotangent(jnp.sin, lambda z, ct: jax.nn.softplus(jnp.cos(z)) * ct / 2)
TABLE = jnp.array([1.0, 0.5, 2.0])


def slope_of_table(z, ct):
    slopes = jnp.cos(z * TABLE) * TABLE
    return slopes.sum() * ct / 2


of_a_table = with_cotangent(lambda z: jnp.sin(z * TABLE).sum(), slope_of_table)


def in_a_scan(z):
    def step(carry, t):
        return half_tangent(jnp.sqrt(carry)) * t, None

    return lax.scan(step, z, jnp.arange(1.0, 3))[0]


def in_a_vmap(z):
    rows = jax.vmap(lambda c: jax.nn.relu(jnp.sqrt(z * c)))
    return rows(jnp.arange(1.0, 3)).sum()


NOT_DIFFERENTIABLE = expressions(
    """
relu: jax.nn.relu(jnp.sqrt(z))
relu6: jnp.log(z) * jax.nn.relu6(z)
softplus: jax.nn.softplus(jnp.sqrt(z))
logaddexp: jnp.logaddexp(jnp.log(z), 0.5)
a rule in a rule: half_tangent(jnp.sqrt(z))
in a scan: in_a_scan(z)
in a jit: jax.jit(lambda z: jax.jit(jax.nn.relu)(jnp.sqrt(z)))(z)
in a remat: jax.checkpoint(lambda z: jnp.sin(jax.nn.relu(jnp.sqrt(z))))(z)
in a branch: lax.cond(z < 1, lambda z: jax.nn.relu(jnp.sqrt(z)), jnp.log, z)
in a vmap: in_a_vmap(z)
""",
    "z",
    globals(),
)
ONLY_REVERSE = expressions(
    """
cotangent: half_cotangent(jnp.sqrt(z))
cotangent of what closes over an array: of_a_table(jnp.sqrt(z))
cotangent in a remat: jax.checkpoint(lambda z: half_cotangent(jnp.sqrt(z)))(z)
""",
    "z",
    globals(),
)


def branching(branch):
    return lambda x, u, w: lax.cond(x[0] > 0, lambda: branch(x[0]) * w[0], lambda: 3 * x[0] * u)


def weights(a, b):
    return np.cos(np.arange(a * b, dtype=np.float32)).reshape(a, b)


def derivatives(mapped, a, b):
    """Values and gradients of the functions with a reverse mode; forward, and forward over reverse, of the others."""
    args = arguments(a, b)

    def loss(f):
        return lambda *args: (f(*args) * weights(a, b)).sum()

    found = {}
    for name, branch in (NOT_DIFFERENTIABLE | ONLY_REVERSE).items():
        f = mapped(branching(branch))
        found[name] = [f(*args), jax.grad(loss(f), (0, 1, 2))(*args)]
        if name not in ONLY_REVERSE:
            found[name] += [jax.jvp(g, args, args)[1] for g in (f, jax.grad(loss(f)))]
    return found


@functools.cache
def derivatives_by_vmap(a, b):
    return jax.jit(lambda: derivatives(vmapped, a, b))()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_branch_that_is_not_taken_has_no_derivative(placement):
    a, b, resources = PLACEMENTS[placement]
    expected = derivatives_by_vmap(a, b)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
    with mesh42():

        def mapped(body):
            return xmap(body, IN_AXES, OUT_AXES, axis_resources=resources)

        assert_near(jax.jit(lambda: derivatives(mapped, a, b))(), expected)


# --------------------------------------------------------------------------- with collectives


def over_b(z):
    return lax.psum(z, "b")


def summing(part):
    """A function of z whose rule has a sum, that adds nothing, in one part of it."""

    def nothing(z, where):
        return 0 * over_b(z) if where == part else 0.0

    if part == "tangent":
        return with_tangent(lambda z: 1.5 * z, lambda z, t: 1.5 * t + nothing(t, "tangent"))
    f = jax.custom_vjp(lambda z: 1.5 * z + nothing(z, "function"))

    def forward(z):
        return (1.5 * z + nothing(z, "function"), nothing(z, "forward"))

    f.defvjp(forward, lambda res, ct: (1.5 * ct + res * ct + nothing(ct, "backward"),))
    return f


def either(z):
    def below(z):
        return over_b(z) * jnp.sqrt(z)

    def above(z):
        return lax.pmean(z, "b") * jnp.log(z)

    return lax.cond(z < 1, below, above, z)


# The branch of z.
COLLECTIVES = expressions(
    """
after the sum: over_b(z) * jnp.sqrt(z)
before the sum: over_b(jnp.sqrt(jnp.abs(z) - 0.1))
with a rule: jax.nn.relu(9 + over_b(z)) * jax.nn.softplus(jnp.sqrt(z))
in a jit in a remat: jax.checkpoint(jax.jit(lambda z: jnp.sin(over_b(z)) * jnp.sqrt(z)))(z)
in a branch: either(z)
two after each other: over_b(jnp.sin(over_b(z)) * z) * jnp.sqrt(z)
where all agree: lax.cond(lax.pmax(z, "b") > 99, lambda z: over_b(jnp.sqrt(z - 2)), jnp.sin, z)
in a tangent: jnp.sqrt(summing("tangent")(z))
in a function: jnp.sqrt(summing("function")(z))
in a forward rule: jnp.sqrt(summing("forward")(z))
in a backward rule: jnp.sqrt(summing("backward")(z))
""",
    "z",
    globals(),
)


def total(z):
    return z.sum(1, keepdims=True)


# The same by hand: z[a, b] of all, of those that reach someone who takes it, and of those that take it.
BY_HAND = expressions(
    """
after the sum: total(z) * jnp.sqrt(taken)
before the sum: total(jnp.sqrt(jnp.abs(reaching) - 0.1))
with a rule: (9 + total(z)) * jax.nn.softplus(jnp.sqrt(taken))
in a jit in a remat: jnp.sin(total(z)) * jnp.sqrt(taken)
in a branch: total(z) * jnp.where(taken < 1, jnp.sqrt(taken), jnp.log(taken) / z.shape[1])
two after each other: jnp.sin(total(z)) * total(z) * jnp.sqrt(taken)
where all agree: jnp.sin(taken)
in a tangent: jnp.sqrt(1.5 * taken)
in a function: jnp.sqrt(1.5 * taken)
in a forward rule: jnp.sqrt(1.5 * taken)
in a backward rule: jnp.sqrt(1.5 * taken)
""",
    "z, reaching, taken",
    globals(),
)


def by_hand(positional):
    def function(x):
        takes = x > 0
        reaching = jnp.where(takes.any(1, keepdims=True), x, 1.0)
        taken = jnp.where(takes, x, 1.0)
        return jnp.where(takes, positional(x, reaching, taken), 3 * x)

    return function


def some_rows_taken(a, b):
    """Rows that no element, some elements, and all elements take; of those with a sum of roots all have one."""
    x = 0.5 + np.abs(arguments(a, b)[0][..., 0])
    row = np.arange(a)[:, None] % 4
    column = np.arange(b) % 3
    signs = np.where(row > column, 1, -1)
    return np.where(row == 0, -0.05, signs * x).astype(np.float32)


def of_collectives(functions, a, b):
    x, direction = some_rows_taken(a, b), weights(a, b)

    def gradient(f):
        return jax.grad(lambda x: (f(x) * direction).sum())

    found = {}
    for name, f in functions.items():
        slope = gradient(f)
        _, second = jax.jvp(slope, (x,), (direction,))
        found[name] = (f(x), slope(x), second)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_in_a_branch_with_a_collective_each_element_has_the_derivative_of_what_it_contributes(
    placement,
):
    """Elements in whose row nobody takes the branch have none, even where what they contribute has no derivative."""
    a, b, resources = PLACEMENTS[placement]
    positional = {name: by_hand(function) for name, function in BY_HAND.items()}
    expected = jax.jit(lambda: of_collectives(positional, a, b))()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))

    def mapped(branch):
        def body(z):
            return lax.cond(z > 0, branch, lambda z: 3 * z, z)

        return xmap(body, OUT_AXES, OUT_AXES, axis_resources=resources)

    functions = {name: mapped(branch) for name, branch in COLLECTIVES.items()}
    with mesh42():
        assert_near(jax.jit(lambda: of_collectives(functions, a, b))(), expected)


copied = jax.custom_vjp(lambda z: z)
copied.defvjp(lambda z: (z, None), lambda _, ct: (lax.psum(ct, "b"),))


@pytest.mark.parametrize("placement", ["vectorized", "b:y", "a:x,b:y"])
def test_a_rule_in_a_branch_sums_once_over_an_axis_that_its_operand_does_not_vary_over(placement):
    """Also if the predicate varies over it: the cut makes no operand vary over more."""
    a, b, resources = PLACEMENTS[placement]
    x, u, _ = arguments(a, b)
    taken, factors = x[..., 0] > 0, x[..., 1]

    def body(u, taken, c):
        return c * lax.cond(taken, lambda u: 3 * copied(u), lambda u: u, u)

    mapped = xmap(body, ({0: "a"}, OUT_AXES, OUT_AXES), OUT_AXES, axis_resources=resources)
    with mesh42():
        gradient = jax.grad(lambda u: mapped(u, taken, factors).sum())(u)
    np.testing.assert_allclose(
        gradient, np.where(taken, 3 * factors, factors).sum(1), rtol=1e-4, atol=1e-5
    )


# --------------------------------------------------------------- what devices do, and together


def primitives(function, *args):
    """The primitives of a function, each with those that it stands inside of."""

    program = jax.make_jaxpr(function)(*args)
    return [tuple(e.primitive.name for e in (*around, eqn)) for eqn, around in equations(program)]


def differing_on_devices(branch):
    def body(v, w):
        return lax.cond(v > 0, lambda: branch(v, w), lambda: jnp.sin(v))

    mapped = xmap(body, (["b"], []), ["b"], axis_resources={"b": "x"})
    return jax.grad(lambda v, w: mapped(v, w).sum(), (0, 1))


V = np.array([1, -1, 2, -3], np.float32)


def test_each_device_computes_only_its_branch_if_no_rule_has_a_collective():
    @functools.partial(jax.custom_vjp)
    def product(v, w):
        return v * w

    product.defvjp(lambda v, w: (v * w, (v, w)), lambda res, ct: (ct * res[1], ct * res[0]))

    # In the gradient of a constant, too, there is no sum over devices that the others do not join.
    def branch(v, w):
        return jax.nn.relu(product(v, w)) + product(jnp.ones(()), v) + product(w, 2.0)

    gradient = differing_on_devices(branch)
    with mesh42():
        found = primitives(gradient, V, 2.0)
        got = gradient(V, 2.0)
    assert any(path[-1] == "cond" for path in found)
    assert not [path for path in found if "cond" in path and path[-1].startswith("psum")]
    of_v = np.where(V > 0, 2 + 1, np.cos(V))
    positive = V[V > 0]
    assert_near(got, (of_v, 2.0 * positive.size + positive.sum()))


@pytest.mark.parametrize("part", ["function", "forward", "backward", "tangent"])
def test_devices_compute_all_branches_if_a_rule_has_a_collective(part):
    gradient = differing_on_devices(lambda v, w: summing(part)(v) * w)
    with mesh42():
        assert not any(path[-1] == "cond" for path in primitives(gradient, V, 2.0))
        assert_near(gradient(V, 2.0), (np.where(V > 0, 3.0, np.cos(V)), 1.5 * V[V > 0].sum()))


def test_values_are_computed_without_asking_who_takes_a_branch():
    def body(z):
        return lax.cond(z > 0, lambda z: over_b(jnp.sqrt(z)), jnp.sin, z)

    mapped = xmap(body, ["b"], ["b"], axis_resources={"b": "x"})
    with mesh42():
        names = [path[-1] for path in primitives(mapped, V)]
        sums = [name for name in names if name.startswith(("psum", "pmax"))]
        assert sums == ["psum_invariant"]


def test_devices_compute_all_branches_if_a_rule_cannot_be_looked_into():
    def refusing(res, ct):
        raise NotImplementedError("not differentiable")

    f = jax.custom_vjp(jnp.sin)
    f.defvjp(lambda z: (jnp.sin(z), None), refusing)
    mapped = xmap(lambda v: lax.cond(v > 0, f, jnp.cos, v), ["b"], ["b"], axis_resources={"b": "x"})
    with mesh42():
        assert not any(path[-1] == "cond" for path in primitives(mapped, V))
        assert_near(mapped(V), np.where(V > 0, np.sin(V), np.cos(V)))
        with pytest.raises(NotImplementedError, match="not differentiable"):
            jax.grad(lambda v: mapped(v).sum())(V)


def test_devices_leave_a_loop_together_if_only_a_tangent_has_a_collective():
    f = with_tangent(lambda z: 1.5 * z, lambda z, t: over_b(t))

    def turns():
        return lax.axis_index("b")

    def body(z):
        return lax.while_loop(lambda s: s[0] < turns(), lambda s: (s[0] + 1, f(s[1])), (0, z))[1]

    tangent = np.arange(4, dtype=np.float32)
    for turn in range(3):
        tangent = np.where(turn < np.arange(4), tangent.sum(), tangent)
    for resources in ({}, {"b": "x"}):
        mapped = xmap(body, ["b"], ["b"], axis_resources=resources)
        with mesh42():
            found = jax.jvp(mapped, (V,), (np.arange(4, dtype=np.float32),))
        assert_near(found, (V * 1.5 ** np.arange(4), tangent))
