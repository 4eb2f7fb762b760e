"""Pictures of a plan: how each argument and result lies on the devices.

An array is a grid of the blocks that devices hold, coloured by device; the mesh stands beside it in the same
colours.  A block with several holders is striped in their colours, and the array is drawn as a stack.
:func:`svg` draws it, :func:`text` writes it for a terminal.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xmap_compat.tools.text import MANY, escape, show_spec, terminal_width, with_more, wrapped

if TYPE_CHECKING:
    import jax

    from xmap_compat.tools.plan import Array, CallPlan

Block = tuple[int, ...]

# ------------------------------------------------------------------------------ layout


@dataclasses.dataclass(frozen=True)
class Dim:
    """One dimension of an array in a picture.

    Attributes:
      label: ``batch 12``, or the size alone where it is positional.
      named: whether it is a named axis.
      split: the mesh axes that split it.
      size: its elements.
      parts: its blocks.
    """

    label: str
    named: bool
    split: tuple[str, ...]
    size: int
    parts: int

    @property
    def title(self) -> str:
        return f"{self.label} over {', '.join(self.split)}" if self.split else self.label


@dataclasses.dataclass(frozen=True)
class Panel:
    """A rectangle of blocks: ``cells[row][column]`` are the mesh positions that hold the block.

    Attributes:
      label: which index of the dimensions that are neither rows nor columns; empty if there is one panel.
    """

    label: str
    cells: tuple[tuple[tuple[int, ...], ...], ...]


@dataclasses.dataclass(frozen=True)
class Grid:
    """An array laid out on paper.

    Attributes:
      rows, columns: the dimensions that run down and across; None where the array has no such dimension.
      panels: one for each block index of the other dimensions.
      others: the other dimensions.
    """

    rows: Dim | None
    columns: Dim | None
    panels: tuple[Panel, ...]
    others: tuple[Dim, ...]

    @property
    def copies(self) -> int:
        """How many devices hold each block."""
        return len(self.panels[0].cells[0][0])


def block_holders(array: Array, mesh: jax.sharding.Mesh | None) -> dict[Block, list[int]]:
    """For each block of an array (its index in every dimension) the positions in the mesh that hold it."""
    if mesh is None:
        return {(0,) * len(array.shape): [0]}
    holders: dict[Block, list[int]] = {}
    for position, coordinates in enumerate(np.ndindex(mesh.devices.shape)):
        at = dict(zip(mesh.axis_names, coordinates))
        block = []
        for axes in _split_axes(array):
            index = 0
            for axis in axes:
                index = index * mesh.shape[axis] + at[axis]
            block.append(index)
        holders.setdefault(tuple(block), []).append(position)
    return holders


def _split_axes(array: Array) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension."""
    entries = [*(array.spec or ()), *[None] * len(array.shape)][: len(array.shape)]
    return [() if e is None else e if isinstance(e, tuple) else (e,) for e in entries]


def arrange(array: Array, mesh: jax.sharding.Mesh | None) -> Grid:
    """Choose rows and columns (dimensions that are split, then named ones) and cut the array into blocks."""
    holders = block_holders(array, mesh)
    parts = [len({block[k] for block in holders}) for k in range(len(array.shape))]
    dims = [
        Dim(str(size) if name is None else f"{name} {size}", name is not None, axes, size, n)
        for name, size, axes, n in zip(array.axes, array.shape, _split_axes(array), parts)
    ]
    by_weight = sorted(range(len(dims)), key=lambda k: (parts[k] == 1, array.axes[k] is None, k))
    shown = sorted(by_weight[:2])
    column = shown[-1] if shown else None
    row = shown[0] if len(shown) > 1 else None
    others = [k for k in range(len(dims)) if k not in shown]
    panels = []
    for index in itertools.product(*(range(parts[k]) for k in others)):
        fixed = dict(zip(others, index))
        label = ", ".join(f"{dims[k].label.split()[0]} part {i}" for k, i in fixed.items() if parts[k] > 1)
        cells = [
            [tuple(holders[_block(len(dims), {**fixed, row: r, column: c})]) for c in range(_parts(dims, column))]
            for r in range(_parts(dims, row))
        ]
        panels.append(Panel(label, tuple(map(tuple, cells))))
    at = lambda k: None if k is None else dims[k]  # noqa: E731
    return Grid(at(row), at(column), tuple(panels), tuple(dims[k] for k in others))


