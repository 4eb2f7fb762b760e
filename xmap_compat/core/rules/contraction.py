"""The primitive behind ``pdot`` and ``einsum``: a sum of products over positional dimensions and
named axes at once.

Positional dimensions have labels, as in an einsum.  Named axes need none: an operand varies over an
axis or not.
Any number of operands is contracted at once: along one path, which is found where the shapes on a
device are known, and with one sum over devices.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum
from jax import lax

from xmap_compat import _jax
from xmap_compat.core import errors
from xmap_compat.core.collectives import collective, reduced
from xmap_compat.core.device import DeviceView, cast_to, sum_devices, times_elements
from xmap_compat.core.parameters import Params
from xmap_compat.core.values import NamedValue

_Labels = tuple[int, ...]


class Subscripts(NamedTuple):
    """Labels of positional dimensions: equal labels are matched, and those that the output lacks
    are summed.

    Attributes:
      inputs: for each operand its labels, each once.
      output: the labels of the result; each is a label of some operand.
    """

    inputs: tuple[_Labels, ...]
    output: _Labels

    def __repr__(self) -> str:
        *inputs, output = (
            "".join(map(opt_einsum.get_symbol, labels)) for labels in (*self.inputs, self.output)
        )
        return f"{','.join(inputs)}->{output}"


@dataclasses.dataclass(frozen=True)
class Skipped:
    """For the type check of a brace einsum: axes that an operand skips while another one mentions
    them.

    Attributes:
      spec: what the user wrote.
      operands: how to call each operand.
      skipped: for each operand, ``(axis that it must not vary over, the operand that mentions
        it)``.
    """

    spec: str
    operands: tuple[str, ...]
    skipped: tuple[tuple[tuple[Hashable, str], ...], ...]


def bind_contraction(
    *operands: Any,
    axes: Sequence[Hashable],
    subscripts: Subscripts,
    mentions: Skipped | None = None,
    **options: Any,
) -> Any:
    """The sum of the operands' products; an ordinary einsum if no named axis is left to sum over or
    to check.

    Args:
      operands: two arrays or more.
      axes: named axes to sum over; those of the user's own ``shard_map`` are summed at once, as JAX
        knows them.
      options: ``precision``, ``preferred_element_type`` and ``optimize`` as in ``jnp.einsum``, all
        hashable.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    for name in manual if mentions is not None else ():
        mentions = _without_axis(mentions, name, [name in _jax.varying_axes(x) for x in operands])
    named = tuple(a for a in axes if a not in manual)
    if named or mentions is not None:
        out = _contraction_p.bind(
            *operands, axes=named, subscripts=subscripts, mentions=mentions, **options
        )
    else:
        out = _contract_arrays(*operands, subscripts=subscripts, **options)
    mesh_axes = tuple(a for a in axes if a in manual)
    return summed(lambda x: lax.psum(x, mesh_axes), out) if mesh_axes else out


def summed(total: Callable[[Any], Any], x: Any) -> Any:
    """A sum; for booleans, whether one is true."""
    return total(x.astype(np.int32)).astype(bool) if x.dtype == np.bool_ else total(x)


def sum_dims(x: Any, dims: Sequence[int]) -> Any:
    """A sum over positional dimensions, with the types that a dot would give it."""
    return summed(lambda x: lax.reduce_sum(x, dims), x) if dims else x


def accumulation_type(dtype: Any, preferred_element_type: Any) -> np.dtype | None:
    """The type to add products in: no less precise than theirs, as it depends on placements how
    often a sum rounds.
    """
    return (
        None
        if preferred_element_type is None
        else np.dtype(jnp.promote_types(dtype, preferred_element_type))
    )


def _fresh_labels(inputs: Sequence[_Labels]) -> Iterator[int]:
    """Labels that the operands do not have yet."""
    return itertools.count(1 + max(itertools.chain.from_iterable(inputs), default=-1))


