"""What the collectives of a program became, read from the staged program: the words and the
transfers of a plan.

Each equation of a named program that may leave collectives between devices gets a number, and is
evaluated under a named scope with this number.  A plan describes the operations in that scope, so
it cannot differ from what runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat.core.call import PlacedCall
from xmap_compat.core.collectives import COLLECTIVES
from xmap_compat.core.evaluate import Evaluator
from xmap_compat.core.parameters import mentioned_names
from xmap_compat.core.placement import MeshAxis, Placement
from xmap_compat.core.specs import AxisName
from xmap_compat.tools.staged import Operation, Position, StagedProgram, bytes_of, position_of
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
      derivative: whether it belongs to a derivative of the function, and not to the function
        itself.
      axes: the named axes of the collective that it is for; empty for a transfer that only a
        derivative needs.
      where: the user's call.
    """

    kind: str
    mesh_axes: tuple[Any, ...]
    devices: int
    operand: str
    bytes_sent: int
    times: int | None
    conditional: bool
    derivative: bool = False
    axes: tuple[AxisName, ...] = ()
    where: Position | None = None

    @property
    def total(self) -> int | None:
        """The bytes that each device sends for it in a call; None in a while loop."""
        if self.times is None:
            return None
        return self.bytes_sent * self.times

    @property
    def counted(self) -> int:
        """The bytes that each device sends for it in a call; a while loop counts as one
        iteration.
        """
        if self.times is None:
            return self.bytes_sent
        return self.bytes_sent * self.times


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective over named axes of the user's program, and what it became on the devices.

    Attributes:
      primitive: its name: ``'psum'``, ``'pdot'``, ...; ``'while'`` for the agreement of devices to
        go on; ``'all-reduce'``, ... for a transfer that belongs to no collective of the program.
      axes: the named axes, in the user's order.
      where: the position of the user's call.
      derivative: whether this is what its derivative does.
      became: ``'all-reduce over x'``, or ``'no transfer'``: what moves between devices for it.
      transfers: its transfers between devices; empty if there are none.
    """

    primitive: str
    axes: tuple[AxisName, ...]
    where: Position | None
    derivative: bool
    became: str
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
    def bytes_sent(self) -> int | None:
        """The bytes that each device sends in a call, with all iterations and branches; None in a
        while loop.
        """
        return total_bytes(self.transfers)

    @property
    def bytes_counted(self) -> int:
        """The same, where a while loop counts as one iteration."""
        return sum(t.counted for t in self.transfers)


def total_bytes(transfers: Iterable[Transfer]) -> int | None:
    """The bytes that each device sends for some transfers; None if they depend on a while loop."""
    total = 0
    for transfer in transfers:
        if transfer.total is None:
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
        sent[key] = sent.get(key, 0) + transfer.counted
    return sent


# ------------------------------------------------------------- what each equation leaves

_EQUATION = "xmap_compat_equation_"
_CALL = "xmap_compat_call_"


@dataclasses.dataclass(frozen=True)
class _Source:
    """What an operation comes from: an equation of a named program, or a call around it.

    Attributes:
      number: of the equation; None for a transfer that comes from none.
      primitive, axes, where: see :class:`Collective`.
      placements: where the named axes lie.
    """

    number: int | None
    primitive: str
    axes: tuple[AxisName, ...]
    where: Position | None
    placements: Mapping[AxisName, Placement] = dataclasses.field(compare=False)

    @property
    def is_collective(self) -> bool:
        return self.primitive in COLLECTIVES

    def axes_of(self, mesh_axes: Sequence[Any]) -> tuple[AxisName, ...]:
        """The named axes that a transfer over some mesh axes is for."""
        split = []
        for name, placement in self.placements.items():
            # The mesh axes of a nested xmap are named axes of the outer one.
            over = {getattr(axis, "mesh_axis", axis) for axis in placement.mesh_axes}
            if not isinstance(name, MeshAxis) and not over.isdisjoint(mesh_axes):
                split.append(name)
        own = []
        for name in self.axes:
            if isinstance(name, MeshAxis):
                own.append(name.taken_by)
            elif name in split:
                own.append(name)
        return tuple(own or split)


class Scopes:
    """The named scopes of calls and equations, which tell what an operation comes from."""

    def __init__(self) -> None:
        self.equations: list[_Source] = []
        self._calls: list[_Source] = []
        self._known: dict[Any, _Source] = {}
        self._around: list[Any] = []

    def around_call(self, placed: PlacedCall) -> contextlib.AbstractContextManager[Any]:
        """The scope of a call, for operations that come from none of its equations."""
        self._calls.append(_Source(None, "", (), None, placed.placements))
        return jax.named_scope(f"{_CALL}{len(self._calls) - 1}")

    @contextlib.contextmanager
    def around_equation(self, eqn: Any, placements: Mapping[AxisName, Placement]) -> Iterator[None]:
        """The scope of an equation; an equation in a function that is called twice has two."""
        self._around.append(eqn)
        key = tuple(map(id, self._around))
        if key not in self._known:
            source = self._source(eqn, placements)
            self._known[key] = source
            self.equations.append(source)
        try:
            with jax.named_scope(f"{_EQUATION}{self._known[key].number}"):
                yield
        finally:
            self._around.pop()

    def _source(self, eqn: Any, placements: Mapping[AxisName, Placement]) -> _Source:
        primitive = str(eqn.primitive.name)
        axes: tuple[AxisName, ...] = ()
        if primitive in COLLECTIVES:
            axes = mentioned_names(eqn.params)
        positions = map(position_of, reversed(self._around))
        where = next(filter(None, positions), None)
        return _Source(len(self.equations), primitive, axes, where, placements)

    def source_of(self, stack: str) -> _Source | None:
        """The innermost equation of some named scopes, or else the innermost call."""
        for prefix, sources in ((_EQUATION, self.equations), (_CALL, self._calls)):
            numbers = re.findall(rf"{prefix}(\d+)", stack)
            if numbers:
                return sources[int(numbers[-1])]
        return None


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
        with self.scopes.around_equation(eqn, self.view.placements):
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


class Reader:
    """Reads what the operations of a staged program send."""

    def __init__(self, program: StagedProgram, scopes: Scopes) -> None:
        self._scopes = scopes
        self._staged: set[Any] = set()
        self._sources: list[_Source] = []
        self._transfers: list[Transfer] = []
        self._read(program, times=1, conditional=False)

    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers, in the order of the program."""
        return tuple(self._transfers)

    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of the named programs, those of derivatives, and other transfers."""
        sent: dict[Any, list[Transfer]] = {}
        for source in self._scopes.equations:
            sent[source, False] = []
        for source, transfer in zip(self._sources, self._transfers):
            sent.setdefault((source, transfer.derivative), []).append(transfer)
        found = []
        for (source, derivative), own in sent.items():
            is_named = source.is_collective and not derivative
            if own or is_named:
                found.append(_collective(source, derivative, own))
        return tuple(found)

    def _read(self, program: StagedProgram, times: int | None, conditional: bool) -> None:
        for operation in program.operations:
            is_repeated = operation in program.repeated
            if operation.name in KINDS and not is_repeated:
                self._add(operation, times, conditional)
            inside = None
            if times is not None and operation.iterations is not None:
                inside = times * operation.iterations
            in_branch = conditional or isinstance(operation.found, _jax.Cond)
            for branch in operation.branches:
                self._read(branch, inside, in_branch)

    def _add(self, operation: Operation, times: int | None, conditional: bool) -> None:
        """Note a collective as a transfer, if it crosses devices."""
        sizes = operation.around.mesh_shape
        mesh_axes = tuple(axis for axis in mentioned_names(operation.eqn.params) if axis in sizes)
        devices = math.prod(sizes[axis] for axis in mesh_axes)
        if devices == 1:
            return
        kind = KINDS[operation.name]
        types = [value.aval for value in operation.operands]
        source = self._scopes.source_of(operation.stack)
        axes: tuple[AxisName, ...] = ()
        where = position_of(operation.eqn)
        if source is not None:
            axes = source.axes_of(mesh_axes)
            where = source.where or where
        if source is None or source.number is None:
            source = _Source(None, kind, axes, where, {})
        transfer = Transfer(
            kind=kind,
            mesh_axes=mesh_axes,
            devices=devices,
            operand=listed(short_type(aval.dtype, aval.shape) for aval in types),
            bytes_sent=bytes_sent(kind, sum(map(bytes_of, types)), devices),
            times=times,
            conditional=conditional,
            derivative=self._is_derivative(operation),
            axes=axes,
            where=where,
        )
        self._sources.append(source)
        self._transfers.append(transfer)

    def _is_derivative(self, operation: Operation) -> bool:
        """Whether an operation belongs to a derivative; ask once for each, as it is noted.

        Forward mode stages an operation twice, the second time for the tangent.
        """
        source = self._scopes.source_of(operation.stack)
        types = [str(value.aval) for value in operation.operands]
        key = operation.around, source, operation.name, str(operation.eqn.params), *types
        is_second = key in self._staged
        self._staged.add(key)
        is_tangent = is_second and "jvp(" in operation.stack
        return is_tangent or "transpose(" in operation.stack


def _collective(source: _Source, derivative: bool, transfers: Sequence[Transfer]) -> Collective:
    words = list(dict.fromkeys(map(_in_words, transfers)))
    if source.primitive == "while":
        words.insert(0, "agreement of the devices to go on")
    name = source.primitive
    if source.is_collective:
        name = COLLECTIVES[name].called
    became = listed(words) or "no transfer"
    return Collective(name, source.axes, source.where, derivative, became, tuple(transfers))


def _in_words(transfer: Transfer) -> str:
    words = f"{transfer.kind} over {listed(transfer.mesh_axes)}"
    if transfer.times is None:
        words += " (each iteration)"
    elif transfer.times > 1:
        words += f" ({transfer.times} times)"
    if transfer.conditional:
        words += " (in a branch)"
    return words


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
