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
import itertools
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
from xmap_compat.core.call import Declaration, PlacedCall
from xmap_compat.core.derivatives import derivative
from xmap_compat.core.errors import should_be
from xmap_compat.core.mesh import devices_of
from xmap_compat.core.named_shape import is_array
from xmap_compat.core.placement import current_scope
from xmap_compat.core.trace import trace_flat

TIMEOUT_VARIABLE = "XMAP_COMPAT_PROCESS_TIMEOUT"
DEFAULT_TIMEOUT = 60.0  # seconds
_setting: list[float | None] = []  # the timeout that the program has set last


@_jax.api_boundary
def compare_processes(timeout: float | None = DEFAULT_TIMEOUT) -> None:
    """Set how long processes wait for each other when they compare their calls, or turn the
    comparison off.

    When an xmapped function is about to run for the first time on a mesh of several processes,
    these compare the call, its program, the mesh and the versions of jax and xmap_compat.  If they
    differ, or a process does not arrive, every process raises an error, instead of wrong numbers or
    a hang. Compiled calls are not compared again.

    Args:
      timeout: seconds to wait for other processes; None turns the comparison off. By default it is
        the environment variable ``XMAP_COMPAT_PROCESS_TIMEOUT`` (a number, or ``off``), or 60. It
        must be on in all processes, or off in all.

    Raises:
      ValueError: ``timeout`` is not a positive number of seconds.

    Example, where one process reads its data for minutes:

      >>> import xmap_compat
      >>> xmap_compat.compare_processes(timeout=600)
    """
    _setting[:] = [
        None
        if timeout is None
        else _checked(timeout, timeout, "The timeout of compare_processes", "None")
    ]


def _timeout() -> float | None:
    if _setting:
        return _setting[0]
    text = os.environ.get(TIMEOUT_VARIABLE, "").strip() or str(DEFAULT_TIMEOUT)
    if text.lower() == "off":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    return _checked(seconds, text, TIMEOUT_VARIABLE, "`off`")


def _checked(seconds: Any, shown: Any, what: str, off: str) -> float:
    if type(seconds) in (int, float) and 0 < seconds < math.inf:
        return seconds
    raise should_be(
        what, f"a positive number of seconds, or {off} for no comparison", shown, ValueError
    )


# The function that is being called, and its arguments; ``lower``, ``trace`` and ``eval_shape`` call
# none.
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
        if self._traced and (own := self._traced.get(_key(args))):
            self._compare(own, args)
        token = _called.set((self, args))
        try:
            yield
        finally:
            _called.reset(token)

    def traced(self, declared: Declaration, placed: PlacedCall, args: tuple[Any, ...]) -> None:
        """Called from within jit's trace, when the call has been placed."""
        processes = {d.process_index for d in devices_of(placed.scope.mesh)}
        if placed.nested or len(processes) < 2 or jax.process_index() not in processes:
            return
        own = fingerprint(declared, placed, args)
        self._traced[_key(args)] = own
        caller, own_args = _called.get()
        if caller is self:
            self._compare(own, own_args)

    def _compare(self, own: Fingerprint, args: tuple[Any, ...]) -> None:
        """Compare with the other processes of the mesh, if the call needs them."""
        timeout = _timeout()
        store = _jax.process_store()
        if timeout is None or store is None:
            return
        if not own.uses_mesh and not any(map(_is_shared, jax.tree.leaves(args))):
            return
        key = store.client, own.processes, own.digest
        if key not in self._agreed:
            _agree(store, own, timeout)
            self._agreed.add(key)
        self._traced.pop(_key(args), None)


def _key(args: tuple[Any, ...]) -> Hashable:
    """A key of a call's arguments, traced or not, and of the scope; None if some are not arrays."""
    leaves, tree = jax.tree.flatten(args)
    if not all(map(is_array, leaves)):
        return None
    return (
        tuple((t.shape, t.dtype, t.weak_type) for t in map(jax.typeof, leaves)),
        tree,
        current_scope(),
    )


def _is_shared(x):
    return (
        isinstance(x, jax.Array)
        and not isinstance(x, jax.core.Tracer)
        and not x.is_fully_addressable
    )


# ------------------------------------------------------------ the fingerprint of a call

