"""xmap on modern JAX: named axes, and one argument that says how each is executed."""

from xmap_compat import lax, numpy
from xmap_compat.api import xmap
from xmap_compat.lax import pargmax, pargmin, pdot, pgather, xeinsum
from xmap_compat.named_types import named_shape
from xmap_compat.numpy import einsum
from xmap_compat.resources import Mesh, SerialLoop, mesh, serial_loop

__version__ = "0.1.0"

__all__ = [
    "Mesh",
    "SerialLoop",
    "einsum",
    "lax",
    "mesh",
    "named_shape",
    "numpy",
    "pargmax",
    "pargmin",
    "pdot",
    "pgather",
    "serial_loop",
    "xeinsum",
    "xmap",
]
