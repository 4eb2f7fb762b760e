"""Plans and searches as text for a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from xmap_compat import _jax
from xmap_compat.core.errors import axes_text
from xmap_compat.core.mesh import platform_of
from xmap_compat.core.placement import Placement
from xmap_compat.tools.plan import Array, Plan
from xmap_compat.tools.search import Candidate, Candidates
from xmap_compat.tools.text import (
    WIDTH,
    Row,
    Rows,
    axes_name,
    by_key,
    listed,
    merged,
    plural,
    sent_in_words,
    show_bytes,
    table,
    with_more,
)
from xmap_compat.tools.transfers import Collective

MAX_CANDIDATES = 20  # a table fits a screen


def text_of_plan(plan: Plan) -> str:
    axes: Rows = []
    arrays: Rows = []
    for call in plan.calls:
        # Names of several calls are told apart.
        of = ""
        if len(plan.calls) > 1:
            of = f" of {call.function}"
        axes.extend(_axis_row(axis, of) for axis in call.axes)
        arrays.extend(_array_row(array, of) for array in (*call.arguments, *call.results))
    for nested in plan.nested:
        axes.extend(_axis_row(axis, f" of {nested.function}") for axis in nested.axes)
    parts = [
        f"plan of {plan.function}: {_show_mesh(plan.mesh)}",
        _table("axis, size, executed by", merged(axes)),
        _table("array, type, on a device, dimensions", merged(arrays)),
        _table("collective, times, where, became, bytes sent", _collective_rows(plan.collectives)),
        "\n".join(_summary(plan)),
    ]
    return "\n\n".join(filter(None, parts))


def _table(titles: str, rows: Rows) -> str:
    if not rows:
        return ""
    return "\n".join(table([tuple(titles.split(", ")), *rows]))


def _show_mesh(mesh: _jax.AnyMesh | None) -> str:
    """``mesh x: 4, y: 2 (8 cpu devices)``"""
    if mesh is None:
        return "no call uses a mesh"
    platform = platform_of(mesh)
    kind = "device"
    if platform:
        kind = f"{platform} device"
    return f"mesh {axes_text(mesh.shape)} ({plural(mesh.size, kind)})"


def _axis_row(axis: Placement, of: str) -> Row:
    words = []
    if axis.mesh_axes:
        words.append(f"shard_map over {listed(axis.mesh_axes)}")
    if axis.loop_sizes:
        words.append(f"loop of {' x '.join(map(str, axis.loop_sizes))}")
    if axis.local_size != 1 or not words:
        words.append(f"vmap of {axis.local_size}")
    return f"{axis.name}{of}", str(axis.size), listed(words)


def _array_row(array: Array, of: str) -> Row:
    dims = []
    for name in array.axes:
        dims.append("." if name is None else str(name))
    return f"{array.path}{of}", array.type, array.device_type, f"[{listed(dims)}]"


def _collective_rows(found: Iterable[Collective]) -> Rows:
    rows: Rows = []
    for group in alike_collectives(found):
        c = group[0]
        where = "-"
        if c.where is not None:
            where = str(c.where)
        rows.append((c.name, str(len(group)), where, c.became, sent(group)))
    return rows


def alike_collectives(found: Iterable[Collective]) -> list[list[Collective]]:
    """Collectives that differ in nothing that is printed but their bytes."""
    groups = by_key(found, lambda c: (c.name, c.where, c.became))
    return list(groups.values())


def sent(group: Iterable[Collective]) -> str:
    """``18 B``, ``18 B an iteration`` or ``-``: what some collectives send."""
    total = 0
    each = ""
    for collective in group:
        total += sum(transfer.total for transfer in collective.transfers)
        if collective.bytes_sent is None:
            each = " an iteration"
    return f"{bytes_or_dash(total)}{each}"


def bytes_or_dash(count: int) -> str:
    if not count:
        return "-"
    return show_bytes(count)


def _summary(plan: Plan) -> Iterator[str]:
    for array in plan.gathered:
        axes = listed(array.gathered)
        yield f"{array.path} is gathered over {axes}, which in_axes name for no dimension"
    yield f"each device holds {show_bytes(plan.bytes_held)} of arguments and results"
    if not plan.transfers:
        yield "nothing moves between devices"
        return
    total = f"in all, each device sends {sent_in_words(plan.sent_over)}"
    if plan.bytes_sent is None:
        total += ", and more in each iteration of a while loop"
    yield total


# --------------------------------------------------------------------------- searches

LEGEND = (
    "devices: how many devices do different work. held: arguments and results of the calls on a "
    "device, exactly; not the peak. sent: by a device, over each axis. -: dominated: another "
    "assignment keeps as many devices busy, is worse in no column and better in one"
)


def text_of_search(found: Candidates) -> str:
    usable = [c for c in found if c.refused is None]
    count = plural(len(usable), "assignment")
    head = f"{count} to {_show_mesh(found.mesh)}; the order is not a ranking"
    parts = [f"{head}\n{textwrap.fill(LEGEND, WIDTH)}"]
    if usable:
        parts.append("\n".join(table(_usable_rows(usable))))
    parts.append(_table("refused, why", _refused_rows(found)))
    return "\n\n".join(filter(None, parts))


def _usable_rows(usable: Sequence[Candidate]) -> Rows:
    """The first candidates of a search, dominated ones last."""
    over = list(dict.fromkeys(axes for c in usable for axes in c.bytes_sent))
    sent_titles = [f"sent {axes_name(axes)}" for axes in over]
    rows: Rows = [("", "axis_resources", "devices", "held", *sent_titles)]
    for c in usable[:MAX_CANDIDATES]:
        dominated = "-" * c.dominated
        sent = [bytes_or_dash(c.bytes_sent.get(axes, 0)) for axes in over]
        rows.append((dominated, c.name, str(c.devices), show_bytes(c.bytes_held), *sent))
    hidden = len(usable) - MAX_CANDIDATES
    if hidden > 0:
        more = f"... and {hidden} more: see found[{MAX_CANDIDATES}:]"
        rows.append(("", more, *[""] * (len(rows[0]) - 2)))
    return rows


def _refused_rows(found: Candidates) -> Rows:
    """The refused candidates; whole messages are in ``.refused``."""
    refused = [c for c in found if c.refused is not None]
    reasons = by_key(refused, lambda c: re.split(r"\. |, but |\n", c.refused or "")[0])
    return [(with_more([c.name for c in group]), why) for why, group in reasons.items()]
