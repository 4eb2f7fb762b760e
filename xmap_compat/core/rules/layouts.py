"""Operations that XLA cannot partition over the compiler's axes in every layout: here they get a layout that it can.

XLA (to jax 0.12) aborts the process on gathers and scatters that are split in two ways, along an indexed dimension and
another one for example, gives wrong numbers for scatters along a dimension that some of the mesh axes split, and for
gradients of convolutions along split dimensions, and fails on FFTs (on CPU).  Constraints keep dimensions whole; JAX
transposes and maps them, so that they hold in derivatives too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from xmap_compat import _jax
from xmap_compat.core.device import DeviceView
from xmap_compat.core.values import NamedValue, is_float0

_Free = Collection[int]


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Which positional dimensions of an operation the compiler may split.

    Attributes:
      operands: the dimensions of each operand.
      results: the dimensions of each result.
      named: whether it may split dimensions of named axes.
    """

    operands: Sequence[_Free]
    results: Sequence[_Free]
    named: bool = False


def layout_of(
    view: DeviceView, primitive: Any, params: Mapping[str, Any], operands: Sequence[NamedValue]
) -> _Layout | None:
    """The layout that a primitive needs where XLA partitions it, if it fails in others."""
    rule = _LAYOUTS.get(primitive.name) if view.compiler else None
    most = 0 if primitive.name in _BY_ONE_AXIS else 1  # mesh axes that may partition it in any layout
    return None if rule is None or _jax.partitioned_axes(view.compiler) <= most else rule(params, operands)


def laid_out(view: DeviceView, values: Sequence[NamedValue], free: Sequence[_Free], named: bool) -> list[NamedValue]:
    """Values whose dimensions, but for the free ones, the compiler leaves whole."""
    return [_laid_out(view, v, dims, named) for v, dims in zip(values, free, strict=True)]


def _laid_out(view, value, free, named):
    if not value.dims or is_float0(value):
        return value
    unnamed = value.positional_dims()
    split = {unnamed[d] for d in free}
    free_dims = [k in split if name is None else named for k, name in enumerate(value.dims)]
    if all(free_dims):
        return value
    entries = [PartitionSpec.UNCONSTRAINED if free else None for free in free_dims]
    return dataclasses.replace(value, data=_jax.constrained(value.data, entries, view.compiler))


# ---------------------------------------------------------------------------- layouts


def _shapes(operands):
    return [v.positional_shape() for v in operands]


def _equal(sizes, others):
    return [d for d, (size, other) in enumerate(zip(sizes, others, strict=True)) if size == other]


def _windows(ndim, gone):
    return [d for d in range(ndim) if d not in gone]


def _gather(params, operands):
    numbers, (operand, _) = params["dimension_numbers"], _shapes(operands)
    windows = _windows(len(operand), (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims))
    whole = _equal(params["slice_sizes"], operand)
    pairs = [(d, at) for d, at in zip(windows, numbers.offset_dims, strict=True) if d in whole]
    return _Layout([[d for d, _ in pairs], ()], [[at for _, at in pairs]])


def _scatter(params, operands):
    numbers, (operand, _, updates) = params["dimension_numbers"], _shapes(operands)
    windows = _windows(len(operand), (*numbers.inserted_window_dims, *numbers.operand_batching_dims))
    pairs = [p for p in zip(windows, numbers.update_window_dims, strict=True) if operand[p[0]] == updates[p[1]]]
    free = [d for d, _ in pairs]
    return _Layout([free, (), [at for _, at in pairs]], [free])


def _dynamic_slice(params, operands):
    free = _equal(params["slice_sizes"], _shapes(operands)[0])
    return _Layout([free, *[()] * (len(operands) - 1)], [free])


def _dynamic_update_slice(params, operands):
    free = _equal(*_shapes(operands[:2]))
    return _Layout([free, free, *[()] * (len(operands) - 2)], [free])


def _others(operands, dim):
    return [d for d in range(operands[0].dims.count(None)) if d != dim]


def _sort(params, operands):
    free = _others(operands, params["dimension"])
    return _Layout([free] * len(operands), [free] * len(operands), named=True)


def _top_k(params, operands):
    free = _others(operands, params["axis"])
    return _Layout([free], [free, free], named=True)


def _convolution(params, operands):
    lhs, rhs = operands
    shared = {name for name in lhs.dims if name is not None} & set(rhs.dims)
    if shared or params["feature_group_count"] > 1 or params["batch_group_count"] > 1:
        return _Layout([(), ()], [()])
    numbers = params["dimension_numbers"]
    return _Layout([numbers.lhs_spec[:2], numbers.rhs_spec[:2]], [numbers.out_spec[:2]], named=True)


_LAYOUTS: Mapping[str, Callable[[Mapping[str, Any], Sequence[NamedValue]], _Layout]] = {
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub"), _scatter),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "sort": _sort,
    "top_k": _top_k,
    "conv_general_dilated": _convolution,
    "fft": lambda params, operands: _Layout([()], [()]),
}

# Primitives that fail where even one axis partitions them.
_BY_ONE_AXIS = ("conv_general_dilated", "fft")
