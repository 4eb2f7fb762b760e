"""Pictures of a plan: how each argument and result lies on the devices, and what moves between them.

An array is a grid of the blocks that devices hold, coloured by device; the mesh is drawn beside it in the same
colours.  A block on several devices has the hue that their colours share, or grey, and its array is drawn as a stack.
A block on all devices is plain, and shows how many devices there are.  Below, an arrow shows each transfer, in the
order of the program.  :func:`svg` draws the picture, :func:`text` writes it for a terminal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from xmap_compat import _jax
from xmap_compat.tools.grid import Grid, alike, arrange, corner, device_ids, mesh_grid, mesh_title, ranges
from xmap_compat.tools.plan import CallPlan
from xmap_compat.tools.search import Candidates
from xmap_compat.tools.steps import StepPlan
from xmap_compat.tools.text import (
    WIDTH,
    escape,
    listed,
    show_bytes,
    show_spec,
    wrapped,
)
from xmap_compat.tools.transfers import Transfer, alike_transfers

# --------------------------------------------------------------------------- characters

MAX_ROWS = 20


def text(plan: CallPlan) -> str:
    """The picture of a plan in characters: blocks with the devices that hold them."""
    ids, mesh = device_ids(plan.mesh), corner(plan.mesh)
    parts = ["one device"] if mesh is None else [_grid_text(mesh_title(plan.mesh), mesh_grid(mesh), ids)]
    for name, array in (*alike(plan.arguments), *alike(plan.results)):
        title = f"{name}: {array.type}, on each device {array.device_type}"
        parts.append(_grid_text(title, arrange(array, mesh), ids))
    return "\n\n".join(parts)


def _grid_text(title: str, grid: Grid, ids: Sequence[int]) -> str:
    lines: list[str] = []
    for label, panel in grid.panels:
        cells = [[ranges(ids[k] for k in held) for held in row] for row in panel]
        lines += [*filter(None, [label]), *_boxes(cells, grid.rows, grid.columns)]
    lines += filter(None, [grid.others])
    return "\n".join([*wrapped(title, WIDTH), *(f"  {line}" for line in lines)])


def _boxes(cells: Sequence[Sequence[str]], row_label: str, column_label: str) -> Iterator[str]:
    """A grid of boxes with a label over it and one to the left of its middle."""
    room = WIDTH - 4 - len(row_label)
    width = max(len(cell) for row in cells for cell in row) + 2
    cells = _elided([_elided(row, max(room // (width + 1), 3), "..") for row in cells], MAX_ROWS, None)
    cells = [row or [".."] * len(cells[0]) for row in cells]
    columns = len(cells[0])
    width = max(width, -(-(len(column_label) + 1) // columns) - 1 if column_label else width, 3)
    lead = f"{row_label} " if row_label else ""
    margin = " " * len(lead)
    if column_label:
        yield (margin + column_label.center(columns * (width + 1) + 1)).rstrip()
    line = lambda left, joint, right: left + joint.join(["─" * width] * columns) + right  # noqa: E731
    rows = [f"│{'│'.join(cell.center(width) for cell in row)}│" for row in cells]
    body = f"\n{line('├', '┼', '┤')}\n".join(rows).split("\n")
    yield margin + line("┌", "┬", "┐")
    yield from ((lead if k == len(body) // 2 else margin) + part for k, part in enumerate(body))
    yield margin + line("└", "┴", "┘")


def _elided(items: Sequence[Any], most: int, gap: Any) -> list[Any]:
    """The first and last items around a gap if there are too many."""
    if len(items) <= most:
        return list(items)
    head = most - 1 - most // 3
    return [*items[:head], gap, *items[len(items) - most // 3 :]]


# ------------------------------------------------------------------------------ colours


Colour = tuple[float, float]  # the hue, in degrees, and the lightness, in per cent


def colours(mesh: _jax.AnyMesh | None) -> list[Colour]:
    """A colour for each device: the hue runs along the longest mesh axis, the lightness over the others."""
    if mesh is None:
        return [(215, 82)]
    shape = mesh.axis_sizes
    hues, shades = max(shape), mesh.size // max(shape)
    by_hue = np.moveaxis(np.arange(mesh.size).reshape(shape), shape.index(hues), 0)
    hue, shade = np.divmod(np.argsort(by_hue, axis=None), shades)
    lightness = 82 - 26 * shade / (shades - 1) if shades > 1 else np.full(mesh.size, 72)
    return list(zip((360 * hue / hues).tolist(), lightness.tolist()))


def shared(some: Sequence[Colour]) -> str:
    """The common part of colours: their hue and mean lightness; if hues differ, a pale grey of that lightness."""
    hues, lightness = {hue for hue, _ in some}, sum(light for _, light in some) / len(some)
    return f"hsl({some[0][0]:.0f},60%,{lightness:.0f}%)" if len(hues) == 1 else f"hsl(0,0%,{50 + lightness / 2:.0f}%)"


# ---------------------------------------------------------------------------------- SVG

FONTS = "font-family:DejaVu Sans,Verdana,Helvetica,Arial,sans-serif"
STYLE = (
    f"text{{{FONTS};fill:#1f2430}}.faint{{fill:#6b7280}}.bold{{font-weight:bold}}.on{{fill:#1f2430}}"
    ".paper{fill:#ffffff}.edge{stroke:#374151;fill:none}.sheet{fill:#f3f4f6;stroke:#9ca3af}"
    ".sent{stroke:#2563eb;fill:#2563eb}.back{stroke:#c2410c;fill:#c2410c}"
    "@media (prefers-color-scheme:dark){text{fill:#e5e7eb}.faint{fill:#9ca3af}.paper{fill:#16181d}"
    ".edge{stroke:#9ca3af}.sheet{fill:#2a2e37}.sent{stroke:#60a5fa;fill:#60a5fa}.back{stroke:#fb923c;fill:#fb923c}}"
)
PAGE, MARGIN, GAP, SHEET = 1000.0, 24.0, 30.0, 5.0
MAX_CALLS, MAX_ARRAYS, MAX_TRANSFERS, MAX_WIDE, MAX_TALL = 8, 60, 30, 720.0, 480.0


class _Canvas:
    """SVG elements in the order of their painting, and the size of the drawing."""

    def __init__(self, mesh: _jax.AnyMesh | None):
        self.elements: list[str] = []
        self.mesh, self.size = corner(mesh), 1 if mesh is None else mesh.size
        self.colours, self.ids = colours(self.mesh), device_ids(mesh)
        self.right = self.bottom = 0.0

    def rect(self, x, y, w, h, title="", radius=0.0, **attributes):
        self.right, self.bottom = max(self.right, x + w), max(self.bottom, y + h)
        tip = f"<title>{escape(title)}</title>" if title else ""
        more = "".join(f' {name.strip("_").replace("_", "-")}="{value}"' for name, value in attributes.items())
        size = f'width="{w:.1f}" height="{h:.1f}" rx="{radius:g}"'
        self.elements.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size}{more}>{tip}</rect>')

    def path(self, data: str, kind: str, width: float = 1.5, filled: bool = False):
        paint = "" if filled else ' style="fill:none"'
        self.elements.append(f'<path d="{data}" class="{kind}" stroke-width="{width:g}"{paint}/>')

    def text(self, x, y, content, size=12.0, kind="", anchor="start"):
        if not content:
            return
        if anchor == "start":
            self.right, self.bottom = max(self.right, x + _text_width(content, size)), max(self.bottom, y)
        marks = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
        self.elements.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}"{marks}>{escape(content)}</text>')

    def label(self, holders: Sequence[int]) -> str:
        """The numbers of devices; if these are all devices, how many there are."""
        return f"x{self.size}" if len(holders) == len(self.ids) > 1 else ranges(self.ids[k] for k in holders)

    def block(self, x, y, w, h, holders, title):
        """A rectangle in the colour that devices share, with their numbers where there is room."""
        everywhere, label = len(holders) == len(self.ids) > 1, self.label(holders)
        fill = {"class_": "sheet"} if everywhere else {"fill": shared([self.colours[k] for k in holders])}
        self.rect(x, y, w, h, title, stroke="#374151", **fill)
        if len(self.ids) > 1 and _text_width(label, 11.5) <= w and h >= 13:
            self.text(x + w / 2, y + h / 2 + 4, label, 11.5, "" if everywhere else "on", "middle")

    def document(self, title: str) -> str:
        size = f"{self.right + MARGIN:.0f}", f"{self.bottom + MARGIN:.0f}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}"'
            f' viewBox="0 0 {size[0]} {size[1]}" role="img"><title>{escape(title)}</title><style>{STYLE}</style>'
            f'<rect width="{size[0]}" height="{size[1]}" class="paper" rx="8"/>'
            f"{''.join(self.elements)}</svg>\n"
        )


def _text_width(content: str, size: float) -> float:
    """The approximate width in the fonts that we ask for."""
    return len(content) * size * 0.6


@functools.singledispatch
def svg(plan: Any) -> str:
    """The picture of a call's plan as a self-contained SVG document; steps and searches are registered below."""
    return _drawn(plan, [plan], "arrays on devices")


