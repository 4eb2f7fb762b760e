"""``xmap_compat.search``: every assignment of named axes to mesh axes with its price, the best first.

An assignment never changes a result, so cost is the only reason to prefer one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import numbers
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from xmap_compat import _jax, api
from xmap_compat.core.errors import should_be
from xmap_compat.core.mesh import SerialLoop, check_mesh, entered
from xmap_compat.core.placement import DeviceAxis, current_scope, parse_axis_resources, place_axes
from xmap_compat.errors import no_devices
from xmap_compat.tools import cost, errors, runs, steps
from xmap_compat.tools.hardware import Hardware
from xmap_compat.tools.links import Link, hashable, hosts_in
from xmap_compat.tools.shown import Shown
from xmap_compat.tools.text import listed, show_bytes


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One assignment.

    Attributes:
      axis_resources: the argument for ``xmap``.
      cost: its price; None if it was refused before it was staged.
      refused: the reason why you cannot use it (the message of the call, or too much memory); else None.
      compiled: the compiled step; None unless it was compiled.
      measured: seconds of a step; None unless it was run.
      front: whether no other takes both less time and less memory.
      place: 1 for the best and for those whose estimate is worse by at most ``Hardware.margin``, and so on.  Measured
        candidates have places of their own.  None if you cannot use it.
      alike: the assignments that differ from this one only by an exchange of equal mesh axes.
    """

    axis_resources: Mapping[Any, Any]
    cost: cost.Cost | None = None
    refused: str | None = None
    compiled: steps.Compiled | None = None
    measured: float | None = None
    front: bool = False
    place: int | None = None
    alike: tuple[Mapping[Any, Any], ...] = ()

    @property
    def time(self) -> float:
        """The figure that ranks it: measured seconds, or else estimated ones; on unknown hardware FLOPs."""
        return self.estimate if self.measured is None else self.measured

    @property
    def estimate(self) -> float:
        """The upper bound of its seconds; on unknown hardware FLOPs."""
        assert self.cost is not None
        return self.cost.seconds[1] if self.cost.seconds else float(self.cost.flops)

    @property
    def is_split(self) -> bool:
        """Whether it uses a mesh axis."""
        resources = parse_axis_resources(self.axis_resources).values()
        return any(not isinstance(r, SerialLoop) for rs in resources for r in rs)

    @property
    def name(self) -> str:
        """``batch: x, hidden: y``, and after ``=`` the assignments that are alike."""
        shown = [_name_of(resources) for resources in (self.axis_resources, *self.alike[:2])]
        return " = ".join([*shown, *([f"{len(self.alike) - 2} more"] if len(self.alike) > 2 else [])])


def _name_of(resources: Mapping[Any, Any]) -> str:
    axes = {n: r if isinstance(r, (tuple, list)) else (r,) for n, r in resources.items() if r != ()}
    shown = {n: [f"loop {r.length}" if isinstance(r, SerialLoop) else str(r) for r in rs] for n, rs in axes.items()}
    return listed(f"{n}: {'+'.join(rs)}" for n, rs in shown.items()) or "one device"


class Candidates(Shown, tuple[Candidate, ...]):
    """The result of a search, best first, refused ones last; prints as a table, and draws time against memory.

    Attributes:
      margin: the margin of the hardware; estimates that are closer to each other have the same place.
      unrun: why none was run by default; else empty.
    """

    margin = 0.0
    unrun = ""

    @property
    def best(self) -> Candidate:
        """The first that is not refused."""
        if not self or self[0].refused is not None:
            raise errors.nothing_found([c.refused for c in self])
        return self[0]


