"""``axis_index_groups``: collectives within groups of elements, by what each element's group holds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.batch import apply_positional
from xmap_compat.core.device import DeviceView, conform_to_names, gather_over, spread, sum_devices
from xmap_compat.core.indices import index_of
from xmap_compat.core.parameters import Params, axis_names
from xmap_compat.core.specs import AxisNames
from xmap_compat.core.values import NamedValue, leading


def members_table(groups: Any) -> np.ndarray:
    """For each element the members of its group; all groups have the same size."""
    flat = np.asarray(groups, np.int32)
    return np.repeat(flat, flat.shape[1], 0)[np.argsort(flat.ravel())]


def group_numbers(groups: Any) -> np.ndarray:
    """For each element the number of its group."""
    own = np.zeros(sum(map(len, groups)), np.int32)
    for k, group in enumerate(groups):
        own[list(group)] = k
    return own


def dimension_of_groups(groups: np.ndarray) -> int | None:
    """The dimension along which the groups lie if all elements are in two; None where no reshape does it."""
    elements = np.arange(groups.size)
    dividing = (elements.reshape(groups.shape), elements.reshape(groups.shape[::-1]).T)
    return next((at for at, divided in enumerate(dividing) if np.array_equal(groups, divided)), None)


def _divided(everything: NamedValue, groups: np.ndarray) -> tuple[NamedValue, int] | None:
    """All elements in two dimensions, their groups along dimension ``at``; None where no reshape does it."""
    at = dimension_of_groups(groups)
    if at is None:
        return None
    data = _jax.reshaped(everything.data, (*groups.shape[:: -1 if at else 1], *everything.data.shape[1:]))
    return NamedValue(data, (None, *everything.dims), everything.names), at


def group_members(view: DeviceView, value: NamedValue, params: Params):
    """The elements of each element's group in a new first positional dimension, and its place in the group."""
    names, groups = axis_names(params), np.asarray(params["axis_index_groups"], np.int32)
    everything = gather_over(view, value, names, "varying")
    here = index_of(view, names)
    if divided := _divided(everything, groups):
        everything, at = divided
        number, rank = (lax.rem, lax.div) if at else (lax.div, lax.rem)
        inner = np.int32(groups.shape[1 - at])
        members = lambda g, i: lax.dynamic_index_in_dim(g, number(i, inner), at, keepdims=False)  # noqa: E731
    else:
        inner, ranks = np.int32(groups.size), np.argsort(groups.ravel()).astype(np.int32) % groups.shape[1]
        members = lambda g, i: g[jnp.asarray(members_table(groups))[i]]  # noqa: E731
        rank = lambda i, _: jnp.asarray(ranks)[i]  # noqa: E731
    return apply_positional(view, members, everything, here), apply_positional(view, lambda i: rank(i, inner), here)


def reduce_in_groups(reduce: Callable) -> Callable:
    """A reduction within groups, which may differ in size: all groups are reduced, those of one size together."""

    def in_groups(view, params, value):
        names, groups = axis_names(params), sorted(params["axis_index_groups"], key=len)
        own, alike = group_numbers(groups), [np.array(list(some)) for _, some in itertools.groupby(groups, len)]
        everything = gather_over(view, value, names)

        def reduce_all(everything):
            return jnp.concatenate([reduce(everything[members], (1,)) for members in alike])

        if divided := len(alike) == 1 and _divided(everything, alike[0]):
            everything, at = divided
            reduce_all = lambda everything: reduce(everything, (1 - at,))  # noqa: E731
        reduced = apply_positional(view, reduce_all, everything)
        return apply_positional(view, lambda every, i: every[jnp.asarray(own)[i]], reduced, index_of(view, names))

    return in_groups


def sum_in_groups(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    """``lax.psum`` within groups: one all-reduce of the sums of all groups."""
    names, groups = axis_names(params), params["axis_index_groups"]
    if not view.mesh_axes_of(names):
        return reduce_in_groups(lax.reduce_sum)(view, params, value)
    own = group_numbers(groups)
    value = apply_positional(view, lambda x: x[None], conform_to_names(view, value, value.names | view.own(names)))
    partial = partial_sums(view, value, names, own[:, None], len(groups))
    data = sum_devices(view, partial.data, view.mesh_axes_of(names))
    summed = dataclasses.replace(partial, data=data, names=value.names - frozenset(names))
    return apply_positional(view, lambda every, i: every[jnp.asarray(own)[i]], summed, index_of(view, names))


def partial_sums(view: DeviceView, value: NamedValue, names: AxisNames, table: np.ndarray, rows: int):
    """For each of ``rows`` the sum, over a device's elements, of values that a table ``[element, k]`` assigns to it.

    ``k`` counts along the first positional dimension, which becomes that of the rows.
    """
    local = view.local_names(names)
    front = [*map(value.dims.index, local), value.positional_dims()[0]]
    rest = [k for k in range(len(value.dims)) if k not in front]
    data = lax.transpose(value.data, (*front, *rest))
    tail = data.shape[len(front) :]
    to = jnp.asarray(table)[leading(index_of(view, names), local)]
    narrow = jnp.issubdtype(data.dtype, jnp.floating) and data.dtype.itemsize < 4  # a scatter adds in its own precision
    zeros = jnp.zeros((rows, *tail), np.float32 if narrow else data.dtype)
    zeros = spread(view, zeros, view.mesh_axes_of(value.names))
    shape = [size for size in to.shape if size != 1]  # XLA copies updates that have a dimension of one element
    sums = zeros.at[to.reshape(shape)].add(lax.reshape(data, (*shape, *tail)).astype(zeros.dtype))
    return NamedValue(sums.astype(data.dtype), (None, *(value.dims[k] for k in rest)), value.names)


def all_to_all_in_groups(view, params, value):
    members, rank = group_members(view, value, params)
    split, concat = params["split_axis"], params["concat_axis"]
    count = len(params["axis_index_groups"][0])

    def trade(group, r):
        width = group.shape[1 + split] // count
        chunk = lax.dynamic_slice_in_dim(group, r * width, width, 1 + split)
        return jnp.concatenate(list(chunk), axis=concat)

    return apply_positional(view, trade, members, rank)
