"""Large axes: what tracing and planning one collective costs, by the number of elements of its axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import timing
from benchmarks.measure import Effort
from benchmarks.programs import make_mesh
from xmap_compat import Mesh, pdot, xmap

SIZES = [64, 4_096, 65_536]


class Case(NamedTuple):
    """A collective, ``collective(element, elements of the axis)``, under one assignment."""

    name: str
    collective: Callable[[Any, int], Any]
    resources: dict[str, Any]


class Growth(NamedTuple):
    """One collective: seconds to trace it and to plan it, for each of ``SIZES``."""

    name: str
    trace: list[float]
    plan: list[float]


def groups() -> Iterator[tuple[str, list[Case]]]:
    """Each collective over an axis that is vectorized, and over one that is split."""
    for name, collective in COLLECTIVES.items():
        for resources in [None, ("x", "y")]:
            title = name + (" i:x.y" if resources else " -")
            yield title, [Case(title, collective, {"i": resources} if resources else {})]


def grown(case: Case, effort: Effort) -> Growth:
    """The median of the processor time, for new functions each time."""
    mesh = make_mesh()
    with Mesh(mesh.devices, mesh.axis_names):
        traced, planned = (
            [_median(case, size, act, effort.traces) for size in SIZES] for act in (_trace, _plan)
        )
    return Growth(case.name, traced, planned)


def _median(case, size, act, repeats):
    def fresh():
        return xmap(
            lambda v: case.collective(v, size), ["i"], ["i", ...], axis_resources=case.resources
        )

    seconds = timing.cpu_seconds(
        lambda fun: act(fun, jax.ShapeDtypeStruct((size,), np.float32)), fresh
    )
    return float(np.median([seconds() for _ in range(repeats)]))


def _trace(fun, x):
    return jax.jit(fun).trace(x)


def _plan(fun, x):
    return fun.plan(x)


def _rotation(n):
    return [(k, (k + 1) % n) for k in range(n)]


def _fours(n):
    return [list(range(k, k + 4)) for k in range(0, n, 4)]


def _quarters(n):
    return [list(range(k, n, 4)) for k in range(4)]


# What one element does, of an axis of n.  (Results that do not vary are added to the element.)
COLLECTIVES = {
    "psum": lambda v, n: v + lax.psum(v, "i"),
    "pmax": lambda v, n: v + lax.pmax(v, "i"),
    "psum, groups of 4": lambda v, n: lax.psum(v, "i", axis_index_groups=_fours(n)),
    "pmax, 4 groups": lambda v, n: lax.pmax(v, "i", axis_index_groups=_quarters(n)),
    "all_gather": lambda v, n: v + lax.all_gather(v, "i"),
    "all_gather, groups of 4": lambda v, n: lax.all_gather(v, "i", axis_index_groups=_fours(n)),
    "ppermute": lambda v, n: lax.ppermute(v, "i", _rotation(n)),
    "pshuffle": lambda v, n: lax.pshuffle(v, "i", np.random.default_rng(0).permutation(n).tolist()),
    "pbroadcast": lambda v, n: v + lax.pbroadcast(v, "i", n - 1),
    "psum_scatter": lambda v, n: lax.psum_scatter(jnp.broadcast_to(v, (n,)), "i"),
    "all_to_all": lambda v, n: lax.all_to_all(jnp.broadcast_to(v, (n,)), "i", 0, 0),
    "all_to_all, groups of 4": lambda v, n: lax.all_to_all(
        jnp.broadcast_to(v, (4,)), "i", 0, 0, axis_index_groups=_fours(n)
    ),
    "pdot": lambda v, n: v + pdot(v, v, "i"),
    "softmax": lambda v, n: jax.nn.softmax(v, axis="i"),
}
