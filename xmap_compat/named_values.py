"""Values of a named program while it is evaluated on one device.

A ``NamedValue`` is an array some of whose dimensions have names.  The part of a named axis that
is left for one device is such a dimension; an axis that fills its mesh axes (or has one element)
leaves none.  Inside a typed ``shard_map`` the array also carries, in its JAX type, the mesh
axes over which it differs between devices: exactly the mesh axes of its names.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import _jax, devices
from xmap_compat.axis_specs import AxisName
from xmap_compat.resources import Placement

Dims = tuple[AxisName | None, ...]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["dims", "names"])
@dataclasses.dataclass(frozen=True)
class NamedValue:
    """An array with names on some of its dimensions.

    Attributes:
      data: the array on this device.
      dims: for each dimension of ``data`` the axis that it is the local part of, or None where it
        is positional.  The positional dimensions keep their order.
      names: every axis that the value varies over, also those without a local dimension.
    """

    data: Any
    dims: Dims
    names: frozenset[AxisName]

    def cast(self, names: frozenset[AxisName]) -> NamedValue | None:
        """What ``vary_over`` made of this value for these names in the trace that is running, if it did."""
        trace, varied = self.__dict__.get("_casts", {}).get(names, (None, None))
        return varied if trace is _jax.current_trace() else None

    def remember_cast(self, names: frozenset[AxisName], varied: NamedValue) -> None:
        """Several uses share one cast: in a gradient their cotangents are added on each device, and summed once."""
        self.__dict__.setdefault("_casts", {})[names] = (_jax.current_trace(), varied)

    def positional_dims(self) -> list[int]:
        """The dimensions of ``data`` that are positional, in order."""
        return [k for k, name in enumerate(self.dims) if name is None]

    def dims_of(self, names: Iterable[AxisName]) -> list[int]:
        """The dimensions of ``data`` that belong to these names."""
        wanted = set(names)
        return [k for k, name in enumerate(self.dims) if name is not None and name in wanted]


def positional(data: Any) -> NamedValue:
    """A value without named axes."""
    return NamedValue(data, (None,) * jnp.ndim(data), frozenset())


def is_float0(value: NamedValue) -> bool:
    return getattr(value.data, "dtype", None) == _jax.float0


def is_inexact(value):
    return jnp.issubdtype(jax.typeof(value.data).dtype, jnp.inexact)


def split(values: Sequence[NamedValue], *lengths: int) -> list[list[NamedValue]]:
    """Cut a list into pieces of the given lengths and a rest."""
    pieces, start = [], 0
    for length in lengths:
        pieces.append(list(values[start : start + length]))
        start += length
    return [*pieces, list(values[start:])]


class _Cotangent:
    """The mark of what a custom backward rule makes from its cotangents: an axis of one element (see ``COTANGENT``)."""

    def __str__(self) -> str:
        return "cotangent"


COTANGENT = _Cotangent()
"""In ``names`` of values that a custom backward rule computes from cotangents.

