"""The syntax of a named einsum, ``'n{b,k},{k,m}->n{b,m}'``: letters are positional dimensions,
braces hold names.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from xmap_compat.core.errors import should_be

_PART = re.compile(r"\{([^{},]+(?:,[^{},]+)*)?\}|([a-zA-Z])|\s+")
_COMMA_OUTSIDE_OF_BRACES = re.compile(r",(?![^{]*\})")


class Term(NamedTuple):
    """One operand (or the output) of a spec.

    Attributes:
      letters: positional dimensions in order.
      names: the names in braces.
      text: the part of the spec, for messages.
    """

    letters: tuple[str, ...]
    names: tuple[str, ...]
    text: str


def parse(spec: str) -> tuple[list[Term], Term]:
    """The operands and the output of a spec; errors show the offending character."""
    if not isinstance(spec, str):
        raise should_be(
            "The first argument of a named einsum", "a string like 'n{b,k},{k}->n{b}'", spec
        )
    left, arrow, right = spec.partition("->")
    if not arrow:
        raise _malformed_einsum(spec, len(spec), "'->' and the output are missing")
    inputs = []
    start = 0
    for text in _COMMA_OUTSIDE_OF_BRACES.split(left):
        inputs.append(_term(spec, start, text))
        start += len(text) + 1
    output = _term(spec, start + 1, right)
    for kind in ("letters", "names"):
        known: set[str] = set()
        for term in inputs:
            known.update(getattr(term, kind))
        for label in getattr(output, kind):
            if label not in known:
                position = start + 1 + right.index(label)
                raise _malformed_einsum(spec, position, f"{label} appears in no input")
    return inputs, output


def _term(spec, start, text):
    letters: list[str] = []
    names: list[str] = []
    k = 0
    while k < len(text):
        part = _PART.match(text, k)
        if part is None:
            reason = "a letter, or names in braces such as {i,j}, should be here"
            raise _malformed_einsum(spec, start + k, reason)
        inside, letter = part.groups()
        if inside:
            names += map(str.strip, inside.split(","))
        elif letter:
            letters.append(letter)
        k = part.end()
    for labels in (letters, names):
        for label in labels:
            if labels.count(label) > 1:
                position = start + text.rindex(label)
                raise _malformed_einsum(spec, position, f"{label} appears twice in one array")
    return Term(tuple(letters), tuple(names), text.strip())


def _malformed_einsum(spec: str, position: int, reason: str) -> ValueError:
    return ValueError(f"Malformed einsum specification: {reason}\n  {spec}\n  {' ' * position}^")
