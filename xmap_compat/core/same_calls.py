"""All processes of a mesh make the same call, or each raises an error that says which process
differs, and in what.

Calls are compared once for each program, when it is about to run first.  Each process posts the
digest of the call's fingerprint in the store of ``jax.distributed``, and the fingerprint's lines
where digests differ.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import json
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from xmap_compat import _jax, _version
from xmap_compat.core.arguments import Declaration
from xmap_compat.core.call import PlacedCall
from xmap_compat.core.errors import should_be
from xmap_compat.core.mesh import devices_of
from xmap_compat.core.named_shape import is_array
from xmap_compat.core.placement import current_scope
from xmap_compat.core.structured.callables import derivative
from xmap_compat.core.trace import trace_flat

DEFAULT_TIMEOUT = 60.0  # seconds
_timeout: float | None = DEFAULT_TIMEOUT


@_jax.api_boundary
def compare_processes(timeout: float | None = DEFAULT_TIMEOUT) -> None:
    """Set how long processes wait for each other when they compare their calls, or turn the
    comparison off.

    When an xmapped function is about to run for the first time on a mesh of several processes,
    these compare the call, its program, the mesh and the versions of jax and xmap_compat.  If they
    differ, or a process does not arrive, every process raises an error, instead of wrong numbers or
    a hang. Compiled calls are not compared again.

    Args:
      timeout: seconds to wait for other processes; None turns the comparison off, which must be on
        in all processes, or off in all.

    Raises:
      ValueError: ``timeout`` is not a positive number of seconds.

    Example, where one process reads its data for minutes:

      >>> import xmap_compat
      >>> xmap_compat.compare_processes(timeout=600)
    """
    global _timeout
    is_number = type(timeout) in (int, float)
    if timeout is not None and not (is_number and 0 < timeout < math.inf):
        wanted = "a positive number of seconds, or None for no comparison"
        raise should_be("The timeout of compare_processes", wanted, timeout, ValueError)
    _timeout = timeout


# The function that is being called, and its arguments; ``lower``, ``trace`` and ``eval_shape``
# call none.
_called: contextvars.ContextVar[tuple[Any, tuple[Any, ...]]] = contextvars.ContextVar(
    "called", default=(None, ())
)


class ComparedCalls:
    """The calls of one jitted function: each is compared when it is traced, or when it is called,
    if traced before.

    A call that the processes have agreed on is not compared again, even if one of them traces it
    once more.
    """

    def __init__(self):
        self._traced: dict[Hashable, Fingerprint] = {}  # and not compared yet
        self._agreed: set[Hashable] = set()

    @contextlib.contextmanager
    def calling(self, args: tuple[Any, ...]) -> Iterator[None]:
        """The context around a call in a program of several processes."""
        if self._traced:
            known = self._traced.get(_key(args))
            if known is not None:
                self._compare(known, args)
        token = _called.set((self, args))
        try:
            yield
        finally:
            _called.reset(token)

    def traced(self, declared: Declaration, placed: PlacedCall, args: tuple[Any, ...]) -> None:
        """Called from within jit's trace, when the call has been placed."""
        processes = _processes_of(placed.scope.mesh)
        if placed.nested or len(processes) < 2 or jax.process_index() not in processes:
            return
        made = fingerprint(declared, placed, args)
        self._traced[_key(args)] = made
        caller, args_of_call = _called.get()
        if caller is self:
            self._compare(made, args_of_call)

    def _compare(self, made: Fingerprint, args: tuple[Any, ...]) -> None:
        """Compare with the other processes of the mesh, if the call needs them."""
        store = _jax.process_store()
        if _timeout is None or store is None:
            return
        needs_others = made.uses_mesh or any(map(_is_shared, jax.tree.leaves(args)))
        if not needs_others:
            return
        key = (store.client, made.processes, made.digest)
        if key not in self._agreed:
            _agree(store, made, _timeout)
            self._agreed.add(key)
        self._traced.pop(_key(args), None)


def _key(args: tuple[Any, ...]) -> Hashable:
    """A key of a call's arguments, traced or not, and of the scope; None if some are not arrays."""
    leaves, tree = jax.tree.flatten(args)
    if not all(map(is_array, leaves)):
        return None
    return tuple(map(_type_key, leaves)), tree, current_scope()


def _type_key(x):
    kind = jax.typeof(x)
    return kind.shape, kind.dtype, kind.weak_type


