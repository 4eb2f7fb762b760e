"""``xmap_compat.search``: every assignment of named axes to mesh axes beside the facts about it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax

from xmap_compat import _jax, api
from xmap_compat.core.errors import as_set, should_be
from xmap_compat.core.mesh import SerialLoop, check_mesh, entered
from xmap_compat.core.placement import current_scope, parse_axis_resources
from xmap_compat.errors import name_of, no_devices
from xmap_compat.tools.plan import Plan, plan_of_step
from xmap_compat.tools.progress import progress
from xmap_compat.tools.shown import Shown
from xmap_compat.tools.text import axes_name, by_key, listed
from xmap_compat.tools.transfers import sent_over
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
        temporaries; None if refused.
      bytes_sent: bytes that each device sends over each mesh axis, and over tuples of them at once.
      flops, peak: XLA's figures for one device; None unless it was compiled.
      dominated: whether another one has no larger figure and a smaller one, and sends no more over
        any mesh axis.
      refused: the reason why you cannot use it; else None.
      alike: the assignments that differ from this one only by an exchange of equal mesh axes.
    """

    axis_resources: Mapping[Any, Any]
    devices: int = 1
    bytes_held: int | None = None
    bytes_sent: Mapping[Any, int] = dataclasses.field(default_factory=dict)
    flops: float | None = None
    peak: int | None = None
    dominated: bool = False
    refused: str | None = None
    alike: tuple[Mapping[Any, Any], ...] = ()

    @property
    def name(self) -> str:
        """``batch: x, hidden: y``, and after ``=`` the assignments that are alike."""
        names = []
        for resources in (self.axis_resources, *self.alike)[:2]:
            parsed = parse_axis_resources(resources)
            used = [f"{name}: {axes_name(over)}" for name, over in parsed.items() if over]
            names.append(listed(used) or "one device")
        if len(self.alike) > 1:
            names.append(f"{len(self.alike) - 1} more")
        return " = ".join(names)

    @property
    def facts(self) -> tuple[float, ...]:
        """The figures that are compared, the less the better."""
        sent = sum(self.bytes_sent.values())
        return -self.devices, self.flops or 0, self.peak or 0, self.bytes_held or 0, sent

    def beats(self, other: Candidate) -> bool:
        """Whether no figure is larger, and one is smaller."""
        for axes, count in self.bytes_sent.items():
            if count > other.bytes_sent.get(axes, 0):
                return False
        no_larger = all(ours <= theirs for ours, theirs in zip(self.facts, other.facts))
        return no_larger and self.facts != other.facts


@dataclasses.dataclass(frozen=True, repr=False)
class Candidates(Shown, Sequence[Candidate]):
    """The result of a search; it prints as a table.

    Attributes:
      mesh: as it was given, or in scope.
      found: usable ones in the order of their facts, dominated ones last; then refused ones.
      compiled: whether they were compiled.
    """

    mesh: Any
    found: tuple[Candidate, ...]
    compiled: bool

    def __getitem__(self, key: Any) -> Any:
        return self.found[key]

    def __len__(self) -> int:
        return len(self.found)


