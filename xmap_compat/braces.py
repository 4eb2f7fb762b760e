"""``einsum`` with named axes in braces: ``'n{b,k},{k,m}->n{b,m}'``.

Letters are positional dimensions as in NumPy; a name in braces is a named axis.  Names that the
inputs mention and the output does not are contracted.  Axes that the spec does not mention
broadcast, as always.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.errors import unbound_name
from xmap_compat.core.placement import sizes_in_scope
from xmap_compat.core.rules.contraction import (
    Skipped,
    Subscripts,
    accumulation_type,
    bind_contraction,
    canonical_precision,
)
from xmap_compat.core.specs import AxisName
from xmap_compat.einsum_spec import Term, parse


@_jax.api_boundary
def einsum(
    spec: str,
    *operands: jax.typing.ArrayLike,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """Contract any number of arrays over positional dimensions (letters) and named axes (in
    braces).

    On a mesh each device contracts its blocks in pairs, along a path that is good for these sizes.
    Then there is one all-reduce of the result.

    Args:
      spec: ``'n{b,k},{k,m}->n{b,m}'``: for each operand its positional dimensions, one letter each,
        and in braces named axes, in any order.
      operands: arrays, one for each part of ``spec``.
      precision: as in ``jax.numpy.einsum``.
      preferred_element_type: dtype of the result, and of sums unless the operands' is wider (then
        rounded once).

    Returns:
      An array whose positional dimensions are the output's letters.  It varies over the output's
      names, and over axes of the operands that the spec does not mention.

    Raises:
      ValueError: a malformed spec (with a caret under the character), or operands that do not fit
        it.
      TypeError: an operand varies over an axis that the spec names for another operand, but not for
        this one.
      NameError: a name is not in scope.

    Example:

      >>> import numpy as np
      >>> from xmap_compat import einsum, xmap
      >>> @xmap(in_axes=(["k", "m"], ["b", "k"]), out_axes=["b", "m"])
      ... def layer(w, x):
      ...     return einsum("{k,m},{b,k}->{b,m}", w, x)
      >>> layer(np.array([[1, 2], [3, 4]]), np.array([[1, 1], [0, 1]])).tolist()
      [[4, 6], [3, 4]]

    Source: ``jax.numpy.einsum`` with braces and ``jax.lax.xeinsum`` (until 0.4.21 and 0.4.30),
    which took two operands and left a skipped axis undefined.
    """
    inputs, output = parse(spec)
    if len(operands) != len(inputs):
        raise _einsum_operand_count(spec, len(inputs), len(operands))
    dtype = jnp.result_type(*map(jnp.asarray, operands))
    arrays = [jnp.asarray(x, dtype) for x in operands]
    _check_shapes(spec, inputs, arrays)
    if len(arrays) == 1:
        # The product with one is a contraction too.
        inputs.append(Term((), (), "1"))
        arrays.append(jnp.ones((), dtype))
    names = [_axes_of(term, spec) for term in inputs]
    contracted = frozenset().union(*names) - _axes_of(output, spec)
    letters = [term.letters for term in inputs]
    # Letters become numbers in the order in which they appear: {'n': 0, 'm': 1}.
    labels: dict[str, int] = {}
    for letter in itertools.chain(*letters):
        labels.setdefault(letter, len(labels))
    numbers = [tuple(map(labels.__getitem__, each)) for each in (*letters, output.letters)]
    result = bind_contraction(
        *arrays,
        axes=sorted(contracted, key=str),
        subscripts=Subscripts(tuple(numbers[:-1]), numbers[-1]),
        skipped=_skipped(spec, inputs, names),
        precision=canonical_precision(precision),
        preferred_element_type=accumulation_type(dtype, preferred_element_type),
        optimize="auto",
    )
    if preferred_element_type is None:
        return result
    return lax.convert_element_type(result, preferred_element_type)


@_jax.api_boundary
def xeinsum(spec: str, *operands: jax.typing.ArrayLike) -> jax.Array:
    """``jax.lax.xeinsum`` (until jax 0.4.30): see :func:`einsum`.

    >>> import numpy as np
    >>> from xmap_compat import xeinsum, xmap
    >>> dot = xmap(lambda x, y: xeinsum("{i},{i}->", x, y), (["i"], ["i"]), {})
    >>> dot(np.array([1, 2, 3]), np.array([1, 0, 2])).tolist()
    7
    """
    return einsum(spec, *operands)


def _check_shapes(spec, inputs, arrays):
    sizes: dict[str, int] = {}
    for index, (term, x) in enumerate(zip(inputs, arrays)):
        if len(term.letters) != x.ndim:
            raise _einsum_rank(spec, index, term.text, len(term.letters), x.shape)
        for letter, size in zip(term.letters, x.shape):
            known = sizes.setdefault(letter, size)
            if size != known:
                raise _einsum_size(spec, letter, known, size, index)


def _axes_of(term, spec):
    """The axes that the names of a term are of."""
    axes = set()
    for name in term.names:
        # Of a vmap around, only an axis whose name is a string is known.
        called = [axis for axis in (*sizes_in_scope(), name) if str(axis) == name]
        bound = [*filter(_jax.is_bound, called)]
        if not bound:
            legacy = f"unbound axis name: {name}"
            raise unbound_name(legacy, sizes_in_scope(), where=f" in the einsum {spec!r}")
        axes.add(bound[0])
    return frozenset(axes)


def _skipped(spec, inputs, names) -> Skipped | None:
    """For the type check: the axes that one operand skips while another one mentions them."""
    descriptions = [f"operand {index} ({term.text!r})" for index, term in enumerate(inputs)]
    # The first operand that mentions each axis.
    mentioned: dict[AxisName, str] = {}
    for axes, description in zip(names, descriptions):
        for axis in sorted(axes, key=str):
            mentioned.setdefault(axis, description)
    skipped = []
    for index, axes in enumerate(names):
        for axis, by in mentioned.items():
            if axis not in axes:
                skipped.append((index, axis, by))
    if not skipped:
        return None
    return Skipped(spec, tuple(descriptions), tuple(skipped))


# ----------------------------------------------------------------------------- messages


def _einsum_operand_count(spec: str, expected: int, given: int) -> ValueError:
    return ValueError(
        f"The einsum {spec!r} describes {expected} operands, but got {given}. "
        "Pass one for each part"
    )


def _einsum_rank(
    spec: str, index: int, text: str, letters: int, shape: Sequence[int]
) -> ValueError:
    return ValueError(
        f"Operand {index} of the einsum {spec!r} is described by {text!r}, which has {letters} "
        f"positional dimensions, but its positional shape is {tuple(shape)}. "
        "Write named axes in braces"
    )


def _einsum_size(spec: str, letter: str, known: int, size: int, index: int) -> ValueError:
    return ValueError(
        f"In {spec!r}, the dimension {letter} has size {known} and, in operand {index}, {size}. "
        "Pass arrays of one size"
    )
