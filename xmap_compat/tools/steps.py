"""``xmap_compat.plan(step, *args)``: what the xmapped calls of a whole program send between devices, and its cost.

The program is staged out (traced) as it would run, derivatives and loops included, with an evaluator in every xmapped
call that marks the operations of each collective. Nothing is executed, and it is compiled only on request.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from xmap_compat import _jax, api
from xmap_compat.core.call import PlacedCall
from xmap_compat.core.errors import should_be
from xmap_compat.core.mesh import check_mesh, entered
from xmap_compat.core.named_shape import is_array
from xmap_compat.core.placement import current_scope
from xmap_compat.core.specs import argument_path
from xmap_compat.core.watch import Watcher, watching
from xmap_compat.errors import no_devices
from xmap_compat.tools import errors, hlo
from xmap_compat.tools.combined import combined, limits_of
from xmap_compat.tools.cost import Cost, price
from xmap_compat.tools.gathered import Gathered, gathered_in_step
from xmap_compat.tools.hardware import Hardware, clock_of
from xmap_compat.tools.plan import CallPlan, describe_made
from xmap_compat.tools.shown import Shown
from xmap_compat.tools.staged import Tree, tree_of
from xmap_compat.tools.transfers import (
    KINDS,
    MarkingEvaluator,
    Marks,
    Transfer,
    axes_within,
    bytes_sent,
    every_transfer,
    total_bytes,
)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step after XLA has compiled it.

    Attributes:
      transfers: every collective of the compiled program.
      added: those that the compiler added: sums over sharded results outside of the xmapped calls, and arguments that
        are moved or gathered where they enter.
      memory: bytes of arguments, results and temporaries on one device, by XLA's ``memory_analysis``.
    """

    transfers: tuple[Transfer, ...]
    added: tuple[Transfer, ...]
    memory: int


@dataclasses.dataclass(frozen=True, repr=False)
class StepPlan(Shown):
    """What a step with xmapped calls in it does.  Print it, show it in a notebook, or draw it with :meth:`svg`.

    Attributes:
      function: the name of the step.
      mesh: the mesh of its calls; None where they run on one device.
      calls: the plans of its xmapped calls, one for each function and each type of arguments.
      transfers: the transfers between devices in these calls and their derivatives, in the order of the program.
      gathered: arguments that are gathered where they enter a call, if they are concrete arrays or have Explicit
        types; for others see ``compiled``.
      compiled: the compiled step; None unless ``compiled=True``.
    """

    function: str
    mesh: _jax.AnyMesh | None
    calls: tuple[CallPlan, ...]
    transfers: tuple[Transfer, ...]
    gathered: tuple[Gathered, ...]
    compiled: Compiled | None
    tree: Tree = dataclasses.field(compare=False, hash=False)

    @property
    def compiler_axes(self) -> tuple[Any, ...]:
        """The mesh axes that some call leaves to the compiler."""
        return tuple(dict.fromkeys(axis for call in self.calls for axis in call.compiler_axes))

    @property
    def bytes_sent(self) -> int | None:
        """Bytes that each device sends in a step (the compiled one if there is one); None if a while loop decides."""
        return total_bytes(self.compiled.transfers if self.compiled else self.transfers)

    @property
    def cost(self) -> Cost:
        """The price on the hardware of the mesh: see :meth:`cost_on`."""
        return self.cost_on(None)

    def cost_on(self, hardware: Hardware | None) -> Cost:
        """The price of a step on some hardware; None for the hardware of the mesh, as far as it is known."""
        if self.compiled is None:
            return price(self.tree, self.mesh, hardware)
        return price(self.tree, self.mesh, hardware, self.compiled.transfers, self.compiled.memory)


