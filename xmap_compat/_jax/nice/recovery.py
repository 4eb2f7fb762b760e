"""A second try for calls that ``jax.jit`` refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from xmap_compat._jax.positions import api_boundary

Recovery = Callable[[Exception, tuple[Any, ...], Mapping[str, Any]], tuple[Any, ...] | None]
Calling = Callable[[tuple[Any, ...]], contextlib.AbstractContextManager[None]]


def recovering(jitted: Any, recovery: Recovery, calling: Calling) -> Any:
    """The same jitted function, but a call that fails is made once more with other arguments.

    ``recovery(error, args, kwargs)`` returns them, or None where the error stands, or raises a clearer error.
    The context ``calling(args)`` is around the call.
    Calls whose program is known do not pass here: like JAX's own Python code, this is called where the compiled
    fast path of ``jax.jit`` misses.  ``lower``, ``trace`` and ``eval_shape`` stay JAX's own: put on the function itself
    they would be copied by ``jax.grad``, whose result has none.
    """
    state = jitted.__getstate__()
    missed = state["cache_miss"]

    @api_boundary
    def cache_miss(*args, **kwargs):
        with calling(args):
            try:
                return missed(*args, **kwargs)
            except Exception as error:
                others = recovery(error, args, kwargs)
                if others is None:
                    raise
            outs, _, *rest = missed(*others, **kwargs)
        return (outs, None, *rest)  # the fast path would be for the arguments that failed

    kind: Any = type(jitted)
    made = kind.__new__(kind)
    made.__setstate__({**state, "cache_miss": cache_miss})
    made.__dict__.update(vars(jitted))
    return made


recovering(jax.jit(abs), lambda *_: None, lambda _: contextlib.nullcontext())  # so that it fails here