@_jax.api_boundary
def search(
    f_or_make: Callable[..., Any],
    *args: Any,
    mesh: _jax.AnyMesh | None = None,
    fixed: Mapping[Any, Any] | None = None,
    compiled: bool = False,
) -> Candidates:
    """Every assignment of named axes to mesh axes, beside what each device holds and sends under
    it.

    Those that only exchange equal mesh axes are one.  *Dominated* ones come last; the order of the
    others is not a ranking.  An axis over several mesh axes takes them in the order of the mesh.

    Args:
      f_or_make: an xmapped function; or ``make(axis_resources)`` that returns the step, gradients
        and update included.
      args: arguments of the step, arrays or ``jax.ShapeDtypeStruct``.
      mesh: the mesh, which may be a ``jax.sharding.AbstractMesh``; None for the mesh in scope.
      fixed: resources of axes that the search leaves fixed: ``{'batch': 'x', 'classes': ()}``.
      compiled: whether to compile every assignment, for XLA's FLOPs and peak memory.

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
    with entered(check_mesh("search", mesh)):
        scope = current_scope().mesh
        if scope is None:
            raise _no_mesh()
        if compiled and isinstance(scope, jax.sharding.AbstractMesh):
            raise no_devices("search(compiled=True)", scope)
        make = _maker(f_or_make, args, fixed or {})
        task = _Task(name_of(f_or_make), make, args, scope, fixed or {}, compiled)
        assignments = progress(task.assignments(), "assignments")
        found = _ranked(itertools.starmap(task.candidate, assignments))
    return Candidates(scope, tuple(found), compiled)


def _maker(
    f_or_make: Callable[..., Any], args: tuple[Any, ...], fixed: Resources
) -> Callable[[Resources], Any]:
    """The function that makes the step."""
    declared = declaration_of(f_or_make)
    if declared is not None:
        _check_fixed(fixed, declared.names)
        return functools.partial(api.with_resources, declared)
    try:
        inspect.signature(f_or_make).bind({})
    except TypeError:
        raise _no_maker(name_of(f_or_make), len(args)) from None
    return f_or_make


def _check_fixed(fixed: Resources, known: Sequence[Hashable]) -> None:
    unknown = [name for name in fixed if name not in known]
    if unknown:
        raise _unknown_fixed_axes(unknown, known)


@dataclasses.dataclass
class _Task:
    """The task of a search.

    Attributes:
      name: that of the function which the user gave.
      make: makes the step.
      names: the axes to assign.
      kinds: for each mesh axis its size, as equal ones can be exchanged; its name if a
        ``shard_map`` of the user's tells them apart.
    """

    name: str
    make: Callable[[Resources], Any]
    args: tuple[Any, ...]
    mesh: _jax.AnyMesh
    fixed: Resources
    compiled: bool

    def __post_init__(self) -> None:
        plan = plan_of_step(self._first_step(), self.args)
        placed = _placed(plan)
        if not placed:
            raise _no_xmapped_call()
        known = dict(placed)
        _check_fixed(self.fixed, list(known))
        self.names = [*known]
        for name in self.fixed:
            self.names.remove(name)
        has_own_shard_map = plan.mesh is not None and not any(known.values())
        self.kinds = dict(self.mesh.shape)
        if has_own_shard_map:
            self.kinds = dict(zip(self.kinds, self.kinds))

    def _first_step(self) -> Callable[..., Any]:
        fixed = dict(self.fixed)
        try:
            step = self.make(fixed)
        except Exception as error:
            error.add_note(
                f"search called {self.name}({fixed!r}) as make(axis_resources), which should "
                "return the step with the resources of fixed. Pass an xmapped function, or "
                "make(axis_resources)"
            )
            raise
        if not callable(step):
            what = "What make(axis_resources) returns to search"
            raise should_be(what, "the step, a function", step)
        return step

    def assignments(self) -> list[list[Resources]]:
        """All assignments, in groups of those that only exchange equal mesh axes."""
        sets: list[Any] = [(), *self.kinds]
        for count in range(2, len(self.kinds) + 1):
            sets.extend(itertools.combinations(self.kinds, count))
        choices = dict.fromkeys(self.names, sets)
        kinds = list(self.kinds.values())
        most = LIMIT
        for kind in set(kinds):
            most *= math.factorial(kinds.count(kind))
        if len(sets) ** len(choices) > most:
            raise _too_many_candidates(self.names, len(sets), most)
        every: list[Resources] = []
        for chosen in itertools.product(*choices.values()):
            resources = dict(self.fixed)
            for name, axes in zip(choices, chosen):
                if axes != ():
                    resources[name] = axes
            every.append(resources)
        return list(by_key(every, self._exchanged).values())

    def _exchanged(self, resources: Resources) -> str:
        """An assignment with mesh axes named after their kind, in the order in which they occur."""
        names: dict[Any, Any] = {}
        counts: Counter[Any] = Counter()
        found = {}
        for name, over in parse_axis_resources(resources).items():
            for axis in over:
                if axis in self.kinds and axis not in names:
                    kind = self.kinds[axis]
                    counts[kind] += 1
                    names[axis] = kind, counts[kind]
            if over:
                found[name] = [names.get(axis, axis) for axis in over]
        return repr(found)

    def candidate(self, resources: Resources, *alike: Resources) -> Candidate:
        """An assignment with its facts, or why it cannot be used."""
        found = Candidate(resources, alike=alike)
        try:
            found = self._planned(found)
            if self.compiled:
                found = self._compiled(found)
        except Exception as error:  # of the call, or of the compiler
            found = dataclasses.replace(found, refused=str(error) or repr(error))
        return found

    def _planned(self, found: Candidate) -> Candidate:
        plan = plan_of_step(self.make(dict(found.axis_resources)), self.args)
        placed = _placed(plan)
        wanted = parse_axis_resources(found.axis_resources)
        ignored = []
        for name in dict(placed):
            over = [r for r in wanted.get(name, ()) if not isinstance(r, SerialLoop)]
            if (name, tuple(over)) not in placed:
                ignored.append(name)
        if ignored:
            raise _ignored_resources(ignored)
        used: set[Any] = set()
        for _, axes in placed:
            used.update(getattr(axis, "mesh_axis", axis) for axis in axes)
        devices = math.prod(size for axis, size in self.mesh.shape.items() if axis in used)
        sent = sent_over(plan.transfers, self.mesh)
        return dataclasses.replace(
            found, devices=devices, bytes_held=plan.bytes_held, bytes_sent=sent
        )

    def _compiled(self, found: Candidate) -> Candidate:
        """The candidate with XLA's figures."""
        step = self.make(dict(found.axis_resources))
        if not hasattr(step, "lower"):
            step = jax.jit(step)
        compiled = step.lower(*self.args).compile()
        memory = compiled.memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        held += memory.temp_size_in_bytes - memory.alias_size_in_bytes
        # On CPUs, XLA's peak lacks some of these.
        peak = max(held, getattr(memory, "peak_memory_in_bytes", 0))
        flops = (compiled.cost_analysis() or {}).get("flops", 0.0)
        return dataclasses.replace(found, flops=flops, peak=peak)


