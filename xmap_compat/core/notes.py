"""Notes that say how an error of JAX in the user's function is related to named axes.

This module is loaded only when there is such an error.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xmap_compat import _jax
from xmap_compat.core import errors
from xmap_compat.core.collectives import integer_name
from xmap_compat.core.named_shape import is_array, named_shape
from xmap_compat.core.placement import sizes_in_scope
from xmap_compat.core.restored import is_name


def add_note(error: Exception) -> None:
    """Add a note that explains an error raised while the user's function is traced, if a note
    applies.
    """
    # The user's error must be the one that shows.
    with contextlib.suppress(Exception):
        note = _note_for(error)
        if note:
            errors.note_once(error, note)


# Words in errors of JAX and NumPy when a program counts named dimensions, or asks for their sizes.
_OF_DIMENSIONS = re.compile(
    r"shape|dimension|ndim|rank|ax[ei]s|unsized|0-d|subscript|string indexing|out of bounds"
    "|permutation"
)


def _note_for(error: Exception) -> str | None:
    frames, below = _jax.user_frames_of(error)
    text = str(error)
    integer = _integer_axis(below)
    if integer is not None:
        return integer_name(integer)
    named = _axis_given_by_name(below)
    if named:
        return f"{named} does not take the name of an axis here. {_TAKE_NAMES}"
    for words, note in _OF_TRACING.items():
        if words in f"{type(error)} {text}":
            return note
    called = [frame.f_code.co_name for frame in below]
    if "'int' object is not iterable" in text and "ppermute" in called:
        return PERMUTATION
    if not _is_of_dimensions(error):
        return None
    # The names of inner functions' arguments are unknown: then the note shows the values passed to
    # these functions.
    for frame, line in frames:
        mapped = _mapped_variables(frame, line)
        if mapped:
            return _positional_note(mapped)
    return None


def _is_of_dimensions(error: Exception) -> bool:
    """Whether the program may have counted named dimensions, or asked for their sizes."""
    if isinstance(error, (jax.errors.JAXTypeError, NotImplementedError)):
        return False
    if "positional argument" in str(error):
        return False
    return isinstance(error, IndexError) or bool(_OF_DIMENSIONS.search(str(error)))


def _integer_axis(below: Sequence[types.FrameType]) -> int | None:
    """An integer that a collective of JAX got, and that names an axis here."""
    names = sizes_in_scope()
    for frame in below:
        for axis in _as_tuple(frame.f_locals.get("axis_name", ())):
            if isinstance(axis, int) and axis in names:
                return axis
    return None


def _as_tuple(axes: Any) -> Sequence[Any]:
    return axes if isinstance(axes, (tuple, list)) else (axes,)


_AXES = ("axis", "axes", "dimension")


def _axis_given_by_name(below: Sequence[types.FrameType]) -> str | None:
    """The function of JAX that got a name where it takes a position; a collective has its names
    elsewhere.
    """
    for frame in below:
        found = [frame.f_locals[name] for name in _AXES if name in frame.f_locals]
        if not found:
            continue
        axes = itertools.chain.from_iterable(map(_as_tuple, found))
        is_collective = "axis_name" in frame.f_locals
        if is_collective or not any(map(is_name, axes)):
            return None
        return frame.f_code.co_name.strip("_")
    return None


def _mapped_variables(
    frame: types.FrameType, line: int
) -> dict[str, tuple[tuple[int, ...], Mapping[Any, int]]]:
    """The variables on a line (or of its function, if the source is unknown) that vary over named
    axes.
    """
    words = re.findall(r"\w+", linecache.getline(frame.f_code.co_filename, line))
    variables = dict(frame.f_locals)
    shapes: dict[str, tuple[tuple[int, ...], Mapping[Any, int]]] = {}
    for name in words or variables:
        if name in variables and is_array(variables[name]):
            with contextlib.suppress(ValueError):  # its named shape is unknown
                named = named_shape(variables[name])
                if named:
                    shapes[name] = (jnp.shape(variables[name]), named)
    return shapes


# ------------------------------------------------------------------------------ words

_TAKE_NAMES = (
    "The functions of xmap_compat.numpy do; and xmap_compat.numpy.along(fun, 'i', x) calls fun "
    "with an array that has the named axis 'i' of x as its dimension 0"
)
_BY_NAME = (
    "The function computes one element of each named axis. A sum along one is jnp.sum(x, "
    "axis={name!r}), other functions are in xmap_compat.numpy, a sum of products is pdot(x, y, "
    "{name!r}), and its size is lax.axis_size({name!r})"
)


def _positional_note(values: Mapping[str, tuple[Sequence[int], Mapping[Any, int]]]) -> str:
    """``values``: variables with their positional and their named shapes."""
    sentences = []
    for variable, (shape, sizes) in values.items():
        positional = "no positional dimensions"
        if shape:
            positional = f"the positional shape {tuple(shape)}"
        sentences.append(
            f"`{variable}` has {positional} here; its named axes are {{{errors.axes_text(sizes)}}}."
        )
    sentences.append(_BY_NAME.format(name=next(iter(sizes))))
    return " ".join(sentences)


_TRACED = "xmap traces this function once, for all elements of its named axes: "
_NO_VALUE = (
    f"{_TRACED}their values are not known here. Bind what must be known with functools.partial "
    "before xmap; the size of a named axis is lax.axis_size(name)"
)
_NO_TRUTH = (
    f"{_TRACED}a condition has no truth value here. Write jnp.where(condition, x, y) or lax.cond "
    "in the place of `if`, `and`, `or`, `not`, `max` and `min`"
)
_OF_TRACING = {  # by words of the error or of its type
    "TracerBoolConversionError": _NO_TRUTH,
    "truth value of an array": _NO_TRUTH,
    "TracerArrayConversionError": (
        f"{_TRACED}NumPy cannot read them. Call jax.numpy's function: jnp.sin, not np.sin; "
        "index an array of its: jnp.asarray(w)[v], not w[v]"
    ),
    "NonConcreteBooleanIndexError": (
        f"{_TRACED}what a mask selects is not known here. Write jnp.where(mask, x, 0)"
    ),
    "TracerIntegerConversionError": f"{_NO_VALUE}. To index a list write jnp.asarray(values)[v]",
    "ConcretizationTypeError": _NO_VALUE,
    "converted to a scalar index": _NO_VALUE,
}

PERMUTATION = (
    "The permutation of ppermute is a list of pairs, (source, destination); "
    "lax.pshuffle takes a list of sources"
)
RESULT = (
    "xmap takes arrays, scalars, or pytrees of them as results, and out_axes name their "
    "dimensions. Let a function around the xmapped one return anything else"
)
