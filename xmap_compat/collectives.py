"""The table of collectives: how each changes named shapes, and what it becomes on devices.

A rule has two halves.  ``names`` maps the named axes of the operand to those of the result; it is
all that the type check needs.  ``translate`` rewrites the collective for one device: the local part
of an axis is a dimension of the array, so its share is ordinary indexing; only what crosses devices
becomes a collective over mesh axes.

Family helpers come first, the rules in the middle, the table last.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import _jax, devices, errors, exchanges
from xmap_compat.axis_specs import AxisName
from xmap_compat.contraction import (
    Subscripts,
    bind_contraction,
    fresh_labels,
    left_to_check,
    output_order,
    summed,
)
from xmap_compat.named_values import (
    COTANGENT,
    Locality,
    NamedValue,
    apply_positional,
    bind_named,
    device_index,
    gather_devices,
    index_of,
    leading,
    merge_positional,
    move_positional,
    spread,
    sum_devices,
    vary_over,
    without,
)

Names = frozenset[AxisName]
Params = Mapping[str, Any]


class Rule(NamedTuple):
    """How one collective primitive is typed and translated.

    Attributes:
      names: ``(operand names, axes of the collective) -> result names``.
      translate: ``(locality, params, *operands) -> result``.
    """

    names: Callable[[Names, Names], Names]
    translate: Callable[..., NamedValue]


# ----------------------------------------------------------------------- parameters


def axis_names(params: Params) -> tuple[AxisName, ...]:
    """The named axes of a collective's parameters, without positional integers."""
    return tuple(a for a in _axes_param(params) if not _is_position(a))


def mentioned_names(params: Params) -> tuple[AxisName, ...]:
    """Named axes of an equation's parameters; empty for anything that is not a collective."""
    return axis_names(params) if "axes" in params or "axis_name" in params else ()


def _axes_param(params):
    axes = params["axes"] if "axes" in params else params["axis_name"]
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def _positions(params):
    return tuple(a for a in _axes_param(params) if _is_position(a))


def _is_position(axis):
    return isinstance(axis, (int, np.integer)) and not isinstance(axis, bool)


# ------------------------------------------------------------------- what they may hold


_WITH_POSITIONS = ("psum", "pmax", "pmin")  # they reduce positional dimensions too


def check_parameters(primitive: str, params: Params, size: int, where: str) -> None:
    """Raise if names or indices in a collective's parameters are no such, or do not fit ``size`` elements together."""
    if _positions(params) and primitive not in _WITH_POSITIONS:
        raise errors.integer_in_collective(primitive, _positions(params)[0], where)
    if primitive == "ppermute":
        _check_permutation(params["perm"], size, where)
    if primitive == "pbroadcast" and not 0 <= params["source"] < size:
        raise errors.source_out_of_range(params["source"], size, where)
    groups = params.get("axis_index_groups")
    if groups is not None:
        if sorted(itertools.chain.from_iterable(groups)) != list(range(size)):
            raise errors.groups_do_not_cover(primitive, groups, size, where)
        equal = primitive in _WITH_POSITIONS or len({len(group) for group in groups}) == 1
        if len(axis_names(params)) != 1 or not equal:
            raise errors.unsupported_groups(primitive, where)


def _check_permutation(perm, size, where):
    if not all(isinstance(pair, Sequence) and len(pair) == 2 and all(map(_is_position, pair)) for pair in perm):
        raise errors.permutation_of_other_things(perm, where)
    for kind, indices in (("source", [s for s, _ in perm]), ("destination", [d for _, d in perm])):
        for index in indices:
            if not 0 <= index < size:
                raise errors.permutation_index_out_of_range(index, size, where)
            if indices.count(index) > 1:
                raise errors.repeated_permutation_index(kind, index, where)


# ------------------------------------------------------------------- how names change


def _reduced(operand: Names, axes: Names) -> Names:
    return operand - axes


def _spread(operand: Names, axes: Names) -> Names:
    return operand | axes


# ------------------------------------------------------------------------ reductions


def _drop(value: NamedValue, names: Sequence[AxisName], data: Any, positions=()) -> NamedValue:
    gone = {value.positional_dims()[p] for p in positions}
    dims = tuple(n for k, n in enumerate(value.dims) if k not in gone)
    return NamedValue(data, without(dims, names), value.names - frozenset(names))