@svg.register
def _(plan: StepPlan) -> str:
    """The arrays of the calls of a step, and an arrow for each of its transfers, in the order of the program."""
    return _drawn(plan, plan.calls, "what moves between devices")


def _drawn(plan: CallPlan | StepPlan, calls: Sequence[CallPlan], what: str) -> str:
    """The mesh, beside it the arguments and results of calls that use it, and below it the transfers."""
    canvas = _Canvas(plan.mesh)
    _draw_mesh(canvas, mesh_title(plan.mesh), MARGIN, MARGIN + 40)
    left, y = canvas.right + 36, MARGIN + 40
    canvas.text(MARGIN, MARGIN + 14, plan.function, 17, "bold")
    placed = [call for call in calls if call.mesh == plan.mesh]
    for call in placed[:MAX_CALLS]:
        of, at = ("", "plan") if call is plan else (f" of {call.function}", f"plan.calls[{calls.index(call)}]")
        for title, arrays in (("arguments", call.arguments), ("results", call.results)):
            if arrays:
                canvas.text(left, y + 12, title + of, 13, "faint bold")
                y = _draw_arrays(canvas, arrays, f"{at}.{title}", left, y + 28) + 20
    rest = [call.function for call in (*placed[MAX_CALLS:], *(call for call in calls if call.mesh != plan.mesh))]
    if rest:
        y += 20
        canvas.text(left, y - 10, f"not drawn: the arrays of {listed(dict.fromkeys(rest))}", 12, "faint")
    _draw_transfers(canvas, plan.transfers, plan.mesh, MARGIN, max(y, canvas.bottom + 24))
    return canvas.document(f"{plan.function}: {what}")


