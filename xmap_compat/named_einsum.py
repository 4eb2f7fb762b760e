"""``einsum`` with named axes in braces: ``'n{b,k},{k,m}->n{b,m}'``.

Letters are positional dimensions as in NumPy; a name in braces is a named axis.  Names that the inputs
mention and the output does not are contracted.  Axes that nobody mentions broadcast, as everywhere.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum
from jax import lax

from xmap_compat import _jax, errors
from xmap_compat.axis_specs import AxisName
from xmap_compat.named_lax import Mentions, bind_pdot, canonical_precision

ELLIPSIS = "..."


def einsum(
    spec: str,
    *operands: jax.typing.ArrayLike,
    precision: Any = None,
    preferred_element_type: Any = None,
    optimize: Any = "auto",
) -> jax.Array:
    """Contract any number of arrays over positional dimensions (letters) and named axes (in braces).

    Args:
      spec: ``'n{b,k},{k,m}->n{b,m}'``: for each operand its positional dimensions, one letter each (``...``
        stands for leading ones), and in braces named axes, in any order.  Without ``->`` the output has what
        appears once, as in NumPy.
      operands: arrays, one for each part of ``spec``.
      precision, preferred_element_type: as in ``jax.numpy.einsum``.
      optimize: how ``opt_einsum`` looks for a path of pairwise contractions.

    Returns:
      An array whose positional dimensions are the output's letters.  It varies over the output's names,
      and over axes of the operands that no one mentions.

    Raises:
      ValueError: a malformed spec (with a caret under the character), or operands that do not fit it.
      TypeError: an operand varies over an axis that another mentions and it does not.
      NameError: a name is not in scope.

    Source: ``jax.numpy.einsum`` with braces and ``jax.lax.xeinsum`` (until 0.4.21 and 0.4.30), which
    took two operands and left a skipped axis undefined.
    """
    parsed = parse(spec)
    if len(operands) != len(parsed.inputs):
        raise errors.einsum_operand_count(spec, len(parsed.inputs), len(operands))
    arrays = [jnp.asarray(x) for x in operands]
    dtype = jnp.result_type(*arrays)
    terms = [_operand(parsed, k, x.astype(dtype)) for k, x in enumerate(arrays)]
    output = _output(parsed, terms)
    sizes = _sizes(spec, terms)
    terms = [_drop_unit_ellipsis(t, sizes) for t in terms]
    options = {
        "precision": canonical_precision(precision),
        "preferred_element_type": None if preferred_element_type is None else np.dtype(preferred_element_type),
    }
    result = _contract_all(spec, terms, output, sizes, optimize, options)
    return result if preferred_element_type is None else result.astype(preferred_element_type)


def xeinsum(spec: str, *operands: jax.typing.ArrayLike) -> jax.Array:
    """``jax.lax.xeinsum`` (until jax 0.4.30): see :func:`einsum`."""
    return einsum(spec, *operands)


# ------------------------------------------------------------------------- parsing


@dataclasses.dataclass(frozen=True)
class Term:
    """One operand (or the output) of a spec.

    Attributes:
      letters: positional dimensions in order; ``'...'`` may be one of them.
      names: the names in braces.
      text: the part of the spec, for messages.
    """

    letters: tuple[str, ...]
    names: tuple[str, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Spec:
    source: str
    inputs: tuple[Term, ...]
    output: Term


def parse(spec: str) -> Spec:
    """Parse a spec; errors show the offending character."""
    if not isinstance(spec, str):
        raise errors.einsum_spec_type(spec)
    left, arrow, right = spec.partition("->")
    inputs = tuple(_parse_term(spec, start, text) for start, text in _split_operands(spec, left))
    if not arrow:
        return Spec(spec, inputs, _implicit_output(inputs))
    start = len(left) + 2
    if "->" in right:
        raise errors.malformed_einsum(spec, start + right.index("->"), "a second '->'")
    for at, _ in list(_split_operands(spec, right))[1:]:
        raise errors.malformed_einsum(spec, start + at - 1, "a comma in the output")
    output = _parse_term(spec, start, right)
    _check_output(spec, start, output, inputs)
    return Spec(spec, inputs, output)


def _split_operands(spec, text):
    """``(start, operand)`` for the parts between commas outside of braces."""
    depth, begin = 0, 0
    for k, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            yield begin, text[begin:k]
            begin = k + 1
    yield begin, text[begin:]


def _parse_term(spec, start, text):
    letters: list[str] = []
    names: tuple[str, ...] | None = None
    k = 0
    while k < len(text):
        character = text[k]
        if character == "{":
            if names is not None:
                raise errors.malformed_einsum(spec, start + k, "a second pair of braces in one operand")
            names, k = _parse_names(spec, start, text, k)
        elif text.startswith(ELLIPSIS, k):
            if ELLIPSIS in letters:
                raise errors.malformed_einsum(spec, start + k, "a second ellipsis in one operand")
            letters.append(ELLIPSIS)
            k += len(ELLIPSIS)
        elif character in string.ascii_letters:
            letters.append(character)
            k += 1
        elif character == " ":
            k += 1
        else:
            raise errors.malformed_einsum(spec, start + k, _why_unexpected(character))
    return Term(tuple(letters), names or (), text.strip())


def _why_unexpected(character):
    if character == "}":
        return "a closing brace without an opening one"
    return f"{character!r} is neither a letter, a brace, '...' nor '->'"


def _parse_names(spec, start, text, k):
    """Names between the brace at ``k`` and its partner; also the position after it."""
    end = text.find("}", k)
    if end < 0:
        raise errors.malformed_einsum(spec, start + k, "this brace is never closed")
    inside = text[k + 1 : end]
    if "{" in inside:
        raise errors.malformed_einsum(spec, start + k + 1 + inside.index("{"), "a brace within braces")
    names: list[str] = []
    at = k + 1
    for part in inside.split(",") if inside.strip() else []:
        name = part.strip()
        if not name:
            raise errors.malformed_einsum(spec, start + at, "an axis name is missing here")
        if name in names:
            raise errors.malformed_einsum(spec, start + at, f"the axis {name} is named twice in one operand")
        names.append(name)
        at += len(part) + 1
    return tuple(names), end + 1


def _implicit_output(inputs):
    """What appears once: letters in alphabetical order after an ellipsis, as NumPy does it; and names."""
    letters = [x for t in inputs for x in t.letters if x != ELLIPSIS]
    names = [n for t in inputs for n in t.names]
    dots = [ELLIPSIS] if any(ELLIPSIS in t.letters for t in inputs) else []
    once = sorted(x for x in set(letters) if letters.count(x) == 1)
    return Term((*dots, *once), tuple(n for n in names if names.count(n) == 1), "")


def _check_output(spec, start, output, inputs):
    text = spec[start:]
    for kind, seen in (("letters", set()), ("names", set())):
        known = {x for t in inputs for x in getattr(t, kind)}
        for x in getattr(output, kind):
            if x in seen:
                raise errors.malformed_einsum(spec, start + text.rindex(x), f"{x} appears twice in the output")
            if x not in known:
                raise errors.malformed_einsum(spec, start + text.index(x), f"{x} appears in no input")
            seen.add(x)


# ------------------------------------------------------------------- binding operands


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array with labels for its positional dimensions and the named axes that it takes part in."""

    data: Any
    letters: tuple[Any, ...]
    names: frozenset[AxisName]
    text: str | None
    index: int | None


