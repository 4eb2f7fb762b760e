"""The tutorial's neural network: one function over names, executed in every way that the text names.

The expected values come from NumPy in double precision, the expected gradients from ``jax.grad`` of a
function over positions that has never heard of names.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax import lax
from jax.nn import one_hot, relu
from jax.scipy.special import logsumexp
from tutorial_helpers import assert_close, assignments, normal, run, under

from xmap_compat import xmap

BATCH, INPUTS, HIDDEN, CLASSES = 16, 32, 24, 8

WEIGHTS = (["inputs", "hidden", ...], ["hidden", "classes", ...])
PREDICT_AXES = (*WEIGHTS, ["batch", "inputs", ...])
LOSS_AXES = [*PREDICT_AXES, ["batch", ...]]

ASSIGNMENTS = assignments(
    """
{}
{} on 4x2
{"batch": "x"} on 8
{"hidden": "x"} on 8
{"inputs": "x"} on 8
{"classes": "x"} on 8
{"batch": "x", "hidden": "y"} on 4x2
{"batch": "y", "hidden": "x"} on 4x2 reversed
{"batch": ("y", "x")} on 4x2
{"hidden": ("y", "x")} on 4x2
{"classes": ("y", "x")} on 4x2
{"batch": "x", "inputs": "y", "classes": "y"} on 4x2
{"batch": "x", "hidden": "z", "inputs": "y", "classes": "y"} on 2x2x2
"""
)
SOME = [ASSIGNMENTS[k] for k in (0, 6, 9, 11)]
LOOPED = assignments("""
{"batch": SerialLoop(4)}
{"batch": ("x", SerialLoop(2))} on 4x2
""")
EVERY_WEIGHT = (0, 1)  # of the arguments of a loss


def named_predict(w1, w2, image):
    hidden = relu(lax.pdot(image, w1, "inputs"))
    logits = lax.pdot(hidden, w2, "hidden")
    return logits - logsumexp(logits, "classes")


def named_loss(w1, w2, image, label):
    log_probabilities = named_predict(w1, w2, image)
    targets = one_hot(label, lax.psum(1, "classes"), axis="classes")
    return -lax.pmean(lax.psum(targets * log_probabilities, "classes"), "batch")


def predict_by_numpy(w1, w2, images):
    logits = np.maximum(np.float64(images) @ w1, 0) @ w2
    return scipy.special.log_softmax(logits, axis=1)


def loss_by_numpy(w1, w2, images, labels):
    return -np.mean(predict_by_numpy(w1, w2, images)[np.arange(len(labels)), labels])


def positional_loss(w1, w2, images, labels):
    logits = jnp.maximum(images @ w1, 0) @ w2
    log_probabilities = jax.nn.log_softmax(logits, axis=1)
    return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1).mean()


@pytest.fixture
def network(rng):
    weights = 0.3 * normal(rng, INPUTS, HIDDEN), normal(rng, HIDDEN, CLASSES)
    return *weights, normal(rng, BATCH, INPUTS), rng.integers(CLASSES, size=BATCH)


def named_loss_under(assignment):
    return xmap(named_loss, LOSS_AXES, [...], axis_resources=assignment.resources)


@under(ASSIGNMENTS + LOOPED)
def test_predict_equals_numpy(assignment, network):
    *inputs, _ = network
    result = run(assignment, named_predict, PREDICT_AXES, ["batch", "classes", ...], *inputs)
    assert_close(result, predict_by_numpy(*inputs))


@under(ASSIGNMENTS)
def test_loss_and_gradients_equal_the_positional_ones(assignment, network):
    of_loss = jax.value_and_grad(named_loss_under(assignment), EVERY_WEIGHT)
    with assignment.scope():
        value, gradients = of_loss(*network)
    assert_close(value, loss_by_numpy(*network))
    assert_close(gradients, jax.grad(positional_loss, EVERY_WEIGHT)(*network))


@under(SOME)
def test_gradients_where_all_logits_tie_equal_the_positional_ones(assignment, network):
    w1, _, images, labels = network
    tied = w1, jnp.ones((HIDDEN, CLASSES)), images, labels
    with assignment.scope():
        gradients = jax.grad(named_loss_under(assignment), EVERY_WEIGHT)(*tied)
    assert_close(gradients, jax.grad(positional_loss, EVERY_WEIGHT)(*tied))


@under(SOME)
def test_hessian_vector_product_equals_the_positional_one(assignment, network, rng):
    w1, w2, *data = network
    direction = normal(rng, INPUTS, HIDDEN), normal(rng, HIDDEN, CLASSES)

    def hessian_vector_product(loss):
        gradient = jax.grad(lambda w1, w2: loss(w1, w2, *data), EVERY_WEIGHT)
        return jax.jvp(gradient, (w1, w2), direction)[1]

    with assignment.scope():
        product = hessian_vector_product(named_loss_under(assignment))
    assert_close(product, hessian_vector_product(positional_loss), rtol=1e-4, atol=1e-4)


@under(SOME)
def test_training_takes_the_steps_of_the_positional_program(assignment, network):
    def train(loss, w1, w2, *data):
        for _ in range(3):
            d1, d2 = jax.grad(loss, EVERY_WEIGHT)(w1, w2, *data)
            w1 = w1 - 0.5 * d1
            w2 = w2 - 0.5 * d2
        return w1, w2

    with assignment.scope():
        trained = train(named_loss_under(assignment), *network)
    assert_close(trained, train(positional_loss, *network), rtol=1e-4)
    assert loss_by_numpy(*trained, *network[2:]) < loss_by_numpy(*network)


@under(SOME)
def test_loss_is_one_value_known_to_every_device(assignment, network):
    loss = run(assignment, named_loss, LOSS_AXES, [...], *network)
    assert loss.shape == ()
    assert loss.sharding.is_fully_replicated
    assert len(loss.addressable_shards) == assignment.devices
    for shard in loss.addressable_shards:
        assert_close(shard.data, loss_by_numpy(*network))
