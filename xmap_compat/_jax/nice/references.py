"""References (``jax.new_ref``) turned into values."""

from __future__ import annotations

from typing import Any

from jax._src.state import discharge

from xmap_compat._jax.version import VERSION

_discharge_state = discharge.discharge_state if VERSION >= (0, 10, 2) else discharge.discharge_state2


def discharged(closed: Any) -> Any:
    """A closed jaxpr that passes values on, instead of writing them to the references that it makes."""
    # By itself it would expand operations like ``lax.custom_root``.
    return _discharge_state(closed, lower=False) if VERSION >= (0, 10, 2) else _discharge_state(closed)
