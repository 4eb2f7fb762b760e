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
    is_smooth,
    leading,
    transposed,
    without,
    without_dims,
)

_Casts = weakref.WeakKeyDictionary[NamedValue, dict[frozenset[AxisName], tuple[Any, NamedValue]]]


class Factor(NamedTuple):
    """A factor of the size of a split axis: a mesh axis, or a local dimension.  Two of these may
    have one name.
    """

    is_local: bool
    name: Any
    size: int


@dataclasses.dataclass(frozen=True)
class DeviceView:
    """The axes of one xmap as a device knows them.

    Attributes:
      placements: every axis of this xmap.
      mesh_axes: the mesh axes that are mapped over devices here, in the order of the mesh; empty
        without a ``shard_map``.
      mesh_sizes: their sizes.
      nested: whether this is in the body of another xmap; ``mesh_axes`` are then named axes of that
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
    mesh_axes: tuple[Any, ...] = ()
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
        return bool(self.mesh_axes) and not self.nested

    def placement_of(self, name: AxisName) -> Placement:
        """The placement of an axis; an axis bound outside of this xmap acts as a mesh axis that it
        fills.
        """
        if name in self.placements:
            return self.placements[name]
        size = lax.axis_size(name)
        return Placement(name, size, (name,), (size,))

    def is_bound(self, name: AxisName) -> bool:
        return name in self.placements

    def bound(self, names: Iterable[AxisName]) -> frozenset[AxisName]:
        """The names that this xmap binds."""
        return frozenset(n for n in names if self.is_bound(n))

    def has_local_dim(self, name: AxisName) -> bool:
        return self.is_bound(name) and self.placements[name].local_size != 1

    def local_names(self, names: Iterable[AxisName]) -> list[AxisName]:
        """The names that have a local dimension, in the order of the xmap's axes."""
        names = set(names)
        return [n for n in self.placements if n in names and self.has_local_dim(n)]

    def mesh_axes_of(self, names: Iterable[AxisName]) -> tuple[Any, ...]:
        """All mesh axes (and axes bound outside) of these names, in the order of the mesh."""
        names = list(names)
        used = {m for n in names for m in self.placement_of(n).mesh_axes}
        mesh_axes = tuple(m for m in self.mesh_axes if m in used)
        outer = tuple(n for n in names if not self.is_bound(n))
        return (*mesh_axes, *outer)

    def mesh_size(self, axis: Any) -> int:
        return self.mesh_sizes[axis] if axis in self.mesh_sizes else lax.axis_size(axis)

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
            factors.extend(
                Factor(False, m, self.mesh_size(m)) for m in self.placement_of(name).mesh_axes
            )
            if self.has_local_dim(name):
                factors.append(Factor(True, name, self.placements[name].local_size))
        return factors

    def factors_by_kind(self, names: Iterable[AxisName]) -> tuple[list[Factor], list[Factor]]:
        """The same factors as two lists: mesh axes in the order of the mesh, and local
        dimensions.
        """
        names = list(names)
        mesh = [Factor(False, m, self.mesh_size(m)) for m in self.mesh_axes_of(names)]
        return mesh, [
            Factor(True, n, self.placements[n].local_size) for n in self.local_names(names)
        ]

    def layout(self, names: Iterable[AxisName], ndim: int) -> Dims:
        """The canonical layout: local dimensions first, in the order of the xmap's axes."""
        return (*self.local_names(names), *(None,) * ndim)


def cast_data(view: DeviceView, data: Any, mesh_axes: Iterable[Any]) -> Any:
    """Cast data that is equal on all devices to vary over mesh axes of this xmap."""
    wanted = set(mesh_axes)
    axes = tuple(m for m in view.mesh_axes if m in wanted)
    if view.nested:
        return bind(vary_p, data, axes, tuple(map(view.mesh_size, axes)))
    return _cast_typed(view, data, axes)


def _cast_typed(view, data, axes):
    if not axes or view.untyped:
        return data
    present = _jax.varying_axes(data)
    missing = tuple(m for m in axes if m not in present)
    return lax.pcast(data, missing, to="varying") if missing else data


def cast_to(view: DeviceView, value: NamedValue, names: Iterable[AxisName]) -> NamedValue:
    """Cast a value to vary over more names, without adding local dimensions yet."""
    names = view.bound(names)
    if not view.mesh_axes:
        return (
            value
            if names <= value.names
            else NamedValue(value.data, value.dims, value.names | names)
        )
    trace, known = view.casts.get(value, {}).get(names, (None, None))
    if known is not None and trace == _jax.current_trace():
        return known
    axes = view.mesh_axes_of(names)
    if view.nested:
        have = view.mesh_axes_of(value.names)
        axes = tuple(m for m in axes if m not in have)
    varied = NamedValue(cast_data(view, value.data, axes), value.dims, value.names | names)
    view.casts.setdefault(value, {})[names] = (_jax.current_trace(), varied)
    return varied


def cast_alike(view: DeviceView, values: Sequence[NamedValue]) -> Sequence[NamedValue]:
    """Cast operands of one primitive to the same mesh axes, those that names do not show:
    primitives add no casts.
    """
    if not (view.in_users_shard_map or view.gathers_vary):
        return values
    together = frozenset().union(*(_jax.varying_axes(v.data) for v in values))
    axes = tuple(
        sorted(together.difference(view.mesh_axes_of(n for v in values for n in v.names)), key=str)
    )
    return [NamedValue(_cast_typed(view, v.data, axes), v.dims, v.names) for v in values]


