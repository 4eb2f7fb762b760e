"""What the collectives of a call became, read from the staged program: the words and the transfers
of a plan.

Each equation of the named program that may leave collectives between devices gets a number, and is
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
from xmap_compat.core.collectives import COLLECTIVES
from xmap_compat.core.evaluate import Evaluator
from xmap_compat.core.parameters import mentioned_names
from xmap_compat.core.placement import MeshAxis, Placement
from xmap_compat.core.specs import AxisName
from xmap_compat.tools.staged import (
    Operation,
    Position,
    StagedProgram,
    Value,
    bytes_of,
    position_of,
)
from xmap_compat.tools.text import by_key, listed, plural, short_type


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
      go on.
      axes: the named axes, in the user's order.
      where: the position of the user's call.
      became: ``'local sum, all-reduce over x'``: what a device does for it, in the order of its
      first steps.
      transfers: its transfers between devices; empty if there are none.
    """

    primitive: str
    axes: tuple[AxisName, ...]
    where: Position | None
    became: str
    transfers: tuple[Transfer, ...]

    @property
    def bytes_sent(self) -> int | None:
        """The bytes that each device sends in a call, with all iterations and branches; None in a
        while loop.
        """
        return total_bytes(self.transfers)


def total_bytes(transfers: Iterable[Transfer]) -> int | None:
    """The bytes that each device sends for all transfers; None if they depend on a while loop."""
    return _sum_of_known(t.total for t in transfers)


def sent_over(transfers: Iterable[Transfer], mesh: _jax.AnyMesh | None) -> dict[Any, int]:
    """The bytes that each device sends over each axis of a mesh; a while loop counts as one
    iteration.

    A transfer over several axes at once counts for the tuple of these, in the order of the mesh.
    """
    axes = () if mesh is None else mesh.axis_names
    sent: dict[Any, int] = dict.fromkeys(axes, 0)
    for transfer in transfers:
        first, *others = sorted(
            transfer.mesh_axes, key=lambda axis: axes.index(axis) if axis in axes else len(axes)
        )
        key = (first, *others) if others else first
        sent[key] = sent.get(key, 0) + transfer.counted
    return sent


def _sum_of_known(counts: Iterable[int | None]) -> int | None:
    """The sum of counts; None if one of them is None."""
    found = list(counts)
    return None if None in found else sum(n for n in found if n)


# ------------------------------------------------------------- what each equation leaves


class EquationNumbers:
    """Numbers of the evaluated equations of the named program: named scopes tell which of them an
    operation is of.
    """

    def __init__(self):
        self.found: dict[Any, _NumberedEquation] = {}
        self.calls: list[Mapping[AxisName, Placement]] = []
        self._around: list[tuple[int, Position | None]] = []

    def scope_of_call(self, placements: Mapping[AxisName, Placement]) -> str:
        """The named scope of a call, for operations that come from none of its equations."""
        self.calls.append(placements)
        return f"{_CALL}{len(self.calls) - 1}"

    @contextlib.contextmanager
    def scope_of(self, eqn, placements) -> Iterator[str]:
        """The named scope of an equation; an equation in a function that is called twice has
        two.
        """
        where = position_of(eqn) or (self._around[-1][1] if self._around else None)
        self._around.append((id(eqn), where))
        numbered = _NumberedEquation(len(self.found), eqn, where, placements)
        number = self.found.setdefault(tuple(self._around), numbered).number
        try:
            yield f"{_EQUATION}{number}"
        finally:
            self._around.pop()


_EQUATION, _CALL = "xmap_compat_equation_", "xmap_compat_call_"


def _number(prefix: str, stack: str) -> int | None:
    """The number in the innermost named scope that begins with a prefix."""
    numbers = re.findall(rf"{prefix}(\d+)", stack)
    return int(numbers[-1]) if numbers else None


@dataclasses.dataclass(frozen=True)
class _NumberedEquation:
    """An equation of the named program that may have left collectives in the staged one."""

    number: int
    eqn: Any
    where: Position | None
    placements: Mapping[AxisName, Placement]

    @property
    def axes(self) -> tuple[AxisName, ...]:
        """The named axes that it mentions, if it is a collective."""
        return mentioned_names(self.eqn.params) if self.eqn.primitive.name in COLLECTIVES else ()


@dataclasses.dataclass(frozen=True)
class NumberingEvaluator(Evaluator):
    """Evaluates as usual, under a named scope for each equation that may leave collectives between
    devices.
    """

    numbers: EquationNumbers = dataclasses.field(default_factory=EquationNumbers)

    def call(self, jaxpr, operands, name):
        return self.evaluate(
            jaxpr, operands
        )  # the equations of each call have numbers of their own

    def equation(self, eqn, operands):
        if eqn.primitive.name not in COLLECTIVES and _jax.read(eqn) is None:
            return super().equation(eqn, operands)
        with self.numbers.scope_of(eqn, self.view.placements) as name, jax.named_scope(name):
            return super().equation(eqn, operands)


