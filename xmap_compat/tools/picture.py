"""Pictures of a plan: how each argument and result lies on the devices, and what moves between
them.

An array is cut into the blocks that devices hold, with the numbers of these devices and the colour
of the first of them.  Below, a bar shows what each collective sends, in the order of the program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from xmap_compat import _jax
from xmap_compat.core.mesh import devices_of
from xmap_compat.tools.plan import Array, Plan
from xmap_compat.tools.plan_text import alike_collectives, sent
from xmap_compat.tools.text import by_key, escape, listed, sent_in_words, show_bytes, with_more

STYLE = (
    ".xmap text{font-family:DejaVu Sans,Verdana,Helvetica,Arial,sans-serif;fill:#1f2430}"
    ".xmap .faint{fill:#6b7280}.xmap .bold{font-weight:bold}.xmap .on{fill:#1f2430}"
    ".xmap .paper{fill:#ffffff}.xmap .sheet{fill:#f3f4f6}.xmap .sent{fill:#2563eb}"
    "@media (prefers-color-scheme:dark){.xmap text{fill:#e5e7eb}.xmap .faint{fill:#9ca3af}"
    ".xmap .paper{fill:#16181d}.xmap .sheet{fill:#2a2e37}.xmap .sent{fill:#60a5fa}}"
)
PAGE = 500
MARGIN = 16
GAP = 20
ROOM = PAGE - 2 * MARGIN
COLUMN = (ROOM - GAP) / 2
LETTER = 0.6  # the width of a letter of size 1, about, in the fonts that we ask for
LONG = 160  # the longest side of an array
BLOCK = 18  # the shortest side of a block
MOST_DEVICES = 256  # of a mesh that is drawn


# ------------------------------------------------------------------------------ blocks


def block_holders(array: Array, mesh: _jax.AnyMesh | None) -> np.ndarray:
    """For each block of an array (its index in every dimension) the positions in the mesh that hold
    it.
    """
    shape = dict(getattr(mesh, "shape", {}))
    split = _split_axes(array)
    # Axes that split nothing come last, and hold copies.
    order = list(dict.fromkeys([*sum(split, ()), *shape]))
    places = [list(shape).index(axis) for axis in order]
    parts = [math.prod(shape[axis] for axis in axes) for axes in split]
    sizes = list(shape.values())
    positions = np.arange(math.prod(sizes)).reshape(sizes)
    return positions.transpose(places).reshape(*parts, -1)


def _split_axes(array: Array) -> list[tuple[Any, ...]]:
    """The mesh axes of each dimension."""
    spec = array.spec or ()
    missing = [None] * (len(array.shape) - len(spec))
    return [_jax.axes_of_entry(entry) for entry in (*spec, *missing)]


def _dimensions(array: Array) -> list[str]:
    """``batch 12 over x`` for each dimension."""
    words = []
    for name, size, over in zip(array.axes, array.shape, _split_axes(array)):
        title = str(size)
        if name is not None:
            title = f"{name} {size}"
        if over and over != (name,):
            title += f" over {listed(over)}"
        words.append(title)
    return words


def _mesh_array(mesh: _jax.AnyMesh) -> Array:
    """A mesh as an array, of which each device holds one element."""
    names = mesh.axis_names
    ones = (1,) * len(names)
    return Array("mesh", np.dtype(int), mesh.axis_sizes, names, PartitionSpec(*names), ones)


def _device_ids(mesh: _jax.AnyMesh | None) -> list[int]:
    """The numbers of the devices; those of an abstract mesh are numbered in order."""
    if mesh is None:
        return [0]
    return [device.id for device in devices_of(mesh)] or list(range(mesh.size))


def ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``'0-2 5'``."""
    runs = by_key(enumerate(sorted(numbers)), lambda at: at[1] - at[0])
    words = []
    for run in runs.values():
        first, last = run[0][1], run[-1][1]
        words.append(f"{first}-{last}" if first != last else str(first))
    return " ".join(words)


# ---------------------------------------------------------------------------------- SVG


