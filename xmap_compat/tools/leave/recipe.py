"""What a person writes by hand to replace an xmap: the mapped expression, and a line for each
collective.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from xmap_compat import _jax
from xmap_compat.core.collectives import COLLECTIVES
from xmap_compat.core.parameters import mentioned_names


def _parts_of(
    placements: Mapping[Any, Any], own: Mapping[Any, Any] | None
) -> dict[Any, tuple[Any, ...]]:
    """What executes each axis in plain JAX."""
    found = {name: tuple(p.mesh_axes) for name, p in placements.items()}
    return {
        name: (*across, f"{name}_local") if across else (name,) for name, across in found.items()
    } | {**(own or {})}


def recipe_of(declared: Any, placed: Any, parts: Mapping[Any, Any] | None = None) -> list[str]:
    """The recipe of a call: an expression that can be executed once the collectives are written as
    said.
    """
    options = [f"{declared.in_source!r}", f"{declared.out_source!r}"]
    options += [f"axis_sizes={declared.sizes!r}"] * bool(declared.sizes)
    options += [f"axis_resources={_resources(declared)}"] * bool(declared.resources)
    lines = [f"mapped({', '.join([declared.name, *options])})".replace("Ellipsis", "...")]
    return lines + (
        _collective_lines(placed.program.jaxpr, _parts_of(placed.placements, parts))
        if placed
        else []
    )


def _collective_lines(jaxpr: Any, parts: Mapping[Any, tuple[Any, ...]]) -> list[str]:
    """``train.py:41: psum over batch -> psum over ('dp', 'batch_local')`` for each collective."""
    found: dict[str, None] = {}
    for eqn, _ in _jax.walk(jaxpr):
        over = mentioned_names(eqn.params) if eqn.primitive.name in COLLECTIVES else ()
        after = tuple(part for name in over for part in parts.get(name, (name,)))
        if after != tuple(over):
            file, line, *_ = (*_jax.where_in_user_code(eqn).partition(" (")[0].split(":"), "?")
            name, before = eqn.primitive.name, ", ".join(map(str, over))
            found[
                f"{os.path.basename(file)}:{line}: {name} over {before} -> {name} over {after!r}"
            ] = None
    return list(found)


def _resources(declared: Any) -> str:
    def one(entries: Any) -> str:
        entries = (
            entries
            if isinstance(entries, tuple) and not hasattr(entries, "_fields")
            else (entries,)
        )
        texts = [f"SerialLoop({e.length})" if hasattr(e, "length") else repr(e) for e in entries]
        return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"

    return (
        "{"
        + ", ".join(f"{name!r}: {one(entries)}" for name, entries in declared.resources.items())
        + "}"
    )