def _operand(parsed, index, data):
    term = parsed.inputs[index]
    names = frozenset(_axis_called(name, parsed.source) for name in term.names)
    letters = _expand_ellipsis(term.letters, data.ndim)
    if len(letters) != data.ndim:
        raise errors.einsum_rank(parsed.source, index, term.text, len(term.letters), data.shape)
    operand = Operand(data, letters, names, term.text, index)
    _sizes(parsed.source, [operand])
    return _take_diagonals(operand) if len(set(letters)) < len(letters) else operand


def _axis_called(name, spec):
    for axis in _jax.bound_axis_names():
        if str(axis) == name:
            return axis
    raise errors.einsum_unbound(spec, name, _jax.bound_axis_names())


def _expand_ellipsis(letters, ndim):
    """``'...'`` becomes numbers counted from the right, so that operands broadcast as in NumPy."""
    if ELLIPSIS not in letters:
        return letters
    at = letters.index(ELLIPSIS)
    count = max(0, ndim - len(letters) + 1)
    return (*letters[:at], *range(-count, 0), *letters[at + 1 :])


def _take_diagonals(operand):
    unique = tuple(dict.fromkeys(operand.letters))
    symbols = {x: opt_einsum.get_symbol(k) for k, x in enumerate(unique)}
    subscripts = "".join(symbols[x] for x in operand.letters)
    data = jnp.einsum(f"{subscripts}->{''.join(symbols[x] for x in unique)}", operand.data)
    return dataclasses.replace(operand, data=data, letters=unique)


def _output(parsed, terms):
    dots = sorted({x for t in terms for x in t.letters if isinstance(x, int)})
    letters: list[Any] = []
    for x in parsed.output.letters:
        letters.extend(dots if x == ELLIPSIS else [x])
    names = frozenset(_axis_called(name, parsed.source) for name in parsed.output.names)
    return tuple(letters), names


def _sizes(spec, terms):
    sizes: dict[Any, int] = {}
    for term in terms:
        for letter, size in zip(term.letters, term.data.shape):
            known = sizes.setdefault(letter, size)
            if known == 1 and isinstance(letter, int):
                sizes[letter] = size
            elif known != size and not (size == 1 and isinstance(letter, int)):
                raise errors.einsum_size(spec, letter, known, size, term.index)
    return sizes


def _drop_unit_ellipsis(term, sizes):
    """Dimensions of one element under an ellipsis broadcast: leave them out."""
    gone = [k for k, x in enumerate(term.letters) if isinstance(x, int) and term.data.shape[k] != sizes[x]]
    if not gone:
        return term
    letters = tuple(x for k, x in enumerate(term.letters) if k not in gone)
    return dataclasses.replace(term, data=lax.squeeze(term.data, gone), letters=letters)


