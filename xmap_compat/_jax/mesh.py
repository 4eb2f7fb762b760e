"""Meshes in scope, and what jit and shard_map need of them."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import jax
from jax._src import config, core, pjit
from jax._src import mesh as mesh_lib

from xmap_compat._jax.patches import Restoration, hold
from xmap_compat._jax.types import explicit_spec
from xmap_compat._jax.version import VERSION


def ambient_mesh() -> jax.sharding.Mesh | None:
    """The concrete mesh in scope: of ``with Mesh`` (also ours) and ``jax.set_mesh`` the one entered last."""
    concrete = mesh_lib.get_concrete_mesh()
    resources = getattr(mesh_lib, "thread_resources", None)
    physical = resources.env.physical_mesh if resources is not None else mesh_lib.empty_concrete_mesh
    if resources is None or physical.empty:
        return None if concrete is None or concrete.empty else concrete
    # Only our own contexts know what jax.set_mesh had set when they were entered.
    outer = _entered_meshes.around.get(len(resources.stack), concrete)
    return physical if concrete is outer or concrete is None or concrete.empty else concrete


class _EnteredMeshes(threading.local):
    def __init__(self):
        self.around: dict[int, Any] = {}
        self.come_back: dict[int, Callable[[], None]] = {}
        self.set: list[Any] = []


_entered_meshes = _EnteredMeshes()


def enter_mesh(mesh: jax.sharding.Mesh) -> None:
    """Enter a mesh as ``with jax.sharding.Mesh(...)`` does, without its deprecation warning.

    The warning came with 0.10.1; the state that it guards is still part of jit's cache key and
    still lets bare PartitionSpecs be used in ``with_sharding_constraint``.  Should a release remove that
    state, the mesh is set by ``jax.set_mesh``.
    """
    if not _has_mesh_contexts():
        context: Any = jax.set_mesh(None if mesh.empty else mesh)
        context.__enter__()
        _entered_meshes.set.append(context)
        return
    _push_mesh(mesh)
    _bare_specs_in_jit.enter()


def exit_mesh(mesh: jax.sharding.Mesh) -> None:
    if not _has_mesh_contexts():
        _entered_meshes.set.pop().__exit__(None, None, None)
        return
    _bare_specs_in_jit.exit()
    _pop_mesh()


def _has_mesh_contexts() -> bool:
    """Whether this JAX still has what its own ``with Mesh(...)`` sets."""
    return hasattr(mesh_lib, "thread_resources") and hasattr(config, "mesh_context_manager")


def _push_mesh(mesh):
    resources = mesh_lib.thread_resources
    resources.stack.append(resources.stack[-1].with_mesh(mesh))
    resources.env = resources.stack[-1]
    _entered_meshes.come_back[len(resources.stack)] = _hide_context_mesh()
    _entered_meshes.around[len(resources.stack)] = mesh_lib.get_concrete_mesh()
    _publish_meshes(resources)


def _pop_mesh():
    resources = mesh_lib.thread_resources
    depth = len(resources.stack)
    _entered_meshes.around.pop(depth, None)
    _entered_meshes.come_back.pop(depth, lambda: None)()
    resources.stack.pop()
    resources.env = resources.stack[-1]
    _publish_meshes(resources)


def _hide_context_mesh() -> Callable[[], None]:
    """Leave the scope of ``jax.set_mesh``, whose devices would count for a whole jit; returns how to come back."""
    if mesh_lib.get_concrete_mesh().empty or in_manual_region():
        return lambda: None
    # Both states moved from config to mesh in 0.12.
    home: Any = mesh_lib if VERSION >= (0, 12, 0) else config
    abstract = home.abstract_mesh_context_manager.swap_local(mesh_lib.empty_abstract_mesh)
    concrete = home.device_context.swap_local(mesh_lib.empty_concrete_mesh)

    def restore():
        home.device_context.set_local(concrete)
        home.abstract_mesh_context_manager.set_local(abstract)

    return restore


@contextlib.contextmanager
def context_of(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Let a shard_map over ``mesh`` be traced although ``jax.set_mesh`` has set another one."""
    current = jax.sharding.get_abstract_mesh()
    if current.empty or current == mesh.abstract_mesh:
        yield
        return
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield


