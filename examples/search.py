"""Which assignment trains fastest here?  Price all of them, run the cheapest, and train under the best.

The network of examples/digits.py learns handwritten digits.  Its training step is priced under every assignment of its
axes to a mesh of 4 x 2 devices, with the figures of this machine, measured first.  The cheapest are run, and the
network is trained under the one that took least.  The law says that it would have learned the same under any.

    python examples/search.py [--steps 200]
"""

import argparse
import os
import sys
import time

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from digits import BATCH, IMAGES, LABELS, MIN_ACCURACY, PARAMS, accuracy, init_params, load_data, make_train_step

from xmap_compat import Hardware, Mesh, search, xmap

jax.config.update("jax_cpu_enable_async_dispatch", False)


def batches(images, labels, steps):
    for step in range(steps):
        rows = np.arange(step * BATCH, (step + 1) * BATCH) % len(images)
        yield images[rows], labels[rows]


def train(axis_resources, steps, images, labels):
    """The trained parameters."""
    train_step = make_train_step(axis_resources)
    axes = (PARAMS, PARAMS, IMAGES, LABELS)
    place = xmap(lambda *arrays: arrays, in_axes=axes, out_axes=axes, axis_resources=axis_resources)
    params = init_params(images.shape[1])
    velocity = jax.tree.map(np.zeros_like, params)
    for batch in batches(images, labels, steps):
        params, velocity, _ = jax.block_until_ready(train_step(*place(params, velocity, *batch)))
    return params


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    steps = max(parser.parse_args().steps, 1)
    images, labels, test_images, test_labels = load_data()
    params = init_params(images.shape[1])
    begin = time.perf_counter()
    with Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")) as mesh:
        machine = Hardware.measure(mesh, sizes=(1 << 10, 1 << 14))
        print(f"measured this machine in {time.perf_counter() - begin:.1f} s")
        step_arguments = (params, params, images[:BATCH], labels[:BATCH])
        pinned = {"inputs": (), "classes": ()}
        found = search(make_train_step, *step_arguments, hardware=machine, fixed=pinned, measure=3)
        print(found)
        best = found.best
        print(f"training under axis_resources={dict(best.axis_resources)}")
        trained = train(best.axis_resources, steps, images, labels)
        score = accuracy(best.axis_resources, trained, test_images, test_labels)
    print(f"accuracy on {len(test_labels)} held-out digits: {score:.2%}  ({time.perf_counter() - begin:.1f} s in all)")
    if score > MIN_ACCURACY and best.measured is not None:
        return 0
    print(f"FAILED: want an accuracy over {MIN_ACCURACY:.0%} under an assignment that was run")
    return 1


if __name__ == "__main__":
    sys.exit(main())
