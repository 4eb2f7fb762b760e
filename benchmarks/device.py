"""``python -m benchmarks device``: one accelerator, each program beside the same by hand, in one run.

Times are medians over calls that take turns, in microseconds, with the range between their quartiles.  Without an
accelerator the programs are tried on the CPU with shorter axes, and their times say nothing.
"""

from __future__ import annotations

import contextlib
import datetime
import statistics
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from benchmarks import timing
from benchmarks.device_programs import (
    ACCELERATOR,
    CPU,
    Lengths,
    Program,
    chunked_programs,
    mesh_of_one,
    programs,
    row_sums_on_mesh,
    small_programs,
)
from benchmarks.measure import difference
from xmap_compat import Mesh

GOALS = {"program": 1.03, "dispatch": 1.05}
CALLS = 60
WIDTH = 44


class Times(NamedTuple):
    """Seconds of one rival: the median over calls, and the first and the third quartile."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{1e6 * self.median:9.1f} ({1e6 * self.low:.1f} to {1e6 * self.high:.1f})"


def main() -> int:
    on_accelerator = jax.default_backend() != "cpu"
    lengths = ACCELERATOR if on_accelerator else CPU
    print(machine())
    missed = []
    for program in programs(lengths):
        missed += row(program, "program")
    print("\ndispatch")
    for program in small_programs():
        missed += row(program, "dispatch")
    print(
        "\nmemory of k-means in a serial loop, MiB: scratch of the compiled program, peak of the device"
    )
    memory_rows(lengths)
    print("\narguments on this device, the mesh on CPUs")
    print(elsewhere())
    print("\ngoals missed:", *(missed or ["none"]), sep="\n  ")
    return 0


def machine() -> str:
    """The card, its driver, the release of JAX and the date."""
    device = jax.devices()[0]
    today = datetime.date.today().isoformat()
    return f"{device.device_kind}, {driver()}, jax {jax.__version__}, {today}"


def driver() -> str:
    """The driver's version, as its own tool says it."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "no driver of NVIDIA's"
    return f"driver {done.stdout.split()[0]}"


# ------------------------------------------------------------------------------------ times


def row(program: Program, goal: str) -> list[str]:
    """Print a line; what is returned names the program if its goal is missed."""
    with scope(program):
        results = [f(*program.args) for f in (program.named, program.by_hand)]
        seconds = timing.turns(program.named, program.by_hand, program.args, CALLS)
    ours = summary(seconds.ours)
    theirs = summary(seconds.theirs)
    differs = difference(*results)
    ratio = ours.median / theirs.median
    is_slow = ratio > GOALS[goal]
    mark = "*" if is_slow else " "
    print(
        f"{program.name:{WIDTH}} {ours!s:32} {theirs!s:32} {ratio:.3f}{mark} {differs}", flush=True
    )
    is_missed = is_slow or bool(differs)
    return [f"{program.name}: {ratio:.3f} {differs}"] if is_missed else []


@contextlib.contextmanager
def scope(program: Program) -> Iterator[None]:
    """The mesh that the program needs, if it needs one."""
    if not program.on_mesh:
        yield
        return
    mesh = mesh_of_one()
    with Mesh(mesh.devices, mesh.axis_names):
        yield


def summary(seconds: list[float]) -> Times:
    low, median, high = statistics.quantiles(seconds, n=4)
    return Times(median, low, high)


# ----------------------------------------------------------------------------------- memory


def memory_rows(lengths: Lengths) -> None:
    """For each number of chunks, ours and by hand."""
    for chunks, program in chunked_programs(lengths):
        for who, fun in (("xmap", program.named), ("by hand", program.by_hand)):
            compiled = fun.lower(*program.args).compile()
            scratch = compiled.memory_analysis().temp_size_in_bytes
            jax.block_until_ready(compiled(*program.args))
            name = f"{chunks} chunks, {who}"
            print(f"{name:{WIDTH}} {scratch / 2**20:9.2f} {device_peak():>9}", flush=True)


def device_peak() -> str:
    """The most bytes that the device held since the process began, in MiB; devices without counts say so."""
    counts = jax.devices()[0].memory_stats()
    if not counts or "peak_bytes_in_use" not in counts:
        return "unknown"
    return f"{counts['peak_bytes_in_use'] / 2**20:.2f}"


# -------------------------------------------------------------------- devices of two kinds


def elsewhere() -> str:
    """What a call says whose arguments are on this device and whose mesh has CPUs: numbers, or a refusal."""
    program = row_sums_on_mesh()
    [value] = program.args
    cpus = jax.devices("cpu")
    mesh = Mesh(np.array(cpus).reshape(len(cpus)), ("x",))
    try:
        with mesh:
            result = program.named(value)
    except ValueError as error:
        return f"refused: {str(error).splitlines()[0]}"
    expected = np.asarray(value) / np.asarray(value).sum(0)
    np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-5)
    return f"moved: the result is on {len(result.devices())} CPUs, and right"
