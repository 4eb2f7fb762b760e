"""``xmap_compat.search``: every assignment of named axes to mesh axes beside the facts about it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xmap_compat import _jax, api
from xmap_compat.core.errors import as_set, did_you_mean, should_be
from xmap_compat.core.mesh import SerialLoop, check_mesh, entered
from xmap_compat.core.placement import current_scope, parse_axis_resources
from xmap_compat.errors import name_of, no_devices
from xmap_compat.tools.plan import Plan, compile_step, figures_of, plan_of_step
from xmap_compat.tools.progress import progress
from xmap_compat.tools.shown import Shown
from xmap_compat.tools.text import axes_name, by_key, listed, show_bytes
from xmap_compat.tools.transfers import sent_over
from xmap_compat.xmapped import declaration_of

LIMIT = 1000  # assignments that are planned at most
ROUNDS = 11  # calls of each step that is measured

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
      seconds, noise: the median of the measured seconds, and half the distance of their quartiles;
        None if not run.
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
    seconds: float | None = None
    noise: float | None = None
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
    """The result of a search; it prints as a table, and draws what a device holds against what it
    sends.

    Attributes:
      mesh, memory: as they were given, or in scope.
      found: those that were run, the fastest first; others by their facts, dominated ones last;
        then refused ones.
      compiled: whether they were compiled, and ``memory`` was compared with XLA's peak.
    """

    mesh: Any
    found: tuple[Candidate, ...]
    memory: float | None
    compiled: bool

    def __getitem__(self, key: Any) -> Any:
        return self.found[key]

    def __len__(self) -> int:
        return len(self.found)

    @property
    def ties(self) -> str:
        """Which measured candidates cannot be told from the fastest; empty if all can."""
        measured = [c for c in self.found if c.seconds is not None]
        if not measured:
            return ""
        fastest, *others = measured
        near = [c.name for c in others if _differ_by_noise(fastest, c)]
        if not near:
            return ""
        return f"measured: {fastest.name} and {', '.join(near)} differ by less than the noise"


def _differ_by_noise(fastest: Any, other: Any) -> bool:
    return other.seconds - fastest.seconds < other.noise + fastest.noise


@_jax.api_boundary
def search(
    f_or_make: Callable[..., Any],
    *args: Any,
    mesh: _jax.AnyMesh | None = None,
    fixed: Mapping[Any, Any] | None = None,
    memory: float | None = None,
    measure: int = 0,
    compiled: bool = False,
) -> Candidates:
    """Every assignment of named axes to mesh axes, beside what each device holds and sends under
    it.

    Those that only exchange equal mesh axes are one.  *Dominated* ones come last; the order of the
    others is not a ranking.  An axis over several mesh axes takes them in the order of the mesh.

    Args:
      f_or_make: an xmapped function; or ``make(axis_resources)`` that returns the step, gradients
        and update included.
      args: arguments of the step, arrays or ``jax.ShapeDtypeStruct``, which are zeros if they are
        measured.
      mesh: the mesh, which may be a ``jax.sharding.AbstractMesh``; None for the mesh in scope.
      fixed: resources of axes that the search leaves fixed: ``{'batch': 'x', 'classes': ()}``.
      memory: bytes of each device, beside the bytes held, or XLA's peak if ``compiled``.  What is
        above is not run.
      measure: how many to run, interleaved, the first that can be used.  Each process measures its
        own times.
      compiled: whether to compile every assignment, for XLA's FLOPs and peak memory.

    Raises:
      TypeError: an argument is of the wrong type.
      ValueError: there is no mesh, ``fixed`` has an unknown axis, or assignments are too many: one
        to fix is proposed.

    Example:

      >>> import jax, numpy as np
      >>> from xmap_compat import Mesh, search, xmap
      >>> def make(axis_resources):
      ...     return jax.grad(xmap(lambda v: jax.lax.psum(v**2, "i"), ["i"], {}, axis_resources=axis_resources))
      >>> found = search(make, np.ones(8, np.float32), mesh=Mesh(jax.devices()[:2], "x"))  # print(found) shows a table
      >>> [(candidate.axis_resources, candidate.bytes_held) for candidate in found]
      [({'i': 'x'}, 20), ({}, 36)]
    """
    _check_arguments(f_or_make, fixed, memory, measure)
    with entered(check_mesh("search", mesh)):
        scope = current_scope().mesh
        if scope is None:
            raise _no_mesh()
        if (compiled or measure) and isinstance(scope, jax.sharding.AbstractMesh):
            raise no_devices(f"search(measure={measure}, compiled={compiled})", scope)
        make = _maker(f_or_make, args, fixed or {})
        name = name_of(f_or_make)
        task = _Task(name, make, args, scope, fixed or {}, memory, compiled)
        assignments = progress(task.assignments(), "assignments")
        found = _ranked(itertools.starmap(task.candidate, assignments))
        if measure:
            found = _ranked(task.measured(found, measure))
    return Candidates(scope, tuple(found), memory, compiled)


def _check_arguments(f_or_make: Any, fixed: Any, memory: Any, measure: Any) -> None:
    if not callable(f_or_make):
        wanted = "an xmapped function, or a function that makes the step"
        raise should_be("The argument f_or_make of search", wanted, f_or_make)
    if fixed is not None and not isinstance(fixed, Mapping):
        raise should_be("The argument fixed of search", "a mapping like {'batch': 'x'}", fixed)
    is_number = isinstance(memory, (int, float)) and memory > 0
    if memory is not None and not is_number:
        raise should_be("The argument memory of search", "a number of bytes", memory)
    if type(measure) is not int or measure < 0:
        wanted = "a whole number that is not negative"
        raise should_be("The argument measure of search", wanted, measure)


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
      kinds: for each mesh axis its size, or the axis itself where equal ones are not the same.
    """

    name: str
    make: Callable[[Resources], Any]
    args: tuple[Any, ...]
    mesh: _jax.AnyMesh
    fixed: Resources
    memory: float | None
    compiled: bool

    def __post_init__(self) -> None:
        plan = plan_of_step(self._first_step(), self.args)
        placed = _placed(plan)
        if not placed:
            raise _no_xmapped_call()
        known = dict(placed)
        _check_fixed(self.fixed, list(known))
        self.names = [name for name in known if name not in self.fixed]
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
                f"search called {self.name}({fixed!r}) as make(axis_resources), which should return "
                "the step with the resources of fixed. Pass an xmapped function, or make(axis_resources)"
            )
            raise
        if not callable(step):
            what = "What make(axis_resources) returns to search"
            raise should_be(what, "the step, a function", step)
        return step

    def assignments(self) -> list[list[Resources]]:
        """Every assignment, beside those that only exchange equal mesh axes."""
        sets: list[Any] = [(), *self.kinds]
        for count in range(2, len(self.kinds) + 1):
            sets.extend(itertools.combinations(self.kinds, count))
        choices = dict.fromkeys(self.names, sets)
        kinds = list(self.kinds.values())
        most = LIMIT
        for kind in set(kinds):
            most *= math.factorial(kinds.count(kind))
        if len(sets) ** len(choices) > most:
            choices = self._undominated(choices, most)
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

    def _undominated(self, choices: Mapping[Any, list[Any]], most: int) -> dict[Any, list[Any]]:
        """The choices that are possible and not dominated where their axis alone is split."""
        kept: dict[Any, list[Any]] = {}
        differences = {}
        for name, own in choices.items():
            kept[name] = []
            sent = []
            for c in _ranked(self.candidate({**self.fixed, name: axes}) for axes in own):
                if c.bytes_held is None:
                    continue
                sent.append(sum(c.bytes_sent.values()))
                if not c.dominated:
                    kept[name].append(c.axis_resources[name])
            differences[name] = max(sent) - min(sent)
        if math.prod(map(len, kept.values())) > most:
            proposed = min(differences, key=differences.__getitem__)
            raise _too_many_candidates(kept, most, proposed)
        return kept

    def candidate(self, resources: Resources, *alike: Resources) -> Candidate:
        """An assignment with its facts, or why it cannot be used."""
        found = Candidate(resources, alike=alike)
        try:
            found = self._planned(found)
            if self.compiled:
                figures = figures_of(compile_step(self.make(dict(resources)), self.args))
                flops = figures.cost.get("flops", 0.0)
                found = dataclasses.replace(found, flops=flops, peak=figures.peak)
            self._check_memory(found)
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

    def _check_memory(self, found: Candidate) -> None:
        needed = found.bytes_held or 0
        which = "arguments and results are"
        if self.compiled:
            needed = found.peak or 0
            which = "XLA's peak is"
        if self.memory is not None and needed > self.memory:
            raise _too_much_memory(which, show_bytes(needed), show_bytes(round(self.memory)))

    def measured(self, found: Sequence[Candidate], count: int) -> list[Candidate]:
        """The candidates, ``count`` of them with medians: interleaved, so that a busy machine slows
        all.
        """
        done = list(found)
        compiled = {}
        for c in usable_of(found)[:count]:
            k = done.index(c)
            try:
                step = compile_step(self.make(dict(found[k].axis_resources)), self.args)
                _seconds(step, self.args)
                compiled[k] = step
            except Exception as error:  # too little memory, or an argument that is elsewhere
                done[k] = dataclasses.replace(found[k], refused=str(error) or repr(error))
        times = defaultdict(list)
        for _ in progress(range(ROUNDS), "rounds of calls"):
            for k, step in compiled.items():
                times[k].append(_seconds(step, self.args))
        for k, own in times.items():
            low, middle, high = statistics.quantiles(own, n=4)
            done[k] = dataclasses.replace(found[k], seconds=middle, noise=(high - low) / 2)
        return done


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
        return c.refused is not None, c.seconds or math.inf, c.dominated, c.facts

    return sorted(judged, key=key)


