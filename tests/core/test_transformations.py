"""JAX's transformations, custom rules and callbacks work inside xmapped bodies and around xmapped functions.

Whatever is called inside a body gives what it gives under ``jax.vmap``; whatever is applied to an xmapped function
gives what it gives for the vmapped one; under every placement of the axes on a 4x2 mesh, and with axes
computed in serial loops where no names are mentioned.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_same
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import jaxpr_as_fun
from placements import IN_AXES, OUT_AXES, PLACEMENTS, arguments, around, mesh42, together, vmapped

from xmap_compat import SerialLoop, xmap

pytestmark = pytest.mark.usefixtures("end_a_hang")

# name: (size of a, size of b, axis_resources)
LOOPED_PLACEMENTS = {"a:x+loop,b:loop": (8, 4, {"a": ("x", SerialLoop(2)), "b": SerialLoop(2)})}


def xmapped(resources):
    return lambda body: xmap(body, IN_AXES, OUT_AXES, axis_resources=resources)


@functools.cache
def by_vmap(programs, a, b):
    return jax.jit(vmapped(together(programs)))(*arguments(a, b))


# ---------------------------------------------------------------- functions about functions


def shapes_and_jaxprs(x, u, w):
    def vector(x, u, w):
        return jnp.sin(x * u) + w * x[::-1]

    shape = jax.eval_shape(vector, x, u, w)
    jaxpr = jax.make_jaxpr(vector)(x, u, w)
    closed, constants = jax.closure_convert(lambda v: v * u, x)
    with jax.ensure_compile_time_eval():
        constant = jnp.arange(3.0).sum()
    with jax.named_scope("scope"):
        scoped = jax.named_call(lambda v: v + u, name="call")(x)
    zeros = jnp.zeros(shape.shape, shape.dtype)
    again = jaxpr_as_fun(jaxpr)(x, u, w)
    return zeros + x, again, closed(x, *constants), constant, scoped


def _matrix(x, u):
    return jnp.eye(3) * 4 + jnp.outer(x, x) + 0.1 * u


def ffi_call(x, u, w):
    """LAPACK's Cholesky factorization, called as a foreign function; what is first lowered by JAX has loaded LAPACK."""
    outputs = (jax.ShapeDtypeStruct((3, 3), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))
    layouts = {"input_layouts": [(0, 1)], "output_layouts": [(0, 1), ()]}
    call = jax.ffi.ffi_call("lapack_spotrf_ffi", outputs, vmap_method="sequential", **layouts)
    factor, info = call(_matrix(x, u), uplo=np.uint8(ord("L")))
    return jnp.tril(factor), info, jnp.linalg.cholesky(_matrix(x, u))


# ---------------------------------------------------------------------- pure callbacks


def pure_callbacks(x, u, w):
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)

    def add(v, t):
        return np.asarray(v) + np.asarray(t)[..., None]

    def row_sum(v):
        return np.sin(np.asarray(v)).sum(-1).astype(np.float32)

    added = []
    for method in ("sequential", "broadcast_all"):
        added.append(jax.pure_callback(add, shape, x, u, vmap_method=method))
    sums = [jax.pure_callback(row_sum, scalar, v, vmap_method="expand_dims") for v in (x, w)]
    return added, sums


def rules_that_close_over_named_values(x, u, w):
    """Their functions close over the named value u; differentiated inside of the body only, as jit demands."""
    forward = jax.custom_jvp(lambda v: v * u)
    forward.defjvp(lambda primals, tangents: (forward(*primals), tangents[0] * 7 * u))
    backward = jax.custom_vjp(lambda v: v * u)
    backward.defvjp(lambda v: (v * u, None), lambda _, ct: (ct * 3 * u,))

    def loss(v):
        return (forward(v) * backward(v) * w).sum()

    return jax.value_and_grad(loss)(x), jax.grad(loss)(w)


LOCAL = (
    shapes_and_jaxprs,
    pure_callbacks,
    ffi_call,
    rules_that_close_over_named_values,
)


def check_inside(programs, placement):
    a, b, resources = (PLACEMENTS | LOOPED_PLACEMENTS)[placement]
    with mesh42():
        result = xmapped(resources)(together(programs))(*arguments(a, b))
    assert_same(result, by_vmap(programs, a, b))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("placement", [*PLACEMENTS, *LOOPED_PLACEMENTS])
def test_inside(placement):
    check_inside(LOCAL, placement)


# --------------------------------------------------------------- custom derivative rules


@partial(jax.custom_jvp, nondiff_argnums=(0, 2))
def applied(function, v, power):
    return function(v) ** power


@applied.defjvp
def _applied_jvp(function, power, primals, tangents):
    value = function(primals[0])
    return value**power, power * value * tangents[0]


@jax.custom_jvp
def product(v, t):
    return v * t


