"""The user's side of resources: meshes of devices, and loops."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from xmap_compat import _jax
from xmap_compat.core import errors


class Mesh(jax.sharding.Mesh):
    """An array of devices with a name for each of its dimensions, usable as a context.

    ``with Mesh(devices, names) as m:`` makes the names available as resources for
    ``axis_resources`` and lets bare PartitionSpecs be used in ``jax.jit`` and
    ``jax.lax.with_sharding_constraint``.  The context can be entered again, nested, and used as a
    decorator.

    It is a ``jax.sharding.Mesh``, equal to JAX's mesh of the same devices and names, and accepted
    wherever that one is.  Only its ``with`` differs, which JAX has deprecated.

    Args:
      devices: an array (or list) of JAX devices; ``np.empty((), object)`` with no names is the
        empty mesh, in whose scope there are no mesh axes.
      axis_names: one name for each dimension of ``devices``; a single string for one dimension.
      axis_types: as for ``jax.sharding.Mesh``.

    Attributes:
      physical_mesh: JAX's own mesh of the same devices and names.

    Example:

      >>> import jax, numpy as np
      >>> from xmap_compat import Mesh, xmap
      >>> doubled = xmap(lambda x: 2 * x, ["i"], ["i"], axis_resources={"i": "x"})
      >>> with Mesh(jax.devices()[:2], "x"):
      ...     len(doubled(np.arange(4.0)).sharding.device_set)
      2

    Source: ``jax.experimental.maps.Mesh``.
    """

    physical_mesh: jax.sharding.Mesh

    @_jax.api_boundary
    def __new__(cls, devices: Any, axis_names: Any, axis_types: Any = None) -> Mesh:
        names = _mesh_names(axis_names)
        devices = np.asarray(devices, dtype=object)
        if not _is_empty(devices, names):
            _check_devices(devices, names)
        # JAX keeps one mesh for each array of devices, and compares meshes by identity.  We do the
        # same: our mesh has all attributes of JAX's mesh, and two of ours are equal if they have
        # the same mesh of JAX's.
        physical_mesh = jax.sharding.Mesh(devices, names, axis_types)
        mesh = _meshes.get(physical_mesh)
        if mesh is None:
            mesh = object.__new__(cls)
            mesh.__dict__.update(vars(physical_mesh), physical_mesh=physical_mesh)
            _meshes[physical_mesh] = mesh
        return mesh

    @_jax.api_boundary
    def __enter__(self) -> Mesh:
        shadowed = [name for name, _ in loops_in_scope.value if name in self.shape]
        if shadowed:
            raise errors.mesh_shadows_loops(shadowed)
        _jax.enter_mesh(self.physical_mesh)
        return self

    def __exit__(self, *exc_info: Any, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not exiting():  # the names of modules are gone then
            _jax.exit_mesh(self.physical_mesh)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, jax.sharding.Mesh) and self.physical_mesh is mesh_of_jax(other)

    def __hash__(self) -> int:
        return hash(self.physical_mesh)


_meshes: weakref.WeakValueDictionary[jax.sharding.Mesh, Mesh] = weakref.WeakValueDictionary()


def mesh_of_jax(mesh: _jax.AnyMesh) -> _jax.AnyMesh:
    """JAX's own mesh for a mesh that may be ours."""
    if isinstance(mesh, Mesh):
        return mesh.physical_mesh
    return mesh


@contextlib.contextmanager
def entered(mesh: _jax.AnyMesh | None) -> Iterator[None]:
    """The context that puts a mesh, which may be abstract, in scope; None leaves the scope as it
    is.
    """
    if mesh is not None and not isinstance(mesh, jax.sharding.AbstractMesh):
        with Mesh(mesh.devices, mesh.axis_names, mesh.axis_types):
            yield
    elif mesh is None:
        yield
    else:
        _jax.enter_mesh(mesh)
        try:
            yield
        finally:
            _jax.exit_mesh(mesh)


def check_mesh(tool: str, mesh: Any) -> _jax.AnyMesh | None:
    """The argument ``mesh`` of a tool, checked: with devices, abstract, or None for the one in
    scope.
    """
    if not isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh, type(None))):
        wanted = "a mesh, as of Mesh(devices, names) or AbstractMesh(sizes, names)"
        raise errors.should_be(f"The argument mesh of {tool}", wanted, mesh)
    return None if mesh is None or mesh.empty else mesh


def devices_of(mesh: _jax.AnyMesh | None) -> list[jax.Device]:
    """The devices of a mesh, in its order; an abstract one has none."""
    if isinstance(mesh, jax.sharding.Mesh):
        return list(mesh.devices.flat)
    return []


def platform_of(mesh: _jax.AnyMesh) -> str | None:
    """``'gpu'``; None if it is unknown (an AbstractDevice has one since jax 0.10.2)."""
    # An abstract mesh may not say which devices it has.
    is_abstract = isinstance(mesh, jax.sharding.AbstractMesh)
    device = mesh.abstract_device if is_abstract else mesh.devices.flat[0]
    return getattr(device, "platform", None)


def _is_empty(devices: np.ndarray, names: tuple[Hashable, ...]) -> bool:
    """Whether devices and names are JAX's way to write that there is no mesh."""
    return not names and devices.shape == () and devices.item() is None


