"""A plan as text for a terminal and as HTML for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from xmap_compat.core.placement import Placement
from xmap_compat.tools import picture
from xmap_compat.tools.listing import Program
from xmap_compat.tools.text import (
    Rows,
    escape,
    grouped,
    html_table,
    listed,
    plural,
    show_bytes,
    show_spec,
    table,
    tally,
)
from xmap_compat.tools.transfers import Collective

if TYPE_CHECKING:
    from xmap_compat.tools.plan import Array, CallPlan

# A plan of a large program fits a screen; its parts can be printed by themselves.
SCREEN, LEAST_LISTING, MAX_INPUTS, MAX_OPERANDS = 60, 16, 6, 3


def show_mesh(mesh: jax.sharding.Mesh | None) -> str:
    """``mesh x: 4, y: 2 (8 cpu devices)``"""
    if mesh is None:
        return "one device"
    axes = ", ".join(f"{name}: {size}" for name, size in mesh.shape.items())
    return f"mesh {axes} ({mesh.size} {mesh.devices.flat[0].platform} devices)"


def execution(axis: Placement) -> str:
    """``shard_map over x, vmap of 3``"""
    words = {
        "shard_map": f"shard_map over {listed(axis.mesh_axes)}",
        "loop": f"loop of {' x '.join(map(str, axis.loop_sizes))}",
        "vmap": f"vmap of {axis.local_size}",
    }
    return ", ".join(words[word] for word in axis.executed_by)


_AXIS_TITLES = ("size", "resources", "on each device", "executed by")


def _axis_cells(axis: Placement) -> tuple[str, ...]:
    loops = [
        f"SerialLoop({n})" if isinstance(loop, tuple) else str(loop) for loop, n in zip(axis.loops, axis.loop_sizes)
    ]
    return str(axis.size), listed([*axis.mesh_axes, *loops]) or "-", str(axis.device_size), execution(axis)


def _axis_rows(plan: CallPlan) -> Rows:
    return [("axis", *_AXIS_TITLES), *((str(a.name), *_axis_cells(a)) for a in plan.axes)]


def _nested_rows(plan: CallPlan) -> Rows:
    calls = [(f"{a.name} of {c.function}", *_axis_cells(a), str(c.where or "")) for c in plan.nested for a in c.axes]
    return [("axis of a nested xmap", *_AXIS_TITLES, "where"), *calls]


def _array_rows(title: str, arrays: Sequence[Array]) -> Rows:
    rows: Rows = [(title, "type", "on each device", "partition spec", "dimensions")]
    for a in arrays:
        dims = ", ".join(str(n) if n is not None else "." for n in a.axes)
        rows.append((a.path, a.type, a.device_type, show_spec(a.spec), f"[{dims}]"))
    return rows


def _collective_rows(plan: CallPlan) -> Rows:
    """A row for the collectives of one call of the user's that became the same."""
    alike: dict[tuple[str, ...], list[Collective]] = {}
    for c in plan.collectives:
        name = f"{c.primitive} over {listed(c.axes)}" if c.axes else c.primitive
        alike.setdefault((name, str(c.where or ""), c.became), []).append(c)
    rows: Rows = [("collective", "where", "operands", "became", "bytes sent")]
    for (name, where, became), group in alike.items():
        operands = tally((o for c in group for o in c.operands), MAX_OPERANDS)
        rows.append((f"{len(group)} x {name}" if len(group) > 1 else name, where, operands, became, _sent(group)))
    return rows


def _sent(collectives: Sequence[Collective]) -> str:
    transfers = [t for c in collectives for t in c.transfers]
    total = show_bytes(sum(t.bytes_sent * (t.times or 1) for t in transfers))
    if any(t.times is None for t in transfers):
        return f"{total} a turn"
    return total if transfers else "-"


def _tables(plan: CallPlan) -> list[Rows]:
    """What there is of axes, arguments and results, and collectives."""
    arrays = [_array_rows("argument", plan.arguments), _array_rows("result", plan.results)]
    every = [_axis_rows(plan), _nested_rows(plan), *arrays, _collective_rows(plan)]
    return [grouped(rows) for rows in every if len(rows) > 1]


def _total(plan: CallPlan) -> str:
    if not plan.collectives:
        return "no collectives"
    known = sum(t.bytes_sent * (t.times or 0) for c in plan.collectives for t in c.transfers)
    more = "" if plan.bytes_sent is not None else ", and more in each turn of a while loop"
    return f"in all, each device sends {show_bytes(known)}{more}"


def _title(plan: CallPlan) -> str:
    return f"plan of {plan.function}: {show_mesh(plan.mesh)}"


def text(plan: CallPlan) -> str:
    tables = ["\n".join(table(rows)) for rows in _tables(plan)]
    if plan.collectives:
        tables[-1] += "\n" + _total(plan)
    else:
        tables.append(_total(plan))
    above = "\n\n".join([_title(plan), *tables, "program"])
    listing = _shortened(plan.program, max(SCREEN - above.count("\n") - 1, LEAST_LISTING))
    return "\n".join([above, *(f"  {line}" for line in listing)])


def _shortened(program: Program, most: int) -> list[str]:
    """A listing of at most so many lines."""
    lines = program.shown(margin=2).splitlines()
    if len(lines) <= most:
        return lines
    inputs = len(program.inputs)
    if inputs > MAX_INPUTS:
        lines = [f"({plural(inputs, 'argument')})", *lines[inputs:]]
    hidden = len(lines) - most + 1
    return [*lines[: most - 1], f"... and {plural(hidden, 'more line')}: print(plan.program)"] if hidden > 1 else lines


_STYLE = (
    "font-family:DejaVu Sans,Verdana,Helvetica,Arial,sans-serif;font-size:13px;color:#1f2430;background:#ffffff;"
    "padding:12px;border-radius:8px"
)


def html(plan: CallPlan) -> str:
    """A plan for a notebook: the drawing, the tables, and the program to unfold."""
    return (
        f'<div style="{_STYLE}"><div style="font-weight:bold;font-size:15px">{escape(_title(plan))}</div>'
        f'<div style="overflow-x:auto">{picture.svg(plan)}</div>{"".join(map(html_table, _tables(plan)))}'
        f'<div style="margin:6px 0">{escape(_total(plan))}</div>'
        f'<details><summary style="cursor:pointer">program over named axes</summary>'
        f'<pre style="color:#1f2430;background:#ffffff">{escape(plan.program)}</pre></details></div>'
    )