product.defjvps(lambda dv, out, v, t: 2 * dv * t, lambda dt, out, v, t: 5 * dt * v)


@jax.custom_jvp
def zero_aware(v, t):
    return v + t


def _zero_aware_jvp(primals, tangents):
    """A rule whose factor tells how many tangents are not symbolically zero."""
    known = [t for t in tangents if type(t) is not jax.custom_derivatives.SymbolicZero]
    return zero_aware(*primals), 10.0 ** len(known) * sum(known)


zero_aware.defjvp(_zero_aware_jvp, symbolic_zeros=True)


@jax.custom_jvp
def partly_constant(v):
    return 2 * v, jnp.int32(3), v + 1


def _partly_constant_jvp(primals, tangents):
    """The tangent of an integer, and one that the rule declares to be zero."""
    zero = jax.custom_derivatives.SymbolicZero(jax.typeof(primals[0]).to_tangent_aval())
    of_integer = np.zeros((), jax.dtypes.float0)
    return partly_constant(*primals), (2 * tangents[0], of_integer, zero)


partly_constant.defjvp(_partly_constant_jvp, symbolic_zeros=True)


def jvp_rules_with_static_arguments(x, u, w):
    total = applied(jnp.sin, x * w, 3).sum()
    for v, t in [(x, u), (u * 1.0, w[0]), (w, w[1])]:
        total += product(v, t).sum()
    return total


def jvp_rule_with_symbolic_zeros(x, u, w):
    varying, number, constant = partly_constant(x)
    total = zero_aware(2.0, u)
    for t in (jnp.ones(3), w * u, jnp.cos(jnp.arange(3))):
        total += zero_aware(x, t).sum()
    return total + zero_aware(constant, varying * number).sum()


@jax.custom_vjp
def picked(v, index, flag):
    """Integer and boolean arguments: their cotangents are float0."""
    return jnp.where(flag, v[index], v.sum())


def _picked_bwd(residuals, ct):
    index, flag = residuals
    at_index = jnp.zeros(3).at[index].set(ct * 2)
    of_boolean = np.zeros((), jax.dtypes.float0)
    return jnp.where(flag, at_index, ct), None, of_boolean


picked.defvjp(lambda v, index, flag: (picked(v, index, flag), (index, flag)), _picked_bwd)


@jax.custom_vjp
def tree_function(tree, other):
    return {"sum": tree["p"] + other, "pair": (tree["q"][0] * other, tree["q"][0])}


def _tree_bwd(residuals, ct):
    q, other = residuals
    first, second = ct["pair"]
    of_q = (first * other).sum() + second
    return {"p": ct["sum"] * 2, "q": [of_q]}, ct["sum"] + first * q


tree_function.defvjp(
    lambda tree, other: (tree_function(tree, other), (tree["q"][0], other)), _tree_bwd
)


@jax.custom_vjp
def perturbation_aware(v, t):
    return v * t


def _perturbation_fwd(v, t):
    """Keep only what the backward pass needs."""
    kept_t = t.value if v.perturbed else None
    kept_v = v.value if t.perturbed else None
    return v.value * t.value, (kept_t, kept_v, jnp.zeros_like(t.value))


def _perturbation_bwd(residuals, ct):
    t, v, nothing = residuals
    if isinstance(ct, jax.custom_derivatives.SymbolicZero):
        ct = jnp.zeros(ct.shape, ct.dtype)
    of_v = None if t is None else ct * t
    of_t = nothing if v is None else (ct * v).sum() * 2
    return of_v, of_t


perturbation_aware.defvjp(_perturbation_fwd, _perturbation_bwd, symbolic_zeros=True)


@jax.custom_vjp
def cotangent_aware(v):
    return 2 * v, 3 * v


def _cotangent_aware_bwd(_, cotangents):
    """Far off unless it is told which cotangents are zero."""
    known = [ct for ct in cotangents if type(ct) is not jax.custom_derivatives.SymbolicZero]
    return (10.0 ** len(known) * sum(known),)


cotangent_aware.defvjp(
    lambda v: (cotangent_aware(v.value), None), _cotangent_aware_bwd, symbolic_zeros=True
)


def vjp_rule_with_integers(x, u, w):
    index = (jnp.abs(u) * 5).astype(int) % 3
    return picked(x, index, u > 0) + picked(w, index, x[0] > 0) + picked(w, 1, True)


def vjp_rule_of_pytrees(x, u, w):
    out = tree_function({"p": x, "q": [u]}, w)
    other = tree_function({"p": w, "q": [1.0]}, x)
    first, second = out["pair"]
    return (out["sum"] * first).sum() + second * other["sum"].sum()


