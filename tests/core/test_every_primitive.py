"""Every primitive that JAX names, mapped, against the same function called element by element.

A primitive of ``jax.extend.core.primitives`` has a case, which binds it, or a line that says why it has none.  All
cases make one body, so that one compiled program per assignment serves them.  The oracle is the un-mapped function,
called for each element; for collectives it is ``jax.vmap`` with an axis name, which defines them.
"""

from functools import cache, partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import newest
import numpy as np
import pytest
from equations import equations
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives
from tables import expressions

from xmap_compat import xmap

N = 8
PRESENT = {p.name for key, p in vars(primitives).items() if key.endswith("_p")}
ASSIGNMENTS = {"none": {}, "several": {"i": "x"}, "one": {"i": ("x", "y")}}


def inputs(rng):
    """Floats and others, each with a first dimension for the elements."""
    return jax.tree.map(lambda draw: draw(rng), (FLOATS, OTHERS))


def uniform(rng, *shape):
    return rng.uniform(0.1, 0.9, (N, *shape))


def matrices(rng):
    return uniform(rng, 4, 4) + np.diag([4, 5, 6.5, 8])


FLOATS = expressions(
    """
f: uniform(rng, 8).astype(np.float32)
g: uniform(rng, 8).astype(np.float32)
A: matrices(rng).astype(np.float32)
""",
    "rng",
    globals(),
)
OTHERS = expressions(
    """
z: (matrices(rng) + 1j * uniform(rng, 4, 4)).astype(np.complex64)
n: rng.integers(1, 7, (N, 4)).astype(np.int32)
m: rng.integers(1, 4, (N, 4)).astype(np.int32)
at: rng.integers(0, 4, (N, 2)).astype(np.int32)
p: uniform(rng) > 0.5
key: jax.random.split(jax.random.key(0), N)
seed: rng.integers(1, 1000, N).astype(np.uint32)
raw: rng.integers(1, 1000, (N, 4)).astype(np.uint32)
""",
    "rng",
    globals(),
)


FIELDS = "f, g, A, z, n, m, at, p, key, seed, raw"


def cases(text):
    """Functions of the fields of `inputs`, of lines such as ``dot_general: A @ f[:4]``."""
    return expressions(text, FIELDS, globals())


def each(names, expression):
    """A case for each name, which stands for ``{}`` in the expression."""
    lines = [f"{name}: {expression.format(name)}" for name in names.split()]
    return cases("\n".join(lines))


def window(init, function, x):
    return lax.reduce_window(x, np.float32(init), function, (2, 2), (1, 1), "SAME")


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x)


with_jvp.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), tangents[0] * 3))


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * x,))


def whole():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def solved(a, b):
    def solve(_, b):
        return jnp.linalg.solve(a, b)

    def transposed(_, b):
        return jnp.linalg.solve(a.T, b)

    return lax.custom_linear_solve(lambda x: a @ x, b, solve, transposed)


def tagged(x):
    return checkpoint_name(x, "s")


def symmetric(a):
    return a + a.T


def magnitudes(x):
    """What of complex vectors does not depend on their phase."""
    return jnp.abs(x)


