"""``xmap_compat.plan(step, *args)``, and ``f.plan(*args)`` of an xmapped function: what its calls
decide, hold and send between devices, as a value that you can read, print and draw.

The program is staged out (traced) as it would run, derivatives and loops included, by evaluators
that put the operations of each collective under a named scope.  Nothing is executed, nor compiled.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from xmap_compat import _jax
from xmap_compat.core.arguments import Declaration
from xmap_compat.core.call import PlacedCall, partition_spec, place_call
from xmap_compat.core.errors import described, name_of, should_be
from xmap_compat.core.execute import execute
from xmap_compat.core.mesh import check_mesh, entered
from xmap_compat.core.named_shape import is_array
from xmap_compat.core.placement import Placement, enclosing_bodies
from xmap_compat.core.specs import AxisName, AxisSpec, argument_path
from xmap_compat.core.watch import Watcher, watcher, watching
from xmap_compat.tools.staged import bytes_of
from xmap_compat.tools.text import short_type
from xmap_compat.tools.transfers import (
    Collective,
    NumberingEvaluator,
    Scopes,
    Transfer,
    collectives_of,
    sent_over,
    total_bytes,
)

# ---------------------------------------------------------------------------- the value


@dataclasses.dataclass(frozen=True)
class Array:
    """An argument or a result.

    Attributes:
      path: ``params['w1']``, or ``result[0]``.
      dtype: its element type.
      shape: its global shape.
      axes: for each dimension the named axis, or None where it is positional.
      spec: how it is partitioned over the mesh; None where no mesh is used.
      device_shape: the shape of the part on each device.
      gathered: mesh axes that the given array is sharded over although its spec does not say so: it
        is gathered over them where it enters the call. Known of the arguments of ``f.plan``, and of
        types over Explicit axes.
    """

    path: str
    dtype: Any
    shape: tuple[int, ...]
    axes: tuple[AxisName | None, ...]
    spec: PartitionSpec | None
    device_shape: tuple[int, ...]
    gathered: tuple[Any, ...] = ()

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
    """

    function: str
    axes: tuple[Placement, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an xmapped function.

    Attributes:
      function: its name.
      mesh: the mesh that the call is split over; None where it runs on one device.
      axes: the named axes.
      arguments: one entry for each array.
      results: one entry for each array.
    """

    function: str
    mesh: _jax.AnyMesh | None
    axes: tuple[Placement, ...]
    arguments: tuple[Array, ...]
    results: tuple[Array, ...]

    @property
    def bytes_held(self) -> int:
        """The bytes of arguments and results on each device; temporary values are not among
        them.
        """
        return sum(a.device_bytes for a in (*self.arguments, *self.results))


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """What a program does that calls xmapped functions, or one such call.

    Print it, show it in a notebook, or draw it with :meth:`svg`.

    Attributes:
      function: the name of the program, or of the xmapped function.
      calls: its calls of xmapped functions, one for each function and each type of arguments.
      nested: the calls of xmapped functions in the bodies of these, inner ones first.
      collectives: the collectives in these calls and in their derivatives, in the order of the
        program.
    """

    function: str
    calls: tuple[Call, ...]
    nested: tuple[Nested, ...]
    collectives: tuple[Collective, ...]

    @property
    def mesh(self) -> _jax.AnyMesh | None:
        """The mesh of its calls; None if no call uses one."""
        meshes = (call.mesh for call in self.calls)
        return next(filter(None, meshes), None)

    @property
    def axes(self) -> tuple[Placement, ...]:
        """The named axes of all calls."""
        return _of_all(call.axes for call in self.calls)

    @property
    def arguments(self) -> tuple[Array, ...]:
        """The arguments of all calls."""
        return _of_all(call.arguments for call in self.calls)

    @property
    def results(self) -> tuple[Array, ...]:
        """The results of all calls."""
        return _of_all(call.results for call in self.calls)

    @property
    def gathered(self) -> tuple[Array, ...]:
        """The arguments that are gathered where they enter a call, as far as that is known."""
        return tuple(array for array in self.arguments if array.gathered)

    @property
    def bytes_held(self) -> int:
        """The bytes of the arguments and results of all calls on each device; temporary values are
        not among them.
        """
        return sum(call.bytes_held for call in self.calls)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """What all collectives send between devices."""
        return _of_all(collective.transfers for collective in self.collectives)

    @property
    def bytes_sent(self) -> int | None:
        """The bytes that each device sends; None if they depend on a while loop."""
        return total_bytes(self.transfers)

    @property
    def sent_over(self) -> dict[Any, int]:
        """The bytes that each device sends over each mesh axis: see
        :func:`xmap_compat.tools.transfers.sent_over`.
        """
        return sent_over(self.transfers, self.mesh)

    def __repr__(self) -> str:
        from xmap_compat.tools.plan_text import text_of_plan

        return text_of_plan(self)

    def svg(self) -> str:
        """The drawing as an SVG document."""
        from xmap_compat.tools.picture import svg

        return svg(self)

    def _repr_svg_(self) -> str:
        return self.svg()

    @_jax.api_boundary
    def save_svg(self, path: str | os.PathLike[str]) -> None:
        """Write the drawing to a file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg())


