"""Arrays of a plan laid out in two dimensions: grids of the blocks that devices hold."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np

from xmap_compat import _jax
from xmap_compat.core.mesh import devices_of
from xmap_compat.tools.plan import Array
from xmap_compat.tools.text import by_key, listed, with_more

Block = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Grid:
    """An array laid out in two dimensions.

    Attributes:
      titles: the dimensions that run down and across, such as ``batch 12 over x``, and the others;
      each is empty if there is none.
      sizes: how many elements the rows and the columns have.
      panels: for each block index of the other dimensions a label, and ``cells[row][column]``: the
      mesh positions with the block.
    """

    titles: tuple[str, str, str]
    sizes: tuple[int, int]
    panels: list[tuple[str, list[list[list[int]]]]]


def block_holders(array: Array, mesh: _jax.AnyMesh | None) -> np.ndarray:
    """For each block of an array (its index in every dimension) the positions in the mesh that hold
    it.
    """
    shape = {} if mesh is None else dict(mesh.shape)
    split = _split_axes(array)
    order = list(itertools.chain(*split))
    copied = [axis for axis in shape if axis not in order]
    places = [list(shape).index(axis) for axis in (*order, *copied)]
    parts = [math.prod(shape[axis] for axis in axes) for axes in split]
    positions = np.arange(math.prod(shape.values())).reshape(list(shape.values()))
    return positions.transpose(places).reshape(*parts, -1)


def _split_axes(array: Array) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension."""
    spec = array.spec or ()
    missing = [None] * (len(array.shape) - len(spec))
    return [_jax.axes_of_entry(entry) for entry in (*spec, *missing)]


def arrange(array: Array, mesh: _jax.AnyMesh | None) -> Grid:
    """Choose rows and columns (dimensions that are split, then named ones) and cut the array into
    blocks.
    """
    holders = block_holders(array, mesh)
    parts = holders.shape[:-1]
    names = []
    titles = []
    for name, size, axes in zip(array.axes, array.shape, _split_axes(array)):
        title = str(size) if name is None else f"{name} {size}"
        names.append(title.split()[0])
        titles.append(f"{title} over {listed(axes)}" if axes else title)

    def weight(k: int) -> tuple[bool, bool, int]:
        return parts[k] == 1, array.axes[k] is None, k

    by_weight = sorted(range(len(parts)), key=weight)
    shown = sorted(by_weight[:2])
    others = sorted(by_weight[2:])

    def label(index: Block) -> str:
        cut = [(names[k], i) for k, i in zip(others, index) if parts[k] > 1]
        return listed(f"{name} part {i}" for name, i in cut)

    unseen = [_in_words(titles[k], array.axes[k]) for k in others]
    further = f"and {listed(unseen)}" if unseen else ""
    holders = holders.transpose(*others, *shown, -1)
    sizes = [array.shape[k] for k in shown]
    return _grid(holders, [titles[k] for k in shown], further, sizes, label)


def _in_words(title: str, name: object) -> str:
    return f"a dimension of {title} without a name" if name is None else title


def mesh_grid(mesh: _jax.AnyMesh) -> Grid:
    """The devices of a mesh, each a block."""
    titles = [f"{name} {size}" for name, size in mesh.shape.items()]

    def label(index: Block) -> str:
        return listed(f"{name} = {k}" for name, k in zip(mesh.axis_names, index))

    positions = np.arange(mesh.size).reshape(*mesh.axis_sizes, 1)
    return _grid(positions, titles[-2:], "", mesh.axis_sizes[-2:], label)


def _grid(
    holders: np.ndarray,
    titles: Sequence[str],
    others: str,
    sizes: Sequence[int],
    label: Callable[[Block], str],
) -> Grid:
    """A panel for each index, down to the last two dimensions of blocks, which have the titles."""
    rows, columns = ["", "", *titles][-2:]
    down, across = [1, 1, *sizes][-2:]
    for _ in range(2 - len(titles)):
        holders = holders[None]
    indices = np.ndindex(holders.shape[:-3])
    panels = [(label(index), holders[index].tolist()) for index in indices]
    return Grid((rows, columns, others), (down, across), panels)


MOST_LETTERS = 30  # of the names above a drawing


def alike(arrays: Iterable[Array]) -> Iterator[tuple[str, Array]]:
    """The arrays to draw, with their names: those that lie alike are drawn once."""

    def layout(array: Array) -> Array:
        return dataclasses.replace(array, root="", keys=())

    for group in by_key(arrays, layout).values():
        names = [array.path for array in group]
        joined = ", ".join(names)
        yield joined if len(joined) <= MOST_LETTERS else with_more(names), group[0]


MOST_DEVICES = 256


def corner(mesh: _jax.AnyMesh | None) -> _jax.AnyMesh | None:
    """A mesh that can be drawn: the given one, or the first devices along each axis if there are
    too many.
    """
    if mesh is None or mesh.size <= MOST_DEVICES:
        return mesh
    sizes = list(mesh.axis_sizes)
    while math.prod(sizes) > MOST_DEVICES:
        longest = max(sizes)
        sizes[sizes.index(longest)] = math.ceil(longest / 2)
    return jax.sharding.AbstractMesh(tuple(sizes), mesh.axis_names)


def device_ids(mesh: _jax.AnyMesh | None, shown: _jax.AnyMesh | None) -> list[int]:
    """The numbers of the devices that are drawn; those of an abstract mesh are numbered in
    order.
    """
    if mesh is None or shown is None:
        return [0]
    ids = [device.id for device in devices_of(mesh)] or range(mesh.size)
    drawn = tuple(slice(size) for size in shown.axis_sizes)
    return np.reshape(ids, mesh.axis_sizes)[drawn].ravel().tolist()


def ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``'0-2 5'``; ``[0, 8, 16, ..., 120]`` -> ``'0 8 .. 120'``."""
    numbers = sorted(numbers)
    steps = set(np.diff(numbers).tolist())
    if len(numbers) > 4 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]} {numbers[1]} .. {numbers[-1]}"
    runs = by_key(enumerate(numbers), lambda at: at[1] - at[0])
    words = []
    for run in runs.values():
        own = [number for _, number in run]
        words += [f"{own[0]}-{own[-1]}"] if len(own) > 2 else map(str, own)
    return " ".join(words)
