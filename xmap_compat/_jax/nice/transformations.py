"""Which of JAX's transformations made a function, and from which function."""

from __future__ import annotations

import inspect
import os
import types
from typing import Any

import jax


def transformation_of(fun: Any) -> tuple[str, Any, dict[str, Any]] | None:
    """``('grad', f, {'argnums': 1})`` for ``jax.grad(f, argnums=1)``; None if no transformation of ``jax`` made it.

    Read from what the function and those of JAX that it calls close over, under the names of public parameters.
    """
    inner = inspect.unwrap(fun, stop=lambda f: not _is_of_jax(f))
    if inner is fun or not _is_of_jax(fun):
        return None
    held: dict[str, Any] = {}
    makers = [_maker(f) for f in _called_by(fun, held) if hasattr(jax, _maker(f))]
    if not makers:
        return None
    parameters = list(inspect.signature(getattr(jax, makers[0])).parameters.values())[1:]
    said = {p.name: held[p.name] for p in parameters if p.name in held and type(held[p.name]) is not object}
    return makers[0], inner, {p.name: said[p.name] for p in parameters if p.name in said and said[p.name] != p.default}


_OF_JAX = os.path.dirname(jax.__file__) + os.sep


def _is_of_jax(fun):
    return isinstance(fun, types.FunctionType) and fun.__code__.co_filename.startswith(_OF_JAX)


def _maker(fun):
    return fun.__code__.co_qualname.split(".<locals>")[0]


def _called_by(fun, held):
    """A function of JAX and those that it closes over, outermost first; and everything else that these hold."""
    cells = dict(zip(fun.__code__.co_freevars, (c.cell_contents for c in fun.__closure__ or ())))
    held.update((name, value) for name, value in cells.items() if name not in held)
    yield fun
    for value in cells.values():
        if _is_of_jax(value):
            yield from _called_by(value, held)


if transformation_of(jax.grad(jax.numpy.sin, (0,))) != ("grad", jax.numpy.sin, {"argnums": (0,)}):
    raise ImportError("the functions that jax.grad makes close over other variables")
