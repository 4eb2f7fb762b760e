"""The table of collectives: how each changes named shapes, and what it becomes on devices.

A rule has two halves.  ``names`` maps the named axes of the operand to those of the result; it is
all that the type check needs.  ``translate`` rewrites the collective for one device: the local part
of an axis is a dimension of the array, so its share is ordinary indexing; only what crosses devices
becomes a collective over mesh axes.

Family helpers come first, the rules in the middle, the table last.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import devices, errors
from xmap_compat.axis_specs import AxisName
from xmap_compat.exchange import exchange_rounds
from xmap_compat.named_lax import bind_pdot
from xmap_compat.named_values import (
    Locality,
    NamedValue,
    apply_positional,
    bind_named,
    conform_to_names,
    dot_dimensions,
    gather_devices,
    leading,
    positional,
    spread,
    sum_devices,
    vary_over,
    without,
)

Names = frozenset[AxisName]
Params = Mapping[str, Any]


class Rule(NamedTuple):
    """How one collective primitive is typed and translated.

    Attributes:
      names: ``(operand names, axes of the collective) -> result names``.
      translate: ``(locality, params, *operands) -> result``.
    """

    names: Callable[[Names, Names], Names]
    translate: Callable[..., NamedValue]


# ----------------------------------------------------------------------- parameters


def axis_names(params: Params) -> tuple[AxisName, ...]:
    """The named axes of a collective's parameters, without positional integers."""
    return tuple(a for a in _axes_param(params) if not _is_position(a))


def mentioned_names(params: Params) -> tuple[AxisName, ...]:
    """Named axes of an equation's parameters; empty for anything that is not a collective."""
    return axis_names(params) if "axes" in params or "axis_name" in params else ()


def _axes_param(params):
    axes = params["axes"] if "axes" in params else params["axis_name"]
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def _positions(params):
    return tuple(a for a in _axes_param(params) if _is_position(a))


def _is_position(axis):
    return isinstance(axis, (int, np.integer)) and not isinstance(axis, bool)


# ------------------------------------------------------------------- how names change


def _reduced(operand: Names, axes: Names) -> Names:
    return operand - axes


def _spread(operand: Names, axes: Names) -> Names:
    return operand | axes


# ------------------------------------------------------------------------ reductions


def _present(loc: Locality, value: NamedValue, names: Sequence[AxisName]) -> list[AxisName]:
    """The names that the value varies over; of axes bound outside nobody knows, so they count."""
    return [n for n in names if n in value.names or not loc.is_own(n)]


def _drop(loc: Locality, value: NamedValue, names: Sequence[AxisName], data: Any, positions=()) -> NamedValue:
    gone = {value.positional_dims()[p] for p in positions}
    dims = tuple(n for k, n in enumerate(value.dims) if k not in gone)
    return NamedValue(data, without(dims, names), value.names - frozenset(names))


def _reduction_dims(value, names, positions):
    own = value.positional_dims()
    return sorted([*value.dims_of(names), *(own[p] for p in positions)])


def sum_over(loc: Locality, value: NamedValue, names: Sequence[AxisName], positions: Sequence[int] = ()) -> NamedValue:
    """``lax.psum``: a local sum, then one all-reduce of what is left."""
    present = _present(loc, value, names)
    data = lax.reduce_sum(value.data, _reduction_dims(value, present, positions))
    mesh_axes = loc.mesh_axes_of(present)
    data = sum_devices(loc, data, mesh_axes)
    repeats = math.prod(loc.place(n).size for n in names if n not in present)
    if repeats != 1:
        data = data * np.asarray(repeats).astype(data.dtype)
    return _drop(loc, value, names, data, positions)


def _extremum_over(reduce: Callable, across: Callable):
    def translate(loc, value, names, positions=()):
        present = _present(loc, value, names)
        dims = _reduction_dims(value, present, positions)
        mesh_axes = loc.mesh_axes_of(present)
        local = lambda x: reduce(x, dims)  # noqa: E731
        if not mesh_axes:
            data = local(value.data)
        elif jnp.issubdtype(value.data.dtype, jnp.inexact):
            data = _differentiable_extremum(loc, lambda x: across(local(x), mesh_axes), dims, mesh_axes)(value.data)
        else:
            data = across(local(value.data), mesh_axes)
        return _drop(loc, value, names, data, positions)

    return translate


