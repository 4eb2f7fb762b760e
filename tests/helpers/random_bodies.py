"""Bodies made of words: ``"vmapped custom_vjp scan solve; psum_a"``.

A piece is a function ``(v, w, key) -> v`` of vectors of three elements.  A chain is wrappers, outermost first, around a
leaf; a program is chains, one after another.  So a failure says its program: ``body(words)``.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.scipy.sparse.linalg import cg
from tables import expressions

# -------------------------------------------------------------------------------- leaves


def wide(function):
    """In float32, whatever the type is: as linear algebra wants it."""

    @functools.wraps(function)
    def leaf(v, w, key):
        return function(v.astype(jnp.float32), w.astype(jnp.float32)).astype(v.dtype)

    return leaf


def matrix(v, w):
    return 4 * jnp.eye(3) + jnp.outer(jnp.tanh(v), w) / 2


def symmetric(v, w):
    return (
        jnp.diag(jnp.float32([2, 4, 6]))
        + (jnp.outer(jnp.tanh(v), w) + jnp.outer(w, jnp.tanh(v))) / 4
    )


def cholesky(v, w):
    factor = jnp.linalg.cholesky(symmetric(v, w))
    return lax.linalg.triangular_solve(factor, v[:, None], left_side=True, lower=True)[:, 0]


def linear_solve(v, w):
    a = matrix(v, w)

    def solve(transposed):
        return lambda _, b: jnp.linalg.solve(a.T if transposed else a, b)

    return lax.custom_linear_solve(lambda x: a @ x, v, solve(False), transpose_solve=solve(True))


def root(v, w):
    """Where ``x + tanh(x) / 2`` is v, by Newton's method with a loop."""

    def equation(x):
        return x + jnp.tanh(x) / 2 - v

    def step(_, x):
        return x - equation(x) / (1.5 - jnp.tanh(x) ** 2 / 2)

    def solve(_, x):
        return lax.fori_loop(0, 6, step, x)

    return lax.custom_root(equation, v, solve, lambda g, y: y / g(jnp.ones(3))) * w


def factor(w):
    return jnp.where(w[0] > 0, 3, jnp.where(w[1] > 0, 2.5, -1))


def branching(w):
    """An operator that elements choose by w, and that JAX transposes: x times the factor."""

    def inner(x):
        return lax.cond(w[1] > 0, lambda x: 2.5 * x, jnp.negative, x)

    return lambda x: lax.cond(w[0] > 0, lambda x: 3 * x, inner, x)


def cg_of_branches(v, w):
    return cg(lambda x: branching(w)(branching(w)(x)), v, maxiter=4)[0] * w


def root_of_branches(v, w):
    def equation(x):
        return branching(w)(x) - jnp.sin(v)

    return lax.custom_root(
        equation, v, lambda f, x: x - f(x) / factor(w), lambda g, y: y / factor(w)
    )


# JAX (to 0.12) fails in the derivative of a reduction if one operand has none: all depend on v.
def reduce_pairs(v, w):
    """A product of complex numbers, by a computation of two operands."""

    def times(x, y):
        return (x[0] * y[0] - x[1] * y[1], x[1] * y[0] + x[0] * y[1])

    real, imaginary = lax.reduce(
        (jnp.tanh(v), v * w), (jnp.float32(1), jnp.float32(0)), times, (0,)
    )
    return v * real - imaginary * w / 2


def reduce_triples(v, w):
    """Two sums and a product, by a computation of three operands."""

    def add(x, y):
        return (x[0] + y[0], x[1] * y[1], x[2] + y[2] + 0.5)

    init = jnp.float32(0), jnp.float32(1), jnp.float32(-0.5)
    parts = lax.reduce((v, jnp.sin(v - w), v * w), init, add, (0,))
    return v + parts[0] * parts[1] - parts[2] / 8


def leaves(text):
    return expressions(text, "v, w, key", globals())


ELEMENTWISE = leaves("""
tanh: jnp.tanh(v * w)
relu: jax.nn.relu(v) - v * w
silu: jax.nn.silu(v * w)
softplus: jax.nn.softplus(v) - w
sort: jnp.sort(v) + w[::-1]
softmax: jax.nn.softmax(v * w)
norm: v / (1 + jnp.linalg.norm(w))
""")


