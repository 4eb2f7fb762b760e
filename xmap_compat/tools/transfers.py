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
        return None if self.times is None else self.bytes_sent * self.times

    @property
    def counted(self) -> int:
        """The bytes that each device sends for it in a call; a while loop counts as one
        iteration.
        """
        return self.bytes_sent if self.total is None else self.total


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
    def bytes_sent(self) -> int | None:
        """The bytes that each device sends in a call, with all iterations and branches; None in a
        while loop.
        """
        return total_bytes(self.transfers)


def total_bytes(transfers: Iterable[Transfer]) -> int | None:
    """The bytes that each device sends for some transfers; None if they depend on a while loop."""
    return sum_of_known(t.total for t in transfers)


def sent_over(transfers: Iterable[Transfer], mesh: _jax.AnyMesh | None) -> dict[Any, int]:
    """The bytes that each device sends over each axis of a mesh; a while loop counts as one
    iteration.

    A transfer over several axes at once counts for the tuple of these, in the order of the mesh.
    """
    axes = () if mesh is None else mesh.axis_names
    sent: dict[Any, int] = dict.fromkeys(axes, 0)
    for transfer in transfers:
        others = set(transfer.mesh_axes).difference(axes)
        over = [axis for axis in axes if axis in transfer.mesh_axes]
        over.extend(sorted(others, key=str))
        key = over[0] if len(over) == 1 else tuple(over)
        sent[key] = sent.get(key, 0) + transfer.counted
    return sent