def _is_shared(x):
    """Whether other processes have parts of an array."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return False
    return not x.is_fully_addressable


# ------------------------------------------------------------ the fingerprint of a call

# Settings of JAX that change numbers and do not appear in a program.
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable")
# Larger constants that a body closes over are compared by their type only.
LARGEST_CONSTANT = 2**24  # bytes
# The depth to which rules within rules are compared: many rules call their own function without
# end.
ORDERS = 2
# Parameters that may differ between processes: they say what happens to values outside of the
# computation.
_MAY_DIFFER = re.compile(r"\b(?:callback|fmt|logging_record)=.*?(?=\n\s+\w+=)", re.DOTALL)
_ADDRESS = re.compile(r" at 0x\w+|\b0x[0-9a-fA-F]{6,}")
_SET = re.compile(r"\{([^{}:;]*)\}")


class Fingerprint(NamedTuple):
    """Lines of text that are the same in every process that makes one call.

    Identities, addresses, hash seeds and paths of files differ between processes, and are left out.

    Attributes:
      lines: each with its subject: the arguments of the call, then its programs.
      digest: of the lines.
      processes: those that have devices on the mesh.
      uses_mesh: whether an axis is split over the mesh.
    """

    lines: tuple[tuple[str, str], ...]
    digest: str
    processes: tuple[int, ...]
    uses_mesh: bool


def fingerprint(declared: Declaration, placed: PlacedCall, args: tuple[Any, ...]) -> Fingerprint:
    """The fingerprint of a call that has been traced."""
    mesh = placed.scope.mesh
    assert isinstance(mesh, jax.sharding.Mesh)
    parts = _facts(declared, placed, args, mesh)
    trace = functools.partial(trace_flat, body=placed.body, in_our_shard_map=False)
    texts = _texts(trace, placed.program.jaxpr, placed.program.consts)
    lines = list(parts.items())
    for text in dict.fromkeys(texts):
        lines.extend(("program:", line.strip()) for line in text.splitlines())
    digest = hashlib.sha256(json.dumps(lines).encode()).hexdigest()
    processes = tuple(sorted(_processes_of(mesh)))
    return Fingerprint(tuple(lines), digest, processes, placed.uses_mesh)


def _processes_of(mesh):
    return {device.process_index for device in devices_of(mesh)}


def _facts(declared, placed, args, mesh):
    """What is compared beside the program: ``{subject: text}``."""
    devices = list(mesh.devices.flat)
    ids = [device.id for device in devices]
    processes = [device.process_index for device in devices]
    place = f"{devices[0].platform} devices {ids} of processes {processes}"
    resources = []
    for name, entries in declared.resources.items():
        resources.append((name, entries[0] if len(entries) == 1 else entries))
    types = [_steady(str(jax.typeof(leaf))) for leaf in jax.tree.leaves(args)]
    return {
        "function": declared.name,
        "axis_resources": _mapping(sorted(resources, key=repr)),
        "in_axes": _specs_text(placed.in_specs),
        "out_axes": _specs_text(placed.out_specs),
        "axis sizes": _mapping(placed.body.sizes.items()),
        "arguments": ", ".join(types),
        "serial loops": _mapping(placed.scope.loops),
        "mesh": f"{_mapping(mesh.shape.items())} of {place}",
        "versions": f"jax {_jax.RELEASE}, xmap_compat {_version.__version__}",
        "settings": _mapping((name, getattr(jax.config, name)) for name in SETTINGS),
    }


def _specs_text(specs):
    return ", ".join(_mapping(spec.names) for spec in specs)


def _mapping(items):
    entries = [f"{key!r}: {value!r}" for key, value in items]
    return _steady("{" + ", ".join(entries) + "}")


def _steady(text: str) -> str:
    """The text without addresses and parameters that may differ, and with the elements of sets in
    order.
    """
    text = _MAY_DIFFER.sub("", text)
    text = _ADDRESS.sub("", text)
    return _SET.sub(_in_order, text)


def _in_order(match):
    elements = sorted(match[1].split(", "))
    return "{" + ", ".join(elements) + "}"


def _texts(
    trace: Callable[..., Any], jaxpr: Any, consts: Sequence[Any], order: int = 0
) -> Iterator[str]:
    """The texts of a program, of the constants in it, and of the derivatives that its custom rules
    make.
    """
    equations = [eqn for eqn, _ in _jax.walk(jaxpr, once=True)]
    constants = list(consts)
    literals = []
    for eqn in equations:
        for held in _jax.subjaxprs(eqn.params):
            _, inner_consts = _jax.open_jaxpr(held)
            constants.extend(inner_consts)
        for atom in eqn.invars:
            if isinstance(atom, _jax.Literal) and np.ndim(atom.val):
                literals.append(atom.val)
    yield _steady(str(jaxpr))
    yield f"with constants {' '.join(map(_constant, [*constants, *literals]))}"
    if order == ORDERS:
        return
    for eqn in equations:
        if isinstance(_jax.read(eqn), (_jax.CustomJvp, _jax.CustomVjp, _jax.HijaxOperation)):
            try:
                yield from _texts(trace, *_jax.open_jaxpr(derivative(trace, eqn)), order + 1)
            except Exception as error:
                # For example, it has no derivative.
                yield f"rules of {eqn.primitive.name}: {type(error).__name__}"


def _constant(value: Any) -> str:
    """A constant by its values; only by its type if it is large, if other processes have parts of
    it, or if traced.
    """
    kind = _steady(str(jax.typeof(value)))
    if isinstance(value, jax.core.Tracer) or not getattr(value, "is_fully_addressable", True):
        return kind
    size = np.size(value) * jax.typeof(value).dtype.itemsize
    if size > LARGEST_CONSTANT:
        return kind
    if _jax.is_key(value):
        with jax.ensure_compile_time_eval():
            value = jax.random.key_data(value)
    digest = hashlib.sha256(np.asarray(value).tobytes()).hexdigest()
    return f"{kind} of {digest[:16]}"


# ------------------------------------------------------------------------- in the store

# What calls send if they differ, to find where; a digest is of all lines.
MOST_LINES = 2_000
LONGEST_LINE = 500
LONGEST_SHOWN = 200  # characters of each side of a difference
_SAME_CALLS = (
    "All processes of a mesh must make the same calls of xmapped functions, in the same order."
)

# How many calls this process has compared with the same processes; each of them must have the same
# count.
counts: Counter[Hashable] = Counter()
_lock = threading.Lock()


def _agree(store: _jax.ProcessStore, made: Fingerprint, timeout: float) -> None:
    """Return when all processes have posted the same digest; raise on every process if one has
    not.
    """
    with _lock:
        counts[store.client, made.processes] += 1
        number = counts[store.client, made.processes]
    name = hashlib.sha256(json.dumps(made.processes).encode()).hexdigest()
    folder = f"xmap_compat/{name[:16]}/{number}"
    me = jax.process_index()
    line, _, _ = _jax.where_now().partition(" (")
    place = os.path.basename(line)
    store.put(f"{folder}/digest/{me}", made.digest)
    digests = _digests(store, folder, made.processes, timeout)
    if len(set(digests.values())) > 1:
        lines = [(what, text[:LONGEST_LINE]) for what, text in made.lines[:MOST_LINES]]
        store.put(f"{folder}/details/{me}", json.dumps(lines))
        difference = _difference_of(store, folder, digests)
        raise _processes_differ(difference, me, dict(lines)["function"], place)
    # A process that arrives after others have given up must not go on: the first outcome
    # holds for all.
    missing = [p for p in made.processes if p not in digests]
    outcome = store.put(f"{folder}/outcome", json.dumps([missing, place]))
    missing, waiting_at = json.loads(outcome)
    if missing:
        raise _processes_missing(missing, me, timeout, waiting_at, place)


def _digests(
    store: _jax.ProcessStore, folder: str, processes: Sequence[int], timeout: float
) -> dict[int, str]:
    """What each process has posted in time."""
    until = time.monotonic() + timeout
    digests = {}
    for process in processes:
        digest = store.wait(f"{folder}/digest", str(process), until - time.monotonic())
        if digest is not None:
            digests[process] = digest
    return digests


def _difference_of(store: _jax.ProcessStore, folder: str, digests: Mapping[int, str]) -> str:
    """The processes whose call is not that of the first one, and how the first of them differs."""
    first = min(digests)
    others = [process for process, digest in digests.items() if digest != digests[first]]

    def lines_of(process: int) -> list[Any]:
        return json.loads(store.wait(f"{folder}/details", str(process), 10.0) or "[]")

    difference = _difference(lines_of(others[0]), lines_of(first), first)
    return f"{_process_list(others)}: {difference}"


def _process_list(processes: Sequence[int]) -> str:
    """``process 3``, ``processes 0, 2``."""
    noun = "process" if len(processes) == 1 else "processes"
    return f"{noun} {', '.join(map(str, processes))}"


def _difference(lines, others, first):
    """``axis_resources {'batch': 'x'}, process 0: {'batch': 'y'}``: the first line that differs, or
    a piece of it.
    """
    for (what, line), (_, other) in zip(lines, others):
        if line != other:
            common = os.path.commonprefix([line, other])  # noqa: RUF071
            begin = max(0, len(common) - 60)
            shown = slice(begin, begin + LONGEST_SHOWN)
            return f"{what} {line[shown]}, process {first}: {other[shown]}"
    return "a program that differs further on"


def _processes_differ(difference: str, me: int, fun: str, place: str) -> RuntimeError:
    return RuntimeError(
        f"The processes of this mesh call different programs: {difference}. "
        f"(This is process {me}, which calls `{fun}` at {place}. "
        f"Every process raises this error.) {_SAME_CALLS}"
    )


def _processes_missing(
    missing: Sequence[int], me: int, seconds: float, waiting_at: str, place: str
) -> RuntimeError:
    late = ""
    if me in missing:
        late = f" This process arrived later, at {place}."
    return RuntimeError(
        f"{_process_list(missing).capitalize()} did not arrive within {seconds:g} s: "
        f"the others wait at {waiting_at}.{late} {_SAME_CALLS} If a process only needs more time, "
        "allow it in every process: xmap_compat.compare_processes(timeout=600), or None for no "
        "comparison."
    )