def plain_vjp_rule_of_pytrees(x, u, w):
    """The same without a rule; jax.vmap counts cotangents twice where a rule has results that do and do not vary."""

    def function(tree, other):
        doubled = 2 * tree["p"] - lax.stop_gradient(tree["p"])
        return {"sum": doubled + other, "pair": (tree["q"][0] * other, tree["q"][0])}

    out = function({"p": x, "q": [u]}, w)
    other = function({"p": w, "q": [1.0]}, x)
    first, second = out["pair"]
    return (out["sum"] * first).sum() + second * other["sum"].sum()


def vjp_rule_with_symbolic_zeros(x, u, w):
    constant = perturbation_aware(x * w, jnp.float32(2.0))
    perturbed = constant.sum() + perturbation_aware(w, u).sum()
    return perturbed + cotangent_aware(x)[0].sum() + sum(cotangent_aware(u * w))[0]


RULES = {
    "custom_jvp": (jvp_rules_with_static_arguments, jvp_rule_with_symbolic_zeros),
    "custom_vjp": (
        vjp_rule_with_integers,
        vjp_rule_of_pytrees,
        vjp_rule_with_symbolic_zeros,
    ),
}


def value_and_gradients(programs, over):
    """Of each program the value, the gradient inside of its body, and the gradient of the whole from outside."""

    def one(program, args):
        mapped = over(program)
        outside = jax.grad(lambda *args: jnp.sin(mapped(*args)).sum(), argnums=(0, 1, 2))
        inside = over(jax.grad(program, argnums=(0, 1, 2)))
        return {"value": mapped(*args), "outside": outside(*args), "inside": inside(*args)}

    return jax.jit(lambda *args: {program.__name__: one(program, args) for program in programs})


@functools.cache
def value_and_gradients_by_vmap(programs, a, b):
    plain = {vjp_rule_of_pytrees: plain_vjp_rule_of_pytrees}
    result = value_and_gradients([plain.get(program, program) for program in programs], vmapped)(
        *arguments(a, b)
    )
    return {name.removeprefix("plain_"): value for name, value in result.items()}


def check_rules(programs, placement):
    a, b, resources = (PLACEMENTS | LOOPED_PLACEMENTS)[placement]
    with mesh42():
        result = value_and_gradients(programs, xmapped(resources))(*arguments(a, b))
    assert_same(result, value_and_gradients_by_vmap(programs, a, b))


@pytest.mark.sampled
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", RULES)
def test_custom_rules(family, placement):
    check_rules(RULES[family], placement)


# ------------------------------------------------------------------------ around an xmapped function


def mixing(x, u, w):
    """The body that outer transformations see; it keeps the shape of x."""
    return jnp.tanh(x * w + u) + lax.pmean(x, "a") * lax.psum(x[0] * u, "b")


def linearized_around(f, x, u, w):
    value, linear = jax.linearize(f, x, u, w)
    transposed = jax.linear_transpose(lambda t: linear(t, 0 * u, 0 * w), x)
    return value, linear(x, u, -w), transposed(x)


def jacobians_around(f, x, u, w):
    def loss(w):
        return jnp.sin(f(x, u, w)).sum()

    of_sums = jax.jacrev(lambda w: f(x, u, w).sum((0, 2)))
    return jax.jacfwd(f, 2)(x, u, w), of_sums(w), jax.hessian(loss)(w)


@pytest.mark.sampled
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_around(placement):
    assert_same(*around((linearized_around, jacobians_around), mixing, placement))


@pytest.mark.parametrize("placement", ["vectorized", "a:x", "a:x,b:y", "b:x"])
@pytest.mark.parametrize("name", ["a", "x", "y"])
def test_a_vmap_around_has_a_name_of_its_own(name, placement):
    """It may be that of a named axis, or of a mesh axis that the call does not use; any other is refused."""
    a, b, resources = PLACEMENTS[placement]
    x, u, w = arguments(a, b)

    def mapped(f, **options):
        return jax.vmap(f, (0, None, None), **options)

    def loss(f, **options):
        return jax.grad(lambda *args: jnp.sin(mapped(f, **options)(*args)).sum(), (0, 1, 2))

    def both(f, **options):
        return lambda *args: (mapped(f, **options)(*args), loss(f, **options)(*args))

    stacked, f = np.stack([x, -x]), xmapped(resources)(mixing)
    with mesh42():
        f(x, u, w)  # what is compiled already is refused as well
        if name not in resources.values():
            assert_same(
                both(f, axis_name=name)(stacked, u, w), both(vmapped(mixing))(stacked, u, w)
            )
            return
        named = mapped(f, axis_name=name)
        jitted = mapped(jax.jit(f), axis_name=name)
        slope = loss(f, axis_name=name)
        for refused in (named, jax.jit(slope), jitted):
            with pytest.raises(
                ValueError, match=r"a transformation around it .* has axes of the same names"
            ):
                refused(stacked, u, w)


# ------------------------------------------------------------------------------- modes of JAX


