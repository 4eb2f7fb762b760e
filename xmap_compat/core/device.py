"""The axes of an xmap as one device sees them, and how values are cast, moved and laid out on a
device.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import _jax
from xmap_compat.core import once
from xmap_compat.core.device_primitives import bind, gather_p, sum_p, vary_p
from xmap_compat.core.placement import Placement
from xmap_compat.core.specs import AxisName, AxisNames
from xmap_compat.core.undeclared import operand_names
from xmap_compat.core.values import (
    Dims,
    NamedValue,
    common,
    is_smooth,
    leading,
    moved_to_front,
    transposed,
    union_of_names,
    without,
)

_Casts = weakref.WeakKeyDictionary[NamedValue, dict[frozenset[AxisName], tuple[Any, NamedValue]]]


class Factor(NamedTuple):
    """A factor of the size of a split axis: a mesh axis, or a local dimension.  Two of these may
    have one name.
    """

    is_local: bool
    name: Any
    size: int


def names_of(factors: Iterable[Factor]) -> tuple[Any, ...]:
    return tuple(factor.name for factor in factors)


def sizes_of(factors: Iterable[Factor]) -> tuple[int, ...]:
    return tuple(factor.size for factor in factors)


@dataclasses.dataclass(frozen=True)
class DeviceView:
    """The axes of one xmap as a device knows them.

    Attributes:
      placements: every axis of this xmap.
      mesh_sizes: the mesh axes that are mapped over devices here, in the order of the mesh, and
        their sizes; empty without a ``shard_map``.
      nested: whether this is in the body of another xmap; the mesh axes are then named axes of that
        one.
      in_users_shard_map: whether the xmap is called in the user's own ``shard_map``: values may
        vary over its mesh axes, which names do not show.
      gathers_vary: whether gathered values may vary in their type, which names do not show: see
        ``core/uses.py``.
      untyped: whether types do not tell what varies, because results differ between devices where
        no type may say so.
      casts: the results of :func:`cast_to`, by value and names, each with its trace.  Several uses
        share a cast: in a gradient their cotangents are added on each device, and summed over
        devices once.
    """

    placements: Mapping[AxisName, Placement]
    mesh_sizes: Mapping[Any, int] = dataclasses.field(default_factory=dict)
    nested: bool = False
    in_users_shard_map: bool = False
    gathers_vary: bool = False
    untyped: bool = False
    casts: _Casts = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary, repr=False, compare=False
    )

    @property
    def typed(self) -> bool:
        """Whether values carry varying mesh axes in their type (we are inside our
        ``shard_map``).
        """
        return self.in_our_shard_map and not self.untyped

    @property
    def in_our_shard_map(self) -> bool:
        """Whether JAX sees mesh axes, which no body has."""
        return bool(self.mesh_sizes) and not self.nested

    def placement_of(self, name: AxisName) -> Placement:
        """The placement of an axis; an axis bound outside of this xmap acts as a mesh axis that it
        fills.
        """
        if name in self.placements:
            return self.placements[name]
        size = lax.axis_size(name)
        return Placement(name, size, mesh_axes=(name,), mesh_sizes=(size,))

    def placements_without_loops(self) -> dict[AxisName, Placement]:
        return {name: place.without_loops() for name, place in self.placements.items()}

    def is_bound(self, name: AxisName) -> bool:
        return name in self.placements

    def bound(self, names: Iterable[AxisName]) -> frozenset[AxisName]:
        """The names that this xmap binds."""
        return frozenset(filter(self.is_bound, names))

    def has_local_dim(self, name: AxisName) -> bool:
        return self.is_bound(name) and self.placements[name].local_size != 1

    def local_names(self, names: Iterable[AxisName]) -> list[AxisName]:
        """The names that have a local dimension, in the order of the xmap's axes."""
        names = set(names)
        return [n for n in self.placements if n in names and self.has_local_dim(n)]

    def local_sizes(self, names: Iterable[AxisName]) -> tuple[int, ...]:
        return tuple(self.placements[name].local_size for name in names)

    def mesh_axes_of(self, names: Iterable[AxisName]) -> tuple[Any, ...]:
        """All mesh axes (and axes bound outside) of these names, in the order of the mesh; axes
        bound outside come last.
        """
        used: set[Any] = set()
        outer = []
        for name in names:
            if self.is_bound(name):
                used.update(self.placements[name].mesh_axes)
            else:
                outer.append(name)
        return (*self.in_order(used), *outer)

    def in_order(self, mesh_axes: Iterable[Any]) -> tuple[Any, ...]:
        """Those of the axes that are on the mesh, in its order."""
        return common(self.mesh_sizes, set(mesh_axes))

    def mesh_size(self, axis: Any) -> int:
        if axis in self.mesh_sizes:
            return self.mesh_sizes[axis]
        return lax.axis_size(axis)

    def present(self, value: NamedValue, names: Iterable[AxisName]) -> list[AxisName]:
        """The names that the value varies over; axes bound outside are assumed to vary."""
        return [n for n in names if n in value.names or not self.is_bound(n)]

    def total_size(self, names: Iterable[AxisName]) -> int:
        """The global number of elements along all the names together."""
        return math.prod(self.placement_of(n).size for n in names)

    def factors(self, names: Iterable[AxisName]) -> list[Factor]:
        """The factors of axes, major first: the mesh axes of each axis, then its local
        dimension.
        """
        factors: list[Factor] = []
        for name in names:
            for axis in self.placement_of(name).mesh_axes:
                factors.append(self._mesh_factor(axis))
            if self.has_local_dim(name):
                factors.append(self._local_factor(name))
        return factors

    def _mesh_factor(self, axis):
        return Factor(False, axis, self.mesh_size(axis))

    def _local_factor(self, name):
        return Factor(True, name, self.placements[name].local_size)

    def factors_by_kind(self, names: Iterable[AxisName]) -> tuple[list[Factor], list[Factor]]:
        """The same factors as two lists: mesh axes in the order of the mesh, and local
        dimensions.
        """
        names = list(names)
        mesh = list(map(self._mesh_factor, self.mesh_axes_of(names)))
        local = list(map(self._local_factor, self.local_names(names)))
        return mesh, local