def _differentiable_extremum(loc: Locality, extremum: Callable, dims: Sequence[int], mesh_axes: tuple[str, ...]):
    """JAX has no derivative for pmax and pmin: ties share it, over devices as within one."""

    @jax.custom_jvp
    def fun(x):
        return extremum(x)

    @fun.defjvp
    def jvp(primals, tangents):
        (x,), (t,) = primals, tangents
        out = fun(x)
        ties = (x == spread(loc, lax.expand_dims(out, dims), mesh_axes)).astype(x.dtype)
        total = lambda v: sum_devices(loc, lax.reduce_sum(v, dims), mesh_axes)  # noqa: E731
        return out, total(t * ties) / total(ties)

    return fun


max_over = _extremum_over(lax.reduce_max, lax.pmax)
min_over = _extremum_over(lax.reduce_min, lax.pmin)


def _reduction_rule(over: Callable, positional_reduce: Callable, identity: Callable[[Any], Any]) -> Rule:
    def translate(loc, params, value):
        if params.get("axis_index_groups") is not None:
            return _reduce_in_groups(loc, params, value, positional_reduce, identity)
        return over(loc, value, axis_names(params), _positions(params))

    return Rule(_reduced, translate)


def _lowest(dtype):
    return -np.inf if jnp.issubdtype(dtype, np.inexact) else jnp.iinfo(dtype).min


def _highest(dtype):
    return np.inf if jnp.issubdtype(dtype, np.inexact) else jnp.iinfo(dtype).max


# ------------------------------------------------------------------- indices and gathers


def _axis_index(loc: Locality, params: Params) -> NamedValue:
    return index_of(loc, axis_names(params))


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


def gather_over(loc: Locality, value: NamedValue, names: Sequence[AxisName]) -> NamedValue:
    """``lax.all_gather`` into a new first positional dimension: one gather for all mesh axes."""
    names = list(names)
    present = _present(loc, value, names)
    local = loc.local_names(present)
    data = leading(value, local)
    rest = without(value.dims, names)
    mesh_axes = loc.mesh_axes_of(present)
    data = gather_devices(loc, data, mesh_axes) if mesh_axes else data
    order = (*mesh_axes, *local)
    data = _order_parts(loc, data, order, [part for n in names for part in _parts(loc, n) if part in order])
    shape = [loc.place(n).size if n in present else 1 for n in names]
    tail = data.shape[len(order) :]
    data = lax.reshape(data, (*shape, *tail))
    full = tuple(loc.place(n).size for n in names)
    if tuple(shape) != full:
        data = jnp.broadcast_to(data, (*full, *tail))
    data = lax.reshape(data, (math.prod(full), *tail))
    return NamedValue(data, (None, *rest), value.names - frozenset(names))


def _parts(loc, name):
    """What an axis is cut into, major first: its mesh axes, then its own local dimension."""
    place = loc.place(name)
    return (*place.mesh_axes, name) if loc.has_local_dim(name) else place.mesh_axes


def _order_parts(loc, data, have, want):
    if list(have) == list(want):
        return data
    front = [list(have).index(part) for part in want]
    return lax.transpose(data, (*front, *range(len(front), data.ndim)))


def _move_positional(value: NamedValue, source: int, destination: int) -> NamedValue:
    """Move a positional dimension to another place among the positional dimensions."""
    unnamed = value.positional_dims()
    order = unnamed.copy()
    order.insert(destination, order.pop(source))
    unnamed_iter = iter(order)
    permutation = [k if name is not None else next(unnamed_iter) for k, name in enumerate(value.dims)]
    if permutation == list(range(len(permutation))):
        return value
    return NamedValue(lax.transpose(value.data, permutation), value.dims, value.names)


def _merge_positional(value: NamedValue, position: int) -> NamedValue:
    """Merge positional dimensions ``position`` and ``position + 1`` into one."""
    first, second = value.positional_dims()[position : position + 2]
    order = [k for k in range(len(value.dims)) if k != first]
    order.insert(order.index(second), first)
    data = lax.transpose(value.data, order) if order != sorted(order) else value.data
    dims = tuple(value.dims[k] for k in order)
    at = order.index(first)
    shape = (*data.shape[:at], data.shape[at] * data.shape[at + 1], *data.shape[at + 2 :])
    return NamedValue(lax.reshape(data, shape), (*dims[:at], *dims[at + 1 :]), value.names)


def _all_gather(loc: Locality, params: Params, value: NamedValue) -> NamedValue:
    at, tiled = params["all_gather_dimension"], params["tiled"]
    if params.get("axis_index_groups") is not None:
        gathered, _ = _group_members(loc, "all_gather", value, params)
    else:
        gathered = gather_over(loc, value, axis_names(params))
    gathered = _move_positional(gathered, 0, at)
    return _merge_positional(gathered, at) if tiled else gathered


