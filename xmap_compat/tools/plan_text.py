"""Plans and searches as text for a terminal."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from xmap_compat import _jax
from xmap_compat.core.errors import axes_text
from xmap_compat.core.mesh import platform_of
from xmap_compat.core.placement import Placement
from xmap_compat.tools.plan import Array, Call, Plan
from xmap_compat.tools.search import Candidate, Candidates
from xmap_compat.tools.shown import axes_name
from xmap_compat.tools.text import (
    WIDTH,
    Row,
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
from xmap_compat.tools.transfers import Collective

# A table fits a screen; attributes have all rows.
MAX_CANDIDATES = 20
MAX_REFUSED = 5


@functools.singledispatch
def text(shown: Any) -> str:
    """A plan or a search for a terminal."""
    raise NotImplementedError(type(shown))


@text.register
def _(plan: Plan) -> str:
    arguments = [_array_row(a, call, plan) for call in plan.calls for a in call.arguments]
    results = [_array_row(a, call, plan) for call in plan.calls for a in call.results]
    gathered = [_gathered_row(g) for g in plan.gathered]
    tables = [
        _table("calls", ("axis", *_AXIS), list(_axis_rows(plan))),
        _table("arguments", ("argument", *_ARRAY), arguments),
        _table("results", ("result", *_ARRAY), results),
        _table("gathered", ("gathered at entry", *_GATHERED), gathered),
        _table("collectives", ("collective", *_COLLECTIVE), list(_collective_rows(plan))),
    ]
    title = f"plan of {plan.function}: {_show_mesh(plan.mesh)}"
    held = f"each device holds {show_bytes(plan.bytes_held)} of arguments and results"
    parts = [_lines([title]), *tables, _lines([held, _total(plan)])]
    if plan.compiled is not None:
        figures = {**plan.compiled.cost, **plan.compiled.memory}
        rows = [_figure(name, count) for name, count in figures.items() if count]
        parts.append(_joined([("by XLA, for one device", ""), *rows]))
    return "\n\n".join(filter(None, parts))


def _table(attribute: str, titles: Row, rows: Rows) -> str:
    """A table, if it has rows; a long one names the attribute of the plan that has all of them."""
    if not rows:
        return ""
    return _joined(grouped([titles, *rows], f"plan.{attribute}"))


def _joined(rows: Rows) -> str:
    return "\n".join(table(rows))


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(piece for line in lines for piece in wrapped(line, WIDTH))


def _show_mesh(mesh: _jax.AnyMesh | None) -> str:
    """``mesh x: 4, y: 2 (8 cpu devices)``"""
    if mesh is None:
        return "one device"
    platform = platform_of(mesh)
    kind = f"{platform} device" if platform else "device"
    return f"mesh {axes_text(mesh.shape)} ({plural(mesh.size, kind)})"


def _name(name: Any, call: Call, plan: Plan) -> str:
    """A name of a call, where there are several calls with the name of the function."""
    return str(name) if len(plan.calls) == 1 else f"{name} of {call.function}"


_AXIS = ("size", "resources", "per device", "executed by")


def _axis_rows(plan: Plan) -> Iterator[Row]:
    for call in plan.calls:
        for axis in call.axes:
            yield _name(axis.name, call, plan), *_axis_cells(axis)
        for nested in call.nested:
            for axis in nested.axes:
                yield f"{axis.name} of {nested.function}", *_axis_cells(axis)


def _axis_cells(axis: Placement) -> Row:
    resources = [str(mesh_axis) for mesh_axis in axis.mesh_axes]
    for loop, length in zip(axis.loops, axis.loop_sizes):
        is_anonymous = isinstance(loop, tuple)
        resources.append(f"SerialLoop({length})" if is_anonymous else str(loop))
    return str(axis.size), listed(resources) or "-", str(axis.device_size), _execution(axis)


def _execution(axis: Placement) -> str:
    """``shard_map over x, vmap of 3``"""
    words = {
        "shard_map": f"shard_map over {listed(axis.mesh_axes)}",
        "loop": f"loop of {' x '.join(map(str, axis.loop_sizes))}",
        "vmap": f"vmap of {axis.local_size}",
    }
    return listed(words[word] for word in axis.executed_by)


_ARRAY = ("type", "per device", "spec", "dimensions")


def _array_row(array: Array, call: Call, plan: Plan) -> Row:
    dims = listed("." if name is None else name for name in array.axes)
    spec = show_spec(array.spec)
    return _name(array.path, call, plan), array.type, array.device_type, spec, f"[{dims}]"


_GATHERED = ("over", "bytes received", "remedy")


def _gathered_row(found: Any) -> Row:
    return found.path, listed(found.mesh_axes), show_bytes(found.bytes_received), found.remedy


_COLLECTIVE = ("times", "where", "became", "bytes sent")


def _collective_rows(plan: Plan) -> Iterator[Row]:
    """A row for the collectives that come from one call of the user's and became the same."""

    def key(found: Collective) -> Row:
        name = found.primitive
        if found.axes:
            name += f" over {listed(found.axes)}"
        if found.derivative:
            name += ", derivative"
        return name, str(found.where or ""), found.became

    for (name, where, became), group in by_key(plan.collectives, key).items():
        yield name, str(len(group)), where, became, _sent(group)


