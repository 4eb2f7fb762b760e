"""Values that print and draw themselves: views import values, and a value finds its views when it is shown."""

from __future__ import annotations

import importlib
import os
from typing import Any


def view(name: str) -> Any:
    """The module of a view; a module of values imports none."""
    return importlib.import_module(f"xmap_compat.tools.{name}")


class Shown:
    """Prints as text, shows itself as HTML in a notebook, and is drawn as SVG."""

    def __str__(self) -> str:
        return view("report").text(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return view("report").html(self)

    def svg(self) -> str:
        """The drawing as an SVG document."""
        return view("picture").svg(self)

    def save_svg(self, path: str | os.PathLike[str]) -> None:
        """Write the drawing to a file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg())
