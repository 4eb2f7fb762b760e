"""``plan.source()``: the program of a plan for plain JAX, as Python source."""

from xmap_compat.tools.source.merge import Merged
from xmap_compat.tools.source.program import written
from xmap_compat.tools.source.wrapper import entry_name

__all__ = ["Merged", "entry_name", "written"]
