"""``einsum`` with named axes in braces: ``'n{b,k},{k,m}->n{b,m}'``.

Letters are positional dimensions as in NumPy; a name in braces is a named axis.  Names that the
inputs mention and the output does not are contracted.  Axes that the spec does not mention
broadcast, as always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import opt_einsum
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.errors import should_be, unbound_name
from xmap_compat.core.placement import sizes_in_scope
from xmap_compat.core.rules.contraction import (
    Skipped,
    Subscripts,
    accumulation_type,
    bind_contraction,
    canonical_precision,
    sum_dims,
    summed,
)
from xmap_compat.core.specs import AxisName
from xmap_compat.einsum_spec import ELLIPSIS, parse


@_jax.api_boundary
def einsum(
    spec: str,
    *operands: jax.typing.ArrayLike,
    precision: Any = None,
    preferred_element_type: Any = None,
    optimize: Any = "auto",
) -> jax.Array:
    """Contract any number of arrays over positional dimensions (letters) and named axes (in
    braces).

    On a mesh each device contracts its blocks in pairs, along a path that is good for these sizes.
    Then there is one all-reduce of the result.

    Args:
      spec: ``'n{b,k},{k,m}->n{b,m}'``: for each operand its positional dimensions, one letter each
        (``...`` stands for leading ones), and in braces named axes, in any order.  Without ``->``
        the output has what appears once, as in NumPy.
      operands: arrays, one for each part of ``spec``.
      precision: as in ``jax.numpy.einsum``.
      preferred_element_type: dtype of the result, and of sums unless the operands' is wider (then
        rounded once).
      optimize: the strategy by which ``opt_einsum`` looks for a path of pairwise contractions.

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
    parsed = parse(spec)
    if len(operands) != len(parsed.inputs):
        raise _einsum_operand_count(spec, len(parsed.inputs), len(operands))
    arrays = list(map(jnp.asarray, operands))
    _check_strategy(optimize)
    dtype = jnp.result_type(*arrays)
    terms = [_operand(parsed, k, x.astype(dtype)) for k, x in enumerate(arrays)]
    output = _output(parsed, terms)
    sizes = _sizes(spec, terms)
    terms = [_drop_broadcast(t, sizes) for t in terms]
    options = {
        "precision": canonical_precision(precision),
        "preferred_element_type": accumulation_type(dtype, preferred_element_type),
        "optimize": optimize,
    }
    result = _contract(spec, terms, output, options)
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


# ------------------------------------------------------------------- binding operands


class _LabeledArray(NamedTuple):
    """An array with labels for its positional dimensions and the named axes that it takes part
    in.
    """

    data: Any
    letters: tuple[Any, ...]
    names: frozenset[AxisName]
    text: str
    position: int


def _operand(parsed, index, data):
    term = parsed.inputs[index]
    names = frozenset(_axis_called(name, parsed.source) for name in term.names)
    letters = _expand_ellipsis(term.letters, data.ndim)
    if len(letters) != data.ndim:
        raise _einsum_rank(parsed.source, index, term.text, len(term.letters), data.shape)
    operand = _LabeledArray(data, letters, names, term.text, index)
    is_repeated = len(set(letters)) < len(letters)
    if is_repeated:
        return _take_diagonals(parsed.source, operand)
    return operand


def _axis_called(name, spec):
    # Of a vmap around, only an axis whose name is a string is known.
    for axis in (*sizes_in_scope(), name):
        if str(axis) == name and _jax.is_bound(axis):
            return axis
    legacy = f"unbound axis name: {name}"
    raise unbound_name(legacy, sizes_in_scope(), where=f" in the einsum {spec!r}")


def _expand_ellipsis(letters, ndim):
    """``'...'`` becomes numbers counted from the right, so that operands broadcast as in NumPy.

    ``('...', 'k')`` of an array with three dimensions becomes ``(-2, -1, 'k')``.
    """
    if ELLIPSIS not in letters:
        return letters
    at = letters.index(ELLIPSIS)
    hidden = max(0, ndim - (len(letters) - 1))
    return (*letters[:at], *range(-hidden, 0), *letters[at + 1 :])


def _take_diagonals(spec, operand):
    sizes = dict(zip(operand.letters, operand.data.shape))
    for letter, size in zip(operand.letters, operand.data.shape):
        if sizes[letter] != size:
            raise _einsum_size(spec, letter, size, sizes[letter], operand.position)
    unique = tuple(dict.fromkeys(operand.letters))
    symbols = {letter: opt_einsum.get_symbol(k) for k, letter in enumerate(unique)}
    repeated = "".join(symbols[letter] for letter in operand.letters)
    once = "".join(symbols[letter] for letter in unique)
    data = jnp.einsum(f"{repeated}->{once}", operand.data)
    return operand._replace(data=data, letters=unique)


