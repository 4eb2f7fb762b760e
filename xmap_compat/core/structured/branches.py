"""``lax.cond`` and ``lax.switch``: a selection among the results of all branches where elements
take different ones.

On different devices they may take different branches, but not with collectives in these, which all
devices must reach.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.batch import bind_named
from xmap_compat.core.device import cast_alike, cast_to, laid_out_over
from xmap_compat.core.evaluate import Evaluator, Rule
from xmap_compat.core.names import Names, flow_through
from xmap_compat.core.passes import flowing
from xmap_compat.core.rules.reductions import max_over
from xmap_compat.core.structured.callables import checkpointed, collective_axes_within, communicates
from xmap_compat.core.values import (
    NamedValue,
    common,
    is_smooth,
    names_of_each,
    positional,
    transposed,
    value_of,
    without,
)


def select(ev, which: NamedValue, cases: Sequence[NamedValue]) -> NamedValue:
    """The cases that ``which`` chooses; its positional dimensions are the first ones of each
    case.
    """
    rank = which.dims.count(None)
    trailing = cases[0].positional_shape()[rank:]
    if rank and trailing:
        shape = (*which.data.shape, *trailing)
        data = lax.broadcast_in_dim(which.data, shape, range(which.data.ndim))
        dims = (*which.dims, *(None,) * len(trailing))
        which = NamedValue(data, dims, which.names)
    return _bind_one(ev, lax.select_n_p, [which, *cases])


def _bind_one(ev, primitive, operands):
    (result,) = bind_named(ev.view, primitive, operands, {})
    return result


def cond(
    ev: Evaluator,
    held: _jax.Cond,
    operands: Sequence[NamedValue],
    eqn: Any,
    mask: NamedValue | None = None,
) -> list[NamedValue]:
    """A ``lax.switch`` over the evaluated branches, or a selection among the results of all of
    them.

    Args:
      operands: the index of the branch, then the operands of every branch.
      mask: which elements take the branch around it; None if all do.

    Returns:
      Results that vary over the names of the index and of any branch's results.  It is a selection
      where elements on one device take different branches, and where devices might miss each other
      in a collective.
    """
    names_before = names_of_each(operands)
    flow = flow_through(ev.checker, held, names_before)
    if flow.operands != names_before:
        operands = ev.laid_out(operands, flow.operands)
    index, *operands = operands
    ev = dataclasses.replace(ev, diverging=ev.diverging | index.names)
    differ_on_a_device = bool(ev.view.local_names(index.names))
    if differ_on_a_device or (index.names and communicates(ev, *held.branches)):
        return _select_result(ev, held.branches, index, operands, mask)
    branches = [_branch(ev, jaxpr, flow.results) for jaxpr in held.branches]
    if held.platforms is not None:
        return _by_platform(held.platforms, branches, operands)
    # Operands are cast before the branches: a cast within a branch would become a sum within a
    # branch of the gradient.
    operands = [cast_to(ev.view, v, index.names) for v in operands]
    return lax.switch(index.data, branches, *operands)


def _branch(ev, jaxpr, names):
    def branch(*operands):
        return ev.laid_out(ev.evaluate(jaxpr, operands), names)

    return branch


def _by_platform(platforms, branches, operands):
    """``lax.platform_dependent``: only the platform's branch is lowered, because others may not
    lower there.

    Args:
      platforms: for each branch the platforms that take it, or None for all others.
    """
    default = None
    branch_of = {}
    for taken_by, branch in zip(platforms, branches):
        if taken_by is None:
            default = branch
        else:
            branch_of.update(dict.fromkeys(taken_by, branch))
    return lax.platform_dependent(*operands, default=default, **branch_of)


def _select_result(ev, branches, index, operands, mask):
    masks = [index.with_data(index.data == k) for k in range(len(branches))]
    if mask is not None:
        masks = [_bind_one(ev, lax.and_p, [mask, taken]) for taken in masks]
    results = []
    for jaxpr, taken in zip(branches, masks):
        results.append(_Branch(ev, taken).evaluate(jaxpr, operands))
    return [select(ev, index, cases) for cases in zip(*results)]


class _CutAt(enum.Enum):
    """Where the gradient of an equation is cut, for elements that do not take the branch.

    ``OPERANDS``: at its operands, as its results reach no other element.
    ``SHARED``: at the inputs of the branch, as its results flow into a collective and so to other
    elements; and only where none of these elements takes the branch.
    ``INSIDE``: within its bodies, which hold such a collective.
    """

    OPERANDS = enum.auto()
    SHARED = enum.auto()
    INSIDE = enum.auto()


@dataclasses.dataclass(frozen=True)
class _Branch:
    """A branch that only some elements take, evaluated so that the others have no derivative of it.

    Their cotangents are zero, and ``0 * inf`` would be NaN where the branch may not be
    differentiated.  So their gradient is cut, as ``jax.vmap`` does, except where values flow into a
    collective over an axis along which elements take different branches: from there they reach
    elements that take the branch.

    Attributes:
      mask: which elements take the branch.
    """

    ev: Evaluator
    mask: NamedValue

    def evaluate(self, jaxpr: Any, operands: Sequence[NamedValue]) -> list[NamedValue]:
        body, consts = _jax.open_jaxpr(jaxpr)
        inputs = [*map(positional, consts), *operands]
        env = dict(zip(_jax.input_vars(body), inputs, strict=True))
        values = self._run(body.eqns, env)
        return [value_of(values, atom) for atom in body.outvars]

    def _run(self, eqns: Sequence[Any], env: dict[Any, NamedValue]) -> Mapping[Any, NamedValue]:
        """The values of all variables, from those of the inputs."""
        combined = {eqn: self._combined_axes(eqn) for eqn in eqns}
        flows = flowing(eqns, (), combined.__getitem__)
        cuts = []
        for eqn, flows_on in zip(eqns, flows):
            cuts.append(_cut_at(eqn, combined[eqn], flows_on))
        shared: Any = env
        if any(flows) or _shares_programs(eqns, cuts):
            everywhere = frozenset().union(*combined.values())
            shared = _Cut(functools.partial(self._cut, everywhere), env)
        at_operands = _Cut(functools.partial(self._cut, frozenset()), shared)
        rules: Mapping[Any, Rule] = {
            _jax.Call: self._call,
            _jax.Checkpoint: self._checkpoint,
            _jax.Cond: self._cond,
        }
        inside = dataclasses.replace(self.ev, structured={**self.ev.structured, **rules})
        for eqn, cut in zip(eqns, cuts):
            if cut is _CutAt.OPERANDS:
                self.ev.run([eqn], at_operands)
            elif cut is _CutAt.SHARED:
                self.ev.run([eqn], shared)
            else:
                inside.run([eqn], shared)
        return at_operands

    def _combined_axes(self, eqn):
        """The axes along which elements take different branches, or that are bound outside, whose
        elements an equation combines.
        """
        axes = collective_axes_within(self.ev, eqn, differentiable=True)
        return axes - self.ev.view.bound(axes - self.mask.names)

    def _call(self, _: Evaluator, call: _jax.Call, operands, eqn):
        return self.evaluate(call.body, operands)

    def _checkpoint(self, _: Evaluator, call: _jax.Checkpoint, operands, eqn):
        return checkpointed(call, self.evaluate)(*operands)

    def _cond(self, _: Evaluator, held: _jax.Cond, operands, eqn):
        return cond(self.ev, held, operands, eqn, self.mask)

    def _cut(self, over: Names, value: NamedValue) -> NamedValue:
        """Cut the gradient of an element if neither it nor any element along the axes ``over``
        takes the branch.

        The result is a linear function of the value, since JAX transposes the operators of solvers.
        """
        view = self.ev.view
        # It must not vary over more of these axes: a rule that sums over them relies on the names
        # of its operands.
        names = self.mask.names - over
        value = laid_out_over(view, value, value.names | names)
        mask, mesh_axes = self._mask_over(over)
        value, mask = cast_alike(view, [value, mask])
        dims = without(value.dims, [None])
        mask = transposed(mask, common(dims, mask.dims))
        missing = [k for k, n in enumerate(dims) if n not in mask.dims]
        aligned = lax.expand_dims(mask.data, missing)
        return value.with_data(_cut_p.bind(value.data, aligned, mesh_axes=mesh_axes))

    def _mask_over(self, over):
        """Which elements take the branch, or have one that does along these axes; and the mesh axes
        along which only the derivative looks for one.
        """
        if not over:
            return self.mask, ()
        view = self.ev.view
        mask = self.mask.with_data(self.mask.data.astype(np.int32))
        mesh_axes = view.mesh_axes_of(over)
        if not view.typed or not mesh_axes:
            return max_over(view, mask, sorted(over, key=str)), ()
        local = mask.data.max(mask.dims_of(over))
        return NamedValue(local, without(mask.dims, over), mask.names), mesh_axes


def _cut_at(eqn: Any, combined: Names, flows: bool) -> _CutAt:
    if not combined and not flows:
        return _CutAt.OPERANDS
    can_cut_inside = isinstance(_jax.read(eqn), (_jax.Call, _jax.Checkpoint, _jax.Cond))
    if can_cut_inside and not flows:
        return _CutAt.INSIDE
    return _CutAt.SHARED


def _shares_programs(eqns, cuts):
    """Whether an equation that holds a program, and combines elements, is cut at the inputs."""
    return any(cut is _CutAt.SHARED and _jax.read(eqn) for eqn, cut in zip(eqns, cuts))


class _Cut(dict):
    """Values of variables; those of ``outside`` come in when they are first used, with their
    gradient cut.
    """

    def __init__(self, cut: Callable[[NamedValue], NamedValue], outside: Mapping[Any, NamedValue]):
        self._cut = cut
        self._outside = outside

    def __missing__(self, variable: Any) -> NamedValue:
        value = self._outside[variable]
        if is_smooth(jax.typeof(value.data)):
            value = self._cut(value)
        self[variable] = value
        return value


def _cut_tangent(t, mask, *, mesh_axes):
    reached = mask
    if mesh_axes:
        reached = lax.pmax(mask, mesh_axes)
    missing = _jax.varying_axes(t) - _jax.varying_axes(reached)
    if missing:
        reached = lax.pcast(reached, tuple(sorted(missing)), to="varying")
    reached = lax.broadcast_in_dim(reached.astype(np.bool_), t.shape, range(reached.ndim))
    return lax.select(reached, t, lax.full_like(t, 0))


# Only the derivative needs other devices, so values are computed without them.
_cut_p = _jax.define_cut("cut", _cut_tangent)
