"""What ``test_processes.py`` runs in several processes: programs over one mesh, and what NumPy says of each.

``python process_programs.py PORT COUNT INDEX FILE WHAT...`` is one of COUNT processes.  It runs every program on its
own part of the arguments, and writes down what lies on its devices; the tests put the parts of all processes together.
"""

import dataclasses
import faulthandler
import functools
import pathlib
import pickle
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import process_faults
import pytest
from jax import lax
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tables import expressions

from xmap_compat import global_array, mesh, process_array, xmap

LIMIT = 240  # seconds for everything on a busy machine
HEARTBEAT = 10  # seconds until a process that has died is missed

# The shapes of the mesh of x and y by the number of devices.
SHAPES = {2: (2, 1), 4: (2, 2), 8: (4, 2), 16: (4, 4)}


def grids(devices):
    """Which device is where on the mesh; devices that follow each other belong to one process, or to two."""
    shape = SHAPES[devices]
    numbers = np.arange(devices)
    return {
        "x over processes": numbers.reshape(shape),
        "y over processes": numbers.reshape(shape[::-1]).T,
        "in another order": np.random.default_rng(2).permutation(devices).reshape(shape),
    }


ROW_COUNT = 16
X = np.random.default_rng(0).normal(size=(ROW_COUNT, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
RING = [(k, (k + 3) % ROW_COUNT) for k in range(ROW_COUNT)]
GROUPS = [list(range(0, ROW_COUNT, 2)), list(range(1, ROW_COUNT, 2))]
ROWS = ["i", ...]


# ---------------------------------------------------------------------- the parts of a process


@dataclasses.dataclass(frozen=True)
class Process:
    """One of ``count`` processes, and the mesh of all.

    Attributes:
      grid: the number of the device at each place of the mesh.
    """

    index: int
    count: int
    grid: np.ndarray

    def part(self, whole, placement):
        """The rows of ``whole`` for the devices of this process, found by hand."""
        x, y = np.nonzero(self.grid // (self.grid.size // self.count) == self.index)
        nx, ny = self.grid.shape
        placements = {
            "x": (x, nx),
            "y": (y, ny),
            ("x", "y"): (ny * x + y, nx * ny),
            ("y", "x"): (nx * y + x, nx * ny),
        }
        number, pieces = placements[placement]
        parts = np.split(whole, pieces)
        return np.concatenate([parts[k] for k in np.unique(number)])

    def bring(self, whole, placement):
        """The global array, made of the parts that the processes have."""
        return global_array(self.part(whole, placement), ROWS, {"i": placement})


# ------------------------------------------------------------------------------- the programs


# What each process runs, and what NumPy says of the whole, as one program: {name: (run, expected)}.
PROGRAMS: dict[str, tuple[Callable[[Process], Any], Callable[[], Any]]] = {}


def summed_to(limit, start):
    """Add the largest value of all rows, until one's own is not below a limit."""
    return lax.while_loop(lambda c: c < limit, lambda c: c + lax.pmax(c, "i"), start)


# Of a row of X, and of X.
COLLECTIVES = expressions(
    """
psum: lax.psum(v, "i")
pmax: lax.pmax(v, "i")
pdot: lax.pdot(v, v[1:], "i")
psum of groups: lax.psum(v, "i", axis_index_groups=GROUPS)
all_gather: v[0] * lax.all_gather(v, "i")
ppermute: lax.ppermute(v, "i", RING)
psum_scatter: lax.psum_scatter(jnp.outer(jnp.arange(float(ROW_COUNT)), v), "i")
all_to_all: lax.all_to_all(v[0] * jnp.arange(float(ROW_COUNT)), "i", 0, 0)
axis_index: v + lax.axis_index("i")
loops of different lengths: summed_to(9, 1.0 + lax.axis_index("i"))
""",
    "v",
    globals(),
)
OF_ALL_ROWS = expressions(
    """
psum: X.sum(0)
pmax: X.max(0)
pdot: np.sum(X[:, :, None] * X[:, None, 1:], 0)
psum of groups: sums_of_groups()
all_gather: X[:, :1, None] * X
ppermute: np.roll(X, 3, axis=0)
psum_scatter: np.outer(np.arange(ROW_COUNT), X.sum(0))
all_to_all: np.outer(np.arange(ROW_COUNT), X[:, 0])
axis_index: X + np.arange(ROW_COUNT)[:, None]
loops of different lengths: raised_to(9.0, 1.0 + np.arange(ROW_COUNT))
""",
    "",
    globals(),
)
# Those whose results are the same for all rows.
REMOVE_ROWS = ["psum", "pmax", "pdot"]


def sums_of_groups():
    sums = np.zeros_like(X)
    for group in GROUPS:
        sums[group] = X[group].sum(0)
    return sums


def collectives(process, placement):
    """All of them in one function, as each function that is compiled takes its time."""
    out_axes = {name: [...] if name in REMOVE_ROWS else ROWS for name in COLLECTIVES}

    def body(v):
        return {name: collective(v) for name, collective in COLLECTIVES.items()}

    f = xmap(body, ROWS, out_axes, axis_resources={"i": placement})
    return f(process.bring(X, placement))


def collectives_of_all_rows():
    return {name: whole() for name, whole in OF_ALL_ROWS.items()}


def raised_to(limit, values):
    """Add the largest value to those below a limit, until there are none."""
    while (values < limit).any():
        values = np.where(values < limit, values + values.max(), values)
    return values


def named_loss(x, w):
    """Of one row, the inputs k and the units j; nothing but names is left."""
    y = jnp.tanh(lax.pdot(x, w, "k"))
    return lax.pmean(jnp.sum(y, axis="j"), "i"), y


def gradients(process, resources):
    """Of the mean loss, with respect to global rows, and to weights that every process has."""
    loss = xmap(named_loss, (["i", "k"], ["k", "j"]), ({}, ["i", "j"]), axis_resources=resources)
    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(process.bring(X, "x"), W)


def gradients_by_hand():
    y = np.tanh(X.astype(np.float64) @ W)
    d_before = (1 - y**2) / len(X)
    return (y.sum(1).mean(), y), (d_before @ W.T, X.T @ d_before)


def whole_file(process):
    """Each process has read everything, and the global array takes what it needs."""
    return global_array(X, ROWS, {"i": ("x", "y")}, axis_sizes={"i": ROW_COUNT})


def tree_of_parts(process):
    """A batch as a tree, of which each process has some rows, and weights split by columns."""
    batch = {
        "x": process.part(X, ("x", "y")),
        "row": process.part(np.arange(ROW_COUNT), ("x", "y")),
    }
    columns = process.part(W.T, "y").T
    resources = {"i": ("x", "y"), "j": "y"}
    return global_array((batch, columns), (ROWS, [None, "j"]), resources)


def keys_of_rows(process):
    """Typed keys are arrays as others: what is drawn for a row is the same as on one process."""
    numbers = process.part(np.arange(ROW_COUNT), "x")
    keys = jax.vmap(jax.random.key)(numbers)
    made = global_array(keys, ["i"], {"i": "x"})
    assert (process_array(made) == keys).all()
    return xmap(lambda key: jax.random.bits(key, (3,)), ["i"], ROWS, axis_resources={"i": "x"})(
        made
    )


def bits_of_rows():
    return np.stack([jax.random.bits(jax.random.key(k), (3,)) for k in range(ROW_COUNT)])


def read_back(process):
    """What a process has of a result, which JAX does not give to NumPy."""

    def body(v):
        return v + 1, lax.psum(v, "i")

    f = xmap(body, ROWS, (ROWS, [...]), axis_resources={"i": ("x", "y")})
    rows, total = f(process.bring(X, ("x", "y")))
    with pytest.raises(RuntimeError, match="non-addressable"):
        np.asarray(rows)
    here = process_array({"rows": rows, "total": total, "step": 3})
    assert here["step"] == 3
    np.testing.assert_array_equal(here["rows"], process.part(X, ("x", "y")) + 1)
    np.testing.assert_allclose(here["total"], X.sum(0), rtol=1e-5)
    np.testing.assert_array_equal(process_allgather(rows, tiled=True), X + 1)
    return global_array(here["rows"], ROWS, {"i": ("x", "y")})


def no_block(process):
    """Devices of one process on the diagonal of a mesh have no rows and columns that they share."""
    devices = np.array(jax.devices()).reshape(process.count, -1)
    if devices.shape == (2, 2):
        diagonal = [[devices[0, 0], devices[1, 0]], [devices[1, 1], devices[0, 1]]]
        sharding = NamedSharding(Mesh(np.array(diagonal), ("x", "y")), PartitionSpec("x", "y"))
        array = jax.make_array_from_callback(X.shape, sharding, X.__getitem__)
        with pytest.raises(ValueError, match=r"parts of result .* are no block of rows"):
            process_array(array)
    return process.bring(X, "x")


GRADIENTS = [{"i": "x", "j": "y"}, {"i": "y", "k": "x"}, {"i": ("y", "x")}]

for placement in ["x", ("y", "x")]:
    run = functools.partial(collectives, placement=placement)
    PROGRAMS[f"collectives over {placement}"] = (run, collectives_of_all_rows)
for resources in GRADIENTS:
    run = functools.partial(gradients, resources=resources)
    PROGRAMS[f"gradients with {resources}"] = (run, gradients_by_hand)
PROGRAMS |= {
    "whole file": (whole_file, lambda: X),
    "tree of parts": (tree_of_parts, lambda: ({"x": X, "row": np.arange(ROW_COUNT)}, W)),
    "keys of rows": (keys_of_rows, bits_of_rows),
    "read back": (read_back, lambda: X + 1),
    "no block": (no_block, lambda: X),
}
# In the quick run, on grids other than the first.
FEW = ["collectives over ('y', 'x')", "gradients with {'i': 'x', 'j': 'y'}", "read back"]


def chosen(quickly):
    """``(grid, program)`` names, in the order in which they run."""
    first, *others = grids(4)
    pairs = [(first, name) for name in PROGRAMS]
    for where in others:
        pairs.extend((where, name) for name in (FEW if quickly else PROGRAMS))
    return pairs


# ----------------------------------------------------------------- what one process does


def run_programs(index, count, quickly):
    """The shards of this process's devices, of every program on every grid."""
    found: dict[Any, Any] = {}
    devices = np.array(jax.devices())
    grid_of = grids(len(devices))
    for where, name in chosen(quickly):
        process = Process(index, count, grid_of[where])
        with mesh(devices[process.grid], ("x", "y")):
            run, _ = PROGRAMS[name]
            found[where, name] = jax.tree.map(shards_of, run(process))
    return found


def shards_of(array):
    """``(shape, [(bounds, data), ...])``: the shape of the whole, and the parts that lie here."""

    shards = []
    for shard in array.addressable_shards:
        bounds = [part.indices(size)[:2] for part, size in zip(shard.index, array.shape)]
        shards.append((bounds, np.asarray(shard.data)))
    return array.shape, shards


def main(port, count, index, path, *what):
    """``what`` are some of ``programs``, ``few programs``, ``faults``, ``lose K computing``, ``lose K waiting``."""
    count, index = int(count), int(index)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_disable_most_optimizations", "few programs" in what)
    jax.distributed.initialize(
        f"localhost:{port}",
        count,
        index,
        initialization_timeout=LIMIT,
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=30,
    )
    found: dict[Any, Any] = {}
    for part in what:
        if "programs" in part:
            found |= run_programs(index, count, quickly=part.startswith("few"))
        elif part == "faults":
            found["faults"] = process_faults.run_faults(index, count)
        else:
            pathlib.Path(path).write_bytes(pickle.dumps(found))
            _, who, where = part.split()
            process_faults.lose(process_faults.member_of(index, count), int(who), where)
    pathlib.Path(path).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    # A process that hangs says where; and it ends although nobody may be left to stop it.
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    main(*sys.argv[1:])
