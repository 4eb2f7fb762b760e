"""Arrays of a plan laid out in two dimensions: grids of the blocks that devices hold."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np
from jax.sharding import PartitionSpec

from xmap_compat import _jax
from xmap_compat.core.mesh import devices_of
from xmap_compat.tools.plan import Array
from xmap_compat.tools.text import by_key, listed, with_more


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

    titles: list[str]
    sizes: list[int]
    panels: list[tuple[str, list[list[list[int]]]]]


def block_holders(array: Array, mesh: _jax.AnyMesh | None) -> np.ndarray:
    """For each block of an array (its index in every dimension) the positions in the mesh that hold
    it.
    """
    shape = dict(getattr(mesh, "shape", {}))
    split = _split_axes(array)
    # Axes that split nothing come last, and hold copies.
    order = list(dict.fromkeys([*itertools.chain(*split), *shape]))
    places = [list(shape).index(axis) for axis in order]
    parts = [math.prod(shape[axis] for axis in axes) for axes in split]
    sizes = list(shape.values())
    positions = np.arange(math.prod(sizes)).reshape(sizes)
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
    blocks = block_holders(array, mesh)
    parts = blocks.shape[:-1]

    def weight(k: int) -> tuple[bool, bool]:
        return parts[k] == 1, array.axes[k] is None

    by_weight = sorted(range(len(parts)), key=weight)
    shown = sorted(by_weight[:2])
    others = sorted(by_weight[2:])
    blocks = blocks.transpose(*others, *shown, -1)
    titles = []
    sizes = []
    for k in shown:
        titles.append(_title(array, k))
        sizes.append(array.shape[k])
    while len(titles) < 2:
        blocks = blocks[None]
        titles.insert(0, "")
        sizes.insert(0, 1)
    further = listed(_in_words(array, k) for k in others)
    if further:
        further = f"and {further}"
    titles.append(further)
    panels = []
    for index in np.ndindex(blocks.shape[:-3]):
        label = []
        for k, at in zip(others, index):
            if parts[k] > 1:
                label.append(f"{_name(array, k)} part {at}")
        panels.append((listed(label), blocks[index].tolist()))
    return Grid(titles, sizes, panels)


def _name(array: Array, k: int) -> str:
    name = array.axes[k]
    if name is None:
        return str(array.shape[k])
    return str(name)


def _title(array: Array, k: int) -> str:
    """``batch 12 over x``"""
    title = str(array.shape[k])
    if array.axes[k] is not None:
        title = f"{array.axes[k]} {title}"
    over = _split_axes(array)[k]
    is_mesh_axis = over == (array.axes[k],)
    if over and not is_mesh_axis:
        title += f" over {listed(over)}"
    return title


def _in_words(array: Array, k: int) -> str:
    title = _title(array, k)
    if array.axes[k] is None:
        return f"a dimension of {title} without a name"
    return title


def mesh_array(mesh: _jax.AnyMesh) -> Array:
    """A mesh as an array, of which each device holds one element."""
    names = mesh.axis_names
    ones = (1,) * len(names)
    return Array("mesh", np.dtype(int), mesh.axis_sizes, names, PartitionSpec(*names), ones)


MOST_LETTERS = 30  # of the names above a drawing


def alike(arrays: Iterable[Array]) -> Iterator[tuple[str, Array]]:
    """The arrays to draw, with their names: those that lie alike are drawn once."""

    def layout(array: Array) -> Array:
        return dataclasses.replace(array, path="")

    for group in by_key(arrays, layout).values():
        names = [array.path for array in group]
        title = ", ".join(names)
        if len(title) > MOST_LETTERS:
            title = with_more(names)
        yield title, group[0]


def device_ids(mesh: _jax.AnyMesh | None) -> list[int]:
    """The numbers of the devices; those of an abstract mesh are numbered in order."""
    if mesh is None:
        return [0]
    return [device.id for device in devices_of(mesh)] or list(range(mesh.size))


def ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``'0-2 5'``."""
    runs = by_key(enumerate(sorted(numbers)), lambda at: at[1] - at[0])
    words: list[str] = []
    for run in runs.values():
        first = run[0][1]
        last = run[-1][1]
        words.append(str(first))
        if len(run) > 2:
            words[-1] += f"-{last}"
        elif len(run) == 2:
            words.append(str(last))
    return " ".join(words)
