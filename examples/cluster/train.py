"""Train a small network on all processes of a job; it is the same program on one machine and on a cluster.

    python examples/cluster/launch_local.py 2 examples/cluster/train.py     # two processes on this machine
    sbatch examples/cluster/slurm.sbatch                                    # on a cluster that has Slurm

Each process runs this program, reads its rows of each batch, and holds its part of the parameters.  With
``--checkpoints DIR`` training goes on from the newest checkpoint, which may have been written by another number of
processes and under another assignment.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.multihost_utils import process_allgather

from xmap_compat import global_array, mesh, process_array, xmap

INPUTS, HIDDEN, BATCH = 6, 16, 32
LEARNING_RATE, MOMENTUM = 0.1, 0.5

# The only thing that changes between runs.  The mesh has an axis of processes, and one of the devices of each.
ASSIGNMENTS = {
    "data": {"batch": ("process", "device")},
    "data and tensor": {"batch": "process", "hidden": "device"},
    "tensor": {"hidden": "process", "batch": "device"},
}

# Which dimension of which array is which axis.
PARAMS = {"w1": ["inputs", "hidden"], "b1": ["hidden"], "w2": ["hidden"]}
STATE = {"params": PARAMS, "momentum": PARAMS, "step": {}}
ROWS, TARGETS = ["batch", "inputs"], ["batch"]


def named_loss(params, row, target):
    """The mean squared error over the batch."""
    hidden = jnp.tanh(lax.pdot(row, params["w1"], "inputs") + params["b1"])
    return lax.pmean((lax.pdot(hidden, params["w2"], "hidden") - target) ** 2, "batch")


def read(step, which=slice(None)):
    """Some rows of a batch and their targets; a real program would read no more than these."""
    rows = np.random.default_rng(step).normal(size=(BATCH, INPUTS)).astype(np.float32)
    return rows[which], np.sin(rows[:, 0] + rows[:, 1])[which]


def my_rows(resources):
    """Those that the devices of this process need: all of them, unless the processes share the batch."""
    share = BATCH // jax.process_count()
    first = jax.process_index() * share
    return slice(first, first + share) if "process" in resources["batch"] else slice(None)


def init_state():
    """The same on every process."""
    rng = np.random.default_rng(0)
    w1 = rng.normal(0, INPUTS**-0.5, (INPUTS, HIDDEN)).astype(np.float32)
    params = {
        "w1": w1,
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": rng.normal(0, 0.1, HIDDEN).astype(np.float32),
    }
    return {"params": params, "momentum": jax.tree.map(np.zeros_like, params), "step": np.int32(0)}


def make_train_step(resources):
    loss = xmap(named_loss, in_axes=(PARAMS, ROWS, TARGETS), out_axes={}, axis_resources=resources)

    @jax.jit
    def train_step(state, rows, targets):
        value, grads = jax.value_and_grad(loss)(state["params"], rows, targets)
        momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - LEARNING_RATE * m, state["params"], momentum)
        return {"params": params, "momentum": momentum, "step": state["step"] + 1}, value

    return train_step


def restored(folder, state):
    """The newest checkpoint, laid out as ``state`` is; ``state`` itself if there is none."""
    import orbax.checkpoint as ocp

    newest = max((int(path.name) for path in folder.glob("*") if path.name.isdigit()), default=None)
    if newest is None:
        return state
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / str(newest), state)


def save(folder, state):
    """Each process writes its part."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / str(int(state["step"])), state)


def train(resources, steps, checkpoints, report):
    # Every process has made all of the state: axis_sizes says that it is the whole, not its part.
    state = global_array(init_state(), STATE, resources, axis_sizes={"hidden": HIDDEN})
    if checkpoints:
        state = restored(checkpoints, state)
    train_step = make_train_step(resources)
    for step in range(int(state["step"]), steps):
        batch = global_array(read(step, my_rows(resources)), (ROWS, TARGETS), resources)
        state, value = jax.block_until_ready(train_step(state, *batch))
        report(f"step {step:3d}  loss {float(value):.6f}")  # which is whole on every device
    if checkpoints:
        save(checkpoints, state)
    return state


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--steps", type=int, default=20, help="train until so many steps have been made"
    )
    parser.add_argument("--assignment", choices=ASSIGNMENTS, default="data")
    parser.add_argument(
        "--checkpoints", type=lambda path: pathlib.Path(path).resolve(), metavar="DIR"
    )
    parser.add_argument(
        "--result", metavar="FILE", help="write the trained parameters to a file of NumPy's"
    )
    options = parser.parse_args()

    jax.distributed.initialize()  # before all else that JAX does; from now on jax.devices() are those of all processes
    report = print if jax.process_index() == 0 else lambda line: None
    devices = np.array(jax.devices()).reshape(jax.process_count(), -1)
    with mesh(devices, ("process", "device")):
        state = train(ASSIGNMENTS[options.assignment], options.steps, options.checkpoints, report)
    w1 = state["params"]["w1"]
    print(
        f"process {jax.process_index()}: w1 {w1.sharding.spec}, here {process_array(w1).shape} of {w1.shape}"
    )
    if options.result:
        params = process_allgather(state["params"], tiled=True)  # all processes take part
        if jax.process_index() == 0:
            np.savez(options.result, **params)


if __name__ == "__main__":
    main()