def _reduction_dims(value, names, positions):
    own = value.positional_dims()
    return sorted([*value.dims_of(names), *(own[p] for p in positions)])


def sum_over(loc: Locality, value: NamedValue, names: Sequence[AxisName], positions: Sequence[int] = ()) -> NamedValue:
    """``lax.psum``: a local sum, then one all-reduce of what is left."""
    present = loc.present(value, names)
    dims = _reduction_dims(value, present, positions)
    data = lax.reduce_sum(value.data, dims) if dims else value.data
    mesh_axes = loc.mesh_axes_of(present)
    data = sum_devices(loc, data, mesh_axes)
    repeats = loc.total_size(n for n in names if n not in present)
    if repeats != 1 and COTANGENT not in value.names:
        data = data * np.asarray(repeats).astype(data.dtype)
    return _drop(value, names, data, positions)


def _extremum_over(reduce: Callable, across: Callable):
    def translate(loc, value, names, positions=()):
        present = loc.present(value, names)
        dims = _reduction_dims(value, present, positions)
        mesh_axes = loc.mesh_axes_of(present)
        local = lambda x: reduce(x, dims) if dims else x  # noqa: E731
        if not mesh_axes:
            data = local(value.data)
        else:
            data = _across_devices(loc, lambda x: across(loc, local(x), mesh_axes), value.data, dims, mesh_axes)
        return _drop(value, names, data, positions)

    return translate