# --------------------------------------------------------------------- contracting


def _contract_all(spec, terms, output, sizes, optimize, options):
    letters, names = output
    mentioned = {axis: _describe(t) for t in reversed(terms) for axis in t.names}
    operands = list(terms)
    for pair in _path(operands, output, sizes, optimize):
        picked = [operands[k] for k in pair]
        operands = [t for k, t in enumerate(operands) if k not in pair]
        kept_letters = {*letters, *(x for t in operands for x in t.letters)}
        kept_names = names.union(*(t.names for t in operands))
        while len(picked) > 1:
            # A step of more than two operands (outer products) is done two at a time.
            x, y, *rest = picked
            keep = ({*kept_letters, *(c for t in rest for c in t.letters)}, kept_names.union(*(t.names for t in rest)))
            picked = [_contract_pair(spec, x, y, *keep, mentioned, options), *rest]
        operands.append(picked[0])
    return _finish(_accumulating(operands[0], options), letters, names)


def _path(operands, output, sizes, optimize):
    if len(operands) <= 2:
        return [tuple(range(len(operands)))] if len(operands) == 2 else []
    labels = [(*t.letters, *sorted(t.names, key=str)) for t in operands]
    every = list(dict.fromkeys(x for group in labels for x in group))
    symbol = {x: opt_einsum.get_symbol(k) for k, x in enumerate(every)}
    length = {x: sizes[x] if x in sizes else lax.axis_size(x) for x in every}
    kept = "".join(symbol[x] for x in [*output[0], *sorted(output[1], key=str)])
    expression = ",".join("".join(symbol[x] for x in group) for group in labels) + "->" + kept
    shapes = [tuple(length[x] for x in group) for group in labels]
    try:
        path, _ = opt_einsum.contract_path(expression, *shapes, shapes=True, optimize=optimize)
    except KeyError:
        # opt_einsum's, for a name that it does not know.
        raise errors.einsum_path(optimize) from None
    return path


def _contract_pair(spec, x, y, kept_letters, kept_names, mentioned, options):
    if _alone(x, y, kept_letters) or _alone(y, x, kept_letters):
        x, y = (_accumulating(t, options) for t in (x, y))
    x, y = _sum_alone(x, y, kept_letters), _sum_alone(y, x, kept_letters)
    shared = [c for c in x.letters if c in y.letters]
    batch = [c for c in shared if c in kept_letters]
    summed = [c for c in shared if c not in kept_letters]
    data = bind_pdot(
        x.data,
        y.data,
        axes=tuple(sorted((x.names | y.names) - kept_names, key=str)),
        pos_contract=_indices(summed, x, y),
        pos_batch=_indices(batch, x, y),
        mentions=_mentions(spec, x, y, mentioned),
        **options,
    )
    free = [c for t in (x, y) for c in t.letters if c not in shared]
    return Operand(data, (*batch, *free), (x.names | y.names) & kept_names, None, None)


def _indices(letters, x, y):
    return tuple(map(x.letters.index, letters)), tuple(map(y.letters.index, letters))


def _accumulating(operand, options):
    """Sums that no dot makes are made in the same precision as those that it makes."""
    dtype = options["preferred_element_type"]
    return operand if dtype is None else dataclasses.replace(operand, data=operand.data.astype(dtype))


def _alone(operand, other, kept):
    return [k for k, c in enumerate(operand.letters) if c not in kept and c not in other.letters]


def _sum_alone(operand, other, kept):
    alone = _alone(operand, other, kept)
    if not alone:
        return operand
    letters = tuple(c for k, c in enumerate(operand.letters) if k not in alone)
    return dataclasses.replace(operand, data=lax.reduce_sum(operand.data, alone), letters=letters)


def _mentions(spec, x, y, mentioned) -> Mentions | None:
    """What the type check must know: axes that an original operand skips while another one mentions them."""
    skipped = tuple(_skipped(t, mentioned) for t in (x, y))
    return Mentions(spec, (_describe(x), _describe(y)), skipped) if any(skipped) else None


def _describe(term):
    return f"operand {term.index} ({term.text!r})"


def _skipped(term, mentioned: Mapping[AxisName, str]) -> tuple[tuple[AxisName, str], ...]:
    if term.index is None:
        return ()
    return tuple((axis, by) for axis, by in mentioned.items() if axis not in term.names)


def _finish(operand, letters: Sequence[Any], names):
    alone = [k for k, c in enumerate(operand.letters) if c not in letters]
    data = lax.reduce_sum(operand.data, alone) if alone else operand.data
    left = [c for c in operand.letters if c in letters]
    contracted = tuple(sorted(operand.names - names, key=str))
    if contracted:
        data = lax.psum(data, contracted)
    order = [left.index(c) for c in letters]
    return lax.transpose(data, order) if order != list(range(len(order))) else data
