"""Nested xmaps, written as maps of plain JAX."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from xmap_compat.core.specs import AxisSpec, is_spec, parse_specs, spec_names
from xmap_compat.tools.source.text import NotWritable, literal, prefix

if TYPE_CHECKING:
    from xmap_compat.tools.source.rewrite import Rewriting


def is_xmap(callee: Any) -> bool:
    """Whether a function is xmap: this package's, which imports these tools, or the one at legacy's place."""
    homes = (sys.modules.get(name) for name in ("xmap_compat.api", "xmap_compat.legacy.maps"))
    return callable(callee) and any(getattr(home, "xmap", None) is callee for home in homes)


def vmaps(module: Rewriting, function: str, in_axes: Any, out_axes: Any, axis_resources: Any = None) -> str:
    """An xmap inside another one, as a vmap for each of its axes: the first one outermost, each on its mesh axes."""
    if isinstance(in_axes, list) and not is_spec(in_axes):
        in_axes = tuple(in_axes)
    given, results = parse_specs("in_axes", in_axes), parse_specs("out_axes", out_axes)
    axes_inside = spec_names([given, results])
    for name in axes_inside:
        is_outer = name in module.names.order or name in module.names.local.values()
        if not isinstance(name, str) or (is_outer and name not in module.names.inner):
            raise NotWritable(f"the axis {name} of a nested call of xmap, which has the name of another: rename it")
    module.nested.append((in_axes, out_axes, axis_resources))
    if module.proving:
        return f"nested_xmap_{len(module.nested)}({function})"
    for k, name in reversed(list(enumerate(axes_inside))):
        at = lambda spec, k=k: literal(position_in(spec, axes_inside[k], axes_inside[:k]))  # noqa: E731
        places = f"in_axes={prefix(given, at)}, out_axes={prefix(results, at)}"
        mesh_axes, turns = module.names.inner.get(name, ((), 1))
        if turns > 1:
            function = f"{module.helper('in_loop')}({function}, {places}, turns={turns})"
        else:
            function = f"{module.alias('jax', jax)}.vmap({function}, {places}, axis_name={literal(name)})"
        if mesh_axes:
            function = f"{module.helper('on_devices')}({function}, axes={literal(mesh_axes)}, {places})"
    return function


def position_in(spec: AxisSpec, name: Any, outer: Sequence[Any]) -> int | None:
    """The dimension of an axis in an array, after the dimensions of the outer axes have been removed."""
    positions = spec.position_of()
    if name not in positions:
        return None
    return positions[name] - sum(positions[n] < positions[name] for n in outer if n in positions)