UNARY = """abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2
expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh stop_gradient
cumlogsumexp cummax cummin cumprod cumsum"""
BINARY = (
    "add atan2 div eq ge gt igamma igamma_grad_a igammac le lt max min mul ne nextafter pow rem sub"
)
INTEGERS = "shift_left shift_right_arithmetic shift_right_logical"
OF_FIELDS = cases("""
not: lax.bitwise_not(n)
acosh: lax.acosh(f + 1)
add_any: jax.grad(lambda x: jnp.sum(jnp.sin(x) * x))(f)
approx_top_k: lax.approx_max_k(f, 3)
argmax: jnp.argmax(f)
argmin: jnp.argmin(A, axis=1)
bitcast_convert_type: lax.bitcast_convert_type(f, jnp.int32)
broadcast_in_dim: jnp.broadcast_to(f, (2, 8))
cholesky: lax.linalg.cholesky(symmetric(A))
clamp: lax.clamp(0.2, f, 0.7)
complex: lax.complex(f, g)
concatenate: jnp.concatenate([f, g])
cond: lax.cond(p, lambda x: 2 * x, lambda x: x * x, f)
conv_general_dilated: lax.conv(A[None, None], A[None, None, :2, :2], (1, 1), "SAME")
convert_element_type: n.astype(np.float32)
copy: jnp.copy(f)
custom_jvp_call: with_jvp(f)
custom_linear_solve: solved(A, f[:4])
custom_vjp_call: with_vjp(f)
device_put: jax.device_put(f)
dot_general: A @ f[:4]
dynamic_slice: lax.dynamic_slice(f, (at[0],), (3,))
dynamic_update_slice: lax.dynamic_update_slice(f, g[:3], (at[0],))
eig: [magnitudes(x) for x in jnp.linalg.eig(A)]
eigh: jnp.linalg.eigh(symmetric(A)).eigenvalues
eval_jaxpr: primitives.call_p.bind(f, call_jaxpr=jax.make_jaxpr(jnp.sin)(f))
fft: jnp.fft.fft(f)
gather: A[at]
hessenberg: lax.linalg.hessenberg(A)
householder_product: lax.linalg.householder_product(A, f[:4])
integer_pow: f ** 3
iota: lax.iota(np.int32, 4) + n
jit: jax.jit(jnp.sin)(f)
log2: jnp.log2(f)
lu: lax.linalg.lu(A)
name: tagged(jnp.sin(f))
one_minus_square: jax.jvp(jnp.tanh, (f,), (g,))
pad: lax.pad(f, g[0], [(1, 2, 1)])
polygamma: lax.polygamma(1 + f, g)
polynomial: jnp.polyval(f, g)
qr: lax.linalg.qr(A)
random_bits: jax.random.bits(key, (3,))
random_fold_in: jax.random.key_data(jax.random.fold_in(key, n[0]))
random_gamma: jax.random.gamma(key, f)
random_seed: jax.random.key_data(jax.random.key(seed))
random_split: jax.random.key_data(jax.random.split(key))
reduce: lax.reduce(f, np.float32(1), lambda a, b: a * b + a + b, (0,))
reduce_and: jnp.all(A > 0.2, axis=1)
reduce_max: jnp.max(A, axis=0)
reduce_min: jnp.min(A, axis=0)
reduce_or: jnp.any(A > 0.8, axis=1)
reduce_precision: lax.reduce_precision(f, 5, 4)
reduce_prod: jnp.prod(A, axis=0)
reduce_sum: jnp.sum(A, axis=0)
reduce_window: window(0, lambda a, b: a + b * 1, A)
reduce_window_max: window(-np.inf, lax.max, A)
reduce_window_min: window(np.inf, lax.min, A)
reduce_window_sum: window(0, lax.add, A)
reduce_xor: lax.reduce_xor(A > 0.5, (0,))
regularized_incomplete_beta: lax.betainc(f, g, f * g)
remat2: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(f)
reshape: A.reshape(2, 8)
rev: f[::-1]
rng_bit_generator: lax.rng_bit_generator(raw, (4,))
rng_uniform: lax.rng_uniform(f[0], f[0] + 1, (3,)) < f[0]
scan: lax.scan(lambda c, x: (c * x + 1, c + x), g[0], f)
scatter: f.at[at[0]].set(g[0])
scatter-add: f.at[at].add(g[:2])
scatter-max: f.at[at].max(g[:2])
scatter-min: f.at[at].min(g[:2])
scatter-mul: f.at[at[0]].multiply(g[0])
schur: [magnitudes(x) for x in lax.linalg.schur(A)]
select_and_gather_add: jax.jvp(pool, (A,), (A * A,))
select_and_scatter_add: jax.grad(lambda x: jnp.sum(pool(x) ** 2))(A)
select_n: jnp.where(f > g, f, 0)
sharding_constraint: lax.with_sharding_constraint(f, whole())
slice: lax.slice(f, (1,), (7,), (2,))
sort: lax.sort((f, g))
squeeze: lax.squeeze(f[:1], (0,))
svd: jnp.linalg.svd(A, compute_uv=False)
threefry2x32: primitives.threefry2x32_p.bind(*raw[:, None])
top_k: lax.top_k(f, 3)
transpose: A.T
triangular_solve: lax.linalg.triangular_solve(A, A, lower=True)
tridiagonal: lax.linalg.tridiagonal(symmetric(A))
tridiagonal_solve: lax.linalg.tridiagonal_solve(f, f + 4, g, g[:, None])
while: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + c[1][1], c[1] * 1.5), (f[0], g))
zeta: lax.zeta(1 + f, g)
""")
CASES = {
    **each(UNARY, "lax.{}(f)"),
    **each(BINARY, "lax.{}(f, g)"),
    **each(INTEGERS, "lax.{}(n, m)"),
    **each("and or xor", "lax.bitwise_{}(n, m)"),
    **each("clz population_count", "lax.{}(n)"),
    **each("conj real imag", "lax.{}(z)"),
    **each("eq_to le_to lt_to", "primitives.{}_p.bind(f, g)"),
    **OF_FIELDS,
}
COLLECTIVES = cases("""
all_gather: lax.all_gather(f, "i")
all_to_all: lax.all_to_all(f, "i", 0, 0)
axis_index: lax.axis_index("i")
pmax: lax.pmax(f, "i")
pmin: lax.pmin(f, "i")
ppermute: lax.ppermute(f, "i", [(k, (k + 3) % N) for k in range(N)])
psum: lax.psum(f, "i")
""")
# Of primitives that public functions bind, though the list of `jax.extend` has them not.
OF_FUNCTIONS = cases("""
call_hi_primitive: jnp.searchsorted(f, g)
dce_sink: (lax.dce_sink(f), g)[1]
geqrf: jnp.linalg.qr(A, mode="raw")
optimization_barrier: lax.optimization_barrier(f)
ormqr: lax.linalg.ormqr(A, f[:4], A.T)
platform_index: lax.platform_dependent(f, cpu=jnp.sin, default=jnp.cos)
random_clone: jax.random.key_data(jax.random.clone(key))
random_unwrap: jax.random.key_data(key)
scaled_dot: lax.scaled_dot(A, A.T)
split: lax.split(f, (3, 5))
stack: jnp.stack([f, g])
symmetric_product: lax.linalg.symmetric_product(A, A.T)
tile: jnp.tile(f, 2)
unstack: jnp.unstack(f)
""")
# Why a primitive has no case.
REASONS = {
    "after_all": "a token has no meaning among effects without order: refused in words",
    "call": "no public function binds it; newer releases have it no more",
    "closed_call": "no public function binds it; newer releases have it no more",
    "create_token": "a token has no meaning among effects without order: refused in words",
    "custom_lin": "JAX makes it within a derivative and transposes it away; it cannot be evaluated",
    "empty": "its value is undefined",
    "empty2": "its value is undefined",
    "get": "references are refused in words",
    "mulhi": "JAX cannot lower it within shard_map",
    "pbroadcast": "jax.vmap, the oracle here, has no rule for it; test_matrix has its tests",
    "ragged_all_to_all": "XLA does not have it on CPU",
    "select_and_scatter": "no public function binds it, and jax.vmap refuses it",
    "swap": "references are refused in words",
}
CASES = {name: CASES[name] for name in CASES if name in PRESENT}
COLLECTIVES = {name: COLLECTIVES[name] for name in COLLECTIVES if name in PRESENT}


