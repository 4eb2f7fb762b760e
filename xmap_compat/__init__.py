"""xmap on modern JAX: named axes, and one argument that says how each is executed.

>>> import jax.numpy as jnp
>>> from jax import lax
>>> from xmap_compat import xmap
>>> centred = xmap(lambda x: x - lax.pmean(x, "batch"), ["batch", ...], ["batch", ...])
>>> centred(jnp.array([1.0, 2.0, 6.0])).tolist()
[-2.0, -1.0, 3.0]

Begin with ``help(xmap_compat.xmap)``.  ``Mesh`` and ``serial_loop`` make resources; ``lax``,
``numpy`` and ``random`` have functions of named axes; ``testing`` checks that ``axis_resources``
change no result of your program; ``install`` gives unmodified programs ``jax.experimental.maps``
back.

Nothing is imported before it is used, so that a program under ``python -m xmap_compat`` or
``install()`` can still set the environment variables that JAX reads when it is imported.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from xmap_compat._version import __version__ as __version__

if TYPE_CHECKING:  # what type checkers see; each line has its row below
    from xmap_compat import lax as lax
    from xmap_compat import numpy as numpy
    from xmap_compat import random as random
    from xmap_compat import testing as testing
    from xmap_compat.api import xmap as xmap
    from xmap_compat.core.mesh import Mesh as Mesh
    from xmap_compat.core.mesh import SerialLoop as SerialLoop
    from xmap_compat.core.mesh import mesh as mesh
    from xmap_compat.core.mesh import serial_loop as serial_loop
    from xmap_compat.core.named_shape import named_shape as named_shape
    from xmap_compat.core.same_calls import compare_processes as compare_processes
    from xmap_compat.lax import pargmax as pargmax
    from xmap_compat.lax import pargmin as pargmin
    from xmap_compat.lax import pdot as pdot
    from xmap_compat.lax import pgather as pgather
    from xmap_compat.lax import xeinsum as xeinsum
    from xmap_compat.legacy.restore import install as install
    from xmap_compat.legacy.restore import uninstall as uninstall
    from xmap_compat.numpy import einsum as einsum
    from xmap_compat.processes import global_array as global_array
    from xmap_compat.processes import process_array as process_array
    from xmap_compat.tools.plan import plan as plan
    from xmap_compat.tools.search import search as search
    from xmap_compat.xmapped import Xmapped as Xmapped


# Where the public names live, for dir(), completion, and the import at first use.
_MODULES = ["lax", "numpy", "random", "testing"]
_NAMES = {
    "api": ["xmap"],
    "core.mesh": ["Mesh", "SerialLoop", "mesh", "serial_loop"],
    "core.named_shape": ["named_shape"],
    "core.same_calls": ["compare_processes"],
    "lax": ["pargmax", "pargmin", "pdot", "pgather", "xeinsum"],
    "legacy.restore": ["install", "uninstall"],
    "numpy": ["einsum"],
    "processes": ["global_array", "process_array"],
    "tools.plan": ["plan"],
    "tools.search": ["search"],
    "xmapped": ["Xmapped"],
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
# Jupyter looks for these; users do not call them.
_HOOKS = {"load_ipython_extension": "jupyter", "unload_ipython_extension": "jupyter"}

__all__ = sorted(
    _HOMES
)  # without modules: `import *` must not replace other modules named numpy and random


if not TYPE_CHECKING:  # type checkers would accept any name as ours

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"xmap_compat.{name}")
        home = {**_HOMES, **_HOOKS}.get(name)
        if home is None:
            raise AttributeError(
                f"module 'xmap_compat' has no attribute {name!r}",
                name=name,
                obj=sys.modules[__name__],
            )
        try:
            module = importlib.import_module(f"xmap_compat.{home}")
        except (
            AttributeError
        ) as error:  # `from xmap_compat import xmap` would say that there is no xmap
            raise ImportError(f"xmap_compat cannot be imported with this JAX: {error}") from error
        return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, *_MODULES, *(name for name in globals() if name.startswith("__"))])
