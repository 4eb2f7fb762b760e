"""``f.plan(*args)``: what an xmapped call decides and does, as a value that you can read, print and
draw.

Nothing is executed or compiled.  The call is staged out (traced) exactly as it would run, by an
evaluator that puts the operations of each equation of the named program under a named scope.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from xmap_compat import _jax
from xmap_compat.core import call as calls
from xmap_compat.core.execute import execute
from xmap_compat.core.nested import named_scopes
from xmap_compat.core.placement import Placement
from xmap_compat.core.specs import AxisName, AxisSpec, argument_path
from xmap_compat.core.watch import Watcher, watching
from xmap_compat.tools.gathered import Gathered, gathered_arguments
from xmap_compat.tools.shown import Shown
from xmap_compat.tools.staged import Position, bytes_of, position_of, staged_program
from xmap_compat.tools.text import short_type
from xmap_compat.tools.transfers import (
    Collective,
    EquationNumbers,
    NumberingEvaluator,
    Transfer,
    collectives,
    sent_over,
    total_bytes,
)

# ---------------------------------------------------------------------------- the value


@dataclasses.dataclass(frozen=True)
class Array:
    """An argument or a result.

    Attributes:
      root: the argument that it is or belongs to, such as ``params``; ``result`` for results.
      keys: the path from there, as in ``jax.tree_util.tree_flatten_with_path``.
      dtype: its element type.
      shape: its global shape.
      axes: for each dimension the named axis, or None where it is positional.
      spec: how it is partitioned over the mesh; None where no mesh is used.
      device_shape: the shape of the part on each device.
    """

    root: str
    keys: tuple[Any, ...]
    dtype: Any
    shape: tuple[int, ...]
    axes: tuple[AxisName | None, ...]
    spec: PartitionSpec | None
    device_shape: tuple[int, ...]

    @property
    def path(self) -> str:
        """``params['w1']``"""
        return argument_path(self.keys, self.root)

    @property
    def type(self) -> str:
        return short_type(self.dtype, self.shape)

    @property
    def device_type(self) -> str:
        return short_type(self.dtype, self.device_shape)

    @property
    def device_bytes(self) -> int:
        """Bytes on each device."""
        return bytes_of(jax.ShapeDtypeStruct(self.device_shape, self.dtype))


@dataclasses.dataclass(frozen=True)
class Nested:
    """A call of an xmapped function in the body.

    Attributes:
      function: its name.
      axes: its own named axes; the mesh axes that split them are taken from the mesh of the outer
      call.
      where: the position of the call.
    """

    function: str
    axes: tuple[Placement, ...]
    where: Position | None


@dataclasses.dataclass(frozen=True, repr=False)
class CallPlan(Shown):
    """All decisions about one call of an xmapped function.

    Print it, show it in a notebook, or draw it with :meth:`svg`.

    Attributes:
      function: the name of the xmapped function.
      mesh: the mesh that the call is split over; None where it runs on one device.
      axes: the named axes.
      nested: the calls of xmapped functions in the body, with outer calls first.
      arguments: one entry for each array.
      results: one entry for each array.
      collectives: the collectives, in the order of the program.
      gathered: the arguments that are gathered where they enter, as far as arrays or types have
      shardings.
    """

    function: str
    mesh: _jax.AnyMesh | None
    axes: tuple[Placement, ...]
    nested: tuple[Nested, ...]
    arguments: tuple[Array, ...]
    results: tuple[Array, ...]
    collectives: tuple[Collective, ...]
    gathered: tuple[Gathered, ...]

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The transfers between devices, in the order of the program."""
        return tuple(t for c in self.collectives for t in c.transfers)

    @property
    def bytes_held(self) -> int:
        """The bytes of arguments and results on each device; temporary values are not among
        them.
        """
        return sum(a.device_bytes for a in (*self.arguments, *self.results))

    @property
    def bytes_sent(self) -> int | None:
        """The bytes that each device sends in a call; None if they depend on a while loop."""
        return total_bytes(self.transfers)

    @property
    def sent_over(self) -> dict[Any, int]:
        """The bytes that each device sends over each mesh axis: see
        :func:`xmap_compat.tools.transfers.sent_over`.
        """
        return sent_over(self.transfers, self.mesh)