def alike(arrays: Sequence[Array]) -> list[tuple[str, Array]]:
    """What to draw, with a name for it: each array, or of many those that lie alike once."""
    groups: dict[Any, list[Array]] = {}
    for k, array in enumerate(arrays):
        groups.setdefault(dataclasses.replace(array, root="", keys=()) if len(arrays) > MANY else k, []).append(array)
    return [(with_more([a.path for a in group]), group[0]) for group in groups.values()]


def _parts(dims, k):
    return 1 if k is None else dims[k].parts


def _block(ndim, at) -> Block:
    return tuple(at.get(k, 0) for k in range(ndim))


def _device_ids(mesh: jax.sharding.Mesh | None) -> list[int]:
    return [0] if mesh is None else [d.id for d in mesh.devices.flat]


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


# --------------------------------------------------------------------------- characters

MAX_ROWS = 20


def text(plan: CallPlan) -> str:
    """The picture of a plan in characters: blocks with the devices that hold them."""
    ids = _device_ids(plan.mesh)
    parts = []
    if plan.mesh is None:
        parts.append("one device")
    else:
        parts.append("\n".join(["mesh", *_indent(_mesh_text(plan.mesh))]))
    for arrays in (plan.arguments, plan.results):
        for name, array in alike(arrays):
            head = f"{name}: {array.type}, on each device {array.device_type}"
            parts.append("\n".join([*wrapped(head, terminal_width()), *_indent(_array_text(array, plan.mesh, ids))]))
    return "\n\n".join(parts)


def _indent(lines):
    return ["  " + line for line in lines]


def _mesh_text(mesh) -> Iterator[str]:
    names, shape = list(mesh.axis_names), mesh.devices.shape
    ids = np.array(_device_ids(mesh)).reshape(shape)
    rows, columns = (None, names[0]) if len(names) == 1 else names[-2:]
    lead = shape[:-2] if len(names) > 1 else ()
    for index in np.ndindex(*lead):
        if index:
            yield ", ".join(f"{n} = {i}" for n, i in zip(names, index))
        cells = [[str(d) for d in row] for row in np.atleast_2d(ids[index])]
        row_label = "" if rows is None else f"{rows} {mesh.shape[rows]}"
        yield from _boxes(cells, row_label, f"{columns} {mesh.shape[columns]}")


def _array_text(array, mesh, ids) -> Iterator[str]:
    grid = arrange(array, mesh)
    for panel in grid.panels:
        if panel.label:
            yield panel.label
        cells = [[ranges(ids[k] for k in holders) for holders in row] for row in panel.cells]
        yield from _boxes(cells, grid.rows.title if grid.rows else "", grid.columns.title if grid.columns else "")
    if grid.others:
        yield _others(grid)


def _others(grid: Grid) -> str:
    return f"further dimensions: {', '.join(d.title for d in grid.others)}"


