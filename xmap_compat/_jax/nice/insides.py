"""Names that ``install()`` puts back, of modules that were public once."""

from __future__ import annotations

from typing import Any

from jax._src import core, util

_INSIDES = {"jax.core": core, "jax.util": util}


def inside(name: str) -> Any:
    """An object of JAX's insides that was public under this name."""
    module, _, attribute = name.rpartition(".")
    return getattr(_INSIDES[module], attribute)
