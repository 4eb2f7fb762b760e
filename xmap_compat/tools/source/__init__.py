"""``plan.source()``: the program of a plan for plain JAX, as Python source."""

from xmap_compat.tools.source.merge import Merged
from xmap_compat.tools.source.program import written
from xmap_compat.tools.source.running import OTHER_NUMBERS, differences, exported, source

__all__ = ["OTHER_NUMBERS", "Merged", "differences", "exported", "source", "written"]
