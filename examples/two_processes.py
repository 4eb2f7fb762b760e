"""Train one network on two processes, over meshes in which they share the batch, the hidden units, or both.

Each process has four (fake CPU) devices, and the mesh has an axis ``process`` and an axis ``device``.  As on a
cluster, every process runs the same program, brings its own rows of each batch, and holds its own part of the
parameters.  At the end each compares what it holds with the same training in NumPy.

Started without options, this script starts the two processes itself:

    python examples/two_processes.py [--steps 40]
"""

import argparse
import faulthandler
import os
import socket
import subprocess
import sys
import time

PROCESSES, DEVICES = 2, 4
TIME_LIMIT = 120  # seconds for everything

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={DEVICES}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import global_array, mesh, xmap

INPUTS, HIDDEN, BATCH = 6, 16, 32
LEARNING_RATE, MAX_DIFFERENCE = 0.2, 1e-4

# The only thing that changes between the runs.
RUNS = {
    "batch over the processes, hidden over the devices of each": {"batch": "process", "hidden": "device"},
    "hidden over the processes, batch over the devices of each": {"hidden": "process", "batch": "device"},
    "batch over all devices": {"batch": ("process", "device")},
}

# Which dimension of which array is which axis.
PARAMS = {"w1": ["inputs", "hidden"], "b1": ["hidden"], "w2": ["hidden"]}
ROWS, TARGETS = ["batch", "inputs"], ["batch"]


def named_loss(params, row, target):
    """The mean squared error over the batch."""
    hidden = jnp.tanh(lax.pdot(row, params["w1"], "inputs") + params["b1"])
    error = lax.pdot(hidden, params["w2"], "hidden") - target
    return lax.pmean(error**2, "batch")


# ---------------------------------------------------------------------- the data


def read(step, which=slice(None)):
    """Some rows of a batch and their targets; a real program would read no more than these."""
    rows = np.random.default_rng(step).normal(size=(BATCH, INPUTS)).astype(np.float32)
    return rows[which], np.sin(rows[:, 0] + rows[:, 1])[which]


def init_params():
    """The same on every process."""
    rng = np.random.default_rng(0)
    w1 = rng.normal(0, INPUTS**-0.5, (INPUTS, HIDDEN)).astype(np.float32)
    return {"w1": w1, "b1": np.zeros(HIDDEN, np.float32), "w2": rng.normal(0, 0.1, HIDDEN).astype(np.float32)}


def my_rows(resources):
    """Those that the devices of this process need: all of them, unless the processes share the batch."""
    if "process" not in resources["batch"]:
        return slice(None)
    first = jax.process_index() * BATCH // PROCESSES
    return slice(first, first + BATCH // PROCESSES)


# ------------------------------------------------------------------ the training


def train(resources, steps, report):
    """The trained parameters: global arrays, of which this process holds a part."""
    loss = xmap(named_loss, in_axes=(PARAMS, ROWS, TARGETS), out_axes={}, axis_resources=resources)

    @jax.jit
    def train_step(params, rows, targets):
        value, grads = jax.value_and_grad(loss)(params, rows, targets)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads), value

    # Every process has made all parameters: axis_sizes says that these are the whole, not its part.
    params = global_array(init_params(), PARAMS, resources, axis_sizes={"hidden": HIDDEN})
    for step in range(steps):
        mine = read(step, my_rows(resources))
        batch = global_array(mine, (ROWS, TARGETS), resources)
        params, value = jax.block_until_ready(train_step(params, *batch))
        if step % max(steps // 4, 1) == 0 or step == steps - 1:
            # The loss lies whole on every device, so every process can read it.
            report(f"  step {step:3d}  loss {float(value):.4f}, of {len(mine[0])} rows of {BATCH} here")
    return params


def train_in_numpy(steps):
    """The same on whole arrays in float64, with backpropagation by hand."""
    params = jax.tree.map(np.float64, init_params())
    for step in range(steps):
        rows, targets = read(step)
        hidden = np.tanh(rows @ params["w1"] + params["b1"])
        d_predicted = 2 * (hidden @ params["w2"] - targets) / BATCH
        d_before = np.outer(d_predicted, params["w2"]) * (1 - hidden**2)
        grads = {"w1": rows.T @ d_before, "b1": d_before.sum(0), "w2": hidden.T @ d_predicted}
        params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)
    return params


def largest_difference(params, expected):
    """Over the parts of all parameters that lie on devices of this process."""
    parts = [
        np.abs(np.asarray(shard.data) - expected[name][shard.index]).max()
        for name, array in params.items()
        for shard in array.addressable_shards
    ]
    return max(parts)


def run_process(address, index, steps):
    """What each process does, on a cluster too; there ``initialize()`` finds the others itself."""
    faulthandler.dump_traceback_later(TIME_LIMIT, exit=True)
    # Fake devices share few cores; a program is waited for before the next begins.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, PROCESSES, index, initialization_timeout=TIME_LIMIT)
    report = print_line if index == 0 else lambda line: None
    expected = train_in_numpy(steps)
    differences = []
    # jax.devices() are those of all processes, in order: each row of the mesh belongs to one of them.
    with mesh(np.array(jax.devices()).reshape(PROCESSES, DEVICES), ("process", "device")):
        for title, resources in RUNS.items():
            report(f"{title}: axis_resources={resources}")
            params = train(resources, steps, report)
            report(f"  w1: {params['w1'].sharding.spec}, parts of {params['w1'].addressable_data(0).shape}")
            differences.append(largest_difference(params, expected))
    print_line(f"process {index}: largest difference from NumPy {max(differences):.1e}")
    return 0 if max(differences) <= MAX_DIFFERENCE else 1


def print_line(line):
    print(line, flush=True)


# ------------------------------------------------------------------ the launcher


def launch(steps):
    """Start the processes on this machine; 0 if all of them succeed.  None of them is left behind."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    command = [sys.executable, __file__, "--steps", str(steps), "--join", address]
    started = [subprocess.Popen([*command, "--index", str(k)]) for k in range(PROCESSES)]
    try:
        deadline = time.monotonic() + TIME_LIMIT
        # When one has failed the others wait for it in vain.
        while None in (codes := [p.poll() for p in started]) and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return 0 if codes == [0] * PROCESSES else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="training steps of each run")
    parser.add_argument("--join", metavar="HOST:PORT", help="be one of the processes that meet at this address")
    parser.add_argument("--index", type=int, default=0, help="which of them")
    options = parser.parse_args()
    steps = max(options.steps, 1)
    if options.join:
        return run_process(options.join, options.index, steps)
    failed = launch(steps)
    print("FAILED" if failed else "both processes hold what NumPy computes")
    return failed


if __name__ == "__main__":
    sys.exit(main())