@pytest.mark.sampled(2)
@pytest.mark.parametrize("placement", ["vectorized", "a:x", "a:yx", "a:x,b:y"])
def test_strict_promotion_and_leak_checks(placement):
    """Nothing that xmap adds promotes types implicitly, and no tracer survives a call."""
    a, b, resources = PLACEMENTS[placement]
    args = arguments(a, b)

    def body(x, u, w):
        whole = lax.psum(x, ("a", "b")) + lax.pmean(u, "a") * w
        carry, _ = lax.scan(lambda c, t: (c + lax.psum(t, "a"), None), u, x)
        moved = lax.ppermute(x, "a", [(k, (k + 1) % a) for k in range(a)])
        index = lax.axis_index("a").astype(jnp.float32)
        chosen = lax.cond(x[0] > 0, lambda v: lax.psum(v, "b"), lambda v: v, x)
        return whole, carry, moved * index, chosen, lax.all_gather(x, "b")

    with mesh42(), jax.numpy_dtype_promotion("strict"), jax.check_tracer_leaks():
        f = xmapped(resources)(body)
        result = jax.jit(f)(*args)
        slopes = jax.grad(lambda *args: f(*args)[2].sum())(*args)
    assert_same(result, jax.jit(vmapped(body))(*args))
    expected = jax.grad(lambda *args: vmapped(body)(*args)[2].sum())
    assert_same(slopes, jax.jit(expected)(*args))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("placement", ["vectorized", "a:x", "a:yx", "a:x,b:y"])
def test_double_precision(placement):
    a, b, resources = PLACEMENTS[placement]

    def uses(over):
        f = over(mixing)
        return f, jax.grad(lambda *args: f(*args).sum()), over(draw_index)

    with mesh42(), jax.enable_x64(True):
        args = tuple(v.astype(np.float64) for v in arguments(a, b))
        for ours, theirs in zip(uses(xmapped(resources)), uses(vmapped)):
            result = ours(*args)
            assert_same(result, jax.jit(theirs)(*args))


def draw_index(x, u, w):
    return lax.axis_index("a"), jnp.argmax(x), lax.psum(1, "a") * jnp.int64(2)


@pytest.mark.parametrize("resources", [(), "x", ("y", "x"), ("x", SerialLoop(2))], ids=str)
def test_derivatives_of_interpreted_pallas_kernels(rng, resources):
    """JAX pushes tangents through kernels; it has no reverse mode for them."""
    x = rng.normal(size=(8, 3)).astype(np.float32)
    w = rng.normal(size=3).astype(np.float32)

    def kernel(v_ref, w_ref, out_ref):
        out_ref[...] = jnp.sin(v_ref[...]) * w_ref[...]

    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    product = pl.pallas_call(kernel, out_shape=shape, interpret=True)
    f = xmap(product, (["a", ...], {}), ["a", ...], axis_resources={"a": resources})
    with mesh42():
        value, tangent = jax.jvp(f, (x, w), (w + 0 * x, w * 2))
    np.testing.assert_allclose(value, np.sin(x) * w, rtol=1e-5)
    of_both = np.cos(x) * w * w + 2 * np.sin(x) * w
    np.testing.assert_allclose(tangent, of_both, rtol=1e-4, atol=1e-6)


def _on_a_tpu(v):
    """It cannot be lowered for a CPU, nor differentiated."""

    def double(source, target):
        return target.__setitem__(..., 2 * source[...])

    return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(v.shape, v.dtype))(v)


def by_platform(x, u, w):
    def elsewhere(v):
        return lax.platform_dependent(v, cpu=jnp.sin, tpu=jnp.cos, default=jnp.tan) * u

    fixed = lax.stop_gradient((w, x))
    kernel = lax.platform_dependent(*fixed, cpu=jnp.add, tpu=lambda w, x: _on_a_tpu(x))
    return elsewhere(x) + jax.vmap(elsewhere)(w) + kernel * x


def on_a_cpu(x, u, w):
    return jnp.sin(x) * u + jnp.sin(w) * u + lax.stop_gradient(w + x) * x


@pytest.mark.parametrize("placement", ["vectorized", "a:yx", "a:x,b:y", *LOOPED_PLACEMENTS])
def test_branches_for_other_platforms_are_not_lowered(placement):
    a, b, resources = (PLACEMENTS | LOOPED_PLACEMENTS)[placement]
    args = arguments(a, b)
    with mesh42():
        mapped = xmapped(resources)(by_platform)
        outside = jax.grad(lambda x: mapped(x, *args[1:]).sum())(args[0])
        assert_same(mapped(*args), jax.jit(vmapped(on_a_cpu))(*args))
        assert "cosine" not in mapped.lower(*args).as_text()
    slope = jax.grad(lambda *args: vmapped(on_a_cpu)(*args).sum())
    assert_same(outside, jax.jit(slope)(*args))