def search(
    make: Callable[..., Any],
    *args: Any,
    mesh: _jax.AnyMesh | None = None,
    fixed: Mapping[Any, Any] | None = None,
    memory: float | None = None,
    hardware: Hardware | None = None,
    compile: int = 0,
    measure: int | None = None,
    limit: int = 1000,
    seconds: float = 600.0,
) -> Candidates:
    """Price every assignment of named axes to mesh axes, and run the most promising ones.

    Bytes and FLOPs are those of the compiled program, but times are estimates: the candidate with the best estimate may
    not be the fastest.  So by default three are run: the best, among them *one device* and the best that uses several.
    ``measure=0`` runs none.  docs/costs.md has figures.

    Args:
      make: ``make(axis_resources)`` returns the step to price, gradients and update included; or it is an xmapped
        function itself.
      args: arguments of the step, arrays or ``jax.ShapeDtypeStruct``.
      mesh: the mesh, which may be a ``jax.sharding.AbstractMesh``; None for the mesh in scope.
      fixed: resources of axes that the search leaves fixed: ``{'batch': 'x', 'classes': ()}``.
      memory: bytes of each device, by default those of the hardware, and at most those of the devices that run it.  An
        assignment that needs more is refused and never run, and serial loops are tried.
      hardware: the figures for seconds, such as ``Hardware.measure(mesh)``; published figures if None.
      compile: how many of the cheapest to compile, for exact memory and transfers.
      measure: how many to run; arguments that are donated are copied, and types become zeros.  By default 3, and 0 if
        an argument is a type, if the step calls back to Python, if the hardware is that of other devices, or if the
        mesh is abstract or has devices of other processes; the table says which.
      limit: how many to price at most.
      seconds: after this time no further candidate is compiled or run.

    Returns:
      Candidates, best first; those that cannot be used come last, with the reason.

    Raises:
      TypeError: an argument is of the wrong type.
      ValueError: there is no mesh, ``fixed`` names an axis that the step does not have, or there are too many
        candidates: the message says how many, and which axes to fix.

    Example:

      >>> import jax, numpy as np
      >>> from xmap_compat import Hardware, Link, Mesh, Rates, search, xmap
      >>> def make(axis_resources):
      ...     return jax.grad(xmap(lambda v: jax.lax.psum(v**2, "i"), ["i"], {}, axis_resources=axis_resources))
      >>> machine = Hardware("ours", Rates(flops=1e14, bandwidth=1e12), Link(bandwidth=1e11, latency=1e-6))
      >>> found = search(make, np.ones(8, np.float32), mesh=Mesh(jax.devices()[:2], "x"), hardware=machine, measure=0)
      >>> [candidate.axis_resources for candidate in found]  # best first; print(found) shows what they cost
      [{'i': 'x'}, {}]
    """
    counts = {"compile": compile, "measure": measure or 0, "limit": limit}
    _check(make=make, fixed=fixed, hardware=hardware, memory=memory, seconds=seconds, **counts)
    scope = check_mesh("search", mesh) or (current_scope().mesh if mesh is None else None)
    if scope is None:
        raise errors.search_without_mesh()
    is_abstract = isinstance(scope, jax.sharding.AbstractMesh)
    asked = f"search({'measure' if measure else 'compile'}={measure or compile})"
    if is_abstract and (compile or measure):
        raise no_devices(asked, scope)
    if measure and runs.spans_processes(scope):
        raise errors.measured_by_each_process(asked)
    with entered(None if is_abstract and mesh is None else scope), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about resources for axes that only some of the calls have
        task = _Task(_maker(make), args, dict(fixed or {}), hardware or Hardware.of(scope))
        unrun = runs.why_not(task, scope) if measure is None else ""
        measure = (0 if unrun else 3) if measure is None else measure
        limits = memory or getattr(task.hardware, "memory", None), runs.room(scope) if measure else None
        task.memory = min(filter(None, limits), default=None)
        found = task.merged(c for resources in task.choices(limit) for c in task.priced(resources))
        found = runs.looked_into(task, sorted(found, key=_rank), compile, measure, time.monotonic() + seconds)
    margin = 0.0 if task.hardware is None else task.hardware.margin
    result = Candidates(_with_places(_with_front(sorted(found, key=_rank)), margin))
    result.margin, result.unrun = margin, unrun
    return result


_COUNT = (lambda n: isinstance(n, int) and not isinstance(n, bool) and n >= 0, "a whole number that is not negative")
_WANTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "make": (callable, "a function of axis_resources that returns the step, or an xmapped function"),
    "fixed": (lambda v: isinstance(v, (Mapping, type(None))), "a mapping from axes to resources: {'batch': 'x'}"),
    "hardware": (lambda v: isinstance(v, (Hardware, type(None))), "a Hardware, as of Hardware.measure(mesh)"),
    "memory": (lambda v: v is None or (isinstance(v, numbers.Real) and float(v) > 0), "a number of bytes"),
    "seconds": (lambda v: isinstance(v, numbers.Real) and float(v) >= 0, "a number that is not negative"),
    **dict.fromkeys(("compile", "measure", "limit"), _COUNT),
}


def _check(**given: Any) -> None:
    for name, value in given.items():
        right, wanted = _WANTED[name]
        if not right(value):
            raise should_be(f"The argument {name} of search", wanted, value)


def _maker(make: Callable[..., Any]) -> Callable[[Mapping[Any, Any]], Any]:
    declared = api.declaration_of(make)
    return make if declared is None else functools.partial(api.with_resources, declared)


def _rank(c: Candidate) -> tuple[Any, ...]:
    if c.cost is None or c.refused is not None:
        return (2,)
    return (0 if c.measured is not None else 1, c.time, sum(c.cost.bytes_sent.values()), c.cost.memory)


def _with_front(found: Sequence[Candidate]) -> Iterator[Candidate]:
    usable = [c for c in found if c.refused is None and c.cost is not None]
    for c in found:
        beaten = c.cost is None or any(_beats(other, c) for other in usable)
        yield dataclasses.replace(c, front=c.refused is None and not beaten)


