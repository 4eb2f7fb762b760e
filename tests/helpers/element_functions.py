"""Functions of one element that random programs call: what JAX has beside named axes.

Linear algebra, solvers, reductions by a computation, random numbers, narrow floats, and branches.  ``v`` and ``w`` are
vectors of three floats between -1 and 1, and so are the results, nearly; ``n`` is an integer.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.scipy.linalg import cho_factor, cho_solve
from jax.scipy.sparse.linalg import cg
from tables import expressions


def matrix(v, w):
    return 4 * jnp.eye(3) + jnp.outer(jnp.tanh(v), w) / 2


def symmetric(v, w):
    product = jnp.outer(jnp.tanh(v), w)
    return jnp.diag(jnp.float32([2, 4, 6])) + (product + product.T) / 4


def cholesky(v, w):
    factor = jnp.linalg.cholesky(symmetric(v, w))
    return lax.linalg.triangular_solve(factor, v[:, None], left_side=True, lower=True)[:, 0]


def factored_solve(v, w):
    return cho_solve(cho_factor(symmetric(v, w)), v)


def linear_solve(v, w):
    a = matrix(v, w)
    return lax.custom_linear_solve(
        lambda x: a @ x,
        v,
        lambda _, b: jnp.linalg.solve(a, b),
        transpose_solve=lambda _, b: jnp.linalg.solve(a.T, b),
    )


def root(v, w):
    """Where ``x + tanh(x) / 2`` is v, by Newton's method with a loop."""

    def equation(x):
        return x + jnp.tanh(x) / 2 - v

    def step(_, x):
        return x - equation(x) / (1.5 - jnp.tanh(x) ** 2 / 2)

    def solve(_, x):
        return lax.fori_loop(0, 6, step, x)

    return lax.custom_root(equation, v, solve, lambda g, y: y / g(jnp.ones(3))) * w


def branching(w):
    """An operator that elements choose by w, and that JAX transposes."""

    def inner(x):
        return lax.cond(w[1] > 0, lambda x: 2.5 * x, jnp.negative, x)

    return lambda x: lax.cond(w[0] > 0, lambda x: 3 * x, inner, x)


def cg_of_branches(v, w):
    operator = branching(w)
    return cg(lambda x: operator(operator(x)), v, maxiter=4)[0] * w


def root_of_branches(v, w):
    factor = jnp.where(w[0] > 0, 3, jnp.where(w[1] > 0, 2.5, -1))

    def equation(x):
        return branching(w)(x) - jnp.sin(v)

    def solve(f, x):
        return x - f(x) / factor

    return lax.custom_root(equation, v, solve, lambda g, y: y / factor)


# JAX (to 0.12) fails in the derivative of a reduction if one operand has none: all depend on v.
def reduce_pairs(v, w):
    """A product of complex numbers, by a computation of two operands."""

    def times(x, y):
        return x[0] * y[0] - x[1] * y[1], x[1] * y[0] + x[0] * y[1]

    operands = jnp.tanh(v), v * w
    real, imaginary = lax.reduce(operands, (jnp.float32(1), jnp.float32(0)), times, (0,))
    return v * real - imaginary * w / 2


def reduce_triples(v, w):
    """Two sums and a product, by a computation of three operands."""

    def add(x, y):
        return x[0] + y[0], x[1] * y[1], x[2] + y[2] + 0.5

    init = jnp.float32(0), jnp.float32(1), jnp.float32(-0.5)
    first, product, last = lax.reduce((v, jnp.sin(v - w), v * w), init, add, (0,))
    return v + first * product - last / 8


def guarded(v, w):
    """Where w is negative, the first branch is neither taken nor differentiable."""
    return lax.cond(w[0] > 0, lambda: v * jnp.sqrt(w[0]), lambda: v * w)


@custom_vmap
def batched_by_rule(v, w):
    return jnp.sin(v) * w


@batched_by_rule.def_vmap
def _rule(size, batched, v, w):
    return jnp.sin(v) * w, any(batched)


def extrema(x, y):
    return jnp.maximum(x[0], y[0]), jnp.minimum(x[1], y[1])


def drawn(implementation, n):
    return jax.random.uniform(jax.random.key(n, impl=implementation), (3,))


def table(text, parameters="v, w"):
    return expressions(text, parameters, globals())


# With all derivatives, under any transformation.
SMOOTH = table("""
silu: jax.nn.silu(v * w)
softplus: jax.nn.softplus(v) - w
sort: jnp.sort(v) + w[::-1]
norm: v / (1 + jnp.linalg.norm(w + 2))
solve: jnp.linalg.solve(matrix(v, w), v)
cholesky: cholesky(v, w)
cho_solve: factored_solve(v, w)
inv: jnp.linalg.inv(matrix(v, w)) @ w
eigvalsh: jnp.linalg.eigvalsh(symmetric(v, w)) / 8
qr: jnp.abs(jnp.linalg.qr(matrix(v, w))[1]).sum(0) / 8
slogdet: v * jnp.linalg.slogdet(matrix(v, w))[1] / 4
linear_solve: linear_solve(v, w)
cg: cg(lambda x: symmetric(w, w) @ x, v, maxiter=4)[0]
root: root(v, w)
cg_of_branches: cg_of_branches(v, w)
root_of_branches: root_of_branches(v, w)
reduce_pairs: reduce_pairs(v, w)
reduce_triples: reduce_triples(v, w)
reduce_with: v * lax.reduce(v * w, jnp.float32(0), lambda x, y: x + y + x * y, (0,)) / 8
""")
OF_INTEGERS = table(
    """
threefry: v * drawn("threefry2x32", n)
fold_in: v * jax.random.normal(jax.random.fold_in(jax.random.key(3), n), (3,)) / 4
split: v * jax.random.uniform(jax.random.split(jax.random.key(n), 3)[1])
bits: v + jax.random.bits(jax.random.key(n), (3,)) % 8 / 8
permutation: jax.random.permutation(jax.random.key(n), v)
float16: v * jnp.sin(jnp.arange(3, dtype="float16") + n)
bfloat16: v * jnp.cos(jnp.arange(3, dtype="bfloat16") * n % 7)
float8_e4m3fn: v * jnp.tanh((jnp.arange(3) - n).astype("float8_e4m3fn")).astype("float32")
float8_e5m2: v * jnp.sin((jnp.arange(3) * n).astype("float8_e5m2")).astype("float32")
""",
    "v, n",
)
# JAX's vmap draws one stream for all elements.
OTHER_KEYS = table('rbg: v * drawn("rbg", n)\nunsafe_rbg: v - drawn("unsafe_rbg", n)', "v, n")
# JAX (to 0.12) does not map them, or not all of their derivatives.
ONLY_VALUES = table("""
reduce: v - lax.reduce(v * w, w[0], lambda x, y: jnp.maximum(x, y), (0,))
reduce_two: v - sum(lax.reduce((v, w), (w[1], v[1]), extrema, (0,)))
reduce_window: lax.reduce_window(v, w[0], jnp.maximum, (2,), (1,), [(1, 0)]) - w
ragged_dot: lax.ragged_dot(jnp.outer(w, v), jnp.stack([v, w])[:, :, None], jnp.int32([1, 2]))[:, 0]
batched_by_rule: batched_by_rule(v, w)
""")
# JAX's vmap takes both branches, and the derivative of the one that is not taken is NaN.
BRANCHING = {"guarded": guarded}
ALL = SMOOTH | OF_INTEGERS | OTHER_KEYS | BRANCHING | ONLY_VALUES