def _sent(collectives: Iterable[Collective]) -> str:
    transfers = [t for c in collectives for t in c.transfers]
    if not transfers:
        return "-"
    total = show_bytes(sum(t.counted for t in transfers))
    is_known = all(t.times is not None for t in transfers)
    return total if is_known else f"{total} an iteration"


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


def sent_in_words(sent: Mapping[Any, int]) -> str:
    """``1.5 KiB over x, 96 B over y``"""
    words = [f"{show_bytes(n)} over {axes_name(axis)}" for axis, n in sent.items() if n]
    return listed(words) or "nothing"


def _figure(name: str, count: float) -> Row:
    return name, show_bytes(round(count)) if "bytes" in name else show_count(count)


# --------------------------------------------------------------------------- searches


@text.register
def _(found: Candidates) -> str:
    usable = [c for c in found if c.refused is None]
    parts = [_lines(_search_lines(found, usable))]
    if usable:
        parts.append(_joined(_usable_rows(found, usable)))
    if len(usable) < len(found):
        parts.append(_joined(_refused_rows(found)))
    return "\n\n".join(parts)


def _search_lines(found: Candidates, usable: list[Candidate]) -> Iterator[str]:
    is_run = any(c.seconds for c in usable)
    order = "the fastest first" if is_run else "the order is not a ranking"
    yield f"{plural(len(usable), 'assignment')} to {_show_mesh(found.mesh)}; {order}"
    yield (
        "devices: how many devices do different work. held: arguments and results of the calls on "
        "a device, exactly; not the peak. sent: by a device, over each axis"
    )
    if any(c.dominated for c in usable):
        yield (
            "-: dominated: another assignment keeps as many devices busy, is worse in no column and "
            "better in one"
        )
    if found.memory is not None:
        which = "XLA's peak" if found.compiled else "held"
        yield f"memory={show_bytes(round(found.memory))} is compared with {which}"
    if found.ties:
        yield found.ties


def _usable_rows(found: Candidates, usable: list[Candidate]) -> Rows:
    """The first candidates of a search, dominated ones last."""
    over = list(dict.fromkeys(axes for c in usable for axes in c.bytes_sent))
    cells = [_cells(c, found.compiled, over) for c in usable]
    # A column of times only if some were measured.
    titles = [name for name in cells[0] if any(row[name] for row in cells) or not name]
    rows: Rows = [tuple(titles)]
    for row in cells[:MAX_CANDIDATES]:
        rows.append(tuple(row[name] for name in titles))
    hidden = len(usable) - MAX_CANDIDATES
    if hidden > 0:
        more = f"... and {hidden} more: see found[{MAX_CANDIDATES}:]"
        rows.append(("", more, *[""] * (len(titles) - 2)))
    return rows


def _cells(c: Candidate, compiled: bool, over: list[Any]) -> dict[str, str]:
    cells = {"": "-" if c.dominated else "", "axis_resources": c.name, "devices": str(c.devices)}
    if compiled:
        cells["flops"] = show_count(c.flops or 0)
        cells["peak"] = show_bytes(c.peak)
    cells["held"] = show_bytes(c.bytes_held)
    for axes in over:
        sent = c.bytes_sent.get(axes)
        cells[f"sent {axes_name(axes)}"] = show_bytes(sent) if sent else "-"
    cells["median"] = "" if c.seconds is None else show_seconds(c.seconds)
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
