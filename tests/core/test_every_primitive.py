"""Every primitive that JAX names, mapped, against the same function called element by element.

A primitive of ``jax.extend.core.primitives`` has a case, which binds it, or a line that says why it has none.  All
cases make one body, so that one compiled program per assignment serves them.  The oracle is the un-mapped function,
called for each element; for collectives it is ``jax.vmap`` with an axis name, which defines them.
"""

import warnings
from functools import cache, partial
from operator import itemgetter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives

from xmap_compat import _jax, xmap
from xmap_compat._jax.version import NEWEST_TESTED

N = 8
PRESENT = {p.name for key, p in vars(primitives).items() if key.endswith("_p")}
ASSIGNMENTS = {"none": {}, "several": {"i": "x"}, "one": {"i": ("x", "y")}}


def inputs(rng):
    a = rng.uniform(0.1, 0.9, (N, 4, 4)) + np.diag([4, 5, 6.5, 8])
    return {
        "f": rng.uniform(0.1, 0.9, (N, 8)).astype(np.float32),
        "g": rng.uniform(0.1, 0.9, (N, 8)).astype(np.float32),
        "A": a.astype(np.float32),
    }, {
        "z": (a + 1j * rng.uniform(0.1, 0.9, (N, 4, 4))).astype(np.complex64),
        "n": rng.integers(1, 7, (N, 4)).astype(np.int32),
        "m": rng.integers(1, 4, (N, 4)).astype(np.int32),
        "at": rng.integers(0, 4, (N, 2)).astype(np.int32),
        "p": rng.uniform(size=N) > 0.5,
        "key": jax.random.split(jax.random.key(0), N),
        "seed": rng.integers(1, 1000, N).astype(np.uint32),
        "raw": rng.integers(1, 1000, (N, 4)).astype(np.uint32),
    }


def named(names, function, *operands):
    """A case for each name: the function of ``jax.lax`` of that name, or ``function``, of these fields."""
    return {
        name: lambda v, call=function(name): call(*(getattr(v, operand) for operand in operands))
        for name in names.split()
    }


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


def written(v):
    ref = jax.new_ref(v.f)
    ref[2:4] = v.g[:2]
    ref[0] += 2
    return ref[...]


def whole():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


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
of_lax = partial(getattr, lax)

