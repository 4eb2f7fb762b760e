"""Stage 2: where each named axis lies, and what is in scope at a call."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat.core import errors
from xmap_compat.core.errors import LEGACY, as_set, did_you_mean, quoted
from xmap_compat.core.mesh import SerialLoop, loops_in_scope, mesh_of_jax
from xmap_compat.core.specs import AxisName, can_name, check_name


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one named axis lies: its elements are cut over devices, then over loops; the rest is
    vectorized.

    Attributes:
      name: the axis.
      size: its global number of elements.
      mesh_axes: mesh axes in the user's order, major first.
      mesh_sizes: their sizes.
      loops: loop resources, outermost first: names, or ``(axis name, k)`` for an anonymous loop.
      loop_sizes: their lengths.
    """

    name: AxisName
    size: int
    mesh_axes: tuple[Any, ...] = ()
    mesh_sizes: tuple[int, ...] = ()
    loops: tuple[Hashable, ...] = ()
    loop_sizes: tuple[int, ...] = ()

    @property
    def devices(self) -> int:
        """The number of chunks that the mesh cuts the axis into."""
        return math.prod(self.mesh_sizes)

    @property
    def device_size(self) -> int:
        """The number of elements on one device."""
        return self.size // self.devices

    @property
    def local_size(self) -> int:
        """The number of elements computed at once on one device: the size of the vectorized
        dimension.
        """
        return self.device_size // math.prod(self.loop_sizes)

    def without_loops(self) -> Placement:
        return dataclasses.replace(self, loops=(), loop_sizes=())

    def without_mesh(self) -> Placement:
        return dataclasses.replace(self, mesh_axes=(), mesh_sizes=())

    def on_mesh_axes(self) -> Placement:
        """The same placement inside an enclosing xmap: mesh axes are named axes there."""
        mesh_axes = tuple(MeshAxis(axis, self.name) for axis in self.mesh_axes)
        return dataclasses.replace(self, mesh_axes=mesh_axes)

    @property
    def resources(self) -> frozenset[Hashable]:
        """The resources that no other axis of one value may need; a ``HiddenAxis`` needs none for
        itself.
        """
        if isinstance(self.name, HiddenAxis):
            return frozenset()
        return frozenset((*self.mesh_axes, *self.loops))


def split_over(placements: Iterable[Placement]) -> set[Hashable]:
    """The mesh axes over which axes are split."""
    mesh_axes: set[Hashable] = set()
    for placement in placements:
        mesh_axes.update(placement.mesh_axes)
    return mesh_axes


@dataclasses.dataclass(frozen=True)
class MeshAxis:
    """A mesh axis as a named axis of the outermost xmap: a nested xmap splits its own axes over it.

    Attributes:
      mesh_axis: the mesh axis.
      taken_by: the axis of a nested xmap that is split over it, for messages.
    """

    mesh_axis: str
    taken_by: AxisName = dataclasses.field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.mesh_axis} (taken by a nested xmap)"


class HiddenAxis(MeshAxis):
    """A mesh axis along which each device may have its own value although no spec says so: see
    ``core/undeclared.py``.
    """

    def __str__(self) -> str:
        return f"{self.mesh_axis} (of undeclared outputs)"

    __repr__ = __str__


def is_mesh_axis(axis: Any) -> bool:
    """Whether a named axis is a mesh axis (a ``MeshAxis`` or ``HiddenAxis``)."""
    return isinstance(axis, MeshAxis)


Resources = Mapping[AxisName, tuple[Any, ...]]


def parse_axis_resources(axis_resources: Any) -> dict[AxisName, tuple[Any, ...]]:
    """``{'a': 'x'}`` -> ``{'a': ('x',)}``, with the checks that need no mesh."""
    if axis_resources is None:
        return {}
    if not isinstance(axis_resources, Mapping):
        wanted = "a dictionary from axis names to resources, such as {'batch': 'x'}"
        raise errors.should_be("axis_resources", wanted, axis_resources)
    parsed: dict[AxisName, tuple[Any, ...]] = {}
    for name, resources in axis_resources.items():
        check_name("axis_resources", name)
        if not isinstance(resources, (tuple, list)):
            resources = (resources,)
        named = _named(resources)
        for resource in named:
            # Any hashable may name a mesh axis or a loop, unless it surely means something else.
            if not can_name(resource, _TYPES_OF_NO_RESOURCE):
                raise _bad_resource(name, resource)
        if len(set(named)) != len(named):
            raise _misplaced_resource(name, axis_resources[name], is_repeated=True)
        parsed[name] = tuple(resources)
    return parsed


