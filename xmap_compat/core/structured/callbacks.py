"""Primitives that call Python: how often, and on which devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.batch import bind_named
from xmap_compat.core.device import cast_data, cast_to, gather_devices, laid_out_over
from xmap_compat.core.errors import LEGACY, as_set, check_from_outside, token
from xmap_compat.core.evaluate import Evaluator
from xmap_compat.core.rules.ordinary import bind_ordinary
from xmap_compat.core.values import NamedValue, union_of_names


def _pure_callback(ev: Evaluator, operands: Sequence[NamedValue], eqn: Any) -> list[NamedValue]:
    """Make one call for each element, as the body is written for one, unless the program allows
    more in a call.

    Old programs allow it by ``vectorized=True``.  JAX adds dimensions to those operands that vary
    over an axis.  NumPy aligns them correctly if all operands that vary have the same dimensions
    and no operand has a higher rank; else the results would depend on which axes have local
    dimensions.
    """
    method = eqn.params["vmap_method"] or "sequential"
    if method == "legacy_vectorized":
        varying = [v for v in operands if v.names]
        ranks = {v.dims.count(None) for v in varying}
        highest = max((v.dims.count(None) for v in operands), default=0)
        if ranks == {highest}:
            names = union_of_names(varying)
            operands = [laid_out_over(ev.view, v, names) if v.names else v for v in operands]
        else:
            method = "sequential"
    params = {**eqn.params, "sharding": None, "vmap_method": method}
    return bind_named(ev.view, eqn.primitive, operands, params)


def _io_callback(ev: Evaluator, operands: Sequence[NamedValue], eqn: Any) -> list[NamedValue]:
    """Make one call for each element of the axes that operands vary over; all elements of other
    axes share its result.

    All devices that hold copies call Python.  There only the first of them calls the function, and
    the others receive its results.  (JAX cannot map a ``lax.cond`` around the callback.)
    """
    view = ev.view
    names = union_of_names(operands)
    if ev.diverging:
        where = _jax.where_in_user_code(eqn)
        raise _callback_in_control_flow(ev.diverging, where, is_repeated=False)
    repeated = ev.iterating.difference(*(view.placements[n].loops for n in names))
    if repeated:
        looped = []
        for name, placement in view.placements.items():
            if not repeated.isdisjoint(placement.loops):
                looped.append(name)
        where = _jax.where_in_user_code(eqn)
        raise _callback_in_control_flow(looped, where, is_repeated=True)
    copies = _mesh_axes_of_copies(view, names)
    params = {**eqn.params, "sharding": None}
    if not copies or view.nested:
        return bind_named(view, eqn.primitive, operands, params)
    params["callback"] = functools.partial(
        _called_by_one, eqn.params["callback"], eqn.params["result_avals"]
    )
    is_first = NamedValue(lax.axis_index(copies) == 0, (), frozenset())
    varied = []
    for value in [cast_to(view, v, names) for v in (is_first, *operands)]:
        varied.append(value.with_data(cast_data(view, value.data, copies)))
    results = []
    for value in bind_named(view, eqn.primitive, varied, params):
        # Values with NaN and of all types arrive bit for bit.
        everywhere = gather_devices(view, lax.expand_dims(value.data, [0]), copies)
        results.append(value.with_data(everywhere[0]))
    return results


def _mesh_axes_of_copies(view, names):
    """The mesh axes along which devices have the same elements."""
    divided = view.mesh_axes_of(names)
    copies = []
    for axis in view.mesh_sizes:
        if axis not in divided and view.mesh_size(axis) > 1:
            copies.append(axis)
    return tuple(copies)


def _called_by_one(callback, result_types, is_first, *operands):
    """The results of a callback on the first device, and zeros on others."""
    if is_first:
        return callback(*operands)
    return [np.zeros(result.shape, result.dtype) for result in result_types]


_WITH_RESULTS = {"pure_callback": _pure_callback, "io_callback": _io_callback}
CALLBACKS = (*_WITH_RESULTS, "debug_callback", "debug_print", "check", "create_token", "after_all")


def call_python(
    ev: Evaluator, _: None, operands: Sequence[NamedValue], eqn: Any
) -> list[NamedValue]:
    """Call Python as often as each function promises, or refuse."""
    name = eqn.primitive.name
    where = _jax.where_in_user_code(eqn)
    # JAX would report it for elements that take another branch, too.
    if name == "check" and not eqn.params["debug"]:
        raise check_from_outside(ev.checker.fun, where)
    if name in ("create_token", "after_all"):
        raise token(f"The value at {where}")
    if any(type(effect).__name__.startswith("Ordered") for effect in eqn.effects):
        names = union_of_names(operands)
        if names:
            raise _ordered_callback(name, names, where)
        devices = math.prod(ev.view.mesh_sizes.values())
        if devices > 1:
            raise _ordered_effect(ev.checker.fun, devices)
    if name in _WITH_RESULTS:
        return _WITH_RESULTS[name](ev, operands, eqn)
    return bind_ordinary(ev.view, eqn, operands)


# ----------------------------------------------------------------------------- messages


def _callback_in_control_flow(
    axes: Iterable[Hashable], where: str, is_repeated: bool
) -> NotImplementedError:
    if is_repeated:
        return NotImplementedError(
            f"The io_callback at {where} does not vary over {as_set(axes)}, but is in a loop or "
            "branch that each iteration of the serial loop runs anew. Call it outside of that loop "
            "or branch"
        )
    return NotImplementedError(
        f"Not all elements of {as_set(axes)} reach the io_callback at {where}: they take different "
        "branches, or leave a loop earlier. Call it outside of these, and give it the predicate as "
        "an argument"
    )


def _ordered_callback(primitive: str, axes: Iterable[Hashable], where: str) -> ValueError:
    return ValueError(
        f"An argument of {primitive}(..., ordered=True) at {where} varies over {as_set(axes)}, but "
        "the elements of a named axis have no order. Leave out ordered=True"
        f"{LEGACY}Cannot `vmap` ordered IO callback"
    )


def _ordered_effect(fun: str, devices: int) -> NotImplementedError:
    return NotImplementedError(
        f"The xmapped function {fun} has a callback or print with ordered=True, which JAX runs on "
        f"one device, but its axis_resources compute it on {devices}. Write ordered=False, or call "
        "it without resources of a mesh"
    )
