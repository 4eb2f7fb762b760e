"""The cost of a staged program for one device: operations, bytes, memory, and seconds if the hardware is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat.core.errors import should_be
from xmap_compat.tools.combined import combined
from xmap_compat.tools.hardware import Hardware
from xmap_compat.tools.staged import Tree
from xmap_compat.tools.text import by_key
from xmap_compat.tools.transfers import Transfer, transfers_of
from xmap_compat.tools.work import bytes_held, work_of


@dataclasses.dataclass(frozen=True)
class Cost:
    """The price of a program for one device.

    Attributes:
      flops: floating point operations; loops count with all iterations, a cond with its most expensive branch.
      bytes_accessed: bytes read from and written to memory after element-by-element operations are fused.
      bytes_sent: the bytes that each device sends, by mesh axis, or by the tuple of mesh axes of a transfer.
      memory: peak bytes of arguments, results and temporaries: an estimate, or XLA's figure for a compiled program.
      seconds: a lower bound (the largest of compute, memory and communication) and an upper one (their sum); None on
        unknown hardware, or if they depend on a while loop.
      bound: ``'compute'``, ``'memory'`` or ``'communication'``, whichever takes longest; None if ``seconds`` is None.
      parts: the seconds of each of these three; empty if ``seconds`` is None.
    """

    flops: int
    bytes_accessed: int
    bytes_sent: Mapping[Any, int]
    memory: int
    seconds: tuple[float, float] | None
    bound: str | None
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


def price(
    tree: Tree,
    mesh: _jax.AnyMesh | None,
    hardware: Hardware | None = None,
    transfers: Sequence[Transfer] | None = None,
    memory: int | None = None,
) -> Cost:
    """The price of a staged program.

    Args:
      tree: the program.
      mesh: the mesh that it runs on; None for one device.
      hardware: the hardware that it runs on; None for the published figures of the mesh's devices.
      transfers: the transfers of the compiled program; None for those of the staged one.
      memory: the bytes that it needs, if XLA has reported them.
    """
    if not isinstance(hardware, (Hardware, type(None))):
        raise should_be("The argument hardware of cost_on", "a Hardware", hardware)
    work = work_of(tree)
    asked, hardware = hardware is not None, hardware or Hardware.of(mesh)
    if transfers is None:
        transfers = transfers_of(tree, combined(tree, hardware.combined if hardware else {}))
    placed = asked or not transfers or not isinstance(mesh, jax.sharding.AbstractMesh)  # it needs per_host
    known = placed and not work.endless and all(t.times is not None for t in transfers)
    parts = hardware.parts(work, transfers, mesh) if known and hardware is not None else None
    return Cost(
        round(work.counts["flops"]),
        round(work.counts["accessed"]),
        bytes_by_axis(transfers),
        round(bytes_held(tree, work)) if memory is None else memory,
        None if parts is None else (max(parts.values()), sum(parts.values())),
        None if parts is None else max(parts, key=lambda name: parts[name]),
        parts or {},
    )


def bytes_by_axis(transfers: Sequence[Transfer]) -> dict[Any, int]:
    """Bytes that each device sends, by mesh axis or tuple of mesh axes; a while loop counts as one iteration."""
    over = by_key(transfers, lambda t: t.mesh_axes[0] if len(t.mesh_axes) == 1 else t.mesh_axes)
    return {axes: sum(t.counted for t in some) for axes, some in over.items()}
