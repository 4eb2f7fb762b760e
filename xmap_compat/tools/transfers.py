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
import numpy as np

from xmap_compat import _jax
from xmap_compat.core.call import PlacedCall
from xmap_compat.core.collectives import COLLECTIVES
from xmap_compat.core.evaluate import Evaluator
from xmap_compat.core.parameters import mentioned_names
from xmap_compat.core.placement import MeshAxis, Placement
from xmap_compat.core.specs import AxisName
from xmap_compat.tools.staged import Operation, Position, StagedProgram, bytes_of, position_of
from xmap_compat.tools.text import listed, plural, short_type


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective between devices.

    Attributes:
      kind: ``'all-reduce'``, ``'all-gather'``, ``'reduce-scatter'``, ``'all-to-all'`` or
        ``'ppermute'``.
      mesh_axes: the mesh axes that it goes over.
      devices: how many devices take part in each group.
      operand: its type on each device.
      elements: for a ppermute, how many elements of the named axis each sender sends; else None.
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
    elements: int | None
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
      became: ``'local sum, all-reduce over x'``: what a device does for it, in the order of its
        first steps.
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

_INDICES = ("axis_index", "iota")

# Other operations that a reader wants to know; the rest work element by element, or change only
# types.
RESHAPED = "a change of shape"
REPEATED = "the result of an equal one"
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


Done = tuple[_Source, bool, Transfer | str]  # for what, for its derivative, what a device does


class Reader:
    """Reads what the operations of a staged program do, if somebody wants to know."""

    def __init__(self, program: StagedProgram, scopes: Scopes) -> None:
        self._scopes = scopes
        self._moved: set[Any] = set()
        self._with_indices: set[_Source] = set()
        self._done = list(self._read(program, 1, False))

    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers, in the order of the program."""
        return tuple(what for *_, what in self._done if isinstance(what, Transfer))

    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of the named programs, those of derivatives, and other transfers."""
        steps: dict[Any, list[Transfer | str]] = {}
        for source in self._scopes.equations:
            steps[source, False] = []
        for source, derivative, what in self._done:
            steps.setdefault((source, derivative), []).append(what)
        found = []
        for (source, derivative), own in steps.items():
            collective = _collective(source, derivative, own)
            # What a collective does on one device is shown for the function or for its derivative.
            has_other = bool(steps.get((source, not derivative)))
            is_hidden = has_other and (derivative or not own)
            is_named = source.is_collective and not is_hidden
            if is_named or collective.transfers:
                found.append(collective)
        return tuple(found)

    def _read(self, program: StagedProgram, times: int | None, conditional: bool) -> Iterator[Done]:
        for operation in program.operations:
            if operation.eqn is None:
                continue
            if operation.name in KINDS:
                yield from self._moving(operation, program, times, conditional)
            else:
                yield from self._local(operation)
            inside = None
            if times is not None and operation.iterations is not None:
                inside = times * operation.iterations
            in_branch = conditional or isinstance(operation.found, _jax.Cond)
            for branch in operation.branches:
                yield from self._read(branch, inside, in_branch)

    def _local(self, operation: Operation) -> Iterator[Done]:
        """What an operation does on one device, if it is a part of a collective."""
        source = self._scopes.source_of(operation.stack)
        if source is None or not source.is_collective:
            return
        words = _LOCAL.get(operation.name)
        if operation.name in _INDICES:
            self._with_indices.add(source)
        # Indices are multiplied too.
        if operation.name == "mul" and source not in self._with_indices:
            words = _product(operation)
        if words is not None and operation.eqn.params.get("axes") != ():
            yield source, "transpose(" in operation.stack, words

    def _moving(
        self, operation: Operation, program: StagedProgram, times: int | None, conditional: bool
    ) -> Iterator[Done]:
        """A collective as a transfer, if it crosses devices."""
        mesh_axes = _crossing(operation)
        devices = math.prod(operation.body.mesh_shape[axis] for axis in mesh_axes)
        if devices == 1:
            return
        kind = KINDS[operation.name]
        types = [v.aval for v in operation.operands]
        size = sum(map(bytes_of, types))
        elements = None
        if kind == "ppermute" and types[0].shape:
            elements = types[0].shape[0]
        source = self._scopes.source_of(operation.stack)
        axes: tuple[AxisName, ...] = ()
        where = position_of(operation.eqn)
        if source is not None:
            axes = source.axes_of(mesh_axes)
            where = source.where or where
        if source is None or source.number is None:
            source = _Source(None, kind, axes, where, {})
        transfer = Transfer(
            kind,
            mesh_axes,
            devices,
            listed(short_type(a.dtype, a.shape) for a in types),
            elements,
            bytes_sent(kind, size, devices),
            times,
            conditional,
            self._is_derivative(operation),
            axes,
            where,
        )
        is_repeated = operation in program.repeated
        yield source, transfer.derivative, REPEATED if is_repeated else transfer

    def _is_derivative(self, operation: Operation) -> bool:
        """Forward mode stages an operation twice, for the value and then for its tangent."""
        source = self._scopes.source_of(operation.stack)
        types = [str(v.aval) for v in operation.operands]
        key = operation.body, source, operation.name, str(operation.eqn.params), *types
        is_second = key in self._moved
        self._moved.add(key)
        is_tangent = is_second and "jvp(" in operation.stack
        return is_tangent or "transpose(" in operation.stack


def _collective(source: _Source, derivative: bool, steps: Sequence[Transfer | str]) -> Collective:
    words = list(dict.fromkeys(map(_in_words, steps)))
    if source.primitive == "while":
        words.insert(0, "agreement of the devices to go on")
    if words != [RESHAPED]:
        words = list(filter(RESHAPED.__ne__, words))
    became = ", ".join(words) or "nothing to do"
    transfers = tuple(what for what in steps if isinstance(what, Transfer))
    name = source.primitive
    if source.is_collective:
        name = COLLECTIVES[name].called
    return Collective(name, source.axes, source.where, derivative, became, transfers)


def _in_words(what: Transfer | str) -> str:
    if isinstance(what, str):
        return what
    words = what.kind
    if what.elements is not None:
        words += f" of {plural(what.elements, 'element')}"
    words += f" over {listed(what.mesh_axes)}"
    if what.times is None:
        words += " (each iteration)"
    elif what.times > 1:
        words += f" ({what.times} times)"
    if what.conditional:
        words += " (in a branch)"
    return words


def _product(operation: Operation) -> str | None:
    """A sum over an axis that a value does not vary over is a multiplication by its size."""
    factors = [v.val for v in operation.eqn.invars if isinstance(v, _jax.Literal)]
    if len(factors) != 1:
        return None
    return f"times {int(np.real(factors[0]))}"


def _crossing(operation: Operation) -> tuple[Any, ...]:
    """The mesh axes that a collective goes over."""
    params = operation.eqn.params
    sizes = operation.body.mesh_shape
    axes = tuple(axis for axis in mentioned_names(params) if axis in sizes)
    if operation.name == "ppermute" and len(axes) > 1:
        # Those along which some pair differs; all of them if none does.
        return _axes_within(params["perm"], {axis: sizes[axis] for axis in axes}) or axes
    return axes


def _axes_within(pairs: Sequence[Sequence[int]], mesh_shape: Mapping[Any, int]) -> tuple[Any, ...]:
    """The mesh axes along which the devices of some pair differ."""
    places = np.unravel_index(np.array(pairs, int).T, list(mesh_shape.values()))
    found = []
    for axis, (sources, targets) in zip(mesh_shape, places):
        if (sources != targets).any():
            found.append(axis)
    return tuple(found)


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
