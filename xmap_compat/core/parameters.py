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


def positions(params: Params) -> tuple[int, ...]:
    """The positional integers among the axes of a collective's parameters."""
    return tuple(a for a in _axes_param(params) if _is_position(a))


def _is_position(axis):
    """Whether JAX reads an axis as a dimension: Python's integers and booleans; NumPy's integers are names."""
    return isinstance(axis, int)


def check_groups(primitive: str, params: Params, size: int, where: str) -> None:
    """Raise unless groups of one size cover one axis of ``size`` elements."""
    groups = params["axis_index_groups"]
    covered = sorted(itertools.chain.from_iterable(groups)) == list(range(size))
    if not covered or len(axis_names(params)) != 1 or len({*map(len, groups)}) != 1:
        raise errors.bad_groups(primitive, groups, size, where)


def check_source(params: Params, size: int, where: str) -> None:
    """Raise unless the source of a ``pbroadcast`` is an index of the axes."""
    if not 0 <= params["source"] < size:
        raise errors.index_out_of_range("The source of pbroadcast", params["source"], size, where)


def check_permutation(params: Params, size: int, where: str) -> None:
    """Raise unless each index is at most once a source and at most once a destination of a ``ppermute``."""
    perm = params["perm"]
    is_index = lambda value: isinstance(value, (int, np.integer)) and not isinstance(value, bool)  # noqa: E731
    if not all(isinstance(pair, Sequence) and len(pair) == 2 and all(map(is_index, pair)) for pair in perm):
        what, wanted = f"The permutation of ppermute at {where}", "pairs of integers, [(source, destination), ...]"
        raise errors.should_be(what, wanted, perm, ValueError)
    for kind, indices in (("source", [s for s, _ in perm]), ("destination", [d for _, d in perm])):
        seen: set[int] = set()
        for index in indices:
            if not 0 <= index < size:
                raise errors.index_out_of_range("The permutation of ppermute", index, size, where)
            if index in seen:
                raise errors.repeated_permutation_index(kind, index, where)
            seen.add(index)