# The case of each primitive: a function of the fields of `inputs`.
CASES = {
    **named(UNARY, of_lax, "f"),
    **named(BINARY, of_lax, "f", "g"),
    **named(INTEGERS, of_lax, "n", "m"),
    **named("and or xor", lambda name: getattr(lax, f"bitwise_{name}"), "n", "m"),
    **named("clz population_count", of_lax, "n"),
    **named("conj real imag", of_lax, "z"),
    **named("eq_to le_to lt_to", lambda name: getattr(primitives, f"{name}_p").bind, "f", "g"),
    "not": lambda v: lax.bitwise_not(v.n),
    "acosh": lambda v: lax.acosh(v.f + 1),
    "add_any": lambda v: jax.grad(lambda x: jnp.sum(jnp.sin(x) * x))(v.f),
    "approx_top_k": lambda v: lax.approx_max_k(v.f, 3),
    "argmax": lambda v: jnp.argmax(v.f),
    "argmin": lambda v: jnp.argmin(v.A, axis=1),
    "bitcast_convert_type": lambda v: lax.bitcast_convert_type(v.f, jnp.int32),
    "broadcast_in_dim": lambda v: jnp.broadcast_to(v.f, (2, 8)),
    "cholesky": lambda v: lax.linalg.cholesky(symmetric(v.A)),
    "clamp": lambda v: lax.clamp(0.2, v.f, 0.7),
    "complex": lambda v: lax.complex(v.f, v.g),
    "concatenate": lambda v: jnp.concatenate([v.f, v.g]),
    "cond": lambda v: lax.cond(v.p, lambda x: 2 * x, lambda x: x * x, v.f),
    "conv_general_dilated": lambda v: lax.conv(
        v.A[None, None], v.A[None, None, :2, :2], (1, 1), "SAME"
    ),
    "convert_element_type": lambda v: v.n.astype(np.float32),
    "copy": lambda v: jnp.copy(v.f),
    "custom_jvp_call": lambda v: with_jvp(v.f),
    "custom_linear_solve": lambda v: lax.custom_linear_solve(
        lambda x: v.A @ x,
        v.f[:4],
        lambda _, b: jnp.linalg.solve(v.A, b),
        lambda _, b: jnp.linalg.solve(v.A.T, b),
    ),
    "custom_vjp_call": lambda v: with_vjp(v.f),
    "device_put": lambda v: jax.device_put(v.f),
    "dot_general": lambda v: v.A @ v.f[:4],
    "dynamic_slice": lambda v: lax.dynamic_slice(v.f, (v.at[0],), (3,)),
    "dynamic_update_slice": lambda v: lax.dynamic_update_slice(v.f, v.g[:3], (v.at[0],)),
    "eig": lambda v: [magnitudes(x) for x in jnp.linalg.eig(v.A)],
    "eigh": lambda v: jnp.linalg.eigh(symmetric(v.A)).eigenvalues,
    "eval_jaxpr": lambda v: primitives.call_p.bind(v.f, call_jaxpr=jax.make_jaxpr(jnp.sin)(v.f)),
    "fft": lambda v: jnp.fft.fft(v.f),
    "gather": lambda v: v.A[v.at],
    "get": written,
    "hessenberg": lambda v: lax.linalg.hessenberg(v.A),
    "householder_product": lambda v: lax.linalg.householder_product(v.A, v.f[:4]),
    "integer_pow": lambda v: v.f**3,
    "iota": lambda v: lax.iota(np.int32, 4) + v.n,
    "jit": lambda v: jax.jit(jnp.sin)(v.f),
    "log2": lambda v: jnp.log2(v.f),
    "lu": lambda v: lax.linalg.lu(v.A),
    "name": lambda v: checkpoint_name(jnp.sin(v.f), "s"),
    "one_minus_square": lambda v: jax.jvp(jnp.tanh, (v.f,), (v.g,)),
    "pad": lambda v: lax.pad(v.f, v.g[0], [(1, 2, 1)]),
    "polygamma": lambda v: lax.polygamma(1 + v.f, v.g),
    "polynomial": lambda v: jnp.polyval(v.f, v.g),
    "qr": lambda v: lax.linalg.qr(v.A),
    "random_bits": lambda v: jax.random.bits(v.key, (3,)),
    "random_fold_in": lambda v: jax.random.key_data(jax.random.fold_in(v.key, v.n[0])),
    "random_gamma": lambda v: jax.random.gamma(v.key, v.f),
    "random_seed": lambda v: jax.random.key_data(jax.random.key(v.seed)),
    "random_split": lambda v: jax.random.key_data(jax.random.split(v.key)),
    "reduce": lambda v: lax.reduce(v.f, np.float32(1), lambda a, b: a * b + a + b, (0,)),
    "reduce_and": lambda v: jnp.all(v.A > 0.2, axis=1),
    "reduce_max": lambda v: jnp.max(v.A, axis=0),
    "reduce_min": lambda v: jnp.min(v.A, axis=0),
    "reduce_or": lambda v: jnp.any(v.A > 0.8, axis=1),
    "reduce_precision": lambda v: lax.reduce_precision(v.f, 5, 4),
    "reduce_prod": lambda v: jnp.prod(v.A, axis=0),
    "reduce_sum": lambda v: jnp.sum(v.A, axis=0),
    "reduce_window": lambda v: window(0, lambda a, b: a + b * 1, v.A),
    "reduce_window_max": lambda v: window(-np.inf, lax.max, v.A),
    "reduce_window_min": lambda v: window(np.inf, lax.min, v.A),
    "reduce_window_sum": lambda v: window(0, lax.add, v.A),
    "reduce_xor": lambda v: lax.reduce_xor(v.A > 0.5, (0,)),
    "regularized_incomplete_beta": lambda v: lax.betainc(v.f, v.g, v.f * v.g),
    "remat2": lambda v: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(v.f),
    "reshape": lambda v: v.A.reshape(2, 8),
    "rev": lambda v: v.f[::-1],
    "rng_bit_generator": lambda v: lax.rng_bit_generator(v.raw, (4,)),
    "rng_uniform": lambda v: lax.rng_uniform(v.f[0], v.f[0] + 1, (3,)) < v.f[0],
    "scan": lambda v: lax.scan(lambda c, x: (c * x + 1, c + x), v.g[0], v.f),
    "scatter": lambda v: v.f.at[v.at[0]].set(v.g[0]),
    "scatter-add": lambda v: v.f.at[v.at].add(v.g[:2]),
    "scatter-max": lambda v: v.f.at[v.at].max(v.g[:2]),
    "scatter-min": lambda v: v.f.at[v.at].min(v.g[:2]),
    "scatter-mul": lambda v: v.f.at[v.at[0]].multiply(v.g[0]),
    "schur": lambda v: [magnitudes(x) for x in lax.linalg.schur(v.A)],
    "select_and_gather_add": lambda v: jax.jvp(pool, (v.A,), (v.A * v.A,)),
    "select_and_scatter_add": lambda v: jax.grad(lambda x: jnp.sum(pool(x) ** 2))(v.A),
    "select_n": lambda v: jnp.where(v.f > v.g, v.f, 0),
    "sharding_constraint": lambda v: lax.with_sharding_constraint(v.f, whole()),
    "slice": lambda v: lax.slice(v.f, (1,), (7,), (2,)),
    "sort": lambda v: lax.sort((v.f, v.g)),
    "squeeze": lambda v: lax.squeeze(v.f[:1], (0,)),
    "svd": lambda v: jnp.linalg.svd(v.A, compute_uv=False),
    "swap": written,
    "threefry2x32": lambda v: primitives.threefry2x32_p.bind(*v.raw[:, None]),
    "top_k": lambda v: lax.top_k(v.f, 3),
    "transpose": lambda v: v.A.T,
    "triangular_solve": lambda v: lax.linalg.triangular_solve(v.A, v.A, lower=True),
    "tridiagonal": lambda v: lax.linalg.tridiagonal(symmetric(v.A)),
    "tridiagonal_solve": lambda v: lax.linalg.tridiagonal_solve(v.f, v.f + 4, v.g, v.g[:, None]),
    "while": lambda v: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + c[1][1], c[1] * 1.5), (v.f[0], v.g)
    ),
    "zeta": lambda v: lax.zeta(1 + v.f, v.g),
}
COLLECTIVES = {
    "all_gather": lambda v: lax.all_gather(v.f, "i"),
    "all_to_all": lambda v: lax.all_to_all(v.f, "i", 0, 0),
    "axis_index": lambda v: lax.axis_index("i"),
    "pmax": lambda v: lax.pmax(v.f, "i"),
    "pmin": lambda v: lax.pmin(v.f, "i"),
    "ppermute": lambda v: lax.ppermute(v.f, "i", [(k, (k + 3) % N) for k in range(N)]),
    "psum": lambda v: lax.psum(v.f, "i"),
}
# Of primitives that public functions bind, though the list of `jax.extend` has them not.
OF_FUNCTIONS = {
    "call_hi_primitive": lambda v: jnp.searchsorted(v.f, v.g),
    "dce_sink": lambda v: (lax.dce_sink(v.f), v.g)[1],
    "geqrf": lambda v: jnp.linalg.qr(v.A, mode="raw"),
    "optimization_barrier": lambda v: lax.optimization_barrier(v.f),
    "ormqr": lambda v: lax.linalg.ormqr(v.A, v.f[:4], v.A.T),
    "platform_index": lambda v: lax.platform_dependent(v.f, cpu=jnp.sin, default=jnp.cos),
    "random_clone": lambda v: jax.random.key_data(jax.random.clone(v.key)),
    "random_unwrap": lambda v: jax.random.key_data(v.key),
    "scaled_dot": lambda v: lax.scaled_dot(v.A, v.A.T),
    "split": lambda v: lax.split(v.f, (3, 5)),
    "stack": lambda v: jnp.stack([v.f, v.g]),
    "symmetric_product": lambda v: lax.linalg.symmetric_product(v.A, v.A.T),
    "tile": lambda v: jnp.tile(v.f, 2),
    "unstack": lambda v: jnp.unstack(v.f),
}
# Why a primitive has no case.
REASONS = {
    "after_all": "a token has no meaning among effects without order: refused in words",
    "call": "no public function binds it; newer releases have it no more",
    "closed_call": "no public function binds it; newer releases have it no more",
    "create_token": "a token has no meaning among effects without order: refused in words",
    "custom_lin": "JAX makes it within a derivative and transposes it away; it cannot be evaluated",
    "empty": "its value is undefined",
    "empty2": "its value is undefined",
    "mulhi": "JAX cannot lower it within shard_map",
    "pbroadcast": "jax.vmap, the oracle here, has no rule for it; test_collectives has its tests",
    "ragged_all_to_all": "XLA does not have it on CPU",
    "select_and_scatter": "no public function binds it, and jax.vmap refuses it",
}
CASES, COLLECTIVES = (
    {p: case for p, case in cases.items() if p in PRESENT} for cases in (CASES, COLLECTIVES)
)


