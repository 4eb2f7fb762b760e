"""``axis_index_groups``: collectives within groups of elements, by what each element's group holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat.core.batch import apply_positional
from xmap_compat.core.device import Locality, gather_over
from xmap_compat.core.indices import index_of
from xmap_compat.core.parameters import Params, axis_names
from xmap_compat.core.values import NamedValue


def group_members(loc: Locality, value: NamedValue, params: Params):
    """The elements of each element's group in a new first positional dimension, and its place in the group."""
    names, groups = axis_names(params), params["axis_index_groups"]
    table = np.zeros((loc.place(names[0]).size, len(groups[0])), np.int32)
    ranks = np.zeros(len(table), np.int32)
    for group in groups:
        table[list(group)], ranks[list(group)] = group, range(len(group))
    everything = gather_over(loc, value, names, "varying")
    here = index_of(loc, names)
    members = apply_positional(loc, lambda g, i: g[jnp.asarray(table)[i]], everything, here)
    return members, apply_positional(loc, lambda i: jnp.asarray(ranks)[i], here)


def reduce_in_groups(reduce: Callable) -> Callable:
    """A reduction within groups, which may differ in size: all groups are reduced, those of one size together."""

    def in_groups(loc, params, value):
        names, groups = axis_names(params), sorted(params["axis_index_groups"], key=len)
        own = np.zeros(loc.place(names[0]).size, np.int32)
        for k, group in enumerate(groups):
            own[list(group)] = k

        def reduce_all(everything):
            alike = (np.array(list(some)) for _, some in itertools.groupby(groups, len))
            return jnp.concatenate([reduce(everything[members], (1,)) for members in alike])

        reduced = apply_positional(loc, reduce_all, gather_over(loc, value, names))
        return apply_positional(loc, lambda every, i: every[jnp.asarray(own)[i]], reduced, index_of(loc, names))

    return in_groups


def reduce_scatter_in_groups(loc, params, value):
    members, rank = group_members(loc, value, params)
    at, tiled = params["scatter_dimension"], params["tiled"]
    count = len(params["axis_index_groups"][0])

    def scatter(group, r):
        summed = lax.reduce_sum(group, (0,))
        chunk = lax.dynamic_slice_in_dim(summed, r * (summed.shape[at] // count), summed.shape[at] // count, at)
        return chunk if tiled else lax.squeeze(chunk, (at,))

    return apply_positional(loc, scatter, members, rank)


def all_to_all_in_groups(loc, params, value):
    members, rank = group_members(loc, value, params)
    split, concat = params["split_axis"], params["concat_axis"]
    count = len(params["axis_index_groups"][0])

    def trade(group, r):
        width = group.shape[1 + split] // count
        chunk = lax.dynamic_slice_in_dim(group, r * width, width, 1 + split)
        return jnp.concatenate(list(chunk), axis=concat)

    return apply_positional(loc, trade, members, rank)