def _output_order(inputs: Sequence[_Labels], output: _Labels, more: Sequence[int]) -> _Labels:
    """Labels of a result with those of ``output``, in this order, and ``more``, where a dot leaves
    them.
    """
    kept = (*more, *output)
    if len(inputs) != 2:
        return tuple(c for c in kept if any(c in labels for labels in inputs))
    x, y = (_without(labels, _private_labels(inputs, k, kept)) for k, labels in enumerate(inputs))
    _, natural = _dot_numbers(x, y, kept)
    ordered = iter(output)
    return tuple(c if c in more else next(ordered) for c in natural)


def _contract_arrays(*operands, subscripts, precision, preferred_element_type, optimize):
    operands, subscripts = _sum_private(operands, subscripts, preferred_element_type)
    options = {"precision": precision, "preferred_element_type": preferred_element_type}
    if len(operands) == 2:
        return _dot(*operands, subscripts, options)
    labelled = itertools.chain.from_iterable(zip(operands, map(list, subscripts.inputs)))
    # A copy, as an optimizer may have a state, which is for one contraction.
    return jnp.einsum(
        *labelled, list(subscripts.output), optimize=copy.deepcopy(optimize), **options
    )


def _sum_private(operands, subscripts, dtype):
    """Sum dimensions that only one operand has, without a dot, in no less precision than a dot."""
    inputs, output = subscripts
    private = [_private_labels(inputs, k, output) for k in range(len(inputs))]
    if not any(private):
        return operands, subscripts
    if dtype is not None:
        operands = [x.astype(jnp.promote_types(x.dtype, dtype)) for x in operands]
    operands = [
        sum_dims(x, list(map(labels.index, gone)))
        for x, labels, gone in zip(operands, inputs, private)
    ]
    return operands, Subscripts(tuple(map(_without, inputs, private)), output)


def _dot(x, y, subscripts, options):
    (left, right), output = subscripts
    numbers, natural = _dot_numbers(left, right, output)
    out = lax.dot_general(x, y, numbers, **options)
    return out if natural == output else lax.transpose(out, list(map(natural.index, output)))


def _dot_numbers(x, y, kept):
    """Dimension numbers of the dot of two labelled arrays, and the labels of its result."""
    shared = [c for c in x if c in y]
    batch = [c for c in kept if c in shared]
    summed = [c for c in shared if c not in kept]
    numbers = tuple(
        tuple(tuple(map(labels.index, group)) for labels in (x, y)) for group in (summed, batch)
    )
    return numbers, (*batch, *(c for c in (*x, *y) if c not in shared))


def _private_labels(inputs, index, kept):
    """Labels of one operand that are summed and that no other operand has."""
    others = {
        *kept,
        *itertools.chain.from_iterable(labels for k, labels in enumerate(inputs) if k != index),
    }
    return [c for c in inputs[index] if c not in others]


def _without(labels, gone):
    return tuple(c for c in labels if c not in gone)


def _abstract_eval(*operands, axes, mentions, **params):
    out = jax.eval_shape(lambda *xs: _contract_arrays(*xs, **params), *operands)
    return out.shape, out.dtype


def _cotangent(
    ct, index, operands, *, subscripts, preferred_element_type, optimize, axes, mentions, precision
):
    """One operand's cotangent: the others times that of the result; named axes are not summed (as
    in legacy).
    """
    labels_of_x, x = subscripts.inputs[index], operands[index]
    terms = _replaced(subscripts.inputs, index, subscripts.output)
    kept = tuple(c for c in labels_of_x if any(c in labels for labels in terms))
    out = _contract_arrays(
        *_replaced(operands, index, ct),
        subscripts=Subscripts(terms, kept),
        precision=precision,
        preferred_element_type=preferred_element_type,
        optimize=optimize if isinstance(optimize, str) else "auto",
    )
    return lax.broadcast_in_dim(out.astype(x.dtype), x.shape, tuple(map(labels_of_x.index, kept)))


