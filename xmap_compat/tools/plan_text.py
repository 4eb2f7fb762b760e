"""Plans and searches as text for a terminal."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from xmap_compat import _jax
from xmap_compat.core.errors import axes_text
from xmap_compat.core.mesh import platform_of
from xmap_compat.core.placement import Placement
from xmap_compat.tools.gathered import Gathered
from xmap_compat.tools.plan import Array, Plan
from xmap_compat.tools.search import Candidate, Candidates, usable_of
from xmap_compat.tools.text import (
    WIDTH,
    Row,
    Rows,
    axes_name,
    by_key,
    grouped,
    listed,
    plural,
    sent_in_words,
    show_bytes,
    show_count,
    show_spec,
    table,
    with_more,
    wrapped,
)
from xmap_compat.tools.transfers import Collective

MAX_CANDIDATES = 20  # a table fits a screen
MAX_REFUSED = 5


@functools.singledispatch
def text(shown: Any) -> str:
    """A plan or a search for a terminal."""
    raise NotImplementedError(type(shown))


@text.register
def _(plan: Plan) -> str:
    parts = [_lines([f"plan of {plan.function}: {_show_mesh(plan.mesh)}"])]
    for attribute, rows in _tables(plan).items():
        if len(rows) > 1:
            # A long table names the attribute that has all of it.
            parts.append(_table(grouped(rows, f"plan.{attribute}")))
    held = f"each device holds {show_bytes(plan.bytes_held)} of arguments and results"
    parts.append(_lines([held, _total(plan)]))
    return "\n\n".join(parts)


def _lines(lines: Iterable[str]) -> str:
    pieces = []
    for line in lines:
        pieces.extend(wrapped(line, WIDTH))
    return "\n".join(pieces)


def _table(rows: Rows) -> str:
    return "\n".join(table(rows))


def _show_mesh(mesh: _jax.AnyMesh | None) -> str:
    """``mesh x: 4, y: 2 (8 cpu devices)``"""
    if mesh is None:
        return "one device"
    platform = platform_of(mesh)
    kind = "device"
    if platform:
        kind = f"{platform} device"
    return f"mesh {axes_text(mesh.shape)} ({plural(mesh.size, kind)})"


def _tables(plan: Plan) -> dict[str, Rows]:
    """The tables of a plan, by the attributes that have their rows."""
    axes: Rows = [("axis", "size", "resources", "per device", "executed by")]
    titles = "type", "per device", "spec", "dimensions"
    arguments: Rows = [("argument", *titles)]
    results: Rows = [("result", *titles)]
    for call in plan.calls:
        # Names of several calls are told apart.
        of = ""
        if len(plan.calls) > 1:
            of = f" of {call.function}"
        axes.extend(_axis_row(axis, of) for axis in call.axes)
        for nested in call.nested:
            axes.extend(_axis_row(axis, f" of {nested.function}") for axis in nested.axes)
        arguments.extend(_array_row(array, of) for array in call.arguments)
        results.extend(_array_row(array, of) for array in call.results)
    return {
        "calls": axes,
        "arguments": arguments,
        "results": results,
        "gathered": _gathered_rows(plan.gathered),
        "collectives": _collective_rows(plan.collectives),
    }


def _axis_row(axis: Placement, of: str) -> Row:
    resources = [str(mesh_axis) for mesh_axis in axis.mesh_axes]
    for loop, length in zip(axis.loops, axis.loop_sizes):
        if isinstance(loop, tuple):  # it has no name
            loop = f"SerialLoop({length})"
        resources.append(str(loop))
    words = {
        "shard_map": f"shard_map over {listed(axis.mesh_axes)}",
        "loop": f"loop of {' x '.join(map(str, axis.loop_sizes))}",
        "vmap": f"vmap of {axis.local_size}",
    }
    executed = listed(words[word] for word in axis.executed_by)
    sizes = str(axis.size), listed(resources) or "-", str(axis.device_size)
    return f"{axis.name}{of}", *sizes, executed


def _array_row(array: Array, of: str) -> Row:
    dims = []
    for name in array.axes:
        dims.append("." if name is None else str(name))
    types = array.type, array.device_type, show_spec(array.spec)
    return f"{array.path}{of}", *types, f"[{listed(dims)}]"


def _gathered_rows(found: Iterable[Gathered]) -> Rows:
    rows: Rows = [("gathered at entry", "over", "bytes received", "remedy")]
    for g in found:
        rows.append((g.path, listed(g.mesh_axes), show_bytes(g.bytes_received), g.remedy))
    return rows


def _collective_rows(found: Iterable[Collective]) -> Rows:
    """A row for the collectives that come from one call of the user's and became the same."""
    rows: Rows = [("collective", "times", "where", "became", "bytes sent")]
    for group in alike_collectives(found):
        c = group[0]
        rows.append((c.name, str(len(group)), str(c.where or ""), c.became, sent(group)))
    return rows


