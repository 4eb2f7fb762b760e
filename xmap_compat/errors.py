"""Messages of the functions that users call, beside those that stand below what raises them.

Every function returns an exception for the caller to raise; the core's messages are in
``core/errors.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from xmap_compat.core.errors import LEGACY, as_set, axes_text, did_you_mean, quoted


def name_of(fun: Callable[..., Any]) -> str:
    """A name for messages: that of the function, or of the function that a partial wraps."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


def described(value: Any) -> str:
    if hasattr(value, "dtype") and not isinstance(value, type):
        return f"an array of dtype {value.dtype}"
    return f"{value!r} of type {type(value).__name__}"


def missing_specs(names: Sequence[str]) -> TypeError:
    return TypeError(
        f"xmap() is missing {' and '.join(names)}, which name the dimensions of arguments and "
        "results. Write xmap(fun, ['batch', ...], ['batch', ...]), or, as a decorator, "
        "@xmap(in_axes=['batch', ...], out_axes=['batch', ...])"
    )


def keyword_arguments(names: Iterable[str]) -> TypeError:
    return TypeError(
        "xmapped functions take positional arguments only, but got the keyword arguments: "
        f"{', '.join(names)}. Pass them by position, or bind them with functools.partial before "
        "xmap"
    )


def unknown_keywords(names: Iterable[str]) -> TypeError:
    known = ["in_axes", "out_axes", "axis_sizes", "axis_resources", "donate_argnums", "backend"]
    if "mesh" in names:
        advice = ". Enter the mesh around the call: `with mesh:`"
    elif "static_arg" in "".join(names):
        advice = ". Bind static values with functools.partial before xmap"
    else:
        advice = did_you_mean(names, known) or f". It takes {', '.join(known)}"
    return TypeError(f"xmap() got an unexpected keyword argument: {quoted(names)}{advice}")


def names_missing_from_inputs(names: Sequence[Hashable], known: Iterable[Hashable]) -> ValueError:
    advice = (
        did_you_mean(names, known) or ". Give an axis that no argument has its size in axis_sizes"
    )
    return ValueError(
        f"out_axes name {quoted(names)}, which neither in_axes nor axis_sizes do{advice}"
        f"{LEGACY}All axis names appearing in out_axes must also appear in in_axes or axis_sizes, "
        f"but the following are missing: {as_set(names)}"
    )


def extremum_of_nothing(fun: str, axis: Any) -> ValueError:
    return ValueError(
        f"{fun} got the axis {axis!r} of size 0 (a zero-size array). Leave {fun} out where it is "
        "empty"
    )


def no_devices(caller: str, mesh: Any) -> ValueError:
    return ValueError(
        f"{caller} is to run on the mesh ({axes_text(mesh.shape)}), which is abstract: it has no "
        "devices. Run it inside `with Mesh(devices, names):`. Without devices you can plan, "
        "search, trace, eval_shape and lower"
    )


def unknown_backend(backend: str, known: Iterable[str]) -> RuntimeError:
    return RuntimeError(
        f"xmap backend {backend!r} is not available. Use {' or '.join(known)}, or leave it out"
    )


def lost_axis(fun: str, axis: Hashable, size: int, shape: Sequence[int]) -> ValueError:
    return ValueError(
        f"{fun} was applied along the named axis `{axis}` of size {size} with keep=True, but "
        f"returned an array of shape {tuple(shape)}: its first dimension should be that axis. Use "
        "keep=False if it reduces the axis"
    )
