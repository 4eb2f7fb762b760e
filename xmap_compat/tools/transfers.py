"""What the collectives of a call became, read from the staged program: the words and the transfers of a plan.

Each equation of the named program that may leave something between devices is evaluated under a named scope, its
mark.  The words of a plan are those of the operations found under a mark, so they cannot differ from what runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xmap_compat import _jax
from xmap_compat.core.evaluate import Evaluator
from xmap_compat.core.placement import DeviceAxis, Placement
from xmap_compat.core.rules.parameters import mentioned_names
from xmap_compat.core.rules.table import RULES
from xmap_compat.core.specs import AxisName
from xmap_compat.core.values import NamedValue
from xmap_compat.tools.listing import Position, named_type, position_of
from xmap_compat.tools.text import listed, plural, short_type, show_bytes


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective between devices.

    Attributes:
      kind: ``'all-reduce'``, ``'all-gather'``, ``'reduce-scatter'``, ``'all-to-all'`` or ``'ppermute'``.
      mesh_axes: the mesh axes that it goes over.
      devices: how many devices take part in each group.
      operand: its type on each device.
      slabs: for a ppermute, how many elements of the named axis each sender sends; else None.
      bytes_sent: what each device sends at least, once, as rings do it.
      times: how often a call runs it; None in a while loop, of which nobody knows the number of turns.
      conditional: whether it is in a branch of a cond.
      derivative: whether it is of a derivative of the function, and not of the function itself.
      axes: the named axes of the collective that it is for; empty for what only a derivative needs.
      where: the user's call.
    """

    kind: str
    mesh_axes: tuple[Any, ...]
    devices: int
    operand: str
    slabs: int | None
    bytes_sent: int
    times: int | None
    conditional: bool
    derivative: bool = False
    axes: tuple[AxisName, ...] = ()
    where: Position | None = None

    @property
    def total(self) -> int | None:
        """What each device sends for it in a call; None in a while loop."""
        return None if self.times is None else self.bytes_sent * self.times

    @property
    def counted(self) -> int:
        """What each device sends for it in a call; of a while loop, in one turn."""
        return self.bytes_sent if self.total is None else self.total


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective over named axes of the user's program, and what it became on the devices.

    Attributes:
      primitive: as in the program: ``'psum'``, ``'pdot'``, ...; ``'while'`` for the agreement of devices to go on.
      axes: the named axes, in the user's order.
      where: the user's call.
      operands: their named types.
      became: ``'local sum, all-reduce over x'``: what a device does for it, in the order of its first steps.
      transfers: what crosses devices; empty if nothing does.
    """

    primitive: str
    axes: tuple[AxisName, ...]
    where: Position | None
    operands: tuple[str, ...]
    became: str
    transfers: tuple[Transfer, ...]

    @property
    def bytes_sent(self) -> int | None:
        """What each device sends in a call, all turns and branches counted; None in a while loop."""
        return total_bytes(self.transfers)


def total_bytes(transfers: Iterable[Transfer]) -> int | None:
    """What each device sends for all of them; None if that depends on a while loop."""
    sent = [t.total for t in transfers]
    return None if None in sent else sum(n for n in sent if n)


# ------------------------------------------------------------- what each equation leaves


class Sites:
    """Equations of the named program that were evaluated, each with a mark for what it leaves in the staged one."""

    def __init__(self):
        self.found: dict[tuple[int, ...], Site] = {}
        self.calls: list[Mapping[AxisName, Placement]] = []
        self._path: list[int] = []
        self._positions: list[Position | None] = []

    def of_call(self, placements: Mapping[AxisName, Placement]) -> str:
        """The mark of a call, for what none of its equations is the reason of."""
        self.calls.append(placements)
        return f"{_CALL_MARK}{len(self.calls) - 1}"

    @contextlib.contextmanager
    def at(self, eqn, operands, placements) -> Iterator[str]:
        """The mark of an equation; an equation in a function that is called twice has two."""
        self._path.append(id(eqn))
        where = position_of(eqn) or (self._positions[-1] if self._positions else None)
        site = Site(len(self.found), eqn, tuple(map(_held, operands)), where, placements)
        site = self.found.setdefault(tuple(self._path), site)
        self._positions.append(where)
        try:
            yield f"{_MARK}{site.number}"
        finally:
            self._path.pop()
            self._positions.pop()


_MARK, _CALL_MARK = "xmap_compat_site_", "xmap_compat_call_"


@dataclasses.dataclass(frozen=True)
class Site:
    """An equation of the named program that may have left collectives in the staged one."""

    number: int
    eqn: Any
    operands: tuple[Held, ...]
    where: Position | None
    placements: Mapping[AxisName, Placement]


@dataclasses.dataclass(frozen=True)
class Held:
    """An operand of such an equation.

    Attributes:
      names: the axes that it varies over.
      shape: its positional shape.
    """

    names: frozenset[AxisName]
    shape: tuple[int, ...]
    dtype: Any


def _held(value: NamedValue) -> Held:
    aval = jax.typeof(value.data)
    return Held(value.names, tuple(n for n, name in zip(aval.shape, value.dims) if name is None), aval.dtype)


@dataclasses.dataclass(frozen=True)
class Watching(Evaluator):
    """Evaluates as usual, under a named scope for each equation that may leave collectives between devices."""

    sites: Sites = dataclasses.field(default_factory=Sites)

    def call(self, jaxpr, operands, name):
        return self.evaluate(jaxpr, operands)  # each call is a site of its own

    def equation(self, eqn, operands):
        if eqn.primitive.name not in RULES and _jax.read(eqn) is None:
            return super().equation(eqn, operands)
        with self.sites.at(eqn, operands, self.loc.placements) as mark, jax.named_scope(mark):
            return super().equation(eqn, operands)


def collectives(jaxpr: Any, sites: Sequence[Site]) -> tuple[Collective, ...]:
    """What each site became in a staged program; sites that hold others and left nothing themselves are not listed."""
    steps: dict[int | None, list[Any]] = {}
    for here, step in _steps(jaxpr):
        steps.setdefault(here.mark, []).append(step)
    found = (
        _collective(site, _merged(_explained(step, site) for step in steps.get(site.number, []))) for site in sites
    )
    return tuple(c for c in found if c.transfers or c.operands or c.axes)


def every_transfer(jaxpr: Any, sites: Sites) -> tuple[Transfer, ...]:
    """All transfers of a staged program, in its order."""
    known = tuple(sites.found.values())
    moved = [(here, step) for here, step in _steps(jaxpr) if isinstance(step, Transfer)]
    told = [(here, t if here.mark is None else _explained(t, known[here.mark])) for here, t in moved]
    return tuple(
        t
        if t.axes or here.call is None
        else dataclasses.replace(t, axes=_split_over(sites.calls[here.call], t.mesh_axes))
        for here, t in told
    )


def _explained(step: Any, site: Site) -> Any:
    """A transfer with the named axes and the line of the site that left it."""
    if isinstance(step, str):
        return step
    split = _split_over(site.placements, step.mesh_axes)
    names = mentioned_names(site.eqn.params) if site.eqn.primitive.name in RULES else ()
    own = [n.taken_by if isinstance(n, DeviceAxis) else n for n in names if n in split or isinstance(n, DeviceAxis)]
    return dataclasses.replace(step, axes=tuple(own) or split, where=site.where or step.where)


def _split_over(placements: Mapping[AxisName, Placement], mesh_axes: Sequence[Any]) -> tuple[AxisName, ...]:
    """The named axes that are split over some of these mesh axes."""
    return tuple(n for n, p in placements.items() if not isinstance(n, DeviceAxis) and _is_over(p, mesh_axes))


def _is_over(placement: Placement, mesh_axes: Sequence[Any]) -> bool:
    """Whether an axis is split over some of these mesh axes; those of a nested xmap are named axes of the outer one."""
    return any((a.mesh_axis if isinstance(a, DeviceAxis) else a) in mesh_axes for a in placement.mesh_axes)


def _collective(site: Site, steps: Sequence[Step]) -> Collective:
    primitive, params = site.eqn.primitive.name, site.eqn.params
    own = primitive in RULES
    transfers = tuple(step for step in steps if isinstance(step, Transfer))
    if not own:  # it holds others, which have rows of their own
        steps = [
            *(["agreement of the devices to go on"] if isinstance(_jax.read(site.eqn), _jax.While) else []),
            *transfers,
        ]
    words = list(dict.fromkeys(step if isinstance(step, str) else _phrase(step, transfers) for step in steps))
    told = [word for word in words if word != RESHAPED] or words
    return Collective(
        {"reduce_scatter": "psum_scatter"}.get(primitive, primitive),
        mentioned_names(params) if own else (),
        site.where,
        tuple(named_type(o.dtype, o.shape, o.names, site.placements) for o in site.operands) if own else (),
        ", ".join(told) or "nothing to do",
        transfers,
    )


def _phrase(transfer: Transfer, every: Sequence[Transfer]) -> str:
    """A transfer in words, with the number of all that differ from it in what they carry only."""
    kind_of = lambda t: (t.kind, t.mesh_axes, t.slabs, t.conditional)  # noqa: E731
    times = [t.times for t in every if kind_of(t) == kind_of(transfer)]
    total = None if None in times else sum(n for n in times if n)
    over = f"over {listed(transfer.mesh_axes)}"
    kind = f"ppermute of {plural(transfer.slabs, 'slab')}" if transfer.slabs is not None else transfer.kind
    turns = {1: "", None: " (each turn)"}.get(total, f" ({total} times)")
    return f"{kind} {over}{turns}" + (" (in a branch)" if transfer.conditional else "")


# ------------------------------------------------- what a device does, read from the staged program

Step = Transfer | str

# Collectives between devices.
KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "ppermute",
}

_INDICES = ("axis_index", "iota")

# Of the rest, what a reader wants to know: other operations change element by element, or only types.
RESHAPED = "a change of shape"
_LOCAL = {
    "reduce_sum": "local sum",
    "reduce_max": "local max",
    "reduce_min": "local min",
    "dot_general": "local dot",
    "transpose": "local transposition",
    **dict.fromkeys(_INDICES, "index arithmetic"),
    **dict.fromkeys(("slice", "dynamic_slice", "gather", "concatenate", "rev"), "local indexing"),
    **dict.fromkeys(("reshape", "broadcast_in_dim", "squeeze", "expand_dims"), RESHAPED),
}


@dataclasses.dataclass(frozen=True)
class _Around:
    """What surrounds an equation of a staged program.

    Attributes:
      stack: its named scopes.
      mesh_shape: the axes of the mesh that it runs on.
      mark: the site that left it.
      call: the xmapped call that it is in, if that is marked.
      times: how often it runs; None in a while loop.
      conditional: whether it is in a branch of a cond.
    """

    stack: str = ""
    mesh_shape: Mapping[Any, int] = dataclasses.field(default_factory=dict)
    mark: int | None = None
    call: int | None = None
    times: int | None = 1
    conditional: bool = False

    def inside(self, eqn: Any) -> _Around:
        own = _jax.name_stack(eqn)
        if not own:
            return self
        mark, call = _last_number(_MARK, own, self.mark), _last_number(_CALL_MARK, own, self.call)
        return dataclasses.replace(self, stack=f"{self.stack}/{own}", mark=mark, call=call)

    def below(self, found: Any) -> _Around:
        """What surrounds the programs in a structured equation."""
        turns = found.length if isinstance(found, _jax.Scan) else None if isinstance(found, _jax.While) else 1
        times = None if self.times is None or turns is None else self.times * turns
        mesh_shape = found.mesh_shape if isinstance(found, _jax.ShardMap) else self.mesh_shape
        conditional = self.conditional or isinstance(found, _jax.Cond)
        return dataclasses.replace(self, mesh_shape=mesh_shape, times=times, conditional=conditional)


def _last_number(mark: str, stack: str, otherwise: int | None) -> int | None:
    found = re.findall(rf"{mark}(\d+)", stack)
    return int(found[-1]) if found else otherwise


def _steps(
    jaxpr: Any, around: _Around = _Around(), used: Sequence[bool] | None = None
) -> Iterator[tuple[_Around, Step]]:
    """What a staged program does for each marked equation, and every transfer; ``used``: which results are needed."""
    body, _ = _jax.open_jaxpr(jaxpr)
    needed = {v for k, v in enumerate(body.outvars) if (used is None or used[k]) and not isinstance(v, _jax.Literal)}
    alive = []
    for eqn in reversed(body.eqns):
        if needed.intersection(eqn.outvars) or _jax.has_side_effect(eqn):
            needed.update(v for v in eqn.invars if not isinstance(v, _jax.Literal))
            alive.append(eqn)
    indices: dict[Any, int | None] = {}  # what an equation computes from the place of the device and nothing else
    tangents: set[Any] = set()
    for eqn in reversed(alive):
        here = around.inside(eqn)
        read = [v for v in eqn.invars if not isinstance(v, _jax.Literal)]
        if eqn.primitive.name in _INDICES or all(v in indices and indices[v] == here.mark for v in read):
            indices.update(dict.fromkeys(eqn.outvars, here.mark))
        step = _transfer(eqn, here, tangents) or _local_step(eqn, indices)
        if step is not None and (here.mark is not None or isinstance(step, Transfer)):
            yield here, step
        found = _jax.read(eqn)
        whole = isinstance(found, (_jax.Call, _jax.ShardMap))
        for sub in _jax.subjaxprs(eqn.params):
            yield from _steps(sub, here.below(found), [v in needed for v in eqn.outvars] if whole else None)


def _local_step(eqn: Any, indices: Container[Any]) -> str | None:
    primitive = eqn.primitive.name
    if primitive != "mul":
        return None if eqn.params.get("axes") == () else _LOCAL.get(primitive)
    if eqn.outvars[0] in indices:
        return None
    # A sum over an axis that a value does not vary over is a multiplication by its size.
    factors = [v.val for v in eqn.invars if isinstance(v, _jax.Literal)]
    return f"times {int(np.real(factors[0]))}" if factors else "local product"


def _transfer(eqn, here: _Around, tangents: set[Any]) -> Transfer | None:
    kind = KINDS.get(eqn.primitive.name)
    if kind is None:
        return None
    axes = tuple(a for a in mentioned_names(eqn.params) if a in here.mesh_shape)
    axes = _crossed(eqn.params["perm"], axes, here.mesh_shape) if kind == "ppermute" else axes
    devices = math.prod(here.mesh_shape[a] for a in axes)
    if devices == 1:
        return None
    avals = [v.aval for v in eqn.invars]
    size = sum(math.prod(a.shape) * itemsize(a.dtype) for a in avals)
    operand = ", ".join(short_type(a.dtype, a.shape) for a in avals)
    slabs = avals[0].shape[0] if kind == "ppermute" and avals[0].shape else None
    sent = bytes_sent(kind, size, devices)
    # Forward mode stages the same operation twice, for the value and then for its tangent.
    key = here.mark, eqn.primitive.name, str(eqn.params), operand
    derivative = "transpose(" in here.stack or ("jvp(" in here.stack and key in tangents)
    tangents.add(key)
    where = position_of(eqn)
    return Transfer(kind, axes, devices, operand, slabs, sent, here.times, here.conditional, derivative, where=where)


def _crossed(pairs: Sequence[tuple[int, int]], axes: tuple[Any, ...], mesh_shape: Mapping[Any, int]) -> tuple[Any, ...]:
    """Of several mesh axes those along which some pair differs; all of them if none does."""
    if len(axes) < 2:
        return axes
    ends = np.unravel_index(np.array(pairs, int).reshape(-1, 2).T, [mesh_shape[a] for a in axes])
    return tuple(a for a, (source, target) in zip(axes, ends) if (source != target).any()) or axes


def bytes_sent(kind: str, size: int, devices: int) -> int:
    """What each of n devices that hold ``size`` bytes must send: all-reduce is reduce-scatter and all-gather."""
    scattered = -(-size * (devices - 1) // devices)
    return {
        "all-reduce": 2 * scattered,
        "all-gather": size * (devices - 1),
        "reduce-scatter": scattered,
        "all-to-all": scattered,
    }.get(kind, size)


def alike_transfers(transfers: Sequence[Transfer]) -> list[tuple[Transfer, int]]:
    """Transfers that differ in what they carry only become one that carries all of it, with their number."""
    found: dict[Transfer, list[Transfer]] = {}
    for t in transfers:
        found.setdefault(dataclasses.replace(t, bytes_sent=0, operand="", slabs=None), []).append(t)
    return [(dataclasses.replace(key, bytes_sent=sum(t.bytes_sent for t in ts)), len(ts)) for key, ts in found.items()]


def described(t: Transfer, count: int = 1) -> str:
    """``2 x all-reduce of batch over x: 1.5 kB, 3 times (step.py:12)``"""
    many = f"{count} x " if count > 1 else ""
    names = f" of {listed(t.axes)}" if t.axes else ""
    turns = ", each turn" if t.times is None else f", {t.times} times" if t.times > 1 else ""
    where = f" ({t.where})" if t.where else ""
    return f"{many}{t.kind}{names} over {listed(t.mesh_axes)}: {show_bytes(t.bytes_sent)}{turns}{where}"


def itemsize(dtype: Any) -> int:
    return getattr(dtype, "itemsize", 0)


def _merged(steps: Iterable[Step]) -> list[Step]:
    """Equal steps once; of transfers with the number of times added up."""
    counted: dict[Step, int | None] = {}
    for step in steps:
        times = step.times if isinstance(step, Transfer) else 1
        key = step if isinstance(step, str) else dataclasses.replace(step, times=None if times is None else 1)
        before = counted.get(key, 0)
        counted[key] = None if times is None or before is None else before + times
    return [s if isinstance(s, str) else dataclasses.replace(s, times=times) for s, times in counted.items()]
