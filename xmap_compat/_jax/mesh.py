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
from xmap_compat._jax.patches import Patch, Restoration, replaced

# The state that JAX's own ``with Mesh`` sets; if it is gone, xmap sees our contexts and that of
# ``jax.set_mesh``.
_NOTHING = lambda *args, **kwargs: None  # noqa: E731
WITHOUT_CONTEXTS: dict[str, Any] = {
    "innermost": lambda: (None, None),
    "bare_specs": lambda: (),
    **dict.fromkeys(("push", "replace", "pop"), _NOTHING),
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


class _EnteredMeshes(threading.local):
    def __init__(self):
        self.stack: list[_Entered] = [
            _Entered(None, _EMPTY, _EMPTY.abstract_mesh, None, contextlib.ExitStack())
        ]


_entered_meshes = _EnteredMeshes()


def ambient_mesh() -> AnyMesh | None:
    """The mesh in scope: the one entered last by ``with Mesh`` (also ours), ``jax.set_mesh`` or
    ``use_abstract_mesh``.

    A mesh with devices wins over an abstract one of its shape, which stands for it under
    ``jax.set_mesh`` and in jit.
    """
    concrete, entered = get_concrete_mesh(), _entered_meshes.stack[-1]
    mesh, outside = entered.mesh, entered.outside
    if not _is_innermost(entered):
        # Only our own contexts know what jax.set_mesh had set when they were entered.
        mesh, outside = contexts.innermost()[1], concrete
    if mesh is None or mesh.empty or not (concrete is outside or concrete.empty):
        mesh = concrete
    abstract = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None if abstract.empty else abstract
    is_later = not (abstract.empty or abstract.manual_axes or abstract is entered.types)
    return abstract if is_later and abstract.shape_tuple != mesh.shape_tuple else mesh


def _is_innermost(entered):
    return (innermost := contexts.innermost()[0]) is None or innermost is entered.found_as


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
    if is_abstract:
        mesh = mesh.update(axis_types=(jax.sharding.AxisType.Auto,) * len(mesh.axis_names))
        leave.enter_context(jax.sharding.use_abstract_mesh(mesh))
    found_as = contexts.push(_EMPTY if is_abstract else mesh)
    _enter(_Entered(mesh, get_concrete_mesh(), jax.sharding.get_abstract_mesh(), found_as, leave))


def _enter(entered):
    stack = _entered_meshes.stack
    stack.append(entered)
    entered.leave.enter_context(
        _meshes_in_scope(tuple(e.mesh for e in stack if e.mesh is not None))
    )


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
    with jax.sharding.use_abstract_mesh(current if current.empty else mesh.abstract_mesh):
        yield


def mesh_to_stage(mesh: AnyMesh) -> AnyMesh:
    """The mesh that a program over ``mesh`` should hold: without devices if it is that of
    ``jax.set_mesh``.

    Only the abstract mesh of the latter is part of jit's cache key, so the program is reused for
    other devices.
    """
    return mesh.abstract_mesh if get_concrete_mesh() == mesh else mesh


def resharded(values: Sequence[Any], specs: Sequence[Any], mesh: Any) -> list[Any]:
    """Reshard values: under Explicit axes, shard_map refuses arguments whose sharding differs from
    its in_specs.
    """
    explicit = {
        n for n, t in zip(mesh.axis_names, mesh.axis_types) if t == jax.sharding.AxisType.Explicit
    }
    if not explicit:
        return list(values)
    wanted = [jax.sharding.NamedSharding(mesh, _over(spec, explicit)) for spec in specs]
    return [jax.sharding.reshard(x, sharding) for x, sharding in zip(values, wanted)]


def _over(spec, names):
    """A PartitionSpec over some mesh axes only: shard_map places values over the others itself."""
    return jax.sharding.PartitionSpec(
        *(tuple(a for a in axes_of_entry(entry) if a in names) or None for entry in spec)
    )


def axes_of_entry(entry: Any) -> tuple[Any, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def in_manual_region() -> bool:
    """True while the body of some ``shard_map`` is being traced."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


_bare_specs_in_jit = Restoration(*contexts.bare_specs())


def _enter_block(mesh):
    _push_mesh(mesh)
    _entered_meshes.stack[-1].leave.enter_context(_in_blocks())
    return mesh


def _exit_block(mesh, *exc_info, exiting=sys.is_finalizing):
    if not exiting():  # when Python exits, the names of modules are gone
        _pop_mesh()


# A block of the restored `with` may outlive the restoration: it ends as it has begun.
_in_blocks = Restoration(
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
    mesh = _EMPTY if mesh is get_concrete_mesh() else mesh
    is_ours, is_base = _is_innermost(entered), len(_entered_meshes.stack) == 1
    found_as = contexts.replace(mesh)
    if is_ours or is_base:
        _entered_meshes.stack.pop()
        _enter(
            _Entered(
                mesh, get_concrete_mesh(), jax.sharding.get_abstract_mesh(), found_as, entered.leave
            )
        )


def forget_assigned_mesh() -> None:
    """Undo ``assign_mesh`` outside of all contexts, for this thread."""
    base = _entered_meshes.stack[0]
    contexts.replace(_EMPTY, base=True)
    _entered_meshes.stack[0] = _Entered(None, _EMPTY, _EMPTY.abstract_mesh, None, base.leave)
    _leave_forgotten()


def _leave_forgotten():
    """Remove a forgotten mesh from jit's cache key, once all contexts inside of it are left."""
    if len(_entered_meshes.stack) == 1 and _entered_meshes.stack[0].mesh is None:
        _entered_meshes.stack[0].leave.close()
