"""A staged program as a tree of programs: calls and ``shard_map`` are inlined, loops and branches are its branches.

Outside of ``shard_map`` the compiler decides how values are cut; what it is told by the specs of shard_maps is carried
along operations that keep the number of elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xmap_compat import _jax
from xmap_compat.tools.transfers import KINDS, itemsize


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


REDUCTIONS = names("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin")
SCATTERS = names("scatter scatter-add scatter-mul scatter-min scatter-max")
# Of these the number of operations is known without the program that they hold.
COUNTED = REDUCTIONS | SCATTERS | KINDS.keys() | {"sort"}


@dataclasses.dataclass(eq=False)
class Value:
    """A value of a program; ``parts`` says into how many it is cut over devices, as far as that is known."""

    aval: Any
    parts: int | None = None
    literal: bool = False

    @property
    def elements(self) -> float:
        return math.prod(getattr(self.aval, "shape", ())) / (self.parts or 1)

    @property
    def nbytes(self) -> float:
        return 0 if self.literal else self.elements * itemsize(getattr(self.aval, "dtype", None))


@dataclasses.dataclass(frozen=True)
class Inner:
    """A program inside of an equation, and what of the equation is bound to its inputs and taken from its results."""

    program: Program
    operands: Sequence[Value]
    results: Sequence[Value]


@dataclasses.dataclass(frozen=True)
class Step:
    """An equation; or, without one, a value that enters or leaves a shard_map, under its other type.

    Attributes:
      found: what it is, if it is structured.
      inner: the programs in it; those of a cond are alternatives.
      turns: how often these run.
    """

    eqn: Any
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    found: Any = None
    inner: tuple[Inner, ...] = ()
    turns: int = 1

    @property
    def name(self) -> str:
        return "reshape" if self.eqn is None else str(self.eqn.primitive.name)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    inputs: tuple[Value, ...]
    steps: tuple[Step, ...]
    outs: tuple[Value, ...]
    memo: list[Any] = dataclasses.field(default_factory=list)


_INLINED = (_jax.Call, _jax.CustomJvp, _jax.CustomVjp, _jax.CustomVmap, _jax.Checkpoint)


def program(jaxpr: Any) -> Program:
    """A staged program as a tree."""
    body, _ = _jax.open_jaxpr(jaxpr)
    inputs = [Value(v.aval) for v in body.invars]
    env = dict(zip(body.invars, inputs))
    steps = tuple(_steps(body, env))
    outs = tuple(_value(env, v) for v in body.outvars)
    return Program(tuple(inputs), _alive(steps, outs), outs)


def _value(env: dict[Any, Value], v: Any) -> Value:
    if isinstance(v, _jax.Literal):
        return Value(v.aval, literal=True)
    return env.setdefault(v, Value(v.aval))


def _steps(body: Any, env: dict[Any, Value]) -> Iterator[Step]:
    for eqn in body.eqns:
        operands = tuple(_value(env, v) for v in eqn.invars)
        found = _jax.read(eqn)
        if isinstance(found, _INLINED):
            called, _ = _jax.open_jaxpr(found.body)
            inside = dict(zip(called.invars, operands[len(operands) - len(called.invars) :]))
            yield from _steps(called, inside)
            env.update((v, _value(inside, o)) for v, o in zip(eqn.outvars, called.outvars))
            continue
        results = tuple(Value(v.aval) for v in eqn.outvars)
        env.update(zip(eqn.outvars, results))
        if isinstance(found, _jax.ShardMap):
            yield from _shard_map(found, operands, results)
            continue
        turns = found.length if isinstance(found, _jax.Scan) else 1
        yield Step(eqn, operands, results, found, tuple(_inner(eqn, found, operands, results)), turns)


def _shard_map(found: _jax.ShardMap, operands: Sequence[Value], results: Sequence[Value]) -> Iterator[Step]:
    for value, spec in zip((*operands, *results), (*found.in_specs, *found.out_specs)):
        _tell(value, _parts_of(spec, found.mesh_shape))
    body, _ = _jax.open_jaxpr(found.body)
    env = {v: Value(v.aval) for v in body.invars}
    yield from (Step(None, (value,), (env[v],)) for v, value in zip(body.invars, operands))
    yield from _steps(body, env)
    yield from (Step(None, (_value(env, v),), (value,)) for v, value in zip(body.outvars, results))


def _inner(eqn: Any, found: Any, operands: Sequence[Value], results: Sequence[Value]) -> Iterator[Inner]:
    if isinstance(found, _jax.Cond):
        for branch in found.branches:
            yield Inner(program(branch), operands[1:], results)
    elif isinstance(found, _jax.While):
        yield Inner(program(found.body), operands[found.num_condition_consts :], results)
        yield Inner(program(found.condition), (), ())
    elif isinstance(found, _jax.Scan):
        yield Inner(program(found.body), operands, results)
    elif isinstance(found, _jax.LinearSolve):
        yield Inner(program(found.solve), (), ())
    elif eqn.primitive.name not in COUNTED:
        for sub in _jax.subjaxprs(eqn.params):
            yield Inner(program(sub), (), ())


def _alive(steps: Sequence[Step], outs: Sequence[Value]) -> tuple[Step, ...]:
    """The steps that something needs, as XLA drops the others."""
    needed, kept = set(outs), []
    for step in reversed(steps):
        if needed.intersection(step.results) or (step.eqn is not None and _jax.has_side_effect(step.eqn)):
            needed.update(step.operands)
            kept.append(step)
    return tuple(reversed(kept))


def spread_parts(program: Program) -> None:
    """Carry what is known about how values are cut: forwards, and to operands that nothing else is known of."""
    for step in program.steps:
        for inner in step.inner:
            _exchange(inner.operands, inner.program.inputs)
            spread_parts(inner.program)
            _exchange(inner.operands, inner.program.inputs)
            _exchange(inner.results, inner.program.outs)
        if step.eqn is not None and not step.inner and step.results:
            size = size_of(step.results[0].aval)
            alike = [v for v in (*step.operands, *step.results) if size_of(v.aval) == size > 1]
            parts = next((v.parts for v in alike if v.parts is not None), None)
            for value in alike:
                _tell(value, parts)


def size_of(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _tell(value: Value, parts: int | None) -> None:
    if value.parts is None:
        value.parts = parts


def _exchange(outer: Sequence[Value], inner: Sequence[Value]) -> None:
    for a, b in zip(outer, inner):
        _tell(a, b.parts)
        _tell(b, a.parts)


def _parts_of(spec: Any, mesh_shape: Mapping[Any, int]) -> int:
    axes = [a for entry in spec if entry is not None for a in (entry if isinstance(entry, tuple) else (entry,))]
    return math.prod(mesh_shape[a] for a in axes)
