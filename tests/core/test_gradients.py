"""Derivatives through xmap are those of the positional function; derivatives in a body follow legacy's convention.

Each program is written twice, over named axes and over positions; values, vjp, jvp, Jacobians and
Hessians from outside must agree under every placement on a 4x2 mesh, whatever the rules of custom derivatives in
the body sum themselves.  Inside a body the transpose of psum is psum.  The gradient programs communicate exactly
what hand-written ``jax.shard_map`` programs do.
"""

import collections
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import placements
import pytest
from compiled import transfers
from jax import lax
from jax.nn import logsumexp, one_hot, relu
from jax.sharding import PartitionSpec as P
from placements import IN_AXES, PLACEMENTS, mesh42

from xmap_compat import SerialLoop, pdot, xmap

AB, A, B = {0: "a", 1: "b"}, {0: "a"}, {0: "b"}

pytestmark = pytest.mark.usefixtures("end_a_hang")

# name: (size of a, size of b, axis_resources)
LOOPED_PLACEMENTS = {
    "a:loop": (8, 4, {"a": SerialLoop(4)}),
    "b:loop": (8, 4, {"b": SerialLoop(2)}),
    "a:x+loop,b:loop": (8, 4, {"a": ("x", SerialLoop(2)), "b": SerialLoop(2)}),
}


@functools.cache
def arguments(a, b):
    """x varies over a and b and has many equal elements, u varies over a, w over nothing."""
    x, u, w = placements.arguments(a, b)
    return np.round(2 * x) / 2, u, w


def directions(args, seed=0):
    """Some tangent or cotangent for each array."""
    leaves, tree = jax.tree.flatten(args)
    return jax.tree.unflatten(tree, [_direction(leaf, seed + k) for k, leaf in enumerate(leaves)])


def _direction(leaf, seed):
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
        return np.zeros(jnp.shape(leaf), jax.dtypes.float0)
    return np.cos(seed + np.arange(math.prod(leaf.shape))).reshape(leaf.shape).astype(leaf.dtype)


def assert_same(result, expected, tolerance=2e-4):
    def compare(path, got, want):
        place = jax.tree_util.keystr(path)
        assert (jnp.shape(got), jnp.result_type(got)) == (jnp.shape(want), jnp.result_type(want)), (
            place
        )
        if jnp.result_type(got) == jax.dtypes.float0:
            return
        got, want = (np.asarray(v, np.float32) for v in (got, want))
        scale = max(1.0, np.abs(want).max(initial=0))
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * scale, err_msg=place)

    jax.tree_util.tree_map_with_path(compare, result, expected)


class Program(NamedTuple):
    """A body over named axes, where its results go, and the same over positions: x[a, b, 3], u[a], w[3]."""

    named: Callable
    positional: Callable
    out_axes: Any


PROGRAMS: dict[str, Program] = {}


def program(out_axes):
    """Register ``named`` and ``positional`` from a function that returns both."""

    def register(define):
        PROGRAMS[define.__name__] = Program(*define(), out_axes)
        return define

    return register


def column(u):
    return u[:, None, None]


# ----------------------------------------------------------------------- control flow


def _scan_body(x, u, w):
    def step(carry, t):
        carry = jnp.tanh(carry * u + lax.psum(t, "a") * 0.1)
        return carry, lax.pmean(carry, "b") * t

    return lax.scan(step, 0.5, x * w)


def _scan_positions(x, u, w):
    def step(carry, t):
        carry = jnp.tanh(carry * u[:, None] + t.sum(0) * 0.1)
        return carry, carry.mean(1, keepdims=True) * t

    carry, ys = lax.scan(step, jnp.full(x.shape[:2], 0.5), jnp.moveaxis(x * w, -1, 0))
    return carry, jnp.moveaxis(ys, 0, -1)


@program((AB, AB))
def remat_and_jit_of_scan_with_collectives():
    return jax.checkpoint(jax.jit(_scan_body)), _scan_positions


# ------------------------------------------------------------- what does and does not vary


