"""Pictures of a plan: how each argument and result lies on the devices, and what moves between
them.

The mesh has a colour for each device.  An array, drawn in proportion, is cut into the blocks that
devices hold, with the numbers of these devices and the colour that they share.  Below, a bar shows
what each transfer sends, in the order of the program.  All of it lies on one grid of two columns,
which a telephone shows as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from xmap_compat import _jax
from xmap_compat.tools.grid import (
    Grid,
    alike,
    arrange,
    corner,
    device_ids,
    mesh_grid,
    mesh_title,
    ranges,
)
from xmap_compat.tools.plan import Array, CallPlan
from xmap_compat.tools.search import Candidates
from xmap_compat.tools.shown import axes_name
from xmap_compat.tools.steps import StepPlan
from xmap_compat.tools.text import escape, listed, show_bytes
from xmap_compat.tools.transfers import Transfer, alike_transfers

Colour = tuple[float, float]  # the hue, in degrees, and the lightness, in per cent


def _colours_of(mesh: _jax.AnyMesh | None) -> list[Colour]:
    """A colour for each device: the hue runs along the longest mesh axis, the lightness over the
    others.
    """
    if mesh is None:
        return [(215, 82)]
    shape = mesh.axis_sizes
    hues, shades = max(shape), mesh.size // max(shape)
    by_hue = np.moveaxis(np.arange(mesh.size).reshape(shape), shape.index(hues), 0)
    hue, shade = np.divmod(np.argsort(by_hue, axis=None), shades)
    lightness = 82 - 26 * shade / (shades - 1) if shades > 1 else np.full(mesh.size, 72)
    return list(zip((360 * hue / hues).tolist(), lightness.tolist()))


def _shared(some: Sequence[Colour]) -> str:
    """The common part of colours: their hue and mean lightness; if hues differ, a pale grey of that
    lightness.
    """
    hues, lightness = {hue for hue, _ in some}, sum(light for _, light in some) / len(some)
    return (
        f"hsl({some[0][0]:.0f},60%,{lightness:.0f}%)"
        if len(hues) == 1
        else f"hsl(0,0%,{50 + lightness / 2:.0f}%)"
    )


# ---------------------------------------------------------------------------------- SVG

STYLE = (
    ".xmap text{font-family:DejaVu Sans,Verdana,Helvetica,Arial,sans-serif;fill:#1f2430}.xmap .faint{fill:#6b7280}"
    ".xmap .bold{font-weight:bold}.xmap .on{fill:#1f2430}.xmap .paper{fill:#ffffff}.xmap .sheet{fill:#f3f4f6}"
    ".xmap .edge{stroke:#374151;fill:none}.xmap .sent{fill:#2563eb}.xmap .back{fill:#c2410c}"
    "@media (prefers-color-scheme:dark){.xmap text{fill:#e5e7eb}.xmap .faint{fill:#9ca3af}.xmap .paper{fill:#16181d}"
    ".xmap .edge{stroke:#9ca3af}.xmap .sheet{fill:#2a2e37}.xmap .sent{fill:#60a5fa}.xmap .back{fill:#fb923c}}"
)
PAGE, MARGIN, GAP = 500.0, 16.0, 20.0
ROOM, COLUMN = PAGE - 2 * MARGIN, (PAGE - 2 * MARGIN - GAP) / 2
LONG, SHORT, BLOCK = (
    160.0,
    18.0,
    15.0,
)  # the longest and shortest side of an array, the least of a block
MAX_CALLS, MAX_ARRAYS, MAX_TRANSFERS = 8, 60, 30
Card = Callable[[float, float], float]  # draws at a place, and returns the bottom edge


class _Canvas:
    """SVG elements in the order of their painting, and the size of the drawing."""

    def __init__(self, mesh: _jax.AnyMesh | None):
        self.elements: list[str] = []
        self.mesh, self.size = corner(mesh), 1 if mesh is None else mesh.size
        self.colours, self.ids = _colours_of(self.mesh), device_ids(mesh)
        self.right = self.bottom = 0.0

    def rect(self, x, y, w, h, title="", radius=0.0, **attributes):
        self.right, self.bottom = max(self.right, x + w), max(self.bottom, y + h)
        tip = f"<title>{escape(title)}</title>" if title else ""
        more = "".join(
            f' {name.strip("_").replace("_", "-")}="{value}"' for name, value in attributes.items()
        )
        size = f'width="{w:.1f}" height="{h:.1f}" rx="{radius:g}"'
        self.elements.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size}{more}>{tip}</rect>')

    def text(self, x, y, content, size=11.0, kind="", anchor="start", room=0.0):
        """A text, which is cut off where it has no more room."""
        if room and _text_width(content, size) > room:
            content = content[: int(room / size / 0.6) - 1] + "…"
        if anchor == "start":
            self.right, self.bottom = (
                max(self.right, x + _text_width(content, size)),
                max(self.bottom, y),
            )
        more = (f' class="{kind}"' if kind else "") + (
            f' text-anchor="{anchor}"' if anchor != "start" else ""
        )
        self.elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.3g}"{more}>{escape(content)}</text>'
        )

    def lines(self, x, y, contents: Iterable[str], room: float, kind="faint") -> float:
        """Lines of text below each other; the bottom edge."""
        for content in filter(None, contents):
            y += 15
            self.text(x, y, content, 11, kind, room=room)
        return y

    def is_everywhere(self, holders: Sequence[int]) -> bool:
        return len(holders) == len(self.ids) > 1

    def fill(self, held: Sequence[int]) -> dict[str, str]:
        return (
            {"class_": "sheet"}
            if self.is_everywhere(held)
            else {"fill": _shared([self.colours[k] for k in held])}
        )

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
            self.text(
                x + w / 2,
                y + h / 2 + 0.36 * size,
                label,
                size,
                "" if everywhere else "on",
                "middle",
            )

    def document(self, title: str) -> str:
        size = f"{self.right + MARGIN:.0f}", f"{self.bottom + MARGIN:.0f}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" class="xmap"'
            f' viewBox="0 0 {size[0]} {size[1]}" style="max-width:100%;height:auto" role="img">'
            f"<title>{escape(title)}</title><style>{STYLE}</style>"
            f'<rect width="{size[0]}" height="{size[1]}" class="paper" rx="8"/>{"".join(self.elements)}</svg>\n'
        )


def _text_width(content: str, size: float) -> float:
    """The approximate width in the fonts that we ask for."""
    return len(content) * size * 0.6


@functools.singledispatch
def svg(plan: Any) -> str:
    """The picture of a call's plan as a self-contained SVG document; steps and searches are
    registered below.
    """
    return _drawn(plan, [plan], "arrays on devices")


@svg.register
def _(plan: StepPlan) -> str:
    """The arrays of the calls of a step, and a bar for each of its transfers, in the order of the
    program.
    """
    return _drawn(plan, plan.calls, "what moves between devices")


def _drawn(plan: CallPlan | StepPlan, calls: Sequence[CallPlan], what: str) -> str:
    """The totals, the mesh, the arguments and results of calls that use it, and the transfers."""
    canvas = _Canvas(plan.mesh)
    canvas.text(MARGIN, MARGIN + 14, plan.function, 16, "bold", room=ROOM)
    placed = [call for call in calls if call.mesh == plan.mesh]
    y = canvas.lines(MARGIN, MARGIN + 18, _totals(plan, placed), ROOM)
    arrays = [a for call in placed[:MAX_CALLS] for a in (*call.arguments, *call.results)]
    y = _cards(
        [functools.partial(_mesh_card, canvas, mesh_title(plan.mesh)), _legend(canvas, arrays)],
        y + 18,
    )
    for call in placed[:MAX_CALLS]:
        of, at = (
            ("", "plan")
            if call is plan
            else (f" of {call.function}", f"plan.calls[{calls.index(call)}]")
        )
        for title, own in (("arguments", call.arguments), ("results", call.results)):
            if own:
                canvas.text(MARGIN, y + 12, title + of, 13, "faint bold", room=ROOM)
                drawn = alike(own)
                y = _cards(
                    [functools.partial(_array_card, canvas, *each) for each in drawn[:MAX_ARRAYS]],
                    y + 20,
                )
                if len(drawn) > MAX_ARRAYS:
                    more = f"... and {len(drawn) - MAX_ARRAYS} more kinds: see {at}.{title}"
                    y = canvas.lines(MARGIN, y - 8, [more], ROOM) + 12
    rest = [
        call.function
        for call in (*placed[MAX_CALLS:], *(call for call in calls if call.mesh != plan.mesh))
    ]
    if rest:
        y = (
            canvas.lines(
                MARGIN, y - 8, [f"not drawn: the arrays of {listed(dict.fromkeys(rest))}"], ROOM
            )
            + 12
        )
    _draw_transfers(canvas, plan.transfers, arrays, y)
    canvas.right = PAGE - MARGIN
    return canvas.document(f"{plan.function}: {what}")


def _totals(plan: CallPlan | StepPlan, calls: Sequence[CallPlan]) -> list[str]:
    held = sum(call.bytes_held for call in calls)
    sent = [
        f"{show_bytes(count)} over {axes_name(axis)}"
        for axis, count in plan.sent_over.items()
        if count
    ]
    return [
        f"each device holds {show_bytes(held)} of arguments and results",
        f"and sends {listed(sent)}" if sent else "and sends nothing",
    ]


def _cards(cards: Sequence[Card], y: float) -> float:
    """Draw cards in two columns; return the bottom edge."""
    for k in range(0, len(cards), 2):
        y = (
            max(
                card(MARGIN + side * (COLUMN + GAP), y)
                for side, card in enumerate(cards[k : k + 2])
            )
            + 18
        )
    return y


def _mesh_card(canvas: _Canvas, title: str, x: float, y: float) -> float:
    title, _, part = title.partition(", ")
    canvas.text(x, y + 12, title, 13, "faint bold")
    y = canvas.lines(x, y + 14, [part], COLUMN) - 2 if part else y
    if canvas.mesh is None:
        canvas.block(x, y + 20, 96, 32, [0], "one device")
        canvas.text(x + 48, y + 40, "one device", 11, "on", "middle")
        return y + 52
    coordinates = list(np.ndindex(*canvas.mesh.axis_sizes))

    def place(k):
        return listed(f"{name} = {at}" for name, at in zip(canvas.mesh.axis_names, coordinates[k]))

    tip = lambda held: f"device {canvas.ids[held[0]]}: {place(held[0])}"  # noqa: E731
    return _draw_grid(canvas, mesh_grid(canvas.mesh), x, y + 14, tip)


def _legend(canvas: _Canvas, arrays: Sequence[Array]) -> Card:
    """What the colours of blocks on several devices mean, as far as there are such blocks."""
    grids = [arrange(a, canvas.mesh) for a in arrays]
    blocks = {tuple(block) for g in grids for _, rows in g.panels for row in rows for block in row}
    held = sorted(block for block in blocks if len(block) > 1 and not canvas.is_everywhere(block))
    shape = {} if canvas.mesh is None else dict(canvas.mesh.shape)
    longest = max(shape, key=lambda axis: shape[axis], default="")
    others = axes_name(tuple(axis for axis in shape if axis != longest))
    found: dict[str, tuple[int, ...]] = {}
    for block in held:
        found.setdefault(
            others if len({canvas.colours[k][0] for k in block}) > 1 else longest, block
        )

    def card(x: float, y: float) -> float:
        if found:
            canvas.text(x, y + 12, "blocks on several devices", 13, "faint bold", room=COLUMN)
        for k, (axis, block) in enumerate(found.items()):
            canvas.rect(x, y + 24 + 20 * k, 14, 12, stroke="#374151", **canvas.fill(block))
            canvas.text(
                x + 20, y + 34 + 20 * k, f"at one place along {axis}", 11, "faint", room=COLUMN - 20
            )
        return y + 22 + 20 * len(found)

    return card


def _array_card(canvas: _Canvas, name: str, array: Array, x: float, y: float) -> float:
    grid = arrange(array, canvas.mesh)
    canvas.text(x, y + 12, name, 12, "bold", room=COLUMN)
    on_device = f"{array.device_type} on a device" if array.spec is not None else ""
    y = canvas.lines(x, y + 12, [array.type, on_device], COLUMN)
    tip = lambda held: f"{array.device_type} on device {ranges(canvas.ids[k] for k in held)}"  # noqa: E731
    y = _draw_grid(canvas, grid, x, y, tip)
    copies = grid.shape[2]
    apart = f"each block on {copies} devices" if 1 < copies < len(canvas.ids) else ""
    return canvas.lines(x, y, [apart], COLUMN)


def _draw_grid(
    canvas: _Canvas, grid: Grid, x: float, y: float, tip: Callable[[list[int]], str]
) -> float:
    """The names of dimensions, and the blocks, in proportion as far as their numbers can be read;
    the bottom edge.
    """
    heads = [
        f"↓ {grid.rows}" if grid.rows else "",
        f"→ {grid.columns}" if grid.columns else "",
        grid.others,
    ]
    y = canvas.lines(x, y, heads, COLUMN) + 6
    rows, columns, _ = grid.shape
    down, across = (max(size, 1) for size in grid.sizes)
    tall = LONG * min(1, down / across) if grid.rows or grid.columns else SHORT
    width = min(max(LONG * min(1, across / down), columns * 3 * BLOCK), COLUMN)
    height = min(max(tall, rows * BLOCK, SHORT), LONG)
    w, h = width / columns, height / rows
    for label, cells in grid.panels:
        if label:
            y = canvas.lines(x, y - 2, [label], COLUMN) + 5
        for r, row in enumerate(cells):
            for c, held in enumerate(row):
                canvas.block(x + c * w, y + r * h, w, h, held, tip(held))
        canvas.rect(x, y, width, height, class_="edge", stroke_width=1.6)
        y += height + 4
    return y


def _draw_transfers(
    canvas: _Canvas, transfers: Sequence[Transfer], arrays: Sequence[Array], y: float
) -> None:
    """A bar for each distinct transfer, as long as its bytes, below its words and the arrays that
    it joins.
    """
    if not transfers:
        return
    canvas.text(MARGIN, y + 12, "what moves, in the order of the program", 13, "faint bold")
    kinds = {False: ("sent", "for the function"), True: ("back", "for its derivative")}
    if len({t.derivative for t in transfers}) > 1:
        for k, (kind, meaning) in enumerate(kinds.values()):
            canvas.rect(MARGIN + 150 * k, y + 24, 14, 8, class_=kind)
            canvas.text(MARGIN + 150 * k + 20, y + 32, meaning, 11, "faint")
        y += 20
    y += 16
    rows = alike_transfers(transfers)
    largest = max(max(sent for *_, sent in rows), 1)
    for t, times, sent in rows[:MAX_TRANSFERS]:
        joined = [name for name, a in alike(arrays) if {*a.axes} & {*t.axes}]
        y = canvas.lines(MARGIN, y + 4, [_described(t, times, sent)], ROOM, "")
        y = canvas.lines(
            MARGIN, y - 1, [f"joins parts of {listed(joined)}"] if joined else [], ROOM
        )
        canvas.rect(MARGIN, y + 5, max(ROOM * sent / largest, 2), 6, class_=kinds[t.derivative][0])
        y += 12
    if len(rows) > MAX_TRANSFERS:
        canvas.lines(
            MARGIN, y, [f"... and {len(rows) - MAX_TRANSFERS} more: see plan.transfers"], ROOM
        )


def _described(t: Transfer, times: int | None, sent: int) -> str:
    """``all-reduce of batch over x: 1.5 KiB, 3 times (step.py:12)``"""
    names = f" of {listed(t.axes)}" if t.axes else ""
    often = ", each iteration" if times is None else f", {times} times" if times > 1 else ""
    where = f" ({t.where})" if t.where else ""
    return f"{t.kind}{names} over {listed(t.mesh_axes)}: {show_bytes(sent)}{often}{where}"


@svg.register
def _(found: Candidates) -> str:
    """Two bars for each assignment that can be used: what a device holds, and all that it sends."""
    canvas, y = _Canvas(None), MARGIN + 12
    rows = [(c, c.bytes_held or 0, sum(c.bytes_sent.values())) for c in found if c.refused is None]
    for k, (kind, meaning) in enumerate((("sent", "bytes held"), ("back", "bytes sent"))):
        canvas.rect(MARGIN + 150 * k, y - 8, 14, 8, class_=kind)
        canvas.text(MARGIN + 150 * k + 20, y, meaning, 11, "faint")
    largest = max([max(held, sent) for _, held, sent in rows], default=1)
    for c, held, sent in rows[:MAX_TRANSFERS]:
        words = f"{c.name}: holds {show_bytes(held)}, sends {show_bytes(sent)}"
        y = canvas.lines(
            MARGIN, y + 8, [words + ", dominated" * c.dominated], ROOM, "faint" * c.dominated
        )
        for kind, count in (("sent", held), ("back", sent)):
            canvas.rect(MARGIN, y + 5, max(ROOM * count / largest, 1), 5, class_=kind)
            y += 6
    if len(rows) > MAX_TRANSFERS:
        canvas.lines(
            MARGIN,
            y + 4,
            [f"... and {len(rows) - MAX_TRANSFERS} more: see found[{MAX_TRANSFERS}:]"],
            ROOM,
        )
    canvas.right = PAGE - MARGIN
    return canvas.document("what each assignment holds and sends")
