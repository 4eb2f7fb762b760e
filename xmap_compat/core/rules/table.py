"""How each collective is evaluated on one device: by a function ``(view, params, *operands) ->
result``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xmap_compat.core.collectives import COLLECTIVES, has_groups
from xmap_compat.core.parameters import Params
from xmap_compat.core.rules import contraction, device_primitives, exchanges, gathers, reductions
from xmap_compat.core.rules.groups import IN_GROUPS
from xmap_compat.core.values import NamedValue

TRANSLATIONS: dict[str, Callable[..., NamedValue]] = {
    **reductions.TRANSLATIONS,
    **gathers.TRANSLATIONS,
    **exchanges.TRANSLATIONS,
    **contraction.TRANSLATIONS,
    **device_primitives.TRANSLATIONS,
}


def translate(
    view: Any, primitive: str, params: Params, operands: Sequence[NamedValue]
) -> list[NamedValue]:
    """The results of a collective on one device."""
    apply = (IN_GROUPS if has_groups(params) else TRANSLATIONS)[primitive]
    if COLLECTIVES[primitive].joint or not operands:
        return [apply(view, params, *operands)]
    return [apply(view, params, operand) for operand in operands]
