"""``xmap_compat.plan(step, *args)``: what the xmapped calls of a whole program hold and send
between devices.

The program is staged out (traced) as it would run, derivatives and loops included, with an
evaluator in every xmapped call that puts the operations of each collective under a named scope.
Nothing is executed, nor compiled unless asked.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from xmap_compat import _jax, api
from xmap_compat.core.call import PlacedCall
from xmap_compat.core.errors import should_be
from xmap_compat.core.mesh import check_mesh, entered
from xmap_compat.core.named_shape import is_array
from xmap_compat.core.placement import current_scope
from xmap_compat.core.specs import argument_path
from xmap_compat.core.watch import Watcher, watching
from xmap_compat.errors import described, no_devices
from xmap_compat.tools.gathered import Gathered, gathered_in_step
from xmap_compat.tools.plan import Array, CallPlan, arguments_of, describe_made, results_of
from xmap_compat.tools.shown import Shown
from xmap_compat.tools.staged import staged_program
from xmap_compat.tools.transfers import (
    EquationNumbers,
    NumberingEvaluator,
    Transfer,
    every_transfer,
    sent_over,
    total_bytes,
)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What XLA says about a step that it has compiled, for one device.

    Attributes:
      cost: its ``cost_analysis``, without the figures of single operands.  A loop counts as one
      iteration.
      memory: its ``memory_analysis``.
    """

    cost: Mapping[str, float]
    memory: Mapping[str, int]

    @property
    def peak(self) -> int:
        """XLA's ``peak_memory_in_bytes``, or its arguments, results and temporaries: on CPUs the
        first lacks these.
        """
        held = sum(
            self.memory.get(f"{name}_size_in_bytes", 0) for name in ("argument", "output", "temp")
        )
        return max(
            self.memory.get("peak_memory_in_bytes", 0),
            held - self.memory.get("alias_size_in_bytes", 0),
        )


@dataclasses.dataclass(frozen=True, repr=False)
class StepPlan(Shown):
    """What a step with xmapped calls in it does.  Print it, show it in a notebook, or draw it with
    :meth:`svg`.

    Attributes:
      function: the name of the step.
      mesh: the mesh of its calls; None where they run on one device.
      calls: the plans of its xmapped calls, one for each function and each type of arguments.
      transfers: the transfers between devices in these calls and their derivatives, in the order of
      the program.
      gathered: arguments that are gathered where they enter a call, if they are concrete arrays or
        have Explicit types.
      compiled: the compiled step; None unless ``compiled=True``.
    """

    function: str
    mesh: _jax.AnyMesh | None
    calls: tuple[CallPlan, ...]
    transfers: tuple[Transfer, ...]
    gathered: tuple[Gathered, ...]
    compiled: Compiled | None

    @property
    def bytes_sent(self) -> int | None:
        """The bytes that each device sends in the calls of a step; None if a while loop decides."""
        return total_bytes(self.transfers)

    @property
    def sent_over(self) -> dict[Any, int]:
        """The bytes that each device sends over each mesh axis: see
        :func:`xmap_compat.tools.transfers.sent_over`.
        """
        return sent_over(self.transfers, self.mesh)


@_jax.api_boundary
def plan(
    step: Callable[..., Any], *args: Any, compiled: bool = False, mesh: _jax.AnyMesh | None = None
) -> StepPlan:
    """The plan of any JAX function with xmapped calls in it, under the mesh in scope.

    The function may be a gradient (``jax.grad(loss)``), an optimizer step, or a scan: transfers of
    derivatives count.

    Args:
      step: the function; it is traced, not executed.
      args: its arguments, arrays or ``jax.ShapeDtypeStruct``.
      compiled: whether to compile it as well, for XLA's FLOPs and bytes.
      mesh: the mesh, which may be a ``jax.sharding.AbstractMesh``; None for the mesh in scope.

    Returns:
      A :class:`StepPlan`: ``.calls``, ``.transfers``, ``.bytes_sent``, ``.compiled``,
      ``.to_dict()``.

    Example:

      >>> import jax, numpy as np, xmap_compat
      >>> from xmap_compat import Mesh, xmap
      >>> loss = xmap(lambda v: jax.lax.psum(v**2, "i"), ["i"], {}, axis_resources={"i": "x"})
      >>> with Mesh(jax.devices()[:2], "x"):
      ...     plan = xmap_compat.plan(jax.value_and_grad(loss), np.ones(8, np.float32))
      >>> [transfer.kind for transfer in plan.transfers], plan.bytes_sent  # print(plan) shows all of it
      (['all-reduce'], 4)
    """
    if not callable(step):
        raise should_be("The argument step of plan", "a function that calls xmapped ones", step)
    with entered(check_mesh("plan", mesh)):
        found = stage(step, args, describe=True)
        if compiled and isinstance(found.mesh, jax.sharding.AbstractMesh):
            raise no_devices("plan(..., compiled=True)", found.mesh)
        return found.plan(
            api.name_of(step),
            read_compiled(compile_step(step, args)) if compiled else None,
        )