# --------------------------------------------------------------- scatters and exchanges


def _split_over(loc: Locality, value: NamedValue, position: int, names: Sequence[AxisName], keep: int):
    """Cut a positional dimension into the parts of the named axes, moved to the front.

    Returns:
      data with leading dimensions (mesh parts in mesh order, local parts), then the value's
      other dimensions; the dims of those others; the local names. With ``keep`` the remainder of
      the dimension (its last ``keep`` elements per part) stays in its place.
    """
    at = value.positional_dims()[position]
    parts = [part for n in names for part in _parts(loc, n)]
    sizes = [loc.placements[p].local_size if loc.is_own(p) and p in names else loc.mesh_size(p) for p in parts]
    data = lax.reshape(value.data, (*value.data.shape[:at], *sizes, keep, *value.data.shape[at + 1 :]))
    mesh_axes = loc.mesh_axes_of(names)
    local = loc.local_names(names)
    front = [at + parts.index(p) for p in (*mesh_axes, *local)]
    rest = [k for k in range(data.ndim) if k not in front]
    return lax.transpose(data, (*front, *rest)), value.dims, mesh_axes, local


def _reduce_scatter(loc: Locality, params: Params, value: NamedValue) -> NamedValue:
    names, at, tiled = axis_names(params), params["scatter_dimension"], params["tiled"]
    if params.get("axis_index_groups") is not None:
        return _grouped_reduce_scatter(loc, params, value)
    value = conform_to_names(loc, value, value.names | _own(loc, names))
    summed = _drop_local_by_sum(loc, value, names)
    size = summed.data.shape[summed.positional_dims()[at]]
    total = math.prod(loc.place(n).size for n in names)
    data, dims, mesh_axes, local = _split_over(loc, summed, at, names, size // total)
    if mesh_axes:
        count = math.prod(map(loc.mesh_size, mesh_axes))
        data = lax.reshape(data, (count, *data.shape[len(mesh_axes) :]))
        data = lax.psum_scatter(data, mesh_axes, scatter_dimension=0, tiled=False)
    result = NamedValue(data, (*local, *dims), value.names)
    return result if tiled else _squeeze_positional(result, at)


def _own(loc, names):
    return frozenset(n for n in names if loc.is_own(n))


def _drop_local_by_sum(loc, value, names):
    data = lax.reduce_sum(value.data, value.dims_of(names))
    return NamedValue(data, without(value.dims, names), value.names)


def _squeeze_positional(value, position):
    at = value.positional_dims()[position]
    return NamedValue(lax.squeeze(value.data, (at,)), (*value.dims[:at], *value.dims[at + 1 :]), value.names)


def _all_to_all(loc: Locality, params: Params, value: NamedValue) -> NamedValue:
    """The primitive is always tiled: ``lax.all_to_all`` itself adds and removes dimensions of one element."""
    if params.get("axis_index_groups") is not None:
        return _grouped_all_to_all(loc, params, value)
    names = axis_names(params)
    split, concat = params["split_axis"], params["concat_axis"]
    if not _present(loc, value, names):
        return _own_chunk(loc, value, names, split, concat)
    value = conform_to_names(loc, value, value.names | _own(loc, names))
    total = math.prod(loc.place(n).size for n in names)
    size = value.data.shape[value.positional_dims()[split]]
    data, dims, mesh_axes, local = _split_over(loc, value, split, names, size // total)
    if mesh_axes:
        data = _exchange_leading(loc, data, mesh_axes)
    received = _join_sources(loc, data, dims, mesh_axes, local, names, value.names)
    return _merge_positional(_move_positional(received, 0, concat), concat)


def _own_chunk(loc, value, names, split, concat):
    """all_to_all of a value that is the same everywhere: everyone takes its chunk, and as many copies as sources."""
    total = math.prod(loc.place(n).size for n in names)
    size = value.data.shape[value.positional_dims()[split]]
    value = vary_over(loc, value, names)
    data, dims, mesh_axes, local = _split_over(loc, value, split, names, size // total)
    if mesh_axes:
        data = lax.reshape(data, (math.prod(map(loc.mesh_size, mesh_axes)), *data.shape[len(mesh_axes) :]))
        data = lax.dynamic_index_in_dim(data, _device_index(loc, mesh_axes), 0, keepdims=False)
    copies = NamedValue(lax.broadcast(data, (total,)), (None, *local, *dims), value.names)
    return _merge_positional(_move_positional(copies, 0, concat), concat)


def _exchange_leading(loc, data, mesh_axes):
    """Trade leading chunks between devices: chunk d goes to device d, chunk s comes from device s."""
    sizes = tuple(map(loc.mesh_size, mesh_axes))
    data = lax.reshape(data, (math.prod(sizes), *data.shape[len(sizes) :]))
    data = lax.all_to_all(data, mesh_axes, split_axis=0, concat_axis=0, tiled=True)
    return lax.reshape(data, (*sizes, *data.shape[1:]))


def _join_sources(loc, data, dims, mesh_axes, local, names, all_names):
    """After an exchange: leading mesh parts and old local dimensions are the source, leading local parts the new owner.

    Returns a value whose first positional dimension is the source's index.
    """
    dims = (*mesh_axes, *local, *dims)
    lead = len(mesh_axes) + len(local)
    at_mesh = {m: k for k, m in enumerate(mesh_axes)}
    at_old = {n: lead + dims[lead:].index(n) for n in local}
    source = [at_old[p] if p in at_old else at_mesh[p] for n in names for p in _parts(loc, n)]
    owner = list(range(len(mesh_axes), lead))
    rest = [k for k in range(lead, len(dims)) if k not in at_old.values()]
    data = lax.transpose(data, (*source, *owner, *rest))
    data = lax.reshape(data, (math.prod(data.shape[: len(source)]), *data.shape[len(source) :]))
    return NamedValue(data, (None, *local, *(dims[k] for k in rest)), all_names)


def _ppermute(loc: Locality, params: Params, value: NamedValue) -> NamedValue:
    """Move elements between positions of an axis; what no one sends to is zero."""
    names = axis_names(params)
    value = conform_to_names(loc, value, value.names | _own(loc, names))
    local = loc.local_names(names)
    mesh_axes = loc.mesh_axes_of(names)
    data = leading(value, local)
    rest = without(value.dims, local)
    slots = math.prod(loc.placements[n].local_size for n in local)
    data = lax.reshape(data, (slots, *data.shape[len(local) :]))
    device_of, slot_of = _coordinates(loc, names, mesh_axes, local)
    moves = [(device_of[s], slot_of[s], device_of[d], slot_of[d]) for s, d in params["perm"]]
    data = _permute_slots(loc, data, moves, mesh_axes)
    data = lax.reshape(data, (*(loc.placements[n].local_size for n in local), *data.shape[1:]))
    return NamedValue(data, (*local, *rest), value.names)


def _coordinates(loc, names, mesh_axes, local):
    """For each index over ``names``: its linear device (over mesh_axes) and linear slot (over local)."""
    parts = [p for n in names for p in _parts(loc, n)]
    is_local = [p in local for p in parts]
    sizes = [loc.placements[p].local_size if here else loc.mesh_size(p) for p, here in zip(parts, is_local)]
    grid = np.indices(sizes).reshape(len(sizes), -1)
    return _linear(grid, parts, sizes, mesh_axes), _linear(grid, parts, sizes, local)


def _linear(grid, parts, sizes, wanted):
    index = np.zeros(grid.shape[1], int)
    for part in wanted:
        k = parts.index(part)
        index = index * sizes[k] + grid[k]
    return index.tolist()


def _permute_slots(loc, data, moves, mesh_axes):
    """Carry out moves ``(source device, source slot, destination device, destination slot)``.

    Only slabs that change device travel, in as few collectives as ``exchange_rounds`` finds; the rest
    is local indexing with tables that depend on the device.
    """
    devices = math.prod(map(loc.mesh_size, mesh_axes))
    slots = data.shape[0]
    if devices > 1 and slots == 1:
        return lax.ppermute(data, mesh_axes, [(s, d) for s, _, d, _ in moves])
    buffers, nothing = [data], slots
    taken = np.full((devices, slots), -1)
    for source, slot, destination, target in moves:
        if source == destination:
            taken[destination, target] = slot
    for batch in exchange_rounds([m for m in moves if m[0] != m[2]]):
        width = len(next(iter(batch.values())))
        send = np.zeros((devices, width), int)
        for (source, destination), pairs in batch.items():
            send[source] = [slot for slot, _ in pairs]
            taken[destination, [target for _, target in pairs]] = nothing + np.arange(width)
        outgoing = _take_slots(loc, data, send, mesh_axes)
        buffers.append(lax.ppermute(outgoing, mesh_axes, list(batch)))
        nothing += width
    if (taken < 0).any():
        buffers.append(jnp.zeros_like(data[:1]))
        taken[taken < 0] = nothing
    pool = lax.concatenate(buffers, 0) if len(buffers) > 1 else data
    return _take_slots(loc, pool, taken, mesh_axes)


def _take_slots(loc, data, table, mesh_axes):
    """Rows of ``data`` that a table ``[device, row]`` names for this device."""
    if (table == table[:1]).all():
        return _take_static(data, table[0])
    rows = jnp.asarray(table)[_device_index(loc, mesh_axes)]
    return jnp.take(data, rows, axis=0, mode="clip")


def _take_static(data, rows):
    if len(rows) == data.shape[0] and (rows == np.arange(len(rows))).all():
        return data
    runs = np.split(rows, np.nonzero(np.diff(rows) != 1)[0] + 1)
    if len(runs) <= 4:
        pieces = [lax.slice_in_dim(data, int(run[0]), int(run[-1]) + 1) for run in runs]
        return lax.concatenate(pieces, 0) if len(pieces) > 1 else pieces[0]
    if (np.diff(rows) == -1).all() and len(rows) == data.shape[0]:
        return lax.rev(data, (0,))
    return jnp.take(data, rows, axis=0, mode="clip")


def _device_index(loc, mesh_axes):
    index = jnp.int32(0)
    for axis in mesh_axes:
        index = index * np.int32(loc.mesh_size(axis)) + lax.axis_index(axis)
    return index


def _pbroadcast(loc: Locality, params: Params, value: NamedValue) -> NamedValue:
    """``lax.pbroadcast``: every element takes the value of the one at index ``source``."""
    (name,) = axis_names(params)
    if name not in value.names and loc.is_own(name):
        return value
    here = index_of(loc, (name,))
    is_bool = value.data.dtype == np.bool_

    def mask(x, i):
        kept = jnp.where(i == params["source"], x, jnp.zeros_like(x))
        return kept.astype(np.int8) if is_bool else kept

    source = sum_over(loc, apply_positional(loc, mask, value, here), (name,))
    return dataclasses.replace(source, data=source.data.astype(np.bool_)) if is_bool else source


# ----------------------------------------------------------------- axis_index_groups


def _group_members(loc: Locality, primitive: str, value: NamedValue, params: Params):
    """The elements of each element's group in a new first positional dimension, and its place in the group."""
    names, groups = axis_names(params), params["axis_index_groups"]
    if len(names) != 1 or len({len(g) for g in groups}) != 1:
        raise errors.unsupported_groups(primitive, "the call")
    table = np.zeros((loc.place(names[0]).size, len(groups[0])), np.int32)
    ranks = np.zeros(len(table), np.int32)
    for group in groups:
        for rank, member in enumerate(group):
            table[member] = group
            ranks[member] = rank
    everything = gather_over(loc, value, names)
    here = index_of(loc, names)
    members = apply_positional(loc, lambda g, i: g[jnp.asarray(table)[i]], everything, here)
    return members, apply_positional(loc, lambda i: jnp.asarray(ranks)[i], here)


def _reduce_in_groups(loc, params, value, reduce, identity):
    """A reduction within groups, which may differ in size: of everything gathered, the members of one's group."""
    names, groups = axis_names(params), params["axis_index_groups"]
    if len(names) != 1:
        raise errors.unsupported_groups("reduction", "the call")
    size = loc.place(names[0]).size
    together = np.zeros((size, size), bool)
    for group in groups:
        together[np.ix_(group, group)] = True

    def reduce_members(everything, index):
        members = jnp.asarray(together)[index].reshape(size, *(1,) * (everything.ndim - 1))
        return reduce(jnp.where(members, everything, np.asarray(identity(everything.dtype), everything.dtype)), (0,))

    return apply_positional(loc, reduce_members, gather_over(loc, value, names), index_of(loc, names))


def _grouped_reduce_scatter(loc, params, value):
    members, rank = _group_members(loc, "psum_scatter", value, params)
    at, tiled = params["scatter_dimension"], params["tiled"]
    count = len(params["axis_index_groups"][0])

    def scatter(group, r):
        summed = lax.reduce_sum(group, (0,))
        chunk = lax.dynamic_slice_in_dim(summed, r * (summed.shape[at] // count), summed.shape[at] // count, at)
        return chunk if tiled else lax.squeeze(chunk, (at,))

    return apply_positional(loc, scatter, members, rank)


def _grouped_all_to_all(loc, params, value):
    members, rank = _group_members(loc, "all_to_all", value, params)
    split, concat = params["split_axis"], params["concat_axis"]
    count = len(params["axis_index_groups"][0])

    def trade(group, r):
        width = group.shape[1 + split] // count
        chunk = lax.dynamic_slice_in_dim(group, r * width, width, 1 + split)
        return jnp.concatenate(list(chunk), axis=concat)

    return apply_positional(loc, trade, members, rank)


# --------------------------------------------------------------------- contraction


def contract(loc: Locality, params: Params, x: NamedValue, y: NamedValue) -> NamedValue:
    """``pdot``: one ``dot_general`` on the device, then one all-reduce of the result."""
    names = params["axes"]
    own = _own(loc, names)
    repeats = math.prod(loc.place(n).size for n in own if n not in x.names and n not in y.names)
    x, y = _sum_unshared(loc, x, y, own), _sum_unshared(loc, y, x, own)
    union = x.names | y.names
    x_data, y_data = (vary_over(loc, v, union).data for v in (x, y))
    numbers, dims = dot_dimensions(x, y, own, params["pos_contract"], params["pos_batch"])
    out = bind_pdot(
        x_data,
        y_data,
        axes=tuple(n for n in names if not loc.is_own(n)),
        pos_contract=numbers[0],
        pos_batch=numbers[1],
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    mesh_axes = loc.mesh_axes_of([n for n in own if n in union])
    out = sum_devices(loc, out, mesh_axes)
    if repeats != 1:
        out = out * np.asarray(repeats).astype(out.dtype)
    return NamedValue(out, dims, union - own)


def _sum_unshared(loc, value, other, names):
    """Sum the local part of contracted axes that only this operand has."""
    alone = [n for n in loc.local_names(names & value.names) if n not in other.dims]
    if not alone:
        return value
    data = lax.reduce_sum(value.data, value.dims_of(alone))
    return NamedValue(data, without(value.dims, alone), value.names)


# ---------------------------------------------------------- devices of a nested xmap


def _over_devices(primitive: Any, translate: Callable) -> Callable:
    """The four primitives of ``devices``: translated by the outermost xmap, passed on by those between."""

    def rule(loc: Locality, params: Params, value: NamedValue) -> NamedValue:
        if not all(loc.is_own(axis) for axis in params["axes"]):
            return bind_named(loc, primitive, [value], params)[0]
        return translate(loc, value, params["axes"])

    return rule


def _take_own(loc: Locality, value: NamedValue, axes: Sequence[AxisName]) -> NamedValue:
    """Each device takes its element of the first positional dimension."""
    value = vary_over(loc, value, axes)
    at = value.positional_dims()[0]
    index = _device_index(loc, [m for axis in axes for m in loc.place(axis).mesh_axes])
    data = lax.dynamic_index_in_dim(value.data, index, at, keepdims=False)
    return NamedValue(data, (*value.dims[:at], *value.dims[at + 1 :]), value.names)


# --------------------------------------------------------------------------- table

RULES: dict[str, Rule] = {
    "psum": _reduction_rule(sum_over, lax.reduce_sum, lambda dtype: 0),
    "pmax": _reduction_rule(max_over, lax.reduce_max, _lowest),
    "pmin": _reduction_rule(min_over, lax.reduce_min, _highest),
    "axis_index": Rule(_spread, _axis_index),
    "all_gather": Rule(_reduced, _all_gather),
    "reduce_scatter": Rule(_spread, _reduce_scatter),
    "all_to_all": Rule(_spread, _all_to_all),
    "ppermute": Rule(_spread, _ppermute),
    "pbroadcast": Rule(_reduced, _pbroadcast),
    "pdot": Rule(_reduced, contract),
    "device_vary": Rule(_spread, _over_devices(devices.vary_p, vary_over)),
    "device_sum": Rule(_reduced, _over_devices(devices.sum_p, sum_over)),
    "device_gather": Rule(_reduced, _over_devices(devices.gather_p, gather_over)),
    "device_take": Rule(_spread, _over_devices(devices.take_p, _take_own)),
}


def result_names(primitive: str, params: Params, operands: Sequence[Names], own: Names) -> Names:
    """The named axes of a collective's result, from those of its operands."""
    axes = frozenset(axis_names(params)) & own
    grouped = params.get("axis_index_groups") is not None
    union = frozenset(itertools.chain.from_iterable(operands))
    return _spread(union, axes) if grouped else RULES[primitive].names(union, axes)
