"""``axis_index_groups``: the axis is gathered, and each element computes with the members of its own group."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from xmap_compat.core.batch import apply_positional
from xmap_compat.core.device import DeviceView, gather_over
from xmap_compat.core.indices import index_of
from xmap_compat.core.parameters import Params, axis_names
from xmap_compat.core.values import NamedValue

InGroups = Callable[[DeviceView, Params, NamedValue], NamedValue]


def reduce_in_groups(reduce: Callable[..., Any]) -> InGroups:
    """A reduction within groups, which may differ in size: all groups are reduced, those of one size together."""

    def in_groups(view, params, value):
        names, groups = axis_names(params), sorted(params["axis_index_groups"], key=len)
        alike = [np.array(list(some)) for _, some in itertools.groupby(groups, len)]
        own = np.repeat(np.arange(len(groups)), [len(g) for g in groups])[np.argsort(list(itertools.chain(*groups)))]

        def own_of(everything, index):
            return jnp.concatenate([reduce(everything[group], (1,)) for group in alike])[jnp.asarray(own)[index]]

        return apply_positional(view, own_of, gather_over(view, value, names), index_of(view, names))

    return in_groups


def exchange_in_groups(finish: Callable[..., Any]) -> InGroups:
    """``finish(members, place, params)``: the slices of an element's group in its order, and its place among them."""

    def in_groups(view, params, value):
        names, groups = axis_names(params), np.asarray(params["axis_index_groups"], np.int32)
        place = np.argsort(groups.ravel()).astype(np.int32)  # of each element, in all groups one after the other

        def own_of(everything, index):
            group, at = jnp.asarray(place // groups.shape[1])[index], jnp.asarray(place % groups.shape[1])[index]
            return finish(everything[jnp.asarray(groups)[group]], at, params)

        return apply_positional(view, own_of, gather_over(view, value, names, "varying"), index_of(view, names))

    return in_groups