def _with_places(found: Iterable[Candidate], margin: float) -> Iterator[Candidate]:
    """The candidates, in their order, each with the place of the first one that is not clearly better."""
    first: Candidate | None = None
    place = 0
    for k, c in enumerate(found):
        if c.cost is None or c.refused is not None:
            yield c
            continue
        are_estimates = first is not None and first.measured is None and c.measured is None
        if first is None or not are_estimates or c.time > (1 + margin) * first.time:
            first, place = c, k + 1
        yield dataclasses.replace(c, place=place)


def _beats(a: Candidate, b: Candidate) -> bool:
    """Whether ``a`` takes less time or less memory than ``b``, and no more of the other.

    Measured times are compared with each other only, and an estimated memory does not beat an exact one.
    """
    if a.compiled is None and b.compiled is not None:
        return False
    both = a.measured is not None and b.measured is not None
    ours, theirs = ((c.time if both else c.estimate, c.cost.memory) for c in (a, b) if c.cost is not None)
    return ours != theirs and ours[0] <= theirs[0] and ours[1] <= theirs[1]


class _Task:
    """The task of a search: the maker of the step, its arguments, and the known facts about its axes."""

    memory: float | None = None

    def __init__(self, make, args, fixed, hardware):
        self.make, self.args, self.hardware = make, args, hardware
        self.scope = current_scope()
        try:
            step = make(dict(fixed))
        except Exception as error:
            error.add_note(errors.made_by_search(fixed))
            raise
        if not callable(step):
            advice = "Write make = lambda axis_resources: step"
            raise should_be("What make(axis_resources) returns to search", "the step, a function", step, advice=advice)
        self.staged = steps.stage(step, args, describe=False)
        self.sizes = [_sizes(found) for found in self.staged.placements]
        if not self.sizes:
            raise errors.unpriced_step()
        known = list(dict.fromkeys(n for sizes in self.sizes for n in sizes))
        if unknown := [n for n in fixed if n not in known]:
            raise errors.unknown_fixed_axes(unknown, known)
        self.names = [n for n in known if n not in fixed]
        self.fixed, self._meetings = fixed, {}

    def choices(self, limit: int) -> list[dict[Any, Any]]:
        """Every assignment: for each name every ordered choice of mesh axes."""
        axes = [] if self.scope.mesh is None else list(self.scope.mesh.shape)
        ordered = [c for n in range(len(axes) + 1) for c in itertools.permutations(axes, n)]
        possible = {name: [c for c in ordered if self._refusal({name: c}) is None] for name in self.names}
        count = math.prod(map(len, possible.values()))
        if count > limit:
            raise errors.too_many_candidates(count, limit, {name: len(c) for name, c in possible.items()})
        refused = [{n: _plain(c)} for n in self.names for c in ordered if c not in possible[n]]
        every = [
            {n: _plain(c) for n, c in zip(self.names, chosen) if c} for chosen in itertools.product(*possible.values())
        ]
        return [{**self.fixed, **resources} for resources in (*every, *refused)]

    def merged(self, found: Iterable[Candidate]) -> list[Candidate]:
        """The candidates; those that exchange equal mesh axes and are as much work are one, named after the best."""
        equal, kept = _equal_axes(self.scope.mesh, self.hardware), dict[Any, Candidate]()
        for c in found:
            price = None if c.cost is None else (c.cost.flops, c.cost.memory, sorted(c.cost.bytes_sent.values()))
            same = _exchanged(c.axis_resources, equal) if c.refused is None else repr(c.axis_resources)
            key = same, repr(price)
            first = kept.setdefault(key, c)
            if first is not c:
                best, other = sorted((first, c), key=_rank)
                kept[key] = dataclasses.replace(best, alike=(*first.alike, other.axis_resources))
        return list(kept.values())

    def _refusal(self, resources: Mapping[Any, Any]) -> str | None:
        """The message of a call for sizes that cannot be divided."""
        try:
            for sizes in self.sizes:
                parsed = parse_axis_resources({n: r for n, r in resources.items() if n in sizes})
                place_axes(sizes, parsed, self.scope)
        except ValueError as error:
            return str(error)
        return None

    def _meeting(self, resources: Mapping[Any, Any]) -> str | None:
        """The message of a call for two axes that share a mesh axis and meet; each pair and mesh axis is tried once."""
        taken = [(n, a) for n, r in resources.items() for a in (r if isinstance(r, tuple) else (r,))]
        for (n, a), (m, b) in itertools.combinations(taken, 2):
            if a == b and n != m and not isinstance(a, SerialLoop):
                if (n, m, a) not in self._meetings:
                    self._meetings[n, m, a] = self._refusal({n: a, m: a}) or self._stage({n: a, m: a})[1]
                if self._meetings[n, m, a] is not None:
                    return str(self._meetings[n, m, a])
        return None

    def _stage(self, resources: Mapping[Any, Any]) -> tuple[steps.StepPlan | None, str | None]:
        try:
            staged = steps.stage(self.make(dict(resources)), self.args, describe=False)
            ignored = _ignored(resources, staged.placements)
            return (None, errors.ignored_resources(ignored)) if ignored else (staged.plan("step", None), None)
        except Exception as error:  # any refusal of the call
            return None, repr(error) if isinstance(error, KeyError) else str(error) or repr(error)

    def priced(self, resources: dict[Any, Any], loops: bool = True) -> Iterator[Candidate]:
        """An assignment with its price; if it needs too much memory, also others with serial loops."""
        refused = self._refusal(resources) or self._meeting(resources)
        plan, refused = (None, refused) if refused else self._stage(resources)
        if plan is None:
            yield Candidate(resources, refused=refused)
            return
        price = plan.cost_on(self.hardware)
        if self.memory is None or price.memory <= self.memory:
            yield Candidate(resources, price)
            return
        yield Candidate(
            resources, price, errors.too_much_memory(show_bytes(price.memory), show_bytes(round(self.memory)))
        )
        for name in self.names if loops else ():
            yield from self._looped(resources, name)

    def _looped(self, resources: dict[Any, Any], name: Any) -> Iterator[Candidate]:
        """The shortest loop over an axis with which an assignment fits into memory; lengths are powers of two."""
        given = resources.get(name, ())
        entries = given if isinstance(given, tuple) else (given,)
        for length in (2**k for k in range(1, 13)):
            looped = {**resources, name: _plain((*entries, SerialLoop(length)))}
            if self._refusal(looped):
                return
            (candidate,) = self.priced(looped, loops=False)
            if candidate.refused is None:
                yield candidate
                return


