"""``xmap_compat.search``: every assignment of named axes to mesh axes beside the facts about it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xmap_compat import _jax, api
from xmap_compat.core.errors import should_be
from xmap_compat.core.mesh import SerialLoop, check_mesh, entered
from xmap_compat.core.placement import current_scope, parse_axis_resources
from xmap_compat.errors import no_devices
from xmap_compat.tools import errors, steps
from xmap_compat.tools.shown import Shown, axes_name
from xmap_compat.tools.text import listed, show_bytes
from xmap_compat.tools.transfers import sent_over
from xmap_compat.xmapped import declaration_of

LIMIT = 1000  # assignments that are planned at most
ROUNDS = 11  # calls of each step that is measured


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
        parsed = map(parse_axis_resources, (self.axis_resources, *self.alike))
        names = [
            listed(f"{n}: {axes_name(rs)}" for n, rs in found.items() if rs) or "one device"
            for found in parsed
        ]
        return " = ".join([*names[:2], *[f"{len(names) - 2} more"] * (len(names) > 2)])

    @property
    def facts(self) -> tuple[float, ...]:
        """The figures that are compared, the less the better."""
        return (
            -self.devices,
            self.flops or 0,
            self.peak or 0,
            self.bytes_held or 0,
            sum(self.bytes_sent.values()),
        )


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
        run = [(c.name, c.seconds, c.noise or 0.0) for c in self.found if c.seconds is not None]
        near = [name for name, seconds, noise in run[1:] if seconds - run[0][1] < noise + run[0][2]]
        return (
            f"measured: {run[0][0]} and {', '.join(near)} differ by less than the noise"
            if near
            else ""
        )


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
    others is no judgement.  An axis over several mesh axes takes them in the order of the mesh.

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
    for right, name, wanted, value in (
        (
            callable(f_or_make),
            "f_or_make",
            "an xmapped function, or a function that makes the step",
            f_or_make,
        ),
        (
            fixed is None or isinstance(fixed, Mapping),
            "fixed",
            "a mapping like {'batch': 'x'}",
            fixed,
        ),
        (
            memory is None or (isinstance(memory, (int, float)) and memory > 0),
            "memory",
            "a number of bytes",
            memory,
        ),
        (
            type(measure) is int and measure >= 0,
            "measure",
            "a whole number that is not negative",
            measure,
        ),
    ):
        if not right:
            raise should_be(f"The argument {name} of search", wanted, value)
    with entered(check_mesh("search", mesh)):
        scope = current_scope().mesh
        if scope is None:
            raise errors.search_without_mesh()
        if (compiled or measure) and isinstance(scope, jax.sharding.AbstractMesh):
            raise no_devices(f"search(measure={measure}, compiled={compiled})", scope)
        task = _Task(f_or_make, args, scope, dict(fixed or {}), memory, compiled)
        found = _ranked(
            [task.candidate(*alike) for alike in _progress(task.assignments(), "search")]
        )
        found = _ranked(task.measured(found, measure)) if measure else found
    return Candidates(scope, tuple(found), memory, compiled)


class _Task:
    """The task of a search: the maker of the step, its arguments, and the axes to assign."""

    def __init__(self, f_or_make, args, mesh, fixed, memory, compiled):
        self.args, self.mesh, self.fixed, self.memory, self.compiled = (
            args,
            mesh,
            fixed,
            memory,
            compiled,
        )
        declared = declaration_of(f_or_make)
        self.make = (
            f_or_make if declared is None else functools.partial(api.with_resources, declared)
        )
        unknown = [n for n in fixed if declared is not None and n not in declared.names]
        if unknown:
            raise errors.unknown_fixed_axes(unknown, declared.names)
        try:
            inspect.signature(self.make).bind({})
        except TypeError:
            raise errors.no_maker(api.name_of(f_or_make), len(args)) from None
        try:
            step = self.make(dict(fixed))
        except Exception as error:
            error.add_note(
                f"search called {api.name_of(f_or_make)}({dict(fixed)!r}) as make(axis_resources), which should return "
                "the step with the resources of fixed. Pass an xmapped function, or make(axis_resources)"
            )
            raise
        if not callable(step):
            raise should_be(
                "What make(axis_resources) returns to search", "the step, a function", step
            )
        staged = steps.stage(step, args, describe=False)
        if not staged.placements:
            raise errors.no_xmapped_call()
        known = dict(_placed(staged))
        if unknown := [n for n in fixed if n not in known]:
            raise errors.unknown_fixed_axes(unknown, list(known))
        self.names = [n for n in known if n not in fixed]
        # Mesh axes of one size are equal, unless the step has a shard_map of its own.
        alike = staged.mesh is None or any(known.values())
        self.kinds = {axis: size if alike else axis for axis, size in mesh.shape.items()}

    def assignments(self) -> list[list[dict[Any, Any]]]:
        """Every assignment, beside those that only exchange equal mesh axes."""
        sets = [
            c for n in range(len(self.kinds) + 1) for c in itertools.combinations(self.kinds, n)
        ]
        choices = {n: [c[0] if len(c) == 1 else c for c in sets] for n in self.names}
        kinds = list(self.kinds.values())
        most = LIMIT * math.prod(math.factorial(kinds.count(kind)) for kind in set(kinds))
        if len(sets) ** len(choices) > most:
            choices = self._undominated(choices, most)
        alike: dict[str, list[dict[Any, Any]]] = {}
        for chosen in itertools.product(*choices.values()):
            resources = {**self.fixed, **{n: c for n, c in zip(choices, chosen) if c != ()}}
            alike.setdefault(_exchanged(resources, self.kinds), []).append(resources)
        return list(alike.values())

    def _undominated(self, choices: Mapping[Any, list[Any]], most: int) -> dict[Any, list[Any]]:
        """The choices that are possible and not dominated where their axis alone is split."""
        planned = {
            n: _ranked([self.candidate({**self.fixed, n: c}) for c in own])
            for n, own in choices.items()
        }
        found = {n: [c for c in own if c.bytes_held is not None] for n, own in planned.items()}
        kept = {
            n: [c.axis_resources[n] for c in own if not c.dominated] for n, own in found.items()
        }
        if math.prod(map(len, kept.values())) > most:
            sent = {n: [sum(c.bytes_sent.values()) for c in own] for n, own in found.items()}
            proposed = min(sent, key=lambda n: max(sent[n]) - min(sent[n]))
            raise errors.too_many_candidates(
                {n: len(own) for n, own in kept.items()}, most, proposed
            )
        return kept

    def candidate(self, resources: Mapping[Any, Any], *alike: Mapping[Any, Any]) -> Candidate:
        """An assignment with its facts, or why it cannot be used."""
        found = Candidate(resources, alike=alike)
        try:
            found = self._planned(found)
            needed, which = found.bytes_held or 0, "arguments and results are"
            if self.compiled:
                read = steps.read_compiled(
                    steps.compile_step(self.make(dict(resources)), self.args)
                )
                found = dataclasses.replace(
                    found, flops=read.cost.get("flops", 0.0), peak=read.peak
                )
                needed, which = read.peak, "XLA's peak is"
            if self.memory is not None and needed > self.memory:
                raise errors.too_much_memory(
                    which, show_bytes(needed), show_bytes(round(self.memory))
                )
        except Exception as error:  # of the call, or of the compiler
            found = dataclasses.replace(found, refused=str(error) or repr(error))
        return found

    def _planned(self, found: Candidate) -> Candidate:
        staged = steps.stage(self.make(dict(found.axis_resources)), self.args, describe=False)
        placed, wanted = _placed(staged), parse_axis_resources(found.axis_resources)
        split = {
            n: tuple(r for r in rs if not isinstance(r, SerialLoop)) for n, rs in wanted.items()
        }
        if ignored := [n for n in dict(placed) if (n, split.get(n, ())) not in placed]:
            raise errors.ignored_resources(ignored)
        held, sent = (
            sum(a.device_bytes for a in staged.arrays),
            sent_over(staged.transfers, self.mesh),
        )
        axes = {getattr(axis, "mesh_axis", axis) for _, own in placed for axis in own}
        devices = math.prod(size for axis, size in self.mesh.shape.items() if axis in axes)
        return dataclasses.replace(found, devices=devices, bytes_held=held, bytes_sent=sent)

    def measured(self, found: Sequence[Candidate], count: int) -> list[Candidate]:
        """The candidates, ``count`` of them with medians: interleaved, so that a busy machine slows
        all.
        """
        compiled, done = dict[int, Any](), list(found)
        for k in [k for k, c in enumerate(found) if c.refused is None][:count]:
            try:
                step = steps.compile_step(self.make(dict(found[k].axis_resources)), self.args)
                _seconds(step, self.args)
                compiled[k] = step
            except Exception as error:  # too little memory, or an argument that is elsewhere
                done[k] = dataclasses.replace(found[k], refused=str(error) or repr(error))
        rounds = [
            {k: _seconds(s, self.args) for k, s in compiled.items()}
            for _ in _progress(range(ROUNDS), "measure")
        ]
        for k in compiled:
            low, middle, high = statistics.quantiles([each[k] for each in rounds], n=4)
            done[k] = dataclasses.replace(found[k], seconds=middle, noise=(high - low) / 2)
        return done


def _placed(staged: steps.StagedStep) -> list[tuple[Any, tuple[Any, ...]]]:
    """The named axes of all calls, each with the mesh axes that it is split over."""
    return [
        (n, placement.mesh_axes) for placed in staged.placements for n, placement in placed.items()
    ]


def _exchanged(resources: Mapping[Any, Any], kinds: Mapping[Any, Any]) -> str:
    """An assignment with mesh axes named after their kind, in the order in which they occur."""
    parsed, known = parse_axis_resources(resources), dict[Any, Any]()
    for resource in (r for rs in parsed.values() for r in rs if r in kinds):
        known.setdefault(
            resource, (kinds[resource], sum(kinds[k] == kinds[resource] for k in known))
        )
    return repr({n: [known.get(r, r) for r in rs] for n, rs in parsed.items() if rs})


def _ranked(found: Sequence[Candidate]) -> list[Candidate]:
    """The candidates in order, and which of them are dominated."""
    judged = [
        dataclasses.replace(c, dominated=any(_beats(o, c) for o in found if o.refused is None))
        for c in found
    ]
    return sorted(
        judged, key=lambda c: (c.refused is not None, c.seconds or math.inf, c.dominated, c.facts)
    )


def _beats(a: Candidate, b: Candidate) -> bool:
    no_larger = all(ours <= theirs for ours, theirs in zip(a.facts, b.facts))
    return (
        no_larger
        and a.facts != b.facts
        and all(n <= b.bytes_sent.get(k, 0) for k, n in a.bytes_sent.items())
    )


def _seconds(compiled: Any, args: Any) -> float:
    """The seconds of one call, whose arguments are copies, because the step may donate them."""
    given = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, args
    )
    given = jax.block_until_ready(
        jax.device_put(given, compiled.input_shardings[0], may_alias=False)
    )
    clock = (
        time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    )  # fake devices share the cores
    begin = clock()
    jax.block_until_ready(compiled(*given))
    return clock() - begin


def _progress(items: Any, title: str) -> Any:
    """Items with a progress bar, if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, title, leave=False, delay=1)
