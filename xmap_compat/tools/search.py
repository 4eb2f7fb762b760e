"""``xmap_compat.search``: every assignment of named axes to mesh axes beside the facts about it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from xmap_compat import _jax, api
from xmap_compat.core.errors import as_set, did_you_mean, name_of, should_be
from xmap_compat.core.mesh import SerialLoop, check_mesh, entered
from xmap_compat.core.placement import current_scope, parse_axis_resources
from xmap_compat.tools.plan import Plan, plan_of_step
from xmap_compat.tools.progress import progress
from xmap_compat.tools.text import axes_name, listed
from xmap_compat.xmapped import declaration_of

LIMIT = 1000  # assignments that are planned at most

Resources = Mapping[Any, Any]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One assignment.

    Attributes:
      axis_resources: the argument for ``xmap``.
      devices: how many devices do different work; the others do the same as one of these.
      bytes_held: of arguments and results of the calls on each device, exactly, without
        temporaries.
      bytes_sent: bytes that each device sends over each mesh axis, and over tuples of them at once.
      dominated: whether another one has no larger figure and a smaller one, and sends no more over
        any mesh axis.
      refused: the reason why you cannot use it; else None.
    """

    axis_resources: Mapping[Any, Any]
    devices: int = 1
    bytes_held: int = 0
    bytes_sent: Mapping[Any, int] = dataclasses.field(default_factory=dict)
    dominated: bool = False
    refused: str | None = None

    @property
    def name(self) -> str:
        """``batch: x, hidden: y``"""
        parsed = parse_axis_resources(self.axis_resources)
        used = [f"{name}: {axes_name(over)}" for name, over in parsed.items() if over]
        return listed(used) or "one device"

    @property
    def facts(self) -> tuple[int, int, int]:
        """The figures that are compared, the less the better."""
        return -self.devices, self.bytes_held, sum(self.bytes_sent.values())

    def beats(self, other: Candidate) -> bool:
        """Whether no figure is larger, and one is smaller."""
        if self.refused is not None:
            return False
        for axes, count in self.bytes_sent.items():
            if count > other.bytes_sent.get(axes, 0):
                return False
        no_larger = all(ours <= theirs for ours, theirs in zip(self.facts, other.facts))
        return no_larger and self.facts != other.facts


@dataclasses.dataclass(frozen=True, repr=False)
class Candidates(Sequence[Candidate]):
    """The result of a search; it prints as a table.

    Attributes:
      mesh: as it was given, or in scope.
      found: usable ones in the order of their facts, dominated ones last; then refused ones.
    """

    mesh: Any
    found: tuple[Candidate, ...]

    def __getitem__(self, key: Any) -> Any:
        return self.found[key]

    def __len__(self) -> int:
        return len(self.found)

    def __repr__(self) -> str:
        from xmap_compat.tools.plan_text import text_of_search

        return text_of_search(self)


@_jax.api_boundary
def search(
    f_or_make: Callable[..., Any],
    *args: Any,
    mesh: _jax.AnyMesh | None = None,
    fixed: Mapping[Any, Any] | None = None,
) -> Candidates:
    """Every assignment of named axes to mesh axes, beside what each device holds and sends under
    it.

    *Dominated* ones come last; the order of the others is not a ranking.  An axis over several mesh
    axes takes them in the order of the mesh.

    Args:
      f_or_make: an xmapped function; or ``make(axis_resources)`` that returns the step, gradients
        and update included.
      args: arguments of the step, arrays or ``jax.ShapeDtypeStruct``.
      mesh: the mesh, which may be a ``jax.sharding.AbstractMesh``; None for the mesh in scope.
      fixed: resources of axes that the search leaves fixed: ``{'batch': 'x', 'classes': ()}``.

    Raises:
      TypeError: an argument is of the wrong type.
      ValueError: there is no mesh, ``fixed`` has an unknown axis, or assignments are too many: one
        to fix is proposed.

    Example:

      >>> import jax, numpy as np
      >>> from xmap_compat import Mesh, search, xmap
      >>> def make(resources):
      ...     f = xmap(lambda v: jax.lax.psum(v**2, "i"), ["i"], {}, axis_resources=resources)
      ...     return jax.grad(f)
      >>> # print(found) shows a table
      >>> found = search(make, np.ones(8, np.float32), mesh=Mesh(jax.devices()[:2], "x"))
      >>> [(candidate.axis_resources, candidate.bytes_held) for candidate in found]
      [({'i': 'x'}, 20), ({}, 36)]
    """
    if not callable(f_or_make):
        wanted = "an xmapped function, or a function that makes the step"
        raise should_be("The argument f_or_make of search", wanted, f_or_make)
    if fixed is not None and not isinstance(fixed, Mapping):
        raise should_be("The argument fixed of search", "a mapping like {'batch': 'x'}", fixed)
    fixed = fixed or {}
    with entered(check_mesh("search", mesh)):
        scope = current_scope().mesh
        if scope is None:
            raise _no_mesh()
        make = _maker(f_or_make, fixed)
        names = _axes_of(_first_plan(make, args, fixed, name_of(f_or_make)))
        _check_fixed(fixed, names)
        assignments = list(_assignments(names, scope, fixed))
        found = []
        for resources in progress(assignments, "assignments"):
            found.append(_candidate(make, args, scope, resources))
    return Candidates(scope, tuple(_ranked(found)))


