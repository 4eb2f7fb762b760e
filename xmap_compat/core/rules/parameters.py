"""The parameters of a collective: which axes it names, and whether they make sense."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xmap_compat.core import errors
from xmap_compat.core.specs import AxisName

Names = frozenset[AxisName]
Params = Mapping[str, Any]


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


_WITH_POSITIONS = ("psum", "pmax", "pmin")  # they reduce positional dimensions too


def check_parameters(primitive: str, params: Params, size: int, where: str) -> None:
    """Raise if names or indices in a collective's parameters are no such, or do not fit ``size`` elements together."""
    if _positions(params) and primitive not in _WITH_POSITIONS:
        raise errors.integer_in_collective(primitive, _positions(params)[0], where)
    if primitive == "ppermute":
        _check_permutation(params["perm"], size, where)
    if primitive == "pbroadcast" and not 0 <= params["source"] < size:
        raise errors.source_out_of_range(params["source"], size, where)
    groups = params.get("axis_index_groups")
    if groups is not None:
        if sorted(itertools.chain.from_iterable(groups)) != list(range(size)):
            raise errors.groups_do_not_cover(primitive, groups, size, where)
        equal = primitive in _WITH_POSITIONS or len({len(group) for group in groups}) == 1
        if len(axis_names(params)) != 1 or not equal:
            raise errors.unsupported_groups(primitive, where)


def _check_permutation(perm, size, where):
    if not all(isinstance(pair, Sequence) and len(pair) == 2 and all(map(_is_position, pair)) for pair in perm):
        raise errors.permutation_of_other_things(perm, where)
    for kind, indices in (("source", [s for s, _ in perm]), ("destination", [d for _, d in perm])):
        for index in indices:
            if not 0 <= index < size:
                raise errors.permutation_index_out_of_range(index, size, where)
            if indices.count(index) > 1:
                raise errors.repeated_permutation_index(kind, index, where)
