"""Arrays of a plan laid out in two dimensions: grids of the blocks that devices hold."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from xmap_compat import _jax
from xmap_compat.core.mesh import devices_of
from xmap_compat.tools.plan import Array
from xmap_compat.tools.text import MANY, by_key, listed, with_more

Block = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Grid:
    """An array laid out in two dimensions.

    Attributes:
      rows, columns: the dimensions that run down and across, such as ``batch 12 over x``; empty if there is none.
      others: the other dimensions.
      panels: for each block index of ``others`` a label, and ``cells[row][column]``: the mesh positions with the block.
    """

    rows: str
    columns: str
    others: str
    panels: tuple[tuple[str, list[list[list[int]]]], ...]

    @property
    def copies(self) -> int:
        """How many devices hold each block."""
        return len(self.panels[0][1][0][0])


def block_holders(array: Array, mesh: _jax.AnyMesh | None) -> dict[Block, list[int]]:
    """For each block of an array (its index in every dimension) the positions in the mesh that hold it."""
    if mesh is None:
        return {(0,) * len(array.shape): [0]}
    holders, split = dict[Block, list[int]](), _split_axes(array)
    for position, coordinates in enumerate(np.ndindex(*mesh.axis_sizes)):
        at = dict(zip(mesh.axis_names, coordinates))
        block = tuple(int(np.ravel_multi_index([at[a] for a in axes], [mesh.shape[a] for a in axes])) for axes in split)
        holders.setdefault(block, []).append(position)
    return holders


def _split_axes(array: Array) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension."""
    entries = [*(array.spec or ()), *[None] * len(array.shape)][: len(array.shape)]
    return list(map(_jax.axes_of_entry, entries))


def arrange(array: Array, mesh: _jax.AnyMesh | None) -> Grid:
    """Choose rows and columns (dimensions that are split, then named ones) and cut the array into blocks."""
    holders = block_holders(array, mesh)
    parts = [len({block[k] for block in holders}) for k in range(len(array.shape))]
    labels = [str(size) if name is None else f"{name} {size}" for name, size in zip(array.axes, array.shape)]
    titles = [f"{label} over {listed(axes)}" if axes else label for label, axes in zip(labels, _split_axes(array))]
    by_weight = sorted(range(len(parts)), key=lambda k: (parts[k] == 1, array.axes[k] is None, k))
    shown = sorted(by_weight[:2])
    row, column = (None, *shown)[-2:] if shown else (None, None)
    others = [k for k in range(len(parts)) if k not in shown]
    counts: dict[int | None, int] = dict(enumerate(parts))
    counts[None], panels = 1, []
    for index in itertools.product(*(range(parts[k]) for k in others)):
        fixed: dict[int | None, int] = dict(zip(others, index))
        label = listed(f"{labels[k].split()[0]} part {i}" for k, i in zip(others, index) if parts[k] > 1)
        block = lambda r, c: tuple({**fixed, row: r, column: c}.get(k, 0) for k in range(len(parts)))  # noqa: B023, E731
        cells = [[holders[block(r, c)] for c in range(counts[column])] for r in range(counts[row])]
        panels.append((label, cells))
    at = lambda k: "" if k is None else titles[k]  # noqa: E731
    further = f"further dimensions: {listed(titles[k] for k in others)}" if others else ""
    return Grid(at(row), at(column), further, tuple(panels))


def alike(arrays: Sequence[Array]) -> list[tuple[str, Array]]:
    """The arrays to draw, with their names; if there are many, those with equal layouts are drawn once."""
    layout = lambda array: dataclasses.replace(array, root="", keys=()) if len(arrays) > MANY else array.path  # noqa: E731
    groups = by_key(arrays, layout)
    return [(with_more([a.path for a in group]), group[0]) for group in groups.values()]


MOST_DEVICES = 256


def corner(mesh: _jax.AnyMesh | None) -> _jax.AnyMesh | None:
    """A mesh that can be drawn: the given one, or the first devices along each axis if there are too many."""
    sizes = [] if mesh is None else list(mesh.axis_sizes)
    while math.prod(sizes) > MOST_DEVICES:
        k = sizes.index(max(sizes))
        sizes[k] = -(-sizes[k] // 2)
    if mesh is None or tuple(sizes) == mesh.axis_sizes:
        return mesh
    return jax.sharding.AbstractMesh(tuple(sizes), mesh.axis_names)


def corner_note(mesh: _jax.AnyMesh | None) -> str:
    """``a corner: x 16 of 64, y 16 of 64``; empty where all devices are drawn."""
    shown = corner(mesh)
    if mesh is None or shown is None or shown is mesh:
        return ""
    return f"a corner: {listed(f'{n} {k} of {mesh.shape[n]}' for n, k in shown.shape.items())}"


def device_ids(mesh: _jax.AnyMesh | None) -> list[int]:
    """The numbers of the devices that are drawn; those of an abstract mesh are numbered in order."""
    shown = corner(mesh)
    if mesh is None or shown is None:
        return [0]
    ids = [d.id for d in devices_of(mesh)] or range(mesh.size)
    return np.reshape(ids, mesh.axis_sizes)[tuple(map(slice, shown.axis_sizes))].ravel().tolist()


def ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``'0-2 5'``; ``[0, 8, 16, ..., 120]`` -> ``'0 8 .. 120'``."""
    numbers = sorted(numbers)
    steps = set(np.diff(numbers).tolist())
    if len(numbers) > 4 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]} {numbers[1]} .. {numbers[-1]}"
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return " ".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else " ".join(map(str, r)) for r in runs)