def plan(step: Callable[..., Any], *args: Any, compiled: bool = False, mesh: _jax.AnyMesh | None = None) -> StepPlan:
    """The plan of any JAX function with xmapped calls in it, under the mesh in scope.

    The function may be a gradient (``jax.grad(loss)``), an optimizer step, or a scan over steps.  The plan has the
    transfers of the calls and of their derivatives.  With ``compiled=True`` it also has those that the compiler adds.

    Args:
      step: the function; it is traced, not executed.
      args: its arguments, arrays or ``jax.ShapeDtypeStruct``.
      compiled: whether to compile it as well, for the memory and the transfers that XLA decides on.
      mesh: the mesh, which may be a ``jax.sharding.AbstractMesh``; None for the mesh in scope.

    Returns:
      A :class:`StepPlan`: ``.calls``, ``.transfers``, ``.bytes_sent``, ``.cost``.

    Example:

      >>> import jax, numpy as np, xmap_compat
      >>> from xmap_compat import Mesh, xmap
      >>> loss = xmap(lambda v: jax.lax.psum(v**2, "i"), ["i"], {}, axis_resources={"i": "x"})
      >>> with Mesh(jax.devices()[:2], "x"):
      ...     plan = xmap_compat.plan(jax.value_and_grad(loss), np.ones(8, np.float32))
      >>> [transfer.kind for transfer in plan.transfers]
      ['all-reduce']
      >>> plan.bytes_sent, plan.cost.flops  # print(plan) shows all of it
      (4, 16)
    """
    if not callable(step):
        raise should_be("The argument step of plan", "a function that calls xmapped ones", step)
    with entered(check_mesh("plan", mesh)):
        found = stage(step, args, describe=True)
        if compiled and isinstance(found.mesh, jax.sharding.AbstractMesh):
            raise no_devices("plan(..., compiled=True)", found.mesh)
        return found.plan(api.name_of(step), read_compiled(compile_step(step, args), found.mesh) if compiled else None)


@dataclasses.dataclass(frozen=True)
class StagedStep:
    """A step staged out, with the xmapped calls and the mesh in it.

    Attributes:
      plans: the plans of its xmapped calls, if they were asked for.
      placements: the placements of all calls, including nested calls.
      mesh: the mesh of its calls.
    """

    jaxpr: Any
    args: tuple[Any, ...]
    plans: tuple[CallPlan, ...]
    placements: tuple[Mapping[Any, Any], ...]
    marks: Marks
    mesh: _jax.AnyMesh | None

    def plan(self, name: str, compiled: Compiled | None) -> StepPlan:
        tree = tree_of(self.jaxpr)
        leaves = jax.tree_util.tree_leaves_with_path(self.args)
        paths = [argument_path(path, "args") for path, _ in leaves]
        in_step = gathered_in_step(self.jaxpr, [leaf for _, leaf in leaves], paths)
        gathered = tuple(dict.fromkeys([*in_step, *(g for call in self.plans for g in call.gathered)]))
        transfers = every_transfer(tree, self.marks, combined(tree, limits_of(self.mesh)))
        return StepPlan(name, self.mesh, tuple(dict.fromkeys(self.plans)), transfers, gathered, compiled, tree)


