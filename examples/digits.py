"""Train one network three times on real data, changing only how its named axes are executed.

The network is written once, over the axes ``batch``, ``inputs``, ``hidden`` and ``classes``.
``axis_resources`` then runs it on one device, with the batch split over eight devices, and with batch and
hidden units split over a mesh of 4 x 2.  It learns scikit-learn's handwritten digits, and the
three runs must end with the same parameters.

    python examples/digits.py [--steps 200]
"""

import argparse
import importlib.util
import os
import sys
import time

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import one_hot, relu
from jax.scipy.special import logsumexp
from sklearn.datasets import load_digits

from xmap_compat import mesh, xmap

# Eight fake devices share few cores, and a program whose devices wait for each other needs a thread for
# each of them: so every program is waited for before the next begins, here and in the training loop.
jax.config.update("jax_cpu_enable_async_dispatch", False)

HIDDEN, CLASSES = 64, 10
TRAIN, BATCH, TEST = 1440, 144, 352
LEARNING_RATE, MOMENTUM = 0.1, 0.9
MIN_ACCURACY, MAX_DIFFERENCE = 0.95, 1e-3

# The only thing that changes between the runs.
RUNS = {
    "one device": {},
    "batch over 8 devices": {"batch": ("x", "y")},
    "batch over 4, hidden over 2": {"batch": "x", "hidden": "y"},
}

# Which dimension of which array is which axis.
PARAMS = {
    "w1": ["inputs", "hidden"],
    "b1": ["hidden"],
    "w2": ["hidden", "classes"],
    "b2": ["classes"],
}
IMAGES, LABELS = ["batch", "inputs"], ["batch"]


def named_predict(params, image):
    """Log-probabilities of the classes.  No dimension is left in any shape: every axis has a name."""
    hidden = relu(lax.pdot(image, params["w1"], "inputs") + params["b1"])
    logits = lax.pdot(hidden, params["w2"], "hidden") + params["b2"]
    return logits - logsumexp(logits, "classes")


def named_loss(params, image, label):
    """The mean cross-entropy over the batch."""
    target = one_hot(label, lax.psum(1, "classes"), axis="classes")
    log_likelihood = lax.psum(target * named_predict(params, image), "classes")
    return -lax.pmean(log_likelihood, "batch")


def load_data():
    """Shuffled digits: training images and labels, held-out images and labels."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    held_out = slice(TRAIN, TRAIN + TEST)
    return images[:TRAIN], labels[:TRAIN], images[held_out], labels[held_out]


def init_params(inputs):
    rng = np.random.default_rng(1)
    return {
        "w1": rng.normal(0, inputs**-0.5, (inputs, HIDDEN)).astype(np.float32),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": rng.normal(0, HIDDEN**-0.5, (HIDDEN, CLASSES)).astype(np.float32),
        "b2": np.zeros(CLASSES, np.float32),
    }


def make_train_step(axis_resources):
    """SGD with momentum.  The gradient is taken from outside: the xmapped loss is a function of whole arrays."""
    loss = xmap(
        named_loss, in_axes=(PARAMS, IMAGES, LABELS), out_axes={}, axis_resources=axis_resources
    )

    @jax.jit
    def train_step(params, velocity, images, labels):
        value, grads = jax.value_and_grad(loss)(params, images, labels)
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v - LEARNING_RATE * g, velocity, grads)
        return jax.tree.map(jnp.add, params, velocity), velocity, value

    return train_step


def train(axis_resources, steps, images, labels):
    """The trained parameters, and the last batch as the devices hold it."""
    train_step = make_train_step(axis_resources)
    # An xmapped identity lays arrays out over the devices as the resources of their axes say.
    axes = (PARAMS, PARAMS, IMAGES, LABELS)
    place = xmap(lambda *arrays: arrays, in_axes=axes, out_axes=axes, axis_resources=axis_resources)
    params = init_params(images.shape[1])
    velocity = jax.tree.map(np.zeros_like, params)
    for step in range(steps):
        rows = np.arange(step * BATCH, (step + 1) * BATCH) % len(images)
        state = jax.block_until_ready(place(params, velocity, images[rows], labels[rows]))
        params, velocity, loss = jax.block_until_ready(train_step(*state))
        if step % max(steps // 4, 1) == 0 or step == steps - 1:
            print(f"  step {step:4d}  loss {float(loss):.4f}")
    return params, state[2]


def accuracy(axis_resources, params, images, labels):
    predict = xmap(
        named_predict,
        in_axes=(PARAMS, IMAGES),
        out_axes=["batch", "classes"],
        axis_resources=axis_resources,
    )
    return float(np.mean(np.argmax(predict(params, images), axis=1) == labels))


def show_placement(name, array):
    """Which devices hold which part of an array, and a picture of it where the package `rich` is installed."""
    spec = getattr(array.sharding, "spec", "one device")
    print(
        f"  {name}{list(array.shape)}: {spec}, parts of {list(array.addressable_shards[0].data.shape)}"
    )
    holders = {}
    for shard in array.addressable_shards:
        bounds = [f"{k.start or 0}:{k.stop or size}" for k, size in zip(shard.index, array.shape)]
        holders.setdefault(", ".join(bounds), []).append(shard.device.id)
    for part, devices in holders.items():
        print(f"    {name}[{part}] is on {devices}")
    if importlib.util.find_spec("rich"):
        jax.debug.visualize_array_sharding(array, use_color=False)


def run(title, axis_resources, steps, data):
    """Train and test under one assignment of resources: the parameters and the accuracy."""
    images, labels, test_images, test_labels = data
    print(f"{title}: axis_resources={axis_resources}")
    begin = time.perf_counter()
    params, batch = train(axis_resources, steps, images, labels)
    score = accuracy(axis_resources, params, test_images, test_labels)
    print(
        f"  accuracy on {TEST} held-out digits: {score:.2%}  ({time.perf_counter() - begin:.1f} s)"
    )
    show_placement("w1", params["w1"])
    show_placement("images", batch)
    return jax.tree.map(np.asarray, params), score


def largest_difference(trees):
    """Between the first pytree of arrays and each other one."""
    pairs = [
        jax.tree.map(lambda a, b: np.max(np.abs(a - b)), trees[0], other) for other in trees[1:]
    ]
    return float(np.max(jax.tree.leaves(pairs)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps of each run")
    steps = max(parser.parse_args().steps, 1)
    data = load_data()
    with mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")):
        trained, scores = zip(
            *(run(title, resources, steps, data) for title, resources in RUNS.items())
        )
    difference = largest_difference(trained)
    print(f"largest difference between the parameters of the three runs: {difference:.1e}")
    if min(scores) > MIN_ACCURACY and difference <= MAX_DIFFERENCE:
        print(
            f"passed: {difference:.1e} <= {MAX_DIFFERENCE}, all held-out accuracies over {MIN_ACCURACY:.0%}"
        )
        return 0
    print(
        f"FAILED: want an accuracy over {MIN_ACCURACY:.0%} and a difference of at most {MAX_DIFFERENCE}"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