@dataclasses.dataclass(frozen=True)
class StagedStep:
    """A step staged out, with the xmapped calls and the mesh in it.

    Attributes:
      plans: the plans of its xmapped calls, if they were asked for.
      arrays: the arguments and results of its xmapped calls, of equal calls once.
      placements: the placements of all calls, including nested calls.
      mesh: the mesh of its calls.
    """

    jaxpr: Any
    args: tuple[Any, ...]
    plans: tuple[CallPlan, ...]
    arrays: tuple[Array, ...]
    placements: tuple[Mapping[Any, Any], ...]
    numbers: EquationNumbers
    mesh: _jax.AnyMesh | None

    @functools.cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        return every_transfer(staged_program(self.jaxpr), self.numbers)

    def plan(self, name: str, compiled: Compiled | None) -> StepPlan:
        leaves = jax.tree_util.tree_leaves_with_path(self.args)
        paths = [argument_path(path, "args") for path, _ in leaves]
        in_step = gathered_in_step(self.jaxpr, [leaf for _, leaf in leaves], paths)
        gathered = tuple(
            dict.fromkeys([*in_step, *(g for call in self.plans for g in call.gathered)])
        )
        return StepPlan(
            name, self.mesh, tuple(dict.fromkeys(self.plans)), self.transfers, gathered, compiled
        )


def stage(step: Callable[..., Any], args: tuple[Any, ...], describe: bool) -> StagedStep:
    """Trace a step, with an evaluator that numbers the equations of every xmapped call.

    Args:
      describe: whether to make the plan of every call, which traces the call once more.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        if not is_array(leaf):
            raise _no_array_for_step(argument_path(path, "args"), leaf)
    numbers, plans = EquationNumbers(), []
    outer: list[PlacedCall] = []
    nested: list[PlacedCall] = []
    arrays: dict[Any, tuple[Array, ...]] = {}

    def notice(declared, placed, arguments):
        (nested if placed.nested else outer).append(placed)
        if not placed.nested:
            own = (*arguments_of(placed, declared, arguments), *results_of(placed))
            arrays.setdefault((declared.fun, own), own)
        if describe and not placed.nested:
            plans.append(describe_made(declared, placed, arguments))

    def around(placed):
        return jax.named_scope(numbers.scope_of_call(placed.placements))

    with watching(
        Watcher(functools.partial(NumberingEvaluator, numbers=numbers), around, notice), jitted=True
    ):
        # A new function with the name of the step, because JAX's cache may have a trace of the step
        # without them.
        jaxpr = jax.make_jaxpr(functools.wraps(step)(lambda *args: step(*args)))(*args)
    placements = tuple(placed.placements for placed in (*outer, *nested))
    meshes = [*(placed.scope.mesh for placed in outer if placed.uses_mesh), *_meshes(jaxpr)]
    every = tuple(a for own in arrays.values() for a in own)
    return StagedStep(
        jaxpr, args, tuple(plans), every, placements, numbers, meshes[0] if meshes else None
    )


def _no_array_for_step(path: str, value: Any) -> TypeError:
    return TypeError(
        f"{path} is {described(value)}, but the arguments of a step are arrays, their types, scalars, or pytrees of "
        "them. Bind a static value with functools.partial"
    )


def _meshes(jaxpr: Any) -> Iterator[_jax.AnyMesh]:
    """The meshes of the ``shard_map``s in a staged program, including those that the user has
    written.
    """
    scope = current_scope().mesh
    for eqn, _ in _jax.walk(jaxpr):
        found = _jax.read(eqn)
        if isinstance(found, _jax.ShardMap):
            is_of_scope = scope is not None and dict(scope.shape) == dict(found.mesh.shape)
            yield (
                found.mesh
                if isinstance(found.mesh, jax.sharding.Mesh) or not is_of_scope
                else scope
            )


def compile_step(step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A step as a ``jax.stages.Compiled``, under the mesh in scope."""
    return (step if hasattr(step, "lower") else jax.jit(step)).lower(*args).compile()


def read_compiled(compiled: Any) -> Compiled:
    """What XLA says about a ``jax.stages.Compiled``."""
    memory = compiled.memory_analysis()
    names = (n for n in dir(memory) if n.endswith("_in_bytes") and not n.startswith("host_"))
    cost = {
        name: value
        for name, value in sorted((compiled.cost_analysis() or {}).items())
        if "{" not in name
    }
    return Compiled(cost, {name: getattr(memory, name) for name in names})