# Settings of JAX that change numbers and do not appear in a program.
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable")
# Larger constants that a body closes over are compared by their type only.
LARGEST_CONSTANT = 2**24  # bytes
# The depth to which rules within rules are compared: many rules call their own function without end
ORDERS = 2
# Parameters that may differ between processes: they say what happens to values outside of the
# computation.
_MAY_DIFFER = re.compile(r"\b(?:callback|fmt|logging_record)=.*?(?=\n\s+\w+=)", re.DOTALL)
_ADDRESS = re.compile(r" at 0x\w+|\b0x[0-9a-fA-F]{6,}")
_SET = re.compile(r"\{([^{}:;]*)\}")


class Fingerprint(NamedTuple):
    """Lines of text that are the same in every process that makes one call.

    Identities, addresses, hash seeds and paths of files differ between processes, and are left out.
    """

    lines: tuple[
        tuple[str, str], ...
    ]  # each with its subject: the arguments of the call, then its programs
    digest: str  # of the lines
    processes: tuple[int, ...]  # those that have devices on the mesh
    uses_mesh: bool  # whether an axis is split over the mesh


def fingerprint(declared: Declaration, placed: PlacedCall, args: tuple[Any, ...]) -> Fingerprint:
    """The fingerprint of a call that has been traced."""
    mesh = placed.scope.mesh
    assert isinstance(mesh, jax.sharding.Mesh)
    devices = list(mesh.devices.flat)
    ids, processes = ([getattr(d, name) for d in devices] for name in ("id", "process_index"))
    resources = ((n, r[0] if len(r) == 1 else r) for n, r in declared.resources.items())
    parts = {
        "function": declared.name,
        "axis_resources": _mapping(sorted(resources, key=repr)),
        "in_axes": ", ".join(_mapping(spec.names) for spec in placed.in_specs),
        "out_axes": ", ".join(_mapping(spec.names) for spec in placed.out_specs),
        "axis sizes": _mapping(placed.body.sizes.items()),
        "arguments": ", ".join(_steady(str(jax.typeof(leaf))) for leaf in jax.tree.leaves(args)),
        "serial loops": _mapping(placed.scope.loops),
        "mesh": f"{_mapping(mesh.shape.items())} of {devices[0].platform} devices {ids} of processes {processes}",
        "versions": f"jax {_jax.RELEASE}, xmap_compat {_version.__version__}",
        "settings": _mapping((name, getattr(jax.config, name)) for name in SETTINGS),
    }
    texts = _texts(
        functools.partial(trace_flat, body=placed.body), placed.program.jaxpr, placed.program.consts
    )
    program = (
        ("program:", line.strip()) for text in dict.fromkeys(texts) for line in text.splitlines()
    )
    lines = (*parts.items(), *program)
    digest = hashlib.sha256(json.dumps(lines).encode()).hexdigest()
    return Fingerprint(lines, digest, tuple(sorted({*processes})), placed.uses_mesh)


def _mapping(items):
    return _steady("{" + ", ".join(f"{key!r}: {value!r}" for key, value in items) + "}")


def _steady(text: str) -> str:
    """The text without addresses and parameters that may differ, and with the elements of sets in
    order.
    """
    text = _ADDRESS.sub("", _MAY_DIFFER.sub("", text))
    return _SET.sub(lambda match: "{" + ", ".join(sorted(match[1].split(", "))) + "}", text)


def _texts(
    trace: Callable[..., Any], jaxpr: Any, consts: Sequence[Any], order: int = 0
) -> Iterator[str]:
    """The texts of a program, of the constants in it, and of the derivatives that its custom rules
    make.
    """
    equations = [eqn for eqn, _ in _jax.walk(jaxpr, once=True)]
    inner = [_jax.open_jaxpr(held)[1] for eqn in equations for held in _jax.subjaxprs(eqn.params)]
    literals = [
        a.val
        for eqn in equations
        for a in eqn.invars
        if isinstance(a, _jax.Literal) and np.ndim(a.val)
    ]
    yield _steady(str(jaxpr))
    yield f"with constants {' '.join(map(_constant, itertools.chain(consts, *inner, literals)))}"
    for eqn in equations if order < ORDERS else ():
        if isinstance(_jax.read(eqn), (_jax.CustomJvp, _jax.CustomVjp, _jax.HijaxOperation)):
            try:
                yield from _texts(trace, *_jax.open_jaxpr(derivative(trace, eqn)), order + 1)
            except Exception as error:  # for example, it has no derivative
                yield f"rules of {eqn.primitive.name}: {type(error).__name__}"


