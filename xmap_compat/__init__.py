"""xmap on modern JAX: named axes, and one argument that says how each is executed."""

from xmap_compat.api import xmap
from xmap_compat.named_lax import pargmax, pargmin, pdot
from xmap_compat.resources import Mesh, SerialLoop, mesh, serial_loop

__version__ = "0.1.0"

__all__ = ["Mesh", "SerialLoop", "mesh", "pargmax", "pargmin", "pdot", "serial_loop", "xmap"]
