"""Equinox, and libraries on it (lineax, optimistix, diffrax), in bodies: values and gradients are those of ``jax.vmap``
under every placement.
"""

import diffrax
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import lineax
import numpy as np
import optimistix
import placements
import pytest
from effects import failed_effects

from xmap_compat import SerialLoop, xmap

X, W = np.linspace(0.5, 2, 8).astype(np.float32), np.float32(1.5)
RESOURCES = [{}, {"i": "x"}, {"i": ("x", "y")}]
IDS = ["alone", "one mesh axis", "two mesh axes"]


def error_if(x, w):
    return eqx.error_if(x * w, x > 100, "too large")


def branched_error_if(x, w):
    return eqx.branched_error_if(x * w, x > 100, (x > 3).astype(int), ["small", "large"])


def while_loop(kind, **options):
    def body(x, w):
        def step(carry):
            value, total = carry
            return value * 1.3 * w + 0.1 * x, total + jnp.sin(value)

        return eqxi.while_loop(lambda c: c[0] < 8 * w, step, (x, x * 0), kind=kind, **options)

    return body


def unvmapped(x, w):
    largest = eqxi.unvmap_max((10 * x).astype(int))
    chosen = jnp.where(eqxi.unvmap_any(x > 1.9), x, -x)
    return jnp.where(eqxi.unvmap_all(x > 0.6), w, chosen) * largest


def in_a_branch(x, w):
    """Devices that do not take it have elements that are combined, too."""
    return jax.lax.cond(x > 1.2, lambda x: unvmapped(x, w), jnp.sin, x)


def layers(x, w):
    perceptron = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    normed = eqx.nn.LayerNorm(3)(x * jnp.arange(3.0))
    return perceptron(jnp.stack([x, w])) + normed.sum()


def jitted_layers(x, w):
    perceptron = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    return eqx.filter_jit(lambda model, v: model(v))(perceptron, jnp.stack([x, w]))


def matrix(x, w):
    return 3 * jnp.eye(3) + 0.1 * x * w * jnp.outer(jnp.arange(3.0), jnp.arange(3.0))


def dense_solve(x, w):
    return lineax.linear_solve(lineax.MatrixLinearOperator(matrix(x, w)), jnp.arange(3.0) + x).value


def conjugate_gradients(x, w):
    operator = lineax.MatrixLinearOperator(matrix(x, w), lineax.positive_semidefinite_tag)
    return lineax.linear_solve(operator, jnp.arange(3.0) + x, lineax.CG(1e-6, 1e-6)).value


def tridiagonal_solve(x, w):
    operator = lineax.TridiagonalLinearOperator(3 * w * jnp.ones(3), x * jnp.ones(2), jnp.ones(2))
    return lineax.linear_solve(operator, jnp.arange(3.0) + x).value


def root_find(x, w):
    solver = optimistix.Newton(1e-5, 1e-5)
    return optimistix.root_find(lambda y, a: y**3 + y - a, solver, jnp.ones(()), args=x * w).value


def least_squares(x, w):
    def residuals(y, a):
        return jnp.stack([y - a, y**2 - w])

    solver = optimistix.LevenbergMarquardt(1e-4, 1e-4)
    return optimistix.least_squares(residuals, solver, jnp.ones(()), args=x).value


def solved(adjoint):
    def body(x, w):
        term = diffrax.ODETerm(lambda t, y, a: -a * y + jnp.sin(t))
        controller = diffrax.PIDController(rtol=1e-4, atol=1e-5)
        options = {"stepsize_controller": controller, "adjoint": adjoint, "max_steps": 64}
        solution = diffrax.diffeqsolve(term, diffrax.Tsit5(), 0, 1, 0.3, x, w * x, **options)
        return solution.ys[0]

    return body


BODIES = {
    "error_if": error_if,
    "branched_error_if": branched_error_if,
    "lax": while_loop("lax"),
    "checkpointed": while_loop("checkpointed", checkpoints=3),
    "bounded": while_loop("bounded", max_steps=16),
    "unvmapped": unvmapped,
    "in a branch": in_a_branch,
    "layers": layers,
    "jitted layers": jitted_layers,
    "dense": dense_solve,
    "conjugate gradients": conjugate_gradients,
    "tridiagonal": tridiagonal_solve,
    "root_find": root_find,
    "least_squares": least_squares,
    "recursive checkpoints": solved(diffrax.RecursiveCheckpointAdjoint()),
    "backsolve": solved(diffrax.BacksolveAdjoint()),
}