def alike_collectives(found: Iterable[Collective]) -> list[list[Collective]]:
    groups = by_key(found, lambda c: (c.name, c.where, c.became))
    return list(groups.values())


def sent(group: Iterable[Collective]) -> str:
    """``18 B``, ``18 B an iteration`` or ``-``: what some collectives send."""
    total = 0
    each = ""
    for collective in group:
        total += collective.bytes_counted
        if collective.bytes_sent is None:
            each = " an iteration"
    return f"{show_bytes(total)}{each}" if total else "-"


def _total(plan: Plan) -> str:
    if not plan.transfers:
        return "nothing moves between devices"
    known = sum(t.total or 0 for t in plan.transfers)
    total = f"in all, each device sends {show_bytes(known)}"
    if known and len(plan.sent_over) > 1:
        total += f": {sent_in_words(plan.sent_over)}"
    if plan.bytes_sent is None:
        total += ", and more in each iteration of a while loop"
    return total


# --------------------------------------------------------------------------- searches


@text.register
def _(found: Candidates) -> str:
    usable = usable_of(found)
    parts = [_lines(_search_lines(found, usable))]
    if usable:
        parts.append(_table(_usable_rows(found, usable)))
    if len(usable) < len(found):
        parts.append(_table(_refused_rows(found)))
    return "\n\n".join(parts)


def _search_lines(found: Candidates, usable: Sequence[Candidate]) -> Iterator[str]:
    count = plural(len(usable), "assignment")
    yield f"{count} to {_show_mesh(found.mesh)}; the order is not a ranking"
    yield (
        "devices: how many devices do different work. held: arguments and results of the calls on "
        "a device, exactly; not the peak. sent: by a device, over each axis"
    )
    if any(c.dominated for c in usable):
        yield (
            "-: dominated: another assignment keeps as many devices busy, is worse in no column "
            "and better in one"
        )


def _usable_rows(found: Candidates, usable: Sequence[Candidate]) -> Rows:
    """The first candidates of a search, dominated ones last."""
    cells = [_cells(c, found) for c in usable]
    titles = dict.fromkeys(itertools.chain(*cells))
    rows: Rows = [tuple(titles)]
    for row in cells[:MAX_CANDIDATES]:
        rows.append(tuple(row.get(title, "-") for title in titles))
    hidden = len(usable) - MAX_CANDIDATES
    if hidden > 0:
        more = f"... and {hidden} more: see found[{MAX_CANDIDATES}:]"
        rows.append(("", more, *[""] * (len(titles) - 2)))
    return rows


def _cells(c: Candidate, found: Candidates) -> dict[str, str]:
    cells = {"": "-" if c.dominated else ""}
    cells["axis_resources"] = c.name
    cells["devices"] = str(c.devices)
    if found.compiled:
        cells["flops"] = show_count(c.flops or 0)
        cells["peak"] = show_bytes(c.peak)
    cells["held"] = show_bytes(c.bytes_held)
    for axes, count in c.bytes_sent.items():
        cells[f"sent {axes_name(axes)}"] = show_bytes(count) if count else "-"
    return cells


def _refused_rows(found: Candidates) -> Rows:
    """The first refused candidates; whole messages are in ``.refused``."""
    refused = [c for c in found if c.refused is not None]
    reasons = by_key(refused, lambda c: re.split(r"\. |, but |\n", c.refused or "")[0])
    rows: Rows = [("refused", "why")]
    for why, group in reasons.items():
        rows.append((with_more([c.name for c in group]), why))
    hidden = len(reasons) - MAX_REFUSED
    if hidden > 0:
        more = f"... and {hidden} more reasons"
        rows[1 + MAX_REFUSED :] = [(more, "see .refused of each candidate in found")]
    return rows