class _Canvas:
    """SVG elements in the order of their painting.

    Attributes:
      x, y: where the next line goes.
      ids: the numbers of the devices.
    """

    def __init__(self, mesh: _jax.AnyMesh | None):
        self.elements: list[str] = []
        self.x: float = MARGIN
        self.y: float = MARGIN
        self.mesh = mesh
        self.ids = _device_ids(mesh)

    def text(self, x: float, y: float, content: str, size: float, kind: str) -> None:
        self.elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.1f}" class="{kind}">'
            f"{escape(content)}</text>"
        )

    def rect(self, x: float, y: float, w: float, h: float, paint: str, tip: str = "") -> None:
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self.elements.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" {paint}>{title}</rect>'
        )

    def line(self, content: str, size: float = 11, kind: str = "faint", room=ROOM) -> None:
        """A line of text, which is cut off where it has no more room."""
        most = int(room / size / LETTER)
        if len(content) > most:
            content = content[: most - 1] + "…"
        self.y += size + 4
        self.text(self.x, self.y, content, size, kind)

    def title(self, content: str) -> None:
        self.y += 8
        self.line(content, 13, "faint bold")

    def block(self, x: float, y: float, w: float, h: float, holders: Sequence[int]) -> None:
        """A rectangle in the colour of its first device, with the numbers of all as large as there
        is room.
        """
        devices = ranges(self.ids[k] for k in holders)
        label = devices
        paint = f'fill="hsl({360 * holders[0] // len(self.ids)},60%,75%)"'
        if len(holders) == len(self.ids):
            label = "all"
            paint = 'class="sheet"'
        self.rect(x, y, w, h, f'{paint} stroke="#374151"', f"device {devices}")
        size = min(11, h * 0.75, (w - 2) / LETTER / len(label))
        if size >= 5:
            left = x + (w - len(label) * size * LETTER) / 2
            self.text(left, y + h / 2 + size / 3, label, size, "on")

    def document(self, title: str) -> str:
        height = round(self.y + MARGIN)
        size = f'width="{PAGE}" height="{height}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} class="xmap" '
            f'viewBox="0 0 {PAGE} {height}" style="max-width:100%;height:auto" role="img">'
            f"<title>{escape(title)}</title><style>{STYLE}</style>"
            f'<rect {size} class="paper" rx="8"/>{"".join(self.elements)}</svg>\n'
        )


def svg(plan: Plan) -> str:
    """A plan as a self-contained SVG document: the totals, the mesh, the arguments and results of
    calls that use it, and what moves.
    """
    mesh = plan.mesh
    canvas = _Canvas(mesh)
    canvas.line(plan.function, 16, "bold")
    held = show_bytes(plan.bytes_held)
    canvas.line(f"each device holds {held} of arguments and results")
    canvas.line(f"and sends {sent_in_words(plan.sent_over)}")
    if len(canvas.ids) > MOST_DEVICES:
        canvas.title(f"arrays are drawn on at most {MOST_DEVICES} devices")
    else:
        if mesh is not None:
            canvas.title("mesh")
            _draw_blocks(canvas, _mesh_array(mesh))
        for call in plan.calls:
            if call.mesh == mesh:
                canvas.title(f"arguments and results of {call.function}")
                _draw_arrays(canvas, [*call.arguments, *call.results])
    if plan.transfers:
        _draw_collectives(canvas, plan)
    return canvas.document(f"{plan.function}: arrays on devices")


def _draw_arrays(canvas: _Canvas, arrays: Sequence[Array]) -> None:
    """Arrays in two columns; those that lie alike are drawn once."""
    drawn = list(by_key(arrays, _layout).values())
    columns = MARGIN, MARGIN + COLUMN + GAP
    for k in range(0, len(drawn), 2):
        top = canvas.y
        bottom = top
        for canvas.x, alike in zip(columns, drawn[k : k + 2]):
            canvas.y = top
            canvas.line(with_more([array.path for array in alike]), 12, "bold", COLUMN)
            canvas.line(alike[0].type, room=COLUMN)
            canvas.line(f"{alike[0].device_type} on a device", room=COLUMN)
            _draw_blocks(canvas, alike[0])
            bottom = max(bottom, canvas.y)
        canvas.x = MARGIN
        canvas.y = bottom + 8


def _layout(array: Array) -> Any:
    return array.type, array.axes, array.spec


def _draw_blocks(canvas: _Canvas, array: Array) -> None:
    """The dimensions of an array and its blocks, in proportion as far as their numbers can be
    read.
    """
    for title in _dimensions(array):
        canvas.line(title, room=COLUMN)
    blocks = block_holders(array, canvas.mesh)
    columns = 1
    across = 1
    if not array.shape:
        across = LONG // BLOCK
    if len(array.shape) > 1:
        across = max(array.shape[-1], 1)
        columns = blocks.shape[-2]
    down = max(math.prod(array.shape) // across, 1)
    grid = blocks.reshape(-1, columns, blocks.shape[-1]).tolist()
    width = max(LONG * min(1, across / down), columns * BLOCK)
    height = max(LONG * min(1, down / across), len(grid) * BLOCK)
    w = min(width, COLUMN) / columns
    h = height / len(grid)
    canvas.y += 6
    for row in grid:
        for k, holders in enumerate(row):
            canvas.block(canvas.x + k * w, canvas.y, w, h, holders)
        canvas.y += h


def _draw_collectives(canvas: _Canvas, plan: Plan) -> None:
    """A bar for each collective that sends something, as long as its bytes, below its words."""
    canvas.title("what moves, in the order of the program")
    groups = alike_collectives(c for c in plan.collectives if c.transfers)
    counts = []
    for group in groups:
        counts.append(sum(transfer.total for c in group for transfer in c.transfers))
    largest = max(*counts, 1)
    for group, count in zip(groups, counts):
        c = group[0]
        words = f"{c.name}: {sent(group)}"
        if len(group) > 1:
            words += f", {len(group)} times"
        if c.where is not None:
            words += f" ({c.where})"
        canvas.line(words, kind="")
        canvas.line(c.became)
        width = max(ROOM * count / largest, 2)
        canvas.rect(MARGIN, canvas.y + 5, width, 5, 'class="sent"')
        canvas.y += 7