def cast_data(view: DeviceView, data: Any, mesh_axes: Iterable[Any]) -> Any:
    """Cast data that is equal on all devices to vary over mesh axes of this xmap."""
    axes = view.in_order(mesh_axes)
    if view.nested:
        return bind_over(view, vary_p, data, axes)
    return _cast_typed(view, data, axes)


def bind_over(view: DeviceView, primitive: Any, data: Any, axes: Sequence[Any]) -> Any:
    """Bind a primitive of ``core/device_primitives.py`` over mesh axes."""
    return bind(primitive, data, tuple(axes), tuple(map(view.mesh_size, axes)))


def _cast_typed(view, data, axes):
    if not axes or view.untyped:
        return data
    missing = without(axes, _jax.varying_axes(data))
    if not missing:
        return data
    return lax.pcast(data, missing, to="varying")


def cast_to(view: DeviceView, value: NamedValue, names: Iterable[AxisName]) -> NamedValue:
    """Cast a value to vary over more names, without adding local dimensions yet."""
    names = view.bound(names)
    together = value.names | names
    if not view.mesh_sizes:
        if together == value.names:
            return value
        return NamedValue(value.data, value.dims, together)
    casts = view.casts.setdefault(value, {})
    trace = _jax.current_trace()
    if names in casts:
        traced, known = casts[names]
        if traced == trace:
            return known
    axes = view.mesh_axes_of(names)
    if view.nested:
        axes = without(axes, view.mesh_axes_of(value.names))
    varied = NamedValue(cast_data(view, value.data, axes), value.dims, together)
    casts[names] = (trace, varied)
    return varied


def cast_alike(view: DeviceView, values: Sequence[NamedValue]) -> Sequence[NamedValue]:
    """Cast the operands of one primitive to vary over the same mesh axes, also those that names do
    not show: a primitive refuses operands of different types.
    """
    if not (view.in_users_shard_map or view.gathers_vary):
        return values
    types = [_jax.varying_axes(value.data) for value in values]
    shown = view.mesh_axes_of(union_of_names(values))
    hidden = sorted(frozenset().union(*types).difference(shown), key=str)
    return [value.with_data(_cast_typed(view, value.data, hidden)) for value in values]


def times_elements(
    view: DeviceView, data: Any, names: Iterable[AxisName], over: Iterable[AxisName]
) -> Any:
    """Data that varies over ``names``, summed over the axes ``over``, along which it is equal:
    multiplied by their number of elements.

    An axis along which it is made from a cotangent that exists once is not counted: its elements
    have parts, which add up to the data.
    """
    over = tuple(over)
    summed = once.in_parts(frozenset(names), over)
    repeats = view.total_size(without(over, summed))
    if repeats == 1:
        return data
    return data * np.asarray(repeats).astype(data.dtype)


def equal_parts(view: DeviceView, value: NamedValue, axes: Iterable[AxisName]) -> NamedValue:
    """A value that exists once along some of the axes, divided by their number of elements: each
    element has an equal part.
    """
    divided = once.in_parts(value.names, axes)
    if not divided or not is_smooth(value.data):
        return value
    parts = np.asarray(max(view.total_size(divided), 1)).astype(value.data.dtype)
    names = once.after_collective(value.names, divided, value.names)
    return NamedValue(value.data / parts, value.dims, names)


