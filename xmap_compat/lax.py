"""``from xmap_compat import lax``: the functions over named axes that ``jax.lax`` lost."""

from xmap_compat.named_einsum import xeinsum
from xmap_compat.named_lax import pargmax, pargmin, pdot, pgather

__all__ = ["pargmax", "pargmin", "pdot", "pgather", "xeinsum"]
