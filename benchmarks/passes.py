"""Where the time of tracing and lowering a gradient goes: the share of each pass, beside the hand-written program.

Counted by ``cProfile`` in processor time, which makes Python's small functions look slower than they are: compare the
passes of one program with each other, and the two programs only where both do the same.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.programs import Case, cases

REPEATS = 5

# What is counted of each pass: time in these functions and in all that they call, as ``file:function``.
OURS = {
    "specs, sizes, placements, names": [
        "core/call.py:bind_arguments",
        "core/call.py:place_bound_call",
    ],
    "  of this, JAX tracing the body": ["core/trace.py:trace_program"],
    "evaluation on a device": ["core/execute.py:execute"],
    "JAX differentiating the jitted function": [
        "_src/pjit.py:_pjit_linearize",
        "_src/pjit.py:_pjit_transpose_fancy",
    ],
    "JAX lowering": ["_src/interpreters/mlir.py:lower_jaxpr_to_module"],
}
BY_HAND = {
    "JAX tracing and linearizing, in one": ["_src/interpreters/ad.py:linearize"],
    "JAX transposing": [
        "_src/shard_map.py:_shard_map_transpose",
        "_src/shard_map.py:_shard_map_transpose_fancy",
    ],
    "JAX lowering": ["_src/interpreters/mlir.py:lower_jaxpr_to_module"],
}


def gradients() -> Iterator[Case]:
    """The gradients among the programs, which run on the mesh."""
    return (
        case
        for case in cases()
        if case.specs is not None and ("grad" in case.name or "megatron" in case.name)
    )


def shares(make: Callable[[], Any], types: Any, passes: dict[str, list[str]]) -> dict[str, float]:
    """Milliseconds in each pass of ``make().lower(*types)``, and in all, when JAX's own library is traced already."""
    make().lower(*types)
    functions = [make() for _ in range(REPEATS)]
    profile = cProfile.Profile(time.process_time)
    profile.enable()
    for fun in functions:
        fun.lower(*types)
    profile.disable()
    stats: Any = pstats.Stats(profile)
    spent = {f"{file}:{name}": row[3] for (file, _, name), row in stats.stats.items()}
    per_pass = {"in all": stats.total_tt}
    for title, counted in passes.items():
        per_pass[title] = sum(
            seconds for place, seconds in spent.items() if place.endswith(tuple(counted))
        )
    return {title: 1e3 * seconds / REPEATS for title, seconds in per_pass.items()}
