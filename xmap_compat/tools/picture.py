"""Pictures of a plan: how each argument and result lies on the devices, and what moves between
them.

The mesh has a colour for each device.  An array, drawn in proportion, is cut into the blocks that
devices hold, with the numbers of these devices and the colour that they share.  Below, a bar shows
what each transfer sends, in the order of the program.  All of it lies on one grid of two columns,
which a telephone shows as well.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from xmap_compat import _jax
from xmap_compat.tools.grid import Grid, alike, arrange, corner, device_ids, mesh_grid, ranges
from xmap_compat.tools.plan import Array, Call, Plan
from xmap_compat.tools.search import Candidates
from xmap_compat.tools.shown import axes_name
from xmap_compat.tools.text import by_key, escape, listed, show_bytes
from xmap_compat.tools.transfers import Transfer, sum_of_known

Colour = tuple[float, float]  # the hue, in degrees, and the lightness, in per cent


def _colours_of(mesh: _jax.AnyMesh | None) -> list[Colour]:
    """A colour for each device: the hue runs along the longest mesh axis, the lightness over the
    others.
    """
    if mesh is None:
        return [(215, 82)]
    longest = int(np.argmax(mesh.axis_sizes))
    hues = mesh.axis_sizes[longest]
    shades = mesh.size // hues
    colours = []
    for index in np.ndindex(*mesh.axis_sizes):
        others = np.delete(index, longest)
        other_sizes = np.delete(mesh.axis_sizes, longest)
        shade = np.ravel_multi_index(others, other_sizes) if shades > 1 else 0
        lightness = 82 - 26 * shade / (shades - 1) if shades > 1 else 72
        colours.append((360 * index[longest] / hues, float(lightness)))
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
MAX_TRANSFERS = 30
SENT = "sent"
BACK = "back"
Card = Callable[[float, float], float]  # draws at a place, and returns the bottom edge


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

    def bar(self, y, share: float, height: float, kind: str) -> None:
        self.rect(MARGIN, y, max(ROOM * share, 2), height, class_=kind)

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
    """The totals, the mesh, the arguments and results of calls that use it, and the transfers."""
    canvas = _Canvas(plan.mesh)
    canvas.text(MARGIN, MARGIN + 14, plan.function, 16, "bold", room=ROOM)
    placed = [call for call in plan.calls if call.mesh == plan.mesh]
    drawn = placed[:MAX_CALLS]
    y = canvas.lines(MARGIN, MARGIN + 18, _totals(plan, placed))
    arrays = [a for call in drawn for a in (*call.arguments, *call.results)]
    mesh_card = functools.partial(_mesh_card, canvas, plan.mesh)
    y = _cards([mesh_card, functools.partial(_legend, canvas, arrays)], y + 18)
    for call in drawn:
        of = "" if call.function == plan.function else f" of {call.function}"
        y = _draw_arrays(canvas, f"arguments{of}", call.arguments, y)
        y = _draw_arrays(canvas, f"results{of}", call.results, y)
    others = [call.function for call in plan.calls if call not in drawn]
    if others:
        words = f"not drawn: the arrays of {listed(dict.fromkeys(others))}"
        y = canvas.lines(MARGIN, y - 8, [words]) + 12
    _draw_transfers(canvas, plan.transfers, arrays, y)
    return canvas.document(f"{plan.function}: arrays on devices")


def _totals(plan: Plan, calls: Sequence[Call]) -> Iterator[str]:
    held = sum(call.bytes_held for call in calls)
    yield f"each device holds {show_bytes(held)} of arguments and results"
    sent = [f"{show_bytes(n)} over {axes_name(axes)}" for axes, n in plan.sent_over.items() if n]
    yield f"and sends {listed(sent) or 'nothing'}"


def _draw_arrays(canvas: _Canvas, title: str, arrays: Sequence[Array], y: float) -> float:
    if not arrays:
        return y
    canvas.title(MARGIN, y, title, ROOM)
    kinds = list(alike(arrays))
    cards = [functools.partial(_array_card, canvas, *kind) for kind in kinds[:MAX_ARRAYS]]
    y = _cards(cards, y + 20)
    hidden = len(kinds) - MAX_ARRAYS
    if hidden > 0:
        attribute = title.split()[0]
        words = f"... and {hidden} more kinds: see plan.{attribute}"
        y = canvas.lines(MARGIN, y - 8, [words]) + 12
    return y


def _cards(cards: Sequence[Card], y: float) -> float:
    """Draw cards in two columns; return the bottom edge."""
    for k in range(0, len(cards), 2):
        bottoms = [card(MARGIN, y) for card in cards[k : k + 1]]
        bottoms += [card(MARGIN + COLUMN + GAP, y) for card in cards[k + 1 : k + 2]]
        y = max(bottoms) + 18
    return y


def _mesh_card(canvas: _Canvas, whole: _jax.AnyMesh | None, x: float, y: float) -> float:
    mesh = canvas.mesh
    canvas.title(x, y, "devices" if mesh is None else "mesh")
    if mesh is None or whole is None:
        canvas.block(x, y + 20, 96, 32, [0], "one device")
        canvas.text(x + 48, y + 40, "one device", 11, "on", text_anchor="middle")
        return y + 52
    if mesh is not whole:
        part = [f"{name} {size} of {whole.shape[name]}" for name, size in mesh.shape.items()]
        y = canvas.lines(x, y + 14, [f"a corner: {listed(part)}"], COLUMN) - 2
    coordinates = list(np.ndindex(*mesh.axis_sizes))

    def tip(held: list[int]) -> str:
        place = zip(mesh.axis_names, coordinates[held[0]])
        words = listed(f"{name} = {at}" for name, at in place)
        return f"device {canvas.ids[held[0]]}: {words}"

    return _draw_grid(canvas, mesh_grid(mesh), x, y + 14, tip)


def _legend(canvas: _Canvas, arrays: Sequence[Array], x: float, y: float) -> float:
    """What the colours of blocks on several devices mean, as far as there are such blocks."""
    shape = {} if canvas.mesh is None else dict(canvas.mesh.shape)
    longest = max(shape, key=shape.__getitem__, default="")
    others = axes_name(tuple(axis for axis in shape if axis != longest))
    found: dict[str, list[int]] = {}
    for block in sorted(_blocks(canvas, arrays)):
        if 1 < len(block) < len(canvas.ids):
            hues = {canvas.colours[k][0] for k in block}
            found.setdefault(others if len(hues) > 1 else longest, block)
    if found:
        canvas.title(x, y, "blocks on several devices")
    for axis, block in found.items():
        canvas.rect(x, y + 24, 14, 12, stroke="#374151", **canvas.fill(block))
        canvas.text(x + 20, y + 34, f"the same place along {axis}", 11, "faint", room=COLUMN - 20)
        y += 20
    return y + 22


def _blocks(canvas: _Canvas, arrays: Sequence[Array]) -> Iterator[list[int]]:
    for array in arrays:
        for _, cells in arrange(array, canvas.mesh).panels:
            for row in cells:
                yield from row


def _array_card(canvas: _Canvas, name: str, array: Array, x: float, y: float) -> float:
    grid = arrange(array, canvas.mesh)
    canvas.text(x, y + 12, name, 12, "bold", room=COLUMN)
    on_device = "" if array.spec is None else f"{array.device_type} on a device"
    y = canvas.lines(x, y + 12, [array.type, on_device], COLUMN)

    def tip(held: list[int]) -> str:
        return f"{array.device_type} on device {ranges(canvas.ids[k] for k in held)}"

    y = _draw_grid(canvas, grid, x, y, tip)
    copies = len(grid.panels[0][1][0][0])
    if 1 < copies < len(canvas.ids):
        y = canvas.lines(x, y, [f"each block on {copies} devices"], COLUMN)
    return y


def _draw_grid(
    canvas: _Canvas, grid: Grid, x: float, y: float, tip: Callable[[list[int]], str]
) -> float:
    """The names of dimensions, and the blocks, in proportion as far as their numbers can be read;
    the bottom edge.
    """
    down, across, others = grid.titles
    heads = [f"↓ {down}" if down else "", f"→ {across}" if across else "", others]
    y = canvas.lines(x, y, heads, COLUMN) + 6
    cells = grid.panels[0][1]
    rows = len(cells)
    columns = len(cells[0])
    width, height = _sides(grid, rows, columns)
    w = width / columns
    h = height / rows
    for label, cells in grid.panels:
        if label:
            y = canvas.lines(x, y - 2, [label], COLUMN) + 5
        for r, row in enumerate(cells):
            for c, held in enumerate(row):
                canvas.block(x + c * w, y + r * h, w, h, held, tip(held))
        canvas.rect(x, y, width, height, class_="edge", stroke_width=1.6)
        y += height + 4
    return y


def _sides(grid: Grid, rows: int, columns: int) -> tuple[float, float]:
    """The width and the height of a drawing."""
    down, across = (max(size, 1) for size in grid.sizes)
    has_sides = any(grid.titles[:2])
    tall = LONG * min(1, down / across) if has_sides else SHORT
    width = max(LONG * min(1, across / down), columns * 3 * BLOCK)
    height = max(tall, rows * BLOCK, SHORT)
    return min(width, COLUMN), min(height, LONG)


def _draw_transfers(
    canvas: _Canvas, transfers: Sequence[Transfer], arrays: Sequence[Array], y: float
) -> None:
    """A bar for each distinct transfer, as long as its bytes, below its words and the arrays that
    it joins.
    """
    if not transfers:
        return
    canvas.title(MARGIN, y, "what moves, in the order of the program", ROOM)
    if len({t.derivative for t in transfers}) > 1:
        canvas.keys(y + 32, {SENT: "for the function", BACK: "for its derivative"})
        y += 20
    y += 16
    groups = list(by_key(transfers, _kind).values())
    sent = [sum(t.counted for t in group) for group in groups]
    largest = max(*sent, 1)
    kinds = list(alike(arrays))
    for group, count in zip(groups[:MAX_TRANSFERS], sent):
        axes = set(group[0].axes)
        joined = [name for name, array in kinds if not axes.isdisjoint(array.axes)]
        y = canvas.lines(MARGIN, y + 4, [_described(group, count)], kind="")
        if joined:
            y = canvas.lines(MARGIN, y - 1, [f"joins parts of {listed(joined)}"])
        else:
            y -= 1
        canvas.bar(y + 5, count / largest, 6, BACK if group[0].derivative else SENT)
        y += 12
    _draw_more(canvas, len(groups), "plan.transfers", y)


def _kind(t: Transfer) -> Transfer:
    """Equal for transfers that differ in the values that they carry, and in how often they run."""
    times = None if t.times is None else min(t.times, 1)
    return dataclasses.replace(t, bytes_sent=0, operand="", elements=None, times=times)


def _described(group: Sequence[Transfer], sent: int) -> str:
    """``all-reduce of batch over x: 1.5 KiB, 3 times (step.py:12)``"""
    t = group[0]
    times = sum_of_known(one.times for one in group)
    words = t.kind
    if t.axes:
        words += f" of {listed(t.axes)}"
    words += f" over {listed(t.mesh_axes)}: {show_bytes(sent)}"
    if times is None:
        words += ", each iteration"
    elif times > 1:
        words += f", {times} times"
    return f"{words} ({t.where})" if t.where else words


def _draw_more(canvas: _Canvas, count: int, where: str, y: float) -> None:
    if count > MAX_TRANSFERS:
        canvas.lines(MARGIN, y, [f"... and {count - MAX_TRANSFERS} more: see {where}"])


@svg.register
def _(found: Candidates) -> str:
    """Two bars for each assignment that can be used: what a device holds, and all that it sends."""
    canvas = _Canvas()
    y = MARGIN + 12
    canvas.keys(y, {SENT: "bytes held", BACK: "bytes sent"})
    usable = [c for c in found if c.refused is None]
    sent = [sum(c.bytes_sent.values()) for c in usable]
    held = [c.bytes_held or 0 for c in usable]
    largest = max([*held, *sent, 1])
    for c, holds, sends in zip(usable[:MAX_TRANSFERS], held, sent):
        words = f"{c.name}: holds {show_bytes(holds)}, sends {show_bytes(sends)}"
        if c.dominated:
            words += ", dominated"
        y = canvas.lines(MARGIN, y + 8, [words], kind="faint" if c.dominated else "")
        canvas.bar(y + 5, holds / largest, 5, SENT)
        canvas.bar(y + 11, sends / largest, 5, BACK)
        y += 12
    _draw_more(canvas, len(usable), f"found[{MAX_TRANSFERS}:]", y + 4)
    return canvas.document("what each assignment holds and sends")
