"""Stand-ins for each part that is off: public JAX only.

The docstring of a class says what is missing then, in the words of the warning.
"""

from __future__ import annotations

import re
from typing import Any

import jax
from jax.extend import source_info_util


class recovery:
    """calls whose arrays lie elsewhere fail as jax.jit says it, processes do not compare their calls, and automatic
    checks of checkify around an xmapped function may end in errors of JAX"""

    @staticmethod
    def recovering(jitted, recovery, calling, checked):
        return jitted


class contexts:
    """`with jax.sharding.Mesh(...)` sets no mesh for xmap; bare PartitionSpecs do not mean the mesh of xmap_compat's"""

    @staticmethod
    def innermost():
        return None, None

    @staticmethod
    def push(mesh):
        return None

    @staticmethod
    def replace(mesh, base=False):
        return None

    @staticmethod
    def pop():
        return None

    @staticmethod
    def bare_specs(restoration):
        return None


class spmd:
    """jax.vmap(spmd_axis_name=...) around an xmap with mesh resources is not refused in words"""

    @staticmethod
    def axes_of_spmd_vmap():
        return frozenset()


class processes:
    """processes do not compare their calls"""

    @staticmethod
    def process_store():
        return None


class origins:
    """x.named_shape raises an error, except of an argument of the body"""

    @staticmethod
    def tracer_origin(x) -> Any:
        return ("hidden" if isinstance(x, jax.core.Tracer) else "constant"), None


class frames:
    """generated source is refused, and listings show the innermost line only"""

    @staticmethod
    def user_frames(eqn):
        told = re.fullmatch(r"(.*):(\d+)(?::(\d+))? \((.*)\)", source_info_util.summarize(eqn.source_info))
        if told is None:
            return []
        file, line, column, function = told.groups()
        return [(file, function, int(line), int(column or 0), 0, 0)]


class references:
    """bodies that make references (jax.new_ref) are refused"""

    @staticmethod
    def discharged(closed):
        return None