def _mesh_names(axis_names):
    if isinstance(axis_names, str):
        axis_names = (axis_names,)
    try:
        names = tuple(axis_names)
        distinct = set(names)
    except TypeError:
        raise _bad_names(axis_names) from None
    if None in names or any(isinstance(name, jax.Device) for name in names):
        raise _bad_names(axis_names)
    if len(distinct) != len(names):
        advice = "Give each dimension its own name"
        raise errors.should_be("The axis names of a mesh", "different", names, ValueError, advice)
    return names


def _bad_names(names):
    advice = "Write mesh(devices, ('x', 'y'))"
    if any(isinstance(name, jax.Device) for name in np.asarray(names, object).flat):
        advice = "Devices and names are swapped: write mesh(devices, ('x', 'y'))"
    wanted = "strings (or hashable, and not None)"
    return errors.should_be("The axis names of a mesh", wanted, names, advice=advice)


def _check_devices(devices, names):
    seen = set()
    for device in devices.flat:
        if not isinstance(device, jax.Device):
            raise _bad_mesh_devices(device)
        if device in seen:
            raise _repeated_mesh_device(device)
        seen.add(device)
    if devices.ndim != len(names):
        raise _bad_mesh(devices.shape, names)
    if not seen:
        raise _empty_mesh(names)


@_jax.api_boundary
def mesh(devices: Any, axis_names: Any) -> Mesh:
    """``with mesh(devices, ('x', 'y')):`` as in the xmap tutorial; see :class:`Mesh`.

    >>> import jax, numpy as np
    >>> from xmap_compat import mesh
    >>> with mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("x", "y")) as m:
    ...     dict(m.shape)
    {'x': 2, 'y': 1}
    """
    return Mesh(devices, axis_names)


@dataclasses.dataclass(frozen=True, init=False)
class SerialLoop:
    """A loop as the resource of one axis: ``axis_resources={'batch': SerialLoop(4)}``.

    The axis is cut into ``length`` chunks that are computed one after the other.

    >>> import numpy as np
    >>> from xmap_compat import SerialLoop, xmap
    >>> chunks = SerialLoop(2)
    >>> squared = xmap(lambda x: x**2, ["batch"], ["batch"], axis_resources={"batch": chunks})
    >>> squared(np.arange(4)).tolist()
    [0, 1, 4, 9]
    """

    length: int

    @_jax.api_boundary
    def __init__(self, length: int):
        self.__dict__["length"] = _checked_length(length)


loops_in_scope = jax.make_user_context(default_value=())


@_jax.api_boundary
def serial_loop(name: Hashable, length: int) -> contextlib.AbstractContextManager[None]:
    """``with serial_loop('l', 4):`` makes ``'l'`` a loop resource that several axes may share.

    >>> import numpy as np
    >>> from xmap_compat import serial_loop, xmap
    >>> squared = xmap(lambda x: x**2, ["batch"], ["batch"], axis_resources={"batch": "l"})
    >>> with serial_loop("l", 2):  # two chunks of two elements
    ...     squared(np.arange(4)).tolist()
    [0, 1, 4, 9]
    """
    if name is None or not isinstance(name, Hashable):
        wanted = "a string (or hashable, and not None)"
        raise errors.should_be(
            "The name of a serial loop", wanted, name, advice="Write serial_loop('l', 4)"
        )
    loops = dict(loops_in_scope.value)
    ambient = _jax.ambient_mesh()
    if name in loops or (ambient is not None and name in ambient.shape):
        raise errors.loop_name_taken(name)
    return _loop_in_scope(name, _checked_length(length))


@contextlib.contextmanager
def _loop_in_scope(name: Hashable, length: int) -> Iterator[None]:
    with loops_in_scope((*loops_in_scope.value, (name, length))):
        yield


def _checked_length(length):
    is_integer = isinstance(length, (int, np.integer)) and not isinstance(length, bool)
    if not is_integer or length < 1:
        wanted = "a positive integer"
        advice = "Write the number of chunks: SerialLoop(4), or serial_loop('l', 4)"
        raise errors.should_be("The length of a serial loop", wanted, length, ValueError, advice)
    return length


# ----------------------------------------------------------------------------- messages


def _bad_mesh(shape: Sequence[int], names: Sequence[Any]) -> ValueError:
    return ValueError(
        "A mesh needs one axis name for each dimension of its device array, but got devices of "
        f"shape {tuple(shape)} and the names {names!r}. Write the names in one tuple, ('x', 'y'), "
        "or reshape the devices"
    )


def _bad_mesh_devices(found: Any) -> TypeError:
    return TypeError(
        "The first argument of a mesh should be a rectangular array (or a list) of JAX devices, "
        f"but it contains {found!r} of type {type(found).__name__}. "
        "Write mesh(np.array(jax.devices()).reshape(4, 2), ('x', 'y'))"
    )


def _repeated_mesh_device(device: Any) -> ValueError:
    return ValueError(
        f"A mesh should have each device once, but {device!r} appears more than once. Leave one out"
    )


def _empty_mesh(names: Sequence[Any]) -> ValueError:
    return ValueError(
        f"mesh needs at least one device, but got none for the axis names {names!r}. "
        "Pass jax.devices()"
    )
