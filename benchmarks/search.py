"""Is a price worth something?  Every assignment of five programs on a 4 x 2 mesh: priced, compiled, and run.

Sizes and seeds were fixed before anything was tuned.  What is counted is compared with what XLA compiled, what is
estimated with what is measured.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.programs import arrays, block_loss, make_mesh, named_loss, named_pair
from benchmarks.report import Verdict
from xmap_compat import Hardware, Mesh, pdot, xmap
from xmap_compat.tools import steps
from xmap_compat.tools.cost import bytes_by_axis
from xmap_compat.tools.search import Candidate, search

ROUNDS = 9
GOALS = {"correlation": 0.8, "place": 3, "lost": 0.10, "planning": 0.1, "flops": 0.05}
EXPERIMENTAL = 0.20


class Priced(NamedTuple):
    """A program: ``make(axis_resources)`` gives the step; ``loops`` says whether it has any (XLA counts them once)."""

    name: str
    make: Callable[[Any], Callable[..., Any]]
    args: tuple[Any, ...]
    loops: bool = False


def programs() -> Iterator[Priced]:
    """Each program forward, and as a training step."""
    for name, (body, in_axes, args, trained, loops) in PROGRAMS.items():
        yield Priced(f"{name} forward", functools.partial(_forward, body, in_axes), args(), loops)
        yield Priced(f"{name} step", functools.partial(_training, body, in_axes, trained), args(), loops)


def _forward(body, in_axes, resources):
    return xmap(body, in_axes, {}, axis_resources=resources)


def _training(body, in_axes, trained, resources):
    loss = xmap(body, in_axes, {}, axis_resources=resources)

    def step(*args):
        value, gradients = jax.value_and_grad(loss, argnums=trained)(*args)
        return jax.tree.map(lambda p, g: p - 0.1 * g, tuple(args[k] for k in trained), gradients), value

    return step


# ----------------------------------------------------------------------------- the programs


def _network_arguments():
    labels = np.arange(1024, dtype=np.int32) % 10
    return (*arrays((512, 512), (512, 10), (1024, 512)), labels)


def _block(layers, x, y):
    return lax.pmean(block_loss(named_pair, layers, x, y), "batch")


def _block_arguments():
    heads, width, sequence = 32, 128, 64
    into, back = (8, width, heads), (8, heads, width)
    shapes = {"q": into, "k": into, "v": into, "out": back, "up": into, "down": back}
    layers = [dict(zip(shapes, arrays(*shapes.values()))) for _ in range(2)]
    return (layers, *arrays((8, 2, sequence, width), (8, 2, sequence, width)))


def _attention(wq, wk, wv, wo, x, memory):
    scores = (x @ wq) @ (memory @ wk) / np.sqrt(wk.shape[-1])
    seen = pdot(jax.nn.softmax(scores, axis="key"), memory @ wv, "key")
    out = lax.psum(seen @ wo, "heads")
    return lax.pmean(jnp.mean((out - x) ** 2), "batch")


def _attention_arguments():
    width, head = 128, 32
    into = (8, width, head)
    return arrays(into, into, into, (8, head, width), (8, 64, width), (8, 64, width))


def _kmeans(centres, point):
    def distances(centres):
        return lax.psum((point - centres) ** 2, "features")

    def turn(centres, _):
        weight = jax.nn.softmax(-distances(centres), axis="clusters")
        total = pdot(weight, point, "points")
        return total / lax.psum(weight, "points"), None

    centres, _ = lax.scan(turn, centres, None, length=3)
    d = distances(centres)
    return lax.pmean(lax.psum(d * jax.nn.softmax(-d, axis="clusters"), "clusters"), "points")


def _stencil(field, target):
    def shifted(u, axis, by):
        n = lax.psum(1, axis)
        return lax.ppermute(u, axis, [(k, (k + by) % n) for k in range(n)])

    def turn(u, _):
        around = sum(shifted(u, axis, by) for axis in ("rows", "columns") for by in (1, -1))
        return u + 0.1 * (around - 4 * u), None

    field, _ = lax.scan(turn, field, None, length=4)
    return lax.pmean((field - target) ** 2, ("rows", "columns"))


PROGRAMS: dict[str, tuple[Callable, Any, Callable[[], tuple[Any, ...]], tuple[int, ...], bool]] = {
    "network": (
        named_loss,
        (["inputs", "hidden"], ["hidden", "classes"], ["batch", "inputs"], ["batch"]),
        _network_arguments,
        (0, 1),
        False,
    ),
    "megatron": (_block, (["shard", ...], ["batch", ...], ["batch", ...]), _block_arguments, (0,), False),
    "attention": (
        _attention,
        (*[["heads", ...]] * 4, ["batch", ...], ["batch", "key", ...]),
        _attention_arguments,
        (0, 1, 2, 3),
        False,
    ),
    "k-means": (
        _kmeans,
        (["clusters", "features"], ["points", "features"]),
        lambda: arrays((16, 32), (4096, 32)),
        (0,),
        True,
    ),
    "stencil": (
        _stencil,
        (["rows", "columns"], ["rows", "columns"]),
        lambda: arrays((512, 512), (512, 512)),
        (0,),
        True,
    ),
}

# ------------------------------------------------------------------------------- measuring


def groups() -> list[tuple[str, list[Priced]]]:
    return [(program.name, [program]) for program in programs()]


class Honesty(NamedTuple):
    """How the prices of all assignments of a program compare with what was compiled and measured.

    Attributes:
      bytes_equal: of how many assignments the bytes over each mesh axis are those of the compiled program.
      flops: the largest relative difference to XLA's; None for programs with loops.
      memory: the smallest, median and largest ratio of the estimate to XLA's.
      correlation: of the ranks of estimate and measured time.
      place: of the best measured among the estimates, from 1.
      lost: by how much the best estimate is slower than the best measured.
    """

    name: str
    candidates: int
    planning: float
    bytes_equal: int
    flops: float | None
    memory: tuple[float, float, float]
    correlation: float
    place: int
    lost: float
    seconds: tuple[float, float]


@functools.cache
def hardware() -> Hardware:
    return Hardware.measure(_mesh())


def _mesh() -> Mesh:
    mesh = make_mesh()
    return Mesh(mesh.devices, mesh.axis_names)


def examine(program: Priced, rounds: int = ROUNDS, machine: Hardware | None = None, most: int = 10**6) -> Honesty:
    """Price, compile and run every assignment (the first ``most``) of a program."""
    machine = machine or hardware()
    begin = time.process_time()
    found = search(program.make, *program.args, mesh=_mesh(), hardware=machine)
    usable = [c for c in found if c.refused is None][:most]
    planning = (time.process_time() - begin) / len([c for c in found if c.refused is None])
    executables = [_compiled(program, candidate) for candidate in usable]
    read = [steps.read_compiled(executable, _mesh()) for executable in executables]
    times = _interleaved(executables, program.args, rounds)
    estimates = [c.time for c in usable]
    best = times.index(min(times))
    ratios = sorted(c.cost.memory / r.memory for c, r in zip(usable, read))
    return Honesty(
        program.name,
        len(usable),
        planning,
        sum(same_bytes(c.cost.bytes_sent, r.transfers) for c, r in zip(usable, read)),
        None if program.loops else max(_flops_off(c, e) for c, e in zip(usable, executables)),
        (ratios[0], statistics.median(ratios), ratios[-1]),
        _rank_correlation(estimates, times) if len(times) > 2 else 1.0,
        sorted(estimates).index(estimates[best]) + 1,
        times[estimates.index(min(estimates))] / times[best] - 1,
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
    """The shortest time of each; they take turns, for other programs disturb them, and only make them longer."""
    placed = [jax.block_until_ready(jax.device_put(args, e.input_shardings[0])) for e in executables]
    times: list[list[float]] = [[] for _ in executables]
    for k in range(rounds + 1):
        for own, executable, arguments in zip(times, executables, placed):
            begin = time.perf_counter()
            jax.block_until_ready(executable(*arguments))
            if k:  # the first round warms up
                own.append(time.perf_counter() - begin)
    return [min(own) for own in times]


def _rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's."""
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


