"""Is a price worth something?  Every assignment of ten programs on a 4 x 2 mesh: priced, compiled, and run twice.

What is counted is compared with what XLA compiled, what is estimated with processor time, which other programs on the
machine disturb less.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.priced import Priced, programs
from benchmarks.programs import make_mesh
from benchmarks.report import Verdict
from xmap_compat import Hardware, Mesh, plan
from xmap_compat.tools import steps
from xmap_compat.tools.cost import bytes_by_axis
from xmap_compat.tools.search import Candidate, search

ROUNDS = 5
GOALS = {"correlation": 0.85, "lost": 0.10, "planning": 0.1, "flops": 0.05}
QUIET = 0.9  # the least correlation of two measurements with each other that tells anything


def groups() -> list[tuple[str, list[Priced]]]:
    return [(program.name, [program]) for program in programs()]


class Honesty(NamedTuple):
    """How the prices of all assignments of a program compare with what was compiled and measured.

    Attributes:
      planning: processor seconds to price one assignment after the first, of those that the search tried.
      bytes_equal: for how many assignments the bytes over each mesh axis are those of the compiled program.
      flops: the largest relative difference to XLA's; None for programs with loops.
      memory: the smallest, median and largest ratio of the estimate to XLA's.
      correlation: of places and times, for each of two measurements.
      alike: of the two measurements with each other.
      lost: by how much the assignment that the default search chooses is slower than the best.
      estimated: by how much the first estimate is.
    """

    name: str
    candidates: int
    planning: float
    bytes_equal: int
    flops: float | None
    memory: tuple[float, float, float]
    correlation: tuple[float, float]
    alike: float
    lost: float
    estimated: float
    seconds: tuple[float, float]

    @property
    def is_telling(self) -> bool:
        """Whether the machine was quiet enough."""
        return self.alike >= QUIET


@functools.cache
def hardware() -> Hardware:
    """Of three measurements the one that agrees best with itself."""
    return min((Hardware.measure(_mesh()) for _ in range(3)), key=lambda found: found.margin)


def _mesh() -> Mesh:
    mesh = make_mesh()
    return Mesh(mesh.devices, mesh.axis_names)


def examine(program: Priced, rounds: int = ROUNDS, machine: Hardware | None = None, most: int = 10**6) -> Honesty:
    """Price, compile and run every assignment (the first ``most``) of a program."""
    machine = machine or hardware()
    priced = functools.partial(search, program.make, *program.args, mesh=_mesh(), hardware=machine)
    with _mesh():
        plan(program.make({}), *program.args)  # what is read and traced once
    begin = time.process_time()
    found = priced(measure=0)
    planning = (time.process_time() - begin) / (len(found) - 1)
    usable = [c for c in found if c.refused is None][:most]
    executables = [_compiled(program, candidate) for candidate in usable]
    read = [steps.read_compiled(executable, _mesh()) for executable in executables]
    runs = [_interleaved(executables, program.args, rounds) for _ in range(2)]
    times = [min(pair) for pair in zip(*runs)]
    places = [c.place for c in usable]
    ratios = sorted(c.cost.memory / r.memory for c, r in zip(usable, read))
    chosen = priced().best.name
    return Honesty(
        program.name,
        len(usable),
        planning,
        sum(same_bytes(c.cost.bytes_sent, r.transfers) for c, r in zip(usable, read)),
        None if program.loops else max(_flops_off(c, e) for c, e in zip(usable, executables)),
        (ratios[0], statistics.median(ratios), ratios[-1]),
        (_rank_correlation(places, runs[0]), _rank_correlation(places, runs[1])),
        _rank_correlation(*runs),
        max((t / min(times) - 1 for c, t in zip(usable, times) if c.name == chosen), default=0.0),
        times[0] / min(times) - 1,
        (min(times), max(times)),
    )


def _compiled(program: Priced, candidate: Candidate) -> Any:
    with _mesh():
        step = program.make(dict(candidate.axis_resources))
        return (step if hasattr(step, "lower") else jax.jit(step)).lower(*program.args).compile()


def same_bytes(counted: Any, transfers: Sequence[Any]) -> bool:
    """Whether each mesh axis has the bytes of the compiled program, but for rounding where XLA joins collectives."""
    compiled = bytes_by_axis(transfers)
    return all(abs(counted.get(a, 0) - compiled.get(a, 0)) <= 64 for a in {*counted, *compiled})


def _flops_off(candidate: Candidate, executable: Any) -> float:
    analysis = executable.cost_analysis()
    xla = analysis.get("flops", 0.0) + analysis.get("transcendentals", 0.0)
    return abs(candidate.cost.flops / xla - 1)


def _interleaved(executables: Sequence[Any], args: tuple[Any, ...], rounds: int) -> list[float]:
    """The least processor time of each, all threads together; they take turns."""
    placed = [jax.block_until_ready(jax.device_put(args, e.input_shardings[0])) for e in executables]
    times: list[list[float]] = [[] for _ in executables]
    for k in range(rounds + 1):
        for own, executable, arguments in zip(times, executables, placed):
            begin = time.process_time()
            jax.block_until_ready(executable(*arguments))
            if k:  # the first round warms up
                own.append(time.process_time() - begin)
    return [min(own) for own in times]


def _rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: equal values have the mean of their ranks.  Fewer than three values tell nothing: 1."""
    ranks = [_ranks(np.asarray(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1]) if len(a) > 2 and all(np.ptp(r) for r in ranks) else 1.0


def _ranks(values: np.ndarray) -> np.ndarray:
    return (values[:, None] > values).sum(1) + (values[:, None] == values).sum(1) / 2


# ------------------------------------------------------------------------------- the table

COLUMNS = ("n", "plan s", "bytes", "flops", "memory", "rank corr", "again", "lost", "estimate", "ms")


def run_search(groups: Sequence[tuple[str, list[Priced]]], effort: Any) -> Iterator[Verdict]:
    """A row for each program."""
    width = max(len(name) for name, _ in groups)
    print(_row("program", COLUMNS, width), flush=True)
    for _, [program] in groups:
        found = examine(program, rounds=min(effort.rounds, ROUNDS), most=effort.candidates)
        busy = "" if found.is_telling else "  the machine is too busy to tell"
        print(_row(found.name, _cells(found), width) + busy, flush=True)
        yield from verdicts(found)


def _cells(h: Honesty) -> tuple[str, ...]:
    low, middle, high = h.memory
    return (
        str(h.candidates),
        f"{h.planning:.2f}",
        f"{h.bytes_equal} same",
        "loops" if h.flops is None else f"{h.flops:.1%}",
        f"{low:.2f} {middle:.2f} {high:.2f}",
        " ".join(f"{c:.2f}" for c in h.correlation),
        f"{h.alike:.2f}",
        f"{h.lost:.0%}",
        f"{h.estimated:.0%}",
        f"{h.seconds[0] * 1e3:.1f}-{h.seconds[1] * 1e3:.1f}",
    )


def _row(name: str, cells: Sequence[str], width: int) -> str:
    widths = (3, 6, 8, 6, 14, 9, 5, 5, 8, 12)
    return name.ljust(width) + "".join("  " + cell.rjust(w) for cell, w in zip(cells, widths))


def verdicts(h: Honesty) -> Iterator[Verdict]:
    """Counts always count; times count where the machine was quiet enough to tell."""
    yield Verdict(h.name, "bytes as compiled", h.bytes_equal == h.candidates, f"{h.bytes_equal} of {h.candidates}")
    if h.flops is not None:
        yield Verdict(h.name, "flops within 5 % of XLA's", h.flops <= GOALS["flops"], f"{h.flops:.1%} off")
    yield Verdict(h.name, "priced in 0.1 s", h.planning <= GOALS["planning"], f"{h.planning:.2f} s")
    yield Verdict(h.name, "a machine that can tell", h.is_telling, f"{h.alike:.2f} with itself")
    if h.is_telling:
        least = min(h.correlation)
        yield Verdict(h.name, "rank correlation 0.85", least >= GOALS["correlation"], f"{least:.2f}")
        yield Verdict(h.name, "at most 10 % lost", h.lost <= GOALS["lost"], f"{h.lost:.0%} lost")
