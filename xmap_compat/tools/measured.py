"""The times of assignments: the compiled steps take turns, so that a busy machine slows all of them."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xmap_compat.tools import errors
from xmap_compat.tools.candidates import Candidate

ROUNDS, LEAST, SECONDS = 15, 5, 2.0  # turns of each step, of which some may be left out after so many seconds


def measured(
    executable: Callable[[Mapping[Any, Any]], Any], args: Any, found: Sequence[Candidate], count: int, device: Any
) -> list[Candidate]:
    """The candidates, the first of them with the medians of interleaved calls.

    Args:
      executable: gives the ``jax.stages.Compiled`` of an assignment.
      count: how many to run.
      device: one of those that run them.
    """
    timers, done = dict[int, Callable[[], float]](), list(found)
    for k, c in progress([(k, c) for k, c in enumerate(found) if c.refused is None][:count], "compile"):
        try:
            timers[k] = _timer(executable(c.axis_resources), args, device)
        except Exception as error:  # too little memory, or an argument that is elsewhere
            done[k] = dataclasses.replace(c, refused=errors.not_compiled(error))
    seconds: dict[int, list[float]] = {k: [] for k in timers}
    end = time.monotonic() + SECONDS
    for turn in progress(range(ROUNDS), "measure"):
        if turn < LEAST or time.monotonic() < end:
            for k, timer in timers.items():
                seconds[k].append(timer())
    for k, own in seconds.items():
        low, middle, high = statistics.quantiles(own, n=4)
        done[k] = dataclasses.replace(done[k], seconds=middle, noise=(high - low) / 2)
    return done


def _timer(compiled: Any, args: Any, device: Any) -> Callable[[], float]:
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


def progress(items: Any, title: str) -> Any:
    """Items with a progress bar, if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, title, leave=False, delay=1)
