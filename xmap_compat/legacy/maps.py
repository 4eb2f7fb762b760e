"""The module ``jax.experimental.maps`` as programs knew it.

``maps.Mesh`` is ``jax.sharding.Mesh`` itself, as it was then: programs compare and import the two.
What modern JAX lacks is only its ``with``: while installed it does what it did then, without JAX's
deprecation warning.
"""

from __future__ import annotations

import collections
import functools
import importlib.machinery
import types
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from xmap_compat import _jax, api
from xmap_compat.core import mesh as meshes
from xmap_compat.core import placement
from xmap_compat.core.errors import should_be
from xmap_compat.legacy.adapters import refused

MAPS = "jax.experimental.maps"

# ------------------------------------------------------------- the environment, read and set


class Loop(NamedTuple):
    """A serial loop in scope."""

    name: Hashable
    length: int


class ResourceEnv(NamedTuple):
    """The resources in scope: a mesh (``.empty`` outside of all), and serial loops."""

    physical_mesh: Any
    loops: tuple[Loop, ...] = ()

    @property
    def shape(self) -> collections.OrderedDict[Hashable, int]:
        """The size of each resource."""
        return collections.OrderedDict([*self.physical_mesh.shape.items(), *self.loops])


EMPTY_ENV = ResourceEnv(jax.sharding.Mesh(np.empty((), dtype=object), ()))


class _ThreadResources:
    """``thread_resources``: its ``env`` is what is in scope in this thread, however it was entered.

    Assigning ``env`` sets the mesh of this thread without a ``with``: in the place of the innermost
    ``with mesh:``, or outside of all until ``EMPTY_ENV`` is assigned.
    """

    @property
    def env(self) -> ResourceEnv:
        scope = placement.current_scope()
        env = EMPTY_ENV
        if isinstance(scope.mesh, jax.sharding.Mesh):
            env = env._replace(physical_mesh=scope.mesh)
        if scope.loops:
            env = env._replace(loops=tuple(Loop(*loop) for loop in scope.loops))
        return env

    @env.setter
    def env(self, env: Any) -> None:
        mesh = getattr(env, "physical_mesh", None)
        loops = getattr(env, "loops", ())
        if not isinstance(mesh, jax.sharding.Mesh) or isinstance(env, meshes.Mesh):
            advice = "Write `thread_resources.env = ResourceEnv(mesh)`, or `with mesh:`"
            raise should_be("thread_resources.env", "a ResourceEnv", env, advice=advice)
        if loops and loops != self.env.loops:
            raise _assigned_loops(loops)
        _jax.assign_mesh(meshes.mesh_of_jax(mesh))


def _assigned_loops(loops: Sequence[Any]) -> ValueError:
    return ValueError(
        "A ResourceEnv that is assigned to thread_resources.env can set the mesh only, but it has "
        f"the loops {tuple(loops)!r}. Use `with serial_loop(name, length):` around the calls"
    )


thread_resources = _ThreadResources()

# ------------------------------------------------------------------------ the module


@functools.wraps(api.xmap)
@_jax.api_boundary
def xmap(fun: Any, in_axes: Any, out_axes: Any, **options: Any) -> Any:
    """The package's xmap, but results may vary over axes that their specs leave out, as in
    legacy.
    """
    return api.make(fun, in_axes, out_axes, undeclared=True, **options)


def mesh(devices: Any, axis_names: Any) -> jax.sharding.Mesh:
    """``with mesh(devices, ('x', 'y')):``, the older name of ``Mesh``."""
    return jax.sharding.Mesh(devices, axis_names)


def _module() -> types.ModuleType:
    """``jax.experimental.maps`` with all of its public names."""
    resource = Hashable | meshes.SerialLoop
    made = types.ModuleType(MAPS, "Provided by xmap_compat.install().")
    made.__spec__ = importlib.machinery.ModuleSpec(MAPS, None, origin=__file__)
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
        "make_xmap_callable": refused(
            f"{MAPS}.make_xmap_callable", "xmap(fun, ...).lower(*args).compile()"
        ),
        "xmap_p": refused(
            f"{MAPS}.xmap_p",
            "code for the equations of jax.jit: an xmapped function is a jitted one",
        ),
    }
    made.__dict__.update(names, __all__=sorted(names))
    return made


module = _module()
