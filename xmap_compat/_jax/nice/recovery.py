"""A second try for calls that ``jax.jit`` refuses; none under the automatic checks of
``checkify``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core.primitives import jit_p

from xmap_compat._jax.positions import api_boundary

Recovery = Callable[[Exception, tuple[Any, ...], Mapping[str, Any]], tuple[Any, ...] | None]
Calling = Callable[[tuple[Any, ...]], contextlib.AbstractContextManager[None]]


def recovering(
    jitted: Any, recovery: Recovery, calling: Calling, checked: Callable[[str], Exception]
) -> Any:
    """The same jitted function, but a call that fails is made once more with other arguments.

    ``recovery(error, args, kwargs)`` returns them, or None where the error stands, or raises a
    clearer error. The context ``calling(args)`` is around the call.  ``checked(name)`` is the error
    under automatic checks.
    Calls whose program is known do not pass here: like JAX's own Python code, this is called where
    the compiled fast path of ``jax.jit`` misses.  ``lower``, ``trace`` and ``eval_shape`` stay
    JAX's own: put on the function itself they would be copied by ``jax.grad``, whose result has
    none.
    """
    _refuse_checks(checked)

    def recovered(missed):
        @api_boundary
        def cache_miss(*args, **kwargs):
            with calling(args):
                try:
                    return missed(*args, **kwargs)
                except Exception as error:
                    if (others := recovery(error, args, kwargs)) is None:
                        raise
                outs, _, *rest = missed(*others, **kwargs)
            return (outs, None, *rest)  # the fast path would be for the arguments that failed

        return cache_miss

    return _changed(jitted, recovered)


def _changed(jitted: Any, change: Callable[[Any], Any]) -> Any:
    state = jitted.__getstate__()
    kind: Any = type(jitted)
    changed = kind.__new__(kind)
    changed.__setstate__({**state, "cache_miss": change(state["cache_miss"])})
    changed.__dict__.update(vars(jitted))
    return changed


_changed(jax.jit(abs), lambda missed: missed)  # so that it fails here


_CHECK_BEFORE_CALL = (
    "Under jax.set_mesh, JAX (to 0.12) cannot carry the error of a checkify.check into a shard_map, which an xmapped "
    "function with mesh resources is. Enter the mesh by `with mesh:` in the place of jax.set_mesh, or call "
    "checkify.check after the xmapped function"
)


@functools.cache
def _refuse_checks(refused):
    """Let ``checkify`` raise ``refused(name)`` where its automatic checks meet a call that was made
    here.
    """
    try:
        from jax._src.checkify import error_checks  # takes 14 ms
    except ImportError:
        return  # only the message is lost
    from jax.experimental.checkify import automatic_checks

    original = error_checks[jit_p]

    @api_boundary
    def rule(*args, **params):
        frames = str(source_info_util.current().traceback).splitlines()  # innermost first
        caller = next((frame for frame in frames if not frame.startswith(jax.__path__[0])), "")
        if not caller.startswith(__file__):
            return original(*args, **params)
        if any(automatic_checks & x for x in args if isinstance(x, frozenset)):
            raise refused(params["name"])
        try:
            return original(*args, **params)
        except ValueError as error:
            if "context mesh" in str(error):
                error.add_note(_CHECK_BEFORE_CALL)
            raise

    error_checks[jit_p] = rule
