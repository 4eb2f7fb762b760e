"""The syntax of a named einsum, ``'n{b,k},{k,m}->n{b,m}'``: letters are positional dimensions,
braces hold names.
"""

from __future__ import annotations

import collections
import string
from typing import NamedTuple

from xmap_compat.core.errors import should_be

ELLIPSIS = "..."


class _Term(NamedTuple):
    """One operand (or the output) of a spec.

    Attributes:
      letters: positional dimensions in order; ``'...'`` may be one of them.
      names: the names in braces.
      text: the part of the spec, for messages.
    """

    letters: tuple[str, ...]
    names: tuple[str, ...]
    text: str


class Spec(NamedTuple):
    source: str
    inputs: tuple[_Term, ...]
    output: _Term


def parse(spec: str) -> Spec:
    """Parse a spec; errors show the offending character."""
    if not isinstance(spec, str):
        raise should_be(
            "The first argument of a named einsum", "a string like 'n{b,k},{k}->n{b}'", spec
        )
    left, arrow, right = spec.partition("->")
    inputs = tuple(_parse_term(spec, start, text) for start, text in _split_operands(spec, left))
    if not arrow:
        return Spec(spec, inputs, _implicit_output(inputs))
    start = len(left) + 2
    if "->" in right:
        raise _malformed_einsum(spec, start + right.index("->"), "a second '->'")
    for at, _ in list(_split_operands(spec, right))[1:]:
        raise _malformed_einsum(spec, start + at - 1, "a comma in the output")
    output = _parse_term(spec, start, right)
    _check_output(spec, start, output, inputs)
    return Spec(spec, inputs, output)


def _split_operands(spec, text):
    """``(start, operand)`` for the parts between commas outside of braces."""
    depth = 0
    begin = 0
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
                raise _malformed_einsum(spec, start + k, "a second pair of braces in one operand")
            names, k = _parse_names(spec, start, text, k)
        elif text.startswith(ELLIPSIS, k):
            if ELLIPSIS in letters:
                raise _malformed_einsum(spec, start + k, "a second ellipsis in one operand")
            letters.append(ELLIPSIS)
            k += len(ELLIPSIS)
        elif character in string.ascii_letters:
            letters.append(character)
            k += 1
        elif character == " ":
            k += 1
        else:
            reason = f"{character!r} is neither a letter, a brace, '...' nor '->'"
            if character == "}":
                reason = "a closing brace without an opening one"
            raise _malformed_einsum(spec, start + k, reason)
    return _Term(tuple(letters), names or (), text.strip())


def _parse_names(spec, start, text, k):
    """The names between the brace at ``k`` and the closing brace, and the position after that
    brace.
    """
    end = text.find("}", k)
    if end < 0:
        raise _malformed_einsum(spec, start + k, "this brace is never closed")
    inside = text[k + 1 : end]
    if "{" in inside:
        raise _malformed_einsum(spec, start + k + 1 + inside.index("{"), "a brace within braces")
    names: list[str] = []
    if not inside.strip():
        return (), end + 1
    at = k + 1
    for part in inside.split(","):
        name = part.strip()
        if not name:
            raise _malformed_einsum(spec, start + at, "an axis name is missing here")
        if name in names:
            raise _malformed_einsum(
                spec, start + at, f"the axis {name} is named twice in one operand"
            )
        names.append(name)
        at += len(part) + 1
    return tuple(names), end + 1


def _implicit_output(inputs):
    """The labels that appear once: letters in alphabetical order after an ellipsis, as in NumPy,
    and names.
    """
    letters: collections.Counter[str] = collections.Counter()
    names: collections.Counter[str] = collections.Counter()
    for term in inputs:
        letters.update(term.letters)
        names.update(term.names)
    dots = [ELLIPSIS] if letters.pop(ELLIPSIS, 0) else []
    return _Term((*dots, *sorted(_once(letters))), tuple(_once(names)), "")


def _once(counts):
    return [label for label, count in counts.items() if count == 1]


def _check_output(spec, start, output, inputs):
    text = spec[start:]
    for kind in ("letters", "names"):
        known = {ELLIPSIS}
        for term in inputs:
            known.update(getattr(term, kind))
        labels = getattr(output, kind)
        for label in labels:
            if labels.count(label) > 1:
                reason = f"{label} appears twice in the output"
                raise _malformed_einsum(spec, start + text.rindex(label), reason)
            if label not in known:
                reason = f"{label} appears in no input"
                raise _malformed_einsum(spec, start + text.index(label), reason)


def _malformed_einsum(spec: str, position: int, reason: str) -> ValueError:
    position = min(position, len(spec))
    return ValueError(f"Malformed einsum specification: {reason}\n  {spec}\n  {' ' * position}^")
