"""Values that print and draw themselves: views import values, and a value finds its views when it
is shown.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from xmap_compat.tools.text import axes_name


def view(name: str) -> Any:
    """The module of a view; a module of values imports none."""
    return importlib.import_module(f"xmap_compat.tools.{name}")


class Shown:
    """Prints as text, and is a dictionary for ``json``."""

    def __str__(self) -> str:
        return view("plan_text").text(self)

    def __repr__(self) -> str:
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """All attributes as dictionaries, lists, numbers and strings, which ``json.dumps``
        takes.
        """
        return plain(self)


def plain(value: Any) -> Any:
    """A value as dictionaries, lists, numbers and strings; a mesh as the sizes of its axes."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {axes_name(key): plain(entry) for key, entry in value.items()}
    if dataclasses.is_dataclass(value):
        return {name: plain(getattr(value, name)) for name in _attributes(value)}
    if isinstance(value, Iterable):
        return [plain(entry) for entry in value]
    return plain(dict(value.shape)) if hasattr(value, "axis_names") else str(value)


def _attributes(value: Any) -> list[str]:
    """The fields and properties of a dataclass."""
    names = []
    for field in dataclasses.fields(value):
        names.append(field.name)
    for name, attribute in vars(type(value)).items():
        if isinstance(attribute, property):
            names.append(name)
    return names
