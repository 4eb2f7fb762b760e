"""``xmap_compat.search``: every assignment of named axes to mesh axes beside the facts about it.

An assignment never changes a result.  It changes what a device holds and sends, which is counted here, and how long a
call takes, which is measured if you ask for it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import numbers
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xmap_compat import _jax, api
from xmap_compat.core.errors import should_be
from xmap_compat.core.mesh import SerialLoop, check_mesh, devices_of, entered
from xmap_compat.core.placement import DeviceAxis, current_scope, parse_axis_resources, place_axes
from xmap_compat.errors import no_devices
from xmap_compat.tools import errors, steps
from xmap_compat.tools.shown import Shown, axes_name
from xmap_compat.tools.text import listed, show_bytes
from xmap_compat.tools.transfers import sent_over

LIMIT = 1000  # assignments that are planned at most
ROUNDS, LEAST, SECONDS = 15, 5, 2.0  # turns of a measurement, of which some may be left out after so many seconds


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One assignment.

    Attributes:
      axis_resources: the argument for ``xmap``.
      devices: how many devices do different work; the others do the same as one of these.
      bytes_held: bytes of the arguments and results of the xmapped calls on each device, exactly.  Not the peak:
        temporary values, and arrays outside of the calls, are not among them.  None if it was refused.
      bytes_sent: bytes that each device sends over each mesh axis, and over tuples of them at once.
      flops, peak: XLA's figures for one device; None unless it was compiled.
      seconds: the median of the measured seconds; None unless it was run.
      noise: half the distance of the quartiles of these seconds.
      dominated: whether another one is as good in each of these figures and better in one: devices, FLOPs, peak, bytes
        held, all bytes sent; and sends no more over any mesh axis, however a transfer over several is routed.
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
        more = [f"{len(self.alike) - 1} more"] if len(self.alike) > 1 else []
        return " = ".join([*map(_name_of, (self.axis_resources, *self.alike[:1])), *more])

    @property
    def facts(self) -> tuple[float, ...]:
        """The figures that are compared, the less the better."""
        compiled = () if self.flops is None else (self.flops, self.peak or 0)
        return (-self.devices, *compiled, self.bytes_held or 0, sum(self.bytes_sent.values()))


def _name_of(resources: Mapping[Any, Any]) -> str:
    axes = {n: r if isinstance(r, (tuple, list)) else (r,) for n, r in resources.items() if r != ()}
    return listed(f"{n}: {axes_name(tuple(rs))}" for n, rs in axes.items()) or "one device"


@dataclasses.dataclass(frozen=True, repr=False)
class Candidates(Shown, Sequence[Candidate]):
    """The result of a search; it prints as a table, and draws what a device holds against what it sends.

    Attributes:
      mesh: the mesh.
      found: the candidates: those that were run, the fastest first; others by their facts, dominated ones last; then
        those that cannot be used.
      memory: the bytes that a device may have; None if all may be used.
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
    def best(self) -> Candidate:
        """The first that can be used."""
        if not self.found or self.found[0].refused is not None:
            raise errors.nothing_found([c.refused for c in self.found])
        return self.found[0]

    @property
    def ties(self) -> str:
        """Which measured candidates cannot be told from the fastest; empty if all can."""
        run = [(c.name, c.seconds, c.noise or 0.0) for c in self.found if c.seconds is not None]
        near = [name for name, seconds, noise in run[1:] if seconds - run[0][1] < noise + run[0][2]]
        return errors.tied(run[0][0], near) if near else ""


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
    """Every assignment of named axes to mesh axes, beside what each device holds and sends under it.

    Those that only exchange equal mesh axes are one.  *Dominated* ones, which hold and send as much as another one or
    more, are marked and come last; the order of the others is no judgement.  docs/choosing.md says how to choose.

    Args:
      f_or_make: an xmapped function; or ``make(axis_resources)`` that returns the step, gradients and update included.
      args: arguments of the step, arrays or ``jax.ShapeDtypeStruct``.
      mesh: the mesh, which may be a ``jax.sharding.AbstractMesh``; None for the mesh in scope.
      fixed: resources of axes that the search leaves fixed: ``{'batch': 'x', 'classes': ()}``.
      memory: bytes of each device: an assignment above it is named and not run.  It is compared with the bytes held, or
        with XLA's peak if ``compiled``.
      measure: how many to run, the first that can be used, by turns.  Types become zeros; compiling, and copies of
        donated arguments, do not count.  CPUs give processor time, because fake devices share the cores.
      compiled: whether to compile every assignment, for XLA's FLOPs and peak memory.

    Returns:
      Candidates: a sequence, which prints as a table.

    Raises:
      TypeError: an argument is of the wrong type.
      ValueError: there is no mesh, ``fixed`` names an axis that the step does not have, or there are too many
        assignments: the message proposes which axis to fix.

    Example:

      >>> import jax, numpy as np
      >>> from xmap_compat import Mesh, search, xmap
      >>> def make(axis_resources):
      ...     return jax.grad(xmap(lambda v: jax.lax.psum(v**2, "i"), ["i"], {}, axis_resources=axis_resources))
      >>> found = search(make, np.ones(8, np.float32), mesh=Mesh(jax.devices()[:2], "x"))  # print(found) shows a table
      >>> [(candidate.axis_resources, candidate.bytes_held) for candidate in found]
      [({'i': 'x'}, 20), ({}, 36)]
    """
    _check(f_or_make=f_or_make, fixed=fixed, memory=memory, measure=measure)
    scope = check_mesh("search", mesh) or (current_scope().mesh if mesh is None else None)
    if scope is None:
        raise errors.search_without_mesh()
    is_abstract, asked = isinstance(scope, jax.sharding.AbstractMesh), f"search(measure={measure}, compiled={compiled})"
    if is_abstract and (compiled or measure):
        raise no_devices(asked, scope)
    if measure and any(device.process_index != jax.process_index() for device in devices_of(scope)):
        raise errors.measured_by_each_process(asked)
    with entered(None if is_abstract and mesh is None else scope):
        task = _Task(f_or_make, args, dict(fixed or {}), memory, compiled)
        found = _ranked(task.found(), scope)
        found = _ranked(task.measured(found, measure), scope) if measure else found
    return Candidates(scope, tuple(found), memory, compiled)


_WANTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "f_or_make": (callable, "an xmapped function, or a function of axis_resources that returns the step"),
    "fixed": (lambda v: isinstance(v, (Mapping, type(None))), "a mapping from axes to resources: {'batch': 'x'}"),
    "memory": (lambda v: v is None or (isinstance(v, numbers.Real) and float(v) > 0), "a number of bytes"),
    "measure": (lambda v: type(v) is int and v >= 0, "a whole number that is not negative"),
}


def _check(**given: Any) -> None:
    for name, value in given.items():
        right, wanted = _WANTED[name]
        if not right(value):
            raise should_be(f"The argument {name} of search", wanted, value)


def _maker(f_or_make: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[Mapping[Any, Any]], Any]:
    declared = api.declaration_of(f_or_make)
    if declared is not None:
        return functools.partial(api.with_resources, declared)
    try:
        inspect.signature(f_or_make).bind({})
    except TypeError:
        raise errors.no_maker(api.name_of(f_or_make), len(args)) from None
    except ValueError:
        pass
    return f_or_make


def _ranked(found: Iterable[Candidate], mesh: Any) -> list[Candidate]:
    """The candidates in order, with a mark on the dominated ones."""
    every = list(found)
    usable = [c for c in every if c.refused is None]
    marked = [
        dataclasses.replace(c, dominated=c.refused is None and any(_beats(other, c, mesh.shape) for other in usable))
        for c in every
    ]
    return sorted(marked, key=lambda c: (c.refused is not None, c.seconds or math.inf, c.dominated, c.facts))


def _beats(a: Candidate, b: Candidate, mesh_shape: Mapping[Any, int]) -> bool:
    if a.facts == b.facts or any(ours > theirs for ours, theirs in zip(a.facts, b.facts)):
        return False
    spare = {axis: float(b.bytes_sent[axis] - a.bytes_sent[axis]) for axis in mesh_shape}
    for axes in (key for key in {**a.bytes_sent, **b.bytes_sent} if key not in mesh_shape):
        more, devices = a.bytes_sent.get(axes, 0) - b.bytes_sent.get(axes, 0), math.prod(mesh_shape[k] for k in axes)
        for axis in axes:  # of all its bytes, b sends at least this share over the axis, if it comes first
            spare[axis] -= more if more > 0 else more * (mesh_shape[axis] - 1) / (devices - 1)
    return min(spare.values()) >= 0