def _named(entries: Iterable[Any]) -> list[Any]:
    """The resources that have names."""
    return [entry for entry in entries if not isinstance(entry, SerialLoop)]


_TYPES_OF_NO_RESOURCE = (
    tuple,
    type,
    jax.Device,
    jax.sharding.Mesh,
    jax.sharding.PartitionSpec,
    jax.sharding.Sharding,
)


def _bad_resource(name, resource):
    wanted = "names of mesh axes or of serial loops, or SerialLoop(length)"
    advice = "Write a tuple of several resources, and () for none"
    if isinstance(resource, (jax.Device, jax.sharding.Mesh)):
        advice = (
            "Enter `with mesh(devices, ('x',)):` around the call, and write "
            f"axis_resources={{{name!r}: 'x'}}"
        )
    return errors.should_be(f"The resources of axis {name}", wanted, resource, advice=advice)


def resources_of_known_axes(
    resources: Resources, names: Sequence[AxisName], only_warn: bool
) -> dict[AxisName, tuple[Any, ...]]:
    """The entries for axes that the call has.

    Others have no effect: they raise, or warn in old programs (``only_warn``).
    """
    known = {}
    unknown = {}
    for name, entries in resources.items():
        if name in names:
            known[name] = entries
        else:
            unknown[name] = entries
    if unknown:
        error = _unknown_axes(unknown, names)
        if not only_warn:
            raise error
        _jax.warn_user(f"Ignored: {error}")
    return known


def _unknown_axes(
    unknown: Mapping[Hashable, Sequence[Any]], known: Sequence[Hashable]
) -> ValueError:
    """``unknown``: axes that the call does not have, and the resources that they are given."""
    turned: dict[Any, Hashable] = {}
    for name, entries in unknown.items():
        turned.update((entry, name) for entry in entries if entry in known)
    meant = did_you_mean(unknown, known) or ". Name one of these, or leave the entry out"
    if turned:
        meant = f". Did you mean the other way round, {turned}?"
    ours = (
        f"axis_resources has entries for {quoted(unknown)}, which neither in_axes nor axis_sizes "
        f"name: the axes of this xmap are {quoted(known) or 'none'}{meant}"
    )
    legacy = (
        "All axes that were assigned resources have to appear in in_axes or axis_sizes, but the "
        f"following are missing: {as_set(unknown)}"
    )
    return ValueError(f"{ours}{LEGACY}{legacy}")


@dataclasses.dataclass(frozen=True)
class Scope:
    """The resources in scope at a call.

    Attributes:
      mesh: the mesh, which may be abstract.
      loops: named loops with their lengths.
    """

    mesh: _jax.AnyMesh | None
    loops: tuple[tuple[Hashable, int], ...]


def current_scope() -> Scope:
    ambient = _jax.ambient_mesh()
    mesh = None if ambient is None else mesh_of_jax(ambient)
    if _bodies.stack and not isinstance(mesh, jax.sharding.Mesh):
        around = _bodies.stack[-1].scope.mesh
        # No types are in effect in a body: JAX does not know its abstract mesh there.
        if isinstance(around, jax.sharding.AbstractMesh):
            mesh = around
    return Scope(mesh, tuple(loops_in_scope.value))


def place_axes(
    sizes: Mapping[AxisName, int],
    resources: Resources,
    scope: Scope,
    origins: Mapping[AxisName, str] | None = None,
) -> dict[AxisName, Placement]:
    """One Placement for each axis; ``origins`` says for messages which argument each size is from.

    Raises:
      ValueError: a resource is not in scope, or does not divide the size of the axis.
    """
    mesh_shape = dict(scope.mesh.shape) if scope.mesh is not None else {}
    loops = dict(scope.loops)
    _check_in_scope(resources, mesh_shape, loops)
    placements = {}
    for name, size in sizes.items():
        origin = (origins or {}).get(name, "axis_sizes")
        entries = resources.get(name, ())
        placements[name] = _place(name, size, entries, mesh_shape, loops, origin)
    return placements


