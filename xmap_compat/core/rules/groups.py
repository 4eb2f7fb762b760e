"""``axis_index_groups``: the axis is gathered, and each element computes with its group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from xmap_compat.core.batch import apply_positional, index_of
from xmap_compat.core.device import DeviceView, gather_over
from xmap_compat.core.parameters import Params, axis_names
from xmap_compat.core.values import NamedValue

InGroups = Callable[[DeviceView, Params, NamedValue], NamedValue]


def reduced_in_groups(reduce: Callable[..., Any]) -> InGroups:
    """A reduction within groups: each element reduces all groups, and takes the result of its
    group.
    """

    def in_groups(view, params, value):
        names = axis_names(params)
        groups, position = _positions(params)
        group_of = position // groups.shape[1]

        def for_element(everything, index):
            reduced = reduce(everything[groups], (1,))
            return reduced[jnp.asarray(group_of)[index]]

        everything = gather_over(view, value, names)
        return apply_positional(view, for_element, everything, index_of(view, names))

    return in_groups


def exchanged_in_groups(finish: Callable[..., Any]) -> InGroups:
    """An exchange within groups: ``finish`` makes an element's result of its group's slices and its
    place there.
    """

    def in_groups(view, params, value):
        names = axis_names(params)
        groups, position = _positions(params)
        group_of = position // groups.shape[1]
        place_of = position % groups.shape[1]

        def for_element(everything, index):
            group = jnp.asarray(group_of)[index]
            place = jnp.asarray(place_of)[index]
            members = everything[jnp.asarray(groups)[group]]
            return finish(members, place, params)

        everything = gather_over(view, value, names, "varying")
        return apply_positional(view, for_element, everything, index_of(view, names))

    return in_groups


def _positions(params):
    """The groups, and each element's position in all groups one after the other.

    Groups [[0, 3], [1, 2]] give the positions [0, 2, 3, 1].
    """
    groups = np.asarray(params["axis_index_groups"], np.int32)
    return groups, np.argsort(groups.ravel()).astype(np.int32)
