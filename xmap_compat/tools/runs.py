"""Which candidates of a search are compiled and run, and why none is run unless you ask for it."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
from collections.abc import Iterable
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat.core.mesh import devices_of
from xmap_compat.core.placement import parse_axis_resources
from xmap_compat.tools import errors, steps
from xmap_compat.tools.hardware import PUBLISHED, Hardware


def why_not(task: Any, mesh: _jax.AnyMesh) -> str:
    """Why a search runs nothing unless you ask for it; empty if it does."""
    own, given = Hardware.of(mesh), task.hardware
    is_published = given is not None and given.name in [h.name for h in PUBLISHED.values()]
    calls = any(re.search("callback|print", str(eqn.primitive)) for eqn, _ in _jax.walk(task.staged.jaxpr))
    reasons = {
        "the mesh has no devices": not devices_of(mesh),
        "the mesh has devices of other processes": spans_processes(mesh),
        "an argument is a type": any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(task.args)),
        "the step calls back to Python": calls,
        f"the hardware, {given and given.name}, is not that of the devices": is_published
        and (own is None or own.name != given.name),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def spans_processes(mesh: _jax.AnyMesh) -> bool:
    return any(device.process_index != jax.process_index() for device in devices_of(mesh))


def room(mesh: _jax.AnyMesh) -> float | None:
    """Bytes of memory of a device of a mesh, if it is known; CPU devices share that of the machine."""
    device = devices_of(mesh)[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / mesh.size
    except (AttributeError, ValueError, OSError):  # on other systems
        return None


def looked_into(task: Any, found: list[Any], compile: int, measure: int, end: float) -> list[Any]:
    """The candidates, some of them compiled and run."""
    pending, done = _distinct_first(found), list[Any]()
    count = min(max(compile, measure), len(pending))
    while pending and len(done) < count:
        if time.monotonic() > end:
            print(f"search: time is up after {len(done)} of {count}", file=sys.stderr)
            break
        candidate = _next(pending, done, measure)
        pending.remove(candidate)
        print(f"search: {len(done) + 1} of {count}: {candidate.name}", file=sys.stderr)
        at = next(k for k, c in enumerate(found) if c is candidate)
        try:
            found[at] = _made(task, candidate, run=len(done) < measure)
            done.append(candidate)
        except Exception as error:  # the next one is tried instead
            found[at] = dataclasses.replace(candidate, refused=errors.not_compiled(error))
    return found


def _distinct_first(found: Iterable[Any]) -> list[Any]:
    """The candidates that can be used; last those that differ from a better one only in the order of mesh axes."""
    kept, others = dict[Any, Any](), list[Any]()
    for c in (c for c in found if c.refused is None):
        placed = {n: frozenset(map(str, rs)) for n, rs in parse_axis_resources(c.axis_resources).items() if rs}
        if kept.setdefault(frozenset(placed.items()), c) is not c:
            others.append(c)
    return [*kept.values(), *others]


def _next(pending: list[Any], done: list[Any], measure: int) -> Any:
    """The first; but one device, and the first that uses several, are among those that are measured."""
    missing = {True, False} - {c.is_split for c in done}
    left = measure - len(done)
    wanted = [c for c in pending if c.is_split in missing] if 0 < left <= len(missing) < measure else []
    return (wanted or pending)[0]


def _made(task: Any, candidate: Any, run: bool) -> Any:
    """A candidate that is compiled, and run if ``run``."""
    step = task.make(dict(candidate.axis_resources))
    compiled = steps.compile_step(step, task.args)
    plan = steps.stage(step, task.args, describe=False).plan("step", steps.read_compiled(compiled, task.scope.mesh))
    seconds = steps.run_seconds(compiled, task.args, devices_of(task.scope.mesh)[0]) if run else None
    return dataclasses.replace(candidate, cost=plan.cost_on(task.hardware), compiled=plan.compiled, measured=seconds)