def bound(jaxpr):
    """The names of the primitives that a program binds, in the programs inside it too."""
    names = set()
    for eqn in jaxpr.eqns:
        names.add(eqn.primitive.name)
        inner = jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        )
        names.update(*(bound(j) for x in inner if hasattr(j := getattr(x, "jaxpr", x), "eqns")))
    return names


def results(cases, fields):
    return {name: case(SimpleNamespace(**fields)) for name, case in cases.items()}


def one_element(k):
    floats, others = inputs(np.random.default_rng(0))
    return jax.tree.map(lambda x: x[k], {**floats, **others})


def binds(name, case):
    """Whether a case binds a primitive in the JAX that is installed."""
    program = jax.make_jaxpr(partial(results, {name: case}), axis_env=[("i", N)])(one_element(0))
    return name in bound(program.jaxpr)


CASES |= {name: case for name, case in OF_FUNCTIONS.items() if binds(name, case)}


@pytest.mark.parametrize("name", sorted(CASES | COLLECTIVES))
def test_each_case_binds_its_primitive(name):
    assert binds(name, (CASES | COLLECTIVES)[name])


def test_each_primitive_has_a_case_or_a_reason():
    listed = {*CASES, *COLLECTIVES, *REASONS}
    assert not REASONS.keys() & (CASES | COLLECTIVES).keys()
    assert len(REASONS) <= 15
    unlisted = sorted(PRESENT - listed)
    newer = _jax.parse_version(NEWEST_TESTED) < _jax.VERSION
    if unlisted and newer:
        warnings.warn(
            f"jax {jax.__version__} has primitives without a case: {unlisted}", stacklevel=1
        )
    else:
        assert not unlisted


