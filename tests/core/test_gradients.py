"""Derivatives through xmap are those of the positional function; derivatives in a body follow legacy's convention.

Each program is written twice, over named axes and over positions; values, vjp, jvp, Jacobians and
Hessians from outside must agree under every placement on a 4x2 mesh, whatever the rules of custom derivatives in
the body sum themselves.  Inside a body the transpose of psum is psum.  The gradient programs communicate exactly
what hand-written ``jax.shard_map`` programs do.
"""

import collections
import functools
import math

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


# ------------------------------------------------------------- custom rules with collectives


@functools.cache
def weights(a):
    return np.random.default_rng(a).normal(size=(3, 2)).astype(np.float32)


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

    def of_both(v, w):
        return jnp.sin(sum_over_all(v * w) * w).sum()

    def of_one(w, x):
        return jnp.sin(sum_over_all(w) * x).sum()

    def body(x, u, w):
        of_value = jax.grad(of_both)(x, w)
        of_weight = jax.grad(of_one)(w, x)
        return of_value * u + jnp.cos(of_weight) * x

    mapped = xmap(body, IN_AXES, AB, axis_resources=resources)
    with mesh42():
        result = gradients_of_sines(mapped)(*arguments(a, b))
    assert_same(result, gradients_of_sines(placements.vmapped(body))(*arguments(a, b)))


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
        def total(*args):
            return f(*args)[0]

        gradients = jax.grad(total, (0, 2, 3))(*args)
        with_integers = jax.grad(total, (0, 1), allow_int=True)(*args)
        return gradients, with_integers, jax.jvp(f, args, directions(args))

    mapped = xmap(body, in_axes, ({}, {0: "a"}), axis_resources=resources)
    with mesh42():
        result = derivatives(mapped)
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
    w = weights(3)
    x = rows(batch)
    axes = resources["batch"]

    def mean_over_names(w, x):
        return lax.pmean(squared_error(w, x), "batch")

    def mean_on_devices(w, x):
        return lax.psum(squared_error(w, x), axes) / batch

    ours = xmap(mean_over_names, ({}, {0: "batch"}), {}, axis_resources=resources)
    theirs = by_hand(mean_on_devices, (P(), P(axes)), P())
    with mesh42():
        for gradient in (jax.grad, jax.value_and_grad):
            got = communication(gradient(ours), w, x)
            want = communication(gradient(theirs), w, x)
            assert got == want
            assert want.total() > 0
        found = jax.grad(ours)(w, x)
    assert_same(found, jax.grad(squared_error)(w, x) / batch)


def rows(count):
    return np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)


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
    w = weights(3)
    x = rows(batch)
    axes = resources["batch"]

    def slope(f):
        return jax.grad(lambda w, x: jnp.sum(f(w, x)))

    in_axes = ({}, {0: "batch"})
    ours = xmap(sine_layer("batch"), in_axes, {0: "batch"}, axis_resources=resources)
    theirs = by_hand(sine_layer(axes), (P(), P(axes)), P(axes))
    with mesh42():
        got = communication(slope(ours), w, x)
        want = communication(slope(theirs), w, x)
        gradient = slope(ours)(w, x)
    assert got == want
    assert want.total() > 0
    assert_same(gradient, slope(lambda w, x: jnp.sin(x @ w))(w, x))


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
        got = communication(gradient(ours), *args)
        want = communication(gradient(theirs), *args)
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

    def body(v):
        return lax.pmax(v, "i"), lax.pmin(v, "i")

    mapped = xmap(body, ["i"], [], axis_resources=resources)

    def loss(v):
        highest, lowest = mapped(v)
        return highest.real + 2 * lowest.imag

    with mesh42():
        highest, lowest = mapped(z)
        slope = jax.grad(loss)(z)
    assert highest == z.max()
    assert lowest == z.min()
    np.testing.assert_allclose(slope, [0, 0, 0.5, 0.5, 0, -2j, 0, 0])


@pytest.mark.parametrize("resources", FULL, ids=str)
def test_bounds_that_are_scalars_on_each_device(resources):
    low = np.linspace(-2, 1.9, 8, dtype=np.float32)
    high = np.linspace(0.6, 3, 8, dtype=np.float32)
    x = np.arange(3.0, dtype=np.float32)

    def clamped(low, high):
        return (lax.clamp(low, x, high) * (1 + x)).sum()

    def clipped(low, high):
        bounded = jnp.maximum(x, low[:, None])
        return (jnp.minimum(bounded, high[:, None]) * (1 + x)).sum()

    mapped = xmap(clamped, (["i"], ["i"]), ["i"], axis_resources=resources)
    expected = jax.grad(clipped, (0, 1))(low, high)
    with mesh42():
        slopes = jax.grad(lambda low, high: mapped(low, high).sum(), (0, 1))(low, high)
    np.testing.assert_allclose(slopes[0], expected[0])
    np.testing.assert_allclose(slopes[1], expected[1])
