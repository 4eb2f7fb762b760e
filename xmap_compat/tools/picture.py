"""Pictures of a plan: how each argument and result lies on the devices, and what moves between
them.

The mesh has a colour for each device.  An array, drawn in proportion, is cut into the blocks that
devices hold, with the numbers of these devices and the colour that they share.  Below, a bar shows
what each transfer sends, in the order of the program.  All of it lies on one grid of two columns,
which a telephone shows as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from xmap_compat import _jax
from xmap_compat.tools.grid import (
    Grid,
    alike,
    arrange,
    block_holders,
    corner,
    device_ids,
    mesh_array,
    ranges,
)
from xmap_compat.tools.plan import Array, Call, Plan
from xmap_compat.tools.plan_text import alike_collectives, sent
from xmap_compat.tools.search import Candidate, Candidates
from xmap_compat.tools.text import escape, listed, sent_in_words, show_bytes

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
            lightness = 82 - 26 * shade / max(shades - 1, 1)
            colours[device] = 360 * hue / hues, lightness
    return colours


def _shared(some: Sequence[Colour]) -> str:
    """The common part of colours: their hue and mean lightness; if hues differ, a pale grey of that
    lightness.
    """
    hues = {hue for hue, _ in some}
    lightness = sum(light for _, light in some) / len(some)
    if len(hues) == 1:
        return f"hsl({some[0][0]:.0f},60%,{lightness:.0f}%)"
    return f"hsl(0,0%,{50 + lightness / 2:.0f}%)"


# ---------------------------------------------------------------------------------- SVG

STYLE = (
    ".xmap text{font-family:DejaVu Sans,Verdana,Helvetica,Arial,sans-serif;fill:#1f2430}.xmap .faint{fill:#6b7280}"
    ".xmap .bold{font-weight:bold}.xmap .on{fill:#1f2430}.xmap .paper{fill:#ffffff}.xmap .sheet{fill:#f3f4f6}"
    ".xmap .edge{stroke:#374151;fill:none}.xmap .sent{fill:#2563eb}.xmap .back{fill:#c2410c}"
    "@media (prefers-color-scheme:dark){.xmap text{fill:#e5e7eb}.xmap .faint{fill:#9ca3af}.xmap .paper{fill:#16181d}"
    ".xmap .edge{stroke:#9ca3af}.xmap .sheet{fill:#2a2e37}.xmap .sent{fill:#60a5fa}.xmap .back{fill:#fb923c}}"
)
PAGE = 500
MARGIN = 16.0
GAP = 20.0
ROOM = PAGE - 2 * MARGIN
COLUMN = (ROOM - GAP) / 2
# The longest and shortest side of an array, and the least of a block.
LONG = 160.0
SHORT = 18.0
BLOCK = 15.0
MAX_CALLS = 8
MAX_ARRAYS = 60
MAX_BARS = 30
SENT = "sent"
BACK = "back"


class _Canvas:
    """SVG elements in the order of their painting, and where the next one goes.

    Attributes:
      mesh: the part of the mesh that is drawn.
      ids: the numbers of its devices.
    """

    def __init__(self, mesh: _jax.AnyMesh | None = None):
        self.elements: list[str] = []
        self.size = 1 if mesh is None else mesh.size
        self.mesh = corner(mesh)
        self.ids = device_ids(mesh, self.mesh)
        self.colours = _colours_of(self.mesh)
        self.bottom = 0.0

    def _add(self, tag: str, content: str, **attributes: Any) -> None:
        words = [tag]
        for name, value in attributes.items():
            name = name.strip("_").replace("_", "-")
            words.append(f'{name}="{value}"')
        self.elements.append(f"<{' '.join(words)}>{content}</{tag}>")

    def rect(self, x, y, w, h, title="", **attributes):
        self.bottom = max(self.bottom, y + h)
        tip = f"<title>{escape(title)}</title>" if title else ""
        size = {"width": f"{w:.1f}", "height": f"{h:.1f}"}
        self._add("rect", tip, x=f"{x:.1f}", y=f"{y:.1f}", **size, rx="0", **attributes)

    def text(self, x, y, content, size=11.0, kind="", room=0.0, **attributes):
        """A text, which is cut off where it has no more room."""
        if room and _text_width(content, size) > room:
            content = content[: int(room / size / 0.6) - 1] + "…"
        self.bottom = max(self.bottom, y)
        if kind:
            attributes["class_"] = kind
        at = {"x": f"{x:.1f}", "y": f"{y:.1f}", "font_size": f"{size:.3g}"}
        self._add("text", escape(content), **at, **attributes)

    def title(self, x, y, content, room=COLUMN):
        self.text(x, y + 12, content, 13, "faint bold", room=room)

    def lines(self, x, y, contents: Iterable[str], room=ROOM, kind="faint") -> float:
        """Lines of text below each other; the bottom edge."""
        for content in filter(None, contents):
            y += 15
            self.text(x, y, content, 11, kind, room=room)
        return y

    def keys(self, y, meanings: dict[str, str]) -> None:
        """What the colours of bars mean."""
        for k, (kind, meaning) in enumerate(meanings.items()):
            x = MARGIN + 150 * k
            self.rect(x, y - 8, 14, 8, class_=kind)
            self.text(x + 20, y, meaning, 11, "faint")

    def bar(self, y, share: float, kind: str) -> None:
        self.rect(MARGIN, y, max(ROOM * share, 2), 5, class_=kind)

    def more(self, y, count: int, where: str) -> None:
        if count > MAX_BARS:
            self.lines(MARGIN, y, [f"... and {count - MAX_BARS} more: see {where}"])

    def is_everywhere(self, holders: Sequence[int]) -> bool:
        return len(holders) == len(self.ids) > 1

    def fill(self, held: Sequence[int]) -> dict[str, str]:
        if self.is_everywhere(held):
            return {"class_": "sheet"}
        return {"fill": _shared([self.colours[k] for k in held])}

    def block(self, x, y, w, h, holders, title):
        """A rectangle in the colour that devices share, with their numbers as large as there is
        room.
        """
        everywhere = self.is_everywhere(holders)
        label = f"all {self.size} devices" if everywhere else ranges(self.ids[k] for k in holders)
        self.rect(x, y, w, h, title, stroke="#374151", **self.fill(holders))
        if _text_width(label, 5) > w - 2:
            label = f"{self.ids[holders[0]]}…"
        size = min(11.0, 0.75 * h, (w - 2) / (0.6 * len(label)))
        if len(self.ids) > 1 and size >= 5:
            kind = "" if everywhere else "on"
            middle = y + h / 2 + 0.36 * size
            self.text(x + w / 2, middle, label, size, kind, text_anchor="middle")

    def document(self, title: str) -> str:
        height = f"{self.bottom + MARGIN:.0f}"
        size = f'width="{PAGE}" height="{height}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} class="xmap" viewBox="0 0 {PAGE} {height}"'
            ' style="max-width:100%;height:auto" role="img">'
            f"<title>{escape(title)}</title><style>{STYLE}</style>"
            f'<rect {size} class="paper" rx="8"/>{"".join(self.elements)}</svg>\n'
        )


def _text_width(content: str, size: float) -> float:
    """The approximate width in the fonts that we ask for."""
    return len(content) * size * 0.6


@functools.singledispatch
def svg(shown: Any) -> str:
    """A plan or a search as a self-contained SVG document."""
    raise NotImplementedError(type(shown))


@svg.register
def _(plan: Plan) -> str:
    """The totals, the mesh, the arguments and results of calls that use it, and what moves."""
    canvas = _Canvas(plan.mesh)
    canvas.text(MARGIN, MARGIN + 14, plan.function, 16, "bold", room=ROOM)
    placed = [call for call in plan.calls if call.mesh == plan.mesh]
    y = canvas.lines(MARGIN, MARGIN + 18, _totals(plan, placed))
    y = _mesh_card(canvas, plan.mesh, y + 18) + 18
    for call in placed[:MAX_CALLS]:
        of = "" if call.function == plan.function else f" of {call.function}"
        y = _draw_arrays(canvas, f"arguments{of}", call.arguments, y)
        y = _draw_arrays(canvas, f"results{of}", call.results, y)
    others = [call.function for call in plan.calls if call not in placed[:MAX_CALLS]]
    if others:
        words = f"not drawn: the arrays of {listed(dict.fromkeys(others))}"
        y = canvas.lines(MARGIN, y - 8, [words]) + 12
    if plan.transfers:
        _draw_collectives(canvas, plan, y)
    return canvas.document(f"{plan.function}: arrays on devices")


def _totals(plan: Plan, calls: Sequence[Call]) -> Iterator[str]:
    held = sum(call.bytes_held for call in calls)
    yield f"each device holds {show_bytes(held)} of arguments and results"
    yield f"and sends {sent_in_words(plan.sent_over)}"


def _mesh_card(canvas: _Canvas, whole: _jax.AnyMesh | None, y: float) -> float:
    mesh = canvas.mesh
    canvas.title(MARGIN, y, "devices" if mesh is None else "mesh")
    if mesh is None or whole is None:
        canvas.block(MARGIN, y + 20, 96, 32, [0], "one device")
        canvas.text(MARGIN + 48, y + 40, "one device", 11, "on", text_anchor="middle")
        return y + 52
    y += 14
    if mesh is not whole:
        part = [f"{name} {size} of {whole.shape[name]}" for name, size in mesh.shape.items()]
        y = canvas.lines(MARGIN, y, [f"a corner: {listed(part)}"]) - 2
    return _draw_grid(canvas, mesh_array(mesh), MARGIN, y, "device")


def _draw_arrays(canvas: _Canvas, title: str, arrays: Sequence[Array], y: float) -> float:
    """Cards in two columns; the bottom edge."""
    if not arrays:
        return y
    canvas.title(MARGIN, y, title, ROOM)
    y += 20
    kinds = list(alike(arrays))
    shown = kinds[:MAX_ARRAYS]
    for k in range(0, len(shown), 2):
        bottoms = []
        for side, (name, array) in enumerate(shown[k : k + 2]):
            x = MARGIN + side * (COLUMN + GAP)
            bottoms.append(_array_card(canvas, name, array, x, y))
        y = max(bottoms) + 18
    hidden = len(kinds) - len(shown)
    if hidden:
        words = f"... and {hidden} more kinds: see plan.{title.split()[0]}"
        y = canvas.lines(MARGIN, y - 8, [words]) + 12
    return y


def _array_card(canvas: _Canvas, name: str, array: Array, x: float, y: float) -> float:
    canvas.text(x, y + 12, name, 12, "bold", room=COLUMN)
    on_device = "" if array.spec is None else f"{array.device_type} on a device"
    y = canvas.lines(x, y + 12, [array.type, on_device], COLUMN)
    y = _draw_grid(canvas, array, x, y, f"{array.device_type} on device")
    copies = block_holders(array, canvas.mesh).shape[-1]
    if 1 < copies < len(canvas.ids):
        y = canvas.lines(x, y, [f"each block on {copies} devices"], COLUMN)
    return y


def _draw_grid(canvas: _Canvas, array: Array, x: float, y: float, tip: str) -> float:
    """The names of dimensions, and the blocks, in proportion as far as their numbers can be read;
    the bottom edge.
    """
    grid = arrange(array, canvas.mesh)
    down, across, others = grid.titles
    heads = [f"↓ {down}" if down else "", f"→ {across}" if across else "", others]
    y = canvas.lines(x, y, heads, COLUMN) + 6
    width, height = _sides(grid)
    for label, cells in grid.panels:
        if label:
            y = canvas.lines(x, y - 2, [label], COLUMN) + 5
        h = height / len(cells)
        for r, row in enumerate(cells):
            w = width / len(row)
            for c, held in enumerate(row):
                devices = ranges(canvas.ids[k] for k in held)
                canvas.block(x + c * w, y + r * h, w, h, held, f"{tip} {devices}")
        canvas.rect(x, y, width, height, class_="edge", stroke_width=1.6)
        y += height + 4
    return y


def _sides(grid: Grid) -> tuple[float, float]:
    """The width and the height of a drawing."""
    cells = grid.panels[0][1]
    down, across = (max(size, 1) for size in grid.sizes)
    tall = SHORT
    if any(grid.titles):
        tall = LONG * min(1, down / across)
    least_width = len(cells[0]) * 3 * BLOCK
    width = max(LONG * min(1, across / down), least_width)
    height = max(tall, len(cells) * BLOCK, SHORT)
    return min(width, COLUMN), min(height, LONG)


def _draw_collectives(canvas: _Canvas, plan: Plan, y: float) -> None:
    """A bar for each collective that sends something, as long as its bytes, below its words."""
    canvas.title(MARGIN, y, "what moves, in the order of the program", ROOM)
    y += 16
    if len({t.derivative for t in plan.transfers}) > 1:
        canvas.keys(y + 16, {SENT: "for the function", BACK: "for its derivative"})
        y += 20
    moving = [c for c in plan.collectives if c.transfers]
    groups = alike_collectives(moving)
    counts = [sum(c.bytes_counted for c in group) for group in groups]
    largest = max(*counts, 1)
    for group, count in zip(groups[:MAX_BARS], counts):
        c = group[0]
        times = f"{len(group)} times, " if len(group) > 1 else ""
        words = f"{c.name}: {times}{sent(group)}, {c.became}"
        y = canvas.lines(MARGIN, y + 4, [words, str(c.where or "")])
        canvas.bar(y + 5, count / largest, BACK if c.derivative else SENT)
        y += 12
    canvas.more(y, len(groups), "plan.collectives")


@svg.register
def _(found: Candidates) -> str:
    """Two bars for each assignment that can be used: what a device holds, and all that it sends."""
    canvas = _Canvas()
    y = MARGIN + 12
    canvas.keys(y, {SENT: "bytes held", BACK: "bytes sent"})
    usable = [c for c in found if c.refused is None]
    largest = max([max(_figures(c)) for c in usable], default=1)
    for c in usable[:MAX_BARS]:
        held, sends = _figures(c)
        words = f"{c.name}: holds {show_bytes(held)}, sends {show_bytes(sends)}"
        if c.dominated:
            words += ", dominated"
        y = canvas.lines(MARGIN, y + 8, [words])
        canvas.bar(y + 5, held / largest, SENT)
        canvas.bar(y + 11, sends / largest, BACK)
        y += 12
    canvas.more(y + 4, len(usable), f"found[{MAX_BARS}:]")
    return canvas.document("what each assignment holds and sends")


def _figures(c: Candidate) -> tuple[int, int]:
    return c.bytes_held or 0, sum(c.bytes_sent.values())