def steady(call, *args, rtol=2e-4, atol=2e-5):
    """The result in which two calls in a row agree, as NumPy arrays.

    In a program of many operations, XLA on CPUs (jaxlib 0.12) gives a wrong triangular solve, or eigenvalue, once in
    some hundred calls: a plain ``jax.jit(jax.vmap(...))`` of these cases does too.  What is wrong of ours is steady.
    """
    compute = lambda: jax.tree.map(np.asarray, call(*args))
    before, now = compute(), compute()
    for _ in range(5):
        if not unequal(now, before, rtol, atol):
            break
        before, now = now, compute()
    return now


@cache
def expected():
    """The results of every element, and those of collectives as ``jax.vmap`` defines them."""
    floats, others = inputs(np.random.default_rng(0))
    call = jax.jit(partial(results, CASES))
    parts = [steady(call, one_element(k)) for k in range(N)]
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


@pytest.mark.parametrize("on", ASSIGNMENTS.values(), ids=ASSIGNMENTS)
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
    call, fields = jax.jit(partial(results, CASES)), {**floats, **others}
    pick = lambda place: {
        name: jax.tree.map(itemgetter(place[OVER[name]]), x) for name, x in fields.items()
    }
    found = [steady(call, pick({"i": k // N, "j": k % N})) for k in range(N * N)]
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
    parts = [jnp.ravel(x) for x in jax.tree.leaves(values) if jnp.issubdtype(x.dtype, jnp.inexact)]
    parts = [y for x in parts for y in ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,))]
    return sum(
        (jnp.sum(x * jnp.cos(jnp.arange(x.size, dtype=np.float32))) for x in parts), jnp.float32(0)
    )


def of_floats(case, floats, others):
    return total(case(SimpleNamespace(**floats, **others)))


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
    with mesh42:
        got = jax.grad(
            lambda v: jnp.sum(xmap(function, ["i"], ["i"], axis_resources={"i": "x"})(v))
        )(x)
    np.testing.assert_allclose(got, [jax.grad(function)(v) for v in x], rtol=1e-5)