The cotangent of a value that does not vary over an axis arrives summed over it.  A rule is written for
one element of the axis, where it would not: its ``psum`` is what sums.  It must not count the elements again.
"""


class Part(NamedTuple):
    """One piece of a split axis: a mesh axis, or a local dimension.  The kind tells equal names apart."""

    kind: str
    name: Any
    size: int


@dataclasses.dataclass(frozen=True)
class Locality:
    """What evaluation on one device needs to know.

    Attributes:
      placements: every axis of this xmap.
      mesh_axes: the mesh axes that are mapped over devices here, in the order of the mesh; empty
        without a ``shard_map``.
      mesh_sizes: their sizes.
      nested: whether this is the body of another xmap, whose named axes ``mesh_axes`` are.
      foreign: whether values may vary over mesh axes that are not ours: those of the user's own ``shard_map``
        around the xmap, or of ``vmap(spmd_axis_name=...)``.  Names do not tell of these.
    """

    placements: Mapping[AxisName, Placement]
    mesh_axes: tuple[Any, ...] = ()
    mesh_sizes: Mapping[Any, int] = dataclasses.field(default_factory=dict)
    nested: bool = False
    foreign: bool = False

    @property
    def typed(self) -> bool:
        """Whether values carry varying mesh axes in their type (we are inside our ``shard_map``)."""
        return bool(self.mesh_axes) and not self.nested

    def place(self, name: AxisName) -> Placement:
        """The placement of an axis; one bound outside of this xmap acts as a mesh axis filled by it."""
        known = self.placements.get(name)
        if known is not None:
            return known
        size = lax.axis_size(name)
        return Placement(name, size, (name,), (size,))

    def is_own(self, name: AxisName) -> bool:
        return name in self.placements

    def own(self, names: Iterable[AxisName]) -> frozenset[AxisName]:
        """The names that are axes of this xmap."""
        return frozenset(n for n in names if self.is_own(n))

    def has_local_dim(self, name: AxisName) -> bool:
        return self.is_own(name) and self.placements[name].local_size != 1

    def local_names(self, names: Iterable[AxisName]) -> list[AxisName]:
        """The names that have a local dimension, in the order of the xmap's axes."""
        names = set(names)
        return [n for n in self.placements if n in names and self.has_local_dim(n)]

    def mesh_axes_of(self, names: Iterable[AxisName]) -> tuple[Any, ...]:
        """All mesh axes (and axes bound outside) of these names, in the order of the mesh."""
        names = list(names)
        used = {m for n in names for m in self.place(n).mesh_axes}
        own = tuple(m for m in self.mesh_axes if m in used)
        outer = tuple(n for n in names if not self.is_own(n))
        return (*own, *outer)

    def mesh_size(self, axis: Any) -> int:
        return self.mesh_sizes[axis] if axis in self.mesh_sizes else lax.axis_size(axis)

    def present(self, value: NamedValue, names: Iterable[AxisName]) -> list[AxisName]:
        """The names that the value varies over; of axes bound outside nobody knows, so they count."""
        return [n for n in names if n in value.names or not self.is_own(n)]

    def total_size(self, names: Iterable[AxisName]) -> int:
        """The global number of elements along all the names together."""
        return math.prod(self.place(n).size for n in names)

    def parts(self, names: Iterable[AxisName]) -> list[Part]:
        """What axes are cut into, major first: for each its mesh axes, then its own local dimension."""
        cut: list[Part] = []
        for name in names:
            cut.extend(Part("mesh", m, self.mesh_size(m)) for m in self.place(name).mesh_axes)
            if self.has_local_dim(name):
                cut.append(Part("local", name, self.placements[name].local_size))
        return cut

    def parts_by_kind(self, names: Iterable[AxisName]) -> tuple[list[Part], list[Part]]:
        """The same parts as arrays on a device have them: mesh axes in the order of the mesh; local dimensions."""
        names = list(names)
        mesh = [Part("mesh", m, self.mesh_size(m)) for m in self.mesh_axes_of(names)]
        return mesh, [Part("local", n, self.placements[n].local_size) for n in self.local_names(names)]

    def layout(self, names: Iterable[AxisName], ndim: int) -> Dims:
        """The canonical layout: local dimensions first, in the order of the xmap's axes."""
        return (*self.local_names(names), *(None,) * ndim)


# ------------------------------------------------------------------- casting, moving


def spread(loc: Locality, data: Any, mesh_axes: Iterable[Any]) -> Any:
    """Mark data that is equal on all devices as differing over mesh axes of this xmap."""
    wanted = set(mesh_axes)
    axes = tuple(m for m in loc.mesh_axes if m in wanted)
    if loc.nested:
        return devices.bind(devices.vary_p, data, axes, tuple(map(loc.mesh_size, axes)))
    return _vary_typed(data, axes)


def _vary_typed(data, axes):
    if not axes:
        return data
    present = _jax.varying_axes(data)
    missing = tuple(m for m in axes if m not in present)
    return lax.pcast(data, missing, to="varying") if missing else data


def vary_over(loc: Locality, value: NamedValue, names: Iterable[AxisName]) -> NamedValue:
    """Mark a value as varying over more names, without adding local dimensions yet."""
    names = loc.own(names)
    if not loc.mesh_axes:
        return value if names <= value.names else NamedValue(value.data, value.dims, value.names | names)
    known = value.cast(names)
    if known is not None:
        return known
    axes = loc.mesh_axes_of(names)
    if loc.nested:
        have = loc.mesh_axes_of(value.names)
        axes = tuple(m for m in axes if m not in have)
    varied = NamedValue(spread(loc, value.data, axes), value.dims, value.names | names)
    value.remember_cast(names, varied)
    return varied


