"""``plan.source()``: the program of a plan for plain JAX, as Python source."""

from xmap_compat.tools.source.program import entry_name, values, write, written

__all__ = ["entry_name", "values", "write", "written"]
