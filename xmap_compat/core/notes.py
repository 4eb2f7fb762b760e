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
from xmap_compat.core.specs import argument_path


def add_note(error: Exception) -> None:
    """Add a note that explains an error raised while the user's function is traced, if a note
    applies.
    """
    # The user's error must be the one that shows.
    with contextlib.suppress(Exception):
        note = _note_for(error)
        if note:
            errors.note_once(error, note)


def add_note_on_captured(error: Exception, declared: Any, args: tuple[Any, ...]) -> None:
    """Name the captured arrays whose types let JAX infer shardings in a body, if it could not."""
    with contextlib.suppress(Exception):
        captured = []
        for variable, *path in _jax.paths_of_explicit_arrays(_jax.held_by(declared.fun)):
            captured.append(argument_path(path, variable.key))
        is_about_sharding = "Sharding" in type(error).__name__
        mentions_sharding = re.search("shard|mesh|replicated", str(error))
        if (captured and mentions_sharding) or (
            is_about_sharding and not _jax.paths_of_explicit_arrays({"args": args})
        ):
            errors.note_once(
                error,
                f"{declared.name} captures {' and '.join(captured) or 'an array'}, whose type is "
                "sharded over a mesh with Explicit axes. Pass it to the xmapped function as an "
                "argument, with {} in in_axes",
            )


# Words in errors of JAX and NumPy when a program counts named dimensions, or asks for their sizes.
_OF_DIMENSIONS = re.compile(
    r"shape|dimension|ndim|rank|ax[ei]s|unsized|0-d|subscript|string indexing|out of bounds"
    "|permutation"
)


def _note_for(error: Exception) -> str | None:
    frames, below = _jax.user_frames_of(error)
    text = str(error)
    called = [frame.f_code.co_name.strip("_") for frame in below]
    integer = _integer_axis(below)
    if integer is not None:
        return integer_name(integer)
    named = _axis_given_by_name(below)
    if named and named not in TAKE_NAMES:
        return _named_function_note(named)
    for words, note in _OF_TRACING.items():
        if words in f"{type(error)} {text}":
            return note
    if "'int' object is not iterable" in text and "ppermute" in called:
        return PERMUTATION
    if not _is_of_dimensions(error):
        return None
    operation = "" if called else "shape"
    for function in called:
        if function in _OPERATIONS:
            operation = function
            break
    # The names of inner functions' arguments are unknown: then the note shows the values passed to
    # these functions.
    for frame, line in frames:
        mapped = _mapped_variables(frame, line)
        if mapped:
            return _positional_note(mapped, operation)
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

# Functions of JAX that take axis names in the body of an xmapped function, and their modules.
_TAKE_NAMES = {
    "jnp.": """amax amin count_nonzero max mean min minmax nanmean nanstd nansum nanvar ptp std sum
        var""",
    "jax.nn.": "log_softmax logmeanexp logsumexp one_hot softmax standardize",
    "jnp.linalg.": "vector_norm",
}
TAKE_NAMES: dict[str, str] = {}
for _module, _functions in _TAKE_NAMES.items():
    TAKE_NAMES.update(dict.fromkeys(_functions.split(), _module))

# The functions of xmap_compat.numpy with the same names as those of jax.numpy, which take no axis
# names.
_NAMED = """all any argmax argmin argsort average cumprod cumsum flip median nanmax nanmin norm prod
    quantile roll sort take"""
NAMED_FUNCTIONS = frozenset(_NAMED.split())

_MATMUL = ("operator_matmul", "operator_rmatmul")
_PRODUCTS = frozenset(
    (
        *[
            "dot",
            "dot_general",
            "einsum",
            "inner",
            "matmul",
            "matvec",
            "tensordot",
            "vdot",
            "vecdot",
        ],
        *_MATMUL,
    )
)
_OPERATIONS = {*["getitem", "iter", "len"], *_MATMUL}
_OPERATIONS.update(vars(jnp), vars(jnp.linalg), vars(jax.nn), vars(jax.lax))
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
    sentences = []
    named = {}
    for variable, (shape, sizes) in values.items():
        positional = "no positional dimensions"
        if shape:
            positional = f"the positional shape {tuple(shape)}"
        sentences.append(
            f"`{variable}` has {positional} here; its named axes are {{{errors.axes_text(sizes)}}}."
        )
        named[variable] = [name for name in sizes if isinstance(name, str)]
    advice = _by_name(operation, named)
    if advice:
        sentences.append(advice)
    return " ".join(sentences)


def _by_name(operation: str, named: Mapping[str, Sequence[str]]) -> str:
    """How to write an operation over positional dimensions over its operands' named axes; empty if
    that is unknown.
    """
    (variable, names), *others = named.items()
    if operation == "getitem":
        operation = "take"
    if not names:
        return ""
    name = names[0]
    if operation in _PRODUCTS:
        products = []
        for second, its_names in others[:1]:
            for shared in names:
                if shared in its_names:
                    product = f"pdot({variable}, {second}, {shared!r})"
                    products.append(f"The sum of products over `{shared}` is {product}")
        return "; ".join(products) or (
            f"The sum of products over an axis of both operands is pdot(x, y, {name!r})"
        )
    if operation in TAKE_NAMES or operation in NAMED_FUNCTIONS:
        function = TAKE_NAMES.get(operation, "xmap_compat.numpy.") + operation
        more = _OTHER_ARGUMENTS.get(operation, "")
        return f"Along a named axis it is {function}({variable}{more}, axis={name!r})"
    if operation == "iter":
        return f"The function computes one element of `{name}`: it needs no loop over them"
    if operation in ("len", "shape"):
        return f"The size of a named axis is lax.axis_size({name!r})"
    return ""


def _named_function_note(fun: str) -> str:
    if fun in NAMED_FUNCTIONS:
        return f"{fun} takes no axis names here; xmap_compat.numpy.{fun} does"
    return (
        f"{fun} takes no axis names. xmap_compat.numpy.along(fun, 'i', x) calls fun with an array "
        f"that has the named axis 'i' of x as its dimension 0: use {fun} there, with axis=0"
    )


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