def of_matrices(text):
    """In float32, which linear algebra wants."""
    functions = expressions(text, "v, w", globals())
    return {name: wide(function) for name, function in functions.items()}


ALGEBRA = of_matrices("""
solve: jnp.linalg.solve(matrix(v, w), v)
cholesky: cholesky(v, w)
cho_solve: cho_solve(cho_factor(symmetric(v, w)), v)
inv: jnp.linalg.inv(matrix(v, w)) @ w
eigvalsh: jnp.linalg.eigvalsh(symmetric(v, w)) / 4
qr: jnp.abs(jnp.linalg.qr(matrix(v, w))[1]).sum(0) / 4
slogdet: v * jnp.linalg.slogdet(matrix(v, w))[1]
linear_solve: linear_solve(v, w)
cg: cg(lambda x: symmetric(w, w) @ x, v, maxiter=4)[0]
root: root(v, w)
cg_of_branches: cg_of_branches(v, w)
root_of_branches: root_of_branches(v, w)
reduce_pairs: reduce_pairs(v, w)
reduce_triples: reduce_triples(v, w)
reduce_with: v * lax.reduce(v * w, jnp.float32(0), lambda x, y: x + y + x * y, (0,)) / 8
""")
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
SIMPLE = leaves("""
add: v + w
mul: v * w
maximum: jnp.maximum(v, -w)
where: jnp.where(w > 0, v, -w)
sum: v.sum() * w
max: v.max() - w
sine: jnp.sin(v) + w
cast: jnp.cos(v.astype(jnp.float32) + w.astype(jnp.float32)).astype(v.dtype)
gather_a: lax.all_gather(v, "a")[1] * w
largest_b: lax.pmax(lax.stop_gradient(v), "b") - w
shift_a: v - lax.ppermute(w, "a", RING)
""")
RANDOM = leaves("""
uniform: v * jax.random.uniform(key, (3,), v.dtype)
normal: v + w * jax.random.normal(jax.random.fold_in(key, 3), (3,), v.dtype)
split: v * jax.random.uniform(jax.random.split(key, 3)[1], (), v.dtype)
bits: v + (jax.random.bits(key, (3,)) % 8).astype(v.dtype) / 8
permutation: jax.random.permutation(key, v) - w
""")


def ragged_product(v, w):
    rows = jnp.stack([v, w])[:, :, None]
    return lax.ragged_dot(jnp.outer(w, v), rows, jnp.int32([1, 2]))[:, 0]


def extrema(x, y):
    return jnp.maximum(x[0], y[0]), jnp.minimum(x[1], y[1])


# JAX (to 0.12) has no batching rule for them where these operands are mapped.
UNMAPPED = leaves("""
reduce: v - lax.reduce(v * w, w[0], lambda x, y: jnp.maximum(x, y), (0,))
reduce_two: v - sum(lax.reduce((v, w), (w[1], v[1]), extrema, (0,)))
reduce_window: lax.reduce_window(v, w[0], jnp.maximum, (2,), (1,), [(1, 0)]) - w
""")
UNMAPPED["ragged_dot"] = wide(ragged_product)
# No all_to_all: under vmap, JAX (to 0.12) gives it other shapes inside of a gradient.
COLLECTIVE = leaves("""
psum_a: v - w * lax.psum(v, "a") / 4
pmean_b: v * lax.pmean(v * w, "b")
psum_ab: v + lax.psum(jnp.sin(v * w), ("a", "b")) / 8
psum_w_a: v * lax.psum(w, "a") / 4
pmax_a: v - lax.pmax(lax.stop_gradient(v), "a") * w
ppermute_a: v - lax.ppermute(v * w, "a", RING)
all_gather_b: v + (lax.all_gather(v, "b") * w).mean(0)
psum_scatter_b: v * lax.psum_scatter(jnp.concatenate([v, w]), "b", tiled=True)
index_a: v * (1 + lax.axis_index("a").astype(v.dtype)) / 4
index_b: jnp.stack([v, w])[lax.axis_index("b")]
""")
COLLECTIVE |= {name: SIMPLE[name] for name in ("gather_a", "largest_b", "shift_a")}
LEAVES = ELEMENTWISE | ALGEBRA | SIMPLE | RANDOM | UNMAPPED | COLLECTIVE

