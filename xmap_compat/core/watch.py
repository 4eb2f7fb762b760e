"""How a tool watches the calls of a program while it traces the program."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from xmap_compat.core.arguments import Declaration
from xmap_compat.core.call import PlacedCall
from xmap_compat.core.evaluate import Evaluator


@dataclasses.dataclass(frozen=True)
class Watcher:
    """The part of a tool in the execution of calls.

    Attributes:
      evaluator: makes the evaluator of each call.
      traced: called with each call that is traced.
      constructed: called with each function that xmap makes; the program gets what it returns.
    """

    evaluator: Callable[..., Evaluator] = Evaluator
    traced: Callable[[Declaration, PlacedCall, tuple[Any, ...]], object] = lambda *call: None
    constructed: Callable[[Any], Any] = lambda function: function


NOBODY = Watcher()

_watcher: contextvars.ContextVar[Watcher] = contextvars.ContextVar("watcher", default=NOBODY)
# A part of jit's cache key: a number and not the watcher, because JAX's caches keep their keys.
_number = jax.make_user_context(default_value=0)
_numbers = itertools.count(1)
# The numbers under which JAX has traced an xmapped function, whose program depends on the watcher.
_used: set[int] = set()
# Other numbers of earlier watchers.  The next one takes one of them, so that JAX's caches do not
# grow.
_reusable: list[int] = []


def watcher() -> Watcher:
    return _watcher.get()


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Watch what is traced here; JAX uses no traces of xmapped functions that it made without the
    watcher.
    """
    try:
        number = _reusable.pop()
    except IndexError:
        number = next(_numbers)
    token = _watcher.set(watcher)
    try:
        with _number(number):
            yield
    finally:
        _watcher.reset(token)
        if number not in _used:
            _reusable.append(number)


_everywhere: dict[object, Watcher] = {}


def watch_everywhere(watcher: Watcher) -> Callable[[], object]:
    """Have ``traced`` and ``constructed`` of a watcher called in all threads; returns a function
    that ends this.
    """
    key = object()
    _everywhere[key] = watcher
    return lambda: _everywhere.pop(key, None)


def watchers() -> list[Watcher]:
    """Those of this thread and of all."""
    # A copy, as other threads may remove theirs.
    return [_watcher.get(), *list(_everywhere.values())]


def report_traced(declared: Declaration, placed: PlacedCall, args: tuple[Any, ...]) -> None:
    """Call ``traced`` of all watchers with a call that JAX traces."""
    _used.add(_number.value)
    for each in watchers():
        each.traced(declared, placed, args)
