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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from xmap_compat import _jax, api
from xmap_compat.core.errors import should_be
from xmap_compat.core.mesh import SerialLoop, check_mesh, devices_of, entered
from xmap_compat.core.placement import DeviceAxis, current_scope, parse_axis_resources, place_axes
from xmap_compat.errors import no_devices
from xmap_compat.tools import errors, steps
from xmap_compat.tools.candidates import Candidate, Candidates, ranked
from xmap_compat.tools.measured import measured, progress
from xmap_compat.tools.text import show_bytes
from xmap_compat.tools.transfers import sent_over

LIMIT = 1000  # assignments that are planned at most


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
    _check(f_or_make, fixed, memory, measure)
    scope = check_mesh("search", mesh) or (current_scope().mesh if mesh is None else None)
    if scope is None:
        raise errors.search_without_mesh()
    is_abstract, asked = isinstance(scope, jax.sharding.AbstractMesh), f"search(measure={measure}, compiled={compiled})"
    if is_abstract and (compiled or measure):
        raise no_devices(asked, scope)
    if measure and any(device.process_index != jax.process_index() for device in devices_of(scope)):
        raise errors.measured_by_each_process(asked)
    with entered(None if is_abstract and mesh is None else scope):
        task = _Task(f_or_make, args, scope, dict(fixed or {}), memory, compiled)
        found = ranked(task.found(), scope)
        found = (
            ranked(measured(task.executable, args, found, measure, devices_of(scope)[0]), scope) if measure else found
        )
    return Candidates(scope, tuple(found), memory, compiled)


def _check(f_or_make: Any, fixed: Any, memory: Any, measure: Any) -> None:
    is_number = memory is None or (isinstance(memory, numbers.Real) and float(memory) > 0)
    is_count = type(measure) is int and measure >= 0
    function = "an xmapped function, or a function of axis_resources that returns the step"
    for right, name, wanted, value in (
        (callable(f_or_make), "f_or_make", function, f_or_make),
        (
            fixed is None or isinstance(fixed, Mapping),
            "fixed",
            "a mapping from axes to resources: {'batch': 'x'}",
            fixed,
        ),
        (is_number, "memory", "a number of bytes", memory),
        (is_count, "measure", "a whole number that is not negative", measure),
    ):
        if not right:
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


class _Task:
    """The task of a search: the maker of the step, its arguments, and the known facts about its axes."""

    def __init__(self, f_or_make, args, mesh, fixed, memory, compiled):
        self.make, self.args, self.memory, self.compiled = _maker(f_or_make, args), args, memory, compiled
        self.scope, self.fixed, self._meetings = current_scope(), fixed, dict[Any, str | None]()
        self.mesh: Any = mesh
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
        # Mesh axes of one size are equal, unless some leave the process, or the step has a shard_map of its own.
        alike = len({d.process_index for d in devices_of(self.mesh)}) < 2 and (staged.mesh is None or split)
        self.kinds = {axis: size if alike else axis for axis, size in dict(self.mesh.shape).items()}
        if not self.sizes:
            raise errors.no_xmapped_call()
        known = list(dict.fromkeys(n for sizes in self.sizes for n in sizes))
        if unknown := [n for n in fixed if n not in known]:
            raise errors.unknown_fixed_axes(unknown, known)
        self.names = [n for n in known if n not in fixed]

    def found(self) -> Iterator[Candidate]:
        """Every assignment, those that exchange equal mesh axes once."""
        kept: dict[Any, Candidate] = {}
        for resources, *alike in progress(self._choices(), "search"):
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
            looked = ranked((self._looked_at({**self.fixed, name: c}) for c in choices), self.mesh)
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
        refused = None if self._refusal(resources) else self._meeting(resources)
        if not refused:  # sizes that cannot be divided are refused in the words of the call
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
                read = steps.read_compiled(self.executable(resources), self.mesh)
            except Exception as error:
                return dataclasses.replace(found, refused=errors.not_compiled(error))
            found = dataclasses.replace(found, flops=read.cost.get("flops", 0.0), peak=read.peak)
        needed, which = (found.peak or 0, "XLA's peak is") if self.compiled else (held, "arguments and results are")
        if self.memory is None or needed <= self.memory:
            return found
        too_much = errors.too_much_memory(which, show_bytes(needed), show_bytes(round(self.memory)))
        return dataclasses.replace(found, refused=too_much)

    def executable(self, resources: Mapping[Any, Any]) -> Any:
        return steps.compile_step(self.make(dict(resources)), self.args)


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