def _draw_mesh(canvas, title, x, y) -> None:
    """Draw each device as a block."""
    canvas.text(x, y + 12, title, 13, "faint bold")
    mesh = canvas.mesh
    if mesh is None:
        canvas.rect(x, y + 28, 96, 32, radius=4, fill=shared(canvas.colours))
        canvas.text(x + 48, y + 49, "one device", 12, "on", "middle")
        return
    grid = mesh_grid(mesh, upright=True)
    coordinates = list(np.ndindex(*mesh.axis_sizes))
    place = lambda k: listed(f"{name} = {at}" for name, at in zip(mesh.axis_names, coordinates[k]))  # noqa: E731
    _draw_grid(canvas, grid, (x, y + 28, 44.0, 32.0), lambda held: f"device {canvas.ids[held[0]]}: {place(held[0])}")


def _draw_arrays(canvas, arrays, where, left, y) -> float:
    """Draw arrays side by side, in as many lines as needed; return the bottom edge."""
    x, line_bottom = left, y
    drawn = alike(arrays)
    for name, array in drawn[:MAX_ARRAYS]:
        grid = arrange(array, canvas.mesh)
        each = "" if array.spec is None else f", {array.device_type} on each device"
        heads = [name, f"{array.type}{each}", "" if array.spec is None else show_spec(array.spec)]
        labels = [canvas.label(held) for _, rows in grid.panels for row in rows for held in row]
        columns = grid.shape[1]
        w = min(max(*(_text_width(label, 11.5) + 14 for label in labels), 34), MAX_WIDE / columns)
        width = max(_indent(grid) + columns * w, *(_text_width(head, 12.5) for head in (*heads, grid.columns)))
        if x > left and x + width > PAGE - MARGIN:
            x, y = left, line_bottom + 22
        canvas.text(x, y + 12, name, 13, "bold")
        for k, head in enumerate(heads[1:]):
            canvas.text(x, y + 28 + 15 * k, head, 11, "faint")
        tip = lambda held: f"{array.device_type} on device {ranges(canvas.ids[k] for k in held)}"  # noqa: B023, E731
        line_bottom = max(line_bottom, _draw_grid(canvas, grid, (x, y + 50, w, 26.0), tip))
        x += width + GAP
    if len(drawn) > MAX_ARRAYS:
        line_bottom += 22
        canvas.text(left, line_bottom, f"... and {len(drawn) - MAX_ARRAYS} more kinds: see {where}", 12, "faint")
    return line_bottom


