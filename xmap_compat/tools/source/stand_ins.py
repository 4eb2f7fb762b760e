"""What stands for the helpers of a written module, and for the xmaps inside of it, where it is compared with a plan."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xmap_compat import braces as named_einsum
from xmap_compat import lax as named_lax


def nested_xmaps(calls: Sequence[tuple[Any, Any, Any]]) -> dict[str, Any]:
    """What stands for the xmaps inside a module."""
    xmap = sys.modules["xmap_compat.api"].xmap  # which made the plan
    stand_in = lambda given, results, places: lambda f: xmap(f, given, results, axis_resources=places)  # noqa: E731
    return {f"nested_xmap_{k}": stand_in(*call) for k, call in enumerate(calls, 1)}


def _einsum_over(subscripts, *operands, local=types.MappingProxyType({}), across=(), **options):
    inputs, output = subscripts.split("->")
    terms = []
    for k, term in enumerate(inputs.split(",")):
        named = [*(across if not k else ()), *(name for letter, name in local.items() if letter in term)]
        letters = "".join(letter for letter in term if letter not in local)
        terms.append(letters + (f"{{{','.join(named)}}}" if named else ""))
    return named_einsum.einsum(f"{','.join(terms)}->{output}", *operands, **options)


# What each helper of a written program stands for.
STAND_INS: dict[str, Callable[..., Any]] = {
    "pdot": named_lax.pdot,
    "pdot_inside": named_lax.pdot,
    "einsum_over": _einsum_over,
    "einsum_inside": _einsum_over,
    "all_gather": lax.all_gather,
    "ppermute": lax.ppermute,
    "pshuffle": lax.pshuffle,
    "pbroadcast": lax.pbroadcast,
    "psum_scatter": lax.psum_scatter,
    "all_to_all": lax.all_to_all,
    "pswapaxes": lax.pswapaxes,
    "pgather": named_lax.pgather,
    "pargmax": named_lax.pargmax,
    "pargmin": named_lax.pargmin,
    "max_over": lambda x, axes: _extremum(lax.pmax, jnp.max, x, axes),
    "min_over": lambda x, axes: _extremum(lax.pmin, jnp.min, x, axes),
    "logsumexp_over": lambda x, axes: jax.scipy.special.logsumexp(x, axes),
    "softmax_over": lambda x, axes: jax.nn.softmax(x, axes),
    "log_softmax_over": lambda x, axes: jax.nn.log_softmax(x, axes),
    # What cotangents of a function that is differentiated from outside are is no matter of its program.
    "backward_over": lambda rule, axes, **options: rule,
    "varying_over": lambda function, *args: function,
}


def _extremum(over_names, over_all, x, axes):
    positional = any(isinstance(a, int) for a in (axes if isinstance(axes, tuple) else (axes,)))
    return over_all(x, axes) if positional else over_names(x, axes)
