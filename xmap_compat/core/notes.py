"""Notes that say how an error of JAX in the user's function is related to named axes.

This module is loaded only when there is such an error.
"""

from __future__ import annotations

import contextlib
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
from xmap_compat.core.placement import enclosing_bodies
from xmap_compat.core.restored import is_name
from xmap_compat.core.specs import argument_path


def add_note(error: Exception) -> None:
    """Add a note that explains an error raised while the user's function is traced, if a note
    applies.
    """
    with contextlib.suppress(Exception):  # the user's error must be the one that shows
        if note := _note_for(error):
            errors.note_once(error, note)


def add_note_on_captured(error: Exception, declared: Any, args: tuple[Any, ...]) -> None:
    """Name the captured arrays whose types let JAX infer shardings in a body, if it could not."""
    with contextlib.suppress(Exception):
        certain = "Sharding" in type(error).__name__ and not _jax.explicit_arrays({"args": args})
        captured = [
            argument_path(path[1:], path[0].key)
            for path in _jax.explicit_arrays(_jax.held_by(declared.fun))
        ]
        if certain or (captured and re.search("shard|mesh|replicated", str(error))):
            ours = f"{declared.name} captures {' and '.join(captured) or 'an array'}, whose type is sharded over a mesh"
            remedy = "Pass it to the xmapped function as an argument, with {} in in_axes"
            errors.note_once(error, f"{ours} with Explicit axes. {remedy}")


# Words in errors of JAX and NumPy when a program counts named dimensions, or asks for their sizes.
_OF_DIMENSIONS = re.compile(
    r"shape|dimension|ndim|rank|ax[ei]s|unsized|0-d|subscript|string indexing|out of bounds|permutation"
)


def _note_for(error: Exception) -> str | None:
    frames, below = _jax.user_frames_of(error)
    called = [frame.f_code.co_name.strip("_") for frame in below]
    if (integer := _integer_axis(below)) is not None:
        return integer_name(integer)
    named = _axis_given_by_name(below)
    if named and named not in TAKE_NAMES:
        return _named_function_note(named)
    if note := next(
        (note for words, note in _OF_TRACING.items() if words in f"{type(error)} {error}"), None
    ):
        return note
    if "'int' object is not iterable" in str(error) and "ppermute" in called:
        return PERMUTATION
    of_dimensions = isinstance(error, IndexError) or _OF_DIMENSIONS.search(str(error))
    if (
        not of_dimensions
        or "positional argument" in str(error)
        or isinstance(error, jax.errors.JAXTypeError | NotImplementedError)
    ):
        return None
    # The names of inner functions' arguments are unknown: then the note shows the values passed to
    # these functions.
    mapped = next(filter(None, (_mapped_variables(*frame) for frame in frames)), None)
    operation = next(filter(_OPERATIONS.__contains__, called), "" if called else "shape")
    return _positional_note(mapped, operation) if mapped else None


def _integer_axis(below: Sequence[types.FrameType]) -> int | None:
    """An integer that a collective of JAX got, and that names an axis here."""
    names = {name for body in enclosing_bodies() for name in body.sizes}
    for frame in below:
        axes = frame.f_locals.get("axis_name", ())
        for axis in axes if isinstance(axes, (tuple, list)) else (axes,):
            if isinstance(axis, int) and axis in names:
                return axis
    return None


_AXES = ("axis", "axes", "dimension")


def _axis_given_by_name(below: Sequence[types.FrameType]) -> str | None:
    """The function of JAX that got a name where it takes a position; a collective has its names
    elsewhere.
    """
    for frame in below:
        values = [frame.f_locals[parameter] for parameter in _AXES if parameter in frame.f_locals]
        if values:
            axes = [
                axis
                for one in values
                for axis in (one if isinstance(one, (tuple, list)) else (one,))
            ]
            is_collective = "axis_name" in frame.f_locals
            return (
                frame.f_code.co_name.strip("_")
                if any(map(is_name, axes)) and not is_collective
                else None
            )
    return None


def _mapped_variables(
    frame: types.FrameType, line: int
) -> dict[str, tuple[tuple[int, ...], Mapping[Any, int]]]:
    """The variables on a line (or of its function, if the source is unknown) that vary over named
    axes.
    """
    words = re.findall(r"\w+", linecache.getline(frame.f_code.co_filename, line))
    shapes = {}
    for name, value in frame.f_locals.items():
        if is_array(value) and (not words or name in words):
            with contextlib.suppress(ValueError):  # its named shape is unknown
                shapes[name] = (jnp.shape(value), named_shape(value))
    return {
        name: shapes[name]
        for name in sorted(shapes, key=[*words, *shapes].index)
        if shapes[name][1]
    }


# ------------------------------------------------------------------------------ words

# Functions of JAX that take axis names in the body of an xmapped function, and their modules.
TAKE_NAMES = {
    name: module
    for module, names in {
        "jnp.": "amax amin count_nonzero max mean min minmax nanmean nanstd nansum nanvar ptp std sum var",
        "jax.nn.": "log_softmax logmeanexp logsumexp one_hot softmax standardize",
        "jnp.linalg.": "vector_norm",
    }.items()
    for name in names.split()
}

