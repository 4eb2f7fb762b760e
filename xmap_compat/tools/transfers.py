"""What the collectives of a program became on the devices, for the words and the transfers of a
plan.

Each equation of a named program that may leave collectives between devices gets a number, and is
evaluated under a named scope with this number.  A plan describes the operations in that scope, so
it cannot differ from what runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from xmap_compat import _jax
from xmap_compat.core.collectives import COLLECTIVES
from xmap_compat.core.evaluate import Evaluator
from xmap_compat.core.parameters import mentioned_names
from xmap_compat.core.specs import AxisName
from xmap_compat.tools.staged import Around, Position, bytes_of, operations, position_of
from xmap_compat.tools.text import listed, short_type


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective between devices.

    Attributes:
      kind: ``'all-reduce'``, ``'all-gather'``, ``'reduce-scatter'``, ``'all-to-all'`` or
        ``'ppermute'``.
      mesh_axes: the mesh axes that it goes over.
      devices: how many devices take part in each group.
      operand: its type on each device.
      bytes_sent: the fewest bytes that each device sends each time, which ring algorithms reach.
      times: how often a call runs it; None in a while loop, whose trip count is unknown.
      conditional: whether it is in a branch of a cond.
      derivative: whether it belongs to the backward pass, and not to the function itself.
    """

    kind: str
    mesh_axes: tuple[Any, ...]
    devices: int
    operand: str
    bytes_sent: int
    times: int | None
    conditional: bool
    derivative: bool

    @property
    def total(self) -> int:
        """The bytes that each device sends for it in a call, with one iteration of a while loop."""
        if self.times is None:
            return self.bytes_sent
        return self.bytes_sent * self.times

    @property
    def in_words(self) -> str:
        """``all-reduce over x (3 times)``"""
        words = f"{self.kind} over {listed(self.mesh_axes)}"
        if self.times is None:
            words += " (each iteration)"
        elif self.times > 1:
            words += f" ({self.times} times)"
        if self.conditional:
            words += " (in a branch)"
        return words


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective over named axes of the user's program, and what it became on the devices.

    Attributes:
      primitive: its name: ``'psum'``, ``'pdot'``, ...; ``'while'`` for the agreement of devices to
        go on; ``'all-reduce'``, ... for a transfer that belongs to no collective of the program.
      axes: the named axes, in the user's order.
      where: the position of the user's call.
      derivative: whether this is what its derivative does.
      transfers: its transfers between devices; empty if there are none.
    """

    primitive: str
    axes: tuple[AxisName, ...]
    where: Position | None
    derivative: bool
    transfers: tuple[Transfer, ...]

    @property
    def name(self) -> str:
        """``psum over batch, derivative``"""
        name = self.primitive
        if self.axes:
            name += f" over {listed(self.axes)}"
        if self.derivative:
            name += ", derivative"
        return name

    @property
    def became(self) -> str:
        """``'all-reduce over x'``, or ``'no transfer'``: what moves between devices for it."""
        words = dict.fromkeys(transfer.in_words for transfer in self.transfers)
        return listed(words) or "no transfer"

    @property
    def bytes_sent(self) -> int | None:
        """The bytes that each device sends in a call, with all iterations and branches; None in a
        while loop.
        """
        return total_bytes(self.transfers)


def total_bytes(transfers: Iterable[Transfer]) -> int | None:
    """The bytes that each device sends for some transfers; None if they depend on a while loop."""
    total = 0
    for transfer in transfers:
        if transfer.times is None:
            return None
        total += transfer.total
    return total


def sent_over(transfers: Iterable[Transfer], mesh: _jax.AnyMesh | None) -> dict[Any, int]:
    """The bytes that each device sends over each axis of a mesh; a while loop counts as one
    iteration.

    A transfer over several axes at once counts for the tuple of these, in the order of the mesh.
    """
    axes = getattr(mesh, "axis_names", ())
    sent: dict[Any, int] = dict.fromkeys(axes, 0)
    for transfer in transfers:
        over = [axis for axis in axes if axis in transfer.mesh_axes]
        key = tuple(over or transfer.mesh_axes)
        if len(key) == 1:
            key = key[0]
        sent[key] = sent.get(key, 0) + transfer.total
    return sent


# ------------------------------------------------------------- what each equation leaves

_EQUATION = "xmap_compat_equation_"


class _Source(NamedTuple):
    """An equation of a named program, which may leave transfers.

    Attributes:
      number: that of the equation; None for a transfer that comes from none.
      primitive, axes, where: see :class:`Collective`.
    """

    number: int | None
    primitive: str
    axes: tuple[AxisName, ...]
    where: Position | None


class Scopes:
    """The named scopes of equations, which tell what an operation comes from."""

    def __init__(self) -> None:
        self.equations: list[_Source] = []
        self._known: dict[Any, int] = {}
        self._around: list[Any] = []

    @contextlib.contextmanager
    def around_equation(self, eqn: Any) -> Iterator[None]:
        """The scope of an equation; an equation in a function that is called twice has two."""
        self._around.append(eqn)
        key = tuple(map(id, self._around))
        if key not in self._known:
            self._known[key] = len(self.equations)
            self.equations.append(self._source(eqn))
        try:
            with jax.named_scope(f"{_EQUATION}{self._known[key]}"):
                yield
        finally:
            self._around.pop()

    def _source(self, eqn: Any) -> _Source:
        primitive = str(eqn.primitive.name)
        axes: tuple[AxisName, ...] = ()
        if primitive in COLLECTIVES:
            axes = mentioned_names(eqn.params)
            primitive = COLLECTIVES[primitive].called
        positions = map(position_of, reversed(self._around))
        where = next(filter(None, positions), None)
        return _Source(len(self.equations), primitive, axes, where)


@dataclasses.dataclass(frozen=True)
class NumberingEvaluator(Evaluator):
    """Evaluates as usual, under a named scope for each equation that may leave collectives between
    devices.
    """

    scopes: Scopes = dataclasses.field(default_factory=Scopes)

    def call(self, jaxpr, operands, name):
        # The equations of each call have numbers of their own.
        return self.evaluate(jaxpr, operands)

    def equation(self, eqn, operands):
        if eqn.primitive.name not in COLLECTIVES and _jax.read(eqn) is None:
            return super().equation(eqn, operands)
        with self.scopes.around_equation(eqn):
            return super().equation(eqn, operands)


# ------------------------------------------------- what a device does, read from the staged program

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


def collectives_of(jaxpr: Any, scopes: Scopes) -> tuple[Collective, ...]:
    """The collectives of the named programs, those of derivatives, and other transfers of a staged
    program.
    """
    sent: dict[Any, list[Transfer]] = {}
    for source in scopes.equations:
        if source.axes:
            sent[source, False] = []
    for eqn, around in operations(jaxpr):
        transfer = _transfer(eqn, around)
        if transfer is not None:
            numbers = re.findall(rf"{_EQUATION}(\d+)", around.scopes(eqn))
            source = _Source(None, transfer.kind, (), position_of(eqn))
            if numbers:
                source = scopes.equations[int(numbers[-1])]
            sent.setdefault((source, transfer.derivative), []).append(transfer)
    found = []
    for (source, derivative), transfers in sent.items():
        _, primitive, axes, where = source
        found.append(Collective(primitive, axes, where, derivative, tuple(transfers)))
    return tuple(found)


def _transfer(eqn: Any, around: Around) -> Transfer | None:
    """What an equation moves between devices."""
    kind = KINDS.get(eqn.primitive.name)
    sizes = around.sizes
    mesh_axes = tuple(axis for axis in mentioned_names(eqn.params) if axis in sizes)
    devices = math.prod(sizes[axis] for axis in mesh_axes)
    if kind is None or devices == 1:
        return None
    types = [v.aval for v in eqn.invars]
    return Transfer(
        kind=kind,
        mesh_axes=mesh_axes,
        devices=devices,
        operand=listed(short_type(aval.dtype, aval.shape) for aval in types),
        bytes_sent=bytes_sent(kind, sum(map(bytes_of, types)), devices),
        times=around.times,
        conditional=around.conditional,
        derivative="transpose(" in around.scopes(eqn),
    )


def bytes_sent(kind: str, size: int, devices: int) -> int:
    """The bytes that each device with ``size`` bytes must send; an all-reduce is a reduce-scatter
    and an all-gather.
    """
    scattered = -(-size * (devices - 1) // devices)
    sent = {
        "all-reduce": 2 * scattered,
        "all-gather": size * (devices - 1),
        "reduce-scatter": scattered,
        "all-to-all": scattered,
    }
    return sent.get(kind, size)