def bound(program):
    """The names of the primitives that a program binds, in the programs inside it too."""
    return {eqn.primitive.name for eqn, _ in equations(program)}


def results(cases, fields):
    return {name: case(**fields) for name, case in cases.items()}


def one_element(k):
    floats, others = inputs(np.random.default_rng(0))
    return jax.tree.map(lambda x: x[k], {**floats, **others})


def binds(name, case):
    """Whether a case binds a primitive in the JAX that is installed."""
    program = jax.make_jaxpr(partial(results, {name: case}), axis_env=[("i", N)])(one_element(0))
    return name in bound(program)


CASES |= {name: case for name, case in OF_FUNCTIONS.items() if binds(name, case)}


@pytest.mark.parametrize("name", sorted(CASES | COLLECTIVES))
def test_each_case_binds_its_primitive(name):
    assert binds(name, (CASES | COLLECTIVES)[name])


def test_each_primitive_has_a_case_or_a_reason():
    listed = {*CASES, *COLLECTIVES, *REASONS}
    assert not REASONS.keys() & (CASES | COLLECTIVES).keys()
    assert len(REASONS) <= 15
    unlisted = sorted(PRESENT - listed)
    newest.assert_empty(unlisted, "primitives without a case")


def steady(call, *args, rtol=2e-4, atol=2e-5):
    """The result in which two calls in a row agree, as NumPy arrays.

    In a program of many operations, XLA on CPUs (jaxlib 0.12) gives a wrong triangular solve, or eigenvalue, once in
    some hundred calls: a plain ``jax.jit(jax.vmap(...))`` of these cases does too.  What is wrong of ours is steady.
    """

    def compute():
        return jax.tree.map(np.asarray, call(*args))

    before, now = compute(), compute()
    for _ in range(5):
        if not unequal(now, before, rtol, atol):
            break
        before, now = now, compute()
    return now


