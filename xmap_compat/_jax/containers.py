"""What Python objects hold: the variables of a function, and containers that have a shape of their
own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np


def held_by(fun: Any) -> dict[str, Any]:
    """What a function captures, by the names that the user gave it."""
    held: dict[str, Any] = {}
    while isinstance(fun, functools.partial):
        held |= {
            **fun.keywords,
            **{f"args[{k}] of functools.partial": arg for k, arg in enumerate(fun.args)},
        }
        fun = fun.func
    seen, own = (
        inspect.getclosurevars(inspect.unwrap(fun)),
        getattr(getattr(fun, "__self__", None), "__dict__", {}),
    )
    return {
        **held,
        **seen.globals,
        **seen.nonlocals,
        **{f"self.{key}": value for key, value in own.items()},
    }


def explicit_arrays(values: dict[str, Any]) -> list[Any]:
    """The paths of arrays over a mesh with Explicit axes."""
    is_explicit = lambda x: jax.sharding.AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types  # noqa: E731
    return [
        p
        for p, x in jax.tree_util.tree_leaves_with_path(values)
        if isinstance(x, jax.Array) and is_explicit(x)
    ]


def shaped_containers(tree: Any) -> Iterator[tuple[Any, Any, slice]]:
    """Containers whose ``shape`` does not follow from their arrays (``BCOO``): path, container, and
    which leaves.
    """
    is_like_an_array, end = lambda x: hasattr(x, "shape") and hasattr(x, "dtype"), 0
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_like_an_array):
        leaves, treedef = jax.tree.flatten(node)
        start, end = end, end + len(leaves)
        larger = [
            jax.ShapeDtypeStruct((1, *np.shape(x)), getattr(x, "dtype", np.float32)) for x in leaves
        ]
        if hasattr(node, "shape") and jax.tree.unflatten(treedef, larger).shape == node.shape:
            yield path, node, slice(start, end)
