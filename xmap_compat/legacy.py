"""``install()``: unmodified programs find ``jax.experimental.maps`` and its friends where they were.

Nothing changes before :func:`install` is called, and :func:`uninstall` puts back exactly what was
there.  No JAX backend is initialised, so that programs can still choose devices (``XLA_FLAGS``).

``maps.Mesh`` is ``jax.sharding.Mesh`` itself, as it was then: programs compare and import the two.  What
modern JAX lacks is only its ``with``: while installed it does what it did then, without JAX's deprecation
warning.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import importlib.machinery
import sys
import threading
import types
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.experimental
import numpy as np

from xmap_compat import _jax
from xmap_compat.api import xmap
from xmap_compat.core import errors, placement, restored
from xmap_compat.core import mesh as meshes

MAPS = "jax.experimental.maps"
OPTIONS = (
    "experimental_xmap_spmd_lowering",
    "experimental_xmap_spmd_lowering_manual",
    "experimental_xmap_ensure_fixed_sharding",
)

# ------------------------------------------------------------- the environment, read and set


class Loop(NamedTuple):
    """A serial loop in scope."""

    name: Hashable
    length: int


class ResourceEnv(NamedTuple):
    """The resources in scope: a mesh (``.empty`` outside of all), and serial loops."""

    physical_mesh: Any
    loops: tuple[Loop, ...] = ()

    def with_mesh(self, mesh: jax.sharding.Mesh) -> ResourceEnv:
        return self._replace(physical_mesh=mesh)

    def with_extra_loop(self, loop: Loop) -> ResourceEnv:
        if loop.name in self.resource_axes:
            raise errors.loop_name_taken(loop.name)
        return self._replace(loops=(*self.loops, loop))

    @property
    def shape(self) -> collections.OrderedDict[Hashable, int]:
        """The size of each resource."""
        return collections.OrderedDict([*self.physical_mesh.shape.items(), *self.loops])

    @property
    def local_shape(self) -> collections.OrderedDict[Hashable, int]:
        """The size of each resource on this process."""
        return collections.OrderedDict([*self.physical_mesh.local_mesh.shape.items(), *self.loops])

    @property
    def physical_resource_axes(self) -> set[Hashable]:
        return set(self.physical_mesh.axis_names)

    @property
    def loop_resource_axes(self) -> set[Hashable]:
        return {loop.name for loop in self.loops}

    @property
    def resource_axes(self) -> set[Hashable]:
        return self.physical_resource_axes | self.loop_resource_axes

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name!r}: {size}" for name, size in self.physical_mesh.shape.items())
        return f"ResourceEnv(mesh=Mesh({sizes}), {self.loops!r})"


EMPTY_ENV = ResourceEnv(jax.sharding.Mesh(np.empty((), dtype=object), ()))


class ThreadResources:
    """``thread_resources``: its ``env`` is what is in scope in this thread, however it was entered.

    Assigning ``env`` sets the mesh of this thread without a ``with``: in the place of the innermost
    ``with mesh:``, or outside of all until ``EMPTY_ENV`` is assigned.
    """

    @property
    def env(self) -> ResourceEnv:
        scope = placement.current_scope()
        env = ResourceEnv(scope.mesh or EMPTY_ENV.physical_mesh, tuple(Loop(*loop) for loop in scope.loops))
        return EMPTY_ENV if env == EMPTY_ENV else env

    @env.setter
    def env(self, env: Any) -> None:
        mesh, loops = getattr(env, "physical_mesh", None), getattr(env, "loops", ())
        if not isinstance(mesh, jax.sharding.Mesh) or isinstance(env, meshes.Mesh):
            raise errors.bad_resource_env(env)
        if loops and loops != self.env.loops:
            raise errors.assigned_loops(loops)
        _jax.assign_mesh(meshes.mesh_of_jax(mesh))


thread_resources = ThreadResources()

# ------------------------------------------------------------------------ what is installed


def mesh(devices: Any, axis_names: Any) -> jax.sharding.Mesh:
    """``with mesh(devices, ('x', 'y')):``, the older name of ``Mesh``."""
    return jax.sharding.Mesh(devices, axis_names)


def _maps_module() -> types.ModuleType:
    """``jax.experimental.maps`` with all of its public names."""
    resource = Hashable | meshes.SerialLoop
    module = types.ModuleType(MAPS, "Provided by xmap_compat.install().")
    module.__spec__ = importlib.machinery.ModuleSpec(MAPS, None, origin=__file__)
    names = {
        "xmap": xmap,
        "Mesh": jax.sharding.Mesh,
        "mesh": mesh,
        "SerialLoop": meshes.SerialLoop,
        "AnonymousSerialLoop": meshes.SerialLoop,
        "serial_loop": meshes.serial_loop,
        "Loop": Loop,
        "ResourceEnv": ResourceEnv,
        "EMPTY_ENV": EMPTY_ENV,
        "thread_resources": thread_resources,
        "AxisName": Hashable,
        "MeshAxisName": Any,
        "ResourceAxisName": Hashable,
        "Resource": resource,
        "ResourceSet": resource | tuple[resource, ...],
    }
    module.__dict__.update(names, __all__=sorted(names))
    return module


_maps = _maps_module()


def _new_installation() -> _jax.Restoration:
    """What install() puts in place.  The names of ``jax.lax`` and braces come with the restoration of bodies."""
    installation = _jax.Restoration()
    pxla = importlib.import_module("jax.interpreters.pxla")
    installation.entry(sys.modules, MAPS, _maps)
    installation.attribute(jax.experimental, "maps", _maps)
    # JAX's own of this name is deprecated, and does not know jax.set_mesh.
    installation.attribute(pxla, "thread_resources", thread_resources)
    installation.attribute(pxla, "Mesh", jax.sharding.Mesh)
    _jax.accept_options(installation, OPTIONS)
    _jax.restore_mesh_context(installation)
    _jax.hold(installation, restored.restored)
    return installation


_lock = threading.Lock()
_installation: _jax.Restoration | None = None


class Installed(contextlib.AbstractContextManager):
    """What ``install()`` returns: as a context it undoes that call, unless an earlier one had installed already.

    Contexts that overlap, in several threads say, share what the first one installed: the last one to end undoes it.
    """

    _open = 0
    _over: _jax.Restoration | None = None  # what is installed for as long as contexts are open

    def __init__(self, first: bool):
        self._first = first

    def __enter__(self) -> Installed:
        with _lock:
            Installed._open += 1
            if self._first:
                Installed._over = _installation
        return self

    def __exit__(self, *exc_info) -> None:
        with _lock:
            Installed._open -= 1
            if not Installed._open and Installed._over is _installation:
                _put_back()


def install() -> Installed:
    """Let unmodified programs that used xmap import and run.

    Afterwards these exist again: the module ``jax.experimental.maps`` (``xmap``, ``mesh``, ``Mesh``,
    ``SerialLoop``, ``serial_loop``, ``thread_resources``, ``ResourceEnv``, ...), ``thread_resources`` and
    ``Mesh`` in ``jax.interpreters.pxla``, ``jax.lax.pdot``, ``xeinsum``, ``pgather``, ``pargmax`` and
    ``pargmin``, ``jnp.einsum`` with braces, ``with jax.sharding.Mesh(...)`` without a warning, and the
    options ``experimental_xmap_*`` of ``jax.config`` (without effect: there is one lowering).

    It can be called again without effect, from any thread, and holds for all of them.  It initialises no
    backend.  ``with install():`` uninstalls at the end.  For programs that cannot be changed at all there
    is ``python -m xmap_compat script.py``.
    """
    global _installation
    with _lock:
        first = _installation is None
        if first:
            installation = _new_installation()
            installation.enter()
            _installation = installation
    return Installed(first)


def uninstall() -> None:
    """Put back exactly what was there before :func:`install`; does nothing if nothing is installed.

    A mesh that this thread assigned to ``thread_resources.env`` is forgotten.
    """
    with _lock:
        _put_back()


def _put_back() -> None:
    global _installation
    if _installation is not None:
        _installation.exit()
        _installation = None
        _jax.forget_assigned_mesh()
