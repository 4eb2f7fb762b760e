"""``axis_index_groups``: the axis is gathered, and each element computes with the members of its
own group.
"""

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
    own.
    """

    def in_groups(view, params, value):
        names, groups = axis_names(params), np.asarray(params["axis_index_groups"], np.int32)
        group_of = np.argsort(groups.ravel()) // groups.shape[1]

        def element_of(everything, index):
            return reduce(everything[groups], (1,))[jnp.asarray(group_of)[index]]

        return apply_positional(
            view, element_of, gather_over(view, value, names), index_of(view, names)
        )

    return in_groups


def exchanged_in_groups(finish: Callable[..., Any]) -> InGroups:
    """An exchange within groups: ``finish`` makes an element's result of its group's slices and its
    place there.
    """

    def in_groups(view, params, value):
        names, groups = axis_names(params), np.asarray(params["axis_index_groups"], np.int32)
        place = np.argsort(groups.ravel()).astype(
            np.int32
        )  # of each element, in all groups one after the other

        def element_of(everything, index):
            group, at = (
                jnp.asarray(place // groups.shape[1])[index],
                jnp.asarray(place % groups.shape[1])[index],
            )
            return finish(everything[jnp.asarray(groups)[group]], at, params)

        return apply_positional(
            view, element_of, gather_over(view, value, names, "varying"), index_of(view, names)
        )

    return in_groups