def _check_in_scope(resources, mesh_shape, loops):
    """Raise unless each resource is a mesh axis or a loop in scope, and not both."""
    missing: list[Any] = []
    axes: list[Hashable] = []
    shadowed: list[Any] = []
    for name, entries in resources.items():
        named = _named(entries)
        shadowed.extend(r for r in named if r in mesh_shape and r in loops)
        lacking = [r for r in named if r not in mesh_shape and r not in loops]
        if lacking:
            missing.extend(lacking)
            axes.append(name)
    if missing:
        available = [*mesh_shape, *loops]
        raise errors.missing_resources(
            list(dict.fromkeys(missing)), axes, available, bool(mesh_shape)
        )
    if shadowed:
        raise errors.mesh_shadows_loops(dict.fromkeys(shadowed))


def _place(name, size, entries, mesh_shape, loops, origin):
    mesh_axes: list[Any] = []
    mesh_sizes: list[int] = []
    loop_names: list[Hashable] = []
    loop_sizes: list[int] = []
    for entry in entries:
        if isinstance(entry, SerialLoop):
            loop_names.append((name, len(loop_names)))
            loop_sizes.append(entry.length)
        elif entry in loops:
            loop_names.append(entry)
            loop_sizes.append(loops[entry])
        elif loop_names:
            raise _misplaced_resource(name, entries, is_repeated=False)
        else:
            mesh_axes.append(entry)
            mesh_sizes.append(mesh_shape[entry])
    total = math.prod((*mesh_sizes, *loop_sizes))
    if size % total:
        raise errors.not_divisible(name, size, entries, total, origin)
    return Placement(
        name, size, tuple(mesh_axes), tuple(mesh_sizes), tuple(loop_names), tuple(loop_sizes)
    )


def _misplaced_resource(name: Hashable, resources: Any, is_repeated: bool) -> ValueError:
    ours = f"axis_resources give `{name}` the resources {resources!r}, but"
    if is_repeated:
        legacy = (
            "Resource assignment of a single axis must be a tuple of distinct resources, but "
            f"specified {resources!r} for axis {name}"
        )
        return ValueError(
            f"{ours} one of these is repeated. Name each resource once{LEGACY}{legacy}"
        )
    legacy = "Loop resources cannot appear before mesh axes in the resource_axis argument"
    return ValueError(f"{ours} loops come last. Write the mesh axes first{LEGACY}{legacy}")


class _Bodies(threading.local):
    def __init__(self):
        self.stack: list[Body] = []


@dataclasses.dataclass(frozen=True)
class Body:
    """An xmapped function whose body is being traced in this thread.

    Attributes:
      sizes: its axes.
      scope: the resources in scope at its call.
      mesh_axes: mesh axes that xmaps nested in it may split their axes over, with their sizes.
      inputs: the arguments of the function, with their named axes; None until it is called, empty
        in a nested xmap, where they are unknown.
    """

    sizes: Mapping[AxisName, int]
    scope: Scope
    mesh_axes: Mapping[MeshAxis, int] = dataclasses.field(default_factory=dict)
    inputs: Sequence[tuple[Any, frozenset[AxisName]]] | None = None


_bodies = _Bodies()


@contextlib.contextmanager
def entered_body(body: Body) -> Iterator[None]:
    _bodies.stack.append(body)
    try:
        yield
    finally:
        _bodies.stack.pop()


@contextlib.contextmanager
def known_inputs(tracers: Sequence[Any], names: Sequence[frozenset[AxisName]]) -> Iterator[None]:
    """The context in which the function of the innermost body is called with these arguments."""
    body = _bodies.stack[-1]
    _bodies.stack[-1] = dataclasses.replace(body, inputs=list(zip(tracers, names)))
    try:
        yield
    finally:
        _bodies.stack[-1] = body


def enclosing_bodies() -> Sequence[Body]:
    """The bodies being traced in this thread, outermost first."""
    return tuple(_bodies.stack)


def sizes_in_scope() -> Mapping[AxisName, int]:
    """Every axis that the bodies being traced in this thread define."""
    sizes: dict[AxisName, int] = {}
    for body in enclosing_bodies():
        sizes.update(body.sizes)
    return sizes
