"""Fair timing of two rivals on a noisy machine: interleaved, compared by best or by median."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax


class Rivals(NamedTuple):
    """Seconds that two alternatives took, one entry for each repetition."""

    ours: list[float]
    theirs: list[float]

    def best(self) -> tuple[float, float]:
        """The smallest time of ours, and how many times that of theirs it is."""
        return min(self.ours), min(self.ours) / min(self.theirs)

    def median(self) -> tuple[float, float]:
        """The median time of ours, and the median over repetitions of the ratio ours / theirs."""
        return statistics.median(self.ours), statistics.median(
            a / b for a, b in zip(self.ours, self.theirs)
        )


def fresh(fun: types.FunctionType) -> types.FunctionType:
    """A new function with the same code, for which JAX's caches hold nothing."""
    copy = types.FunctionType(
        fun.__code__, fun.__globals__, fun.__name__, fun.__defaults__, fun.__closure__
    )
    copy.__kwdefaults__ = fun.__kwdefaults__
    return copy


def interleave(ours: Callable[[], float], theirs: Callable[[], float], repeats: int) -> Rivals:
    """Take both measurements in turn, in alternating order, after one of each that does not count."""
    ours(), theirs()
    rivals = Rivals([], [])
    with _no_garbage_collection():
        for k in range(repeats):
            _take_turns(ours, theirs, rivals, ours_first=k % 2 == 0)
            gc.collect()
    return rivals


def calls(
    ours: Callable, theirs: Callable, args: tuple[Any, ...], rounds: int, count: int
) -> Rivals:
    """The median time of ``count`` calls, each until its results are there; the two take turns at every call."""
    medians = Rivals([], [])
    with _no_garbage_collection():
        for _ in range(rounds):
            seconds = turns(ours, theirs, args, count)
            medians.ours.append(statistics.median(seconds.ours))
            medians.theirs.append(statistics.median(seconds.theirs))
    return medians


def turns(ours: Callable, theirs: Callable, args: tuple[Any, ...], count: int) -> Rivals:
    """The seconds of ``count`` calls of each, until their results are there; each is first in every second turn."""
    measures = [lambda: _call_seconds(ours, args), lambda: _call_seconds(theirs, args)]
    seconds = Rivals([], [])
    for k in range(count):
        _take_turns(*measures, seconds, ours_first=k % 2 == 0)
    return seconds


def _take_turns(
    ours: Callable[[], float], theirs: Callable[[], float], rivals: Rivals, ours_first: bool
) -> None:
    turns = [(ours, rivals.ours), (theirs, rivals.theirs)]
    for measure, times in turns if ours_first else reversed(turns):
        times.append(measure())


def _call_seconds(fun: Callable, args: tuple[Any, ...]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(fun(*args))
    return time.perf_counter() - begin


def cpu_seconds(fun: Callable[[Any], Any], prepare: Callable[[], Any]) -> Callable[[], float]:
    """A measurement: the processor time of ``fun(prepare())``, all threads together; the preparation does not count.

    Processor time, because other programs on the machine disturb it less.
    """

    def measure():
        prepared = prepare()
        begin = time.process_time()
        fun(prepared)
        return time.process_time() - begin

    return measure


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
