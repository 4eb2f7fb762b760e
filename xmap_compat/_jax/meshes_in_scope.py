"""Meshes in scope, and how jit and shard_map use them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax._src.mesh import get_concrete_mesh

from xmap_compat._jax.nice import optional
from xmap_compat._jax.patches import Patch, SharedPatches, replaced

# The state that ``with Mesh`` of JAX sets; if it is gone, xmap sees our contexts and that of
# ``jax.set_mesh``.
WITHOUT_CONTEXTS: dict[str, Any] = {
    "innermost": lambda: (None, None),
    "push": lambda mesh: None,
    "replace": lambda mesh, base=False: None,
    "pop": lambda: None,
    "bare_specs": list,
}
contexts = optional("contexts", **WITHOUT_CONTEXTS)

# Part of jit's cache key, because the meshes in scope decide what bare PartitionSpecs mean.
_meshes_in_scope = jax.make_user_context(())

AnyMesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh

_EMPTY = jax.sharding.Mesh(np.empty((), dtype=object), ())


class _Entered(NamedTuple):
    """A mesh context of ours.

    Attributes:
      mesh: None for the lowest level, outside of all.
      outside: the mesh of ``jax.set_mesh`` when this one was entered.
      types: the abstract mesh at that time.
      found_as: the very object that JAX holds while this mesh is the innermost.
      leave: what to undo when it is left.
    """

    mesh: AnyMesh | None
    outside: jax.sharding.Mesh
    types: jax.sharding.AbstractMesh
    found_as: Any
    leave: contextlib.ExitStack


def _outermost(leave):
    return _Entered(None, _EMPTY, _EMPTY.abstract_mesh, None, leave)


class _EnteredMeshes(threading.local):
    def __init__(self):
        self.stack: list[_Entered] = [_outermost(contextlib.ExitStack())]


_entered_meshes = _EnteredMeshes()


def ambient_mesh() -> AnyMesh | None:
    """The mesh in scope: the one entered last by ``with Mesh`` (also ours), ``jax.set_mesh`` or
    ``use_abstract_mesh``.

    A mesh with devices wins over an abstract one of its shape, which stands for it under
    ``jax.set_mesh`` and in jit.
    """
    concrete = get_concrete_mesh()
    entered = _entered_meshes.stack[-1]
    if _is_innermost(entered):
        mesh = entered.mesh
        is_set_later = not concrete.empty and concrete is not entered.outside
    else:
        # Only our contexts know what jax.set_mesh had set when they were entered.
        _, mesh = contexts.innermost()
        is_set_later = False
    if mesh is None or mesh.empty or is_set_later:
        mesh = concrete
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        return None if mesh.empty else mesh
    if mesh.empty:
        return abstract
    is_used_later = not abstract.manual_axes and abstract is not entered.types
    if is_used_later and abstract.shape_tuple != mesh.shape_tuple:
        return abstract
    return mesh


def _is_innermost(entered):
    innermost, _ = contexts.innermost()
    return innermost is None or innermost is entered.found_as


def enter_mesh(mesh: AnyMesh) -> None:
    """Enter a mesh as ``with jax.sharding.Mesh(...)`` does, without its deprecation warning (since
    0.10.1).

    Bare PartitionSpecs mean that mesh, as long as JAX has the state that this sets.  The types of
    the axes of an abstract mesh are not in effect.
    """
    _bare_specs_in_jit.enter()
    _push_mesh(mesh)


def exit_mesh(mesh: AnyMesh) -> None:
    _pop_mesh()
    _bare_specs_in_jit.exit()


def _push_mesh(mesh):
    leave = contextlib.ExitStack()
    is_abstract = isinstance(mesh, jax.sharding.AbstractMesh)
    if not (get_concrete_mesh().empty or in_manual_region()):
        # Otherwise a jit would run on the devices of jax.set_mesh.
        with contextlib.suppress(ValueError):  # JAX refuses it while a jit is traced
            leave.enter_context(jax.set_mesh(_EMPTY))
    if is_abstract or (get_concrete_mesh().empty and not in_manual_region()):
        leave.enter_context(jax.sharding.use_abstract_mesh(_EMPTY.abstract_mesh))
    with_devices = mesh
    if is_abstract:
        with_devices = _EMPTY
        mesh = mesh.update(axis_types=(jax.sharding.AxisType.Auto,) * len(mesh.axis_names))
        leave.enter_context(jax.sharding.use_abstract_mesh(mesh))
    _enter(mesh, contexts.push(with_devices), leave)


def _enter(mesh, found_as, leave):
    outside = get_concrete_mesh()
    types = jax.sharding.get_abstract_mesh()
    stack = _entered_meshes.stack
    stack.append(_Entered(mesh, outside, types, found_as, leave))
    meshes = [entered.mesh for entered in stack if entered.mesh is not None]
    leave.enter_context(_meshes_in_scope(tuple(meshes)))


def _pop_mesh():
    # The innermost mesh may be JAX's, entered before install().
    if _is_innermost(_entered_meshes.stack[-1]) and len(_entered_meshes.stack) > 1:
        _entered_meshes.stack.pop().leave.close()
        _leave_forgotten()
    contexts.pop()


@contextlib.contextmanager
def context_of(mesh: AnyMesh) -> Iterator[None]:
    """The context in which a shard_map over ``mesh`` is traced although ``jax.set_mesh`` has set
    another one.
    """
    current = jax.sharding.get_abstract_mesh()
    if not current.empty:
        current = mesh.abstract_mesh
    with jax.sharding.use_abstract_mesh(current), _casting():
        yield


def _casting() -> contextlib.AbstractContextManager[Any]:
    """JAX casts operands to vary alike, also where ``jax.auto_pcast(False)`` (since 0.10.2) has
    turned that off for the shard_maps of the user.
    """
    state = getattr(jax, "auto_pcast", None)
    if state is None or state.value:
        return contextlib.nullcontext()
    return state(True)


def mesh_to_stage(mesh: AnyMesh) -> AnyMesh:
    """The mesh that a program over ``mesh`` should hold: without devices if it is that of
    ``jax.set_mesh``.

    Only the abstract mesh of the latter is part of jit's cache key, so the program is reused for
    other devices.
    """
    if get_concrete_mesh() == mesh:
        return mesh.abstract_mesh
    return mesh


def resharded(values: Sequence[Any], specs: Sequence[Any], mesh: Any) -> list[Any]:
    """Reshard values: under Explicit axes, shard_map refuses arguments whose sharding differs from
    its in_specs.
    """
    axes = zip(mesh.axis_names, mesh.axis_types)
    explicit = {name for name, kind in axes if kind == jax.sharding.AxisType.Explicit}
    if not explicit:
        return list(values)
    placed = []
    for x, spec in zip(values, specs):
        sharding = jax.sharding.NamedSharding(mesh, _over(spec, explicit))
        placed.append(jax.sharding.reshard(x, sharding))
    return placed


def _over(spec, names):
    """A PartitionSpec over some mesh axes only: shard_map places values over the others itself."""
    entries = []
    for entry in spec:
        kept = tuple(axis for axis in axes_of_entry(entry) if axis in names)
        entries.append(kept or None)
    return jax.sharding.PartitionSpec(*entries)


def axes_of_entry(entry: Any) -> tuple[Any, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def in_manual_region() -> bool:
    """True while the body of some ``shard_map`` is being traced."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