def mesh_to_stage(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
    """What a program over a mesh should hold of it: no devices, if it is that of ``jax.set_mesh``.

    Of that one only the abstract mesh is part of jit's cache key: the program is used again for other devices.
    """
    return mesh.abstract_mesh if mesh_lib.get_concrete_mesh() == mesh else mesh


def _publish_meshes(resources) -> None:
    """Make the entered meshes part of jit's cache key; inside an empty one it is as if there were none."""
    meshes = () if resources.env.physical_mesh.empty else (env.physical_mesh for env in resources.stack)
    config.mesh_context_manager.set_local(tuple(m for m in meshes if not m.empty))


def replicated(values: Sequence[Any], mesh: Any, kept: Container[Any] = ()) -> list[Any]:
    """Values as they must be to enter a shard_map whole."""
    return resharded(values, [jax.sharding.PartitionSpec()] * len(values), mesh, kept)


def resharded(values: Sequence[Any], specs: Sequence[Any], mesh: Any, kept: Container[Any] = ()) -> list[Any]:
    """Under a mesh with Explicit axes shard_map refuses arguments that lie otherwise than its in_specs say.

    Args:
      kept: mesh axes over which they lie as they did.
    """
    explicit = {n for n, t in zip(mesh.axis_names, mesh.axis_types) if t == jax.sharding.AxisType.Explicit}
    if not explicit:
        return list(values)
    own = [explicit_spec(x) for x in values]
    wanted = [_joined(spec, explicit, before, kept) for spec, before in zip(specs, own)]
    return [jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, spec)) for x, spec in zip(values, wanted)]


def _joined(spec, names, before, kept):
    """A PartitionSpec over ``names`` (shard_map places those of type Auto itself), and over ``kept`` as before."""
    entries = []
    for entry, had in itertools.zip_longest(spec, before):
        axes = [a for a in axes_of_entry(entry) if a in names] + [a for a in axes_of_entry(had) if a in kept]
        entries.append(tuple(axes) or None)
    return jax.sharding.PartitionSpec(*entries)


def axes_of_entry(entry: Any) -> tuple[Any, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def axes_of_spmd_vmap() -> frozenset[Any]:
    """The mesh axes of ``vmap(spmd_axis_name=...)`` that are being applied around what is traced."""
    return frozenset(core.get_axis_env().spmd_axis_names)


@contextlib.contextmanager
def no_spmd_names() -> Iterator[None]:
    """Hide the axes of ``vmap(spmd_axis_name=...)`` from batching rules: those of our own levels are no such vmap."""
    env = core.get_axis_env()
    previous = core.axis_env_state.swap_local(core.AxisEnv(env.axis_sizes, frozenset(), env.explicit_mesh_axis_names))
    try:
        yield
    finally:
        core.axis_env_state.set_local(previous)


def in_manual_region() -> bool:
    """True while the body of some ``shard_map`` is being traced."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def _make_bare_specs_in_jit() -> Restoration:
    """Inside our mesh, ``jit(in_shardings=PartitionSpec(...))`` means that mesh, as it did then.

    Since 0.7 jit reads only ``jax.set_mesh``, which would also change where all other results live.
    """
    original = pjit._create_sharding_for_array

    def create_sharding(mesh, x, name, api_name):
        if api_name == "jit" and mesh.empty and isinstance(x, jax.sharding.PartitionSpec):
            mesh = mesh_lib.thread_resources.env.physical_mesh
        return original(mesh, x, name, api_name)

    restoration = Restoration()
    restoration.attribute(pjit, "_create_sharding_for_array", create_sharding)
    return restoration


_bare_specs_in_jit = _make_bare_specs_in_jit()


def restore_mesh_context(restoration: Restoration) -> None:
    """``with jax.sharding.Mesh(...)`` as it was: no deprecation warning (since 0.10.1), seen by xmap and bare specs.

    It sets the same state as JAX's own context, so that a block may outlive the restoration.
    """

    def enter(self):
        _push_mesh(self)
        return self

    def exit(self, *exc_info):
        _pop_mesh()
        return False

    restoration.attribute(jax.sharding.Mesh, "__enter__", enter)
    restoration.attribute(jax.sharding.Mesh, "__exit__", exit)
    hold(restoration, _bare_specs_in_jit)


def assign_mesh(mesh: jax.sharding.Mesh) -> None:
    """Put ``mesh`` in the place of this thread's innermost entered mesh, or of none.

    The mesh of ``jax.set_mesh`` is not kept beyond it (a program that saves the environment assigns it back).
    """
    resources = mesh_lib.thread_resources
    resources.stack[-1] = mesh_lib.EMPTY_ENV if mesh is mesh_lib.get_concrete_mesh() else mesh_lib.ResourceEnv(mesh)
    resources.env = resources.stack[-1]
    level = len(resources.stack)
    if level == 1 or level in _entered_meshes.around:
        _entered_meshes.around[level] = mesh_lib.get_concrete_mesh()
    _publish_meshes(resources)


def forget_assigned_mesh() -> None:
    """Undo ``assign_mesh`` outside of all contexts, for this thread."""
    resources = mesh_lib.thread_resources
    resources.stack[0] = mesh_lib.EMPTY_ENV
    resources.env = resources.stack[-1]
    _publish_meshes(resources)
