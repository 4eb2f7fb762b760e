"""Which calls the processes of a mesh compare, and when: once for each program, when it is about to run first."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import math
import os
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from xmap_compat import _jax
from xmap_compat.core.call import Declaration, PlacedCall
from xmap_compat.core.errors import should_be
from xmap_compat.core.mesh import devices_of
from xmap_compat.core.named_shape import is_array
from xmap_compat.core.placement import current_scope

if TYPE_CHECKING:
    from xmap_compat.core.processes.fingerprint import Fingerprint

TIMEOUT_VARIABLE = "XMAP_COMPAT_PROCESS_TIMEOUT"
DEFAULT_TIMEOUT = 60.0  # seconds
_setting: list[float | None] = []  # the timeout that the program has set last


@_jax.api_boundary
def compare_processes(timeout: float | None = DEFAULT_TIMEOUT) -> None:
    """Set how long processes wait for each other when they compare their calls, or turn the comparison off.

    When an xmapped function is about to run for the first time on a mesh of several processes, these compare
    the call, its program, the mesh and the versions of jax and xmap_compat.  If they differ, or a process does not
    arrive, every process raises an error, instead of wrong numbers or a hang. Compiled calls are not compared again.

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
    where = "The timeout of compare_processes"
    _setting[:] = [None if timeout is None else _checked(timeout, timeout, where, "None")]


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


def _checked(seconds: Any, shown: Any, where: str, off: str) -> float:
    if type(seconds) in (int, float) and 0 < seconds < math.inf:
        return seconds
    raise should_be(where, f"a positive number of seconds, or {off} for no comparison", shown, ValueError)


# The function that is being called, and its arguments; ``lower``, ``trace`` and ``eval_shape`` call none.
_called: contextvars.ContextVar[tuple[Any, tuple[Any, ...]]] = contextvars.ContextVar("called", default=(None, ()))


class ComparedCalls:
    """The calls of one jitted function: each is compared when it is traced, or when it is called, if traced before.

    A call that the processes have agreed on is not compared again, even if one of them traces it once more.
    """

    def __init__(self):
        self._traced: dict[Hashable, Fingerprint] = {}
        self._agreed: set[Hashable] = set()

    @contextlib.contextmanager
    def calling(self, args: tuple[Any, ...]) -> Iterator[None]:
        """The context around a call that jit has not compiled yet, or that has raised an error."""
        if self._traced and (fingerprint := self._traced.get(_key(args))):
            self._compare(fingerprint, args)
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
        # With one process these modules are not loaded.
        make = importlib.import_module("xmap_compat.core.processes.fingerprint").fingerprint
        self._traced[_key(args)] = fingerprint = make(declared, placed, args)
        caller, own_args = _called.get()
        if caller is self:
            self._compare(fingerprint, own_args)

    def _compare(self, fingerprint: Fingerprint, args: tuple[Any, ...]) -> None:
        """Compare with the other processes of the mesh, if the call needs them."""
        timeout, store = _timeout(), _jax.process_store()
        if timeout is None or store is None:
            return
        key = store.client, fingerprint.processes, fingerprint.digest
        if key not in self._agreed and (fingerprint.uses_mesh or any(map(_is_shared, jax.tree.leaves(args)))):
            importlib.import_module("xmap_compat.core.processes.exchange").compare(store, fingerprint, timeout)
            self._agreed.add(key)


def _key(args: tuple[Any, ...]) -> Hashable:
    """A key of a call's arguments, traced or not, and of the scope; None if some are not arrays."""
    leaves, tree = jax.tree.flatten(args)
    if not all(map(is_array, leaves)):
        return None
    types = map(jax.typeof, leaves)
    return tuple((t.shape, t.dtype, t.weak_type) for t in types), tree, current_scope()


def _is_shared(x):
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and not x.is_fully_addressable
