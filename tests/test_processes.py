"""Several processes share one mesh: global arrays, collectives, gradients; the same program everywhere or an error.

The tests start processes of ``process_programs.py``; here the parts that they wrote down are put together and
compared with NumPy on whole arrays.
"""

import dataclasses
import fnmatch
import os
import pathlib
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import process_faults
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from process_programs import LIMIT, PROGRAMS, chosen

from xmap_compat import SerialLoop, global_array

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
ROWS = ["i", ...]


# ------------------------------------------------------------------- several processes


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one process has ended: its exit code, what it wrote, and what it printed."""

    code: int
    wrote: Any
    log: str


def run_processes(count, devices, folder, *what):
    """Run ``process_programs.py`` on ``count`` processes of so many devices; all of them have ended when this returns.

    ``what`` is what each of them runs.
    """
    dying = what[-1].startswith("lose")
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "XLA_FLAGS": flags}
    program = pathlib.Path(__file__).parent / "helpers" / "process_programs.py"
    command = [sys.executable, "-W", "error", str(program), str(free_port()), str(count)]
    logs = [folder / f"log{k}" for k in range(count)]
    paths = [folder / f"wrote{k}" for k in range(count)]
    processes = []
    try:
        for k in range(count):
            with logs[k].open("w") as log:
                started = subprocess.Popen(
                    [*command, str(k), str(paths[k]), *what], env=env, stdout=log, stderr=log
                )
            processes.append(started)
        wait_for_all(processes, dying)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    wrote = [pickle.loads(path.read_bytes()) if path.exists() else None for path in paths]
    return [Ended(p.returncode, w, log.read_text()) for p, w, log in zip(processes, wrote, logs)]


def wait_for_all(processes, dying):
    """Until all have ended, or one has failed (the others would wait for it), or it takes too long.

    Where one is to die, the others have a minute more.
    """
    deadline = time.monotonic() + LIMIT + 10  # by then they have said where they hang, and stopped
    died = False
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes or (any(codes) and not dying):
            return
        if any(codes) and not died:
            died, deadline = True, time.monotonic() + 60
        time.sleep(0.05)


def assert_all_succeeded(ended):
    for process in ended:
        assert process.code == 0, process.log[-3000:]


def assert_all_ended(ended, lost):
    """One process has died; each of the others has ended by itself, and says why."""
    assert ended[lost].code == process_faults.DIED, ended[lost].log[-3000:]
    for process in [*ended[:lost], *ended[lost + 1 :]]:
        assert process.code not in (0, -signal.SIGKILL), process.log[-3000:]
        causes = r"another task died|Connection (reset|closed) by peer|heartbeat"
        assert re.search(causes, process.log), process.log


def is_shards(node):
    return isinstance(node, tuple) and len(node) == 2 and isinstance(node[1], list)


def assert_parts_of(expected, found, devices, name):
    """The shards of all processes are parts of the whole array, and cover it.

    Args:
      found: what each process wrote of this array.
    """
    expected = np.asarray(expected)
    seen = np.zeros(expected.shape, bool)
    for shape, shards in found:
        assert shape == expected.shape, name
        assert len(shards) == devices, name
        for bounds, data in shards:
            here = tuple(slice(*b) for b in bounds)
            np.testing.assert_allclose(data, expected[here], rtol=2e-5, atol=2e-5, err_msg=name)
            seen[here] = True
    assert seen.all(), name


def assert_programs(wrote, devices, quickly):
    """Each program gave what NumPy gives."""
    for where, name in chosen(quickly):
        parts = [jax.tree.leaves(w[where, name], is_leaf=is_shards) for w in wrote]
        expected = jax.tree.leaves_with_path(PROGRAMS[name][1]())
        for (path, leaf), *of_processes in zip(expected, *parts, strict=True):
            assert_parts_of(
                leaf, of_processes, devices, f"{name}{jax.tree_util.keystr(path)}, {where}"
            )


# What every process says of a fault, where the last is numbered N.
DIFFERENCES = {
    "another_body": "process N: program: ?:* = div *, process 0: ?:* = sub ",
    "other_resources": "process N: axis_resources {'i': 'y'}, process 0: {'i': 'x'}. ",
    "other_axes": "process N: in_axes {1: 'i'}, process 0: {0: 'i'}. ",
    "no_resources": "process N: axis_resources {}, process 0: {'i': 'x'}. ",
    "another_backward_rule": "process N: program: ?:* = mul *3.0*, process 0: ?:* = mul *2.0",
    "another_order_of_devices": "process N: mesh {'x': *, 'y': *} of cpu devices * of *, process 0: * devices [0, ",
    "one_call_more": "process N: program: * 4.0*, process 0: * 5.0",
    "a_gradient_of_another_body": "process N: program: *[y=3]*, process 0: *[y=2]*",
    "traced_by_one_and_called_otherwise": "process N: program: * 2.0*, process 0: * 3.0",
}
X_OF_FAULTS = process_faults.X
SHIFTED = X_OF_FAULTS - X_OF_FAULTS.mean(0)
RESULTS = {
    "traced_by_one": SHIFTED * 2,
    "without_the_mesh": X_OF_FAULTS * 8,
    "a_mesh_of_some": X_OF_FAULTS,
    "traced_again_by_one": SHIFTED,
    "compiled_is_not_compared": X_OF_FAULTS * 11,
    "in_time_again": X_OF_FAULTS * 15,
}
TOO_LATE = ["late", "no_resources_for_arguments_of_its_own"]


def assert_faults(reports):
    """How each fault ended in each process; ``reports`` are those of process 0, 1, ..."""
    last = len(reports) - 1
    assert {*DIFFERENCES, *RESULTS, *TOO_LATE, "switched_off"} == {*process_faults.FAULTS}
    for process, of_process in enumerate(reports):
        assert of_process["switched_off"].error == ""
        for name, report in of_process.items():
            assert report.warnings == [], name
        for name, text in DIFFERENCES.items():
            assert_says(of_process[name], f"{OTHER_PROGRAMS} {text.replace('N', str(last), 1)}*")
            assert of_process[name].seconds < process_faults.TIMEOUT / 2, name
        for name, expected in RESULTS.items():
            assert of_process[name].error == "", name
            for index, data in of_process[name].shards:
                np.testing.assert_allclose(data, expected[index], rtol=1e-6, err_msg=name)
        for name in TOO_LATE:
            assert_says(
                of_process[name], f"Process {last} did not arrive within {len(reports) / 2:g} s: *"
            )
            is_late = "This process arrived later, at process_faults.py:" in of_process[name].error
            assert is_late == (process == last)


OTHER_PROGRAMS = "The processes of this mesh call different programs:"


def assert_says(report, pattern):
    assert fnmatch.fnmatchcase(report.error, pattern.replace("[", "[[]")), report.error


def test_programs_and_faults_on_two_processes(tmp_path):
    """One start for all that is quick: starting takes longer than most programs."""
    ended = run_processes(2, 2, tmp_path, "few programs", "faults", "lose 1 computing")
    assert_all_ended(ended, lost=1)
    assert_programs([e.wrote for e in ended], 2, quickly=True)
    assert_faults([e.wrote["faults"] for e in ended])


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 8])
def test_faults_of_one_among_more_processes(count, tmp_path):
    ended = run_processes(count, 1, tmp_path, "faults")
    assert_all_succeeded(ended)
    assert_faults([e.wrote["faults"] for e in ended])


@pytest.mark.slow
@pytest.mark.parametrize("where", ["computing", "waiting"])
@pytest.mark.parametrize(("count", "lost"), [(2, 0), (2, 1), (4, 2)])
def test_the_others_end_when_one_dies(count, lost, where, tmp_path):
    assert_all_ended(run_processes(count, 1, tmp_path, f"lose {lost} {where}"), lost)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices"), [(2, 1), (2, 4), (4, 1), (4, 2), (8, 1), (8, 2)])
def test_programs_on_more_processes(count, devices, tmp_path):
    ended = run_processes(count, devices, tmp_path, "programs")
    assert_all_succeeded(ended)
    assert_programs([e.wrote for e in ended], devices, quickly=False)


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
    with mesh42 as physical_mesh:
        made = global_array(make(whole), in_axes, resources)
    placed = jax.device_put(whole, NamedSharding(physical_mesh, expected))
    assert made.sharding == placed.sharding
    for shard, other in zip(made.addressable_shards, placed.addressable_shards, strict=True):
        np.testing.assert_array_equal(shard.data, other.data)


def test_a_tree_with_a_prefix_of_specs(mesh42):
    tree = {"w": np.ones((8, 2)), "b": np.ones(8), "step": 3}
    with mesh42:
        made = global_array(tree, {"w": ["i", ...], "b": ["i"], "step": {}}, {"i": "x"})
    specs = [made[name].sharding.spec for name in tree]
    assert specs == [P("x"), P("x"), P()]
    for name, array in made.items():
        np.testing.assert_array_equal(array, tree[name])


def test_without_a_mesh_arrays_stay_with_the_process():
    made = global_array({"x": X}, ROWS, {})
    np.testing.assert_array_equal(made["x"], X)
    assert made["x"].sharding == jnp.asarray(X).sharding


# What follows a name is the call, and after => the message.
REFUSED = """
no such resource: X, ROWS, {"i": "z"} => The missing resources are: {'z'}
repeated resource: X, ROWS, {"i": ("x", "x")} => must be a tuple of distinct resources
size and resources: X[:6], ROWS, {"i": ("x", "y")} => axis i (6) is not divisible
size and loop: X, ROWS, {"i": ("x", SerialLoop(3))} => axis i (8) is not divisible
rank: X[0], ["i", "k"], {"i": "x"} => local has shape (4,), but ['i', 'k'] names exactly 2 dimensions
not a prefix: (X, X), (ROWS,) => local is a tuple of length 2, but in_axes has a tuple of length 1 for it. Give
two arrays: (X, X[:4]), ROWS, {"i": "x"} => The size of axis i was previously inferred to be 8
another size given: X, ROWS, {"i": "x"}, axis_sizes={"i": 16} => global_shape
"""
ROWS_OF_REFUSED = [
    re.split(": | => ", row, maxsplit=1) for row in REFUSED.replace("\\\n", "").strip().splitlines()
]


@pytest.mark.parametrize(
    ("name", "row"), ROWS_OF_REFUSED, ids=[name for name, _ in ROWS_OF_REFUSED]
)
def test_what_is_refused(name, row, mesh42):
    call, _, message = row.partition(" => ")
    with mesh42, pytest.raises(ValueError, match=re.escape(message)):
        eval(f"global_array({call})")


def test_a_process_without_devices_on_the_mesh_has_no_part(mesh42, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 5)
    message = r"Process 5 has no device on the mesh \(x: 4, y: 2\)"
    with mesh42, pytest.raises(ValueError, match=message):
        global_array(X, ROWS, {"i": "x"})
