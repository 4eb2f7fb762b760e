"""What a search finds: an assignment, the facts about it, and which assignments another one dominates."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xmap_compat.tools import errors
from xmap_compat.tools.shown import Shown, axes_name
from xmap_compat.tools.text import listed


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One assignment.

    Attributes:
      axis_resources: the argument for ``xmap``.
      devices: how many devices do different work; the others do the same as one of these.
      bytes_held: bytes of the arguments and results of the xmapped calls on each device, exactly.  Not the peak:
        temporary values, and arrays outside of the calls, are not among them.  None if it was refused.
      bytes_sent: bytes that each device sends over each mesh axis, and over tuples of them at once.
      flops, peak: XLA's figures for one device; None unless it was compiled.
      seconds: the median of the measured seconds; None unless it was run.
      noise: half the distance of the quartiles of these seconds.
      dominated: whether another one is as good in each of these figures and better in one: devices, FLOPs, peak, bytes
        held, all bytes sent; and sends no more over any mesh axis, however a transfer over several is routed.
      refused: the reason why you cannot use it; else None.
      alike: the assignments that differ from this one only by an exchange of equal mesh axes.
    """

    axis_resources: Mapping[Any, Any]
    devices: int = 1
    bytes_held: int | None = None
    bytes_sent: Mapping[Any, int] = dataclasses.field(default_factory=dict)
    flops: float | None = None
    peak: int | None = None
    seconds: float | None = None
    noise: float | None = None
    dominated: bool = False
    refused: str | None = None
    alike: tuple[Mapping[Any, Any], ...] = ()

    @property
    def name(self) -> str:
        """``batch: x, hidden: y``, and after ``=`` the assignments that are alike."""
        more = [f"{len(self.alike) - 1} more"] if len(self.alike) > 1 else []
        return " = ".join([*map(_name_of, (self.axis_resources, *self.alike[:1])), *more])

    @property
    def facts(self) -> tuple[float, ...]:
        """The figures that are compared, the less the better."""
        compiled = () if self.flops is None else (self.flops, self.peak or 0)
        return (-self.devices, *compiled, self.bytes_held or 0, sum(self.bytes_sent.values()))


def _name_of(resources: Mapping[Any, Any]) -> str:
    axes = {n: r if isinstance(r, (tuple, list)) else (r,) for n, r in resources.items() if r != ()}
    return listed(f"{n}: {axes_name(tuple(rs))}" for n, rs in axes.items()) or "one device"


@dataclasses.dataclass(frozen=True, repr=False)
class Candidates(Shown, Sequence[Candidate]):
    """The result of a search; it prints as a table, and draws what a device holds against what it sends.

    Attributes:
      mesh: the mesh.
      found: the candidates: those that were run, the fastest first; others by their facts, dominated ones last; then
        those that cannot be used.
      memory: the bytes that a device may have; None if all may be used.
      compiled: whether they were compiled, and ``memory`` was compared with XLA's peak.
    """

    mesh: Any
    found: tuple[Candidate, ...]
    memory: float | None
    compiled: bool

    def __getitem__(self, key: Any) -> Any:
        return self.found[key]

    def __len__(self) -> int:
        return len(self.found)

    @functools.cached_property
    def best(self) -> Candidate:
        """The first that can be used."""
        if not self.found or self.found[0].refused is not None:
            raise errors.nothing_found([c.refused for c in self.found])
        return self.found[0]

    @property
    def ties(self) -> str:
        """Which measured candidates cannot be told from the fastest; empty if all can."""
        run = [(c.name, c.seconds, c.noise or 0.0) for c in self.found if c.seconds is not None]
        near = [name for name, seconds, noise in run[1:] if seconds - run[0][1] < noise + run[0][2]]
        return errors.tied(run[0][0], near) if near else ""


def ranked(found: Iterable[Candidate], mesh: Any) -> list[Candidate]:
    """The candidates in order, with a mark on the dominated ones."""
    every = list(found)
    usable = [c for c in every if c.refused is None]
    marked = [
        dataclasses.replace(c, dominated=c.refused is None and any(_beats(other, c, mesh.shape) for other in usable))
        for c in every
    ]
    return sorted(marked, key=lambda c: (c.refused is not None, c.seconds or math.inf, c.dominated, c.facts))


def _beats(a: Candidate, b: Candidate, mesh_shape: Mapping[Any, int]) -> bool:
    if a.facts == b.facts or any(ours > theirs for ours, theirs in zip(a.facts, b.facts)):
        return False
    spare = {axis: float(b.bytes_sent[axis] - a.bytes_sent[axis]) for axis in mesh_shape}
    for axes in (key for key in {**a.bytes_sent, **b.bytes_sent} if key not in mesh_shape):
        more, devices = a.bytes_sent.get(axes, 0) - b.bytes_sent.get(axes, 0), math.prod(mesh_shape[k] for k in axes)
        for axis in axes:  # of all its bytes, b sends at least this share over the axis, if it comes first
            spare[axis] -= more if more > 0 else more * (mesh_shape[axis] - 1) / (devices - 1)
    return min(spare.values()) >= 0
