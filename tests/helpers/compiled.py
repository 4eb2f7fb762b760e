"""Reading compiled modules: what crosses between devices, and which communicate with each other."""

import math
import re
from typing import NamedTuple

import numpy as np

MESH = {"x": 4, "y": 2}


class Transfer(NamedTuple):
    """One collective: what each device puts in, and the groups (or source-target pairs) of devices."""

    kind: str
    elements: int
    groups: frozenset[tuple[int, ...]]


KINDS = [
    "all-reduce",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "collective-broadcast",
]
COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\((.*)")


def transfers(hlo):
    """The collectives of a compiled module."""
    return [
        _transfer(*match.groups()) for match in map(COLLECTIVE.search, hlo.splitlines()) if match
    ]


def _transfer(result, kind, rest):
    shapes = re.findall(r"\w+\[([\d,]*)\]", result)
    elements = sum(math.prod(int(d) for d in shape.split(",") if d) for shape in shapes)
    if kind == "collective-permute":
        return Transfer(
            kind, elements, device_lists(re.search(r"source_target_pairs=\{(\{.*?\})\}", rest)[1])
        )
    groups = replica_groups(rest)
    size = len(next(iter(groups)))
    return Transfer(
        kind,
        {"all-gather": elements // size, "reduce-scatter": elements * size}.get(kind, elements),
        groups,
    )


def device_lists(text):
    return frozenset(
        tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}?", text)
    )


def replica_groups(text):
    """``{{0,1},{2,3}}``, ``[2,4]<=[4,2]T(1,0)``, or since 0.12 ``mesh['x'=4,'y'=2] {'x'}``."""
    if match := re.search(r"replica_groups=\{(\{.*?\})\}", text):
        return device_lists(match[1])
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, base, order = (
            [int(d) for d in part.split(",")] if part else None for part in match.groups()
        )
        return _rows(np.arange(np.prod(base)).reshape(base).transpose(order).reshape(shape))
    mesh, axes = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", text).groups()
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    return groups_over(re.findall(r"'(\w+)'", axes), sizes)


def _rows(table):
    return frozenset(tuple(sorted(row)) for row in table.tolist())


def groups_over(mesh_axes, sizes=MESH):
    """The groups of devices that differ in these mesh axes only."""
    ids = np.arange(np.prod(list(sizes.values()))).reshape(list(sizes.values()))
    names = list(sizes)
    moved = np.moveaxis(ids, [names.index(m) for m in mesh_axes], range(-len(mesh_axes), 0))
    return _rows(moved.reshape(-1, np.prod([sizes[m] for m in mesh_axes])))
