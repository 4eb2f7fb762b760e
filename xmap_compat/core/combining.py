"""Operations whose batching rule is not JAX's: over which axes their results vary.

A rule of a library, or of the user, may combine the elements of an axis: then its result does not
vary over it.  The rule is asked, on types of whole axes, so the answer is the same for all
placements.  Where each device has a part of the axis, such an operation gets the whole axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat.core.once import Once
from xmap_compat.core.parameters import Names
from xmap_compat.core.placement import HiddenAxis, Placement
from xmap_compat.core.specs import AxisName

TraceRule = Callable[[Callable[[], Any], str], Any]


def trace_plainly(fun: Callable[[], Any], advice: str) -> Any:
    """What traces a rule where nothing binds names of axes."""
    return _jax.plainly(fun)


def batched_axes(names: Names, placements: Mapping[AxisName, Placement]) -> list[AxisName]:
    """The axes that a batching rule sees, outermost first."""
    return [n for n in placements if n in names and not isinstance(n, (Once, HiddenAxis))]


def levels_of(
    axes: Sequence[AxisName], inputs: Sequence[Names], sizes: Sequence[int]
) -> list[tuple[int, list[int | None]]]:
    """The axes as dimensions to batch over; operands have theirs first, in this order."""
    levels = []
    for name, size in zip(axes, sizes):
        positions = [0 if name in names else None for names in inputs]
        levels.append((size, positions))
    return levels


def positions_of(axes: Sequence[AxisName], results: Sequence[Names]) -> list[frozenset[int]]:
    """For each result, the positions of the axes that it varies over."""
    positions = []
    for names in results:
        positions.append(frozenset(k for k, n in enumerate(axes) if n in names))
    return positions


@dataclasses.dataclass(frozen=True)
class BatchedEquation:
    """An equation under one ``jax.vmap`` for each axis that its operands vary over.

    Attributes:
      inputs: the named axes of its operands.
      trace: ``(fun, advice) -> fun()``: has the rule traced where it sees no axes.
    """

    eqn: Any
    inputs: Sequence[Names]
    placements: Mapping[AxisName, Placement]
    trace: TraceRule

    @property
    def axes(self) -> list[AxisName]:
        return batched_axes(self.union, self.placements)

    @property
    def union(self) -> Names:
        return frozenset().union(*self.inputs)

    def results(self) -> list[Names]:
        """The named axes of each result, as the batching rule tells.

        Raises:
          Whatever the rule raises: the program is no ``jax.vmap`` either.  Where there is no rule,
            an operation is computed for one element after another.
        """
        axes = self.axes
        if not axes:
            return [self.union] * len(self.eqn.outvars)

        def ask():
            return _jax.varying_results(self._bind, self._types(), self._levels())

        try:
            found = self.trace(ask, self._advice)
        except NotImplementedError:
            return [self.union] * len(self.eqn.outvars)
        others = self.union.difference(axes)
        return [others.union(axes[k] for k in varying) for varying in found]

    def jaxpr(self, results: Sequence[Names]) -> Any:
        """A closed jaxpr on whole axes, the first dimensions of operands and of ``results``."""
        varying = positions_of(self.axes, results)
        fun = _jax.batched(self._bind, self._levels(), varying)
        return self.trace(lambda: jax.make_jaxpr(fun)(*self._types()), self._advice)

    @property
    def _advice(self):
        whose = f"`{_jax.operation_name(self.eqn)}`"
        if isinstance(_jax.read(self.eqn), _jax.CustomVmap):
            whose = "a custom_vmap"
        return (
            f"The rule of {whose} may name no axes of the xmap: its arguments have all elements "
            "in one dimension"
        )

    def _bind(self, *operands):
        return _jax.bind(self.eqn.primitive, operands, self.eqn.params)

    def _levels(self):
        return levels_of(self.axes, self.inputs, self._sizes(self.axes))

    def _sizes(self, axes):
        return [self.placements[name].size for name in axes]

    def _types(self):
        types = []
        for variable, names in zip(self.eqn.invars, self.inputs, strict=True):
            sizes = self._sizes(batched_axes(names, self.placements))
            shape = (*sizes, *variable.aval.shape)
            types.append(jax.ShapeDtypeStruct(shape, variable.aval.dtype))
        return types


def combined_axes(
    inputs: Sequence[Names], results: Sequence[Names], placements: Mapping[AxisName, Placement]
) -> list[AxisName]:
    """The axes whose elements an operation combines: some result does not vary over them."""
    union = frozenset().union(*inputs)
    axes = batched_axes(union, placements)
    combined = []
    for axis in axes:
        if not all(axis in names for names in results):
            combined.append(axis)
    return combined


def takes_whole_axes(eqn: Any) -> bool:
    """Whether an equation is a call whose batching rule, the user's, is given whole axes.

    One that calls Python is evaluated by its function instead.
    """
    return isinstance(_jax.read(eqn), _jax.CustomVmap) and not _jax.has_side_effect(eqn)


def may_combine(eqn: Any) -> bool:
    """Whether an operation may be a collective, although it names no axes."""
    if takes_whole_axes(eqn):
        return True
    if not _jax.has_custom_batching(eqn) or not eqn.invars:
        return False
    axis = "any"
    inputs = [frozenset([axis])] * len(eqn.invars)
    batched = BatchedEquation(eqn, inputs, {axis: Placement(axis, 2)}, trace_plainly)
    try:
        results = batched.results()
    except Exception:  # it is never batched
        return False
    return any(axis not in names for names in results)


# ----------------------------------------------------------------------------- messages


def combined_in_loop(eqn: Any, name: Hashable, where: str) -> RuntimeError:
    return RuntimeError(
        f"The batching rule of `{_jax.operation_name(eqn)}`, used at {where}, combines the "
        f"elements of `{name}`, but axis_resources assign a serial loop to `{name}`, which "
        "computes some of them at a time. Remove the loop, or the operation"
    )