# ---------------------------------------------------------------------------- making it


def describe_made(
    declared: calls.Declaration, made: calls.PlacedCall | None, args: tuple[Any, ...]
) -> CallPlan:
    """The plan of one call, which is traced but neither compiled nor executed.

    Args:
      made: the call with its placements, if it is being traced: no function of the user runs again.
      args: as for the call; arrays may be ``jax.ShapeDtypeStruct``.
    """
    numbers, placed = EquationNumbers(), made

    def call(*args):
        nonlocal placed
        placed = calls.place_call(declared, args) if made is None else made
        with watching(
            Watcher(functools.partial(NumberingEvaluator, numbers=numbers)), jitted=False
        ):
            return execute(placed, jax.tree.leaves(args))

    jaxpr = jax.make_jaxpr(call)(*args)
    assert placed is not None
    mesh = placed.scope.mesh if placed.uses_mesh else None
    arguments = arguments_of(placed, declared, args)
    paths = [a.path for a in arguments]
    # Each nested call is at the call that holds its equations.
    nested = (
        Nested(
            call.function, call.axes, next(filter(None, map(position_of, reversed(around))), None)
        )
        for eqn, around in _jax.walk(placed.program.jaxpr)
        for call in named_scopes.calls_in(str(eqn.source_info.name_stack))
    )
    return CallPlan(
        declared.name,
        mesh,
        tuple(placed.placements.values()),
        tuple(dict.fromkeys(nested)),
        arguments,
        results_of(placed),
        collectives(staged_program(jaxpr), numbers),
        tuple(gathered_arguments(placed, jax.tree.leaves(args), paths)),
    )


def arguments_of(
    placed: calls.PlacedCall, declared: calls.Declaration, args: tuple[Any, ...]
) -> tuple[Array, ...]:
    """The arguments of a call, as they lie on the devices."""
    roots = _parameter_names(declared.fun, len(args))
    found = zip(jax.tree_util.tree_leaves_with_path(args), placed.in_specs)
    return tuple(
        _array(roots[at.idx], keys, jax.typeof(leaf), spec, placed)
        for ((at, *keys), leaf), spec in found
    )


def _parameter_names(fun: Callable[..., Any], count: int) -> list[str]:
    """The function's names for its positional arguments; ``args[2]`` for an argument without a
    name.
    """
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    single = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), None)
    more = [
        f"{rest}[{k}]" if rest else f"args[{k + len(single)}]" for k in range(count - len(single))
    ]
    return [*single, *more][:count]


def results_of(placed: calls.PlacedCall) -> tuple[Array, ...]:
    """The results of a call, as they lie on the devices."""
    types = placed.program.out_types
    tree = jax.tree.unflatten(placed.program.out_tree, range(len(types)))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return tuple(
        _array("result", p, _whole(a, s, placed), s, placed)
        for p, a, s in zip(paths, types, placed.out_specs)
    )


def _whole(aval: Any, spec: AxisSpec, placed: calls.PlacedCall) -> jax.ShapeDtypeStruct:
    """The type of a result with its named dimensions."""
    shape = list(aval.shape)
    for position, name in spec.names:
        shape.insert(position, placed.placements[name].size)
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def _array(
    root: str, keys: Sequence[Any], aval: Any, spec: AxisSpec, placed: calls.PlacedCall
) -> Array:
    named = spec.name_at()
    axes = tuple(named.get(k) for k in range(len(aval.shape)))
    parts = [placed.placements[n].devices if n is not None else 1 for n in axes]
    partition = calls.partition_spec(spec, placed.placements) if placed.uses_mesh else None
    device_shape = tuple(size // part for size, part in zip(aval.shape, parts))
    return Array(root, tuple(keys), aval.dtype, tuple(aval.shape), axes, partition, device_shape)