def sum_of_known(counts: Iterable[int | None]) -> int | None:
    """The sum of counts; None if one of them is None."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


# ------------------------------------------------------------- what each equation leaves

_EQUATION = "xmap_compat_equation_"
_CALL = "xmap_compat_call_"


def _number(prefix: str, stack: str) -> int | None:
    """The number in the innermost named scope that begins with a prefix."""
    numbers = re.findall(rf"{prefix}(\d+)", stack)
    return int(numbers[-1]) if numbers else None


@dataclasses.dataclass(frozen=True)
class _Origin:
    """What an operation is of.

    Attributes:
      number: of an equation of a named program; None for a transfer that belongs to none.
      primitive, axes, where, derivative: see :class:`Collective`.
    """

    number: int | None
    primitive: str
    axes: tuple[AxisName, ...]
    where: Position | None
    derivative: bool


def _name_of(primitive: str) -> str:
    """``'psum_scatter'`` for the primitive ``'reduce_scatter'``."""
    row = COLLECTIVES.get(primitive)
    return primitive if row is None else row.called


@dataclasses.dataclass(frozen=True)
class _NumberedEquation:
    """An equation of the named program that may have left collectives in the staged one."""

    number: int
    eqn: Any
    where: Position | None
    placements: Mapping[AxisName, Placement]

    @property
    def primitive(self) -> str:
        return str(self.eqn.primitive.name)

    @property
    def axes(self) -> tuple[AxisName, ...]:
        """The named axes that it mentions, if it is a collective."""
        if self.primitive not in COLLECTIVES:
            return ()
        return mentioned_names(self.eqn.params)

    def origin(self, derivative: bool) -> _Origin:
        return _Origin(self.number, self.primitive, self.axes, self.where, derivative)

    def axes_of(self, mesh_axes: Sequence[Any]) -> tuple[AxisName, ...]:
        """The named axes that a transfer over these mesh axes is for."""
        split = _split_over(self.placements, mesh_axes)
        own = []
        for name in self.axes:
            if isinstance(name, MeshAxis):
                own.append(name.taken_by)
            elif name in split:
                own.append(name)
        return tuple(own) or split


def _split_over(
    placements: Mapping[AxisName, Placement], mesh_axes: Sequence[Any]
) -> tuple[AxisName, ...]:
    """The named axes that are split over some of these mesh axes."""
    found = []
    for name, placement in placements.items():
        # The mesh axes of a nested xmap are named axes of the outer one.
        own = {getattr(axis, "mesh_axis", axis) for axis in placement.mesh_axes}
        if not isinstance(name, MeshAxis) and not own.isdisjoint(mesh_axes):
            found.append(name)
    return tuple(found)


class Scopes:
    """The named scopes of equations and calls, which tell what an operation is of."""

    def __init__(self) -> None:
        self.equations: dict[Any, _NumberedEquation] = {}
        self.calls: list[Mapping[AxisName, Placement]] = []
        self._around: list[tuple[int, Position | None]] = []

    def around_call(self, placed: PlacedCall) -> contextlib.AbstractContextManager[Any]:
        """The named scope of a call, for operations that come from none of its equations."""
        self.calls.append(placed.placements)
        return jax.named_scope(f"{_CALL}{len(self.calls) - 1}")

    @contextlib.contextmanager
    def around_equation(self, eqn: Any, placements: Mapping[AxisName, Placement]) -> Iterator[None]:
        """The named scope of an equation; an equation in a function that is called twice has
        two.
        """
        where = position_of(eqn)
        if where is None and self._around:
            where = self._around[-1][1]
        self._around.append((id(eqn), where))
        numbered = _NumberedEquation(len(self.equations), eqn, where, placements)
        known = self.equations.setdefault(tuple(self._around), numbered)
        try:
            with jax.named_scope(f"{_EQUATION}{known.number}"):
                yield
        finally:
            self._around.pop()


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


class Reader:
    """Reads what the operations of a staged program do, if somebody wants to know."""

    def __init__(self, program: StagedProgram, scopes: Scopes) -> None:
        self._scopes = scopes
        self._equations = list(scopes.equations.values())
        self._moved: set[Any] = set()
        self._with_indices: set[int] = set()
        self._steps = list(self._read(program, 1, False))

    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers, in the order of the program."""
        return tuple(what for _, what in self._steps if isinstance(what, Transfer))

    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of the named programs, those of derivatives, and other transfers."""
        done: dict[_Origin, list[Transfer | str]] = {}
        for equation in self._equations:
            done[equation.origin(False)] = []
        for origin, what in self._steps:
            done.setdefault(origin, []).append(what)
        found = {origin: _collective(origin, steps) for origin, steps in done.items()}
        # A collective that the user's function has for its own derivative only.
        for origin in list(found):
            function = dataclasses.replace(origin, derivative=False)
            if origin.derivative and found[origin].transfers and not done.get(function):
                found.pop(function, None)
        return tuple(c for origin, c in found.items() if _is_shown(origin, c))

    def _read(
        self, program: StagedProgram, times: int | None, conditional: bool
    ) -> Iterator[tuple[_Origin, Transfer | str]]:
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

    def _equation_of(self, operation: Operation) -> _NumberedEquation | None:
        number = _number(_EQUATION, operation.stack)
        return None if number is None else self._equations[number]

    def _local(self, operation: Operation) -> Iterator[tuple[_Origin, str]]:
        """What an operation does on one device, if it is a part of a collective."""
        equation = self._equation_of(operation)
        if equation is None or equation.primitive not in COLLECTIVES:
            return
        words = _LOCAL.get(operation.name)
        if operation.name in _INDICES:
            self._with_indices.add(equation.number)
        # Indices are multiplied too.
        if operation.name == "mul" and equation.number not in self._with_indices:
            words = _product(operation)
        if words is not None and operation.eqn.params.get("axes") != ():
            yield equation.origin("transpose(" in operation.stack), words

    def _moving(
        self, operation: Operation, program: StagedProgram, times: int | None, conditional: bool
    ) -> Iterator[tuple[_Origin, Transfer | str]]:
        """A collective as a transfer, if it crosses devices."""
        mesh_axes = _crossing(operation)
        devices = math.prod(operation.body.mesh_shape[axis] for axis in mesh_axes)
        if devices == 1:
            return
        equation = self._equation_of(operation)
        kind = KINDS[operation.name]
        types = [v.aval for v in operation.operands]
        operand = listed(short_type(a.dtype, a.shape) for a in types)
        elements = None
        if kind == "ppermute" and types[0].shape:
            elements = types[0].shape[0]
        transfer = Transfer(
            kind,
            mesh_axes,
            devices,
            operand,
            elements,
            bytes_sent(kind, sum(map(bytes_of, types)), devices),
            times,
            conditional,
            self._is_derivative(operation, operand),
            self._axes(operation, mesh_axes),
            position_of(operation.eqn),
        )
        if equation is None:
            origin = _Origin(None, kind, transfer.axes, transfer.where, transfer.derivative)
        else:
            transfer = dataclasses.replace(transfer, where=equation.where or transfer.where)
            origin = equation.origin(transfer.derivative)
        yield origin, REPEATED if operation in program.repeated else transfer

    def _axes(self, operation: Operation, mesh_axes: tuple[Any, ...]) -> tuple[AxisName, ...]:
        """The named axes that a transfer is for."""
        equation = self._equation_of(operation)
        axes = () if equation is None else equation.axes_of(mesh_axes)
        call = _number(_CALL, operation.stack)
        if axes or call is None:
            return axes
        return _split_over(self._scopes.calls[call], mesh_axes)

    def _is_derivative(self, operation: Operation, operand: str) -> bool:
        """Forward mode stages an operation twice, for the value and then for its tangent."""
        number = _number(_EQUATION, operation.stack)
        key = operation.body, number, operation.name, str(operation.eqn.params), operand
        is_second = key in self._moved
        self._moved.add(key)
        is_tangent = is_second and "jvp(" in operation.stack
        return is_tangent or "transpose(" in operation.stack


def _is_shown(origin: _Origin, found: Collective) -> bool:
    is_collective = origin.number is not None and found.primitive in {
        row.called for row in COLLECTIVES.values()
    }
    return bool(found.transfers) or (is_collective and not found.derivative)


def _collective(origin: _Origin, steps: Sequence[Transfer | str]) -> Collective:
    words = _words(steps)
    if origin.primitive == "while":
        words.insert(0, "agreement of the devices to go on")
    if words != [RESHAPED]:
        words = [word for word in words if word != RESHAPED]
    became = ", ".join(words) or "nothing to do"
    transfers = tuple(what for what in steps if isinstance(what, Transfer))
    name = _name_of(origin.primitive)
    return Collective(name, origin.axes, origin.where, origin.derivative, became, transfers)


def _words(steps: Iterable[Transfer | str]) -> list[str]:
    """Steps in words; transfers that differ in the values that they carry are one."""
    times: dict[tuple[str, bool], int | None] = {}
    for what in steps:
        if isinstance(what, str):
            times[what, False] = 1
        else:
            key = _phrase(what), what.conditional
            times[key] = sum_of_known([times.get(key, 0), what.times])
    words = []
    for (phrase, conditional), count in times.items():
        if count is None:
            phrase += " (each iteration)"
        elif count > 1:
            phrase += f" ({count} times)"
        if conditional:
            phrase += " (in a branch)"
        words.append(phrase)
    return words


def _phrase(transfer: Transfer) -> str:
    kind = transfer.kind
    if transfer.elements is not None:
        kind = f"ppermute of {plural(transfer.elements, 'element')}"
    return f"{kind} over {listed(transfer.mesh_axes)}"


def _product(operation: Operation) -> str | None:
    """A sum over an axis that a value does not vary over is a multiplication by its size."""
    factors = [v.val for v in operation.eqn.invars if isinstance(v, _jax.Literal)]
    return f"times {int(np.real(factors[0]))}" if len(factors) == 1 else None


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