def _across_devices(loc: Locality, extremum: Callable, x: Any, dims: Sequence[int], mesh_axes: tuple[Any, ...]):
    """JAX has no derivative for pmax and pmin: ties share it, over devices as within one."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return extremum(x)
    if loc.typed and set(mesh_axes) <= set(loc.mesh_axes):
        return extremum_tangent_p.bind(extremum(lax.stop_gradient(x)), x, reduced=tuple(dims), mesh_axes=mesh_axes)

    # An xmap around this one, or the user's vmap, has yet to translate what is made of axes outside.
    @jax.custom_jvp
    def fun(x):
        return extremum(x)

    @fun.defjvp
    def jvp(primals, tangents):
        (x,), (t,) = primals, tangents
        out = fun(x)
        across = lambda x: spread(loc, x, mesh_axes)  # noqa: E731
        return out, _tangent_of_ties(x, t, out, dims, across, lambda v: sum_devices(loc, v, mesh_axes))

    return fun(x)


def _tangent_of_ties(x, t, out, dims, across: Callable, total: Callable):
    """The tangent of an extremum over ``dims`` and devices: that of all elements which are equal to it, on average."""
    ties = (x == across(lax.expand_dims(out, dims))).astype(x.dtype)
    shared = lambda v: total(lax.reduce_sum(v, dims) if dims else v)  # noqa: E731
    return shared(t * ties) / shared(ties)


def _tangent_on_mesh(out, x, t, *, reduced, mesh_axes):
    across = lambda x: lax.pcast(x, mesh_axes, to="varying")  # noqa: E731
    return _tangent_of_ties(x, t, out, reduced, across, lambda v: lax.psum(v, mesh_axes))


# A primitive and no custom_jvp, whose rule JAX (to 0.12) cannot map with ``vmap(spmd_axis_name=...)``.
extremum_tangent_p = _jax.define_attached_tangent("extremum_tangent", _tangent_on_mesh)


def _keeping_nan(across: Callable, reduce: Callable, nan_as: Callable[[Any], Any]) -> Callable:
    """An extremum over devices that is NaN where any value is, as within a device; XLA's all-reduce may drop NaN.

    Floats are compared as the integers of the same order, with NaN beyond all of them.  Complex numbers XLA does not
    compare between devices at all: they are gathered.
    """

    def extremum(loc, x, mesh_axes):
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return reduce(gather_devices(loc, x, mesh_axes), tuple(range(len(mesh_axes))))
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return across(x, mesh_axes)
        integer = np.dtype(f"int{8 * x.dtype.itemsize}")
        magnitude = np.asarray(jnp.iinfo(integer).max, integer)
        beyond = np.asarray(nan_as(jnp.iinfo(integer)), integer)
        bits = lax.bitcast_convert_type(x, integer)
        ordered = _where(bits < 0, bits ^ magnitude, bits)
        ordered = across(_where(x != x, lax.full_like(bits, beyond), ordered), mesh_axes)
        bits = _where(ordered < 0, ordered ^ magnitude, ordered)
        found = lax.bitcast_convert_type(bits, x.dtype)
        return _where(ordered == beyond, lax.full_like(found, np.nan), found)

    return extremum


def _where(which, yes, no):
    """``jnp.where`` without its ``jit``, where JAX (to 0.12) mistypes constants of ``vmap(spmd_axis_name=...)``."""
    return lax.select_n(which, no, yes)


max_over = _extremum_over(lax.reduce_max, _keeping_nan(lax.pmax, lax.reduce_max, lambda info: info.max))
min_over = _extremum_over(lax.reduce_min, _keeping_nan(lax.pmin, lax.reduce_min, lambda info: info.min))


def _reduction_rule(over: Callable, positional_reduce: Callable, neutral: Callable[[Any], Any]) -> Rule:
    """The rule of a reduction; ``neutral(own value)`` is what changes nothing if it is reduced as well."""

    def translate(loc, params, value):
        if params.get("axis_index_groups") is not None:
            return _reduce_in_groups(loc, params, value, positional_reduce, neutral)
        return over(loc, value, axis_names(params), _positions(params))

    return Rule(_reduced, translate)


# ------------------------------------------------------------------- indices and gathers


def _axis_index(loc: Locality, params: Params) -> NamedValue:
    return index_of(loc, axis_names(params))


def gather_over(loc: Locality, value: NamedValue, names: Sequence[AxisName]) -> NamedValue:
    """``lax.all_gather`` into a new first positional dimension: one gather for all mesh axes."""
    names = list(names)
    present = loc.present(value, names)
    mesh, local = loc.parts_by_kind(present)
    data = leading(value, [part.name for part in local])
    if mesh:
        data = gather_devices(loc, data, [part.name for part in mesh])
    have, want = [*mesh, *local], loc.parts(present)
    order = [have.index(part) for part in want]
    data = lax.transpose(data, (*order, *range(len(order), data.ndim))) if order != sorted(order) else data
    tail = data.shape[len(have) :]
    full = [loc.place(n).size for n in names]
    data = lax.reshape(data, (*(size if n in present else 1 for n, size in zip(names, full)), *tail))
    data = jnp.broadcast_to(data, (*full, *tail)) if len(present) < len(names) else data
    data = lax.reshape(data, (math.prod(full), *tail))
    return NamedValue(data, (None, *without(value.dims, names)), value.names - frozenset(names))


def _all_gather(loc: Locality, params: Params, value: NamedValue) -> NamedValue:
    at, tiled = params["all_gather_dimension"], params["tiled"]
    if params.get("axis_index_groups") is not None:
        gathered, _ = _group_members(loc, value, params)
    else:
        gathered = gather_over(loc, value, axis_names(params))
    gathered = move_positional(gathered, 0, at)
    return merge_positional(gathered, at) if tiled else gathered


# --------------------------------------------------------------- scatters and exchanges


def _reduce_scatter(loc: Locality, params: Params, value: NamedValue) -> NamedValue:
    if params.get("axis_index_groups") is not None:
        return _grouped_reduce_scatter(loc, params, value)
    return exchanges.sum_scatter(loc, value, axis_names(params), params["scatter_dimension"], params["tiled"])


def _all_to_all(loc: Locality, params: Params, value: NamedValue) -> NamedValue:
    if params.get("axis_index_groups") is not None:
        return _grouped_all_to_all(loc, params, value)
    return exchanges.all_to_all(loc, value, axis_names(params), params["split_axis"], params["concat_axis"])


def _ppermute(loc: Locality, params: Params, value: NamedValue) -> NamedValue:
    return exchanges.permute(loc, value, axis_names(params), params["perm"])


def _pbroadcast(loc: Locality, params: Params, value: NamedValue) -> NamedValue:
    """``lax.pbroadcast``: every element takes the value of the one at index ``source``."""
    (name,) = axis_names(params)
    if name not in value.names and loc.is_own(name):
        return value
    here = index_of(loc, (name,))
    is_bool = value.data.dtype == np.bool_

    def mask(x, i):
        kept = jnp.where(i == params["source"], x, jnp.zeros_like(x))
        return kept.astype(np.int8) if is_bool else kept

    source = sum_over(loc, apply_positional(loc, mask, value, here), (name,))
    return dataclasses.replace(source, data=source.data.astype(np.bool_)) if is_bool else source


# ----------------------------------------------------------------- axis_index_groups


def _group_members(loc: Locality, value: NamedValue, params: Params):
    """The elements of each element's group in a new first positional dimension, and its place in the group."""
    names, groups = axis_names(params), params["axis_index_groups"]
    table = np.zeros((loc.place(names[0]).size, len(groups[0])), np.int32)
    ranks = np.zeros(len(table), np.int32)
    for group in groups:
        for rank, member in enumerate(group):
            table[member] = group
            ranks[member] = rank
    everything = gather_over(loc, value, names)
    here = index_of(loc, names)
    members = apply_positional(loc, lambda g, i: g[jnp.asarray(table)[i]], everything, here)
    return members, apply_positional(loc, lambda i: jnp.asarray(ranks)[i], here)