# ------------------------------------------------------------------------------ wrappers


def vmapped(g):
    """Over v and w, so that what w decides differs in the elements."""
    return lambda v, w, key: jax.vmap(g, (0, 0, None))(
        jnp.stack([v, v / 2]), jnp.stack([w, -w]), key
    ).mean(0)


def vmapped_in_part(g):
    return lambda v, w, key: jax.vmap(lambda c: g(v, w * c, key))(
        jnp.array([1, 0.5], v.dtype)
    ).mean(0)


def scan(g):
    def run(v, w, key):
        def turn(carry, c):
            return (g(carry, w * c, key), carry.sum())

        out, sums = lax.scan(turn, v, jnp.array([1, 0.5], v.dtype))
        return out + sums.mean()

    return run


def loop(g):
    """As many turns as w says, by a while loop."""
    return lambda v, w, key: lax.fori_loop(0, 1 + (w[0] > 0), lambda _, c: g(c, w, key), v)


def counted(g):
    return lambda v, w, key: lax.fori_loop(0, 2, lambda _, c: g(c, w, key), v)


def cond(g):
    return lambda v, w, key: lax.cond(w[0] > 0, lambda: g(v, w, key), lambda: v * w)


def switch(g):
    def index(w):
        return (w[0] > 0).astype(int) + (w[1] > 0)

    branches = [
        lambda v, w, key: -v,
        lambda v, w, key: g(v, w, key),
        lambda v, w, key: jnp.tanh(v) * w,
    ]
    return lambda v, w, key: lax.switch(index(w), branches, v, w, key)


def custom_jvp(g):
    """The tangent is twice the true one."""

    @jax.custom_jvp
    def f(v, w, key):
        return g(v, w, key)

    @f.defjvp
    def rule(primals, tangents):
        v, w, key = primals
        out, tangent = jax.jvp(lambda v, w: g(v, w, key), (v, w), tangents[:2])
        return out, 2 * tangent

    return f


def custom_vjp(g):
    """The cotangent of v is half of the true one.  The function closes over an array."""
    ones = jnp.ones(3)

    @jax.custom_vjp
    def f(v, w, key):
        return g(v, w * ones.astype(w.dtype), key)

    def bwd(saved, ct):
        v, w, key = saved
        dv, dw = jax.vjp(lambda v, w: g(v, w, key), v, w)[1](ct)
        return dv / 2, dw, None

    f.defvjp(lambda v, w, key: (g(v, w, key), (v, w, key)), bwd)
    return f


def custom_vjp_summing(g):
    """The cotangents are what the elements of both axes make of them together."""

    @jax.custom_vjp
    def f(v, w, key):
        return g(v, w, key)

    def fwd(v, w, key):
        out, pull = jax.vjp(lambda v, w: g(v, w, key), v, w)
        return out, (pull, lax.pmean(v, "a"))

    def bwd(saved, ct):
        pull, mean = saved
        dv, dw = pull(ct - lax.pmean(ct, "b") * mean)
        return dv + lax.psum(dw, "a") / 4, dw, None

    f.defvjp(fwd, bwd)
    return f


def custom_batched(g):
    """Batched by a rule, which does what vmap would do."""
    f = custom_vmap(lambda v, w: g(v, w, None))

    @f.def_vmap
    def rule(size, batched, v, w):
        if not any(batched):
            return g(v, w, None), False
        return jax.vmap(g, (*(0 if b else None for b in batched), None))(v, w, None), True

    return lambda v, w, key: f(v, w)


def gradient(g):
    return lambda v, w, key: jax.grad(lambda v: jnp.sum(g(v, w, key) * w))(v)


def tangent(g):
    return lambda v, w, key: jax.jvp(lambda v: g(v, w, key), (v,), (w,))[1]


def linearized(g):
    return lambda v, w, key: jax.linearize(lambda v: g(v, w, key), v)[1](w)


