"""What an error of JAX in the user's function has to do with named axes, as a note on it."""

from __future__ import annotations

import contextlib
import linecache
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from xmap_compat import _jax
from xmap_compat.core import errors
from xmap_compat.core.named_shape import is_array, named_shape


@contextlib.contextmanager
def notes_on_errors() -> Iterator[None]:
    """While the user's function is traced: add to its errors what explains them, if anything does."""
    try:
        yield
    except (IndexError, NotImplementedError, TypeError, ValueError) as error:
        note = None
        with contextlib.suppress(Exception):  # the user's error is the one to be seen
            note = _note_for(error)
        if note:
            errors.note_once(error, note)
        raise


# What JAX and NumPy speak of where a program counts dimensions that are named, or asks for their sizes.
_OF_DIMENSIONS = re.compile(r"shape|dimension|ndim|rank|ax[ei]s|unsized|0-d|string indexing|out of bounds|permutation")


def _note_for(error: Exception) -> str | None:
    frames, below = _jax.user_frames_of(error)
    if "'str' object cannot be interpreted as an integer" in str(error) or "Named reductions" in str(error):
        function = next((name for name in below if name in _POSITIONAL), None)
        return errors.named_function_note(function) if function else None
    if "'int' object is not iterable" in str(error) and "ppermute" in below:
        return errors.permutation_note()
    of_dimensions = isinstance(error, IndexError) or _OF_DIMENSIONS.search(str(error))
    if (
        not of_dimensions
        or "positional argument" in str(error)
        or isinstance(error, jax.errors.JAXTypeError | NotImplementedError)
    ):
        return None
    # Of the arguments of inner functions it is not known what they vary over: then what was passed to them is shown.
    mapped = next(filter(None, (_mapped_variables(*frame) for frame in frames)), None)
    return errors.positional_note(mapped) if mapped else None


_POSITIONAL = {*vars(jnp), *vars(jnp.linalg), *vars(jax.nn)}


def _mapped_variables(frame: types.FrameType, line: int) -> dict[str, tuple[tuple[int, ...], Mapping[Any, int]]]:
    """The variables on a line (or of its function, where its source is not known) that vary over named axes."""
    text = linecache.getline(frame.f_code.co_filename, line)
    found = {}
    for name, value in frame.f_locals.items():
        if is_array(value) and (not text or re.search(rf"\b{name}\b", text)):
            with contextlib.suppress(ValueError):  # it is not known
                found[name] = (jnp.shape(value), named_shape(value))
    return {name: (shape, named) for name, (shape, named) in found.items() if named}