class _Task:
    """The task of a search: the maker of the step, its arguments, and the known facts about its axes."""

    def __init__(self, f_or_make, args, fixed, memory, compiled):
        self.make, self.args, self.memory, self.compiled = _maker(f_or_make, args), args, memory, compiled
        self.scope, self.fixed, self._meetings = current_scope(), fixed, dict[Any, str | None]()
        self.mesh: Any = self.scope.mesh
        try:
            step = self.make(dict(fixed))
        except Exception as error:
            error.add_note(errors.made_by_search(fixed))
            raise
        if not callable(step):
            advice = "Write make = lambda axis_resources: step"
            raise should_be("What make(axis_resources) returns to search", "the step, a function", step, advice=advice)
        staged = steps.stage(step, args, describe=False)
        self.sizes = [
            {n: p.size for n, p in found.items() if not isinstance(n, DeviceAxis)} for found in staged.placements
        ]
        split = any(p.mesh_axes for found in staged.placements for p in found.values())
        self.kinds = _kinds(self.mesh, all_differ=staged.mesh is not None and not split)
        if not self.sizes:
            raise errors.no_xmapped_call()
        known = list(dict.fromkeys(n for sizes in self.sizes for n in sizes))
        if unknown := [n for n in fixed if n not in known]:
            raise errors.unknown_fixed_axes(unknown, known)
        self.names = [n for n in known if n not in fixed]

    def found(self) -> Iterator[Candidate]:
        """Every assignment, those that exchange equal mesh axes once."""
        kept: dict[Any, Candidate] = {}
        for resources, *alike in _progress(self._choices(), "search"):
            c = dataclasses.replace(self._looked_at(resources), alike=tuple(alike))
            unordered = repr({n: sorted(map(str, rs)) for n, rs in parse_axis_resources(resources).items() if rs})
            key = unordered, c.facts, *c.bytes_sent.items(), c.refused and len(kept)
            first = kept.setdefault(key, c)
            if first is not c:  # the order of mesh axes in a tuple changes the facts of few collectives
                kept[key] = dataclasses.replace(first, alike=(*first.alike, resources, *alike))
        yield from kept.values()

    def _choices(self) -> list[list[dict[Any, Any]]]:
        """For each name every ordered choice of mesh axes; assignments that exchange equal mesh axes are together."""
        axes, kinds = list(self.mesh.shape), self.kinds
        ordered = [c for n in range(len(axes) + 1) for c in itertools.permutations(axes, n)]
        possible = {name: [c for c in ordered if self._refusal({name: c}) is None] for name in self.names}
        refused = [[{**self.fixed, n: _plain(c)}] for n in self.names for c in ordered if c not in possible[n]]
        exchanges = math.prod(math.factorial(sum(k == kind for k in kinds.values())) for kind in set(kinds.values()))
        if math.prod(map(len, possible.values())) > LIMIT * exchanges:
            possible = self._pruned(possible, LIMIT * exchanges)
        alike: dict[str, list[dict[Any, Any]]] = {}
        for chosen in itertools.product(*possible.values()):
            resources = {**self.fixed, **{n: _plain(c) for n, c in zip(self.names, chosen) if c}}
            alike.setdefault(_exchanged(resources, kinds), []).append(resources)
        return [*alike.values(), *refused]

    def _pruned(self, possible: Mapping[Any, list[Any]], most: int) -> dict[Any, list[Any]]:
        """The choices without those that are dominated where their axis alone is split, by one plan of each."""
        kept, spread = dict[Any, list[Any]](), dict[Any, int]()
        for name, choices in possible.items():
            looked = _ranked((self._looked_at({**self.fixed, name: c}) for c in choices), self.mesh)
            found = [c for c in looked if c.refused is None]
            kept[name] = [c.axis_resources[name] for c in found if not c.dominated]
            sent = [sum(c.bytes_sent.values()) for c in found] or [0]
            spread[name] = max(sent) - min(sent)
        if math.prod(map(len, kept.values())) > most:
            proposed = min(spread, key=lambda name: spread[name])
            raise errors.too_many_candidates({name: len(choices) for name, choices in kept.items()}, most, proposed)
        return kept

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
            if a == b and n != m:
                if (n, m, a) not in self._meetings:
                    self._meetings[n, m, a] = self._refusal({n: a, m: a}) or self._staged({n: a, m: a})[1]
                if self._meetings[n, m, a]:
                    return self._meetings[n, m, a]
        return None

    def _staged(self, resources: Mapping[Any, Any]) -> tuple[Any, str | None]:
        """The step staged out, or why it cannot be."""
        try:
            staged = steps.stage(self.make(dict(resources)), self.args, describe=False)
        except Exception as error:  # any refusal of the call
            return None, repr(error) if isinstance(error, KeyError) else str(error) or repr(error)
        ignored = _ignored(resources, staged.placements)
        return staged, errors.ignored_resources(ignored) if ignored else None

    def _looked_at(self, resources: Mapping[Any, Any]) -> Candidate:
        """An assignment with its facts."""
        staged: Any = None
        refused = self._refusal(resources) or self._meeting(resources)
        if not refused:
            staged, refused = self._staged(resources)
        if refused:
            return Candidate(resources, refused=refused)
        held = sum(a.device_bytes for a in staged.arrays)
        own = [p.mesh_axes for placed in staged.placements for n, p in placed.items() if not isinstance(n, DeviceAxis)]
        axes = {axis.mesh_axis if isinstance(axis, DeviceAxis) else axis for split in own for axis in split}
        devices = math.prod(size for axis, size in self.mesh.shape.items() if axis in axes)
        found = Candidate(resources, devices, held, sent_over(staged.transfers, self.mesh))
        if self.compiled:
            try:
                read = steps.read_compiled(self._executable(resources), self.mesh)
            except Exception as error:
                return dataclasses.replace(found, refused=errors.not_compiled(error))
            found = dataclasses.replace(found, flops=read.cost.get("flops", 0.0), peak=read.peak)
        needed, which = (found.peak or 0, "XLA's peak is") if self.compiled else (held, "arguments and results are")
        if self.memory is None or needed <= self.memory:
            return found
        too_much = errors.too_much_memory(which, show_bytes(needed), show_bytes(round(self.memory)))
        return dataclasses.replace(found, refused=too_much)

    def _executable(self, resources: Mapping[Any, Any]) -> Any:
        return steps.compile_step(self.make(dict(resources)), self.args)

    def measured(self, found: Sequence[Candidate], count: int) -> list[Candidate]:
        """The candidates, the first of them with the medians of interleaved calls."""
        device, timers, done = devices_of(self.mesh)[0], dict[int, Callable[[], float]](), list(found)
        for k, c in _progress([(k, c) for k, c in enumerate(found) if c.refused is None][:count], "compile"):
            try:
                timers[k] = _timer(self._executable(c.axis_resources), self.args, device)
            except Exception as error:  # too little memory, or an argument that is elsewhere
                done[k] = dataclasses.replace(c, refused=errors.not_compiled(error))
        seconds: dict[int, list[float]] = {k: [] for k in timers}
        end = time.monotonic() + SECONDS
        for turn in _progress(range(ROUNDS), "measure"):
            if turn < LEAST or time.monotonic() < end:
                for k, timer in timers.items():
                    seconds[k].append(timer())
        for k, own in seconds.items():
            low, middle, high = statistics.quantiles(own, n=4)
            done[k] = dataclasses.replace(done[k], seconds=middle, noise=(high - low) / 2)
        return done