def remat(g):
    return jax.checkpoint(g)


def jit(g):
    return jax.jit(lambda v, w, key: g(v, w, key))


WRAPPERS = {
    f.__name__: f
    for f in (
        vmapped,
        vmapped_in_part,
        scan,
        loop,
        counted,
        cond,
        switch,
        remat,
        jit,
        gradient,
        tangent,
        linearized,
    )
    + (custom_jvp, custom_vjp, custom_vjp_summing, custom_batched)
}


def guarded(g):
    """Where w is negative, the branch is neither taken nor differentiable."""
    return lambda v, w, key: lax.cond(
        w[0] > 0, lambda: g(v, w * jnp.sqrt(w[0]), key), lambda: v * w
    )


def _of_weights(w):
    return jnp.sin(w) + lax.pmean(w**2, "a")


_with_rule = jax.custom_vjp(_of_weights)
_with_rule.defvjp(
    lambda w: (_of_weights(w), w), lambda w, ct: (jnp.cos(w) * ct + 2 * w * lax.pmean(ct, "a"),)
)


def shared(g):
    """The weights alone pass a rule with a sum of cotangents and a term of each element's own."""
    return lambda v, w, key: g(v, _with_rule(w), key)


def shared_without_rule(g):
    """What it computes: JAX's vmap cannot apply a rule with a collective to what is not mapped."""
    return lambda v, w, key: g(v, _of_weights(w), key)


# ------------------------------------------------------------------------------ programs


NEEDED = {"gradient": "reverse", "custom_vjp": "reverse", "custom_vjp_summing": "reverse"}
NEEDED |= {"tangent": "forward", "custom_jvp": "forward", "linearized": "forward"}
LOST = {
    "loop": "reverse",
    "shared": "forward",
    "custom_batched": "reverse",
    "custom_vjp": "forward",
    "custom_vjp_summing": "forward",
}


SPECIAL = {f.__name__: f for f in (guarded, shared, shared_without_rule)}


def modes(chain):
    """Which derivatives of a chain there are, "forward" and "reverse"; None if it asks for one that there is not."""
    kept = {"forward", "reverse"}
    for name in reversed(chain[:-1]):
        if NEEDED.get(name, name) not in kept | {name}:
            return None
        kept = kept - {LOST.get(name)}
    return kept


def draw(rng, leaves, wrappers):
    """A program of one or two chains of up to three wrappers."""
    chains = []
    while len(chains) < 1 + (rng.random() < 0.3):
        chain = [*rng.choice(sorted(wrappers), rng.integers(1, 4)), rng.choice(sorted(leaves))]
        if modes(chain) is not None and (
            "custom_batched" not in chain or may_have_batching_rule(chain)
        ):
            chains.append(chain)
    return "; ".join(" ".join(chain) for chain in chains)


def may_have_batching_rule(chain):
    """It has no collectives or keys; and JAX (to 0.12) fails to map branches that have such a rule."""
    if chain[-1] in COLLECTIVE | RANDOM or "custom_vjp_summing" in chain:
        return False
    return not ({"cond", "switch"} & set(chain) and {"vmapped", "vmapped_in_part"} & set(chain))


def chains_of(words):
    return [chain.split() for chain in words.split(";")]


def body(words):
    """The function that words make."""

    def wrap(g, name):
        return (WRAPPERS | SPECIAL)[name](g)

    pieces = [
        functools.reduce(wrap, reversed(wrappers), LEAVES[leaf])
        for *wrappers, leaf in chains_of(words)
    ]

    def program(v, w, key=None):
        for piece in pieces:
            v = piece(v, w, key)
        return v

    return program


def mentioned(words):
    """The axes that collectives are over: a collective's name ends with them."""
    used = [name for chain in chains_of(words) for name in chain]
    if "custom_vjp_summing" in used:
        return {"a", "b"}
    over = {axis for name in used if name in COLLECTIVE for axis in name.split("_")[-1]}
    return over | {"a"} if "shared" in used else over


def communicates_in_branches(words):
    return any(
        {"cond", "switch"} & set(chain) and mentioned(" ".join(chain)) for chain in chains_of(words)
    )
