"""How each collective is evaluated on one device, from the families that translate them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xmap_compat.core.collectives import COLLECTIVES, has_groups
from xmap_compat.core.nested import rules as nested
from xmap_compat.core.parameters import Params
from xmap_compat.core.rules import contraction, exchanges, gathers, reductions
from xmap_compat.core.rules.translation import Translation
from xmap_compat.core.values import NamedValue

TRANSLATIONS: dict[str, Translation] = {
    **reductions.TRANSLATIONS,
    **gathers.TRANSLATIONS,
    **exchanges.TRANSLATIONS,
    **contraction.TRANSLATIONS,
    **nested.TRANSLATIONS,
}


def translate(view: Any, primitive: str, params: Params, operands: Sequence[NamedValue]) -> list[NamedValue]:
    """The results of a collective on one device."""
    translation = TRANSLATIONS[primitive]
    apply = translation.in_groups if has_groups(params) else translation.apply
    assert apply is not None, "the type check refuses other groups"
    if COLLECTIVES[primitive].joint or not operands:
        return [apply(view, params, *operands)]
    return [apply(view, params, operand) for operand in operands]