def _timer(compiled: Any, args: tuple[Any, ...], device: Any) -> Callable[[], float]:
    """A function that runs a ``jax.stages.Compiled`` once, and returns the seconds; it has run here once."""
    given = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, args)
    donates = any(argument.donated for argument in jax.tree.leaves(compiled.args_info))
    copied = functools.partial(jax.device_put, may_alias=False) if donates else jax.device_put
    place = lambda: jax.block_until_ready(copied(given, compiled.input_shardings[0]))  # noqa: E731
    clock = time.process_time if device.platform == "cpu" else time.perf_counter  # fake devices share the cores
    placed = place()

    def seconds() -> float:
        arguments = place() if donates else placed
        begin = clock()
        jax.block_until_ready(compiled(*arguments))
        return clock() - begin

    seconds()
    return seconds


def _progress(items: Any, title: str) -> Any:
    """Items with a progress bar, if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, title, leave=False, delay=1)


def _kinds(mesh: Any, all_differ: bool) -> dict[Any, Any]:
    """For each mesh axis what equal ones have in common: their size, and whether they cross processes.

    Args:
      all_differ: whether no two are equal, because the step has a ``shard_map`` of its own.
    """
    if all_differ:
        return {axis: axis for axis in mesh.axis_names}
    devices, kinds = np.reshape(devices_of(mesh) or [None] * mesh.size, mesh.axis_sizes), dict[Any, Any]()
    for k, (axis, size) in enumerate(mesh.shape.items()):
        lines = np.moveaxis(devices, k, -1).reshape(-1, size)
        kinds[axis] = size, any(len({getattr(d, "process_index", 0) for d in line}) > 1 for line in lines)
    return kinds


def _exchanged(resources: Mapping[Any, Any], kinds: Mapping[Any, Any]) -> str:
    """An assignment with mesh axes named after their kind, in the order in which they occur."""
    known: dict[Any, Any] = {}
    for resource in (r for rs in parse_axis_resources(resources).values() for r in rs if r in kinds):
        known.setdefault(resource, (kinds[resource], sum(kinds[k] == kinds[resource] for k in known)))
    return repr({n: [known.get(r, r) for r in rs] for n, rs in parse_axis_resources(resources).items() if rs})


def _ignored(resources: Mapping[Any, Any], met: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """The axes that no call placed as ``resources`` say, with the mesh axes that they got."""
    wanted, got = parse_axis_resources(resources), dict[Any, list[Any]]()
    for name, placement in (item for placements in met for item in placements.items()):
        if not isinstance(name, DeviceAxis):
            got.setdefault(name, []).append(placement.mesh_axes)
    split = {n: tuple(r for r in rs if not isinstance(r, SerialLoop)) for n, rs in wanted.items()}
    return {n: axes[0] for n, axes in got.items() if split.get(n, ()) not in axes}


def _plain(choice: tuple[Any, ...]) -> Any:
    return choice[0] if len(choice) == 1 else choice
