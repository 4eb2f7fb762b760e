"""Meshes without devices: what planning a gradient costs, by the number of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh

import xmap_compat
from benchmarks import timing
from benchmarks.measure import Effort
from benchmarks.report import Verdict
from xmap_compat import pdot, xmap

SIDES = {8: (4, 2), 512: (32, 16), 4096: (64, 64)}
MOST = 1.1  # times what the least takes
ROUNDS = 15


class Case(NamedTuple):
    """A loss over named axes, with the types of its arguments."""

    name: str
    loss: Callable[..., Any]
    in_axes: Any
    args: Sequence[Any]


def groups() -> Iterator[tuple[str, list[Case]]]:
    shaped = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)  # noqa: E731
    square = lambda w, x: lax.pmean(jnp.tanh(pdot(x, w, "inputs")) ** 2, ("batch", "hidden"))  # noqa: E731
    yield (
        "two axes",
        [
            Case(
                "two axes",
                square,
                (["inputs", "hidden"], ["batch", "inputs"]),
                [shaped(4096, 4096)] * 2,
            )
        ],
    )


def run_meshes(cases: Sequence[tuple[str, list[Case]]], effort: Effort) -> Iterator[Verdict]:
    """The least processor time of a plan for each mesh; they take turns, and every function is new."""
    for name, [case] in cases:
        act = lambda given, case=case: xmap_compat.plan(given[0], *case.args, mesh=given[1])  # noqa: E731
        timers = [
            timing.cpu_seconds(act, lambda sides=sides, case=case: _fresh(case, sides))
            for sides in SIDES.values()
        ]
        times = [[timer() for timer in timers] for _ in range(max(effort.traces, ROUNDS))]
        least = [min(own) for own in zip(*times)]
        print(
            f"{name}: " + ", ".join(f"{n} devices {1e3 * s:.1f} ms" for n, s in zip(SIDES, least)),
            flush=True,
        )
        ratio = max(least) / min(least)
        yield Verdict(
            name,
            f"planned in a time that differs {MOST} times at most",
            ratio <= MOST,
            f"{ratio:.2f} times",
        )


def _fresh(case: Case, sides: tuple[int, int]) -> tuple[Any, AbstractMesh]:
    loss = xmap(
        lambda *args: case.loss(*args),
        case.in_axes,
        {},
        axis_resources={"batch": "x", "hidden": "y"},
    )
    return jax.grad(loss), AbstractMesh(sides, ("x", "y"))