of_one_element = jax.jit(partial(results, CASES))


@cache
def expected():
    """The results of every element, and those of collectives as ``jax.vmap`` defines them."""
    floats, others = inputs(np.random.default_rng(0))
    parts = [steady(of_one_element, one_element(k)) for k in range(N)]
    mapped = jax.vmap(partial(results, COLLECTIVES), axis_name="i")({**floats, **others})
    return jax.tree.map(lambda *xs: np.stack(xs), *parts) | jax.tree.map(np.asarray, mapped)


def unequal(got, want, rtol=2e-4, atol=2e-5):
    """What differs, by the name of the primitive."""
    wrong = {}
    assert got.keys() == want.keys()
    for name in want:
        try:
            jax.tree.map(
                partial(np.testing.assert_allclose, rtol=rtol, atol=atol), got[name], want[name]
            )
        except AssertionError as e:
            wrong[name] = str(e)
    return wrong


# What "none" and "several" find, operands that vary over different axes find below.
BY_ELEMENT = [
    pytest.param(ASSIGNMENTS["none"], id="none", marks=pytest.mark.slow),
    pytest.param(ASSIGNMENTS["several"], id="several", marks=pytest.mark.slow),
    pytest.param(ASSIGNMENTS["one"], id="one"),
]


@pytest.mark.parametrize("on", BY_ELEMENT)
def test_every_primitive_is_as_element_by_element(on, mesh42):
    floats, others = inputs(np.random.default_rng(0))
    call = xmap(partial(results, CASES | COLLECTIVES), ["i", ...], ["i", ...], axis_resources=on)
    with mesh42:
        got = steady(call, {**floats, **others})
    assert not unequal(got, expected())


# In the place of one axis, two, of which each field varies over one: operands that vary over different axes meet.
OVER = dict.fromkeys(["f", "A", "n", "p", "raw"], "i") | dict.fromkeys(
    ["g", "z", "m", "at", "key", "seed"], "j"
)


