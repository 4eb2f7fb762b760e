"""A staged program as a tree: calls and ``shard_map`` are inlined, loops and branches are its
branches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from xmap_compat import _jax
from xmap_compat.core.bodies import bodies_of


@dataclasses.dataclass(frozen=True)
class Position:
    """A place in the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


def position_of(eqn: Any) -> Position | None:
    """The line of the user that an equation comes from."""
    for file, function, line, *_ in _jax.user_frames(eqn):
        return Position(file, line, function)
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value of a program."""

    aval: Any
    literal: bool = False


def bytes_of(aval: Any) -> int:
    shape = getattr(aval, "shape", ())
    dtype = getattr(aval, "dtype", None)
    return math.prod(shape) * getattr(dtype, "itemsize", 0)


class Entry(NamedTuple):
    """A value enters a ``shard_map`` over all axes of a mesh.

    Attributes:
      spec: how it is cut there.
    """

    spec: Any
    mesh_shape: Mapping[Any, int]


@dataclasses.dataclass(frozen=True, eq=False)
class _Surroundings:
    """What is around the equations of one use of a jaxpr; two uses are never equal.

    Attributes:
      stack: the named scopes around it.
      mesh_shape: the axes of the mesh that it runs on.
    """

    stack: str = ""
    mesh_shape: Mapping[Any, int] = dataclasses.field(default_factory=dict)

    def stack_of(self, eqn: Any) -> str:
        """The named scopes around an equation of this jaxpr."""
        own = str(eqn.source_info.name_stack)
        return f"{self.stack}/{own}" if own else self.stack

    def inside(self, eqn: Any, found: Any) -> _Surroundings:
        """The surroundings of equations in the jaxprs of this equation."""
        mesh_shape = self.mesh_shape
        if isinstance(found, _jax.ShardMap):
            mesh_shape = found.mesh_shape
        return _Surroundings(self.stack_of(eqn), mesh_shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An equation; or, without one, a value that enters or leaves a shard_map, under its other
    type.

    Attributes:
      around: what is around it.
      found: its structured form (``_jax.read``), an ``Entry``, or None.
      branches: the programs in it; those of a cond are alternatives.
    """

    eqn: Any
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    around: _Surroundings
    found: Any = None
    branches: tuple[StagedProgram, ...] = ()

    @property
    def name(self) -> str:
        return "" if self.eqn is None else str(self.eqn.primitive.name)

    @property
    def stack(self) -> str:
        """The named scopes around it."""
        return self.around.stack_of(self.eqn)

    @property
    def has_side_effect(self) -> bool:
        return self.eqn is not None and _jax.has_side_effect(self.eqn)

    @property
    def iterations(self) -> int | None:
        """How often the programs in it run; None for a while loop."""
        if isinstance(self.found, _jax.While):
            return None
        if isinstance(self.found, _jax.Scan):
            return self.found.length
        return 1

    def expression(self, numbers: Mapping[Any, int]) -> Any:
        """Equal for operations that compute the same; the operation itself if that is unknown.

        Args:
          numbers: equal values have one number.
        """
        if self.eqn is None or self.branches or self.has_side_effect:
            return self
        operands: list[Any] = []
        for variable, value in zip(self.eqn.invars, self.operands):
            known = str(variable) if value.literal else numbers.get(value, value)
            operands.append(known)
        return self.name, str(self.eqn.params), *operands


@dataclasses.dataclass(frozen=True, eq=False)
class StagedProgram:
    """A program: its operations in order, without those that nothing needs, because XLA drops
    them.
    """

    inputs: tuple[Value, ...]
    operations: tuple[Operation, ...]
    results: tuple[Value, ...]

    @functools.cached_property
    def repeated(self) -> frozenset[Operation]:
        """Operations that compute once more what another one has computed; XLA runs one of them."""
        numbers: dict[Any, int] = {}
        found = set()
        for operation in self.operations:
            expression = operation.expression(numbers)
            if (expression, 0) in numbers:
                found.add(operation)
            for k, value in enumerate(operation.results):
                numbers[value] = numbers.setdefault((expression, k), len(numbers))
        return frozenset(found)


_INLINED = (_jax.Call, _jax.CustomJvp, _jax.CustomVjp, _jax.CustomVmap, _jax.Checkpoint)


def staged_program(jaxpr: Any) -> StagedProgram:
    """A staged program as a tree."""
    return _program(_jax.without_dead_code(jaxpr), _Surroundings())


def _program(jaxpr: Any, around: _Surroundings) -> StagedProgram:
    opened, _ = _jax.open_jaxpr(jaxpr)
    env = {v: Value(v.aval) for v in opened.invars}
    inputs = tuple(env.values())
    operations = tuple(_operations(opened, env, around))
    results = tuple(_value(env, v) for v in opened.outvars)
    return StagedProgram(inputs, _needed(operations, results), results)


def _needed(operations: Sequence[Operation], results: Sequence[Value]) -> tuple[Operation, ...]:
    """The operations that are needed; dead code in inlined functions with custom rules is left out
    too.
    """
    needed = set(results)
    kept = []
    for operation in reversed(operations):
        is_needed = not needed.isdisjoint(operation.results)
        if is_needed or operation.has_side_effect:
            needed.update(operation.operands)
            kept.append(operation)
    return tuple(reversed(kept))


def _value(env: dict[Any, Value], v: Any) -> Value:
    if isinstance(v, _jax.Literal):
        return Value(v.aval, literal=True)
    return env.setdefault(v, Value(v.aval))


def _operations(opened: Any, env: dict[Any, Value], around: _Surroundings) -> Iterator[Operation]:
    for eqn in opened.eqns:
        operands = tuple(_value(env, v) for v in eqn.invars)
        found = _jax.read(eqn)
        inside = around.inside(eqn, found)
        if isinstance(found, _INLINED):
            called, _ = _jax.open_jaxpr(found.body)
            given = operands[len(operands) - len(called.invars) :]
            bound = dict(zip(called.invars, given))
            yield from _operations(called, bound, inside)
            for outer, inner in zip(eqn.outvars, called.outvars):
                env[outer] = _value(bound, inner)
            continue
        results = tuple(Value(v.aval) for v in eqn.outvars)
        env.update(zip(eqn.outvars, results))
        if isinstance(found, _jax.ShardMap):
            yield from _shard_map(found, operands, results, inside)
            continue
        branches = tuple(_branches(eqn, found, inside))
        yield Operation(eqn, operands, results, around, found, branches)


def _shard_map(
    found: _jax.ShardMap, operands: Sequence[Value], results: Sequence[Value], inside: _Surroundings
) -> Iterator[Operation]:
    opened, _ = _jax.open_jaxpr(found.body)
    env = {v: Value(v.aval) for v in opened.invars}
    is_whole = found.mapped.issuperset(found.mesh_shape)
    for v, value, spec in zip(opened.invars, operands, found.in_specs):
        entry = Entry(spec, found.mesh_shape) if is_whole else None
        yield Operation(None, (value,), (env[v],), inside, entry)
    yield from _operations(opened, env, inside)
    for v, value in zip(opened.outvars, results):
        yield Operation(None, (_value(env, v),), (value,), inside)


def _branches(eqn: Any, found: Any, inside: _Surroundings) -> Iterator[StagedProgram]:
    jaxprs = []
    if found is not None:
        jaxprs = [body.jaxpr for body in bodies_of(found)]
    for jaxpr in jaxprs or _jax.subjaxprs(eqn.params):
        yield _program(jaxpr, inside)
