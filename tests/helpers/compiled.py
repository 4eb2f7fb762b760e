"""Reading compiled modules: the devices that communicate with each other."""

import re

import numpy as np

MESH = {"x": 4, "y": 2}


def device_lists(text):
    return frozenset(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}?", text))


def replica_groups(text):
    """``{{0,1},{2,3}}``, ``[2,4]<=[4,2]T(1,0)``, or since 0.12 ``mesh['x'=4,'y'=2] {'x'}``."""
    if match := re.search(r"replica_groups=\{(\{.*?\})\}", text):
        return device_lists(match[1])
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, base, order = ([int(d) for d in part.split(",")] if part else None for part in match.groups())
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