def stage(step: Callable[..., Any], args: tuple[Any, ...], describe: bool) -> StagedStep:
    """Trace a step, with an evaluator that marks collectives in every xmapped call.

    Args:
      describe: whether to make the plan of every call, which traces the call once more.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        if not is_array(leaf):
            raise errors.no_array_for_step(argument_path(path, "args"), leaf)
    marks, plans, thread = Marks(), [], threading.get_ident()
    outer: list[PlacedCall] = []
    nested: list[PlacedCall] = []

    def notice(declared, placed, arguments):
        if threading.get_ident() != thread:
            return
        (nested if placed.nested else outer).append(placed)
        if describe and not placed.nested:
            plans.append(describe_made(declared, placed, arguments))

    def around(placed):
        return jax.named_scope(marks.of_call(placed.placements))

    end = api.observe(notice)
    try:
        with watching(Watcher(functools.partial(MarkingEvaluator, marks=marks), around)):
            # A new function with the name of the step, because JAX's cache may have a trace of the step without marks.
            jaxpr = jax.make_jaxpr(functools.wraps(step)(lambda *args: step(*args)))(*args)
    finally:
        end()
    placements = tuple(placed.placements for placed in (*outer, *nested))
    meshes = [*(placed.scope.mesh for placed in outer if placed.uses_mesh), *_meshes(jaxpr)]
    return StagedStep(jaxpr, args, tuple(plans), placements, marks, meshes[0] if meshes else None)


def _meshes(jaxpr: Any) -> Iterator[_jax.AnyMesh]:
    """The meshes of the ``shard_map``s in a staged program, including those that the user has written."""
    scope = current_scope().mesh
    for eqn, _ in _jax.walk(jaxpr):
        found = _jax.read(eqn)
        if isinstance(found, _jax.ShardMap):
            is_of_scope = scope is not None and dict(scope.shape) == dict(found.mesh.shape)
            yield found.mesh if isinstance(found.mesh, jax.sharding.Mesh) or not is_of_scope else scope


def compile_step(step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A step as a ``jax.stages.Compiled``, under the mesh in scope."""
    return (step if hasattr(step, "lower") else jax.jit(step)).lower(*args).compile()


def run_seconds(compiled: Any, args: tuple[Any, ...], device: Any, budget: float = 1.0) -> float:
    """The shortest time of some calls of a ``jax.stages.Compiled``, because other programs only make a call slower.

    Types become arrays of zeros.  Donated arguments are copied for each call.
    """
    concrete = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, args)
    donates = any(argument.donated for argument in jax.tree.leaves(compiled.args_info))
    copied = functools.partial(jax.device_put, may_alias=False) if donates else jax.device_put
    place = lambda: jax.block_until_ready(copied(concrete, compiled.input_shardings[0]))  # noqa: E731
    arguments, times, clock, end = place(), list[float](), clock_of(device), time.monotonic() + budget
    while len(times) < 4 or (len(times) < 100 and time.monotonic() < end):
        begin = clock()
        jax.block_until_ready(compiled(*arguments))
        times.append(clock() - begin)
        arguments = place() if donates else arguments
    return min(times[1:])


def read_compiled(compiled: Any, mesh: _jax.AnyMesh | None) -> Compiled:
    """The transfers of a ``jax.stages.Compiled``, and its memory."""
    scope = mesh if mesh is not None else current_scope().mesh
    found = hlo.collectives(compiled.as_text())
    transfers = [(c, from_hlo(c, dict(scope.shape))) for c in found] if scope is not None else []
    every = tuple(t for _, t in transfers if t is not None)
    staged = re.compile(rf"shard_map/(\S*/)?({'|'.join(KINDS)})\b")  # others were added by the compiler
    added = tuple(t for c, t in transfers if t is not None and not staged.search(c.op_name))
    return Compiled(every, added, _memory(compiled))


def _memory(compiled):
    analysis = compiled.memory_analysis()
    held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes + analysis.temp_size_in_bytes
    return held - analysis.alias_size_in_bytes


def from_hlo(found: hlo.CompiledCollective, mesh_shape: Mapping[Any, int]) -> Transfer | None:
    """A collective of a compiled program as a transfer over mesh axes; None if it moves nothing."""
    kind = "ppermute" if found.kind == "collective-permute" else found.kind
    axes = axes_within(found.groups, mesh_shape)
    if not axes:
        return None
    devices = found.group_size if kind != "ppermute" else math.prod(mesh_shape[a] for a in axes)
    held = {"all-gather": found.nbytes // devices, "reduce-scatter": found.nbytes * devices}.get(kind, found.nbytes)
    sent = bytes_sent(kind, held, devices)
    return Transfer(kind, axes, devices, "", None, sent, found.times, False, "transpose(" in found.op_name)
