"""Several processes share one mesh: global arrays from local parts, collectives and gradients across processes.

The tests start 2 and 4 processes of this very file, of 8 CPU devices in all.  Each process runs every program
on its own part of the arguments and writes down what lies on its devices; here all the parts are put together
and compared with NumPy on the whole arrays.
"""

import dataclasses
import faulthandler
import functools
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xmap_compat import SerialLoop, global_array, mesh, xmap

DEVICES = 8
LIMIT = 120  # seconds for all programs together; they need about 15

# Which device is where on the mesh of x: 4, y: 2.  Devices 0 to 3 (0 and 1) belong to the first of 2 (of 4) processes.
GRIDS = {"x over processes": np.arange(8).reshape(4, 2), "y over processes": np.arange(8).reshape(2, 4).T}

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)
RING = [(k, (k + 3) % 8) for k in range(8)]
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
        x, y = np.nonzero(self.grid // (DEVICES // self.count) == self.index)
        number, pieces = {"x": (x, 4), "y": (y, 2), ("x", "y"): (2 * x + y, 8), ("y", "x"): (4 * y + x, 8)}[placement]
        return np.concatenate([np.split(whole, pieces)[k] for k in np.unique(number)])

    def bring(self, whole, placement):
        """The global array, made of the parts that the processes have."""
        return global_array(self.part(whole, placement), ROWS, {"i": placement})


# ------------------------------------------------------------------------------- the programs


# What each process runs, and what NumPy says of the whole, as one program: {name: (run, expected)}.
PROGRAMS: dict[str, tuple[Callable[[Process], Any], Callable[[], Any]]] = {}

# Over the rows of X.  name: (body, out_axes, the result for whole arrays)
COLLECTIVES = {
    "psum": (lambda v: lax.psum(v, "i"), [...], lambda: X.sum(0)),
    "pmean": (lambda v: v - lax.pmean(v, "i"), ROWS, lambda: X - X.mean(0)),
    "pmax": (lambda v: lax.pmax(v, "i"), [...], lambda: X.max(0)),
    "all_gather": (lambda v: v[0] * lax.all_gather(v, "i"), ROWS, lambda: X[:, :1, None] * X),
    "ppermute": (lambda v: lax.ppermute(v, "i", RING), ROWS, lambda: np.roll(X, 3, axis=0)),
    "psum_scatter": (
        lambda v: lax.psum_scatter(jnp.outer(jnp.arange(8.0), v), "i"),
        ROWS,
        lambda: np.outer(np.arange(8), X.sum(0)),
    ),
    "all_to_all": (
        lambda v: lax.all_to_all(v[0] * jnp.arange(8.0), "i", 0, 0),
        ROWS,
        lambda: np.outer(np.arange(8), X[:, 0]),
    ),
    "axis_index": (lambda v: v + lax.axis_index("i"), ROWS, lambda: X + np.arange(8)[:, None]),
    "loops of different lengths": (
        lambda v: lax.while_loop(lambda c: c < 9, lambda c: c + lax.pmax(c, "i"), 1.0 + lax.axis_index("i")),
        ROWS,
        lambda: raised_to(9.0, 1.0 + np.arange(8)),
    ),
}


def collectives(process, placement):
    """All of them in one function, as each function that is compiled takes its time."""
    bodies, out_axes, _ = ({name: c[k] for name, c in COLLECTIVES.items()} for k in range(3))
    f = xmap(lambda v: {n: body(v) for n, body in bodies.items()}, ROWS, out_axes, axis_resources={"i": placement})
    return f(process.bring(X, placement))


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
    return global_array(X, ROWS, {"i": ("x", "y")}, axis_sizes={"i": 8})


def tree_of_parts(process):
    """A batch as a tree, of which each process has some rows, and weights split by columns."""
    batch = {"x": process.part(X, ("x", "y")), "row": process.part(np.arange(8), ("x", "y"))}
    columns = process.part(W.T, "y").T
    resources = {"i": ("x", "y"), "j": "y"}
    return global_array((batch, columns), (ROWS, [None, "j"]), resources)


def keys_of_rows(process):
    """Typed keys are arrays as others: what is drawn for a row is the same as on one process."""
    keys = process.part(np.arange(8), "x")
    made = global_array(jax.vmap(jax.random.key)(keys), ["i"], {"i": "x"})
    return xmap(lambda key: jax.random.bits(key, (3,)), ["i"], ROWS, axis_resources={"i": "x"})(made)


def bits_of_rows():
    return np.stack([jax.random.bits(jax.random.key(k), (3,)) for k in range(8)])


def refused(process):
    """What does not fit raises on every process, before any waits for another."""
    odd = np.ones((5, 4), np.float32)
    with pytest.raises(ValueError, match=r"Size of axis i \(\d+\) is not divisible"):
        global_array(odd, ROWS, {"i": ("x", "y")})
    with pytest.raises(ValueError, match="process data has 5 elements"):
        global_array(odd, ROWS, {"i": ("x", "y")}, axis_sizes={"i": 8})
    return xmap(lambda v: v, ROWS, ROWS, axis_resources={"i": "x"})(process.bring(X, "x"))


def looped(process):
    f = xmap(lambda v: jnp.cumsum(v), ROWS, ROWS, axis_resources={"i": ("x", SerialLoop(2))})
    return f(process.bring(X, "x"))


def brought_otherwise(process):
    f = xmap(lambda v: v - lax.pmean(v, "i"), ROWS, ROWS, axis_resources={"i": ("y", "x")})
    return f(process.bring(X, "y"))


GRADIENTS = [{"i": "x"}, {"i": "x", "j": "y"}, {"i": "y", "k": "x"}, {"i": ("y", "x")}]

for placement in ["x", ("x", "y"), ("y", "x")]:
    expected = lambda: {name: whole() for name, (_, _, whole) in COLLECTIVES.items()}
    PROGRAMS[f"collectives over {placement}"] = (functools.partial(collectives, placement=placement), expected)
for resources in GRADIENTS:
    PROGRAMS[f"gradients with {resources}"] = (functools.partial(gradients, resources=resources), gradients_by_hand)
PROGRAMS |= {
    "whole file": (whole_file, lambda: X),
    "tree of parts": (tree_of_parts, lambda: ({"x": X, "row": np.arange(8)}, W)),
    "keys of rows": (keys_of_rows, bits_of_rows),
    "refused": (refused, lambda: X),
    "looped": (looped, lambda: np.cumsum(X, axis=1)),
    "brought otherwise": (brought_otherwise, lambda: X - X.mean(0)),
}


# ----------------------------------------------------------------- what one process does


def run_programs(port, count, index, path):
    """Run every program on every grid, and write the shards of this process's devices to a file."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, index, initialization_timeout=LIMIT)
    found = {}
    for where, grid in GRIDS.items():
        process = Process(index, count, grid)
        with mesh(np.array(jax.devices())[grid], ("x", "y")):
            for name, (run, _) in PROGRAMS.items():
                found[where, name] = jax.tree.map(shards_of, run(process))
    path.write_bytes(pickle.dumps(found))


def shards_of(array):
    """``(shape, [(bounds, data), ...])``: the shape of the whole, and the parts that lie here."""
    bounds = lambda index: tuple(
        (k.start or 0, size if k.stop is None else k.stop) for k, size in zip(index, array.shape)
    )
    return array.shape, [(bounds(s.index), np.asarray(s.data)) for s in array.addressable_shards]


# ------------------------------------------------------------------- what the tests do


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def run_processes(count, folder):
    """Run the programs on ``count`` processes; all of them have ended when this returns or raises."""
    flags = f"--xla_force_host_platform_device_count={DEVICES // count}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-W", "error", __file__, str(free_port()), str(count)]
    logs = [folder / f"log{k}" for k in range(count)]
    paths = [folder / f"shards{k}" for k in range(count)]
    processes = []
    try:
        for k in range(count):
            with logs[k].open("w") as log:
                started = subprocess.Popen([*command, str(k), str(paths[k])], env=env, stdout=log, stderr=log)
            processes.append(started)
        wait_for_all(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    assert codes == [0] * count, "\n".join(f"process {k}: {logs[k].read_text()[-3000:]}" for k in range(count))
    return [pickle.loads(path.read_bytes()) for path in paths]


def wait_for_all(processes):
    """Until all have ended, or one has failed (the others would wait for it), or it takes too long."""
    deadline = time.monotonic() + LIMIT + 10  # by then they have said where they hang, and stopped
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return
        time.sleep(0.05)


def is_shards(node):
    return isinstance(node, tuple) and len(node) == 2 and isinstance(node[1], list)


def assert_parts_of(expected, found, name):
    """The shards of all processes are parts of the whole array, and cover it.

    Args:
      found: what each process wrote of this array.
    """
    expected = np.asarray(expected)
    seen = np.zeros(expected.shape, bool)
    for shape, shards in found:
        assert shape == expected.shape, name
        assert len(shards) == DEVICES // len(found), name
        for bounds, data in shards:
            here = tuple(slice(*b) for b in bounds)
            np.testing.assert_allclose(data, expected[here], rtol=2e-5, atol=2e-5, err_msg=name)
            seen[here] = True
    assert seen.all(), name


@pytest.mark.parametrize("count", [2, 4])
def test_programs_on_several_processes(count, tmp_path):
    """One start for all programs: starting takes longer than most of them."""
    found = run_processes(count, tmp_path)
    for where in GRIDS:
        for name, (_, expected) in PROGRAMS.items():
            parts = [jax.tree.leaves(f[where, name], is_leaf=is_shards) for f in found]
            for (path, leaf), *of_processes in zip(jax.tree.leaves_with_path(expected()), *parts, strict=True):
                assert_parts_of(leaf, of_processes, f"{name}{jax.tree_util.keystr(path)}, {where}")


# ------------------------------------------------------------------------- on one process

SPECS = [
    (["i", ...], {"i": "x"}, P("x")),
    (["i", "j"], {"i": "y"}, P("y")),
    ({1: "j"}, {"i": "y", "j": ("y", "x")}, P(None, ("y", "x"))),
    (["i", "j"], {"i": ("x", SerialLoop(2)), "j": "y"}, P("x", "y")),
    ([...], {"i": "x"}, P()),
    (["i", ...], None, P()),
]


@pytest.mark.parametrize(("in_axes", "resources", "expected"), SPECS, ids=str)
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_on_one_process_the_part_is_the_whole(in_axes, resources, expected, make, mesh42):
    whole = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    with mesh42:
        in_scope = global_array(make(whole), in_axes, resources)
    given = [global_array(make(whole), in_axes, resources, mesh=m) for m in (mesh42, mesh42.physical_mesh)]
    placed = jax.device_put(whole, NamedSharding(mesh42.physical_mesh, expected))
    for array in [in_scope, *given]:
        assert array.sharding == placed.sharding
        for shard, other in zip(array.addressable_shards, placed.addressable_shards, strict=True):
            np.testing.assert_array_equal(shard.data, other.data)


def test_a_tree_with_a_prefix_of_specs(mesh42):
    tree = {"w": np.ones((8, 2)), "b": np.ones(8), "step": 3}
    made = global_array(tree, {"w": ["i", ...], "b": ["i"], "step": {}}, {"i": "x"}, mesh=mesh42)
    assert {name: array.sharding.spec for name, array in made.items()} == {"w": P("x"), "b": P("x"), "step": P()}
    assert {name: array.tolist() for name, array in made.items()} == {
        k: np.asarray(v).tolist() for k, v in tree.items()
    }


def test_without_a_mesh_arrays_stay_with_the_process():
    made = global_array({"x": X}, ROWS, {})
    np.testing.assert_array_equal(made["x"], X)
    assert made["x"].sharding == jnp.asarray(X).sharding


# name: (local, in_axes, axis_resources, axis_sizes, message)
REFUSED = {
    "no such resource": (X, ROWS, {"i": "z"}, None, r"The missing resources are: \{'z'\}"),
    "repeated resource": (X, ROWS, {"i": ("x", "x")}, None, "must be a tuple of distinct resources"),
    "size and resources": (X[:6], ROWS, {"i": ("x", "y")}, None, r"axis i \(6\) is not divisible"),
    "size and loop": (X, ROWS, {"i": ("x", SerialLoop(3))}, None, r"axis i \(8\) is not divisible"),
    "rank": (X[0], ["i", "k"], {"i": "x"}, None, "asserts that it should be of rank 2, but the argument has rank 1"),
    "not a prefix": (
        (X, X),
        (ROWS,),
        {},
        None,
        r"^The in_axes of global_array must be a tree prefix of local, got specification \(\['i', ...\],\) for value "
        r"tree PyTreeDef\(\(\*, \*\)\). They part at local: there the specification has a tuple of length 1, ",
    ),
    "two arrays": ((X, X[:4]), ROWS, {"i": "x"}, None, "The size of axis i was previously inferred to be 8"),
    "another size given": (X, ROWS, {"i": "x"}, {"i": 16}, "global_shape"),
}


@pytest.mark.parametrize(("local", "in_axes", "resources", "sizes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused(local, in_axes, resources, sizes, message, mesh42):
    with mesh42, pytest.raises(ValueError, match=message):
        global_array(local, in_axes, resources, axis_sizes=sizes)


@pytest.mark.parametrize(
    "mesh", ["x", jax.sharding.AbstractMesh((4,), ("x",)), DEVICES], ids=["name", "abstract", "number"]
)
def test_a_mesh_without_devices_is_refused(mesh):
    with pytest.raises(TypeError, match="The mesh of global_array should be a Mesh"):
        global_array(X, ROWS, {"i": "x"}, mesh=mesh)


def test_a_process_without_devices_on_the_mesh_has_no_part(mesh42, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 5)
    with mesh42, pytest.raises(ValueError, match=r"Process 5 has no device on the mesh \(x: 4, y: 2\)"):
        global_array(X, ROWS, {"i": "x"})


if __name__ == "__main__":
    # A process that hangs says where; and it ends although nobody may be left to stop it.
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    port, count, index, path = sys.argv[1:]
    run_programs(int(port), int(count), int(index), pathlib.Path(path))
