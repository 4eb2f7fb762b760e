"""Values that print themselves: views import values, and a value finds its views when it is
shown.
"""

from __future__ import annotations

import importlib
from typing import Any


def view(name: str) -> Any:
    """The module of a view; a module of values imports none."""
    return importlib.import_module(f"xmap_compat.tools.{name}")


class Shown:
    """Prints as text."""

    def __str__(self) -> str:
        return view("plan_text").text(self)

    def __repr__(self) -> str:
        return str(self)
