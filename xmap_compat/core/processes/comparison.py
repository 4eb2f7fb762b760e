"""Which calls the processes of a mesh compare, and when: once for each program, when it is about to run first."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import threading
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from xmap_compat import _jax
from xmap_compat.core.call import Declaration, PlacedCall
from xmap_compat.core.errors import should_be
from xmap_compat.core.mesh import devices_of
from xmap_compat.core.placement import Scope, current_scope
from xmap_compat.core.processes.errors import nothing_to_compare_by_text

if TYPE_CHECKING:
    from xmap_compat.core.processes.fingerprint import Fingerprint

TIMEOUT_VARIABLE = "XMAP_COMPAT_PROCESS_TIMEOUT"
DEFAULT_TIMEOUT = 60.0  # seconds


# ------------------------------------------------------------------------------- the setting


class _Setting:
    timeout: float | None = None
    is_set = False


_setting = _Setting()


def compare_processes(timeout: float | None = DEFAULT_TIMEOUT) -> None:
    """Set how long processes wait for each other when they compare their calls, or turn the comparison off.

    When an xmapped function is about to run for the first time on a mesh of several processes, these compare
    the function's name and program, its specs, sizes and ``axis_resources``, the mesh with the order of its
    devices, and the versions of jax and xmap_compat.  If they differ, or a process does not arrive, every process
    raises an error, instead of wrong numbers or a hang. Compiled calls are not compared again.

    Args:
      timeout: seconds to wait for other processes; None turns the comparison off. By default it is the environment
        variable ``XMAP_COMPAT_PROCESS_TIMEOUT`` (a number, or ``off``), or 60. It must be on in all processes, or off
        in all.

    Raises:
      ValueError: ``timeout`` is not a positive number of seconds.

    Example, where one process reads its data for minutes:

      >>> import xmap_compat
      >>> xmap_compat.compare_processes(timeout=600)
    """
    if timeout is not None and not _is_timeout(timeout):
        raise _bad_timeout("The timeout of compare_processes", "None", timeout)
    _setting.timeout, _setting.is_set = timeout, True


def _timeout() -> float | None:
    if _setting.is_set:
        return _setting.timeout
    text = os.environ.get(TIMEOUT_VARIABLE, "").strip()
    if text.lower() == "off":
        return None
    try:
        seconds = float(text or DEFAULT_TIMEOUT)
    except ValueError:
        seconds = math.nan
    if not _is_timeout(seconds):
        raise _bad_timeout(TIMEOUT_VARIABLE, "`off`", text)
    return seconds


def _bad_timeout(where: str, off: str, timeout: Any) -> Exception:
    return should_be(where, f"a positive number of seconds, or {off} for no comparison", timeout, ValueError)


def _is_timeout(value):
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and value > 0 and math.isfinite(value)


# ------------------------------------------------------------------- which calls are compared


class _Active(threading.local):
    def __init__(self):
        self.calls: list[tuple[ComparedCalls, tuple[Any, ...], bool]] = []


_active = _Active()


class ComparedCalls:
    """The calls of one jitted function: each is compared when it is traced, or else before it runs.

    ``lower``, ``trace`` and ``eval_shape`` trace without a call: what they have traced is compared when it is called.
    A call that the processes have agreed on is not compared again, although one of them may trace it again alone.
    """

    def __init__(self):
        self._deferred: dict[Hashable, Fingerprint] = {}
        self._agreed: set[Hashable] = set()

    @contextlib.contextmanager
    def calling(self, args: tuple[Any, ...]) -> Iterator[None]:
        """The context around a call that jit has not compiled before, or whose first call was an error."""
        staged = jax.process_count() > 1 and _jax.is_staging()
        key = _key(args) if self._deferred else None
        if found := self._deferred.get(key):
            self._compare(found, args, staged)
            self._deferred.pop(key, None)
        _active.calls.append((self, args, staged))
        try:
            yield
        finally:
            _active.calls.pop()

    def traced(self, declared: Declaration, placed: PlacedCall, args: tuple[Any, ...]) -> None:
        """Called from within jit's trace, when the call has been placed."""
        processes = {d.process_index for d in devices_of(placed.scope.mesh)}
        if placed.nested or len(processes) < 2 or jax.process_index() not in processes:
            return
        # What follows is not loaded on one process.
        made = importlib.import_module("xmap_compat.core.processes.fingerprint").fingerprint(declared, placed, args)
        caller, own_args, staged = _active.calls[-1] if _active.calls else (None, (), False)
        if caller is self:
            self._compare(made, own_args, staged)
        else:
            self._deferred[_key(args)] = made

    def _compare(self, made: Fingerprint, args: tuple[Any, ...], staged: bool) -> None:
        """Compare with the other processes of the mesh, if the call needs them.

        ``staged``: in the trace of an outer function, which may never be called.
        """
        timeout = _timeout()
        if timeout is None:
            return
        store = _jax.process_store()
        if store is None:
            _warn_once_that_nothing_is_compared()
            return
        exchange = importlib.import_module("xmap_compat.core.processes.exchange")
        history = exchange.history_of(store, made.processes)
        if not (made.uses_mesh or any(map(_is_shared, jax.tree.leaves(args)))):
            history.tell(made)
        elif (history, made.digest) not in self._agreed:
            history.compare(made, timeout, staged)
            self._agreed.add((history, made.digest))


def _key(args) -> tuple[Any, Any, Scope] | None:
    """A key of a call's arguments, traced or not, and of the scope; None if some are not arrays."""
    leaves, tree = jax.tree.flatten(args)
    try:
        types = [jax.typeof(leaf) for leaf in leaves]
    except TypeError:
        return None
    return tuple((t.shape, t.dtype, t.weak_type) for t in types), tree, current_scope()


def _is_shared(x):
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and not x.is_fully_addressable


@functools.cache
def _warn_once_that_nothing_is_compared():
    _jax.warn_user(nothing_to_compare_by_text())
