"""Where in the user's program something came from."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
import traceback
import types
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import numpy
import opt_einsum
from jax.extend import source_info_util

# Frames in these folders and files are not the user's.
_FOLDERS = [
    *(os.path.dirname(str(module.__file__)) + os.sep for module in (jax, opt_einsum)),
    contextlib.__file__,
]


def exclude_from_positions(folder: str) -> None:
    """Positions in messages and in compiled programs are the user's: none is in this folder."""
    source_info_util.register_exclusion(folder + os.sep)
    _FOLDERS.append(folder + os.sep)
    is_user_file.cache_clear()


@functools.cache
def is_user_file(name: str) -> bool:
    """Whether the user has written a file, as JAX guesses it for the positions in its programs."""
    return not name.startswith(
        (*_FOLDERS, sysconfig.get_path("stdlib"), os.path.dirname(os.__file__))
    )


C = TypeVar("C", bound=Callable[..., Any])


def api_boundary(fun: C) -> C:
    """Let the traceback of what a function raises end in the user's file, as JAX's functions
    do.

    In IPython, JAX's functions only mark their frames as hidden, and the last one still shows: here
    they are removed.
    """

    @functools.wraps(fun)
    def at_boundary(*args, **kwargs):
        try:
            return fun(*args, **kwargs)
        except Exception as error:
            end_at_user(error)
            raise

    return cast(C, at_boundary)


# Code objects; all functions that api_boundary makes share one.
_BOUNDARIES = {api_boundary(len).__code__}


def boundary(fun: C) -> C:
    """Mark a function that calls ``end_at_user`` itself."""
    _BOUNDARIES.add(fun.__code__)
    return fun


def end_at_user(error: Exception) -> None:
    """Shorten the traceback of an error that a boundary has caught, and raises again.

    Within another boundary it stays: functions there look for the frame that raised the error.
    """
    if jax.config.jax_traceback_filtering == "off":
        return
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code in _BOUNDARIES:
            return
        frame = frame.f_back
    error.with_traceback(_without_hidden_frames(error.__traceback__))


def _without_hidden_frames(passed):
    kept = None
    for frame, line in reversed(list(traceback.walk_tb(passed))):
        if not frame.f_code.co_filename.startswith(tuple(_FOLDERS)):
            kept = types.TracebackType(kept, frame, frame.f_lasti, line)
    return kept


def _running() -> tuple[types.FrameType | None, int]:
    """The frame of the user's code that is running, and how many frames are below it."""
    frame: types.FrameType | None = sys._getframe()
    below = 0
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
        below += 1
    return frame, below


def where_now() -> str:
    """``file:line (function)`` of the user's code that is running, also from within a function that
    jit traces.
    """
    frame, _ = _running()
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


_NUMPY = (
    os.path.dirname(numpy.__file__) + os.sep
)  # between a user's line and JAX: it calls methods of JAX's arrays


def user_frames_of(
    error: Exception,
) -> tuple[list[tuple[types.FrameType, int]], list[types.FrameType]]:
    """The user's frames that an error passed with their lines, innermost first, and JAX's below
    these, outermost first.

    Both are empty where this package raised the error.
    """
    passed = list(traceback.walk_tb(error.__traceback__))
    package = os.path.dirname(os.path.dirname(__file__)) + os.sep
    innermost, _ = passed[-1]
    if innermost.f_code.co_filename.startswith(package):
        return [], []
    users: list[tuple[types.FrameType, int]] = []
    below: list[types.FrameType] = []
    for frame, line in passed:
        file = frame.f_code.co_filename
        if is_user_file(file) and not file.startswith(_NUMPY):
            users.insert(0, (frame, line))
            below.clear()
        elif not file.startswith(package):
            below.append(frame)
    return users, below


def warn_user(text: str) -> None:
    """Warn at the user's line that is running."""
    warnings.warn(text, UserWarning, stacklevel=_running()[1])


def equation_context(eqn: Any) -> Any:
    """A context that gives what is bound in it the name stack and user frame of the original
    equation.
    """
    info = eqn.source_info
    name_stack = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=name_stack)


def where_in_user_code(*eqns: Any) -> str:
    """``file:line (function)`` of the user's call that made an equation: the first of them for
    which it is known.
    """
    for eqn in eqns:
        where = source_info_util.summarize(eqn.source_info)
        if where:
            return where
    return where_now()
