"""Plans and searches as text for a terminal."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xmap_compat import _jax
from xmap_compat.core.errors import axes_text
from xmap_compat.core.mesh import platform_of
from xmap_compat.core.placement import Placement
from xmap_compat.tools.plan import Array, CallPlan
from xmap_compat.tools.search import Candidate, Candidates
from xmap_compat.tools.shown import axes_name
from xmap_compat.tools.steps import Compiled, StepPlan
from xmap_compat.tools.text import (
    WIDTH,
    Rows,
    by_key,
    grouped,
    listed,
    plural,
    show_bytes,
    show_count,
    show_seconds,
    show_spec,
    table,
    with_more,
    wrapped,
)
from xmap_compat.tools.transfers import Collective, Transfer, alike_transfers

# A plan of a large program fits a screen; its attributes have all rows.
MAX_CANDIDATES, MAX_REFUSED = 20, 5


def _show_mesh(mesh: _jax.AnyMesh | None) -> str:
    """``mesh x: 4, y: 2 (8 cpu devices)``"""
    if mesh is None:
        return "one device"
    kind = " ".join([*filter(None, [platform_of(mesh)]), "device"])
    return f"mesh {axes_text(mesh.shape)} ({plural(mesh.size, kind)})"


def execution(axis: Placement) -> str:
    """``shard_map over x, vmap of 3``"""
    words = {
        "shard_map": f"shard_map over {listed(axis.mesh_axes)}",
        "loop": f"loop of {' x '.join(map(str, axis.loop_sizes))}",
        "vmap": f"vmap of {axis.local_size}",
    }
    return ", ".join(words[word] for word in axis.executed_by)


_AXIS_TITLES = ("size", "resources", "per device", "executed by")


def _axis_cells(axis: Placement) -> tuple[str, ...]:
    loops = [
        f"SerialLoop({n})" if isinstance(loop, tuple) else str(loop)
        for loop, n in zip(axis.loops, axis.loop_sizes)
    ]
    return (
        str(axis.size),
        listed([*axis.mesh_axes, *loops]) or "-",
        str(axis.device_size),
        execution(axis),
    )


def _array_rows(title: str, arrays: Sequence[Array]) -> Rows:
    rows: Rows = [(title, "type", "per device", "spec", "dimensions")]
    for a in arrays:
        dims = ", ".join(str(n) if n is not None else "." for n in a.axes)
        rows.append((a.path, a.type, a.device_type, show_spec(a.spec), f"[{dims}]"))
    return rows


def _collective_rows(plan: CallPlan) -> Rows:
    """A row for each group of collectives that come from one call of the user's and became the
    same.
    """
    name_of = lambda c: f"{c.primitive} over {listed(c.axes)}" if c.axes else c.primitive  # noqa: E731
    alike = by_key(plan.collectives, lambda c: (name_of(c), str(c.where or ""), c.became))
    rows: Rows = [("collective", "times", "where", "became", "bytes sent")]
    for (name, where, became), group in alike.items():
        rows.append((name, str(len(group)), where, became, _sent(group)))
    return rows


def _sent(collectives: Sequence[Collective]) -> str:
    transfers = [t for c in collectives for t in c.transfers]
    total = show_bytes(sum(t.counted for t in transfers))
    if any(t.times is None for t in transfers):
        return f"{total} an iteration"
    return total if transfers else "-"


def _gathered_rows(plan: CallPlan | StepPlan) -> Rows:
    rows: Rows = [("gathered at entry", "over", "bytes received", "remedy")]
    rows.extend(
        (g.path, listed(g.mesh_axes), show_bytes(g.bytes_received), g.remedy) for g in plan.gathered
    )
    return rows


def _transfer_rows(transfers: Sequence[Transfer]) -> Rows:
    """A row for each group of transfers that come from one line of the user's and are alike."""
    rows: Rows = [("transfer", "over", "of", "where", "bytes sent", "times", "for")]
    for t, times, sent in alike_transfers(transfers):
        purpose = "derivative" if t.derivative else "function"
        often = "each iteration" if times is None else str(times)
        rows.append(
            (
                t.kind,
                listed(t.mesh_axes),
                listed(t.axes),
                str(t.where or ""),
                show_bytes(sent),
                often,
                purpose,
            )
        )
    return rows


_PLACES = {"axis": "axes", "axis of a nested xmap": "nested", "gathered at entry": "gathered"}


def _tables(*tables: Rows) -> list[str]:
    """The tables that have rows; a long one names the attribute of the plan that has all of
    them.
    """
    titles = ((rows, rows[0][0]) for rows in tables if len(rows) > 1)
    shown = [grouped(rows, f"plan.{_PLACES.get(title, f'{title}s')}") for rows, title in titles]
    return ["\n".join(table(rows)) for rows in shown]


def _title(plan: CallPlan | StepPlan) -> str:
    return _lines([f"plan of {plan.function}: {_show_mesh(plan.mesh)}"])


def _total(plan: CallPlan | StepPlan) -> str:
    if not plan.transfers:
        return "nothing moves between devices"
    known = sum(t.total or 0 for t in plan.transfers)
    more = (
        ""
        if all(t.times is not None for t in plan.transfers)
        else ", and more in each iteration of a while loop"
    )
    each = f": {_sent_over(plan.sent_over)}" if len(plan.sent_over) > 1 and known else ""
    return f"in all, each device sends {show_bytes(known)}{each}{more}"