def collectives(program: StagedProgram, numbers: EquationNumbers) -> tuple[Collective, ...]:
    """The collectives of a staged program, by equation.  An equation that only holds others is left
    out.
    """
    done: dict[int | None, list[Transfer | str]] = {}
    for number, _, what in _told(program, numbers):
        done.setdefault(number, []).append(what)
    found = (
        _collective(equation, _merged(done.get(equation.number, [])))
        for equation in numbers.found.values()
    )
    return tuple(c for c in found if c.transfers or c.primitive in _NAMES.values())


def every_transfer(program: StagedProgram, numbers: EquationNumbers) -> tuple[Transfer, ...]:
    """All transfers of a staged program, in its order."""
    told = _told(program, numbers)
    moved = ((what, _number(_CALL, stack)) for _, stack, what in told if isinstance(what, Transfer))
    return tuple(
        t
        if t.axes or call is None
        else dataclasses.replace(t, axes=_split_over(numbers.calls[call], t.mesh_axes))
        for t, call in moved
    )


def _told(
    program: StagedProgram, numbers: EquationNumbers
) -> Iterator[tuple[int | None, str, Transfer | str]]:
    """Each transfer or local step of a staged program, after the number of its equation and its
    named scopes.
    """
    known = tuple(numbers.found.values())
    for operation, what in _done(program):
        number = _number(_EQUATION, operation.stack)
        if isinstance(what, Transfer) and number is not None:
            what = _explained(what, known[number])
        yield number, operation.stack, what


def _explained(transfer: Transfer, equation: _NumberedEquation) -> Transfer:
    """A transfer with the named axes and the line of the equation that left it."""
    split = _split_over(equation.placements, transfer.mesh_axes)
    axes = [n for n in equation.axes if n in split or isinstance(n, MeshAxis)]
    own = tuple(n.taken_by if isinstance(n, MeshAxis) else n for n in axes)
    return dataclasses.replace(transfer, axes=own or split, where=equation.where or transfer.where)


def _split_over(
    placements: Mapping[AxisName, Placement], mesh_axes: Sequence[Any]
) -> tuple[AxisName, ...]:
    """The named axes that are split over some of these mesh axes."""
    own = {n: p.mesh_axes for n, p in placements.items() if not isinstance(n, MeshAxis)}
    # The mesh axes of a nested xmap are named axes of the outer one.
    over = {
        n: {a.mesh_axis if isinstance(a, MeshAxis) else a for a in axes} for n, axes in own.items()
    }
    return tuple(n for n, axes in over.items() if not axes.isdisjoint(mesh_axes))


_NAMES = {name: {"reduce_scatter": "psum_scatter"}.get(name, name) for name in COLLECTIVES}


def _collective(equation: _NumberedEquation, done: Sequence[Transfer | str]) -> Collective:
    primitive = equation.eqn.primitive.name
    transfers = tuple(t for t in done if isinstance(t, Transfer))
    if primitive not in COLLECTIVES:  # it holds others, which have rows of their own
        agreement = (
            ["agreement of the devices to go on"]
            if isinstance(_jax.read(equation.eqn), _jax.While)
            else []
        )
        done = [*agreement, *transfers]
    words = list(
        dict.fromkeys(what if isinstance(what, str) else _phrase(what, transfers) for what in done)
    )
    told = [word for word in words if word != RESHAPED] or words
    became = ", ".join(told) or "nothing to do"
    return Collective(
        _NAMES.get(primitive, primitive), equation.axes, equation.where, became, transfers
    )


def _phrase(transfer: Transfer, every: Sequence[Transfer]) -> str:
    """A transfer in words, with the number of transfers that differ from it only in the values that
    they carry.
    """
    kind_of = lambda t: (t.kind, t.mesh_axes, t.elements, t.conditional)  # noqa: E731
    total = _sum_of_known(t.times for t in every if kind_of(t) == kind_of(transfer))
    over = f"over {listed(transfer.mesh_axes)}"
    kind = (
        f"ppermute of {plural(transfer.elements, 'element')}"
        if transfer.elements is not None
        else transfer.kind
    )
    iterations = {1: "", None: " (each iteration)"}.get(total, f" ({total} times)")
    return f"{kind} {over}{iterations}" + (" (in a branch)" if transfer.conditional else "")


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
RESHAPED, REPEATED = "a change of shape", "the result of an equal one"
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


