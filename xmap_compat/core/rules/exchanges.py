"""Collectives that exchange elements of split axes between devices: psum_scatter, all_to_all,
ppermute.

Along the local dimension of an axis, an exchange is a change of shape or an index; only elements
that change device are sent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat.core.batch import apply_positional, device_index, index_of, kept_where
from xmap_compat.core.collectives import collective, varied
from xmap_compat.core.device import (
    DeviceView,
    Factor,
    cast_to,
    equal_parts,
    laid_out_over,
    names_of,
    sizes_of,
    times_elements,
)
from xmap_compat.core.parameters import Params, axis_names, check_permutation
from xmap_compat.core.rules.groups import exchanged_in_groups
from xmap_compat.core.specs import AxisNames
from xmap_compat.core.values import (
    NamedValue,
    leading,
    merge_leading,
    merge_positional,
    move_positional,
    moved_to_front,
    squeeze_positional,
    with_leading,
    without,
)


def _scattered_in_group(members, place, params):
    at = params["scatter_dimension"]
    total = lax.reduce_sum(members, (0,))
    width = total.shape[at] // len(members)
    chunk = lax.dynamic_slice_in_dim(total, place * width, width, at)
    if params["tiled"]:
        return chunk
    return lax.squeeze(chunk, (at,))


@collective(
    "reduce_scatter",
    varied,
    "psum_scatter",
    counts=True,
    in_groups=exchanged_in_groups(_scattered_in_group),
)
def _reduce_scatter(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    """``lax.psum_scatter``: a local sum, then one reduce-scatter."""
    names = axis_names(params)
    position = params["scatter_dimension"]
    if view.present(value, names):
        result = _summed_and_scattered(view, value, names, position)
    else:
        chunk = _chunk_of_element(view, value, names, position)
        result = chunk.with_data(times_elements(view, chunk.data, value.names, names))
    if params["tiled"]:
        return result
    return squeeze_positional(result, position)


def _summed_and_scattered(view, value, names, position):
    """Sum on each device, then over devices; each keeps its chunk along a positional dimension."""
    value = equal_parts(view, value, names)
    value = laid_out_over(view, value, value.names | view.bound(names))
    total = lax.reduce_sum(value.data, value.dims_of(names))
    dims = without(value.dims, names)
    data, mesh, local = _split(view, NamedValue(total, dims, value.names), position, names)
    if mesh:
        data = merge_leading(data, len(mesh) + len(local))
        data = lax.psum_scatter(data, names_of(mesh), tiled=True)
        data = with_leading(data, 1, sizes_of(local))
    return NamedValue(data, (*names_of(local), *dims), value.names)


def _split(view: DeviceView, value: NamedValue, position: int, names: AxisNames):
    """Cut a positional dimension into the factors of the named axes and move those to the front.

    Returns:
      Data with leading dimensions for the mesh factors (in the order of the mesh) and the local
      factors, then the value's dimensions, with what is left of the cut one; and the two lists
      of factors.
    """
    at = value.positional_dims()[position]
    factors = view.factors(names)
    shape = list(value.data.shape)
    left = shape[at] // view.total_size(names)
    shape[at : at + 1] = [*sizes_of(factors), left]
    data = lax.reshape(value.data, tuple(shape))
    mesh, local = view.factors_by_kind(names)
    front = [at + factors.index(factor) for factor in (*mesh, *local)]
    return moved_to_front(data, front), mesh, local


def _traded_in_group(members, place, params):
    at = 1 + params["split_axis"]
    width = members.shape[at] // len(members)
    chunks = lax.dynamic_slice_in_dim(members, place * width, width, at)
    return jnp.concatenate(list(chunks), params["concat_axis"])


@collective("all_to_all", varied, in_groups=exchanged_in_groups(_traded_in_group))
def _all_to_all(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    """The primitive behind ``lax.all_to_all``, which is always tiled: one exchange between devices.

    (``lax.all_to_all`` itself adds and removes dimensions of one element for the untiled form.)
    """
    names = axis_names(params)
    split = params["split_axis"]
    concat = params["concat_axis"]
    if view.present(value, names):
        received = _exchange(view, value, names, split)
    else:
        chunk = _chunk_of_element(view, value, names, split)
        copies = lax.broadcast(chunk.data, (view.total_size(names),))
        received = NamedValue(copies, (None, *chunk.dims), chunk.names)
    return merge_positional(move_positional(received, 0, concat), concat)


def _chunk_of_element(view, value, names, position):
    """Where a value is the same everywhere, each element takes its chunk: nothing needs to be
    sent.
    """
    value = cast_to(view, value, names)
    data, mesh, local = _split(view, value, position, names)
    if mesh:
        index = device_index(view, names_of(mesh))
        data = merge_leading(data, len(mesh))
        data = lax.dynamic_index_in_dim(data, index, 0, keepdims=False)
    return NamedValue(data, (*names_of(local), *value.dims), value.names)


def take_element(view: DeviceView, value: NamedValue, names: AxisNames) -> NamedValue:
    """The slice of each element, from a first positional dimension that has the slices of all
    elements.
    """
    if not view.present(value, names):
        return squeeze_positional(_chunk_of_element(view, value, names, 0), 0)

    # The slices vary over the axis after all, as residuals of a branch may: each element indexes
    # its own.
    def element(slices, index):
        return lax.dynamic_index_in_dim(slices, index, 0, keepdims=False)

    return apply_positional(view, element, value, index_of(view, names))


def _exchange(view, value, names, split):
    """The chunks that an element receives from all elements, with a first positional dimension for
    the source.
    """
    value = laid_out_over(view, value, value.names | view.bound(names))
    data, mesh, local = _split(view, value, split, names)
    if mesh:
        shape = data.shape
        data = merge_leading(data, len(mesh))
        data = lax.all_to_all(data, names_of(mesh), split_axis=0, concat_axis=0, tiled=True)
        data = lax.reshape(data, shape)
    # Data has first the source devices and the new local owners, then the old dimensions, with the
    # local sources.
    lead = len(mesh) + len(local)
    dimension_of: dict[Factor, int] = {factor: k for k, factor in enumerate(mesh)}
    for factor in local:
        dimension_of[factor] = lead + value.dims.index(factor.name)
    sources = [dimension_of[factor] for factor in view.factors(names)]
    owners = range(len(mesh), lead)
    data = merge_leading(moved_to_front(data, [*sources, *owners]), len(sources))
    left = without(value.dims, names_of(local))
    return NamedValue(data, (None, *names_of(local), *left), value.names)


def _is_full(params, elements):
    return len(params["perm"]) == elements


@collective("ppermute", varied, check=check_permutation, moves=_is_full)
def _ppermute(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    """``lax.ppermute``: move elements between positions of the axes; positions that receive nothing
    are zero.
    """
    names = axis_names(params)
    if not view.present(value, names):
        return _keep_received(view, value, names, params["perm"])
    value = laid_out_over(view, value, value.names | view.bound(names))
    mesh, local = view.factors_by_kind(names)
    factors = view.factors(names)
    device = _linear_index(factors, mesh)
    slot = _linear_index(factors, local)
    moves = []
    for source, destination in params["perm"]:
        moves.append((device[source], slot[source], device[destination], slot[destination]))
    local_names = names_of(local)
    data = merge_leading(leading(value, local_names), len(local))
    data = _permute_slots(view, data, moves, names_of(mesh))
    data = with_leading(data, 1, sizes_of(local))
    return NamedValue(data, (*local_names, *without(value.dims, local_names)), value.names)


def _keep_received(view, value, names, perm):
    """Keep a value that is the same everywhere at the positions that receive it; put zeros
    elsewhere.
    """
    receives = np.zeros(view.total_size(names), bool)
    for _, destination in perm:
        receives[destination] = True
    if receives.all():
        bound = view.bound(names)
        if len(bound) == len(names):
            return value
        return laid_out_over(view, value, value.names | bound)
    return kept_where(view, value, names, lambda index: jnp.asarray(receives)[index])


def _linear_index(factors: Sequence[Factor], wanted: Sequence[Factor]) -> list[int]:
    """For each index over all factors (major first) its row-major index over the wanted ones."""
    sizes = sizes_of(factors)
    total = math.prod(sizes)
    grid = np.indices(sizes).reshape(len(factors), total)
    index = np.zeros(total, int)
    for factor in wanted:
        index = index * factor.size + grid[factors.index(factor)]
    return index.tolist()


def _permute_slots(view, data, moves, mesh_axes):
    """Carry out moves ``(source device, source slot, destination device, destination slot)``.

    Only elements that change device are sent, in as few collectives as ``_exchange_rounds`` finds;
    the rest is local indexing with tables that depend on the device.
    """
    devices = math.prod(map(view.mesh_size, mesh_axes))
    slots = data.shape[0]
    if devices > 1 and slots == 1:
        return lax.ppermute(data, mesh_axes, [(s, d) for s, _, d, _ in moves])
    buffers = [data]
    rows = slots  # of all buffers together
    # For each slot on each device, the row of the buffers that it gets.
    table = np.full((devices, slots), _EMPTY_SLOT)
    moving = []
    for move in moves:
        source, slot, destination, target = move
        if source == destination:
            table[destination, target] = slot
        else:
            moving.append(move)
    moving.sort(key=lambda move: move[3])  # so that they arrive in order
    for batch in _exchange_rounds(moving):
        width = len(next(iter(batch.values())))
        send = np.zeros((devices, width), int)
        for (source, destination), pairs in batch.items():
            sent, targets = zip(*pairs)
            send[source] = sent
            table[destination, targets] = rows + np.arange(width)
        outgoing = _take_slots(view, [data], send, mesh_axes)
        buffers.append(lax.ppermute(outgoing, mesh_axes, list(batch)))
        rows += width
    is_empty = table == _EMPTY_SLOT
    if is_empty.any():
        buffers.append(jnp.zeros_like(data[:1]))
        table[is_empty] = rows
    return _take_slots(view, buffers, table, mesh_axes)


def _take_slots(view, buffers, table, mesh_axes):
    """Rows of the buffers, one after the other, that a table ``[device, row]`` names for this
    device.
    """
    if (table == table[:1]).all():
        return _take_static(buffers, table[0])
    rows = jnp.asarray(table)[device_index(view, mesh_axes)]
    return jnp.take(_joined(buffers), rows, axis=0, mode="clip")


def _take_static(buffers, rows):
    """The same for rows that are equal on all devices: slices, if there are few."""
    whole = np.arange(len(buffers[0]))
    if len(buffers) == 1 and len(rows) > 1 and np.array_equal(rows[::-1], whole):
        return lax.rev(buffers[0], (0,))
    runs = list(_runs(buffers, rows))
    if len(runs) > _MOST_SLICES:
        return jnp.take(_joined(buffers), rows, axis=0, mode="clip")
    pieces = []
    for buffer, start, stop in runs:
        is_part = stop - start < len(buffer)
        pieces.append(lax.slice_in_dim(buffer, start, stop) if is_part else buffer)
    return _joined(pieces)


def _runs(buffers, rows):
    """Rows that follow each other in one buffer: ``(buffer, start, stop)`` for each run."""
    begin = np.cumsum([0, *map(len, buffers)])
    home = np.searchsorted(begin, rows, "right") - 1  # the buffer of each row
    within = rows - begin[home]
    is_new = (np.diff(within) != 1) | (np.diff(home) != 0)
    starts = [0, *(np.flatnonzero(is_new) + 1)]
    for first, end in zip(starts, [*starts[1:], len(rows)]):
        yield buffers[home[first]], int(within[first]), int(within[end - 1]) + 1


def _joined(pieces):
    if len(pieces) == 1:
        return pieces[0]
    return lax.concatenate(pieces, 0)


_EMPTY_SLOT = -1  # no element moves to this slot: it receives zeros
_MOST_SLICES = 4  # more pieces than these are taken by an index
_Move = tuple[int, int, int, int]
_Round = dict[tuple[int, int], list[tuple[int, int]]]


def _exchange_rounds(moves: Iterable[_Move]) -> list[_Round]:
    """Group moves between devices into rounds of one ``ppermute`` each.

    In a round every device sends to at most one other and receives from at most one.  All pairs of
    a round send the same number of elements, so that nothing is padded: exactly those elements are
    sent that change device.  Pairs are matched greedily, those with most elements first, which
    finds one round for a rotation by one and at most two for any rotation.

    Args:
      moves: ``(source device, source slot, destination device, destination slot)``.

    Returns:
      Rounds, each ``{(source, destination): [(source slot, destination slot), ...]}``.
    """
    pairs: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for source, slot, destination, target in moves:
        pairs[source, destination].append((slot, target))
    rounds: list[_Round] = []
    pending = sorted(pairs, key=lambda pair: (-len(pairs[pair]), (pair[1] - pair[0]), pair))
    while pending:
        rounds.append(_next_round(pairs, pending))
        pending = [pair for pair in pending if pair not in rounds[-1]]
    return rounds


def _next_round(pairs, pending):
    """Pairs as long as the first one that is pending, no two with one sender or one receiver."""
    width = len(pairs[pending[0]])
    matched = {}
    senders: set[int] = set()
    receivers: set[int] = set()
    for source, destination in pending:
        elements = pairs[source, destination]
        is_free = source not in senders and destination not in receivers
        if is_free and len(elements) == width:
            senders.add(source)
            receivers.add(destination)
            matched[source, destination] = elements
    return matched
