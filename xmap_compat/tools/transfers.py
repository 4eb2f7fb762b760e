"""What the collectives of a call became, read from the staged program: the words and the transfers of a plan.

Each equation of the named program that may leave something between devices is evaluated under a named scope, its
mark.  The words of a plan are those of the operations found under a mark, so they cannot differ from what runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xmap_compat import _jax
from xmap_compat.core.evaluate import Evaluator
from xmap_compat.core.placement import Placement
from xmap_compat.core.rules.parameters import mentioned_names
from xmap_compat.core.rules.table import RULES
from xmap_compat.core.specs import AxisName
from xmap_compat.core.values import NamedValue
from xmap_compat.tools.listing import Position, named_type, position_of
from xmap_compat.tools.text import listed, plural, short_type


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
    """

    kind: str
    mesh_axes: tuple[Any, ...]
    devices: int
    operand: str
    slabs: int | None
    bytes_sent: int
    times: int | None
    conditional: bool


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
        if any(t.times is None for t in self.transfers):
            return None
        return sum(t.bytes_sent * (t.times or 0) for t in self.transfers)


# ------------------------------------------------------------- what each equation leaves


class Sites:
    """Equations of the named program that were evaluated, each with a mark for what it leaves in the staged one."""

    def __init__(self):
        self.found: dict[tuple[int, ...], Site] = {}
        self._path: list[int] = []
        self._positions: list[Position | None] = []

    @contextlib.contextmanager
    def at(self, eqn, operands) -> Iterator[str]:
        """The mark of an equation; an equation in a function that is called twice has two."""
        self._path.append(id(eqn))
        where = position_of(eqn) or (self._positions[-1] if self._positions else None)
        site = self.found.setdefault(tuple(self._path), Site(len(self.found), eqn, tuple(map(_held, operands)), where))
        self._positions.append(where)
        try:
            yield f"{_MARK}{site.number}"
        finally:
            self._path.pop()
            self._positions.pop()


_MARK = "xmap_compat_site_"


@dataclasses.dataclass(frozen=True)
class Site:
    """An equation of the named program that may have left collectives in the staged one."""

    number: int
    eqn: Any
    operands: tuple[Held, ...]
    where: Position | None


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
        with self.sites.at(eqn, operands) as mark, jax.named_scope(mark):
            return super().equation(eqn, operands)


def collectives(
    jaxpr: Any, sites: Sequence[Site], placements: Mapping[AxisName, Placement], mesh: jax.sharding.Mesh | None
) -> tuple[Collective, ...]:
    """What each site became in a staged program; sites that hold others and left nothing themselves are not listed."""
    steps: dict[int, list[Step]] = {}
    for number, step in _steps(jaxpr, dict(mesh.shape) if mesh is not None else {}):
        steps.setdefault(number, []).append(step)
    found = (_collective(site, _merged(steps.get(site.number, [])), placements) for site in sites)
    return tuple(c for c in found if c.transfers or c.operands or c.axes)


def _collective(site: Site, steps: Sequence[Step], placements: Mapping[AxisName, Placement]) -> Collective:
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
        tuple(named_type(o.dtype, o.shape, o.names, placements) for o in site.operands) if own else (),
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
_KINDS = {
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


def _steps(
    jaxpr: Any,
    mesh_shape: Mapping[Any, int],
    mark: int | None = None,
    times: int | None = 1,
    conditional: bool = False,
) -> Iterator[tuple[int, Step]]:
    """What a staged program does for each marked equation; for collectives over mesh axes also how often."""
    body, _ = _jax.open_jaxpr(jaxpr)
    indices: dict[Any, int | None] = {}  # what an equation computes from the place of the device and nothing else
    for eqn in body.eqns:
        primitive = eqn.primitive.name
        marks = re.findall(rf"{_MARK}(\d+)", _jax.name_stack(eqn))
        here = int(marks[-1]) if marks else mark
        read = [v for v in eqn.invars if not isinstance(v, _jax.Literal)]
        if primitive in _INDICES or all(v in indices and indices[v] == here for v in read):
            indices.update(dict.fromkeys(eqn.outvars, here))
        step = _transfer(eqn, mesh_shape, times, conditional) or _local_step(eqn, indices)
        if step is not None and here is not None:
            yield here, step
        found = _jax.read(eqn)
        turns = found.length if isinstance(found, _jax.Scan) else None if isinstance(found, _jax.While) else 1
        inner = None if times is None or turns is None else times * turns
        for sub in _jax.subjaxprs(eqn.params):
            yield from _steps(sub, mesh_shape, here, inner, conditional or isinstance(found, _jax.Cond))


def _local_step(eqn: Any, indices: Container[Any]) -> str | None:
    primitive = eqn.primitive.name
    if primitive != "mul":
        return None if eqn.params.get("axes") == () else _LOCAL.get(primitive)
    if eqn.outvars[0] in indices:
        return None
    # A sum over an axis that a value does not vary over is a multiplication by its size.
    factors = [v.val for v in eqn.invars if isinstance(v, _jax.Literal)]
    return f"times {int(np.real(factors[0]))}" if factors else "local product"


def _transfer(eqn, mesh_shape, times, conditional) -> Transfer | None:
    kind = _KINDS.get(eqn.primitive.name)
    if kind is None:
        return None
    axes = tuple(a for a in mentioned_names(eqn.params) if a in mesh_shape)
    devices = math.prod(mesh_shape[a] for a in axes)
    if devices == 1:
        return None
    avals = [v.aval for v in eqn.invars]
    size = sum(math.prod(a.shape) * itemsize(a.dtype) for a in avals)
    operand = ", ".join(short_type(a.dtype, a.shape) for a in avals)
    slabs = avals[0].shape[0] if kind == "ppermute" else None
    return Transfer(kind, axes, devices, operand, slabs, _bytes_sent(kind, size, devices), times, conditional)


def _bytes_sent(kind: str, size: int, devices: int) -> int:
    """What each of n devices that hold ``size`` bytes must send: all-reduce is reduce-scatter and all-gather."""
    scattered = -(-size * (devices - 1) // devices)
    return {
        "all-reduce": 2 * scattered,
        "all-gather": size * (devices - 1),
        "reduce-scatter": scattered,
        "all-to-all": scattered,
        "ppermute": size,
    }[kind]


def itemsize(dtype: Any) -> int:
    return getattr(dtype, "itemsize", 0)


def _merged(steps: Sequence[Step]) -> list[Step]:
    """Equal steps once; of transfers with the number of times added up."""
    counted: dict[Step, int | None] = {}
    for step in steps:
        times = step.times if isinstance(step, Transfer) else 1
        key = step if isinstance(step, str) else dataclasses.replace(step, times=None if times is None else 1)
        before = counted.get(key, 0)
        counted[key] = None if times is None or before is None else before + times
    return [s if isinstance(s, str) else dataclasses.replace(s, times=times) for s, times in counted.items()]