def _constant(value: Any) -> str:
    """A constant by its values; by its type alone if it is large, if other processes have parts of
    it, or if traced.
    """
    kind = _steady(str(jax.typeof(value)))
    here = not isinstance(value, jax.core.Tracer) and getattr(value, "is_fully_addressable", True)
    if not here or np.size(value) * jax.typeof(value).dtype.itemsize > LARGEST_CONSTANT:
        return kind
    if _jax.is_key(value):
        with jax.ensure_compile_time_eval():
            value = jax.random.key_data(value)
    return f"{kind} of {hashlib.sha256(np.asarray(value).tobytes()).hexdigest()[:16]}"


# ------------------------------------------------------------------------- in the store

MOST_LINES, LONGEST_LINE = (
    2_000,
    500,
)  # that calls send if they differ, to find where; a digest is of all lines
LONGEST_SHOWN = 200  # characters of each side of a difference
_SAME_CALLS = (
    "All processes of a mesh must make the same calls of xmapped functions, in the same order."
)

# How many calls this process has compared with the same processes; each of them must have the same
# count.
counts: Counter[Hashable] = Counter()
_lock = threading.Lock()


def _agree(store: _jax.ProcessStore, own: Fingerprint, timeout: float) -> None:
    """Return when all processes have posted the same digest; raise on every process if one has
    not.
    """
    with _lock:
        counts[store.client, own.processes] += 1
        number = counts[store.client, own.processes]
    name = hashlib.sha256(json.dumps(own.processes).encode()).hexdigest()[:16]
    folder, me = f"xmap_compat/{name}/{number}", jax.process_index()
    place, until = os.path.basename(_jax.where_now().partition(" (")[0]), time.monotonic() + timeout
    store.put(f"{folder}/digest/{me}", own.digest)
    posted = (
        (p, store.wait(f"{folder}/digest", str(p), until - time.monotonic())) for p in own.processes
    )
    digests = {p: digest for p, digest in posted if digest is not None}
    if len({*digests.values()}) > 1:
        lines = [(what, text[:LONGEST_LINE]) for what, text in own.lines[:MOST_LINES]]
        store.put(f"{folder}/details/{me}", json.dumps(lines))
        raise _processes_differ(
            _differences(store, folder, digests), me, dict(lines)["function"], place
        )
    # A process that arrives after others have given up must not go on alone: the first outcome
    # holds for all.
    missing = [p for p in own.processes if p not in digests]
    missing, waiting_at = json.loads(store.put(f"{folder}/outcome", json.dumps([missing, place])))
    if missing:
        raise _processes_missing(missing, me, timeout, waiting_at, place)


def _differences(store: _jax.ProcessStore, folder: str, digests: Mapping[int, str]) -> list[str]:
    """For each digest that most processes do not have, how its call differs from theirs."""
    usual, *unusual = (digest for digest, _ in Counter(digests.values()).most_common())
    having = {digest: [p for p in digests if digests[p] == digest] for digest in (usual, *unusual)}
    texts = {
        digest: store.wait(f"{folder}/details", str(having[digest][0]), 10.0) for digest in having
    }
    details = {digest: json.loads(text) if text else [] for digest, text in texts.items()}
    return [
        f"{_process_list(having[d])}: {_difference(details[d], details[usual])}" for d in unusual
    ]


def _process_list(processes: Sequence[int]) -> str:
    """``process 3``, ``processes 0, 2``."""
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


def _difference(lines, others):
    """``axis_resources {'batch': 'x'}, others {'batch': 'y'}``: the first line that differs, or a
    piece of it.
    """
    for (what, own), (_, other) in zip(lines, others):
        if own != other:
            begin = max(
                0,
                next(k for k, (a, b) in enumerate(itertools.zip_longest(own, other)) if a != b)
                - 60,
            )
            own, other = (text[begin : begin + LONGEST_SHOWN] for text in (own, other))
            return f"{what} {own}, others {other}"
    return "a program that differs further on"


def _processes_differ(differences: Sequence[str], me: int, fun: str, place: str) -> RuntimeError:
    return RuntimeError(
        f"The processes of this mesh call different programs: {'; '.join(differences)}. (This is process {me}, which "
        f"calls `{fun}` at {place}. Every process raises this error.) {_SAME_CALLS}"
    )


def _processes_missing(
    missing: Sequence[int], me: int, seconds: float, waiting_at: str, place: str
) -> RuntimeError:
    late = f" This process arrived later, at {place}." if me in missing else ""
    return RuntimeError(
        f"{_process_list(missing).capitalize()} did not arrive within {seconds:g} s: the others wait at {waiting_at}."
        f"{late} {_SAME_CALLS} If a process only needs more time, allow it in every process: "
        "xmap_compat.compare_processes(timeout=600), or None for no comparison."
    )
