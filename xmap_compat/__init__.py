"""xmap on modern JAX: named axes, and one argument that says how each is executed.

Nothing is imported before it is used: ``python -m xmap_compat`` and ``install()`` must leave it to the
program to set the environment variables that JAX reads at its own import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xmap_compat import lax as lax
    from xmap_compat import numpy as numpy
    from xmap_compat import random as random
    from xmap_compat.api import xmap
    from xmap_compat.core.mesh import Mesh, SerialLoop, mesh, serial_loop
    from xmap_compat.core.named_shape import named_shape
    from xmap_compat.lax import pargmax, pargmin, pdot, pgather, xeinsum
    from xmap_compat.legacy.restore import install, uninstall
    from xmap_compat.numpy import einsum
    from xmap_compat.processes import global_array

__version__ = "0.1.0"

__all__ = [
    "Mesh",
    "SerialLoop",
    "einsum",
    "global_array",
    "install",
    "mesh",
    "named_shape",
    "pargmax",
    "pargmin",
    "pdot",
    "pgather",
    "serial_loop",
    "uninstall",
    "xeinsum",
    "xmap",
]

_HOMES = {
    "Mesh": "core.mesh",
    "SerialLoop": "core.mesh",
    "einsum": "numpy",
    "global_array": "processes",
    "install": "legacy.restore",
    "load_ipython_extension": "jupyter",
    "mesh": "core.mesh",
    "named_shape": "core.named_shape",
    "pargmax": "lax",
    "pargmin": "lax",
    "pdot": "lax",
    "pgather": "lax",
    "serial_loop": "core.mesh",
    "uninstall": "legacy.restore",
    "unload_ipython_extension": "jupyter",
    "xeinsum": "lax",
    "xmap": "api",
}


def __getattr__(name: str) -> Any:
    if name in ("lax", "numpy", "random"):
        return importlib.import_module(f"xmap_compat.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"xmap_compat.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'xmap_compat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