def cast_as(
    view: DeviceView, values: Sequence[NamedValue], axes: Sequence[frozenset[Any]]
) -> list[NamedValue]:
    """Cast values to vary over mesh axes of the user's own ``shard_map``; ``axes`` gives those of
    each value.
    """
    return [
        NamedValue(_cast_typed(view, v.data, tuple(sorted(wanted, key=str))), v.dims, v.names)
        for v, wanted in zip(values, axes)
    ]


def times_elements(
    view: DeviceView, data: Any, names: Iterable[AxisName], over: Iterable[AxisName]
) -> Any:
    """The sum over axes of data that varies over ``names``, and is equal along these axes.

    A cotangent that exists once is the sum of its parts.
    """
    over = list(over)
    summed = once.in_parts(frozenset(names), over)
    repeats = view.total_size(n for n in over if n not in summed)
    return data if repeats == 1 else data * np.asarray(repeats).astype(data.dtype)


def equal_parts(view: DeviceView, value: NamedValue, axes: Iterable[AxisName]) -> NamedValue:
    """What the elements of axes have of a value that exists once: equal parts."""
    divided = once.in_parts(value.names, axes)
    if not divided or not is_smooth(value.data):
        return value
    parts = np.asarray(max(view.total_size(divided), 1)).astype(value.data.dtype)
    names = once.after_collective(value.names, divided, value.names)
    return NamedValue(value.data / parts, value.dims, names)


def sum_devices(view: DeviceView, data: Any, mesh_axes: Sequence[Any]) -> Any:
    """Sum over mesh axes (and axes bound outside); the result is equal on all of those devices."""
    mesh = tuple(m for m in mesh_axes if m in view.mesh_axes)
    outer = tuple(m for m in mesh_axes if m not in view.mesh_axes)
    if mesh and view.nested:
        data = bind(sum_p, data, mesh, tuple(map(view.mesh_size, mesh)))
    elif mesh:
        data = lax.psum(data, mesh)
    return lax.psum(data, outer) if outer else data


def gather_devices(
    view: DeviceView, data: Any, mesh_axes: Sequence[Any], to: str = "invarying"
) -> Any:
    """Gather along the first dimension, over mesh axes (and axes bound outside); ``to`` is as in
    ``all_gather``.
    """
    if _jax.is_key(data):
        # JAX (0.12) cannot lower gathers of typed PRNG keys: their raw data is sent instead.
        impl = jax.random.key_impl(data)
        return jax.random.wrap_key_data(
            gather_devices(view, jax.random.key_data(data), mesh_axes, to), impl=impl
        )
    mesh = tuple(m for m in mesh_axes if m in view.mesh_axes)
    outer = tuple(m for m in mesh_axes if m not in view.mesh_axes)
    assert (*mesh, *outer) == tuple(mesh_axes), "mesh_axes_of puts axes bound outside last"
    shape = data.shape
    if outer:
        data = lax.all_gather(data, outer, tiled=True)
    if mesh and view.nested:
        data = bind(gather_p, data, mesh, tuple(map(view.mesh_size, mesh)))
    elif mesh:
        data = _jax.gather(data, mesh, to)
    return _jax.reshaped(data, (math.prod(map(view.mesh_size, mesh_axes)) * shape[0], *shape[1:]))


def gather_over(
    view: DeviceView, value: NamedValue, names: AxisNames, to: str = "invarying"
) -> NamedValue:
    """``lax.all_gather`` into a new first positional dimension: one gather for all mesh axes."""
    names = list(names)
    present = view.present(value, names)
    mesh, local = view.factors_by_kind(present)
    data = leading(value, [factor.name for factor in local])
    tail = data.shape[len(local) :]
    data = _jax.reshaped(data, (math.prod(factor.size for factor in local), *tail))
    if mesh:
        data = gather_devices(view, data, [factor.name for factor in mesh], to)
    have, want = [*mesh, *local], view.factors(present)
    if have != want:
        order = [*map(have.index, want), *range(len(have), len(have) + len(tail))]
        data = lax.transpose(_jax.reshaped(data, (*(factor.size for factor in have), *tail)), order)
    full = [view.placement_of(n).size for n in names]
    if len(present) < len(names):
        data = _jax.reshaped(
            data, (*(size if n in present else 1 for n, size in zip(names, full)), *tail)
        )
        data = jnp.broadcast_to(data, (*full, *tail))
    data = _jax.reshaped(data, (math.prod(full), *tail))
    return NamedValue(data, (None, *without(value.dims, names)), value.names - frozenset(names))


def without_single(
    view: DeviceView, data: Any, dims: Dims, names: frozenset[AxisName]
) -> NamedValue:
    """A value from data with a dimension for each axis: those that are no local dimensions are
    squeezed.
    """
    single = [k for k, n in enumerate(dims) if n is not None and not view.has_local_dim(n)]
    kept = without_dims(dims, single)
    return NamedValue(lax.squeeze(data, single) if single else data, kept, names)


def laid_out(
    view: DeviceView, value: NamedValue, dims: Dims, names: frozenset[AxisName]
) -> NamedValue:
    """Broadcast and transpose a value to a layout that has at least its names."""
    value = cast_to(view, value, names)
    missing = [n for n in dims if n is not None and n not in value.dims]
    if missing:
        data = lax.broadcast(value.data, tuple(view.placements[n].local_size for n in missing))
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
    return laid_out_over(view, dataclasses.replace(value, names=value.names & names), names)


def laid_out_over(view: DeviceView, value: NamedValue, names: frozenset[AxisName]) -> NamedValue:
    """Broadcast a value to names, in the canonical layout."""
    return laid_out(view, value, view.layout(names, value.dims.count(None)), names)
