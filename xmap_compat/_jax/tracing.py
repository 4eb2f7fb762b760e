"""How bodies are traced, and where a tracer comes from."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import jax
from jax._src import config
from jax._src.interpreters import ad as private_ad
from jax._src.interpreters import batching as private_batching
from jax.extend import core as jex_core
from jax.interpreters import ad, partial_eval


@contextlib.contextmanager
def plain_context() -> Iterator[None]:
    """Trace as at top level: no manual or explicit mesh in types, no varying-axes checks.

    A named program must not depend on where it will run; a custom rule of the user is
    traced late, from within a typed ``shard_map``, and must not see that.
    """
    current = jax.sharding.get_abstract_mesh()
    empty = jax.sharding.AbstractMesh((), ())
    mesh = current if not current.empty and current.are_all_axes_auto else empty
    with jax.sharding.use_abstract_mesh(mesh), config._check_vma(False):
        yield


def current_trace() -> Any:
    """What stands for the trace that primitives are bound in now: the same trace has an equal one."""
    return jex_core.get_opaque_trace_state()


def bound_axis_names() -> tuple[Hashable, ...]:
    """Names that collectives can see here: outer vmaps, shard_maps and xmaps."""
    return tuple(jex_core.unsafe_get_axis_names_DO_NOT_USE())


def tracer_origin(x: Any) -> tuple[str, Any]:
    """Where a value seen inside a body comes from, one step back.

    Returns:
      ``('constant', None)``; ``('same', value)`` for a wrapper of another transformation around ``value``;
      ``('equation', (equation, index of the result, operands))``; ``('closure', value)``; ``('input', (trace,
      index))`` for an argument of a function that is being traced.
    """
    if not isinstance(x, jax.core.Tracer):
        return "constant", None
    if isinstance(x, (ad.JVPTracer, private_ad.LinearizeTracer)):
        return "same", x.primal
    if isinstance(x, private_batching.BatchTracer):
        return "same", x.val
    if isinstance(x, partial_eval.DynamicJaxprTracer):
        if isinstance(x.val, jex_core.Literal):
            return "constant", None
        if x.parent is not None:
            return "equation", (x.parent, x.parent.outvars.index(x.val), x.parent.in_tracers)
        frame = x._trace.frame
        if x.val in frame.constvar_to_val:
            return "closure", frame.constvar_to_val[x.val]
        return "input", (x._trace, frame.invars.index(x.val))
    return "unknown", None


def frame_of(x: Any) -> Any:
    """The trace that a tracer of a body's inputs belongs to: an identity to compare with ``is``."""
    return getattr(x, "_trace", None)


TRACER_TYPE = jax.core.Tracer
ARRAY_TYPE = jax.core.ShapedArray