def _replaced(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


def _batch(operands, dims, *, name, axes, subscripts, mentions, **options):
    """Under a vmap: the mapped dimension is contracted if the vmap binds one of the axes, else it
    is kept.
    """
    label = next(_fresh_labels(subscripts.inputs))
    inputs = tuple(
        labels if d is None else (*labels[:d], label, *labels[d:])
        for labels, d in zip(subscripts.inputs, dims)
    )
    options["mentions"] = _without_axis(mentions, name, [d is not None for d in dims])
    if name in axes:
        rest = tuple(a for a in axes if a != name)
        out = bind_contraction(
            *operands, axes=rest, subscripts=Subscripts(inputs, subscripts.output), **options
        )
        return out * np.asarray(lax.axis_size(name)).astype(
            out.dtype
        ) if inputs == subscripts.inputs else out, None
    order = _output_order(inputs, subscripts.output, [label])
    out = bind_contraction(*operands, axes=axes, subscripts=Subscripts(inputs, order), **options)
    return out, order.index(label) if label in order else None


def _without_axis(mentions, name, varies):
    """The mentions left to check once it is known which operands vary over an axis."""
    if mentions is None:
        return None
    for operand, skipped, operand_varies in zip(mentions.operands, mentions.skipped, varies):
        for axis, by in skipped:
            if axis == name and operand_varies:
                raise errors.einsum_skipped_axis(mentions.spec, axis, by, operand)
    return _left_to_check(mentions, {name})


def _left_to_check(mentions: Skipped | None, known: Container[Hashable]) -> Skipped | None:
    """The mentions left to check when some axes have been checked."""
    if mentions is None:
        return None
    left = tuple(
        tuple(pair for pair in skipped if pair[0] not in known) for skipped in mentions.skipped
    )
    return dataclasses.replace(mentions, skipped=left) if any(left) else None


_contraction_p = _jax.define_named_primitive(
    "pdot", abstract_eval=_abstract_eval, bind=bind_contraction, cotangent=_cotangent, batch=_batch
)


@collective("pdot", reduced, joint=True, counts=True)
def _contract(view: DeviceView, params: Params, *operands: NamedValue) -> NamedValue:
    """``pdot``: one contraction of the device's data, then one all-reduce of the result."""
    bound = view.bound(params["axes"])
    names = frozenset().union(*(v.names for v in operands))
    positional = params["subscripts"]
    local = dict(zip(view.local_names(names), _fresh_labels(positional.inputs)))
    inputs = [_labels(v, labels, local) for v, labels in zip(operands, positional.inputs)]
    order = _output_order(inputs, positional.output, [local[n] for n in local if n not in bound])
    data = bind_contraction(
        *(cast_to(view, v, names).data for v in operands),
        axes=[n for n in params["axes"] if not view.is_bound(n)],
        subscripts=Subscripts(tuple(inputs), order),
        # Inside a shard_map, names bound outside of it cannot be checked.
        mentions=None if view.typed else _left_to_check(params["mentions"], view.placements),
        **{
            option: params[option] for option in ("precision", "preferred_element_type", "optimize")
        },
    )
    mesh_axes = view.mesh_axes_of(n for n in params["axes"] if n in bound & names)
    data = summed(lambda x: sum_devices(view, x, mesh_axes), data) if mesh_axes else data
    data = times_elements(view, data, names, bound - names)
    dims = {label: name for name, label in local.items()}
    return NamedValue(data, tuple(map(dims.get, order)), names - bound)


def _labels(value, labels, local):
    """The labels of all dimensions: ``labels`` for positional dimensions, those of ``local`` for
    named ones.
    """
    positional = iter(labels)
    return tuple(next(positional) if name is None else local[name] for name in value.dims)


def canonical_precision(precision: Any) -> Any:
    """``None``, a ``lax.Precision``, or a pair of them, from any spelling that ``dot_general``
    takes.
    """
    if isinstance(precision, (tuple, list)):
        return tuple(canonical_precision(p) for p in precision)
    if not isinstance(precision, str):
        return precision
    if precision in lax.DotAlgorithmPreset.__members__:
        return lax.DotAlgorithmPreset[precision]
    try:
        return lax.Precision(precision)
    except ValueError:
        wanted = "None, 'default', 'high', 'highest', or a value that jax.lax.dot_general takes"
        raise errors.should_be("The precision", wanted, precision, ValueError) from None