def vary_alike(loc: Locality, values: Sequence[NamedValue]) -> Sequence[NamedValue]:
    """Let operands that meet vary over the same foreign mesh axes: primitives ask for that, and add no casts."""
    if not loc.foreign:
        return values
    together = frozenset().union(*(_jax.varying_axes(v.data) for v in values))
    axes = tuple(sorted(together - set(loc.mesh_axes), key=str))
    return [NamedValue(_vary_typed(v.data, axes), v.dims, v.names) for v in values]


def sum_devices(loc: Locality, data: Any, mesh_axes: Sequence[Any]) -> Any:
    """Sum over mesh axes (and axes bound outside); the result is equal on all of those devices."""
    own = tuple(m for m in mesh_axes if m in loc.mesh_axes)
    outer = tuple(m for m in mesh_axes if m not in loc.mesh_axes)
    if own:
        bound = devices.bind(devices.sum_p, data, own, tuple(map(loc.mesh_size, own))) if loc.nested else None
        data = lax.psum(data, own) if bound is None else bound
    return lax.psum(data, outer) if outer else data


def gather_devices(loc: Locality, data: Any, mesh_axes: Sequence[Any]) -> Any:
    """Gather into new leading dimensions, one for each mesh axis (or axis bound outside) in the order given."""
    if _jax.is_key(data):
        # Gathering typed PRNG keys does not lower (jax 0.12): their raw data travels.
        impl = jax.random.key_impl(data)
        return jax.random.wrap_key_data(_gather_with_tail(loc, jax.random.key_data(data), mesh_axes), impl=impl)
    return _gather_with_tail(loc, data, mesh_axes)


def _gather_with_tail(loc, data, mesh_axes):
    own = tuple(m for m in mesh_axes if m in loc.mesh_axes)
    outer = tuple(m for m in mesh_axes if m not in loc.mesh_axes)
    assert (*own, *outer) == tuple(mesh_axes), "mesh_axes_of puts own mesh axes first"
    shape = data.shape
    if outer:
        data = lax.all_gather(data, outer)
    if own and loc.nested:
        data = devices.bind(devices.gather_p, data, own, tuple(map(loc.mesh_size, own)))
    elif own:
        data = _jax.all_gather_invariant(data, own)
    return lax.reshape(data, (*map(loc.mesh_size, mesh_axes), *shape))


def conform(loc: Locality, value: NamedValue, dims: Dims, names: frozenset[AxisName]) -> NamedValue:
    """Broadcast and transpose a value to a layout that has at least its names."""
    value = vary_over(loc, value, names)
    missing = [n for n in dims if n is not None and n not in value.dims]
    if missing:
        value = _add_local_dims(loc, value, missing)
    if value.dims != dims:
        value = _transpose(value, dims)
    return value


def conform_to_names(loc: Locality, value: NamedValue, names: frozenset[AxisName]) -> NamedValue:
    """Broadcast a value to names, in the canonical layout."""
    return conform(loc, value, loc.layout(names, value.dims.count(None)), names)


def _add_local_dims(loc, value, names):
    sizes = tuple(loc.placements[n].local_size for n in names)
    data = lax.broadcast(value.data, sizes)
    return NamedValue(data, (*names, *value.dims), value.names)


def _transpose(value, dims):
    named = {name: k for k, name in enumerate(value.dims) if name is not None}
    unnamed = iter(value.positional_dims())
    order = [next(unnamed) if name is None else named[name] for name in dims]
    return NamedValue(lax.transpose(value.data, order), dims, value.names)


def leading(value: NamedValue, names: Sequence[AxisName]) -> Any:
    """The data with the local dimensions of ``names`` first, in that order."""
    front = [value.dims.index(n) for n in names]
    rest = [k for k in range(len(value.dims)) if k not in front]
    return value.data if front == list(range(len(front))) else lax.transpose(value.data, (*front, *rest))


def without(dims: Dims, names: Iterable[AxisName]) -> Dims:
    dropped = set(names)
    return tuple(n for n in dims if n is None or n not in dropped)


def move_positional(value: NamedValue, source: int, destination: int) -> NamedValue:
    """Move a positional dimension to another place among the positional dimensions."""
    unnamed = value.positional_dims()
    order = unnamed.copy()
    order.insert(destination, order.pop(source))
    unnamed_iter = iter(order)
    permutation = [k if name is not None else next(unnamed_iter) for k, name in enumerate(value.dims)]
    if permutation == list(range(len(permutation))):
        return value
    return NamedValue(lax.transpose(value.data, permutation), value.dims, value.names)