def usable_of(found: Iterable[Candidate]) -> list[Candidate]:
    return [c for c in found if c.refused is None]


def _placed(plan: Plan) -> list[tuple[Any, tuple[Any, ...]]]:
    """The named axes of all calls, each with the mesh axes that it is split over."""
    axes = list(plan.axes)
    for nested in plan.nested:
        axes.extend(nested.axes)
    return [(axis.name, axis.mesh_axes) for axis in axes]


def _ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates in order, and which of them are dominated."""
    found = list(candidates)
    usable = usable_of(found)
    judged = []
    for candidate in found:
        dominated = any(other.beats(candidate) for other in usable)
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


def _no_maker(name: str, count: int) -> TypeError:
    return TypeError(
        f"search got {name}, which cannot be called with axis_resources alone: it looks like the "
        "step itself. Pass an xmapped function, or a function that makes the step: lambda "
        f"axis_resources: <the step of {count} arguments>"
    )


def _unknown_fixed_axes(unknown: Sequence[Hashable], known: Sequence[Hashable]) -> ValueError:
    return ValueError(
        f"search: fixed has resources for axes {as_set(unknown)}, but the xmapped functions of the "
        f"step have the axes {as_set(known)}. Name only these in fixed"
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


def _too_many_candidates(names: Sequence[Hashable], count: int, most: int) -> ValueError:
    return ValueError(
        f"There are {count ** len(names)} assignments ({count} for each of {as_set(names)}), more "
        f"than the {most} that search plans. Fix an axis: fixed={{{names[-1]!r}: ()}}; or give it "
        "some mesh axis there"
    )
