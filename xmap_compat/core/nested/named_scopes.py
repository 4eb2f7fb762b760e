"""Which equations of a traced body come from an xmap nested in it.

A nested call is evaluated when the body around it is traced, so its equations no longer show the
placements of its axes.  It runs under a named scope that stands for them: jit may return a traced
function from its cache without calling it, and the scope is part of the traced function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Iterator

import jax

from xmap_compat.core.placement import Placement


@dataclasses.dataclass(frozen=True)
class NestedCall:
    """A call of an xmapped function in the body of another.

    Attributes:
      function: its name.
      axes: its named axes and how they are executed.
    """

    function: str
    axes: tuple[Placement, ...]


# Equal calls share one scope: this grows with the axes of a program, and not with its calls.
_calls: dict[str, NestedCall] = {}


@contextlib.contextmanager
def named_scope(call: NestedCall) -> Iterator[None]:
    """The named scope around what a nested call traces."""
    digest = hashlib.blake2s(repr(call).encode(), digest_size=8).hexdigest()
    _calls[digest] = call
    with jax.named_scope(f"nested_xmap_{digest}"):
        yield


def calls_in(name_stack: str) -> list[NestedCall]:
    """The nested calls, outermost first, that an equation with these named scopes comes from."""
    return [
        _calls[digest]
        for digest in re.findall(r"nested_xmap_([0-9a-f]{16})", name_stack)
        if digest in _calls
    ]
