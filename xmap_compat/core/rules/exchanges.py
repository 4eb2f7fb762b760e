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

from xmap_compat import _jax
from xmap_compat.core.batch import apply_positional, device_index, index_of
from xmap_compat.core.collectives import collective, varied
from xmap_compat.core.device import (
    DeviceView,
    Factor,
    cast_to,
    equal_parts,
    laid_out_over,
    times_elements,
)
from xmap_compat.core.parameters import Params, axis_names, check_permutation
from xmap_compat.core.rules.groups import exchanged_in_groups
from xmap_compat.core.specs import AxisNames
from xmap_compat.core.values import (
    NamedValue,
    leading,
    merge_positional,
    move_positional,
    squeeze_positional,
    without,
)


def _scattered_in_group(members, place, params):
    at = params["scatter_dimension"]
    total = lax.reduce_sum(members, (0,))
    width = total.shape[at] // len(members)
    chunk = lax.dynamic_slice_in_dim(total, place * width, width, at)
    return chunk if params["tiled"] else lax.squeeze(chunk, (at,))


@collective(
    "reduce_scatter",
    varied,
    "psum_scatter",
    counts=True,
    in_groups=exchanged_in_groups(_scattered_in_group),
)
def _reduce_scatter(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    """``lax.psum_scatter``: a local sum, then one reduce-scatter."""
    names, position = axis_names(params), params["scatter_dimension"]
    if not view.present(value, names):
        chunk = _chunk_of_element(view, value, names, position)
        result = NamedValue(
            times_elements(view, chunk.data, value.names, names), chunk.dims, chunk.names
        )
    else:
        value = equal_parts(view, value, names)
        value = laid_out_over(view, value, value.names | view.bound(names))
        summed = NamedValue(
            lax.reduce_sum(value.data, value.dims_of(names)),
            without(value.dims, names),
            value.names,
        )
        result = _scattered(view, summed, names, position)
    return result if params["tiled"] else squeeze_positional(result, position)


def _scattered(view, summed, names, position):
    """Sum over devices what each has summed; each keeps its chunk along a positional dimension."""
    data, mesh, local = _split(view, summed, position, names)
    if mesh:
        axes = tuple(factor.name for factor in mesh)
        data = lax.psum_scatter(_merge_leading(data, len(mesh) + len(local)), axes, tiled=True)
        data = _jax.reshaped(data, (*(factor.size for factor in local), *data.shape[1:]))
    return NamedValue(data, (*(factor.name for factor in local), *summed.dims), summed.names)


def _split(view: DeviceView, value: NamedValue, position: int, names: AxisNames):
    """Cut a positional dimension into the factors of the named axes and move those to the front.

    Returns:
      Data with leading dimensions for the mesh factors (in the order of the mesh) and the local
      factors, then the value's dimensions, with what is left of the cut one; and the two lists
      of factors.
    """
    at = value.positional_dims()[position]
    factors = view.factors(names)
    left = value.data.shape[at] // view.total_size(names)
    sizes = [factor.size for factor in factors]
    data = _jax.reshaped(
        value.data, (*value.data.shape[:at], *sizes, left, *value.data.shape[at + 1 :])
    )
    mesh, local = view.factors_by_kind(names)
    front = [at + factors.index(factor) for factor in (*mesh, *local)]
    rest = [k for k in range(data.ndim) if k not in front]
    return lax.transpose(data, (*front, *rest)), mesh, local


def _merge_leading(data, count):
    return _jax.reshaped(data, (math.prod(data.shape[:count]), *data.shape[count:]))


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
    names, split, concat = axis_names(params), params["split_axis"], params["concat_axis"]
    if not view.present(value, names):
        chunk = _chunk_of_element(view, value, names, split)
        copies = lax.broadcast(chunk.data, (view.total_size(names),))
        received = NamedValue(copies, (None, *chunk.dims), chunk.names)
    else:
        received = _exchange(view, value, names, split)
    return merge_positional(move_positional(received, 0, concat), concat)


def _chunk_of_element(view, value, names, position):
    """Where a value is the same everywhere, each element takes its chunk: nothing needs to be
    sent.
    """
    value = cast_to(view, value, names)
    data, mesh, local = _split(view, value, position, names)
    if mesh:
        index = device_index(view, [factor.name for factor in mesh])
        data = lax.dynamic_index_in_dim(_merge_leading(data, len(mesh)), index, 0, keepdims=False)
    return NamedValue(data, (*(factor.name for factor in local), *value.dims), value.names)


def take_element(view: DeviceView, value: NamedValue, names: AxisNames) -> NamedValue:
    """The slice of each element, from a first positional dimension that has the slices of all
    elements.
    """
    if view.present(value, names):  # residuals of a branch may vary
        element = lambda x, k: lax.dynamic_index_in_dim(x, k, 0, keepdims=False)  # noqa: E731
        return apply_positional(view, element, value, index_of(view, names))
    return squeeze_positional(_chunk_of_element(view, value, names, 0), 0)


def _exchange(view, value, names, split):
    """The chunks that an element receives from all elements, with a first positional dimension for
    the source.
    """
    value = laid_out_over(view, value, value.names | view.bound(names))
    data, mesh, local = _split(view, value, split, names)
    if mesh:
        axes = tuple(factor.name for factor in mesh)
        shape = data.shape
        exchange = lambda x: lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)  # noqa: E731
        data = exchange(_merge_leading(data, len(mesh)))
        data = _jax.reshaped(data, shape)
    # Data has first the source devices and the new local owners, then the old dimensions, with the
    # local sources.
    lead = len(mesh) + len(local)
    at: dict[Factor, int] = {factor: k for k, factor in enumerate(mesh)}
    at.update((factor, lead + value.dims.index(factor.name)) for factor in local)
    source = [at[factor] for factor in view.factors(names)]
    owner = range(len(mesh), lead)
    rest = [k for k in range(lead, data.ndim) if k not in source]
    data = _merge_leading(lax.transpose(data, (*source, *owner, *rest)), len(source))
    dims = (None, *(factor.name for factor in local), *(value.dims[k - lead] for k in rest))
    return NamedValue(data, dims, value.names)


