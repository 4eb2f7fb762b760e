"""``from xmap_compat import numpy``: functions that take named axes beside positional ones."""

from xmap_compat.named_einsum import einsum
from xmap_compat.named_numpy import (
    all,
    along,
    any,
    argmax,
    argmin,
    argsort,
    cumprod,
    cumsum,
    flip,
    median,
    prod,
    roll,
    sort,
    take,
)

__all__ = [
    "all",
    "along",
    "any",
    "argmax",
    "argmin",
    "argsort",
    "cumprod",
    "cumsum",
    "einsum",
    "flip",
    "median",
    "prod",
    "roll",
    "sort",
    "take",
]