_bare_specs_in_jit = SharedPatches(*contexts.bare_specs())


def _enter_block(mesh):
    _push_mesh(mesh)
    _entered_meshes.stack[-1].leave.enter_context(_in_blocks())
    return mesh


def _exit_block(mesh, *exc_info, exiting=sys.is_finalizing):
    if not exiting():  # when Python exits, the names of modules are gone
        _pop_mesh()


# In place also while a block is open: one that was entered under install() may end after
# uninstall(), and must be left as it was entered.
_in_blocks = SharedPatches(
    replaced(jax.sharding.Mesh, "__exit__", _exit_block), _bare_specs_in_jit.enter
)


def mesh_context() -> list[Patch]:
    """Restore ``with jax.sharding.Mesh(...)``: without a warning (since 0.10.1), and seen by xmap
    and bare specs.
    """
    if contexts.innermost()[0] is None:
        return []
    return [replaced(jax.sharding.Mesh, "__enter__", _enter_block), _in_blocks.enter]


def assign_mesh(mesh: jax.sharding.Mesh) -> None:
    """Replace this thread's innermost entered mesh by ``mesh``; enter it if there is none.

    The mesh of ``jax.set_mesh`` itself counts as no mesh: a program that saves the environment
    assigns it back.
    """
    entered = _entered_meshes.stack[-1]
    if mesh is get_concrete_mesh():
        mesh = _EMPTY
    is_replaced = _is_innermost(entered) or len(_entered_meshes.stack) == 1
    found_as = contexts.replace(mesh)
    if is_replaced:
        _entered_meshes.stack.pop()
        _enter(mesh, found_as, entered.leave)


def forget_assigned_mesh() -> None:
    """Undo ``assign_mesh`` outside of all contexts, for this thread."""
    contexts.replace(_EMPTY, base=True)
    _entered_meshes.stack[0] = _outermost(_entered_meshes.stack[0].leave)
    _leave_forgotten()


def _leave_forgotten():
    """Remove a forgotten mesh from jit's cache key, once all contexts inside of it are left."""
    if len(_entered_meshes.stack) == 1 and _entered_meshes.stack[0].mesh is None:
        _entered_meshes.stack[0].leave.close()