def _reduce_in_groups(loc, params, value, reduce, neutral):
    """A reduction within groups, which may differ in size: of everything gathered, the members of one's group."""
    names, groups = axis_names(params), params["axis_index_groups"]
    size = loc.place(names[0]).size
    together = np.zeros((size, size), bool)
    for group in groups:
        together[np.ix_(group, group)] = True

    def reduce_members(everything, index):
        members = jnp.asarray(together)[index].reshape(size, *(1,) * (everything.ndim - 1))
        return reduce(jnp.where(members, everything, neutral(everything[index])), (0,))

    return apply_positional(loc, reduce_members, gather_over(loc, value, names), index_of(loc, names))


def _grouped_reduce_scatter(loc, params, value):
    members, rank = _group_members(loc, value, params)
    at, tiled = params["scatter_dimension"], params["tiled"]
    count = len(params["axis_index_groups"][0])

    def scatter(group, r):
        summed = lax.reduce_sum(group, (0,))
        chunk = lax.dynamic_slice_in_dim(summed, r * (summed.shape[at] // count), summed.shape[at] // count, at)
        return chunk if tiled else lax.squeeze(chunk, (at,))

    return apply_positional(loc, scatter, members, rank)


def _grouped_all_to_all(loc, params, value):
    members, rank = _group_members(loc, value, params)
    split, concat = params["split_axis"], params["concat_axis"]
    count = len(params["axis_index_groups"][0])

    def trade(group, r):
        width = group.shape[1 + split] // count
        chunk = lax.dynamic_slice_in_dim(group, r * width, width, 1 + split)
        return jnp.concatenate(list(chunk), axis=concat)

    return apply_positional(loc, trade, members, rank)


# --------------------------------------------------------------------- contraction


def contract(loc: Locality, params: Params, *operands: NamedValue) -> NamedValue:
    """``pdot``: one contraction of what the device holds, then one all-reduce of the result."""
    own = loc.own(params["axes"])
    names = frozenset().union(*(v.names for v in operands))
    positional = params["subscripts"]
    local = dict(zip(loc.local_names(names), fresh_labels(positional.inputs)))
    inputs = [_labels(v, labels, local) for v, labels in zip(operands, positional.inputs)]
    order = output_order(inputs, positional.output, [local[n] for n in local if n not in own])
    data = bind_contraction(
        *(vary_over(loc, v, names).data for v in operands),
        axes=[n for n in params["axes"] if not loc.is_own(n)],
        subscripts=Subscripts(tuple(inputs), order),
        # From inside of a shard_map nobody outside can be asked.
        mentions=None if loc.typed else left_to_check(params["mentions"], loc.placements),
        **{option: params[option] for option in ("precision", "preferred_element_type", "optimize")},
    )
    mesh_axes = loc.mesh_axes_of(n for n in params["axes"] if n in own & names)
    data = summed(lambda x: sum_devices(loc, x, mesh_axes), data) if mesh_axes else data
    repeats = loc.total_size(own - names)
    if repeats != 1 and COTANGENT not in names:
        data = data * np.asarray(repeats).astype(data.dtype)
    dims = {label: name for name, label in local.items()}
    return NamedValue(data, tuple(map(dims.get, order)), names - own)


def _labels(value, labels, local):
    """The labels of all dimensions: of positional ones as given, of local parts of axes those of the axes."""
    given = iter(labels)
    return tuple(next(given) if name is None else local[name] for name in value.dims)


# ---------------------------------------------------------- devices of a nested xmap


def _over_devices(primitive: Any, translate: Callable) -> Callable:
    """The four primitives of ``devices``: translated by the outermost xmap, passed on by those between."""

    def rule(loc: Locality, params: Params, value: NamedValue) -> NamedValue:
        if not all(loc.is_own(axis) for axis in params["axes"]):
            return bind_named(loc, primitive, [value], params)[0]
        return translate(loc, value, params["axes"])

    return rule


def _take_own(loc: Locality, value: NamedValue, axes: Sequence[AxisName]) -> NamedValue:
    """Each device takes its element of the first positional dimension."""
    value = vary_over(loc, value, axes)
    at = value.positional_dims()[0]
    index = device_index(loc, [m for axis in axes for m in loc.place(axis).mesh_axes])
    data = lax.dynamic_index_in_dim(value.data, index, at, keepdims=False)
    return NamedValue(data, (*value.dims[:at], *value.dims[at + 1 :]), value.names)


# --------------------------------------------------------------------------- table

RULES: dict[str, Rule] = {
    "psum": _reduction_rule(sum_over, lax.reduce_sum, jnp.zeros_like),
    # Every type has a largest value with itself, though not an infinity, as some of 8 bits.
    "pmax": _reduction_rule(max_over, lax.reduce_max, lambda own: own),
    "pmin": _reduction_rule(min_over, lax.reduce_min, lambda own: own),
    "axis_index": Rule(_spread, _axis_index),
    "all_gather": Rule(_reduced, _all_gather),
    "reduce_scatter": Rule(_spread, _reduce_scatter),
    "all_to_all": Rule(_spread, _all_to_all),
    "ppermute": Rule(_spread, _ppermute),
    "pbroadcast": Rule(_reduced, _pbroadcast),
    "pdot": Rule(_reduced, contract),
    "device_vary": Rule(_spread, _over_devices(devices.vary_p, vary_over)),
    "device_sum": Rule(_reduced, _over_devices(devices.sum_p, sum_over)),
    "device_gather": Rule(_reduced, _over_devices(devices.gather_p, gather_over)),
    "device_take": Rule(_spread, _over_devices(devices.take_p, _take_own)),
}


def result_names(primitive: str, params: Params, operands: Sequence[Names], own: Names) -> Names:
    """The named axes of a collective's result, from those of its operands."""
    axes = frozenset(axis_names(params)) & own
    grouped = params.get("axis_index_groups") is not None
    union = frozenset(itertools.chain.from_iterable(operands))
    return _spread(union, axes) if grouped else RULES[primitive].names(union, axes)


def collectives_in(jaxpr: Any) -> frozenset[AxisName]:
    """Every axis name that some collective inside a jaxpr mentions."""
    body, _ = _jax.open_jaxpr(jaxpr)
    known = _COLLECTIVES_IN.get(body)
    if known is None:
        known = _COLLECTIVES_IN[body] = frozenset().union(*map(collectives_of, body.eqns))
    return known


def collectives_of(eqn: Any) -> frozenset[AxisName]:
    """Every axis name that one equation mentions, if it is a collective or some collective is inside of it."""
    own = mentioned_names(eqn.params) if eqn.primitive.name in RULES else ()
    return _jax.axes_of_effects(eqn).union(own, *map(collectives_in, _jax.subjaxprs(eqn.params)))


def names_used(eqn: Any) -> frozenset[AxisName]:
    """Every axis name that an equation mentions, also by a primitive that is in no table."""
    return collectives_of(eqn).union(mentioned_names(eqn.params))


# One jaxpr may stand in many equations, which may stand in many jaxprs.
_COLLECTIVES_IN: weakref.WeakKeyDictionary[Any, frozenset[AxisName]] = weakref.WeakKeyDictionary()


def mentions_any(jaxpr: Any, names: Iterable[AxisName]) -> bool:
    """Whether some collective inside a jaxpr is over one of the names."""
    return not collectives_in(jaxpr).isdisjoint(names)