@program(({}, A, AB, B))
def results_that_vary_over_less_than_asked():
    def named(x, u, w):
        return (w**2, w, u, jnp.sin(w))

    def positional(x, u, w):
        a, b = x.shape[:2]
        return w**2, jnp.tile(w, (a, 1)), jnp.tile(u[:, None], (1, b)), jnp.tile(jnp.sin(w), (b, 1))

    return named, positional


@program(A)
def arguments_that_do_not_matter():
    """w is unused, x enters only where no derivative flows."""
    return (
        lambda x, u, w: (
            u * lax.stop_gradient(lax.psum(x, "b").sum()) + jnp.sign(lax.pmean(x[0], "b"))
        ),
        lambda x, u, w: u * lax.stop_gradient(x.sum((1, 2))) + jnp.sign(x[..., 0].mean(1)),
    )


def first_derivatives(functions):
    """Values, vjps and jvps of several functions, as one jitted function."""

    def one(f, args):
        out, pullback = jax.vjp(f, *args)
        _, tangents = jax.jvp(f, args, directions(args))
        return {"value": out, "vjp": pullback(directions(out, 7)), "jvp": tangents}

    return jax.jit(lambda *args: {name: one(f, args) for name, f in functions.items()})


@functools.cache
def positional_first_derivatives(a, b):
    return first_derivatives({name: program.positional for name, program in PROGRAMS.items()})(
        *arguments(a, b)
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_value_vjp_and_jvp(placement):
    """Of collectives alone they are in test_matrix.py."""
    a, b, resources = PLACEMENTS[placement]
    mapped = {
        n: xmap(p.named, IN_AXES, p.out_axes, axis_resources=resources) for n, p in PROGRAMS.items()
    }
    with mesh42():
        result = first_derivatives(mapped)(*arguments(a, b))
    assert_same(result, positional_first_derivatives(a, b))


# ------------------------------------------------------------- custom rules with collectives


@functools.cache
def weights(a):
    return np.random.default_rng(a).normal(size=(3, 2)).astype(np.float32)


def ruled(primal, backward):
    """A function of one argument, and the same with a backward rule, which gets the argument and the cotangent."""
    function = jax.custom_vjp(primal)
    function.defvjp(lambda w: (primal(w), w), lambda w, ct: (backward(w, ct),))
    return primal, function


def _mean_and_own(w, ct):
    return lax.pmean(ct, "b") + 10 * ct


SUMS_AND_OWN_TERMS = [
    ruled(lambda w: lax.psum(w, "a") + w, lambda w, ct: lax.psum(ct, "a") + ct),
    ruled(lambda w: lax.pmean(w, "b") + 10 * w, jax.jit(_mean_and_own)),
    ruled(
        lambda w: lax.psum(w**2, ("a", "b")) + jnp.sin(w),
        lambda w, ct: 2 * w * lax.psum(ct, ("a", "b")) + jnp.cos(w) * ct,
    ),
    ruled(
        lambda w: lax.psum(w, "a") + w,
        lambda w, ct: lax.fori_loop(0, 1, lambda k, c: lax.psum(ct, "a") + c, ct),
    ),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_backward_rule_with_a_sum_and_an_own_term_where_nothing_varies(placement):
    """Each element has a cotangent of its own, though one arrives for all: as under ``jax.vmap``, without the rule."""
    a, b, resources = PLACEMENTS[placement]

    def body(version):
        return lambda x, u, w: sum(
            pair[version](w) * (k + x) * u for k, pair in enumerate(SUMS_AND_OWN_TERMS)
        )

    def gradient(f):
        return jax.jit(jax.grad(lambda *args: jnp.cos(f(*args)).sum(), (0, 1, 2)))(*arguments(a, b))

    with mesh42():
        result = gradient(xmap(body(1), IN_AXES, AB, axis_resources=resources))
    assert_same(result, gradient(placements.vmapped(body(0))), 1e-3)


# Functions of a value and a weight with two results: the function, and the same with a right rule of its own.


@jax.custom_vjp
def copy_to_hidden(v):
    """Megatron's f: identity forward, a sum over the hidden units backward."""
    return v


copy_to_hidden.defvjp(lambda v: (v, None), lambda _, ct: (lax.psum(ct, "b"),))


@jax.custom_vjp
def reduce_from_hidden(v):
    """Megatron's g: a sum over the hidden units forward, identity backward."""
    return lax.psum(v, "b")


reduce_from_hidden.defvjp(lambda v: (lax.psum(v, "b"), None), lambda _, ct: (ct,))


def gradients_of_sines(f):
    return jax.value_and_grad(lambda *args: jnp.sin(f(*args)).sum(), (0, 1, 2))


# ------------------------------------------------------------------- the convention inside


def sum_over_all(v):
    return reduce_from_hidden(jnp.tanh(copy_to_hidden(v) * 0.7))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rules_applied_inside_and_differentiated_from_outside(placement):
    """Inside, a rule leaves the operations that it consists of; from outside these have their true derivative.

    So it is with nested vmaps; finite differences agree (checked once, in float64).
    """
    a, b, resources = PLACEMENTS[placement]

    def body(x, u, w):
        of_value = jax.grad(lambda v: jnp.sin(sum_over_all(v * w) * w).sum())(x)
        of_weight = jax.grad(lambda w: jnp.sin(sum_over_all(w) * x).sum())(w)
        return of_value * u + jnp.cos(of_weight) * x

    mapped = jax.vmap(jax.vmap(body, (0, None, None), axis_name="b"), (0, 0, None))
    with mesh42():
        result = gradients_of_sines(xmap(body, IN_AXES, AB, axis_resources=resources))(
            *arguments(a, b)
        )
    assert_same(result, gradients_of_sines(mapped)(*arguments(a, b)))


# ---------------------------------------------------------------------------- serial loops


@jax.custom_vjp
def clipped(v):
    """A rule that is not linear in the cotangent: it must get the whole one, once."""
    return jnp.sin(v)


clipped.defvjp(lambda v: (jnp.sin(v), v), lambda v, ct: (jnp.clip(ct * v, -0.5, 0.5),))


def clipped_weight(x, u, w):
    return clipped(w) * x * u


@pytest.mark.parametrize("placement", LOOPED_PLACEMENTS)
def test_the_rule_of_a_weight_in_serial_loops(placement):
    a, b, resources = LOOPED_PLACEMENTS[placement]

    def value_and_gradients(f):
        out, pullback = jax.vjp(f, *arguments(a, b))
        return out, pullback(directions(out, 7))

    with mesh42():
        result = value_and_gradients(xmap(clipped_weight, IN_AXES, AB, axis_resources=resources))
    assert_same(result, value_and_gradients(placements.vmapped(clipped_weight)))


# --------------------------------------------------------------------- kinds of arguments


@pytest.mark.sampled(2)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_integer_and_low_precision_arguments(placement):
    """Labels have float0 tangents; gradients keep the dtype of what they belong to."""
    a, b, resources = PLACEMENTS[placement]
    x, u, _ = arguments(a, b)
    labels = np.arange(a) % 3
    args = (x.astype(jnp.bfloat16), labels, u.astype(np.float16), np.float32(1.5))
    in_axes = ({0: "a", 1: "b"}, {0: "a"}, {0: "a"}, {})

    def body(x, label, u, scale):
        picked = lax.pmean(x.astype(jnp.float32), "b")[label]
        return lax.psum(picked * u * scale, "a"), label + 1

    def positional(x, labels, u, scale):
        picked = x.astype(jnp.float32).mean(1)[jnp.arange(len(x)), labels]
        return (picked * u * scale).sum(), labels + 1

    def derivatives(f):
        gradients = jax.grad(lambda *args: f(*args)[0], (0, 2, 3))
        with_integers = jax.grad(lambda *args: f(*args)[0], (0, 1), allow_int=True)
        return gradients(*args), with_integers(*args), jax.jvp(f, args, directions(args))

    with mesh42():
        result = derivatives(xmap(body, in_axes, ({}, {0: "a"}), axis_resources=resources))
    assert_same(result, derivatives(positional), tolerance=2e-2)


# ---------------------------------------------------------------- what is communicated


def communication(function, *args):
    """A count of what the compiled program communicates."""
    return collections.Counter(transfers(jax.jit(function).lower(*args).compile().as_text()))


def by_hand(function, in_specs, out_specs):
    """The hand-written program; shard_map checks what varies, so that gradients are right."""
    mesh = mesh42().physical_mesh
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True
    )


def squared_error(w, x):
    return jnp.sum((x @ w) ** 2)


DATA_PARALLEL = {
    "x": (16, {"batch": "x"}),
    "xy": (16, {"batch": ("x", "y")}),
    "xy full": (8, {"batch": ("x", "y")}),
    "y": (16, {"batch": "y"}),
}


@pytest.mark.parametrize("layout", DATA_PARALLEL)
def test_data_parallel_gradient_communicates_like_the_hand_written_one(layout):
    batch, resources = DATA_PARALLEL[layout]
    w, x = weights(3), np.random.default_rng(0).normal(size=(batch, 3)).astype(np.float32)
    axes = resources["batch"]

    ours = xmap(
        lambda w, x: lax.pmean(squared_error(w, x), "batch"),
        ({}, {0: "batch"}),
        {},
        axis_resources=resources,
    )
    theirs = by_hand(lambda w, x: lax.psum(squared_error(w, x), axes) / batch, (P(), P(axes)), P())
    with mesh42():
        for gradient in (jax.grad, jax.value_and_grad):
            got, want = communication(gradient(ours), w, x), communication(gradient(theirs), w, x)
            assert got == want
            assert want.total() > 0
        assert_same(jax.grad(ours)(w, x), jax.grad(lambda w: squared_error(w, x) / batch)(w))


def sine_layer(axes):
    """A layer whose backward rule sums the gradient of its weights over the given axes."""

    @jax.custom_vjp
    def apply(v, w):
        return v @ w

    def backward(residuals, ct):
        v, w = residuals
        return ct @ w.T, lax.psum(jnp.einsum("...k,...m->km", v, ct), axes)

    apply.defvjp(lambda v, w: (v @ w, (v, w)), backward)
    return lambda w, v: jnp.sin(apply(v, w))


@pytest.mark.parametrize("layout", DATA_PARALLEL)
def test_backward_rule_that_sums_communicates_like_the_hand_written_one(layout):
    """The hand-written backward pass sums over devices what the named one sums over the batch: once, not twice."""
    batch, resources = DATA_PARALLEL[layout]
    w, x = weights(3), np.random.default_rng(0).normal(size=(batch, 3)).astype(np.float32)
    axes = resources["batch"]

    def loss(f):
        return jax.grad(lambda w, x: jnp.sum(f(w, x)))

    ours = xmap(sine_layer("batch"), ({}, {0: "batch"}), {0: "batch"}, axis_resources=resources)
    theirs = by_hand(sine_layer(axes), (P(), P(axes)), P(axes))
    with mesh42():
        got, want = communication(loss(ours), w, x), communication(loss(theirs), w, x)
        gradient = loss(ours)(w, x)
    assert got == want
    assert want.total() > 0
    assert_same(gradient, loss(lambda w, x: jnp.sin(x @ w))(w, x))


def named_loss(w1, w2, images, labels):
    """The tutorial's network."""
    hidden = relu(pdot(images, w1, "inputs"))
    logits = pdot(hidden, w2, "hidden")
    predictions = logits - logsumexp(logits, "classes")
    targets = one_hot(labels, lax.psum(1, "classes"), axis="classes")
    return -lax.pmean(lax.psum(targets * predictions, "classes"), "batch")


NETWORK_AXES = [
    ["inputs", "hidden", ...],
    ["hidden", "classes", ...],
    ["batch", "inputs", ...],
    ["batch", ...],
]
NETWORK_SPECS = (P(None, "y"), P("y", None), P("x", None), P("x"))


def network_arguments():
    rng = np.random.default_rng(0)
    shapes = [(12, 8), (8, 10), (16, 12)]
    w1, w2, images = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return w1, w2, images, rng.integers(0, 10, size=16).astype(np.int32)


def network_by_hand(w1, w2, images, labels):
    logits = lax.psum(relu(images @ w1) @ w2, "y")
    predictions = logits - logsumexp(logits, axis=1, keepdims=True)
    losses = jnp.sum(one_hot(labels, 10) * predictions, axis=1)
    return -lax.psum(jnp.sum(losses), "x") / 16


def positional_network(w1, w2, images, labels):
    logits = relu(images @ w1) @ w2
    losses = jnp.sum(one_hot(labels, 10) * jax.nn.log_softmax(logits), axis=1)
    return -jnp.mean(losses)


@pytest.mark.parametrize("argnums", [(0, 1), (0, 1, 2)], ids=["weights", "weights and images"])
def test_tutorial_network_communicates_like_the_hand_written_one(argnums):
    args = network_arguments()

    def gradient(f):
        return jax.value_and_grad(f, argnums)

    ours = xmap(named_loss, NETWORK_AXES, [...], axis_resources={"batch": "x", "hidden": "y"})
    theirs = by_hand(network_by_hand, NETWORK_SPECS, P())
    with mesh42():
        got, want = communication(gradient(ours), *args), communication(gradient(theirs), *args)
        result = gradient(ours)(*args)
    assert got == want
    assert want.total() > 0
    assert_same(result, gradient(positional_network)(*args))


# ------------------------------------------------------------------ extrema of complex numbers, and bounds

FULL = [{}, {"i": "x"}, {"i": ("x", "y")}, {"i": ("y", "x")}]


@pytest.mark.parametrize("resources", FULL, ids=str)
def test_extrema_of_complex_numbers(resources):
    """The order is that of the real parts, then of the imaginary ones, as NumPy's; ties share the gradient."""
    z = np.array([1 + 2j, 3 - 1j, 3 + 1j, 3 + 1j, -1, -1 - 2j, 2j, 1], np.complex64)
    functions = [
        lambda v: lax.pmax(v, "i"),
        lambda v: jnp.max(v, axis="i"),
        lambda v: lax.pmin(v, "i"),
    ]
    mapped = xmap(lambda v: [f(v) for f in functions], ["i"], [], axis_resources=resources)
    with mesh42():
        highest, same, lowest = mapped(z)
        slope = jax.grad(lambda v: mapped(v)[0].real + 2 * mapped(v)[2].imag)(z)
    assert (highest, same, lowest) == (z.max(), z.max(), z.min())
    np.testing.assert_allclose(slope, [0, 0, 0.5, 0.5, 0, -2j, 0, 0])


@pytest.mark.parametrize(
    "axes, others", [(("i", 0), (1,)), (("i", 1), (0,)), ((0, "i", 1), ())], ids=str
)
def test_a_gradient_inside_of_an_extremum_over_names_and_positions(axes, others):
    """The largest element is that of all four losses, each of which has a slope there."""
    x = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
    slope = jax.grad(lambda v: jnp.sin(lax.pmax(v, axes)).sum())
    largest = x.max(tuple({0, 1, 2} - {k + 1 for k in others}), keepdims=True)
    expected = np.where(x == largest, 4 * np.cos(largest), 0)
    for resources in ({}, {"i": "x"}):
        with mesh42():
            found = xmap(slope, ["i", ...], ["i", ...], axis_resources=resources)(x)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("resources", FULL, ids=str)
def test_bounds_that_are_scalars_on_each_device(resources):
    low, high = np.linspace(-2, 1.9, 8, dtype=np.float32), np.linspace(0.6, 3, 8, dtype=np.float32)
    x = np.arange(3.0, dtype=np.float32)

    def clamped(low, high):
        return (lax.clamp(low, x, high) * (1 + x)).sum()

    def clipped(low, high):
        return (jnp.minimum(jnp.maximum(x, low[:, None]), high[:, None]) * (1 + x)).sum()

    mapped = xmap(clamped, (["i"], ["i"]), ["i"], axis_resources=resources)
    with mesh42():
        slopes = jax.grad(lambda low, high: mapped(low, high).sum(), (0, 1))(low, high)
    for got, want in zip(slopes, jax.grad(clipped, (0, 1))(low, high)):
        np.testing.assert_allclose(got, want)
