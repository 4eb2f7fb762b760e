"""The attributes that JAX has only while a body is traced.

This module has those that the core itself needs; ``xmap_compat.vocabulary`` adds the functions that
JAX has removed.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from jax import core, lax

from xmap_compat import _jax
from xmap_compat.core.named_shape import named_shape
from xmap_compat.core.placement import enclosing_bodies
from xmap_compat.core.specs import AxisName


def _in_body() -> bool:
    return bool(enclosing_bodies())


def is_name(axis: Any) -> bool:
    """Whether an ``axis`` argument inside a body names an axis: any string, or any name in
    scope.
    """
    if not _in_body() or axis is None or isinstance(axis, (int, tuple, list)):
        return False
    if isinstance(axis, str):
        return True
    try:
        return any(axis in body.sizes for body in enclosing_bodies())
    except TypeError:
        return False


class _NamesOfType(Mapping):
    """A type's named shape in a body: programs can pass it on to other types, but cannot read
    it.
    """

    def __init__(self, aval: Any):
        self._aval = aval

    def _unknown(self, *name):
        raise _type_has_no_names(self._aval)

    __getitem__ = __iter__ = __len__ = __contains__ = __eq__ = __repr__ = _unknown


def _type_has_no_names(aval: Any) -> TypeError:
    return TypeError(
        f"x.aval.named_shape is not known inside an xmapped function: the type {aval.str_short()} "
        "does not tell which named axes a value varies over. Write x.named_shape, or "
        "xmap_compat.named_shape(x)"
    )


def _named_shape_of_type(aval: Any) -> Mapping[AxisName, int]:
    """``x.aval.named_shape``: empty outside of bodies, as in legacy; inside a body, a type does not
    know its names.
    """
    if _in_body():
        return _NamesOfType(aval)
    return {}


def _extremum_tangent(x, tangent, out, axes, axis_index_groups):
    """Ties share the tangent equally.  Integers among the axes are positional dimensions that the
    extremum lacks.
    """
    kept = lax.expand_dims(out, [a for a in axes if isinstance(a, int)])
    ties = (x == kept).astype(x.dtype)
    total = functools.partial(lax.psum, axis_name=axes, axis_index_groups=axis_index_groups)
    return total(tangent * ties) / total(ties)


def _collective_in_vmap(primitive: str, axes: Iterable[Hashable]) -> NotImplementedError:
    return NotImplementedError(
        f"{primitive} over {', '.join(map(repr, axes))} in a jax.vmap of the body cannot be "
        "computed: JAX has no right batching rule for it. Give the mapped dimension a name in "
        "in_axes of the xmap instead"
    )


restored = _jax.SharedPatches(
    _jax.replaced(core.Tracer, "named_shape", property(named_shape)),
    _jax.replaced(core.ShapedArray, "named_shape", property(_named_shape_of_type)),
    _jax.named_reductions(is_name),
    *_jax.collective_transposes(),
    *_jax.collective_batching(_collective_in_vmap),
    *_jax.extremum_gradients(_extremum_tangent, _in_body),
)
