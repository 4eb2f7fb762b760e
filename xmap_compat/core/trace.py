"""Stage 3: the user's function, traced once, becomes a jaxpr over named axes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat.core import errors
from xmap_compat.core.placement import (
    Body,
    current_scope,
    enclosing_bodies,
    entered_body,
    known_inputs,
    sizes_in_scope,
)
from xmap_compat.core.restored import restored
from xmap_compat.core.specs import AxisName


@dataclasses.dataclass(frozen=True)
class NamedProgram:
    """A function over named axes as a value.

    Attributes:
      jaxpr: its collectives mention the user's axis names; its arrays have positional dimensions
        only.
      consts: the values that it closes over.
      out_tree: the structure of its results.
      out_types: shape and dtype of each result, named dimensions left out.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    out_tree: Any
    out_types: tuple[Any, ...]


def trace_program(
    fun: Callable[..., Any], types: Any, input_names: Sequence[frozenset[AxisName]], body: Body
) -> NamedProgram:
    """Trace ``fun`` on arguments with the named dimensions removed.

    Args:
      fun: called as ``fun(*args)``.
      types: the arguments as a tuple of pytrees of ``ShapeDtypeStruct``.
      input_names: the named axes of each leaf of the arguments.
      body: axis sizes and resources.
    """

    # It is unknown here which axes of the outer xmap the arguments of a nested one vary over.
    known = () if enclosing_bodies() else input_names

    @functools.wraps(fun)
    def with_known_inputs(*args):
        with known_inputs(jax.tree.leaves(args), known), _noting_errors():
            return fun(*args)

    closed, shapes = _trace(with_known_inputs, types, body)
    jaxpr, consts = _jax.open_jaxpr(closed)
    if not all(hasattr(aval, "shape") for aval in closed.out_avals):
        raise errors.token("A result")
    return NamedProgram(jaxpr, tuple(consts), jax.tree.structure(shapes), tuple(closed.out_avals))


def trace_flat(
    fun: Callable[..., Any], types: Sequence[Any], body: Body, in_our_shard_map: bool
) -> Any:
    """Trace a callable held by a custom rule as the body was traced; returns a closed jaxpr."""

    @functools.wraps(fun)
    def with_notes(*args):
        with _noting_errors():
            return fun(*args)

    return _trace(with_notes, types, body, in_our_shard_map)[0]


@contextlib.contextmanager
def _noting_errors() -> Iterator[None]:
    """Have an error say what it has to do with named axes."""
    try:
        yield
    except (IndexError, NotImplementedError, TypeError, ValueError) as error:
        _notes().add_note(error)
        raise


def _trace(fun, types, body, in_our_shard_map=False):
    axis_env = [*_new_mesh_axes(body), *body.sizes.items()]

    def trace():
        return jax.make_jaxpr(fun, axis_env=axis_env, return_shape=True)(*types)

    mesh_axes = getattr(body.scope.mesh, "axis_names", ())
    with _body_context(body), _unbound_names_in_words(sizes_in_scope, mesh_axes):
        try:
            return _jax.plainly(trace, in_our_shard_map)
        except (TypeError, ValueError) as error:
            if "returned a value of type" in str(error):
                errors.note_once(error, _notes().RESULT)
            raise


def call_without_axes(fun: Callable[[], Any], advice: str, in_our_shard_map: bool = False) -> Any:
    """The result of a function that traces a rule which may name no axis of the xmap.

    Args:
      advice: for the error about a name.
    """
    offers_nothing = Body({}, current_scope())
    with entered_body(offers_nothing), _unbound_names_in_words(dict, advice=advice):
        return _jax.plainly(fun, in_our_shard_map)


@contextlib.contextmanager
def _unbound_names_in_words(
    sizes: Callable[[], Mapping[AxisName, int]], mesh_axes: Sequence[Any] = (), advice: str = ""
) -> Iterator[None]:
    try:
        yield
    except NameError as error:
        if "unbound axis name" not in str(error) or "Named axes in scope" in str(error):
            raise
        # The error is changed in place, so that its traceback stays short and ends at the
        # user's line.
        error.args = errors.unbound_name(str(error), sizes(), mesh_axes, advice=advice).args
        raise error from None  # hides JAX's attempt to read the name as a position


def _notes() -> Any:
    return importlib.import_module("xmap_compat.core.notes")


def _new_mesh_axes(body):
    """Mesh axes for nested xmaps, unless an enclosing body has bound them already."""
    if any(outer.mesh_axes for outer in enclosing_bodies()):
        return []
    return body.mesh_axes.items()


@contextlib.contextmanager
def _body_context(body: Body) -> Iterator[None]:
    """The context for tracing a body: this thread knows its axes, and JAX has the removed
    vocabulary again.
    """
    with entered_body(body), restored(), _by_our_rules(True):
        yield


# Part of jit's cache key: programs that JAX's own rules made of a jitted function outside must not
# be used inside.
_by_our_rules = jax.make_user_context(default_value=False)
