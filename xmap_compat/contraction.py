"""The primitive behind ``pdot`` and ``einsum``: a sum of products over positional dimensions and named axes at once.

Positional dimensions carry labels, as in an einsum.  Named axes need none: an operand varies over an axis or not.
Contracted as one, any number of operands need one path, found where it is known what a device holds, and one sum
over devices.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum
from jax import lax

from xmap_compat import _jax, errors

Labels = tuple[int, ...]


class Subscripts(NamedTuple):
    """Labels of positional dimensions: equal ones go together, and those that the output lacks are summed.

    Attributes:
      inputs: for each operand its labels, each once.
      output: the labels of the result; each is some operand's.
    """

    inputs: tuple[Labels, ...]
    output: Labels

    def __repr__(self) -> str:
        *inputs, output = ("".join(map(opt_einsum.get_symbol, labels)) for labels in (*self.inputs, self.output))
        return f"{','.join(inputs)}->{output}"


@dataclasses.dataclass(frozen=True)
class Mentions:
    """For the type check of a brace einsum: axes that an operand skips while another one mentions them.

    Attributes:
      spec: what the user wrote.
      operands: how to call each operand.
      skipped: for each operand, ``(axis that it must not vary over, the operand that mentions it)``.
    """

    spec: str
    operands: tuple[str, ...]
    skipped: tuple[tuple[tuple[Hashable, str], ...], ...]


def bind_contraction(
    *operands: Any, axes: Sequence[Hashable], subscripts: Subscripts, mentions: Mentions | None = None, **options: Any
) -> Any:
    """The sum of the operands' products; an ordinary einsum when nothing named is left to do or to check.

    Args:
      operands: two arrays or more.
      axes: named axes to sum over.
      options: ``precision``, ``preferred_element_type`` and ``optimize`` as in ``jnp.einsum``, all hashable.
    """
    if axes or mentions is not None:
        return contraction_p.bind(*operands, axes=tuple(axes), subscripts=subscripts, mentions=mentions, **options)
    return _contract_arrays(*operands, subscripts=subscripts, **options)


def fresh_labels(inputs: Sequence[Labels]) -> Iterator[int]:
    """Labels that the operands do not have yet."""
    return itertools.count(1 + max(itertools.chain.from_iterable(inputs), default=-1))


def output_order(inputs: Sequence[Labels], output: Labels, more: Sequence[int]) -> Labels:
    """Labels of a result that has ``more`` than ``output``: where a dot leaves them, those of ``output`` in order."""
    kept = (*more, *output)
    if len(inputs) == 2:
        x, y = (_without(labels, _alone(inputs, k, kept)) for k, labels in enumerate(inputs))
        _, natural = _dot_numbers(x, y, kept)
    else:
        natural = tuple(c for c in dict.fromkeys(itertools.chain.from_iterable(inputs)) if c in kept)
    ordered = iter(output)
    return tuple(c if c in more else next(ordered) for c in natural)


# ------------------------------------------------------------------------ without names


def _contract_arrays(*operands, subscripts, precision, preferred_element_type, optimize):
    alone = [_alone(subscripts.inputs, k, subscripts.output) for k in range(len(operands))]
    if preferred_element_type is not None and any(alone):
        # Sums that no dot makes are made in the same precision as those that it makes.
        operands = tuple(x.astype(preferred_element_type) for x in operands)
    options = {"precision": precision, "preferred_element_type": preferred_element_type}
    if len(operands) == 2:
        return _dot(operands, alone, subscripts, options)
    path = _path(subscripts, [x.shape for x in operands], optimize)
    labelled = itertools.chain.from_iterable(zip(operands, map(list, subscripts.inputs)))
    return jnp.einsum(*labelled, list(subscripts.output), optimize=path, **options)


def _dot(operands, alone, subscripts, options):
    x, y = (
        lax.reduce_sum(x, list(map(own.index, summed))) if summed else x
        for x, own, summed in zip(operands, subscripts.inputs, alone)
    )
    left, right = map(_without, subscripts.inputs, alone)
    numbers, natural = _dot_numbers(left, right, subscripts.output)
    out = lax.dot_general(x, y, numbers, **options)
    return out if natural == subscripts.output else lax.transpose(out, [natural.index(c) for c in subscripts.output])


def _dot_numbers(x, y, kept):
    """Dimension numbers of the dot of two labelled arrays, and the labels of what it gives."""
    shared = [c for c in x if c in y]
    batch = [c for c in kept if c in shared]
    summed = [c for c in shared if c not in kept]
    numbers = tuple(tuple(tuple(map(labels.index, group)) for labels in (x, y)) for group in (summed, batch))
    return numbers, (*batch, *(c for c in (*x, *y) if c not in shared))


def _alone(inputs, index, kept):
    """Labels of one operand that are summed in it alone."""
    others = {*kept, *itertools.chain.from_iterable(labels for k, labels in enumerate(inputs) if k != index)}
    return [c for c in inputs[index] if c not in others]


def _without(labels, gone):
    return tuple(c for c in labels if c not in gone)


def _path(subscripts, shapes, optimize):
    """A path of contractions in pairs for operands of these shapes."""
    try:
        path, _ = opt_einsum.contract_path(str(subscripts), *shapes, shapes=True, optimize=optimize)
    except KeyError:
        # opt_einsum's, for a name that it does not know.
        raise errors.einsum_path(optimize) from None
    return list(_in_pairs(path, len(shapes)))


def _in_pairs(path, count):
    """Steps of more than two operands are done two at a time; what a step gives comes last."""
    for step in path:
        operands = sorted(step)
        while len(operands) > 2:
            yield tuple(operands[-2:])
            count -= 1
            operands[-2:] = [count - 1]
        yield tuple(operands)
        count -= len(operands) - 1


# ------------------------------------------------------------------------ the primitive


def _abstract_eval(*operands, axes, mentions, **params):
    out = jax.eval_shape(lambda *xs: _contract_arrays(*xs, **params), *operands)
    return out.shape, out.dtype


def _cotangent(ct, index, operands, *, subscripts, preferred_element_type, optimize, axes, mentions, precision):
    """The cotangent of one operand: the others times that of the result; named axes are not summed (as in legacy)."""
    own, x = subscripts.inputs[index], operands[index]
    terms = _replaced(subscripts.inputs, index, subscripts.output)
    kept = tuple(c for c in own if any(c in labels for labels in terms))
    if preferred_element_type is not None:
        # One dot may round at its end; of several only the last one.
        preferred_element_type = x.dtype if len(operands) == 2 else ct.dtype
    out = _contract_arrays(
        *_replaced(operands, index, ct),
        subscripts=Subscripts(terms, kept),
        precision=precision,
        preferred_element_type=preferred_element_type,
        optimize=optimize if isinstance(optimize, str) else "auto",
    )
    return lax.broadcast_in_dim(out.astype(x.dtype), x.shape, tuple(map(own.index, kept)))


def _replaced(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


def _batch(operands, dims, *, name, size, axes, subscripts, mentions, **options):
    """Under a vmap: the mapped dimension is contracted if the vmap binds one of the axes, else it is kept."""
    label = next(fresh_labels(subscripts.inputs))
    inputs = tuple(
        labels if d is None else (*labels[:d], label, *labels[d:]) for labels, d in zip(subscripts.inputs, dims)
    )
    options["mentions"] = _without_axis(mentions, name, dims)
    if name in axes:
        rest = tuple(a for a in axes if a != name)
        out = bind_contraction(*operands, axes=rest, subscripts=Subscripts(inputs, subscripts.output), **options)
        return out * np.asarray(size, out.dtype) if inputs == subscripts.inputs else out, None
    order = output_order(inputs, subscripts.output, [label])
    out = bind_contraction(*operands, axes=axes, subscripts=Subscripts(inputs, order), **options)
    return out, order.index(label) if label in order else None


def _without_axis(mentions, name, dims):
    """What is left to check once a vmap has bound an axis and shown which operands vary over it."""
    if mentions is None:
        return None
    for operand, skipped, d in zip(mentions.operands, mentions.skipped, dims):
        for axis, by in skipped:
            if axis == name and d is not None:
                raise errors.einsum_skipped_axis(mentions.spec, axis, by, operand)
    left = tuple(tuple(pair for pair in skipped if pair[0] != name) for skipped in mentions.skipped)
    return dataclasses.replace(mentions, skipped=left) if any(left) else None


contraction_p = _jax.define_named_primitive(
    "pdot", abstract_eval=_abstract_eval, bind=bind_contraction, cotangent=_cotangent, batch=_batch
)
