"""What the traced calls of an xmapped function say: its axes, its numbers, and why it stays."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.xmap_calls import XmapCall

_COARSE = re.compile(r"\b(bf16|f16|f8_\w+)\[")  # types in the text of a program


def note_decisions(
    c: XmapCall, declared: Sequence[Any], traces: Mapping[int, Sequence[Any]]
) -> None:
    """Note in an xmap call what its declarations say, and what was decided about their traced
    calls, which ``traces`` has by the declaration's id.
    """
    for each in declared:
        c.axes |= {*each.names}
        c.has_resources = c.has_resources or any(each.resources.values())
        for placed in traces.get(id(each), ()):
            c.undeclared = c.undeclared or any(placed.undeclared)
            c.is_coarse = c.is_coarse or bool(_COARSE.search(str(placed.program.jaxpr)))
            c.refused = c.refused or next(_reasons_to_stay(placed), "")
            for name, placement in placed.placements.items():
                c.like_mesh_axes |= {name}.intersection(placement.mesh_axes)


def _reasons_to_stay(placed: Any) -> Iterator[str]:
    """Calls in which an edited program may compute something else, without an error and with the
    recorded arguments alike.
    """
    axis_on: dict[Any, Any] = {}
    for name, placement in placed.placements.items():
        for mesh_axis in placement.mesh_axes:
            # A collective over one of the axes reduces the other, where its operand has only that.
            if mesh_axis in axis_on:
                yield messages.SHARED_MESH_AXIS.format(
                    name=name, other=axis_on[mesh_axis], mesh_axis=mesh_axis
                )
            axis_on[mesh_axis] = name