@cache
def expected_over_two_axes():
    floats, others = inputs(np.random.default_rng(0))
    fields = {**floats, **others}

    def pick(place):
        return {name: jax.tree.map(itemgetter(place[OVER[name]]), x) for name, x in fields.items()}

    found = [steady(of_one_element, pick({"i": k // N, "j": k % N})) for k in range(N * N)]
    return jax.tree.map(lambda *xs: np.stack(xs).reshape(N, N, *xs[0].shape), *found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("on", [{}, {"i": "x", "j": "y"}, {"j": ("y", "x")}], ids=str)
def test_every_primitive_of_operands_that_vary_over_different_axes(on, mesh42):
    floats, others = inputs(np.random.default_rng(0))
    specs = {name: [axis, ...] for name, axis in OVER.items()}
    call = xmap(partial(results, CASES), (specs,), ["i", "j", ...], axis_resources=on)
    with mesh42:
        got = steady(call, {**floats, **others})
    assert not unequal(got, expected_over_two_axes())


def total(values):
    """A sum of all floating results, each weighted by another number."""
    parts = []
    for x in jax.tree.leaves(values):
        if jnp.iscomplexobj(x):
            parts += [x.real, x.imag]
        elif jnp.issubdtype(x.dtype, jnp.inexact):
            parts.append(x)
    found = jnp.float32(0)
    for x in parts:
        found += jnp.sum(jnp.ravel(x) * jnp.cos(jnp.arange(x.size, dtype=np.float32)))
    return found


def of_floats(case, floats, others):
    return total(case(**floats, **others))


@cache
def differentiable():
    """The cases of which JAX has a gradient."""
    floats, others = inputs(np.random.default_rng(0))
    floats, others = jax.tree.map(lambda x: x[0], (floats, others))
    found = {}
    for name, case in CASES.items():
        try:
            jax.eval_shape(jax.grad(partial(of_floats, case)), floats, others)
        except (NotImplementedError, TypeError, ValueError):
            continue
        found[name] = case
    return found


def totals(floats, others):
    """The total of each case, of floats of its own: a gradient keeps the cases apart."""
    return {name: of_floats(case, floats[name], others) for name, case in differentiable().items()}


@cache
def expected_gradients():
    floats, others = inputs(np.random.default_rng(0))
    gradient = jax.jit(jax.grad(lambda *args: sum(totals(*args).values())))
    args = (dict.fromkeys(differentiable(), floats), others)
    parts = [
        steady(gradient, *jax.tree.map(itemgetter(k), args), rtol=2e-3, atol=2e-4) for k in range(N)
    ]
    return jax.tree.map(lambda *xs: np.stack(xs), *parts)


@pytest.mark.slow
@pytest.mark.parametrize("on", ASSIGNMENTS.values(), ids=ASSIGNMENTS)
def test_gradients_of_every_primitive_are_as_element_by_element(on, mesh42):
    floats, others = inputs(np.random.default_rng(0))
    call = xmap(totals, (["i", ...], ["i", ...]), ["i", ...], axis_resources=on)
    gradient = jax.jit(jax.grad(lambda *args: sum(jnp.sum(x) for x in call(*args).values())))
    with mesh42:
        got = steady(
            gradient, dict.fromkeys(differentiable(), floats), others, rtol=2e-3, atol=2e-4
        )
    assert len(got) > 100
    assert not unequal(got, expected_gradients(), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("function", [lax.erf, lax.erfc, partial(jax.nn.gelu, approximate=False)])
def test_gradients_of_error_functions_over_a_mesh(function, mesh42):
    """JAX 0.12 refuses them in its own ``shard_map``: the derivative has a polynomial of constants."""
    x = np.linspace(-2, 2, N, dtype=np.float32)
    mapped = xmap(function, ["i"], ["i"], axis_resources={"i": "x"})
    with mesh42:
        got = jax.grad(lambda v: jnp.sum(mapped(v)))(x)
    want = jax.vmap(jax.grad(function))(x)
    np.testing.assert_allclose(got, want, rtol=1e-5)
