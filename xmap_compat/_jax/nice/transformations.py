"""Which of JAX's transformations made a function, and what of."""

from __future__ import annotations

import inspect
import os
import types
from typing import Any

import jax


def transformation_of(fun: Any) -> tuple[str, Any, dict[str, Any]] | None:
    """``('grad', f, {'argnums': 1})`` for ``jax.grad(f, argnums=1)``; None if a function is not made by ``jax``'s own.

    Read from what the function closes over.
    """
    held: dict[str, Any] = {}
    name = ""
    while isinstance(fun, types.FunctionType) and fun.__code__.co_filename.startswith(_OF_JAX):
        cells = dict(zip(fun.__code__.co_freevars, (c.cell_contents for c in fun.__closure__ or ())))
        maker = fun.__code__.co_qualname.split(".<locals>")[0]
        inner = next((cells[k] for k in ("fun", "f", "value_and_grad_f") if k in cells), None)
        if inner is None:
            return None
        if maker != "api_boundary":
            name, held = name or maker, {**cells, **held}
            if "fun" in cells or "f" in cells:
                return _options_given(name, inner, held)
        fun = inner
    return None


_OF_JAX = os.path.dirname(jax.__file__) + os.sep


def _options_given(name, inner, held):
    parameters = list(inspect.signature(getattr(jax, name, None) or _nothing).parameters.values())[1:]
    said = {p.name: held[p.name] for p in parameters if p.name in held and type(held[p.name]) is not object}
    given = {p.name: said[p.name] for p in parameters if p.name in said and said[p.name] != p.default}
    return (name, inner, given) if parameters else None


def _nothing() -> None:
    pass
