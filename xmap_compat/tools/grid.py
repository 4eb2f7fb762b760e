"""Arrays of a plan laid out in two dimensions: grids of the blocks that devices hold."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from xmap_compat import _jax
from xmap_compat.core.mesh import devices_of
from xmap_compat.tools.plan import Array
from xmap_compat.tools.text import MANY, by_key, listed, with_more, without_index

Block = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Grid:
    """An array laid out in two dimensions.

    Attributes:
      rows, columns: the dimensions that run down and across, such as ``batch 12 over x``; empty if
      there is none.
      others: the other dimensions.
      sizes: how many elements the rows and the columns have.
      panels: for each block index of ``others`` a label, and ``cells[row][column]``: the mesh
      positions with the block.
    """

    rows: str
    columns: str
    others: str
    sizes: tuple[int, int]
    panels: tuple[tuple[str, list[list[list[int]]]], ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """How many blocks are below and beside each other in a panel, and how many devices hold
        each.
        """
        cells = self.panels[0][1]
        return len(cells), len(cells[0]), len(cells[0][0])


def block_holders(array: Array, mesh: _jax.AnyMesh | None) -> np.ndarray:
    """For each block of an array (its index in every dimension) the positions in the mesh that hold
    it.
    """
    shape, split = {} if mesh is None else dict(mesh.shape), _split_axes(array)
    copied = [axis for axis in shape if axis not in itertools.chain(*split)]
    order = [list(shape).index(axis) for axes in (*split, copied) for axis in axes]
    parts = [math.prod(shape[axis] for axis in axes) for axes in split]
    positions = np.arange(math.prod(shape.values())).reshape([*shape.values()])
    return positions.transpose(order).reshape(*parts, -1)


def _split_axes(array: Array) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension."""
    entries = [*(array.spec or ()), *[None] * len(array.shape)][: len(array.shape)]
    return list(map(_jax.axes_of_entry, entries))


def arrange(array: Array, mesh: _jax.AnyMesh | None) -> Grid:
    """Choose rows and columns (dimensions that are split, then named ones) and cut the array into
    blocks.
    """
    holders = block_holders(array, mesh)
    *parts, _ = holders.shape
    labels = [
        str(size) if name is None else f"{name} {size}"
        for name, size in zip(array.axes, array.shape)
    ]
    titles = [
        f"{label} over {listed(axes)}" if axes else label
        for label, axes in zip(labels, _split_axes(array))
    ]
    by_weight = sorted(range(len(parts)), key=lambda k: (parts[k] == 1, array.axes[k] is None, k))
    shown, others = sorted(by_weight[:2]), sorted(by_weight[2:])
    part = lambda index: listed(  # noqa: E731
        f"{labels[k].split()[0]} part {i}" for k, i in zip(others, index) if parts[k] > 1
    )
    further = f"and {listed(titles[k] for k in others)}" if others else ""
    sizes = [array.shape[k] for k in shown]
    return _grid(
        holders.transpose(*others, *shown, -1), [titles[k] for k in shown], sizes, part, further
    )


def mesh_grid(mesh: _jax.AnyMesh) -> Grid:
    """The devices of a mesh, each a block."""
    titles = [f"{name} {size}" for name, size in mesh.shape.items()]
    place = lambda index: listed(f"{name} = {k}" for name, k in zip(mesh.axis_names, index))  # noqa: E731
    positions = np.arange(mesh.size).reshape(*mesh.axis_sizes, 1)
    return _grid(positions, titles[-2:], mesh.axis_sizes[-2:], place)


def _grid(
    holders: np.ndarray,
    titles: Sequence[str],
    sizes: Sequence[int],
    label_of: Callable[[Block], str],
    others: str = "",
) -> Grid:
    """A panel for each index, down to the last two dimensions of blocks, which have the titles."""
    rows, columns = ["", "", *titles][-2:]
    holders = holders[(None,) * (2 - len(titles))]
    panels = (
        (label_of(index), holders[index].tolist()) for index in np.ndindex(holders.shape[:-3])
    )
    down, across = [1, 1, *sizes][-2:]
    return Grid(rows, columns, others, (down, across), tuple(panels))


def alike(arrays: Sequence[Array]) -> list[tuple[str, Array]]:
    """The arrays to draw, with their names: those that lie alike are drawn once, with all names if
    these are short.
    """
    layout = lambda a: dataclasses.replace(a, root="", keys=())  # noqa: E731
    groups = by_key(
        arrays, lambda a: (layout(a), "" if len(arrays) > MANY else without_index(a.path))
    )
    named = [(with_more([a.path for a in group]), group[0]) for group in groups.values()]
    found: list[tuple[str, Array]] = []
    for same in by_key(named, lambda pair: layout(pair[1])).values():
        names = ", ".join(name for name, _ in same)
        found += [(names, same[0][1])] if len(names) <= MOST_LETTERS else same
    return found


MOST_LETTERS = 30  # of the names above a drawing


MOST_DEVICES = 256


def corner(mesh: _jax.AnyMesh | None) -> _jax.AnyMesh | None:
    """A mesh that can be drawn: the given one, or the first devices along each axis if there are
    too many.
    """
    sizes = [] if mesh is None else list(mesh.axis_sizes)
    while math.prod(sizes) > MOST_DEVICES:
        k = sizes.index(max(sizes))
        sizes[k] = -(-sizes[k] // 2)
    if mesh is None or tuple(sizes) == mesh.axis_sizes:
        return mesh
    return jax.sharding.AbstractMesh(tuple(sizes), mesh.axis_names)


def mesh_title(mesh: _jax.AnyMesh | None) -> str:
    """``mesh``, or ``mesh, a corner: x 16 of 64, y 16 of 64`` where not all devices are drawn."""
    shown = corner(mesh)
    if mesh is None or shown is None:
        return "devices"
    drawn = listed(f"{name} {size} of {mesh.shape[name]}" for name, size in shown.shape.items())
    return "mesh" if shown is mesh else f"mesh, a corner: {drawn}"


def device_ids(mesh: _jax.AnyMesh | None) -> list[int]:
    """The numbers of the devices that are drawn; those of an abstract mesh are numbered in
    order.
    """
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
    runs = [
        [n for _, n in run]
        for _, run in itertools.groupby(enumerate(numbers), lambda at: at[1] - at[0])
    ]
    return " ".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else " ".join(map(str, r)) for r in runs)
