"""Measure one case: the named and the hand-written program, in turn."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import hlo, timing
from benchmarks.programs import Case, make_mesh
from xmap_compat import Mesh

TIMED_SCALE, COMPILED_SCALE = 1, 8


@dataclasses.dataclass(frozen=True)
class Effort:
    """How often each thing is measured."""

    rounds: int
    calls: int
    traces: int
    cold_traces: int
    compiles: int
    candidates: int = 10**6


FULL = Effort(rounds=20, calls=30, traces=9, cold_traces=5, compiles=4)
QUICK = Effort(rounds=5, calls=30, traces=5, cold_traces=4, compiles=2, candidates=8)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Costs of both compiled programs; ``difference`` says how their results differ, and is empty if they agree."""

    name: str
    ours: hlo.Statistics
    theirs: hlo.Statistics
    difference: str


@dataclasses.dataclass(frozen=True)
class Timed:
    """Times in seconds, each with its ratio to the hand-written program's; and the compiled programs."""

    dispatch: tuple[float, float]
    trace: tuple[float, float]
    cold_trace: tuple[float, float]
    compile: tuple[float, float]
    compiled: Comparison


def compare(case: Case) -> Comparison:
    """Compile both programs of one case, and run them."""
    with mesh_in_scope(case):
        types = placed_types(case, case.args(COMPILED_SCALE))
        args = _placed(case, case.args(COMPILED_SCALE))
        programs = [fun().lower(*types).compile() for fun in (case.named, case.by_hand)]
        results = [jax.block_until_ready(program(*args)) for program in programs]
    return Comparison(case.name, *map(hlo.statistics, programs), difference(*results))


def measure(case: Case, effort: Effort) -> Timed:
    """Everything about one case: its times too."""
    compiled = compare(case)
    with mesh_in_scope(case):
        args = _placed(case, case.args(TIMED_SCALE))
        ours, theirs = case.named(), case.by_hand()
        jax.block_until_ready((ours(*args), theirs(*args)))
        dispatch = timing.calls(ours, theirs, args, effort.rounds, effort.calls)
        types = placed_types(case, case.args(COMPILED_SCALE))

        def lower(fun):
            return fun.lower(*types)

        trace = _rivals(case, lower, lambda fun: fun, effort.traces)
        cold = _rivals(case, lower, _forgetting, effort.cold_traces)
        compiling = _rivals(case, lambda lowered: lowered.compile(), lower, effort.compiles)
    return Timed(dispatch.best(), trace.median(), cold.best(), compiling.best(), compiled)


def _rivals(case: Case, measured: Callable, prepare: Callable, repeats: int) -> timing.Rivals:
    """Time ``measured(prepare(function))`` for new functions of both kinds."""
    return timing.interleave(
        timing.cpu_seconds(measured, lambda: prepare(case.named())),
        timing.cpu_seconds(measured, lambda: prepare(case.by_hand())),
        repeats,
    )


def _forgetting(fun: Callable) -> Callable:
    """The same function, once JAX has forgotten everything that it ever traced."""
    jax.clear_caches()
    return fun


@contextlib.contextmanager
def mesh_in_scope(case: Case) -> Iterator[None]:
    if case.specs is None:
        yield
        return
    mesh = make_mesh()
    with Mesh(mesh.devices, mesh.axis_names):
        yield


def _shardings(case: Case, args: Any) -> list[Any]:
    """One sharding (or None) for each array in the arguments."""
    if case.specs is None:
        return [None] * len(jax.tree.leaves(args))
    specs = [[spec] * len(jax.tree.leaves(arg)) for spec, arg in zip(case.specs, args, strict=True)]
    return [jax.NamedSharding(make_mesh(), spec) for group in specs for spec in group]


def _placed(case: Case, args: Any) -> Any:
    """The arguments where the program wants them, so that a call moves nothing."""
    leaves, tree = jax.tree.flatten(args)
    placed = [jax.device_put(x, s) for x, s in zip(leaves, _shardings(case, args), strict=True)]
    return jax.block_until_ready(jax.tree.unflatten(tree, placed))


def placed_types(case: Case, args: Any) -> Any:
    leaves, tree = jax.tree.flatten(args)
    types = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        for x, s in zip(leaves, _shardings(case, args), strict=True)
    ]
    return jax.tree.unflatten(tree, types)


def difference(ours: Any, theirs: Any) -> str:
    """How two pytrees of arrays differ, by more than rounding; empty if they do not."""
    if jax.tree.structure(ours) != jax.tree.structure(theirs):
        return f"{jax.tree.structure(ours)} against {jax.tree.structure(theirs)}"
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{a.dtype}{a.shape} against {b.dtype}{b.shape}"
        tolerance = 2e-2 if a.dtype == jnp.bfloat16 else 1e-3
        x, y = (np.asarray(value, np.float32) for value in (a, b))
        if (worst := np.max(np.abs(x - y), initial=0)) > tolerance * np.max(
            np.abs(y), initial=1e-30
        ):
            return f"by {worst:.2g}, where the largest element is {np.max(np.abs(y)):.2g}"
    return ""
