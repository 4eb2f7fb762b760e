"""How a tool watches the calls of a program while it traces the program."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from xmap_compat.core.call import PlacedCall
from xmap_compat.core.evaluate import Evaluator


@dataclasses.dataclass(frozen=True)
class Watcher:
    """``with watching(Watcher(evaluator)):`` while a program is traced.

    Attributes:
      evaluator: makes the evaluator of each call.
      around: for each placed call, a context around its execution.
    """

    evaluator: Callable[..., Evaluator] = Evaluator
    around: Callable[[PlacedCall], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


NOBODY = Watcher()

# A part of jit's cache key, so that jit does not reuse programs that were traced without the watcher.
watching = jax.make_user_context(default_value=NOBODY)
