"""The primitive behind ``pdot`` and ``einsum``: a sum of products over positional dimensions and
named axes at once.

Positional dimensions have labels, as in an einsum.  Named axes need none: an operand varies over an
axis or not.  Any number of operands is contracted at once: along one path, which is found where the
shapes on a device are known, and with one sum over devices.
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
from jax import lax

from xmap_compat import _jax
from xmap_compat.core import errors
from xmap_compat.core.collectives import collective, reduced
from xmap_compat.core.device import DeviceView, cast_to, sum_devices, times_elements
from xmap_compat.core.parameters import Params
from xmap_compat.core.values import NamedValue, common, union_of_names, without

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


@dataclasses.dataclass(frozen=True)
class Skipped:
    """For the type check of an einsum that names axes in braces (``braces.py``): axes that an
    operand leaves out while another one mentions them.

    Attributes:
      spec: what the user wrote.
      operands: how to call each operand.
      skipped: ``(operand, axis, by)``: the index of the operand, the axis that it must not vary
        over, and the operand that mentions the axis.
    """

    spec: str
    operands: tuple[str, ...]
    skipped: tuple[tuple[int, Hashable, str], ...]

    def check(self, names: Sequence[Container[Hashable]], where: str = "") -> None:
        """Raise if an operand varies over an axis that it skips; ``names`` has those of each."""
        for index, axis, by in self.skipped:
            if axis in names[index]:
                operand = self.operands[index]
                raise errors.einsum_skipped_axis(self.spec, axis, by, operand, where)

    def without(self, known: Container[Hashable]) -> Skipped | None:
        """What is left to check when some axes have been checked; None if nothing is."""
        left = []
        for index, axis, by in self.skipped:
            if axis not in known:
                left.append((index, axis, by))
        if not left:
            return None
        return Skipped(self.spec, self.operands, tuple(left))


def bind_contraction(
    *operands: Any,
    axes: Sequence[Hashable],
    subscripts: Subscripts,
    skipped: Skipped | None = None,
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
    if skipped is not None and manual:
        skipped.check([_jax.varying_axes(x) for x in operands])
        skipped = skipped.without(manual)
    named = without(axes, manual)
    if named or skipped is not None:
        out = _contraction_p.bind(
            *operands, axes=named, subscripts=subscripts, skipped=skipped, **options
        )
    else:
        out = _contract_arrays(*operands, subscripts=subscripts, **options)
    mesh_axes = common(axes, manual)
    if not mesh_axes:
        return out
    return summed(lambda x: lax.psum(x, mesh_axes), out)


def summed(total: Callable[[Any], Any], x: Any) -> Any:
    """A sum; for booleans, whether one is true."""
    if x.dtype != np.bool_:
        return total(x)
    count = total(x.astype(np.int32))
    return count.astype(bool)


def sum_dims(x: Any, dims: Sequence[int]) -> Any:
    """A sum over positional dimensions, with the types that a dot would give it."""
    if not dims:
        return x
    return summed(lambda x: lax.reduce_sum(x, dims), x)


def accumulation_type(dtype: Any, preferred_element_type: Any) -> np.dtype | None:
    """The type to add products in: no less precise than theirs, as it depends on placements how
    often a sum rounds.
    """
    if preferred_element_type is None:
        return None
    return np.dtype(jnp.promote_types(dtype, preferred_element_type))


def _fresh_labels(inputs: Sequence[_Labels]) -> Iterator[int]:
    """Labels that the operands do not have yet."""
    used = itertools.chain.from_iterable(inputs)
    return itertools.count(1 + max(used, default=-1))


def _output_order(inputs: Sequence[_Labels], output: _Labels, more: Sequence[int]) -> _Labels:
    """Labels of a result with those of ``output``, in this order, and ``more``, where a dot leaves
    them.
    """
    kept = (*more, *output)
    if len(inputs) != 2:
        present = {*itertools.chain.from_iterable(inputs)}
        return common(kept, present)
    x = without(inputs[0], _private_labels(inputs, 0, kept))
    y = without(inputs[1], _private_labels(inputs, 1, kept))
    _, natural = _dot_numbers(x, y, kept)
    ordered = iter(output)
    order = []
    for label in natural:
        if label not in more:
            label = next(ordered)
        order.append(label)
    return tuple(order)


def _contract_arrays(*operands, subscripts, precision, preferred_element_type, optimize):
    operands, subscripts = _sum_private(operands, subscripts, preferred_element_type)
    options = {"precision": precision, "preferred_element_type": preferred_element_type}
    if len(operands) == 2:
        return _dot(*operands, subscripts, options)
    labelled = []
    for x, labels in zip(operands, subscripts.inputs):
        labelled += [x, list(labels)]
    # An optimizer may have a state, which is for one contraction.
    optimize = copy.deepcopy(optimize)
    return jnp.einsum(*labelled, list(subscripts.output), optimize=optimize, **options)


def _sum_private(operands, subscripts, dtype):
    """Sum dimensions that only one operand has, without a dot, in no less precision than a dot."""
    inputs, output = subscripts
    private = [_private_labels(inputs, k, output) for k in range(len(inputs))]
    if not any(private):
        return operands, subscripts
    if dtype is not None:
        operands = [x.astype(jnp.promote_types(x.dtype, dtype)) for x in operands]
    left = []
    for x, labels, gone in zip(operands, inputs, private):
        dims = [labels.index(label) for label in gone]
        left.append(sum_dims(x, dims))
    return left, Subscripts(tuple(map(without, inputs, private)), output)


def _dot(x, y, subscripts, options):
    left, right = subscripts.inputs
    numbers, natural = _dot_numbers(left, right, subscripts.output)
    out = lax.dot_general(x, y, numbers, **options)
    if natural == subscripts.output:
        return out
    order = [natural.index(label) for label in subscripts.output]
    return lax.transpose(out, order)


def _dot_numbers(x, y, kept):
    """Dimension numbers of the dot of two labelled arrays, and the labels of its result."""
    shared = common(x, y)
    batch = common(kept, shared)
    contracted = without(shared, kept)
    numbers = []
    for group in (contracted, batch):
        numbers.append((tuple(map(x.index, group)), tuple(map(y.index, group))))
    return tuple(numbers), (*batch, *without(x, shared), *without(y, shared))


def _private_labels(inputs, index, kept):
    """Labels of one operand that are summed and that no other operand has."""
    others = itertools.chain(kept, *_replaced(inputs, index, ()))
    return without(inputs[index], set(others))


def _abstract_eval(*operands, axes, skipped, **params):
    out = jax.eval_shape(lambda *xs: _contract_arrays(*xs, **params), *operands)
    return out.shape, out.dtype


def _cotangent(
    ct, index, operands, *, subscripts, preferred_element_type, optimize, axes, skipped, precision
):
    """One operand's cotangent: the others times that of the result; named axes are not summed (as
    in legacy).
    """
    labels = subscripts.inputs[index]
    x = operands[index]
    factors = _replaced(subscripts.inputs, index, subscripts.output)
    present = {*itertools.chain.from_iterable(factors)}
    kept = common(labels, present)
    if not isinstance(optimize, str):
        optimize = "auto"
    out = _contract_arrays(
        *_replaced(operands, index, ct),
        subscripts=Subscripts(factors, kept),
        precision=precision,
        preferred_element_type=preferred_element_type,
        optimize=optimize,
    )
    return lax.broadcast_in_dim(out.astype(x.dtype), x.shape, tuple(map(labels.index, kept)))


def _replaced(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


def _batch(operands, dims, *, name, axes, subscripts, skipped, **options):
    """Under a vmap: the mapped dimension is contracted if the vmap binds one of the axes, else it
    is kept.
    """
    label = next(_fresh_labels(subscripts.inputs))
    inputs = []
    mapped: list[tuple[Hashable, ...]] = []  # by each operand
    for labels, dim in zip(subscripts.inputs, dims):
        if dim is None:
            inputs.append(labels)
            mapped.append(())
        else:
            inputs.append((*labels[:dim], label, *labels[dim:]))
            mapped.append((name,))
    if skipped is not None:
        skipped.check(mapped)
        skipped = skipped.without([name])
    output = subscripts.output
    is_summed = name in axes
    if not is_summed:
        output = _output_order(inputs, output, [label])
    out = bind_contraction(
        *operands,
        axes=without(axes, [name]),
        subscripts=Subscripts(tuple(inputs), output),
        skipped=skipped,
        **options,
    )
    if is_summed and not any(mapped):
        size = np.asarray(lax.axis_size(name))
        out = out * size.astype(out.dtype)
    if label in output:
        return out, output.index(label)
    return out, None


_contraction_p = _jax.define_named_primitive(
    "pdot", abstract_eval=_abstract_eval, bind=bind_contraction, cotangent=_cotangent, batch=_batch
)


@collective("pdot", reduced, joint=True, counts=True)
def _contract(view: DeviceView, params: Params, *operands: NamedValue) -> NamedValue:
    """``pdot``: one contraction of the device's data, then one all-reduce of the result."""
    bound = view.bound(params["axes"])
    names = union_of_names(operands)
    positional = params["subscripts"]
    # Each local dimension gets a label: {'batch': 3}.
    label_of = dict(zip(view.local_names(names), _fresh_labels(positional.inputs)))
    inputs = []
    for value, labels in zip(operands, positional.inputs):
        inputs.append(_labels_of(value, labels, label_of))
    kept = [label_of[name] for name in without(label_of, bound)]
    order = _output_order(inputs, positional.output, kept)
    skipped = params["skipped"]
    # Inside a shard_map, names bound outside of it cannot be checked.
    if skipped is not None:
        skipped = None if view.typed else skipped.without(view.placements)
    data = bind_contraction(
        *(cast_to(view, v, names).data for v in operands),
        axes=without(params["axes"], bound),
        subscripts=Subscripts(tuple(inputs), order),
        skipped=skipped,
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
        optimize=params["optimize"],
    )
    mesh_axes = view.mesh_axes_of(common(params["axes"], bound & names))
    if mesh_axes:
        data = summed(lambda x: sum_devices(view, x, mesh_axes), data)
    data = times_elements(view, data, names, bound - names)
    name_of = {label: name for name, label in label_of.items()}
    return NamedValue(data, tuple(map(name_of.get, order)), names - bound)


def _labels_of(value, labels, label_of):
    """The labels of all dimensions: ``labels`` for positional dimensions, those of ``label_of`` for
    named ones.
    """
    positional = iter(labels)
    found = []
    for name in value.dims:
        found.append(next(positional) if name is None else label_of[name])
    return tuple(found)


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