def _of_all(parts: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(itertools.chain.from_iterable(parts))


# ---------------------------------------------------------------------------- making it


@_jax.api_boundary
def plan(step: Callable[..., Any], *args: Any, mesh: _jax.AnyMesh | None = None) -> Plan:
    """The plan of any JAX function with xmapped calls in it, under the mesh in scope.

    The function may be a gradient (``jax.grad(loss)``), an optimizer step, or a scan: transfers of
    derivatives count.

    Args:
      step: the function; it is traced, not executed.
      args: its arguments, arrays or ``jax.ShapeDtypeStruct``.
      mesh: the mesh, which may be a ``jax.sharding.AbstractMesh``; None for the mesh in scope.

    Returns:
      A :class:`Plan`: ``.calls``, ``.transfers``, ``.bytes_sent``.

    Example:

      >>> import jax, numpy as np, xmap_compat
      >>> from xmap_compat import Mesh, xmap
      >>> loss = xmap(lambda v: jax.lax.psum(v**2, "i"), ["i"], {}, axis_resources={"i": "x"})
      >>> with Mesh(jax.devices()[:2], "x"):
      ...     plan = xmap_compat.plan(jax.value_and_grad(loss), np.ones(8, np.float32))
      >>> # print(plan) shows all of it
      >>> [transfer.kind for transfer in plan.transfers], plan.bytes_sent
      (['all-reduce'], 4)
    """
    if not callable(step):
        raise should_be("The argument step of plan", "a function that calls xmapped ones", step)
    with entered(check_mesh("plan", mesh)):
        return plan_of_step(step, args)


def plan_of_step(step: Callable[..., Any], args: tuple[Any, ...]) -> Plan:
    """The plan of a function under the mesh in scope."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        if not is_array(leaf):
            raise _no_array_for_step(argument_path(path, "args"), leaf)

    # A new function with the name of the step, because JAX's cache may have a trace of the step.
    @functools.wraps(step)
    def traced(*args):
        return step(*args)

    return _plan(traced, args, name_of(step))


def plan_of_call(
    declared: Declaration, args: tuple[Any, ...], placed: PlacedCall | None = None
) -> Plan:
    """The plan of one call of an xmapped function.

    Args:
      placed: the call, if it has been traced: no function of the user runs again.
    """

    @functools.wraps(declared.fun, updated=())
    def call(*tracers):
        made = placed or place_call(declared, tracers)
        watcher().traced(declared, made, args)
        return execute(made, jax.tree.leaves(tracers))

    return _plan(call, args, declared.name)


def _plan(fun: Callable[..., Any], args: tuple[Any, ...], name: str) -> Plan:
    scopes = Scopes()
    calls: dict[Any, Call] = {}
    nested: dict[Nested, None] = {}
    bodies = enclosing_bodies()

    def note(declared, placed, arguments):
        if enclosing_bodies() != bodies:
            axes = tuple(placed.placements.values())
            nested[Nested(declared.name, axes)] = None
            return
        call = _call(declared, placed, arguments)
        calls.setdefault((declared.fun, call), call)

    evaluator = functools.partial(NumberingEvaluator, scopes=scopes)
    with watching(Watcher(evaluator, note)):
        jaxpr = jax.make_jaxpr(fun)(*args)
    return Plan(name, tuple(calls.values()), tuple(nested), collectives_of(jaxpr, scopes))


def _call(declared: Declaration, placed: PlacedCall, args: tuple[Any, ...]) -> Call:
    return Call(
        declared.name,
        placed.scope.mesh if placed.uses_mesh else None,
        tuple(placed.placements.values()),
        tuple(_arguments(declared, placed, args)),
        tuple(_results(placed)),
    )


def _arguments(declared: Declaration, placed: PlacedCall, args: tuple[Any, ...]) -> Iterator[Array]:
    leaves = jax.tree.leaves(args)
    for path, leaf, spec in zip(_paths(declared.fun, args), leaves, placed.in_specs):
        array = _array(path, jax.typeof(leaf), spec, placed)
        yield dataclasses.replace(array, gathered=_gathered(leaf, array, placed))


def _gathered(leaf: Any, array: Array, placed: PlacedCall) -> tuple[Any, ...]:
    """The mesh axes that an argument is sharded over, and not named for in its spec."""
    mesh = placed.scope.mesh
    if array.spec is None or mesh is None:
        return ()
    sharding = getattr(leaf, "sharding", None)
    given: Any = ()
    if isinstance(leaf, jax.core.Tracer):
        given = _jax.explicit_spec(leaf)
    elif isinstance(sharding, NamedSharding) and dict(sharding.mesh.shape) == dict(mesh.shape):
        given = sharding.spec
    axes = _of_all(map(_jax.axes_of_entry, given))
    named = _of_all(map(_jax.axes_of_entry, array.spec))
    return tuple(axis for axis in axes if axis not in named)


def _paths(fun: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[str]:
    """``params['w1']`` by the function's names, or ``args[0]['w1']`` where it shows none."""
    try:
        named = inspect.signature(fun).bind(*args).arguments
    except (TypeError, ValueError):
        named = {"args": args}
    for name, value in named.items():
        for keys, _ in jax.tree_util.tree_leaves_with_path(value):
            yield argument_path(keys, name)


def _results(placed: PlacedCall) -> Iterator[Array]:
    types = placed.program.out_types
    tree = jax.tree.unflatten(placed.program.out_tree, range(len(types)))
    paths = jax.tree_util.tree_leaves_with_path(tree)
    for (keys, _), aval, spec in zip(paths, types, placed.out_specs):
        # The type of a result lacks its named dimensions.
        shape = list(aval.shape)
        for position, name in spec.names:
            shape.insert(position, placed.placements[name].size)
        whole = jax.ShapeDtypeStruct(shape, aval.dtype)
        yield _array(argument_path(keys, "result"), whole, spec, placed)


def _array(path: str, aval: Any, spec: AxisSpec, placed: PlacedCall) -> Array:
    shape = tuple(aval.shape)
    device_shape = list(shape)
    for position, name in spec.names:
        device_shape[position] //= placed.placements[name].devices
    partition = None
    if placed.uses_mesh:
        partition = partition_spec(spec, placed.placements)
    names = spec.name_at()
    axes = tuple(names.get(k) for k in range(len(shape)))
    return Array(path, aval.dtype, shape, axes, partition, tuple(device_shape))


def _no_array_for_step(path: str, value: Any) -> TypeError:
    return TypeError(
        f"{path} is {described(value)}, but the arguments of a step are arrays, their types, "
        "scalars, or pytrees of them. Bind a static value with functools.partial"
    )
