"""How each collective is evaluated on one device: by a function ``(view, params, *operands) ->
result``, in the module of its family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from xmap_compat.core import once
from xmap_compat.core.collectives import COLLECTIVES, has_groups
from xmap_compat.core.device import equal_parts, laid_out_over
from xmap_compat.core.parameters import Params, axis_names
from xmap_compat.core.rules import exchanges as exchanges  # they fill COLLECTIVES
from xmap_compat.core.rules import gathers as gathers
from xmap_compat.core.rules import reductions as reductions
from xmap_compat.core.specs import AxisNames
from xmap_compat.core.values import NamedValue, union_of_names


def translate(
    view: Any, primitive: str, params: Params, operands: Sequence[NamedValue]
) -> list[NamedValue]:
    """The results of a collective on one device."""
    row = COLLECTIVES[primitive]
    axes = axis_names(params)
    apply = row.translate
    if has_groups(params):
        assert row.in_groups is not None  # JAX takes no groups for the others
        apply = row.in_groups
    if has_groups(params) or not row.counts:
        operands = [_in_parts(view, row, operand, axes) for operand in operands]
    if row.joint or not operands:
        return [_with_ended(apply(view, params, *operands), operands, axes)]
    return [_with_ended(apply(view, params, operand), [operand], axes) for operand in operands]


def _in_parts(view, row, operand, axes):
    """The operand of a collective: of what exists once each element puts in its part."""
    parts = equal_parts(view, operand, axes)
    if row.moves is None or parts is operand:
        return parts
    # Equal parts that change places are still parts, which add up.
    return laid_out_over(view, parts, parts.names.union(once.in_parts(operand.names, axes)))


def _with_ended(result: NamedValue, operands: Sequence[NamedValue], axes: AxisNames) -> NamedValue:
    """The result, with each ``Once`` that ended in this collective replaced in its names."""
    names = once.after_collective(union_of_names(operands), axes, result.names)
    if names == result.names:
        return result
    return dataclasses.replace(result, names=names)