def _sent_over(sent: Mapping[Any, int]) -> str:
    """``1.5 KiB over x, 96 B over y``"""
    return (
        listed(
            f"{show_bytes(count)} over {axes_name(axis)}" for axis, count in sent.items() if count
        )
        or "nothing"
    )


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(piece for line in lines for piece in wrapped(line, WIDTH))


@functools.singledispatch
def text(plan: Any) -> str:
    """The plan of a call for a terminal; steps and searches are registered below."""
    axes = [("axis", *_AXIS_TITLES), *((str(a.name), *_axis_cells(a)) for a in plan.axes)]
    calls = [
        (f"{a.name} of {c.function}", *_axis_cells(a), str(c.where or ""))
        for c in plan.nested
        for a in c.axes
    ]
    nested = [("axis of a nested xmap", *_AXIS_TITLES, "where"), *calls]
    arrays = _array_rows("argument", plan.arguments), _array_rows("result", plan.results)
    tables = _tables(axes, nested, *arrays, _gathered_rows(plan), _collective_rows(plan))
    held = f"each device holds {show_bytes(plan.bytes_held)} of arguments and results"
    return "\n\n".join([_title(plan), *tables, _lines([held, _total(plan)])])


@text.register
def _(plan: StepPlan) -> str:
    calls: Rows = [("call", "axes", "executed by", "held", "bytes sent")]
    for call in plan.calls:
        axes = [(f"{a.name} {a.size}", execution(a)) for a in call.axes]
        cells = listed(a for a, _ in axes), "; ".join(e for _, e in axes)
        calls.append(
            (call.function, *cells, show_bytes(call.bytes_held), show_bytes(call.bytes_sent))
        )
    tables = _tables(calls, _gathered_rows(plan), _transfer_rows(plan.transfers))
    compiled = [] if plan.compiled is None else ["\n".join(table(_compiled_rows(plan.compiled)))]
    return "\n\n".join([_title(plan), *tables, _lines([_total(plan)]), *compiled])


def _compiled_rows(compiled: Compiled) -> Rows:
    """XLA's figures."""
    figures: Rows = [("by XLA, for one device", "")]
    figures += [
        (name, show_bytes(round(n)) if "bytes" in name else show_count(n))
        for name, n in compiled.cost.items()
    ]
    figures += [(name, show_bytes(count)) for name, count in compiled.memory.items() if count]
    return figures


# --------------------------------------------------------------------------- searches


@text.register
def _(found: Candidates) -> str:
    tables = [
        "\n".join(table(rows))
        for rows in (_usable_rows(found), _refused_rows(found))
        if len(rows) > 1
    ]
    return "\n\n".join([_lines(_search_lines(found)), *tables])


def _search_lines(found: Candidates) -> list[str]:
    usable = [c for c in found if c.refused is None]
    order = "the fastest first" if any(c.seconds for c in usable) else "the order is no judgement"
    lines = [f"{plural(len(usable), 'assignment')} to {_show_mesh(found.mesh)}; {order}"]
    lines.append(
        "devices: those that do different work. held: arguments and results of the calls on a device, exactly"
    )
    lines[-1] += "; not the peak. sent: by a device, over each axis"
    if any(c.dominated for c in usable):
        lines.append(
            "-: dominated: another one keeps as many devices busy, and has no larger figure and a smaller one"
        )
    if found.memory is not None:
        which = "XLA's peak" if found.compiled else "held"
        lines.append(f"memory={show_bytes(round(found.memory))} is compared with {which}")
    return lines + [found.ties] * bool(found.ties)


def _usable_rows(found: Candidates) -> Rows:
    """The first candidates of a search, dominated ones last."""
    usable = [c for c in found if c.refused is None]
    axes = list(dict.fromkeys(axes for c in usable for axes in c.bytes_sent))
    is_run = any(c.seconds is not None for c in usable)
    compiled = ("flops", "peak") if found.compiled else ()
    titles = (
        "",
        "axis_resources",
        "devices",
        *compiled,
        "held",
        *(f"sent {axes_name(a)}" for a in axes),
    )
    rows: Rows = [(*titles, *["median"] * is_run)]
    for c in usable[:MAX_CANDIDATES]:
        figures = [
            str(c.devices),
            *([show_count(c.flops or 0), show_bytes(c.peak)] if found.compiled else []),
        ]
        sent = [show_bytes(n) if (n := c.bytes_sent.get(a)) else "-" for a in axes]
        measured = [show_seconds(c.seconds) if c.seconds is not None else ""] * is_run
        rows.append(
            ("-" * c.dominated, c.name, *figures, show_bytes(c.bytes_held), *sent, *measured)
        )
    if (hidden := len(usable) - MAX_CANDIDATES) > 0:
        rows.append(
            ("", f"... and {hidden} more: see found[{MAX_CANDIDATES}:]", *[""] * (len(rows[0]) - 2))
        )
    return rows


def _refused_rows(found: Candidates) -> Rows:
    """The first refused candidates; whole messages are in ``.refused``."""
    refused: list[Candidate] = [c for c in found if c.refused is not None]
    alike = by_key(refused, lambda c: re.split(r"\. |, but |\n", c.refused or "")[0])
    rows: Rows = [
        ("refused", "why"),
        *((with_more([c.name for c in some]), why) for why, some in alike.items()),
    ]
    if (hidden := len(rows) - 1 - MAX_REFUSED) > 0:
        rows[1 + MAX_REFUSED :] = [
            (f"... and {hidden} more reasons", "see .refused of each candidate in found")
        ]
    return rows
