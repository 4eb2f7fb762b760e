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
from xmap_compat.core.device import cast_alike, cast_as, cast_to, laid_out_over
from xmap_compat.core.evaluate import Evaluator, Rule
from xmap_compat.core.names import Names, operands_of_branches
from xmap_compat.core.passes import flowing
from xmap_compat.core.rules.reductions import max_over
from xmap_compat.core.structured.callables import checkpointed, collectives_within, communicates
from xmap_compat.core.values import NamedValue, is_smooth, positional, transposed, without


def select(ev, which: NamedValue, cases: Sequence[NamedValue]) -> NamedValue:
    """The cases that ``which`` chooses; its positional dimensions are the first ones of each
    case.
    """
    trailing = cases[0].positional_shape()[which.dims.count(None) :] if None in which.dims else []
    if trailing:
        full = (*which.data.shape, *trailing)
        data = lax.broadcast_in_dim(which.data, full, range(which.data.ndim))
        which = NamedValue(data, (*which.dims, *(None for _ in trailing)), which.names)
    return bind_named(ev.view, lax.select_n_p, [which, *cases], {})[0]


def cond(
    ev: Evaluator,
    cond: _jax.Cond,
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
    _, *entering = operands_of_branches(cond, [v.names for v in operands])
    index, *operands = operands
    if entering != [v.names for v in operands]:
        operands = ev.laid_out(operands, entering)
    branches = cond.branches
    names = [
        n | index.names
        for n in map(frozenset().union, *(ev.names_of(b, operands) for b in branches))
    ]
    ev = dataclasses.replace(ev, diverging=ev.diverging | index.names)
    if ev.view.local_names(index.names) or (index.names and communicates(ev, *branches)):
        return _select_result(ev, branches, index, operands, mask)

    def branch(jaxpr):
        return lambda *values: ev.laid_out(ev.evaluate(jaxpr, values), names)

    if cond.platforms is not None:
        return _by_platform(cond.platforms, [branch(b) for b in branches], operands)
    # Operands are cast before the branches: a cast within a branch would become a sum within a
    # branch of the gradient.
    operands = [cast_to(ev.view, v, index.names) for v in operands]
    return lax.switch(index.data, _alike(ev, [branch(b) for b in branches], operands), *operands)


def _alike(ev, branches, operands):
    """Branches whose results vary over the same mesh axes of the user's own ``shard_map``."""
    if not ev.view.in_users_shard_map:
        return branches
    types = [jax.make_jaxpr(branch)(*operands).out_avals for branch in branches]
    axes = [
        frozenset().union(*(_jax.varying_axes_of(aval) for aval in avals)) for avals in zip(*types)
    ]
    return [
        lambda *values, branch=branch: cast_as(ev.view, branch(*values), axes)
        for branch in branches
    ]


def _by_platform(platforms, branches, operands):
    """``lax.platform_dependent``: only the platform's branch is lowered, because others may not
    lower there.

    Args:
      platforms: for each branch the platforms that take it, or None for all others.
    """
    named = {
        name: branch for taken_by, branch in zip(platforms, branches) for name in taken_by or ()
    }
    default = next(
        (branch for taken_by, branch in zip(platforms, branches) if taken_by is None), None
    )
    return lax.platform_dependent(*operands, default=default, **named)


def _select_result(ev, branches, index, operands, mask):
    masks = [dataclasses.replace(index, data=index.data == k) for k in range(len(branches))]
    if mask is not None:
        masks = [bind_named(ev.view, lax.and_p, [mask, taken], {})[0] for taken in masks]
    results = [_Branch(ev, taken).evaluate(b, operands) for b, taken in zip(branches, masks)]
    return [select(ev, index, cases) for cases in zip(*results)]


class _Place(enum.Enum):
    """Where an equation of a branch has its gradient cut, for elements that do not take the branch.

    ``OPERANDS``: at its operands.  ``SHARED``: its results flow into a collective, and so to other
    elements; at the inputs of the branch, where none of these takes it.  ``INSIDE``: in its bodies,
    which hold such a collective.
    """

    OPERANDS = enum.auto()
    SHARED = enum.auto()
    INSIDE = enum.auto()


@dataclasses.dataclass(frozen=True)
class _Branch:
    """A branch that only some elements take, evaluated so that the others have no derivative of it.

    Their cotangents are zero, and ``0 * inf`` would be NaN where the branch may not be
    differentiated.  So their gradient is cut, as ``jax.vmap`` does, except where values flow into a
    collective over an axis along which elements
    take different branches: from there they reach elements that take the branch.

    Attributes:
      mask: which elements take the branch.
    """

    ev: Evaluator
    mask: NamedValue

    def evaluate(self, jaxpr: Any, operands: Sequence[NamedValue]) -> list[NamedValue]:
        body, consts = _jax.open_jaxpr(jaxpr)
        env = dict(zip(_jax.input_vars(body), [*map(positional, consts), *operands], strict=True))
        values = self._run(body.eqns, env)
        return [
            positional(v.val) if isinstance(v, _jax.Literal) else values[v] for v in body.outvars
        ]

    def _run(self, eqns: Sequence[Any], env: dict[Any, NamedValue]) -> Mapping[Any, NamedValue]:
        """The values of all variables, from those of the inputs."""
        together = lambda name: name not in self.mask.names and self.ev.view.is_bound(name)  # noqa: E731
        combined = []
        for eqn in eqns:
            axes = collectives_within(self.ev, eqn, differentiable=True)
            combined.append(frozenset(n for n in axes if not together(n)))
        combining = [eqn for eqn, axes in zip(eqns, combined) if axes]
        flows = flowing(eqns, (), set(combining).__contains__)
        places = list(map(_place_of, eqns, combined, flows))
        structured = (
            eqn for eqn, place in zip(eqns, places) if place is _Place.SHARED and _jax.read(eqn)
        )
        whole = any(flows) or any(structured)
        shared = (
            _Cut(functools.partial(self._cut, frozenset().union(*combined)), env) if whole else env
        )
        cut = _Cut(functools.partial(self._cut, frozenset()), shared)
        rules: Mapping[Any, Rule] = {
            _jax.Call: self._call,
            _jax.Checkpoint: self._checkpoint,
            _jax.Cond: self._cond,
        }
        inside = dataclasses.replace(self.ev, structured={**self.ev.structured, **rules})
        for eqn, place in zip(eqns, places):
            (inside if place is _Place.INSIDE else self.ev).run(
                [eqn], cut if place is _Place.OPERANDS else shared
            )
        return cut

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
        ev, mask = self.ev, self.mask
        # It must not vary over more of these axes: a rule that sums over them relies on the names
        # of its operands.
        names = mask.names - over
        value = laid_out_over(ev.view, value, value.names | names)
        mask = dataclasses.replace(mask, data=mask.data.astype(np.int32)) if over else mask
        axes = ev.view.mesh_axes_of(over) if ev.view.typed else ()
        if axes:
            mask = NamedValue(
                mask.data.max(mask.dims_of(over)), without(mask.dims, over), mask.names
            )
        elif over:
            mask = max_over(ev.view, mask, sorted(over, key=str))
        value, mask = cast_alike(ev.view, [value, mask])
        dims = [n for n in value.dims if n is not None]
        mask = transposed(mask, tuple(n for n in dims if n in mask.dims))
        local = lax.expand_dims(mask.data, [k for k, n in enumerate(dims) if n not in mask.dims])
        return dataclasses.replace(value, data=_cut_p.bind(value.data, local, mesh_axes=axes))


def _place_of(eqn: Any, combined: Names, flows: bool) -> _Place:
    if (
        combined
        and not flows
        and isinstance(_jax.read(eqn), (_jax.Call, _jax.Checkpoint, _jax.Cond))
    ):
        return _Place.INSIDE
    return _Place.SHARED if combined or flows else _Place.OPERANDS


class _Cut(dict):
    """Values of variables; those of ``outside`` come in when they are first used, with their
    gradient cut.
    """

    def __init__(self, cut: Callable[[NamedValue], NamedValue], outside: Mapping[Any, NamedValue]):
        self._cut, self._outside = cut, outside

    def __missing__(self, variable: Any) -> NamedValue:
        value = self._outside[variable]
        return self.setdefault(
            variable, self._cut(value) if is_smooth(jax.typeof(value.data)) else value
        )


def _cut_tangent(t, mask, *, mesh_axes):
    reached = lax.pmax(mask, mesh_axes) if mesh_axes else mask
    if missing := tuple(sorted(_jax.varying_axes(t) - _jax.varying_axes(reached))):
        reached = lax.pcast(reached, missing, to="varying")
    reached = lax.broadcast_in_dim(reached.astype(np.bool_), t.shape, range(reached.ndim))
    return lax.select(reached, t, lax.full_like(t, 0))


# Only the derivative needs other devices, so values are computed without them.
_cut_p = _jax.define_cut("cut", _cut_tangent)
