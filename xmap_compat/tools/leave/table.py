"""The functions over axes that JAX lacks, or computes otherwise over the parts of an axis, and the helper for each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xmap_compat import lax as named_lax

HELPERS = (
    (lax.pmax, "max_over"),  # JAX has no derivative of it
    (lax.pmin, "min_over"),
    (jnp.max, "max_over"),
    (jnp.min, "min_over"),
    (jax.scipy.special.logsumexp, "logsumexp_over"),
    (jax.nn.logsumexp, "logsumexp_over"),
    (jax.nn.softmax, "softmax_over"),
    (jax.nn.log_softmax, "log_softmax_over"),
    (lax.all_gather, "all_gather"),
    (lax.ppermute, "ppermute"),
    (lax.pshuffle, "pshuffle"),
    (lax.psum_scatter, "psum_scatter"),
    (lax.all_to_all, "all_to_all"),
    (named_lax.pdot, "pdot"),
)
# Parameters that take axes, in the order of the search.
AXIS_PARAMETERS = ("axis_name", "axes", "axis")


def helper_of(function: Any) -> str:
    """The name of the helper in the place of a function; empty if there is none."""
    return next((helper for replaced, helper in HELPERS if replaced is function), "")