def merge_positional(value: NamedValue, position: int) -> NamedValue:
    """Merge positional dimensions ``position`` and ``position + 1`` into one."""
    first, second = value.positional_dims()[position : position + 2]
    order = [k for k in range(len(value.dims)) if k != first]
    order.insert(order.index(second), first)
    data = lax.transpose(value.data, order) if order != sorted(order) else value.data
    dims = tuple(value.dims[k] for k in order)
    at = order.index(first)
    shape = (*data.shape[:at], data.shape[at] * data.shape[at + 1], *data.shape[at + 2 :])
    return NamedValue(lax.reshape(data, shape), (*dims[:at], *dims[at + 1 :]), value.names)


def squeeze_positional(value: NamedValue, position: int) -> NamedValue:
    """Drop a positional dimension of one element."""
    at = value.positional_dims()[position]
    return NamedValue(lax.squeeze(value.data, (at,)), (*value.dims[:at], *value.dims[at + 1 :]), value.names)


def device_index(loc: Locality, mesh_axes: Iterable[Any]) -> Any:
    """The row-major index of this device over mesh axes in the order given, as int32."""
    index = jnp.int32(0)
    for axis in mesh_axes:
        index = index * np.int32(loc.mesh_size(axis)) + lax.axis_index(axis)
    return index


# --------------------------------------------------------------- evaluating primitives


def bind_named(
    loc: Locality, primitive: Any, operands: Sequence[NamedValue], params: Mapping[str, Any]
) -> list[NamedValue]:
    """Bind a primitive that knows nothing of names: every result varies over the union of the operands' names."""
    names = frozenset().union(*(v.names for v in operands))
    levels = loc.local_names(names)
    operands = vary_alike(loc, operands)
    data = [vary_over(loc, v, names).data for v in operands]
    if not levels:
        outs = _jax.bind(primitive, data, params)
        return [_typed_result(loc, x, (None,) * jnp.ndim(x), names) for x in outs]
    positions = _level_positions(operands, levels)
    sizes = [loc.placements[n].local_size for n in levels]
    outs, added = _jax.bind_batched(primitive, data, params, sizes, positions)
    return [_batched_result(loc, x, levels, [level[k] for level in added], names) for k, x in enumerate(outs)]


def bind_over_names(
    loc: Locality, eqn: Any, operands: Sequence[NamedValue], over: frozenset[AxisName], results: Sequence[frozenset]
) -> list[NamedValue]:
    """Bind a primitive that names axes of which every device has all elements, by its batching rule.

    Args:
      over: the axes that it names.
      results: what each result varies over.
    """
    names = frozenset().union(*(v.names for v in operands))
    levels = [n for n in loc.placements if n in over or (n in names and loc.has_local_dim(n))]
    sizes = [loc.placements[n].local_size for n in levels]
    data = [vary_over(loc, v, names).data for v in vary_alike(loc, operands)]
    bound = [n if n in over else None for n in levels]
    outs, added = _jax.bind_batched(eqn.primitive, data, eqn.params, sizes, _level_positions(operands, levels), bound)
    values = []
    for k, (x, kept) in enumerate(zip(outs, results, strict=True)):
        dims = _batched_dims(jnp.ndim(x), levels, [level[k] for level in added])
        single = [d for d, n in enumerate(dims) if n is not None and not loc.has_local_dim(n)]
        x = lax.squeeze(x, single) if single else x
        values.append(_typed_result(loc, x, tuple(n for d, n in enumerate(dims) if d not in single), kept))
    return values


def bind_per_element(
    loc: Locality, primitive: Any, operands: Sequence[NamedValue], params: Mapping[str, Any]
) -> list[NamedValue]:
    """Bind a primitive once for each element of the named axes, in a loop: for those whose batching rule mixes them."""
    names = frozenset().union(*(v.names for v in operands))
    levels = loc.local_names(names)
    if not levels:
        return bind_named(loc, primitive, operands, params)
    sizes = tuple(loc.placements[n].local_size for n in levels)
    data = [conform_to_names(loc, v, names).data for v in operands]
    flat = [lax.reshape(x, (math.prod(sizes), *x.shape[len(sizes) :])) for x in data]
    outs = lax.map(lambda xs: _jax.bind(primitive, xs, params), flat)
    shaped = [lax.reshape(x, (*sizes, *x.shape[1:])) for x in outs]
    return [NamedValue(x, (*levels, *(None,) * (x.ndim - len(sizes))), names) for x in shaped]