# ------------------------------------------------------------------------------- the table

COLUMNS = ("n", "plan s", "bytes", "flops", "memory", "rank corr", "place", "lost", "ms")


def run_search(groups: Sequence[tuple[str, list[Priced]]], effort: Any) -> Iterator[Verdict]:
    """A row for each program."""
    width = max(len(name) for name, _ in groups)
    print(_row("program", COLUMNS, width), flush=True)
    for _, [program] in groups:
        found = examine(program, rounds=min(effort.rounds, ROUNDS), most=effort.candidates)
        print(_row(found.name, _cells(found), width), flush=True)
        yield from verdicts(found)


def _cells(h: Honesty) -> tuple[str, ...]:
    low, middle, high = h.memory
    return (
        str(h.candidates),
        f"{h.planning:.2f}",
        f"{h.bytes_equal} same",
        "loops" if h.flops is None else f"{h.flops:.1%}",
        f"{low:.2f} {middle:.2f} {high:.2f}",
        f"{h.correlation:.2f}",
        str(h.place),
        f"{h.lost:.0%}",
        f"{h.seconds[0] * 1e3:.1f}-{h.seconds[1] * 1e3:.1f}",
    )


def _row(name: str, cells: Sequence[str], width: int) -> str:
    widths = (4, 7, 9, 7, 16, 10, 6, 6, 14)
    return name.ljust(width) + "".join("  " + cell.rjust(w) for cell, w in zip(cells, widths))


def verdicts(h: Honesty) -> Iterator[Verdict]:
    yield Verdict(h.name, "bytes as compiled", h.bytes_equal == h.candidates, f"{h.bytes_equal} of {h.candidates}")
    if h.flops is not None:
        yield Verdict(h.name, "flops within 5 % of XLA's", h.flops <= GOALS["flops"], f"{h.flops:.1%} off")
    yield Verdict(h.name, "rank correlation 0.8", h.correlation >= GOALS["correlation"], f"{h.correlation:.2f}")
    yield Verdict(h.name, "best among the first three", h.place <= GOALS["place"], f"place {h.place}")
    yield Verdict(h.name, "at most 10 % lost", h.lost <= GOALS["lost"], f"{h.lost:.0%} lost")
    yield Verdict(h.name, "planned in 0.1 s", h.planning <= GOALS["planning"], f"{h.planning:.2f} s")
    yield Verdict(h.name, "not experimental (20 %)", h.lost <= EXPERIMENTAL, f"{h.lost:.0%} lost")