def _done(
    program: StagedProgram, times: int | None = 1, conditional: bool = False
) -> Iterator[tuple[Operation, Transfer | str]]:
    """Every transfer of a program, and what the operations of numbered equations do on one
    device.
    """
    indices: set[tuple[Value, int | None]] = (
        set()
    )  # computed, for one equation, from the position of the device alone
    tangents: set[Any] = set()
    for operation in program.operations:
        if operation.eqn is None:
            continue
        number = _number(_EQUATION, operation.stack)
        read = [v for v in operation.operands if not v.literal]
        is_index = operation.name in _INDICES or all((v, number) in indices for v in read)
        indices.update((v, number) for v in operation.results if is_index)
        if operation.name in KINDS:
            what: Transfer | str | None = _transfer(operation, number, times, conditional, tangents)
            what = REPEATED if what is not None and operation in program.repeated else what
        else:
            what = _local(operation, is_index) if number is not None else None
        if what is not None:
            yield operation, what
        iterations = (
            None if times is None or operation.iterations is None else times * operation.iterations
        )
        for branch in operation.branches:
            yield from _done(
                branch, iterations, conditional or isinstance(operation.found, _jax.Cond)
            )


def _local(operation: Operation, is_index: bool) -> str | None:
    """What an operation does on one device, in words, if a reader wants to know."""
    if operation.name != "mul":
        return None if operation.eqn.params.get("axes") == () else _LOCAL.get(operation.name)
    if is_index:
        return None
    # A sum over an axis that a value does not vary over is a multiplication by its size.
    factors = [v.val for v in operation.eqn.invars if isinstance(v, _jax.Literal)]
    return f"times {int(np.real(factors[0]))}" if factors else "local product"


def _transfer(
    operation: Operation,
    number: int | None,
    times: int | None,
    conditional: bool,
    tangents: set[Any],
) -> Transfer | None:
    """A collective as a transfer; None if it crosses no devices."""
    kind, (axes, devices) = KINDS[operation.name], _crossing(operation)
    if devices == 1:
        return None
    avals = [v.aval for v in operation.operands]
    size = sum(map(bytes_of, avals))
    operand = ", ".join(short_type(a.dtype, a.shape) for a in avals)
    elements = avals[0].shape[0] if kind == "ppermute" and avals[0].shape else None
    sent = bytes_sent(kind, size, devices)
    # Forward mode stages the same operation twice, for the value and then for its tangent.
    key = operation.body, number, operation.name, str(operation.eqn.params), operand
    derivative = "transpose(" in operation.stack or ("jvp(" in operation.stack and key in tangents)
    tangents.add(key)
    where = position_of(operation.eqn)
    return Transfer(
        kind, axes, devices, operand, elements, sent, times, conditional, derivative, (), where
    )


def _crossing(operation: Operation) -> tuple[tuple[Any, ...], int]:
    """The mesh axes that a collective goes over, and the number of devices in each group: 1 if it
    moves nothing.
    """
    params, mesh_shape = operation.eqn.params, operation.body.mesh_shape
    axes = tuple(a for a in mentioned_names(params) if a in mesh_shape)
    if (
        operation.name == "ppermute" and len(axes) > 1
    ):  # those along which some pair differs; all of them if none does
        axes = axes_within(params["perm"], {a: mesh_shape[a] for a in axes}) or axes
    return axes, math.prod(mesh_shape[a] for a in axes)


def axes_within(groups: Sequence[Sequence[int]], mesh_shape: Mapping[Any, int]) -> tuple[Any, ...]:
    """The mesh axes along which the devices of some group differ."""
    places = np.unravel_index(np.array(groups, int).T, list(mesh_shape.values()))
    return tuple(axis for axis, at in zip(mesh_shape, places) if (at != at[:1]).any())


def bytes_sent(kind: str, size: int, devices: int) -> int:
    """The bytes that each device with ``size`` bytes must send; an all-reduce is a reduce-scatter
    and an all-gather.
    """
    scattered = -(-size * (devices - 1) // devices)
    return {
        "all-reduce": 2 * scattered,
        "all-gather": size * (devices - 1),
        "reduce-scatter": scattered,
        "all-to-all": scattered,
    }.get(kind, size)


def alike_transfers(transfers: Sequence[Transfer]) -> list[tuple[Transfer, int | None, int]]:
    """Transfers of one line that differ only in the values that they carry, and in how often they
    run.

    Returns:
      For each group its first transfer, how often a call runs all of them, and the bytes that each
      device sends for them; a while loop counts as one iteration.
    """
    found = by_key(
        transfers,
        lambda t: dataclasses.replace(
            t, bytes_sent=0, operand="", elements=None, times=t.times and 1
        ),
    )
    return [
        (own[0], _sum_of_known(t.times for t in own), sum(t.counted for t in own))
        for own in found.values()
    ]


def _merged(done: Iterable[Transfer | str]) -> list[Transfer | str]:
    """Each distinct entry once; equal transfers have their numbers of times added up."""
    once = lambda t: t if isinstance(t, str) or t.times is None else dataclasses.replace(t, times=1)  # noqa: E731
    alike = by_key(done, once)
    counts = [_sum_of_known(getattr(t, "times", 1) for t in some) for some in alike.values()]
    return [
        w if isinstance(w, str) else dataclasses.replace(w, times=n) for w, n in zip(alike, counts)
    ]