def _seconds(compiled: Any, args: Any) -> float:
    """The seconds of one call, whose arguments are copies, because the step may donate them."""

    def as_array(value: Any) -> Any:
        if isinstance(value, jax.ShapeDtypeStruct):
            return jnp.zeros(value.shape, value.dtype)
        return value

    given = jax.tree.map(as_array, args)
    given = jax.device_put(given, compiled.input_shardings[0], may_alias=False)
    jax.block_until_ready(given)
    clock = time.perf_counter
    if jax.default_backend() == "cpu":
        clock = time.process_time  # fake devices share the cores
    begin = clock()
    jax.block_until_ready(compiled(*given))
    return clock() - begin


# ----------------------------------------------------------------------------- messages


def _no_mesh() -> ValueError:
    return ValueError(
        "search needs a mesh to assign axes to. Pass mesh=Mesh(devices, names), or search "
        "inside `with Mesh(devices, names):`"
    )


def _no_maker(name: str, count: int) -> TypeError:
    return TypeError(
        f"search got {name}, which cannot be called with axis_resources alone: it looks like the step itself. Pass an "
        f"xmapped function, or a function that makes the step: lambda axis_resources: <the step of {count} arguments>"
    )


def _unknown_fixed_axes(unknown: Sequence[Hashable], known: Sequence[Hashable]) -> ValueError:
    return ValueError(
        f"search: fixed has resources for axes {as_set(unknown)}, but the xmapped functions of the step have the axes "
        f"{as_set(known)}. Name only these in fixed{did_you_mean(unknown, known)}"
    )


def _ignored_resources(names: Sequence[Hashable]) -> ValueError:
    return ValueError(
        f"the step that make(axis_resources) returned gave other resources to the axes {as_set(names)}. Let it pass "
        "axis_resources on to xmap, or pin the axis by fixed="
    )


def _no_xmapped_call() -> ValueError:
    return ValueError(
        "search found no call of an xmapped function in the step, so there are no named axes to assign. Let "
        "make(axis_resources) return a function that calls xmap(..., axis_resources=axis_resources)"
    )


def _too_many_candidates(choices: Mapping[Any, list[Any]], most: int, proposed: Any) -> ValueError:
    counts = {name: len(own) for name, own in choices.items()}
    each = listed(f"{count} for {name}" for name, count in counts.items())
    return ValueError(
        f"There are {math.prod(counts.values())} assignments ({each}), more than the {most} that search plans. Fix an "
        f"axis: fixed={{{proposed!r}: ()}}, whose resources change the bytes sent least; or give it some there"
    )


def _too_much_memory(which: str, needed: str, given: str) -> ValueError:
    return ValueError(f"{which} {needed}, more than memory, {given}")
