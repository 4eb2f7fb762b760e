"""The parameters of a collective: which axes it names, and whether they make sense."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from xmap_compat.core.errors import should_be
from xmap_compat.core.specs import AxisName, is_integer

Names = frozenset[AxisName]
Params = Mapping[str, Any]


def axis_names(params: Params) -> tuple[AxisName, ...]:
    """The named axes of a collective's parameters, without positional integers."""
    return tuple(itertools.filterfalse(_is_position, _axes_param(params)))


def mentioned_names(params: Params) -> tuple[AxisName, ...]:
    """The axis names in an equation's parameters ``axes`` or ``axis_name``, whether its primitive
    is a known collective or not.
    """
    if "axes" in params or "axis_name" in params:
        return axis_names(params)
    return ()


def _axes_param(params):
    axes = params.get("axes", params.get("axis_name"))
    if isinstance(axes, (tuple, list)):
        return axes
    return (axes,)


def positions(params: Params) -> tuple[int, ...]:
    """The positional integers among the axes of a collective's parameters."""
    return tuple(filter(_is_position, _axes_param(params)))


def _is_position(axis):
    """Whether JAX reads an axis as a dimension: Python's integers and booleans; NumPy's integers
    are names.
    """
    return isinstance(axis, int)


def check_groups(primitive: str, params: Params, size: int, where: str) -> None:
    """Raise unless groups of one size cover one axis of ``size`` elements."""
    groups = params["axis_index_groups"]
    indices = itertools.chain.from_iterable(groups)
    covers_all = sorted(indices) == list(range(size))
    is_even = len(set(map(len, groups))) == 1
    if not (covers_all and is_even and len(axis_names(params)) == 1):
        raise should_be(
            f"axis_index_groups of `{primitive}` at {where}",
            "groups of one size that have all indices of one named axis exactly once, "
            f"0 to {size - 1}",
            groups,
            ValueError,
            "Put the remaining indices into such groups",
        )


def check_source(params: Params, size: int, where: str) -> None:
    """Raise unless the source of a ``pbroadcast`` is an index of the axes."""
    if not 0 <= params["source"] < size:
        raise _index_out_of_range("The source of pbroadcast", params["source"], size, where)


def check_permutation(params: Params, size: int, where: str) -> None:
    """Raise unless each index is at most once a source and at most once a destination of a
    ``ppermute``.
    """
    perm = params["perm"]
    if not all(map(_is_pair, perm)):
        what = f"The permutation of ppermute at {where}"
        raise should_be(what, "pairs of integers, [(source, destination), ...]", perm, ValueError)
    for end, kind in enumerate(("source", "destination")):
        pairs: dict[int, list[Any]] = {}
        for pair in perm:
            index = pair[end]
            if not 0 <= index < size:
                raise _index_out_of_range("The permutation of ppermute", index, size, where)
            pairs.setdefault(index, []).append(pair)
        for index, having in pairs.items():
            if len(having) > 1:
                what = f"The {kind} index {index} of ppermute at {where}"
                advice = "Leave one of these pairs out"
                raise should_be(what, "in one pair only", tuple(having), ValueError, advice)


def _is_pair(value):
    return isinstance(value, Sequence) and len(value) == 2 and all(map(is_integer, value))


def _index_out_of_range(what: str, index: int, size: int, where: str) -> ValueError:
    return ValueError(
        f"{what} at {where} has the index {index}, but the indices are 0 to {size - 1}. "
        "Use these only"
    )