def _indent(grid: Grid) -> float:
    return _text_width(grid.rows, 11.5) + 8 if grid.rows else 0.0


def _draw_grid(canvas, grid: Grid, place, tip: Callable[[list[int]], str]) -> float:
    """Draw a grid of blocks of a width and a height, or smaller ones where they are many; return the bottom edge."""
    x, y, w, h = place
    rows, columns, copies = grid.shape
    w, h, x0, sheets = min(w, MAX_WIDE / columns), min(h, MAX_TALL / rows), x + _indent(grid), min(copies - 1, 3)
    width, height = columns * w, rows * h
    for label, cells in grid.panels:
        if label:
            canvas.text(x, y + 10, label, 11, "faint")
            y += 16
        if grid.columns:
            canvas.text(x0, y + 11, grid.columns, 11.5)
            y += 17
        canvas.text(x, y + height / 2 + 4, grid.rows, 11.5)
        for sheet in range(sheets, 0, -1):
            canvas.rect(x0 + SHEET * sheet, y + SHEET * sheet, width, height, class_="sheet")
        for r, row in enumerate(cells):
            for c, held in enumerate(row):
                canvas.block(x0 + c * w, y + r * h, w, h, held, tip(held))
        canvas.rect(x0, y, width, height, class_="edge", stroke_width=1.6)
        y += height + SHEET * sheets + 8
    canvas.text(x, y + 8, grid.others, 11, "faint")
    return y + 16 if grid.others else y


# ---- what moves

LEGEND: Sequence[tuple[str, bool, str, Callable[[Transfer], bool]]] = (
    ("sent", False, "for the function", lambda t: not t.derivative),
    ("back", False, "for its derivative", lambda t: t.derivative),
    ("sent", True, "ppermute: one way", lambda t: t.kind == "ppermute"),
)


def _draw_transfers(canvas, transfers: Sequence[Transfer], mesh, x, y) -> None:
    """Draw each distinct transfer as an arrow across the devices of its mesh axes, in the order of the program."""
    if mesh is None or not transfers:
        return
    canvas.text(x, y + 12, "what moves, in the order of the program", 13, "faint bold")
    y += 26
    for kind, one_way, meaning, applies in LEGEND:
        if any(map(applies, transfers)):
            _arrow(canvas, x, y + 8, 40, kind, one_way, 2)
            canvas.text(x + 52, y + 12, meaning, 11, "faint")
            x += 190
    x, y = MARGIN, y + 24
    lanes = {axis: x + k * 110 for k, axis in enumerate(mesh.axis_names)}
    for axis, at in lanes.items():
        canvas.text(at, y + 8, f"{axis} {mesh.shape[axis]}", 12, "bold")
    rows = alike_transfers(transfers)
    largest = max(sent for *_, sent in rows)
    for t, times, sent in rows[:MAX_TRANSFERS]:
        y += 24
        weight = 1 + 4 * math.log1p(sent) / max(math.log1p(largest), 1)
        for axis in t.mesh_axes:
            _arrow(canvas, lanes[axis], y + 4, 84, "back" if t.derivative else "sent", t.kind == "ppermute", weight)
        canvas.text(x + len(lanes) * 110, y + 8, _described(t, times, sent), 11.5)
    if len(rows) > MAX_TRANSFERS:
        canvas.text(x, y + 28, f"... and {len(rows) - MAX_TRANSFERS} more: see plan.transfers", 12, "faint")