def _level_positions(operands, levels):
    """Per level and operand, the mapped dimension after the outer levels removed theirs."""
    remaining = [list(v.dims) for v in operands]
    positions = []
    for name in levels:
        found = [dims.index(name) if name in dims else None for dims in remaining]
        for dims, d in zip(remaining, found):
            if d is not None:
                del dims[d]
        positions.append(found)
    return positions


def _batched_result(loc, data, levels, added, names):
    return _typed_result(loc, data, _batched_dims(jnp.ndim(data), levels, added), names)


def _batched_dims(ndim, levels, added) -> Dims:
    dims: list[AxisName | None] = [None] * (ndim - sum(d is not None for d in added))
    for name, d in reversed(list(zip(levels, added))):
        if d is not None:
            dims.insert(d, name)
    return tuple(dims)


def _typed_result(loc, data, dims, names):
    """Make a result vary over all its names, also where a batching or typing rule found that it need not."""
    value = NamedValue(data, dims, names)
    missing = [n for n in loc.local_names(names) if n not in dims]
    value = vary_over(loc, value, names)
    return _add_local_dims(loc, value, missing) if missing else value


def apply_positional(loc: Locality, fun: Callable[..., Any], *values: NamedValue) -> NamedValue:
    """Apply a function of positional arrays to named values, element by element of their named axes."""
    names = frozenset().union(*(v.names for v in values))
    levels = loc.local_names(names)
    mapped = fun
    for name in reversed(levels):
        outer = levels[: levels.index(name)]
        in_axes = [_index_in(without(v.dims, outer), name) for v in values]
        mapped = jax.vmap(mapped, in_axes=in_axes, out_axes=0, axis_size=loc.placements[name].local_size)
    data = mapped(*(vary_over(loc, v, names).data for v in values))
    dims = (*levels, *(None,) * (jnp.ndim(data) - len(levels)))
    return vary_over(loc, NamedValue(data, dims, names), names)


def _index_in(dims, name):
    return dims.index(name) if name in dims else None


def dot_dimensions(x: NamedValue, y: NamedValue, contract, batch) -> tuple[Any, Dims]:
    """Dimension numbers of a dot of positional dimensions, and the names of its result's dimensions."""
    xp, yp = x.positional_dims(), y.positional_dims()
    shared = [n for n in x.dims if n is not None and n in y.dims]
    x_contract, y_contract = (xp[d] for d in contract[0]), (yp[d] for d in contract[1])
    x_batch = [*(x.dims.index(n) for n in shared), *(xp[d] for d in batch[0])]
    y_batch = [*(y.dims.index(n) for n in shared), *(yp[d] for d in batch[1])]
    numbers = ((tuple(x_contract), tuple(y_contract)), (tuple(x_batch), tuple(y_batch)))
    x_free = [n for k, n in enumerate(x.dims) if k not in numbers[0][0] and k not in x_batch]
    y_free = [n for k, n in enumerate(y.dims) if k not in numbers[0][1] and k not in y_batch]
    return numbers, (*shared, *(None for _ in batch[0]), *x_free, *y_free)


def index_of(loc: Locality, names: Sequence[AxisName]) -> NamedValue:
    """The row-major index of each element over the given axes, as int32."""
    first, *rest = names
    index = _single_index(loc, first)
    for name in rest:
        index = apply_positional(
            loc,
            lambda major, minor, size=loc.place(name).size: major * np.int32(size) + minor,
            index,
            _single_index(loc, name),
        )
    return index


def _single_index(loc, name):
    place = loc.place(name)
    index = jnp.int32(0)
    for mesh_axis, size in zip(place.mesh_axes, place.mesh_sizes):
        index = index * np.int32(size) + lax.axis_index(mesh_axis)
    if not loc.is_own(name):
        return positional(index)
    if not loc.has_local_dim(name):
        return NamedValue(index, (), frozenset({name}))
    local = index * np.int32(place.local_size) + lax.iota(np.int32, place.local_size)
    return NamedValue(local, (name,), frozenset({name}))
