"""``psum``, ``pmax``, ``pmin`` and ``pbroadcast``: a local reduction, then one all-reduce."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat.core.batch import apply_positional, index_of
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
from xmap_compat.core.values import NamedValue, is_smooth


def _reduction_dims(value, names, positions):
    unnamed = value.positional_dims()
    return sorted([*value.dims_of(names), *(unnamed[p] for p in positions)])


def _reduced(value, names, dims, data):
    kept = tuple(n for k, n in enumerate(value.dims) if k not in dims)
    return NamedValue(data, kept, value.names - frozenset(names))


def sum_over(
    view: DeviceView, value: NamedValue, names: AxisNames, positions: Sequence[int] = ()
) -> NamedValue:
    """``lax.psum``: a local sum, then one all-reduce of the result."""
    present = view.present(value, names)
    dims = _reduction_dims(value, present, positions)
    data = lax.reduce_sum(value.data, dims) if dims else value.data
    mesh_axes = view.mesh_axes_of(present)
    data = sum_devices(view, data, mesh_axes)
    data = times_elements(view, data, value.names, (n for n in names if n not in present))
    return _reduced(value, names, dims, data)


def _extremum_over(reduce: Callable, across: Callable):
    def translate(view, value, names, positions=()):
        present = view.present(value, names)
        dims = _reduction_dims(value, present, positions)
        mesh_axes = view.mesh_axes_of(present)
        local = lambda x: reduce(x, dims) if dims else x  # noqa: E731
        if not mesh_axes:
            data = local(value.data)
        else:
            data = _across_devices(
                view, lambda x: across(view, local(x), mesh_axes), value.data, dims, mesh_axes
            )
        return _reduced(value, names, dims, data)

    return translate


def _across_devices(
    view: DeviceView, extremum: Callable, x: Any, dims: Sequence[int], mesh_axes: tuple[Any, ...]
):
    """An extremum over devices with the derivative that JAX lacks: ties share it, over devices as
    within one.
    """
    if not is_smooth(x):
        return extremum(x)
    fun = jax.custom_jvp(extremum)

    @fun.defjvp
    def jvp(primals, tangents):
        (x,), (t,) = primals, tangents
        out = fun(x)
        ties = (x == cast_data(view, lax.expand_dims(out, dims), mesh_axes)).astype(x.dtype)
        shared = lambda v: sum_devices(view, lax.reduce_sum(v, dims) if dims else v, mesh_axes)  # noqa: E731
        return out, shared(t * ties) / shared(ties)

    return fun(x)


def _keeping_nan(across: Callable, reduce: Callable, nan_as: Callable[[Any], Any]) -> Callable:
    """An extremum over devices that is NaN where any value is, as within a device; XLA's all-reduce
    may drop NaN.

    Floats are compared as the integers of the same order, with NaN beyond all of them.  XLA cannot
    compare complex
    numbers between devices: they are gathered.
    """

    def extremum(view, x, mesh_axes):
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return reduce(gather_devices(view, lax.expand_dims(x, [0]), mesh_axes), (0,))
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return across(x, mesh_axes)
        if (
            jnp.finfo(x.dtype).bits < 8
        ):  # no integers to compare it by; all its values are values of float32
            return extremum(view, x.astype(np.float32), mesh_axes).astype(x.dtype)
        integer = np.dtype(f"int{8 * x.dtype.itemsize}")
        magnitude = np.asarray(jnp.iinfo(integer).max, integer)
        beyond = np.asarray(nan_as(jnp.iinfo(integer)), integer)
        bits = lax.bitcast_convert_type(x, integer)
        ordered = _where(bits < 0, bits ^ magnitude, bits)
        ordered = across(_where(x != x, lax.full_like(bits, beyond), ordered), mesh_axes)
        bits = _where(ordered < 0, ordered ^ magnitude, ordered)
        result = lax.bitcast_convert_type(bits, x.dtype)
        return _where(ordered == beyond, lax.full_like(result, np.nan), result)

    return extremum


def _where(which, yes, no):
    """``jnp.where`` without its ``jit``."""
    return lax.select_n(which, no, yes)


max_over = _extremum_over(
    lax.reduce_max, _keeping_nan(lax.pmax, lax.reduce_max, lambda info: info.max)
)
min_over = _extremum_over(
    lax.reduce_min, _keeping_nan(lax.pmin, lax.reduce_min, lambda info: info.min)
)


@collective("pbroadcast", reduced, check=check_source)
def _pbroadcast(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    """``lax.pbroadcast``: every element takes the value of the one at index ``source``."""
    names = axis_names(params)
    if not view.present(value, names):
        return value
    here = index_of(view, names)
    is_bool = value.data.dtype == np.bool_

    def mask(x, i):
        kept = jnp.where(i == params["source"], x, jnp.zeros_like(x))
        return kept.astype(np.int8) if is_bool else kept

    source = sum_over(view, apply_positional(view, mask, value, here), names)
    return dataclasses.replace(source, data=source.data.astype(np.bool_)) if is_bool else source


@collective("psum", reduced, reduces=True, counts=True, in_groups=reduced_in_groups(lax.reduce_sum))
def _psum(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    return sum_over(view, value, axis_names(params), positions(params))


@collective("pmax", reduced, reduces=True, in_groups=reduced_in_groups(lax.reduce_max))
def _pmax(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    return max_over(view, value, axis_names(params), positions(params))


@collective("pmin", reduced, reduces=True, in_groups=reduced_in_groups(lax.reduce_min))
def _pmin(view: DeviceView, params: Params, value: NamedValue) -> NamedValue:
    return min_over(view, value, axis_names(params), positions(params))