def _maker(f_or_make: Callable[..., Any], fixed: Resources) -> Callable[[Resources], Any]:
    """The function that makes the step."""
    declared = declaration_of(f_or_make)
    if declared is None:
        return f_or_make
    _check_fixed(fixed, declared.names)
    return functools.partial(api.with_resources, declared)


def _check_fixed(fixed: Resources, known: Sequence[Hashable]) -> None:
    unknown = list(fixed.keys() - set(known))
    if unknown:
        raise _unknown_fixed_axes(unknown, known)


def _first_plan(
    make: Callable[[Resources], Any], args: tuple[Any, ...], fixed: Resources, name: str
) -> Plan:
    """The plan under the resources of ``fixed``, which tells the named axes."""
    try:
        step = make(dict(fixed))
    except Exception as error:
        error.add_note(_note_about_make(name, fixed))
        raise
    if not callable(step):
        what = "What make(axis_resources) returns to search"
        raise should_be(what, "the step, a function", step)
    return plan_of_step(step, args)


def _axes_of(plan: Plan) -> list[Hashable]:
    """The named axes of all calls."""
    names = list(dict(_placed(plan)))
    if not names:
        raise _no_xmapped_call()
    return names


def _placed(plan: Plan) -> list[tuple[Any, tuple[Any, ...]]]:
    """The named axes of all calls, each with the mesh axes that it is split over."""
    axes = list(plan.axes)
    for nested in plan.nested:
        axes.extend(nested.axes)
    return [(axis.name, axis.mesh_axes) for axis in axes]


def _assignments(
    names: Sequence[Hashable], mesh: _jax.AnyMesh, fixed: Resources
) -> Iterator[Resources]:
    """All assignments."""
    choices: list[Any] = [(), *mesh.axis_names]
    for count in range(2, len(mesh.axis_names) + 1):
        choices.extend(itertools.combinations(mesh.axis_names, count))
    free = [name for name in names if name not in fixed]
    if len(choices) ** len(free) > LIMIT:
        raise _too_many_candidates(free, len(choices))
    for chosen in itertools.product(choices, repeat=len(free)):
        resources = dict(fixed)
        for name, axes in zip(free, chosen):
            if axes != ():
                resources[name] = axes
        yield resources


def _candidate(
    make: Callable[[Resources], Any],
    args: tuple[Any, ...],
    mesh: _jax.AnyMesh,
    resources: Resources,
) -> Candidate:
    """An assignment with its facts, or why it cannot be used."""
    try:
        plan = plan_of_step(make(dict(resources)), args)
        placed = _placed(plan)
        _check_not_ignored(placed, resources)
    except Exception as error:
        return Candidate(resources, refused=str(error) or repr(error))
    used: set[Any] = set()
    for _, axes in placed:
        used.update(axes)
    devices = math.prod(mesh.shape[axis] for axis in used)
    return Candidate(resources, devices, plan.bytes_held, plan.sent_over)


def _check_not_ignored(
    placed: Sequence[tuple[Hashable, tuple[Any, ...]]], resources: Resources
) -> None:
    """Raise if the step gave other resources to an axis than it was asked to."""
    wanted = parse_axis_resources(resources)
    ignored = []
    for name in dict(placed):
        over = itertools.filterfalse(_is_loop, wanted.get(name, ()))
        if (name, tuple(over)) not in placed:
            ignored.append(name)
    if ignored:
        raise _ignored_resources(ignored)


def _is_loop(resource: Any) -> bool:
    return isinstance(resource, SerialLoop)


def _ranked(found: Sequence[Candidate]) -> list[Candidate]:
    """The candidates in order, and which of them are dominated."""
    judged = []
    for candidate in found:
        dominated = any(other.beats(candidate) for other in found)
        judged.append(dataclasses.replace(candidate, dominated=dominated))

    def key(c: Candidate) -> Any:
        return c.refused is not None, c.dominated, c.facts

    return sorted(judged, key=key)


# ----------------------------------------------------------------------------- messages


def _no_mesh() -> ValueError:
    return ValueError(
        "search needs a mesh to assign axes to. Pass mesh=Mesh(devices, names), or search "
        "inside `with Mesh(devices, names):`"
    )


def _unknown_fixed_axes(unknown: Sequence[Hashable], known: Sequence[Hashable]) -> ValueError:
    return ValueError(
        f"search: fixed has resources for axes {as_set(unknown)}, but the xmapped functions of the "
        f"step have the axes {as_set(known)}. Name only these in "
        f"fixed{did_you_mean(unknown, known)}"
    )


def _ignored_resources(names: Sequence[Hashable]) -> ValueError:
    return ValueError(
        "the step that make(axis_resources) returned gave other resources to the axes "
        f"{as_set(names)}. Let it pass axis_resources on to xmap, or pin the axis by fixed="
    )


def _no_xmapped_call() -> ValueError:
    return ValueError(
        "search found no call of an xmapped function in the step, so there are no named axes to "
        "assign. Let make(axis_resources) return a function that calls xmap(..., "
        "axis_resources=axis_resources)"
    )


def _too_many_candidates(names: Sequence[Hashable], count: int) -> ValueError:
    return ValueError(
        f"There are {count ** len(names)} assignments ({count} for each of {as_set(names)}), more "
        f"than the {LIMIT} that search plans. Fix an axis: fixed={{{names[-1]!r}: ()}}; or give it "
        "some mesh axis there"
    )


def _note_about_make(name: str, fixed: Resources) -> str:
    return (
        f"search called {name}({dict(fixed)!r}) as make(axis_resources), which should return the "
        "step with the resources of fixed. Pass an xmapped function, or make(axis_resources)"
    )