def _boxes(cells: Sequence[Sequence[str]], row_label: str, column_label: str) -> Iterator[str]:
    """A grid of boxes with a label over it and one to the left of it."""
    room = terminal_width() - 4 - len(row_label)
    width = max(len(cell) for row in cells for cell in row) + 2
    cells = _elided([_elided(row, max(room // (width + 1), 3), "..") for row in cells], MAX_ROWS, None)
    cells = [row or [".."] * len(cells[0]) for row in cells]
    width = max(width, -(-(len(column_label) + 1) // len(cells[0])) - 1 if column_label else width, 3)
    columns = len(cells[0])
    bar = "─" * width
    margin = " " * (len(row_label) + 1 if row_label else 0)
    if column_label:
        yield (margin + column_label.center(columns * (width + 1) + 1)).rstrip()
    middle = len(cells) // 2 if len(cells) % 2 else None
    rows = [margin + "┌" + "┬".join([bar] * columns) + "┐"]
    for k, row in enumerate(cells):
        lead = row_label + " " if row_label and k == middle else margin
        rows.append(lead + "│" + "│".join(cell.center(width) for cell in row) + "│")
        if k + 1 < len(cells):
            lead = row_label + " " if row_label and middle is None and k + 1 == len(cells) // 2 else margin
            rows.append(lead + "├" + "┼".join([bar] * columns) + "┤")
    yield from rows
    yield margin + "└" + "┴".join([bar] * columns) + "┘"


def _elided(items: Sequence[Any], most: int, gap: Any) -> list[Any]:
    """The first and last items around a gap if there are too many."""
    if len(items) <= most:
        return list(items)
    head = most - 1 - most // 3
    return [*items[:head], gap, *items[len(items) - most // 3 :]]


# ------------------------------------------------------------------------------ colours


def colours(mesh: jax.sharding.Mesh | None) -> list[str]:
    """A colour for each device: the hue runs along the longest mesh axis, the lightness over the others."""
    if mesh is None:
        return ["#c9d1dc"]
    shape = mesh.devices.shape
    longest = int(np.argmax(shape))
    hues, shades = shape[longest], max(1, math.prod(shape) // max(shape[longest], 1))
    found = []
    for coordinates in np.ndindex(*shape):
        rest = [(c, n) for k, (c, n) in enumerate(zip(coordinates, shape)) if k != longest]
        shade = 0
        for c, n in rest:
            shade = shade * n + c
        lightness = 0.79 if shades == 1 else 0.88 - 0.22 * shade / (shades - 1)
        found.append(_oklch(lightness, 0.105, 30 + 360 * coordinates[longest] / hues))
    return found


def _oklch(lightness: float, chroma: float, hue: float) -> str:
    """A colour of the OKLCH space (equal steps look equal) as sRGB.  Source: Bjorn Ottosson's Oklab (2020)."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    encoded = (12.92 * v if v <= 0.0031308 else 1.055 * max(v, 0) ** (1 / 2.4) - 0.055 for v in linear)
    return "#" + "".join(f"{round(255 * min(max(v, 0), 1)):02x}" for v in encoded)


# ---------------------------------------------------------------------------------- SVG

INK, FAINT, LINE, PAPER = "#1f2430", "#6b7280", "#374151", "#ffffff"
SANS = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
MONO = "DejaVu Sans Mono, Menlo, Consolas, monospace"
PAGE, MARGIN, GAP = 1000.0, 24.0, 30.0
MAX_ARRAYS, MAX_WIDE, MAX_TALL = 60, 720.0, 480.0


class _Canvas:
    """SVG elements in the order of their painting."""

    def __init__(self, mesh: jax.sharding.Mesh | None, prefix: str):
        self.elements: list[str] = []
        self.patterns: dict[tuple[tuple[int, ...], int], str] = {}
        self.colours = colours(mesh)
        self.prefix = prefix

    def rect(self, x, y, w, h, fill, stroke=LINE, width=1.0, radius=0.0, title="", opacity=1.0):
        tip = f"<title>{escape(title)}</title>" if title else ""
        self.elements.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{radius:g}" fill="{fill}"'
            f' stroke="{stroke}" stroke-width="{width:g}" opacity="{opacity:g}"' + (f">{tip}</rect>" if tip else "/>")
        )

    def line(self, x1, y1, x2, y2, stroke, width):
        self.elements.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
            f' stroke="{stroke}" stroke-width="{width:g}"/>'
        )

    def text(self, x, y, content, size=12.0, fill=INK, anchor="start", bold=False, mono=False, turned=False):
        family, weight = MONO if mono else SANS, "bold" if bold else "normal"
        turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
        self.elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-family="{family}" font-size="{size:g}" font-weight="{weight}"'
            f' fill="{fill}" text-anchor="{anchor}"{turn}>{escape(content)}</text>'
        )

    def fill(self, holders: Sequence[int], extent: float = 0.0) -> str:
        """The colour of a device, or stripes in the colours of several, all seen within ``extent``."""
        if len(holders) == 1:
            return self.colours[holders[0]]
        key = tuple(holders), round(min(max(extent / len(holders) * 0.9, 3), 12))
        if key not in self.patterns:
            self.patterns[key] = f"{self.prefix}-stripes-{len(self.patterns)}"
        return f"url(#{self.patterns[key]})"

    def pattern_definitions(self) -> str:
        drawn = []
        for (holders, stripe), name in self.patterns.items():
            bars = "".join(
                f'<rect x="{k * stripe}" y="0" width="{stripe + 0.5}" height="40" fill="{self.colours[d]}"/>'
                for k, d in enumerate(holders)
            )
            drawn.append(
                f'<pattern id="{name}" width="{stripe * len(holders)}" height="40" patternUnits="userSpaceOnUse"'
                f' patternTransform="rotate(45)">{bars}</pattern>'
            )
        return f"<defs>{''.join(drawn)}</defs>" if drawn else ""


def _text_width(content: str, size: float, mono: bool = False, bold: bool = False) -> float:
    """Roughly, for the fonts that we ask for."""
    return len(content) * size * (0.605 if mono else 0.64 if bold else 0.58)


def svg(plan: CallPlan) -> str:
    """The picture of a plan as a self-contained SVG document."""
    prefix = f"xmap-{abs(hash((plan.function, plan.arguments, plan.results))) % 16**8:08x}"
    canvas = _Canvas(plan.mesh, prefix)
    ids = _device_ids(plan.mesh)
    canvas.text(MARGIN, MARGIN + 14, plan.function, 17, bold=True)
    top = MARGIN + 40
    mesh_right, mesh_bottom = _draw_mesh(canvas, plan.mesh, ids, MARGIN, top)
    left = mesh_right + 36
    bottom, right = mesh_bottom, left
    y = top
    for title, arrays in (("arguments", plan.arguments), ("results", plan.results)):
        if not arrays:
            continue
        canvas.text(left, y + 12, title, 13, FAINT, bold=True)
        y, reached = _draw_arrays(canvas, arrays, plan.mesh, ids, left, y + 28)
        right, bottom = max(right, reached), max(bottom, y)
        y += 20
    canvas.line(mesh_right + 18, top, mesh_right + 18, bottom, "#e5e7eb", 1.5)
    width, height = right + MARGIN, bottom + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
        f' viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
        f"<title>{escape(plan.function)}: arrays on devices</title>"
        f'{canvas.pattern_definitions()}<rect width="{width:.0f}" height="{height:.0f}" fill="{PAPER}" rx="8"/>'
        f"{''.join(canvas.elements)}</svg>\n"
    )


# ---- the mesh


def _draw_mesh(canvas, mesh, ids, x, y) -> tuple[float, float]:
    """Draw the devices as tiles; the right and bottom edge."""
    canvas.text(x, y + 12, "devices" if mesh is None else "mesh", 13, FAINT, bold=True)
    y += 28
    if mesh is None:
        canvas.rect(x, y, 96, 32, canvas.colours[0], radius=4)
        canvas.text(x + 48, y + 21, "one device", 12, anchor="middle")
        return x + 96, y + 32
    names, shape = mesh.axis_names, mesh.devices.shape
    panels = list(np.ndindex(*shape[:-2])) if len(shape) > 2 else [()]
    rows, columns = (shape[0], 1) if len(shape) == 1 else shape[-2:]
    tile_w, tile_h = min(44, 480 / columns), min(32, MAX_TALL / rows)
    positions = np.arange(mesh.size).reshape((*shape[:-2], rows, columns))
    right = x
    for index in panels:
        if index:
            canvas.text(x, y + 10, ", ".join(f"{n} = {i}" for n, i in zip(names, index)), 11, FAINT)
            y += 18
        x0, y0 = x + 20, y + (20 if len(shape) > 1 else 0)
        row_name = names[0] if len(shape) == 1 else names[-2]
        if len(shape) > 1:
            canvas.text(x0 + columns * tile_w / 2, y0 - 7, f"{names[-1]} {columns}", 12, anchor="middle", bold=True)
        canvas.text(x + 10, y0 + rows * tile_h / 2, f"{row_name} {rows}", 12, anchor="middle", bold=True, turned=True)
        for r, c in np.ndindex(rows, columns):
            position = int(positions[index][r, c])
            coordinates = np.unravel_index(position, shape)
            where = ", ".join(f"{n} = {k}" for n, k in zip(names, coordinates))
            tip = f"device {ids[position]}: {where}"
            left, top, inset = x0 + c * tile_w, y0 + r * tile_h, min(1.5, tile_w / 8, tile_h / 8)
            size = tile_w - 2 * inset, tile_h - 2 * inset
            colour, radius = canvas.fill([position]), min(4, 2.5 * inset)
            canvas.rect(left + inset, top + inset, *size, colour, width=min(1, inset), radius=radius, title=tip)
            if min(tile_w / 26, tile_h / 14) >= 1:
                canvas.text(left + tile_w / 2, top + tile_h / 2 + 4.5, ids[position], 12.5, anchor="middle")
        right = max(right, x0 + columns * tile_w)
        y = y0 + rows * tile_h + 14
    return right, y - 14


# ---- arrays


@dataclasses.dataclass(frozen=True)
class _Card:
    """An array with its place for captions and labels."""

    array: Array
    grid: Grid
    captions: tuple[str, str, str]
    cell_w: float
    cell_h: float
    left: float
    above: float
    width: float
    height: float


SHEET = 5.0
HEAD = 56.0


def _card(name: str, array: Array, mesh, ids) -> _Card:
    grid = arrange(array, mesh)
    cells = grid.panels[0].cells
    labels = [ranges(ids[k] for k in holders) for panel in grid.panels for row in panel.cells for holders in row]
    columns, rows = len(cells[0]), len(cells)
    widest = min(max(_text_width(label, 11.5) for label in labels) + 14, 120)
    cell_w = max(_extent(grid.columns, 90, 260) / columns, min(max(widest, 26), MAX_WIDE / columns))
    cell_h = max(_extent(grid.rows, 34, 180) / rows, min(24, MAX_TALL / rows)) if grid.rows else 34.0
    if grid.columns is None:
        cell_w = max(widest, 40)
    spec = "" if array.spec is None else show_spec(array.spec)
    each = "" if array.spec is None else f", {array.device_type} on each device"
    captions = (name, f"{array.type}{each}", spec)
    left = 24.0 if grid.rows else 0.0
    above = 20.0 if grid.columns else 0.0
    across = columns * cell_w + left + SHEET * min(grid.copies - 1, 3)
    titles = [_text_width(captions[0], 13, bold=True), *(_text_width(c, 11, mono=True) for c in captions[1:])]
    labels_w = _text_width(grid.columns.title, 11.5) + left if grid.columns else 0
    tall = _panel_height(grid, rows, cell_h, above) * len(grid.panels)
    below = 16.0 * bool(grid.others)
    return _Card(
        array, grid, captions, cell_w, cell_h, left, above, max(across, labels_w, *titles), HEAD + tall + below
    )


def _extent(dim: Dim | None, least: float, most: float) -> float:
    return least if dim is None else min(max(11.0 * dim.size, least), most)


def _panel_height(grid, rows, cell_h, above):
    label = 16.0 if grid.panels[0].label else 0.0
    height, over = rows * cell_h, _overhang(grid, rows * cell_h)
    return label + max(above, over) + height + max(SHEET * min(grid.copies - 1, 3), over) + 8


def _overhang(grid, height):
    """How far the turned label of the rows reaches beyond the array, at each end."""
    return max(_text_width(grid.rows.title, 11.5) - height, 0) / 2 if grid.rows else 0.0


def _draw_arrays(canvas, arrays, mesh, ids, left, y) -> tuple[float, float]:
    """Draw arrays side by side, in as many lines as needed; the bottom and right edge."""
    x, line_bottom, right = left, y, left
    drawn = alike(arrays)
    for name, array in drawn[:MAX_ARRAYS]:
        card = _card(name, array, mesh, ids)
        if x > left and x + card.width > PAGE - MARGIN:
            x, y = left, line_bottom + 22
        _draw_card(canvas, card, ids, x, y)
        line_bottom = max(line_bottom, y + card.height)
        right = max(right, x + card.width)
        x += card.width + GAP
    if len(drawn) > MAX_ARRAYS:
        line_bottom += 22
        canvas.text(left, line_bottom, f"... and {len(drawn) - MAX_ARRAYS} more kinds", 12, FAINT)
    return line_bottom, right


def _draw_card(canvas, card: _Card, ids, x, y):
    canvas.text(x, y + 12, card.captions[0], 13, bold=True)
    canvas.text(x, y + 28, card.captions[1], 11, FAINT, mono=True)
    canvas.text(x, y + 43, card.captions[2], 11, FAINT, mono=True)
    y += HEAD
    grid = card.grid
    rows = len(grid.panels[0].cells)
    step = _panel_height(grid, rows, card.cell_h, card.above)
    for panel in grid.panels:
        _draw_panel(canvas, card, panel, ids, x, y)
        y += step
    if grid.others:
        canvas.text(x, y + 8, _others(grid), 11, FAINT)


def _draw_panel(canvas, card: _Card, panel: Panel, ids, x, y):
    grid, cells = card.grid, panel.cells
    if panel.label:
        canvas.text(x, y + 10, panel.label, 11, FAINT)
        y += 16
    width, height = len(cells[0]) * card.cell_w, len(cells) * card.cell_h
    x0, y0 = x + card.left, y + max(card.above, _overhang(grid, height))
    if grid.columns:
        # Over the array, or from its left edge where the label is wider.
        wide = _text_width(grid.columns.title, 11.5) > width
        at, anchor = (x0, "start") if wide else (x0 + width / 2, "middle")
        canvas.text(at, y0 - 7, grid.columns.title, 11.5, INK if grid.columns.named else FAINT, anchor)
    if grid.rows:
        ink = INK if grid.rows.named else FAINT
        canvas.text(x0 - 8, y0 + height / 2, grid.rows.title, 11.5, ink, "middle", turned=True)
    for sheet in range(min(grid.copies - 1, 3), 0, -1):
        canvas.rect(x0 + SHEET * sheet, y0 + SHEET * sheet, width, height, "#f3f4f6", "#9ca3af", 1)
    for r, row in enumerate(cells):
        for c, holders in enumerate(row):
            _draw_block(canvas, card, holders, ids, x0 + c * card.cell_w, y0 + r * card.cell_h)
    canvas.rect(x0, y0, width, height, "none", INK, 1.6)


def _draw_block(canvas, card: _Card, holders, ids, x, y):
    w, h = card.cell_w, card.cell_h
    devices = ranges(ids[k] for k in holders)
    canvas.rect(
        x, y, w, h, canvas.fill(holders, (w + h) * 0.7), LINE, 1, title=f"{card.array.device_type} on device {devices}"
    )
    if len(holders) == 1:
        _draw_elements(canvas, card, x, y)
    room = _text_width(devices, 11.5)
    if len(canvas.colours) == 1 or room > w or h < 13:
        return
    behind, opacity = (PAPER, 0.85) if len(holders) > 1 else (canvas.fill(holders), 1)
    canvas.rect(x + w / 2 - room / 2 - 4, y + h / 2 - 8, room + 8, 16, behind, "none", 0, radius=4, opacity=opacity)
    canvas.text(x + w / 2, y + h / 2 + 4, devices, 11.5, anchor="middle")


def _draw_elements(canvas, card: _Card, x, y):
    """Faint lines between the elements of a block, where there is room for them."""
    for dim, extent, across in ((card.grid.columns, card.cell_w, True), (card.grid.rows, card.cell_h, False)):
        each = dim.size // dim.parts if dim else 1
        if each < 2 or extent / each < 7:
            continue
        for k in range(1, each):
            at = extent * k / each
            ends = (x + at, y, x + at, y + card.cell_h) if across else (x, y + at, x + card.cell_w, y + at)
            canvas.line(*ends, "#ffffff", 0.7)