def loss(outs):
    return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(outs))


def slopes(body):
    return jax.grad(lambda x, w: loss(body(x, w)), (0, 1))


# What is computed of a body, by what maps it.
USES = {
    "value": lambda body, mapped: mapped(body),
    "gradient from outside": lambda body, mapped: slopes(mapped(body)),
    "gradient inside": lambda body, mapped: mapped(slopes(body)),
}


def check(name, use, resources):
    def vmapped(body):
        return jax.vmap(body, (0, None))

    def xmapped(body):
        return xmap(body, (["i"], {}), ["i", ...], axis_resources=resources)

    want = jax.jit(USES[use](BODIES[name], vmapped))(X, W)
    with placements.mesh42():
        found = jax.jit(USES[use](BODIES[name], xmapped))(X, W)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


QUICK = ["error_if", "branched_error_if", "unvmapped", "in a branch", "checkpointed", "bounded"]
QUICK_CASES = [(name, "value") for name in [*QUICK, "jitted layers"]]
QUICK_CASES += [(name, "gradient from outside") for name in ("checkpointed", "bounded", "error_if")]
QUICK_CASES += [("conjugate gradients", "value")]
OTHERS = [(name, use) for name in BODIES for use in USES if name != "lax" or use == "value"]


@pytest.mark.parametrize("resources", RESOURCES, ids=IDS)
@pytest.mark.parametrize(("name", "use"), QUICK_CASES)
def test_small_programs(name, use, resources):
    check(name, use, resources)


FEWER_CASES = [
    ("checkpointed", "gradient inside"),
    ("recursive checkpoints", "value"),
    ("root_find", "gradient from outside"),
]


@pytest.mark.parametrize(("name", "use"), FEWER_CASES)
def test_programs_under_one_assignment(name, use):
    check(name, use, {"i": "x"})


@pytest.mark.slow
@pytest.mark.parametrize("resources", RESOURCES, ids=IDS)
@pytest.mark.parametrize(("name", "use"), OTHERS)
def test_all_programs(name, use, resources):
    check(name, use, resources)


@pytest.mark.parametrize("resources", RESOURCES, ids=IDS)
def test_an_error_is_raised_if_the_predicate_of_any_element_is_true(resources):
    body = eqx.filter_jit(lambda x: eqx.error_if(x, x > 1.9, "too large"))
    fun = xmap(body, ["i"], ["i"], axis_resources=resources)
    with placements.mesh42(), pytest.raises(Exception, match="too large"):
        np.asarray(fun(X))
    failed_effects()


def test_an_operation_that_combines_elements_is_refused_in_a_serial_loop():
    mapped = xmap(unvmapped, (["i"], {}), ["i"], axis_resources={"i": SerialLoop(2)})
    with pytest.raises(RuntimeError, match=r"`unvmap_max`.* combines the elements of `i`"):
        mapped(X, W)


@pytest.mark.parametrize("resources", RESOURCES, ids=IDS)
@pytest.mark.parametrize("refuses", [eqxi.nonbatchable, eqxi.nontraceable])
def test_what_cannot_be_batched_is_refused_wherever_it_lies(refuses, resources):
    """A value that does not vary is none of it."""

    def mapped(body):
        return xmap(body, (["i"], {}), ["i"], axis_resources=resources)

    with placements.mesh42():
        np.testing.assert_allclose(mapped(lambda x, w: x * refuses(w))(X, W), X * W)
        with pytest.raises((ValueError, RuntimeError), match="batch"):
            mapped(lambda x, w: refuses(x) * w)(X, W)


@pytest.mark.parametrize("resources", RESOURCES, ids=IDS)
def test_a_reduction_that_is_written_for_vmap_is_one_over_all_axes(resources):
    """Also over those of an xmap, or a vmap, around it."""

    def body(x):
        return jnp.where(eqxi.unvmap_any(x > 13), x, -x)

    x = np.arange(16, dtype=np.float32).reshape(8, 2)

    def inner(row):
        return xmap(body, ["j"], ["j"])(row)

    outer = xmap(inner, ["i", ...], ["i", ...], axis_resources=resources)
    columns = jax.vmap(xmap(body, ["i"], ["i"], axis_resources=resources), 1, 1)
    with placements.mesh42():
        np.testing.assert_array_equal(outer(x), x)
        np.testing.assert_array_equal(columns(x), x)
        np.testing.assert_array_equal(outer(x - 3), 3 - x)