def _equal_axes(mesh: _jax.AnyMesh | None, hardware: Hardware | None) -> dict[Any, Any]:
    """For each mesh axis what equal ones have in common: size, hosts, and how long transfers take, up to the margin."""
    links = {} if hardware is None else hardware.links
    per_host = None if hardware is None else hardware.per_host
    ratio, kinds = 1 + (0 if hardware is None else hardware.margin), dict[Any, Any]()
    for axis, size in ({} if mesh is None else mesh.shape).items():
        keys = [(key, key if isinstance(key, tuple) else (key,)) for key in links]
        own = {(names[1:], links[key].ring): _seconds(links[key]) for key, names in keys if axis in names}
        known = per_host is not None or isinstance(mesh, jax.sharding.Mesh)
        hosts = hosts_in(mesh, (axis,), hashable(per_host)) if known and axis not in links else None
        same = (k for k in kinds.values() if k[:2] == (size, hosts) and _are_close(k[2], own, ratio))
        kinds[axis] = next(same, (size, hosts, own))
    return kinds


def _seconds(link: Link) -> tuple[float, ...]:
    """The times of a small and of a large transfer."""
    return tuple(link.of("ppermute", 2, sent) for sent in (1 << 12, 1 << 30))


def _are_close(some: Mapping[Any, Any], others: Mapping[Any, Any], ratio: float) -> bool:
    pairs = (pair for key in some.keys() & others.keys() for pair in zip(some[key], others[key]))
    return some.keys() == others.keys() and all(max(pair) <= ratio * min(pair) for pair in pairs)


def _exchanged(resources: Mapping[Any, Any], kinds: Mapping[Any, Any]) -> str:
    """An assignment with mesh axes named after their kind, in the order in which they occur."""
    known: dict[Any, Any] = {}
    for resource in (r for rs in parse_axis_resources(resources).values() for r in rs if r in kinds):
        known.setdefault(resource, (kinds[resource], sum(kinds[k] == kinds[resource] for k in known)))
    return repr({n: [known.get(r, r) for r in rs] for n, rs in parse_axis_resources(resources).items() if rs})


def _sizes(placements: Mapping[Any, Any]) -> dict[Any, int]:
    return {n: p.size for n, p in placements.items() if not isinstance(n, DeviceAxis)}


def _ignored(resources: Mapping[Any, Any], met: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """The axes that no call placed as ``resources`` say, with the mesh axes that they got."""
    wanted = {n: [r for r in rs if not isinstance(r, SerialLoop)] for n, rs in parse_axis_resources(resources).items()}
    got: dict[Any, list[Any]] = {}
    for placements in met:
        for name in _sizes(placements):
            got.setdefault(name, []).append([*placements[name].mesh_axes])
    return {n: tuple(axes[0]) for n, axes in got.items() if wanted.get(n, []) not in axes}


def _plain(choice: tuple[Any, ...]) -> Any:
    return choice[0] if len(choice) == 1 else choice