def sum_devices(view: DeviceView, data: Any, mesh_axes: Sequence[Any]) -> Any:
    """Sum over mesh axes (and axes bound outside); the result is equal on all of those devices."""
    mesh, outer = _mesh_and_outer(view, mesh_axes)
    if mesh and view.nested:
        data = bind_over(view, sum_p, data, mesh)
    elif mesh:
        data = lax.psum(data, mesh)
    if outer:
        data = lax.psum(data, outer)
    return data


def _mesh_and_outer(view, axes):
    """Axes as ``mesh_axes_of`` gives them: those of the mesh, and those bound outside."""
    mesh = view.in_order(axes)
    outer = tuple(axes[len(mesh) :])
    assert (*mesh, *outer) == tuple(axes), "axes bound outside come last"
    return mesh, outer


def gather_devices(
    view: DeviceView, data: Any, mesh_axes: Sequence[Any], to: str = "invarying"
) -> Any:
    """Gather along the first dimension, over mesh axes (and axes bound outside); ``to`` is as in
    ``all_gather``.
    """
    if _jax.is_key(data):
        # JAX (0.12) cannot lower gathers of typed PRNG keys: their raw data is sent instead.
        words = gather_devices(view, jax.random.key_data(data), mesh_axes, to)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(data))
    mesh, outer = _mesh_and_outer(view, mesh_axes)
    length, *tail = data.shape
    if outer:
        data = lax.all_gather(data, outer, tiled=True)
    if mesh and view.nested:
        data = bind_over(view, gather_p, data, mesh)
    elif mesh:
        data = _jax.gather(data, mesh, to)
    devices = math.prod(map(view.mesh_size, mesh_axes))
    return lax.reshape(data, (devices * length, *tail))


def gather_over(
    view: DeviceView, value: NamedValue, names: AxisNames, to: str = "invarying"
) -> NamedValue:
    """``lax.all_gather`` into a new first positional dimension: one gather for all mesh axes.

    For example, of an axis of 24 elements on 4 devices each has ``f32[6, 3]`` with the dimensions
    ``('i', None)``; the result is ``f32[24, 3]`` on all of them.
    """
    names = list(names)
    present = view.present(value, names)
    mesh, local = view.factors_by_kind(present)
    data = leading(value, names_of(local))
    tail = data.shape[len(local) :]
    data = lax.reshape(data, (math.prod(sizes_of(local)), *tail))
    if mesh:
        data = gather_devices(view, data, names_of(mesh), to)
    found = [*mesh, *local]
    wanted = view.factors(present)
    if found != wanted:
        data = lax.reshape(data, (*sizes_of(found), *tail))
        data = moved_to_front(data, list(map(found.index, wanted)))
    sizes = [view.placement_of(name).size for name in names]
    if len(present) < len(names):
        found_sizes = [size if name in present else 1 for name, size in zip(names, sizes)]
        data = lax.reshape(data, (*found_sizes, *tail))
        data = jnp.broadcast_to(data, (*sizes, *tail))
    data = lax.reshape(data, (math.prod(sizes), *tail))
    dims = (None, *without(value.dims, names))
    return NamedValue(data, dims, value.names.difference(names))


def without_single(
    view: DeviceView, data: Any, dims: Dims, names: frozenset[AxisName]
) -> NamedValue:
    """A value from data with a dimension for each axis; those of axes without a local dimension
    have one element and are squeezed.
    """
    single = []
    kept: list[AxisName | None] = []
    for k, name in enumerate(dims):
        if name is None or view.has_local_dim(name):
            kept.append(name)
        else:
            single.append(k)
    if single:
        data = lax.squeeze(data, single)
    return NamedValue(data, tuple(kept), names)


def laid_out(
    view: DeviceView, value: NamedValue, dims: Dims, names: frozenset[AxisName]
) -> NamedValue:
    """Broadcast and transpose a value to a layout that has at least its names."""
    value = cast_to(view, value, names)
    missing = [name for name in dims if name not in (None, *value.dims)]
    if missing:
        data = lax.broadcast(value.data, view.local_sizes(missing))
        value = NamedValue(data, (*missing, *value.dims), value.names)
    if value.dims != dims:
        value = transposed(value, dims)
    return value


def as_operand(view: DeviceView, value: NamedValue, axes: Iterable[AxisName]) -> NamedValue:
    """The operand of a collective over axes: an undeclared result that differs between devices
    varies over them.
    """
    names = operand_names(value.names, axes, view.placements)
    if names == value.names:
        return value
    kept = dataclasses.replace(value, names=value.names & names)
    return laid_out_over(view, kept, names)


def laid_out_over(view: DeviceView, value: NamedValue, names: frozenset[AxisName]) -> NamedValue:
    """Broadcast a value to names, in the canonical layout: local dimensions first, in the order of
    the xmap's axes.
    """
    positional = (None,) * value.dims.count(None)
    return laid_out(view, value, (*view.local_names(names), *positional), names)
