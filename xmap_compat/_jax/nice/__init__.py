"""Optional parts.  Without one, some programs are refused or explained less (``MISSING``); what
xmap does compute and compile is the same.

Each part is a module here, which tries what it needs of JAX when it is imported.  If this JAX lacks
that, the part is off, and one warning says so.  ``XMAP_COMPAT_PUBLIC=1`` turns all parts off.
"""

from __future__ import annotations

import importlib
import os
import types
import warnings
from collections.abc import Callable
from typing import Any

# What is missing without each part.
MISSING = {
    "contexts": "`with jax.sharding.Mesh(...)` sets no mesh for xmap, nor for bare PartitionSpecs",
    "key_value_store": "processes do not compare their calls",
    "origins": "x.named_shape raises an error, except of an argument of the body",
    "frames": "no edits or lines of the user's program are found",
}


def optional(name: str, **stand_ins: Callable[..., Any]) -> Any:
    """A part by its name; if it is off, an object with the stand-ins of its functions."""
    if os.environ.get("XMAP_COMPAT_PUBLIC", "0") in ("", "0"):
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except (
            Exception
        ) as error:  # whatever Python says of a private name that is gone or has changed
            text = (
                f"This JAX has changed something private that xmap_compat's part `{name}` needs "
                f"({error}). The part is off: {MISSING[name]}. Results are the same. Upgrade "
                "xmap_compat, or set XMAP_COMPAT_PUBLIC=1 to turn all such parts off"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=2)
    return types.SimpleNamespace(**stand_ins)
