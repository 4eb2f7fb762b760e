"""``psum``, ``pmax``, ``pmin`` and ``pbroadcast``: a local reduction, then one all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat.core.batch import kept_where
from xmap_compat.core.collectives import collective, reduced
from xmap_compat.core.device import (
    DeviceView,
    cast_data,
    gather_devices,
    sum_devices,
    times_elements,
)
from xmap_compat.core.parameters import Params, axis_names, check_source, positions
from xmap_compat.core.rules.groups import reduced_in_groups
from xmap_compat.core.specs import AxisNames
from xmap_compat.core.values import NamedValue, is_smooth, without_dims


def _reduction_dims(value, names, positions):
    unnamed = value.positional_dims()
    return sorted([*value.dims_of(names), *(unnamed[p] for p in positions)])


def _reduced(value, names, dims, data):
    return NamedValue(data, without_dims(value.dims, dims), value.names.difference(names))


def sum_over(
    view: DeviceView, value: NamedValue, names: AxisNames, positions: Sequence[int] = ()
) -> NamedValue:
    """``lax.psum``: a local sum, then one all-reduce of the result; along an axis that the operand
    does not vary over, its elements are counted.
    """
    present = view.present(value, names)
    dims = _reduction_dims(value, present, positions)
    data = _reduce_local(lax.reduce_sum, value.data, dims)
    data = sum_devices(view, data, view.mesh_axes_of(present))
    equal_along = (n for n in names if n not in present)
    data = times_elements(view, data, value.names, equal_along)
    return _reduced(value, names, dims, data)


def _reduce_local(reduce, data, dims):
    if not dims:
        return data
    return reduce(data, dims)


def _extremum_over(reduce: Callable, across: Callable):
    def translate(view, value, names, positions=()):
        present = view.present(value, names)
        dims = _reduction_dims(value, present, positions)
        mesh_axes = view.mesh_axes_of(present)

        def extremum(x):
            local = _reduce_local(reduce, x, dims)
            if not mesh_axes:
                return local
            return across(view, local, mesh_axes)

        if mesh_axes and is_smooth(value.data):
            extremum = _with_derivative(view, extremum, dims, mesh_axes)
        return _reduced(value, names, dims, extremum(value.data))

    return translate


def _with_derivative(
    view: DeviceView,
    extremum: Callable[[Any], Any],
    dims: Sequence[int],
    mesh_axes: tuple[Any, ...],
) -> Callable[[Any], Any]:
    """An extremum over devices with the derivative that JAX lacks: ties share it, over devices as
    within one.
    """
    fun = jax.custom_jvp(extremum)

    def total(x):
        return sum_devices(view, _reduce_local(lax.reduce_sum, x, dims), mesh_axes)

    @fun.defjvp
    def jvp(primals, tangents):
        (x,) = primals
        (tangent,) = tangents
        out = fun(x)
        everywhere = cast_data(view, lax.expand_dims(out, dims), mesh_axes)
        ties = (x == everywhere).astype(x.dtype)
        return out, total(tangent * ties) / total(ties)

    return fun


def _keeping_nan(across: Callable, reduce: Callable, nan_as: Callable[[Any], Any]) -> Callable:
    """An extremum over devices that is NaN where any value is, as within a device; XLA's all-reduce
    may drop NaN.

    Floats are compared as the integers of the same order, with NaN beyond all of them.  XLA cannot
    compare complex numbers between devices: they are gathered.
    """

    def extremum(view, x, mesh_axes):
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return reduce(gather_devices(view, lax.expand_dims(x, [0]), mesh_axes), (0,))
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return across(x, mesh_axes)
        if jnp.finfo(x.dtype).bits < 8:
            # No integers to compare it by; all its values are values of float32.
            return extremum(view, x.astype(np.float32), mesh_axes).astype(x.dtype)
        integer = np.dtype(f"int{8 * x.dtype.itemsize}")
        limits = jnp.iinfo(integer)
        magnitude = np.asarray(limits.max, integer)
        beyond = np.asarray(nan_as(limits), integer)
        bits = lax.bitcast_convert_type(x, integer)
        ordered = _where(bits < 0, bits ^ magnitude, bits)
        ordered = _where(x != x, lax.full_like(bits, beyond), ordered)
        ordered = across(ordered, mesh_axes)
        bits = _where(ordered < 0, ordered ^ magnitude, ordered)
        result = lax.bitcast_convert_type(bits, x.dtype)
        return _where(ordered == beyond, lax.full_like(result, np.nan), result)

    return extremum


def _where(which, yes, no):
    """``jnp.where`` without its ``jit``."""
    return lax.select_n(which, no, yes)


_max_of_devices = _keeping_nan(lax.pmax, lax.reduce_max, lambda info: info.max)
_min_of_devices = _keeping_nan(lax.pmin, lax.reduce_min, lambda info: info.min)
max_over = _extremum_over(lax.reduce_max, _max_of_devices)
min_over = _extremum_over(lax.reduce_min, _min_of_devices)


@collective("pbroadcast", reduced, check=check_source)
def _pbroadcast(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    """``lax.pbroadcast``: every element takes the value of the one at index ``source``."""
    names = axis_names(params)
    if not view.present(value, names):
        return value
    kept = kept_where(view, value, names, lambda index: index == params["source"])
    if value.data.dtype != np.bool_:
        return sum_over(view, kept, names)
    source = sum_over(view, kept.with_data(kept.data.astype(np.int8)), names)
    return source.with_data(source.data.astype(np.bool_))


@collective("psum", reduced, reduces=True, counts=True, in_groups=reduced_in_groups(lax.reduce_sum))
def _psum(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    return sum_over(view, value, axis_names(params), positions(params))


@collective("pmax", reduced, reduces=True, in_groups=reduced_in_groups(lax.reduce_max))
def _pmax(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    return max_over(view, value, axis_names(params), positions(params))


@collective("pmin", reduced, reduces=True, in_groups=reduced_in_groups(lax.reduce_min))
def _pmin(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    return min_over(view, value, axis_names(params), positions(params))
