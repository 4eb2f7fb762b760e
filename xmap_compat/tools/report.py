"""Plans and searches as text for a terminal and as HTML for a notebook."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat.core.errors import axes_text
from xmap_compat.core.mesh import platform_of
from xmap_compat.core.placement import Placement
from xmap_compat.tools.cost import Cost
from xmap_compat.tools.hardware import Hardware
from xmap_compat.tools.listing import Listing
from xmap_compat.tools.plan import Array, CallPlan
from xmap_compat.tools.search import Candidate, Candidates
from xmap_compat.tools.steps import StepPlan
from xmap_compat.tools.text import (
    Rows,
    by_key,
    escape,
    grouped,
    html_table,
    listed,
    plural,
    show_bytes,
    show_count,
    show_seconds,
    show_spec,
    table,
    tally,
    terminal_width,
    wrapped,
)
from xmap_compat.tools.transfers import Collective, Transfer, alike_transfers

# A plan of a large program fits a screen; you can print its parts separately.
SCREEN, LEAST_LISTING, MAX_INPUTS, MAX_OPERANDS = 60, 16, 6, 3
MAX_CANDIDATES, MAX_REFUSED = 20, 5


def show_mesh(mesh: _jax.AnyMesh | None, compiler_axes: Sequence[object] = ()) -> str:
    """``mesh x: 4, y: 2 (8 cpu devices)``"""
    if mesh is None:
        return "one device"
    left = f"; left to the compiler: {listed(compiler_axes)}" if compiler_axes else ""
    kind = " ".join([*filter(None, [platform_of(mesh)]), "device"])
    return f"mesh {axes_text(mesh.shape)} ({plural(mesh.size, kind)}{left})"


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


def _array_rows(title: str, arrays: Sequence[Array]) -> Rows:
    rows: Rows = [(title, "type", "on each device", "partition spec", "dimensions")]
    for a in arrays:
        dims = ", ".join(str(n) if n is not None else "." for n in a.axes)
        rows.append((a.path, a.type, a.device_type, show_spec(a.spec), f"[{dims}]"))
    return rows


def _collective_rows(plan: CallPlan) -> Rows:
    """A row for each group of collectives that come from one call of the user's and became the same."""
    name_of = lambda c: f"{c.primitive} over {listed(c.axes)}" if c.axes else c.primitive  # noqa: E731
    alike = by_key(plan.collectives, lambda c: (name_of(c), str(c.where or ""), c.became))
    rows: Rows = [("collective", "where", "operands", "became", "bytes sent")]
    for (name, where, became), group in alike.items():
        operands = tally((o for c in group for o in c.operands), MAX_OPERANDS)
        rows.append((f"{len(group)} x {name}" if len(group) > 1 else name, where, operands, became, _sent(group)))
    return rows


def _gathered_rows(plan: CallPlan | StepPlan) -> Rows:
    rows: Rows = [("gathered at entry", "over", "bytes received", "remedy")]
    rows.extend((g.path, listed(g.mesh_axes), show_bytes(g.bytes_received), g.remedy) for g in plan.gathered)
    return rows


def _transfer_rows(transfers: Sequence[Transfer], title: str) -> Rows:
    """A row for each group of transfers that come from one line of the user's and are alike."""
    has_numbers = any(t.combined for t in transfers)
    rows: Rows = [(title, "over", "of", "where", "bytes sent", "times", "for", *["combined"] * has_numbers)]
    for t, count in alike_transfers(transfers):
        name = f"{count} x {t.kind}" if count > 1 else t.kind
        times = "each turn" if t.times is None else str(t.times)
        purpose = "derivative" if t.derivative else "function"
        cells = listed(t.mesh_axes), listed(t.axes), str(t.where or ""), show_bytes(t.bytes_sent), times, purpose
        rows.append((name, *cells, *[str(t.combined or "")] * has_numbers))
    return rows


def _sent_over(cost: Cost) -> str:
    """``1.5 kB over x; 96 B over x, y``"""
    sent = cost.bytes_sent.items()
    over = "; ".join(f"{show_bytes(n)} over {listed(a) if isinstance(a, tuple) else a}" for a, n in sent)
    return over or "nothing"