def _described(t: Transfer, times: int | None, sent: int) -> str:
    """``all-reduce of batch over x: 1.5 KiB, 3 times (step.py:12)``"""
    names = f" of {listed(t.axes)}" if t.axes else ""
    turns = ", each turn" if times is None else f", {times} times" if times > 1 else ""
    where = f" ({t.where})" if t.where else ""
    return f"{t.kind}{names} over {listed(t.mesh_axes)}: {show_bytes(sent)}{turns}{where}"


def _arrow(canvas, x, y, length, kind, one_way, weight):
    canvas.path(f"M{x:.1f} {y:.1f}H{x + length:.1f}", kind, weight)
    for tip, back in ((x + length + 4, -6), *([] if one_way else [(x - 4, 6)])):
        size = 3 + weight / 2
        canvas.path(f"M{tip:.1f} {y:.1f}l{back * size / 4:.1f} {-size:.1f}v{2 * size:.1f}z", kind, 0, filled=True)


@svg.register
def _(found: Candidates) -> str:
    """The candidates as points of time and memory, with the front."""
    usable = [c for c in found if c.refused is None]
    points = [(float(c.bytes_held or 0), float(sum(c.bytes_sent.values())), c.name, not c.dominated) for c in usable]
    return _scatter(points, "bytes held", "bytes sent", lambda count: show_bytes(round(count)))


LINE = 13.0


def _scatter(
    points: Sequence[tuple[float, float, str, bool]], across: str, up: str, show: Callable[[float], str]
) -> str:
    """Points ``(x, y, name, marked)`` on logarithmic axes; marked ones are labelled with their names and joined."""
    canvas = _Canvas(None)
    width, height, left, top = 640.0, 400.0, MARGIN + 60, MARGIN + 10
    logs = np.log10([(max(x, 1e-12), max(y, 1.0)) for x, y, *_ in points] or [(1.0, 1.0)])
    low, high = logs.min(0) - 0.05, logs.max(0) + 0.05
    places = ((left, top + height) + (logs - low) / (high - low) * (width, -height)).tolist()
    canvas.rect(left, top, width, height, class_="edge")
    front = sorted(place for place, point in zip(places, points) if point[3])
    if front:
        canvas.path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in front), "sent", 1)
    ends, under = (left, left + width), top + height
    labels = [*((x - 40, x + 40, under + 16) for x in ends), (left + width / 2 - 40, left + width / 2 + 40, under + 32)]
    for (cx, cy), (x, y, name, marked) in zip(places, points):
        kind = "back" if marked else "sent"
        canvas.rect(cx - 3, cy - 3, 6, 6, f"{name}: {show(x)}, {show_bytes(round(y))}", 3, class_=kind)
        if marked:
            until, cy = cx + 6 + _text_width(name, 11), cy - 5
            while any(abs(cy - y) < LINE and cx + 6 < end and begin < until for begin, end, y in labels):
                cy += 1  # below the names that are already there
            labels.append((cx + 6, until, cy))
            canvas.text(cx + 6, cy, name, 11)
    for edge, k in ((low, 0), (high, 1)):
        canvas.text(ends[k], under + 16, show(10 ** edge[0]), 11, "faint", "middle")
        canvas.text(MARGIN, top + height * (1 - k) + 4, show_bytes(round(10 ** edge[1])), 11, "faint")
    canvas.text(left + width / 2, under + 32, across, 12, "bold", "middle")
    canvas.text(left, top - 8, up, 12, "bold")
    canvas.bottom += 30
    return canvas.document(f"{across} and {up}")
