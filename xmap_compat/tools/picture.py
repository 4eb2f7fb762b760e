"""Pictures of a plan: how each argument and result lies on the devices, and what moves between
them.

The mesh has a colour for each device.  An array, drawn in proportion, is cut into the blocks that
devices hold, with the numbers of these devices and the colour that they share.  Below, a bar shows
what each transfer sends, in the order of the program.  All of it lies on one grid of two columns,
which a telephone shows as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xmap_compat import _jax
from xmap_compat.tools.grid import (
    Grid,
    alike,
    arrange,
    block_holders,
    device_ids,
    mesh_array,
    ranges,
)
from xmap_compat.tools.plan import Array, Plan
from xmap_compat.tools.plan_text import alike_collectives, sent
from xmap_compat.tools.text import escape, sent_in_words, show_bytes

Colour = tuple[float, float]  # the hue, in degrees, and the lightness, in per cent


def _colours_of(mesh: _jax.AnyMesh | None) -> list[Colour]:
    """A colour for each device: the hue runs along the longest mesh axis, the lightness over the
    others.
    """
    if mesh is None:
        return [(215, 82)]
    longest = int(np.argmax(mesh.axis_sizes))
    positions = np.arange(mesh.size).reshape(mesh.axis_sizes)
    by_hue = np.moveaxis(positions, longest, 0).reshape(mesh.axis_sizes[longest], -1)
    hues, shades = by_hue.shape
    colours: list[Colour] = [(0, 0)] * mesh.size
    for hue, devices in enumerate(by_hue):
        for shade, device in enumerate(devices):
            part = shade / max(shades - 1, 1)
            colours[device] = 360 * hue / hues, 82 - 26 * part
    return colours


def _shared(some: Sequence[Colour]) -> str:
    """The common part of colours: their hue and mean lightness; if hues differ, a pale grey of that
    lightness.
    """
    hues, lights = zip(*some)
    lightness = sum(lights) / len(some)
    if len(set(hues)) == 1:
        return f"hsl({hues[0]:.0f},60%,{lightness:.0f}%)"
    return f"hsl(0,0%,{50 + lightness / 2:.0f}%)"


# ---------------------------------------------------------------------------------- SVG

STYLE = (
    ".xmap text{font-family:DejaVu Sans,Verdana,Helvetica,Arial,sans-serif;fill:#1f2430}"
    ".xmap .faint{fill:#6b7280}.xmap .bold{font-weight:bold}.xmap .on{fill:#1f2430}"
    ".xmap .paper{fill:#ffffff}.xmap .sheet{fill:#f3f4f6}"
    ".xmap .edge{stroke:#374151;fill:none}.xmap .sent{fill:#2563eb}"
    "@media (prefers-color-scheme:dark){.xmap text{fill:#e5e7eb}.xmap .faint{fill:#9ca3af}"
    ".xmap .paper{fill:#16181d}.xmap .edge{stroke:#9ca3af}.xmap .sheet{fill:#2a2e37}"
    ".xmap .sent{fill:#60a5fa}}"
)
PAGE = 500
MARGIN = 16
GAP = 20
ROOM = PAGE - 2 * MARGIN
COLUMN = (ROOM - GAP) / 2
LETTER = 0.6  # the width of a letter of size 1, about, in the fonts that we ask for
# The longest and shortest side of an array, and the least of a block.
LONG = 160
SHORT = 18
BLOCK = 15
MOST_DEVICES = 256  # of a mesh that is drawn
MAX_ARRAYS = 60
MAX_BARS = 30


class _Canvas:
    """SVG elements in the order of their painting.

    Attributes:
      x, y: where the next line goes.
      mesh: the mesh.
      ids: the numbers of its devices.
      everywhere: the words for all devices.
    """

    def __init__(self, mesh: _jax.AnyMesh | None = None):
        self.elements: list[str] = []
        self.x: float = MARGIN
        self.y: float = MARGIN
        self.mesh = mesh
        self.ids = device_ids(mesh)
        self.colours = _colours_of(mesh)
        self.everywhere = ""
        if mesh is not None and mesh.size > 1:
            self.everywhere = f"all {mesh.size} devices"

    def add(self, tag: str, content: str, **attributes: Any) -> None:
        words = [tag]
        for name, value in attributes.items():
            name = name.strip("_").replace("_", "-")
            if isinstance(value, float):
                value = round(value, 1)
            words.append(f'{name}="{value}"')
        self.elements.append(f"<{' '.join(words)}>{content}</{tag}>")

    def rect(self, x, y, w, h, tip="", **attributes):
        if tip:
            tip = f"<title>{escape(tip)}</title>"
        self.add("rect", tip, x=x, y=y, width=w, height=h, **attributes)

    def text(self, x, y, content, size, kind, **attributes):
        content = escape(content)
        self.add("text", content, x=x, y=y, font_size=size, class_=kind, **attributes)

    def line(self, content: str, size: float = 11, kind: str = "faint", room=COLUMN) -> None:
        """A line of text, which is cut off where it has no more room."""
        most = int(room / size / LETTER)
        if len(content) > most:
            content = content[: most - 1] + "…"
        self.y += size + 4
        self.text(self.x, self.y, content, size, kind)

    def title(self, content: str) -> None:
        self.y += 8
        self.line(content, 13, "faint bold", ROOM)

    def bar(self, share: float) -> None:
        self.rect(MARGIN, self.y + 5, max(ROOM * share, 2), 5, class_="sent")
        self.y += 7

    def more(self, hidden: int, where: str) -> None:
        if hidden > 0:
            self.line(f"... and {hidden} more: see {where}", room=ROOM)

    def block(self, x, y, w, h, holders, tip):
        """A rectangle in the colour that devices share, with their numbers as large as there is
        room.
        """
        kind = "on"
        colours = [self.colours[k] for k in holders]
        paint = {"fill": _shared(colours)}
        label = ranges(self.ids[k] for k in holders)
        if self.everywhere and len(holders) == len(self.ids):
            kind = ""
            paint = {"class_": "sheet"}
            label = self.everywhere
        self.rect(x, y, w, h, tip, stroke="#374151", **paint)
        if len(label) * 5 * LETTER > w - 2:
            label = f"{self.ids[holders[0]]}…"
        room = w - 2
        size = min(11, 0.75 * h, room / LETTER / len(label))
        if self.everywhere and size >= 5:
            baseline = y + h / 2 + 0.36 * size
            self.text(x + w / 2, baseline, label, size, kind, text_anchor="middle")

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
    is_drawn = mesh is None or mesh.size <= MOST_DEVICES
    canvas = _Canvas(mesh if is_drawn else None)
    canvas.line(plan.function, 16, "bold", ROOM)
    held = show_bytes(plan.bytes_held)
    canvas.line(f"each device holds {held} of arguments and results", room=ROOM)
    canvas.line(f"and sends {sent_in_words(plan.sent_over)}", room=ROOM)
    if is_drawn:
        _draw_mesh(canvas)
        _draw_calls(canvas, plan)
    else:
        canvas.title(f"arrays are drawn on at most {MOST_DEVICES} devices")
    if plan.transfers:
        _draw_collectives(canvas, plan)
    return canvas.document(f"{plan.function}: arrays on devices")


def _draw_mesh(canvas: _Canvas) -> None:
    if canvas.mesh is None:
        canvas.title("one device")
        return
    canvas.title("mesh")
    _draw_grid(canvas, mesh_array(canvas.mesh), "device")


def _draw_calls(canvas: _Canvas, plan: Plan) -> None:
    for call in plan.calls:
        if call.mesh != plan.mesh:
            continue
        of = ""
        if call.function != plan.function:
            of = f" of {call.function}"
        _draw_arrays(canvas, "arguments", of, call.arguments)
        _draw_arrays(canvas, "results", of, call.results)


def _draw_arrays(canvas: _Canvas, kind: str, of: str, arrays: Sequence[Array]) -> None:
    """Arrays in two columns."""
    if not arrays:
        return
    canvas.title(kind + of)
    drawn = list(alike(arrays))
    columns = MARGIN, MARGIN + COLUMN + GAP
    for k in range(0, min(len(drawn), MAX_ARRAYS), 2):
        top = canvas.y
        bottom = top
        for canvas.x, (name, array) in zip(columns, drawn[k : k + 2]):
            canvas.y = top
            _draw_array(canvas, name, array)
            bottom = max(bottom, canvas.y)
        canvas.x = MARGIN
        canvas.y = bottom + 8
    canvas.more(len(drawn) - MAX_ARRAYS, f"plan.{kind}")


def _draw_array(canvas: _Canvas, name: str, array: Array) -> None:
    canvas.line(name, 12, "bold")
    canvas.line(array.type)
    if array.spec is not None:
        canvas.line(f"{array.device_type} on a device")
    _draw_grid(canvas, array, f"{array.device_type} on device")
    copies = block_holders(array, canvas.mesh).shape[-1]
    if 1 < copies < len(canvas.ids):
        canvas.line(f"each block on {copies} devices")


def _draw_grid(canvas: _Canvas, array: Array, tip: str) -> None:
    """The names of dimensions, and the blocks, in proportion as far as their numbers can be
    read.
    """
    grid = arrange(array, canvas.mesh)
    for arrow, title in zip(("↓ ", "→ ", ""), grid.titles):
        if title:
            canvas.line(arrow + title)
    width, height = _sides(grid)
    for label, cells in grid.panels:
        if label:
            canvas.line(label)
        canvas.y += 6
        h = height / len(cells)
        y = canvas.y
        for row in cells:
            x = canvas.x
            w = width / len(row)
            for held in row:
                devices = ranges(canvas.ids[k] for k in held)
                canvas.block(x, y, w, h, held, f"{tip} {devices}")
                x += w
            y += h
        canvas.rect(canvas.x, canvas.y, width, height, class_="edge", stroke_width=1.6)
        canvas.y += height


def _sides(grid: Grid) -> tuple[float, float]:
    """The width and the height of a drawing."""
    cells = grid.panels[0][1]
    down, across = (max(size, 1) for size in grid.sizes)
    tall: float = SHORT
    if any(grid.titles):
        tall = LONG * min(1, down / across)
    wide = LONG * min(1, across / down)
    width = max(wide, len(cells[0]) * 3 * BLOCK)
    height = max(tall, len(cells) * BLOCK, SHORT)
    width = min(width, COLUMN)
    height = min(height, LONG)
    return width, height


def _draw_collectives(canvas: _Canvas, plan: Plan) -> None:
    """A bar for each collective that sends something, as long as its bytes, below its words."""
    canvas.title("what moves, in the order of the program")
    groups = alike_collectives(c for c in plan.collectives if c.transfers)
    counts = [sum(c.bytes_counted for c in group) for group in groups]
    largest = max(*counts, 1)
    for group, count in zip(groups[:MAX_BARS], counts):
        c = group[0]
        words = f"{c.name}: {sent(group)}"
        if len(group) > 1:
            words += f", {len(group)} times"
        if c.where is not None:
            words += f" ({c.where})"
        canvas.line(words, kind="", room=ROOM)
        canvas.line(c.became, room=ROOM)
        canvas.bar(count / largest)
    canvas.more(len(groups) - MAX_BARS, "plan.collectives")