def cost_lines(cost: Cost, mesh: _jax.AnyMesh | None = None) -> list[str]:
    """The price of a program in words."""
    on = Hardware.of(mesh)
    figures = f"{show_count(cost.flops)} FLOPs, {show_bytes(cost.bytes_accessed)} read and written"
    lines = [f"each device: {figures}, {show_bytes(cost.memory)} of memory, sends {_sent_over(cost)}"]
    if cost.seconds is not None:
        least, most = map(show_seconds, cost.seconds)
        each = [f"{name} {show_seconds(seconds)}" for name, seconds in cost.parts.items()]
        lines.append(f"time: between {least} and {most}: {listed(each)}")
    elif on is not None and on.per_host is None and isinstance(mesh, jax.sharding.AbstractMesh):
        lines.append(f"time: unknown until a host is: plan.cost_on(Hardware.of({on.name!r}, per_host=8))")
    return lines


def _sent(collectives: Sequence[Collective]) -> str:
    transfers = [t for c in collectives for t in c.transfers]
    total = show_bytes(sum(t.counted for t in transfers))
    if any(t.times is None for t in transfers):
        return f"{total} a turn"
    return total if transfers else "-"


def _tables(plan: CallPlan) -> list[Rows]:
    """The tables of axes, arguments, results and collectives, without empty ones."""
    arrays = [_array_rows("argument", plan.arguments), _array_rows("result", plan.results)]
    axes = [("axis", *_AXIS_TITLES), *((str(a.name), *_axis_cells(a)) for a in plan.axes)]
    calls = [(f"{a.name} of {c.function}", *_axis_cells(a), str(c.where or "")) for c in plan.nested for a in c.axes]
    nested = [("axis of a nested xmap", *_AXIS_TITLES, "where"), *calls]
    return _shown([axes, nested, *arrays, _gathered_rows(plan), _collective_rows(plan)])


_PLACES = {"axis": "axes", "axis of a nested xmap": "nested", "gathered at entry": "gathered"}
_PLACES |= {"added by the compiler": "compiled.added"}


def _shown(tables: Sequence[Rows]) -> list[Rows]:
    """The tables that have rows; a long one names the attribute of the plan that has all of them."""
    titles = ((rows, rows[0][0]) for rows in tables if len(rows) > 1)
    return [grouped(rows, f"plan.{_PLACES.get(title, f'{title}s')}") for rows, title in titles]


def _total(plan: CallPlan | StepPlan) -> str:
    known = sum(t.total or 0 for t in plan.transfers)
    more = "" if all(t.times is not None for t in plan.transfers) else ", and more in each turn of a while loop"
    each = {t.combined: f"{t.kind}s over {listed(t.mesh_axes)}" for t in plan.transfers if t.combined}
    one = f"; XLA combines {tally(each.values(), MAX_OPERANDS)}" if each else ""
    return f"in all, each device sends {show_bytes(known)}{more}{one}"


def _title(plan: CallPlan | StepPlan) -> str:
    return f"plan of {plan.function}: {show_mesh(plan.mesh, plan.compiler_axes)}"


@functools.singledispatch
def text(plan: Any) -> str:
    """The plan of a call for a terminal; steps and searches are registered below."""
    tables = ["\n".join(table(rows)) for rows in _tables(plan)]
    totals = _lines([_total(plan) if plan.collectives else "no collectives", *cost_lines(plan.cost, plan.mesh)])
    above = "\n\n".join([_title(plan), *tables, totals, "program"])
    listing = _shortened(plan.program, max(SCREEN - above.count("\n") - 1, LEAST_LISTING))
    return "\n".join([above, *(f"  {line}" for line in listing)])


def _shortened(program: Listing, most: int) -> list[str]:
    """A listing of at most ``most`` lines."""
    lines = program.shown(margin=2).splitlines()
    if len(lines) <= most:
        return lines
    inputs = len(program.inputs)
    if inputs > MAX_INPUTS:
        lines = [f"({plural(inputs, 'argument')})", *lines[inputs:]]
    hidden = len(lines) - most + 1
    return [*lines[: most - 1], f"... and {plural(hidden, 'more line')}: see plan.program"] if hidden > 1 else lines


def _lines(lines: Sequence[str]) -> str:
    return "\n".join(piece for line in lines for piece in wrapped(line, terminal_width()))


