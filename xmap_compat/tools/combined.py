"""Which collectives of a staged program XLA combines into one, which then has one latency.

The rule is that of XLA's combiner passes.  docs/costs.md names their sources, and has what compiled programs showed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xmap_compat import _jax
from xmap_compat.core.mesh import platform_of
from xmap_compat.tools.staged import Operation, Tree, Value, bytes_of
from xmap_compat.tools.transfers import KINDS, Transfer, crossing

_LIMIT, _MOST = 30 * 2**20 + 7, 256
# For each platform the kinds that its compiler combines, and the most bytes of all results together.
COMBINED: Mapping[Any, Mapping[str, float]] = {
    "cpu": {"all-reduce": math.inf},
    "tpu": dict.fromkeys(("all-reduce", "reduce-scatter"), _LIMIT),
    "gpu": dict.fromkeys(("all-reduce", "reduce-scatter", "all-gather", "ppermute"), _LIMIT),
}


def combined(tree: Tree, limits: Mapping[str, float]) -> dict[Operation, int]:
    """The collectives that XLA combines, each with the number of the one that they become."""
    return {operation: number for number, run in enumerate(_runs(tree, limits), 1) for operation in run}


def limits_of(mesh: _jax.AnyMesh | None) -> Mapping[str, float]:
    """The kinds and bytes of a mesh's platform; unknown devices are taken for GPUs."""
    return COMBINED["gpu"] if mesh is None else COMBINED.get(platform_of(mesh), COMBINED["gpu"])


def joined(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Transfers as they run: those with the same number are one."""
    found: dict[Any, list[Transfer]] = {}
    for k, t in enumerate(transfers):
        found.setdefault((t.combined, 0 if t.combined else k), []).append(t)
    return [dataclasses.replace(ts[0], bytes_sent=sum(t.bytes_sent for t in ts)) for ts in found.values()]


def _runs(tree: Tree, limits: Mapping[str, float]) -> Iterator[list[Operation]]:
    """The collectives that become one, of a program and of those in it."""
    needs: dict[Value | Operation, int] = {}  # a bit for each collective that a value or a collective depends on
    alike: dict[Any, list[Operation]] = {}
    bits: dict[Operation, int] = {}
    for operation in tree.operations:
        before = functools.reduce(operator.or_, (needs.get(v, 0) for v in operation.operands), 0)
        is_run = operation.eqn is not None and operation not in tree.repeated
        if is_run and KINDS.get(operation.name) in limits and crossing(operation)[1] > 1:
            alike.setdefault(_key(operation), []).append(operation)
            bits[operation], needs[operation] = 1 << len(bits), before
        needs.update((v, before | bits.get(operation, 0)) for v in operation.results)
        for branch in operation.branches:
            yield from _runs(branch.tree, limits)
    for operations in alike.values():
        limit = limits[KINDS[operations[0].name]]
        for run in _cut([o for o in operations if _size(o) <= limit], limit, bits, needs):
            if len(run) < 2:
                continue
            together = sum(bits[o] for o in run)
            every = functools.reduce(operator.or_, (needs[o] for o in run), together)
            needs.update((o, needs[o] | every) for o in bits if needs[o] & together)
            yield run


def _cut(operations: Sequence[Operation], limit: float, bits: Any, needs: Any) -> Iterator[list[Operation]]:
    """Runs of collectives that do not depend on each other and are not too large together."""
    run: list[Operation] = []
    for operation in operations:
        is_full = len(run) == _MOST or sum(map(_size, run)) + _size(operation) > limit
        if run and (is_full or needs[operation] & sum(bits[o] for o in run)):
            yield run
            run = []
        run.append(operation)
    yield run


def _size(operation: Operation) -> int:
    return sum(bytes_of(v.aval) for v in operation.results)


def _key(operation: Operation) -> Any:
    """What collectives have in common that XLA combines: the kind, the groups of devices, and mostly the type."""
    kind, params = KINDS[operation.name], operation.eqn.params
    which = operation.name if operation.name in ("pmax", "pmin") else kind
    dtype = None if kind in ("all-gather", "ppermute") else operation.operands[0].aval.dtype
    groups = str(params.get("axis_index_groups")), str(params.get("perm"))
    return which, crossing(operation)[0], tuple(operation.body.mesh_shape.items()), groups, dtype