@collective("ppermute", varied, check=check_permutation)
def _ppermute(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    """``lax.ppermute``: move elements between positions of the axes; positions that receive nothing
    are zero.
    """
    names, perm = axis_names(params), params["perm"]
    if not view.present(value, names):
        return _keep_received(view, value, names, perm)
    value = laid_out_over(view, value, value.names | view.bound(names))
    mesh, local = view.factors_by_kind(names)
    local_names = [factor.name for factor in local]
    data = _merge_leading(leading(value, local_names), len(local))
    device, slot = (_linear_index(view.factors(names), kind) for kind in (mesh, local))
    moves = [(device[s], slot[s], device[d], slot[d]) for s, d in perm]
    data = _permute_slots(view, data, moves, tuple(factor.name for factor in mesh))
    data = _jax.reshaped(data, (*(factor.size for factor in local), *data.shape[1:]))
    return NamedValue(data, (*local_names, *without(value.dims, local_names)), value.names)


def _keep_received(view, value, names, perm):
    """Keep a value that is the same everywhere at the positions that receive it; put zeros
    elsewhere.
    """
    received = np.zeros(view.total_size(names), bool)
    received[[destination for _, destination in perm]] = True
    if received.all():
        bound = view.bound(names)
        if len(bound) == len(names):
            return value
        return laid_out_over(view, value, value.names | bound)
    mask = lambda x, index: jnp.where(jnp.asarray(received)[index], x, jnp.zeros_like(x))  # noqa: E731
    return apply_positional(view, mask, value, index_of(view, names))


def _linear_index(factors: Sequence[Factor], wanted: Sequence[Factor]) -> list[int]:
    """For each index over all factors (major first) its row-major index over the wanted ones."""
    total = math.prod(factor.size for factor in factors)
    grid = np.indices([factor.size for factor in factors]).reshape(len(factors), total)
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
    buffers, rows = [data], slots
    table = np.full(
        (devices, slots), _EMPTY_SLOT
    )  # for each slot on each device, the row of the buffers that it gets
    for source, slot, destination, target in moves:
        if source == destination:
            table[destination, target] = slot
    moving = sorted(
        (m for m in moves if m[0] != m[2]), key=lambda m: m[3]
    )  # so that they arrive in order
    for batch in _exchange_rounds(moving):
        width = len(next(iter(batch.values())))
        send = np.zeros((devices, width), int)
        for (source, destination), pairs in batch.items():
            send[source] = [slot for slot, _ in pairs]
            table[destination, [target for _, target in pairs]] = rows + np.arange(width)
        outgoing = _take_slots(view, [data], send, mesh_axes)
        buffers.append(lax.ppermute(outgoing, mesh_axes, list(batch)))
        rows += width
    if (table == _EMPTY_SLOT).any():
        buffers.append(jnp.zeros_like(data[:1]))
        table[table == _EMPTY_SLOT] = rows
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
    if (
        len(rows) > 1
        and len(buffers) == 1
        and np.array_equal(rows[::-1], np.arange(len(buffers[0])))
    ):
        return lax.rev(buffers[0], (0,))
    begin = np.cumsum([0, *(len(buffer) for buffer in buffers)])
    home = np.searchsorted(begin, rows, "right") - 1  # the buffer of each row
    runs = np.split(
        rows - begin[home], np.nonzero((np.diff(rows) != 1) | (np.diff(home) != 0))[0] + 1
    )
    if len(runs) <= 4:
        firsts = home[np.cumsum([0, *map(len, runs[:-1])])]
        return _joined(
            [_sliced(buffers[k], int(run[0]), int(run[-1]) + 1) for k, run in zip(firsts, runs)]
        )
    return jnp.take(_joined(buffers), rows, axis=0, mode="clip")


def _sliced(x, start, stop):
    return lax.slice_in_dim(x, start, stop) if stop - start < len(x) else x


def _joined(pieces):
    return lax.concatenate(pieces, 0) if len(pieces) > 1 else pieces[0]


_EMPTY_SLOT = -1  # no element moves to this slot: it receives zeros
_Move = tuple[int, int, int, int]
_Round = dict[tuple[int, int], list[tuple[int, int]]]


def _exchange_rounds(moves: Iterable[_Move]) -> list[_Round]:
    """Group moves between devices into rounds of one ``ppermute`` each.

    In a round every device sends to at most one other and receives from at most one.  All pairs of
    a round
    send the same number of elements, so that nothing is padded: exactly those elements are sent
    that change device.  Pairs are matched greedily, those with most elements first, which finds one
    round for a rotation by one and at most two for any rotation.

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
        width = len(pairs[pending[0]])
        matched = _matching([pair for pair in pending if len(pairs[pair]) == width])
        rounds.append({pair: pairs[pair] for pair in matched})
        pending = [pair for pair in pending if pair not in rounds[-1]]
    return rounds


def _matching(pairs):
    senders: set[int] = set()
    receivers: set[int] = set()
    matched = []
    for source, destination in pairs:
        if source not in senders and destination not in receivers:
            senders.add(source)
            receivers.add(destination)
            matched.append((source, destination))
    return matched
