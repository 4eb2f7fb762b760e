"""Messages of plans and of the search."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from xmap_compat.core.errors import as_set, did_you_mean


def search_without_mesh() -> ValueError:
    return ValueError(
        "search needs a mesh to assign axes to. Pass mesh=Mesh(devices, names), or search "
        "inside `with Mesh(devices, names):`"
    )


def no_maker(name: str, count: int) -> TypeError:
    return TypeError(
        f"search got {name}, which cannot be called with axis_resources alone: it looks like the step itself. Pass an "
        f"xmapped function, or a function that makes the step: lambda axis_resources: <the step of {count} arguments>"
    )


def unknown_fixed_axes(unknown: Sequence[Hashable], known: Sequence[Hashable]) -> ValueError:
    return ValueError(
        f"search: fixed has resources for axes {as_set(unknown)}, but the xmapped functions of the step have the axes "
        f"{as_set(known)}. Name only these in fixed{did_you_mean(unknown, known)}"
    )


def ignored_resources(names: Sequence[Hashable]) -> ValueError:
    return ValueError(
        f"the step that make(axis_resources) returned gave other resources to the axes {as_set(names)}. Let it pass "
        "axis_resources on to xmap, or pin the axis by fixed="
    )


def no_xmapped_call() -> ValueError:
    return ValueError(
        "search found no call of an xmapped function in the step, so there are no named axes to assign. Let "
        "make(axis_resources) return a function that calls xmap(..., axis_resources=axis_resources)"
    )


def too_many_candidates(choices: Mapping[Any, int], most: int, proposed: Any) -> ValueError:
    each = ", ".join(f"{n} for {name}" for name, n in choices.items())
    return ValueError(
        f"There are {math.prod(choices.values())} assignments ({each}), more than the {most} that search plans. Fix an "
        f"axis: fixed={{{proposed!r}: ()}}, whose resources change the bytes sent least; or give it some there"
    )


def too_much_memory(which: str, needed: str, given: str) -> ValueError:
    return ValueError(f"{which} {needed}, more than memory, {given}")
