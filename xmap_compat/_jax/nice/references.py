"""References (``jax.new_ref``) turned into values."""

from __future__ import annotations

from typing import Any

import jax
from jax._src.state import discharge
from jax.extend import core as jex_core

from xmap_compat._jax.version import VERSION


def discharged(closed: Any) -> Any:
    """A closed jaxpr that passes values on, instead of writing them to the references that it
    makes.
    """
    if VERSION >= (0, 10, 2):
        # By itself it would expand operations like ``lax.custom_root``.
        return discharge.discharge_state(closed, lower=False)
    return jex_core.ClosedJaxpr(*discharge.discharge_state(closed.jaxpr, closed.consts))


discharged(
    jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct((), "float32"))
)  # so that it fails here
