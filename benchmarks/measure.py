"""Measure one case: the named and the hand-written program, in turn."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
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


FULL = Effort(rounds=30, calls=50, traces=15, cold_traces=5, compiles=8)
QUICK = Effort(rounds=5, calls=30, traces=5, cold_traces=2, compiles=2)


@dataclasses.dataclass(frozen=True)
class Result:
    """Times in seconds with their ratio to the hand-written program's; costs of both programs."""

    name: str
    dispatch: tuple[float, float]
    trace: tuple[float, float]
    cold_trace: tuple[float, float]
    compile: tuple[float, float]
    ours: hlo.Statistics
    theirs: hlo.Statistics


def measure(case: Case, effort: Effort) -> Result:
    """All columns of one case.  Both programs must agree on the results."""
    with _mesh_in_scope(case):
        args = _placed(case, case.args(TIMED_SCALE))
        ours, theirs = case.named(), case.by_hand()
        _check_equal(case.name, *(jax.block_until_ready(fun(*args)) for fun in (ours, theirs)))
        dispatch = timing.calls(ours, theirs, args, effort.rounds, effort.calls)
        types = _placed_types(case, case.args(COMPILED_SCALE))
        costs = [hlo.statistics(fun.lower(*types).compile()) for fun in (ours, theirs)]

        def lower(fun):
            return fun.lower(*types)

        trace = _rivals(case, lower, lambda fun: fun, effort.traces)
        cold = _rivals(case, lower, _forgetting, effort.cold_traces)
        compiling = _rivals(case, lambda lowered: lowered.compile(), lower, effort.compiles)
    return Result(case.name, dispatch.best(), trace.median(), cold.median(), compiling.best(), *costs)


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


def _mesh_in_scope(case: Case) -> contextlib.AbstractContextManager[Any]:
    if case.specs is None:
        return contextlib.nullcontext()
    mesh = make_mesh()
    return Mesh(mesh.devices, mesh.axis_names)


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


def _placed_types(case: Case, args: Any) -> Any:
    leaves, tree = jax.tree.flatten(args)
    types = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(leaves, _shardings(case, args), strict=True)
    ]
    return jax.tree.unflatten(tree, types)


def _check_equal(name: str, ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs), name
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)