def _step_tables(plan: StepPlan) -> list[Rows]:
    calls: Rows = [("call", "axes", "executed by", "bytes sent")]
    for call in plan.calls:
        axes = [(f"{a.name} {a.size}", execution(a)) for a in call.axes]
        calls.append(
            (call.function, listed(a for a, _ in axes), "; ".join(e for _, e in axes), show_bytes(call.bytes_sent))
        )
    added = plan.compiled.added if plan.compiled else ()
    moved = [_transfer_rows(plan.transfers, "transfer"), _transfer_rows(added, "added by the compiler")]
    return _shown([calls, _gathered_rows(plan), *moved])


def _step_lines(plan: StepPlan) -> list[str]:
    unknown = [] if plan.compiled else ["what the compiler adds outside of the calls is not known before compiling"]
    return [
        _total(plan) if plan.transfers else "nothing moves in the calls",
        *cost_lines(plan.cost, plan.mesh),
        *unknown,
    ]


@text.register
def _(plan: StepPlan) -> str:
    tables = ["\n".join(table(rows)) for rows in _step_tables(plan)]
    return "\n\n".join([_title(plan), *tables, _lines(_step_lines(plan))])


@functools.singledispatch
def html(plan: Any) -> str:
    """The plan of a call for a notebook: the drawing, the tables, and the program, folded."""
    listing = _unfolded("program over named axes", f"<pre>{escape(plan.program)}</pre>")
    lines = [_total(plan), *cost_lines(plan.cost, plan.mesh)]
    return _html(_title(plan), [plan.svg(), *map(html_table, _tables(plan))], lines, [listing])


@html.register
def _(plan: StepPlan) -> str:
    """The plan of a step for a notebook: its transfers, drawn and as tables, and the report of each call, folded."""
    calls = [_unfolded(call.function, call._repr_html_()) for call in plan.calls]
    return _html(_title(plan), [plan.svg(), *map(html_table, _step_tables(plan))], _step_lines(plan), calls)


def _candidate_tables(found: Sequence[Candidate]) -> list[Rows]:
    """The first candidates of a search, and some that are refused; whole messages are in ``.refused``."""
    usable = [c for c in found if c.refused is None]
    rows: Rows = [("", "axis_resources", "flops", "bytes sent", "memory", "estimate", "measured")]
    for c in usable[:MAX_CANDIDATES]:
        assert c.cost is not None
        estimate = " - ".join(map(show_seconds, c.cost.seconds)) if c.cost.seconds else ""
        measured = show_seconds(c.measured) if c.measured is not None else ""
        figures = show_count(c.cost.flops), _sent_over(c.cost), show_bytes(c.cost.memory)
        rows.append((f"{c.place}{'*' * c.front}", c.name, *figures, estimate, measured))
    refused = [c for c in found if c.refused is not None]
    first = (re.split(r"\. |, but |\n", c.refused or "")[0] for c in refused)
    why: Rows = [("refused", "why"), *((c.name, sentence) for c, sentence in zip(refused[:MAX_REFUSED], first))]
    hidden = max(len(usable) - MAX_CANDIDATES, 0), max(len(refused) - MAX_REFUSED, 0)
    rows.extend([("", f"... and {hidden[0]} more: see found[{MAX_CANDIDATES}:]", *[""] * 5)] if hidden[0] else [])
    why.extend([(f"... and {hidden[1]} more", "see .refused of each candidate in found")] if hidden[1] else [])
    return [table for table in (rows, why) if len(table) > 1]


@text.register
def _(found: Candidates) -> str:
    head = f"{plural(len(found), 'assignment')}, best first; * = no other takes both less time and less memory"
    if any(c.measured is None and c.cost and c.cost.seconds for c in found):
        which = "other times" if any(c.measured is not None for c in found) else "times"
        why = found.unrun and f", because {found.unrun}"
        head += f"\n{which} are estimates{why}: those with one number are within {found.margin:.0%} of the first, a tie"
    return "\n\n".join([head, *("\n".join(table(rows)) for rows in _candidate_tables(found))])


@html.register
def _(found: Candidates) -> str:
    return "".join(map(html_table, _candidate_tables(found)))


def _html(title: str, parts: Sequence[str], lines: Sequence[str], folded: Sequence[str]) -> str:
    below = "".join(f"<div>{escape(line)}</div>" for line in lines)
    return (
        f'<div style="font-family:sans-serif;font-size:13px;overflow-x:auto"><b>{escape(title)}</b>'
        f"{''.join(f'<div>{part}</div>' for part in parts)}{below}{''.join(folded)}</div>"
    )


def _unfolded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"
