"""How one collective is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from xmap_compat.core.values import NamedValue


class Translation(NamedTuple):
    """The functions that evaluate one collective on one device.

    Attributes:
      apply: ``(view, params, *operands) -> result``.
      in_groups: the same with ``axis_index_groups``, for collectives that take them.
    """

    apply: Callable[..., NamedValue]
    in_groups: Callable[..., NamedValue] | None = None