# The functions of xmap_compat.numpy with the same names as those of jax.numpy, which take no axis
# names.
_NAMED = "all any argmax argmin argsort average cumprod cumsum flip median nanmax nanmin norm prod quantile roll sort"
NAMED_FUNCTIONS = frozenset([*_NAMED.split(), "take"])

_MATMUL = ("operator_matmul", "operator_rmatmul")
_PRODUCTS = {
    "dot",
    "dot_general",
    "einsum",
    "inner",
    "matmul",
    "matvec",
    "tensordot",
    "vdot",
    "vecdot",
    *_MATMUL,
}
_OPERATIONS = {
    *vars(jnp),
    *vars(jnp.linalg),
    *vars(jax.nn),
    *vars(jax.lax),
    "getitem",
    "iter",
    "len",
    *_MATMUL,
}
_OTHER_ARGUMENTS = {
    "one_hot": ", num_classes",
    "quantile": ", q",
    "roll": ", shift",
    "take": ", index",
}


def _positional_note(
    values: Mapping[str, tuple[Sequence[int], Mapping[Any, int]]], operation: str
) -> str:
    """``values``: variables with their positional and their named shapes; ``operation``: the
    operation on them.
    """
    described = [
        f"`{variable}` has {f'the positional shape {tuple(shape)}' if shape else 'no positional dimensions'} here; "
        f"its named axes are {{{', '.join(f'{name}: {size}' for name, size in named.items())}}}."
        for variable, (shape, named) in values.items()
    ]
    named = {
        variable: [name for name in names if isinstance(name, str)]
        for variable, (_, names) in values.items()
    }
    return " ".join([*described, *_by_name(operation, named)])


def _by_name(operation: str, named: Mapping[str, Sequence[str]]) -> list[str]:
    """How to write an operation over positional dimensions over its operands' named axes, if that
    is possible.
    """
    (variable, names), *others = named.items()
    operation = "take" if operation == "getitem" else operation
    if not names:
        return []
    if operation in _PRODUCTS:
        shared = [(second, k) for second, its in others[:1] for k in names if k in its]
        each = [
            f"The sum of products over `{k}` is pdot({variable}, {second}, {k!r})"
            for second, k in shared
        ]
        return (
            ["; ".join(each)]
            if each
            else [f"The sum of products over an axis of both operands is pdot(x, y, {names[0]!r})"]
        )
    if operation in TAKE_NAMES or operation in NAMED_FUNCTIONS:
        module, more = (
            TAKE_NAMES.get(operation, "xmap_compat.numpy."),
            _OTHER_ARGUMENTS.get(operation, ""),
        )
        return [
            f"Along a named axis it is {module}{operation}({variable}{more}, axis={names[0]!r})"
        ]
    if operation == "iter":
        return [f"The function computes one element of `{names[0]}`: it needs no loop over them"]
    return (
        [f"The size of a named axis is lax.axis_size({names[0]!r})"]
        if operation in ("len", "shape")
        else []
    )


def _named_function_note(fun: str) -> str:
    if fun in NAMED_FUNCTIONS:
        return f"{fun} takes no axis names here; xmap_compat.numpy.{fun} does"
    return (
        f"{fun} takes no axis names. xmap_compat.numpy.along(fun, 'i', x) calls fun with an array that has the named "
        f"axis 'i' of x as its dimension 0: use {fun} there, with axis=0"
    )


_TRACED = "xmap traces this function once, for all elements of its named axes: "
_NO_VALUE = (
    f"{_TRACED}their values are not known here. Bind what must be known with functools.partial before xmap; the size "
    "of a named axis is lax.axis_size(name)"
)
_NO_TRUTH = (
    f"{_TRACED}a condition has no truth value here. Write jnp.where(condition, x, y) or lax.cond in the place of `if`, "
    "`and`, `or`, `not`, `max` and `min`"
)
_OF_TRACING = {  # by words of the error or of its type
    "TracerBoolConversionError": _NO_TRUTH,
    "truth value of an array": _NO_TRUTH,
    "TracerArrayConversionError": (
        f"{_TRACED}NumPy cannot read them. Call jax.numpy's function: jnp.sin, not np.sin; "
        "index an array of its: jnp.asarray(w)[v], not w[v]"
    ),
    "NonConcreteBooleanIndexError": f"{_TRACED}what a mask selects is not known here. Write jnp.where(mask, x, 0)",
    "TracerIntegerConversionError": f"{_NO_VALUE}. To index a list write jnp.asarray(values)[v]",
    "ConcretizationTypeError": _NO_VALUE,
    "converted to a scalar index": _NO_VALUE,
}

PERMUTATION = (
    "The permutation of ppermute is a list of pairs, (source, destination); "
    "lax.pshuffle takes a list of sources"
)
RESULT = (
    "xmap takes arrays, scalars, or pytrees of them as results, and out_axes name their dimensions. Let a function "
    "around the xmapped one return anything else"
)
