"""The operations of a staged program: calls and ``shard_map`` are inlined, loops and branches are
entered.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from xmap_compat import _jax
from xmap_compat.core.bodies import bodies_of


@dataclasses.dataclass(frozen=True)
class Position:
    """A place in the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


def position_of(eqn: Any) -> Position | None:
    """The line of the user that an equation comes from."""
    for file, function, line, *_ in _jax.user_frames(eqn):
        return Position(file, line, function)
    return None


def bytes_of(aval: Any) -> int:
    shape = getattr(aval, "shape", ())
    dtype = getattr(aval, "dtype", None)
    return math.prod(shape) * getattr(dtype, "itemsize", 0)


class Around(NamedTuple):
    """What is around an operation.

    Attributes:
      stack: the named scopes.
      sizes: the mesh axes of the ``shard_map``, and their sizes.
      times: how often it runs; None in a while loop.
      conditional: whether it is in a branch of a cond.
    """

    stack: str = ""
    sizes: Mapping[Any, int] = {}
    times: int | None = 1
    conditional: bool = False

    def scopes(self, eqn: Any) -> str:
        """The named scopes around an equation."""
        return f"{self.stack}/{eqn.source_info.name_stack}"

    def inside(self, eqn: Any, found: Any) -> Around:
        """What is around the equations of the jaxprs in an equation."""
        around = self._replace(stack=self.scopes(eqn))
        if isinstance(found, _jax.ShardMap):
            return around._replace(sizes=found.mesh_shape)
        if isinstance(found, _jax.Scan) and self.times is not None:
            return around._replace(times=self.times * found.length)
        if isinstance(found, _jax.While):
            return around._replace(times=None)
        if isinstance(found, _jax.Cond):
            return around._replace(conditional=True)
        return around


_INLINED = (
    _jax.Call,
    _jax.CustomJvp,
    _jax.CustomVjp,
    _jax.CustomVmap,
    _jax.Checkpoint,
)


def operations(jaxpr: Any) -> Iterator[tuple[Any, Around]]:
    """The equations that XLA runs, in order: without those that nothing needs, and those that
    compute once more what another one has computed.
    """
    yield from _operations(_jax.without_dead_code(jaxpr), Around(), [], {})


def _operations(
    jaxpr: Any, around: Around, operands: Sequence[Any], computed: dict[Any, list[Any]]
) -> Generator[tuple[Any, Around], None, list[Any]]:
    """Yields the operations of a jaxpr, and returns its results.

    Args:
      operands: an object for each value, which is equal for equal values; the inputs of the jaxpr
        are the last ones.
      computed: the results of each expression.
    """
    opened, _ = _jax.open_jaxpr(jaxpr)
    inputs = operands[len(operands) - len(opened.invars) :]
    values = dict(zip(opened.invars, inputs))

    def value(v: Any) -> Any:
        if isinstance(v, _jax.Literal):
            return str(v)
        return values.setdefault(v, object())

    for eqn in opened.eqns:
        found = _jax.read(eqn)
        inside = around.inside(eqn, found)
        given = [value(v) for v in eqn.invars]
        if isinstance(found, _INLINED):
            results = yield from _operations(found.body, inside, given, computed)
            values.update(zip(eqn.outvars, results))
            continue
        if isinstance(found, _jax.ShardMap):
            yield from _operations(found.body, inside, [], computed)
            continue
        bodies = _bodies(eqn, found)
        for body in bodies:
            yield from _operations(body, inside, [], {})
        is_expression = not bodies and not _jax.has_side_effect(eqn)
        key = eqn.primitive.name, str(eqn.params), *given
        if is_expression and key in computed:
            values.update(zip(eqn.outvars, computed[key]))
            continue
        yield eqn, around
        if is_expression:
            computed[key] = [value(v) for v in eqn.outvars]
    return [value(v) for v in opened.outvars]


def _bodies(eqn: Any, found: Any) -> list[Any]:
    jaxprs = []
    if found is not None:
        jaxprs = [body.jaxpr for body in bodies_of(found)]
    return jaxprs or list(_jax.subjaxprs(eqn.params))