def _output(parsed, terms):
    hidden: set[int] = set()
    for term in terms:
        hidden.update(letter for letter in term.letters if isinstance(letter, int))
    letters: list[Any] = []
    for letter in parsed.output.letters:
        if letter == ELLIPSIS:
            letters.extend(sorted(hidden))
        else:
            letters.append(letter)
    names = frozenset(_axis_called(name, parsed.source) for name in parsed.output.names)
    return tuple(letters), names


def _sizes(spec, terms):
    """The size of each letter; dimensions of one element broadcast, as in NumPy."""
    sizes: dict[Any, int] = {}
    for term in terms:
        for letter, size in zip(term.letters, term.data.shape):
            known = sizes.setdefault(letter, size)
            if known == 1:
                sizes[letter] = size
            elif size not in (known, 1):
                raise _einsum_size(spec, letter, known, size, term.position)
    return sizes


def _drop_broadcast(term, sizes):
    """Leave out the dimensions of one element that broadcast."""
    gone = []
    letters = []
    for dim, letter in enumerate(term.letters):
        if term.data.shape[dim] == sizes[letter]:
            letters.append(letter)
        else:
            gone.append(dim)
    if not gone:
        return term
    return term._replace(data=lax.squeeze(term.data, gone), letters=tuple(letters))


# --------------------------------------------------------------------- contracting


def _contract(spec, terms, output, options):
    letters, names = output
    mentioned = frozenset().union(*(term.names for term in terms))
    axes = sorted(mentioned - names, key=str)
    if len(terms) == 1:
        return _reduce(terms[0], letters, axes, options["preferred_element_type"])
    # Letters become numbers in the order in which they appear: {'n': 0, 'm': 1}.
    labels: dict[Any, int] = {}
    inputs = []
    for term in terms:
        inputs.append(tuple(labels.setdefault(letter, len(labels)) for letter in term.letters))
    output_labels = tuple(labels[letter] for letter in letters)
    return bind_contraction(
        *(term.data for term in terms),
        axes=axes,
        subscripts=Subscripts(tuple(inputs), output_labels),
        skipped=_skipped(spec, terms),
        **options,
    )


def _reduce(term, letters, axes, dtype):
    """The einsum of one operand."""
    data = term.data
    if dtype is not None:
        data = data.astype(dtype)
    summed_dims = [dim for dim, letter in enumerate(term.letters) if letter not in letters]
    data = sum_dims(data, summed_dims)
    if axes:
        data = summed(lambda x: lax.psum(x, tuple(axes)), data)
    left = [letter for letter in term.letters if letter in letters]
    order = [left.index(letter) for letter in letters]
    if order == sorted(order):
        return data
    return lax.transpose(data, order)


def _check_strategy(optimize):
    if isinstance(optimize, bool) or callable(optimize):
        return
    try:
        opt_einsum.paths.get_path_fn(optimize)
    except (KeyError, TypeError, AttributeError):
        wanted = "a strategy of opt_einsum, such as 'auto', 'greedy' or 'optimal'"
        raise should_be("optimize of einsum", wanted, optimize, ValueError) from None


def _skipped(spec, terms) -> Skipped | None:
    """For the type check: the axes that one operand skips while another one mentions them."""
    descriptions = tuple(f"operand {term.position} ({term.text!r})" for term in terms)
    # The first operand that mentions each axis.
    mentioned: dict[AxisName, str] = {}
    for term, description in reversed(list(zip(terms, descriptions))):
        for axis in sorted(term.names, key=str):
            mentioned[axis] = description
    skipped = []
    for index, term in enumerate(terms):
        for axis, by in mentioned.items():
            if axis not in term.names:
                skipped.append((index, axis, by))
    if not skipped:
        return None
    return Skipped(spec, descriptions, tuple(skipped))


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


def _einsum_size(spec: str, letter: Any, known: int, size: int, index: int) -> ValueError:
    which = f"the dimension {letter}"
    if isinstance(letter, int):
        which = "a dimension under the ellipsis"
    return ValueError(
        f"In {spec!r}, {which} has size {known} and, in operand {index}, {size}. "
        "Pass arrays of one size"
    )
