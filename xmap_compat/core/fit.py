"""Stage 1: whether specs fit the arguments and results of a call: their trees, ranks and sizes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat.core.errors import LEGACY, show, subject
from xmap_compat.core.specs import AxisName, AxisSpec, argument_path

_ROOTS = {"in_axes": "args", "out_axes": "result"}


def broadcast_specs(
    where: str, specs: Any, tree: Any, source: Any, root: str = ""
) -> list[AxisSpec]:
    """One spec per leaf of ``tree``, which the parsed ``specs`` are a prefix of.

    Args:
      root: what ``tree`` is, for messages; by default the tuple of all arguments, or the result.
    """
    try:
        return jax.tree.leaves(jax.tree.broadcast(specs, tree))
    except (ValueError, TypeError):
        mismatches = _mismatches(specs, tree, root or _ROOTS[where])
        raise _not_a_prefix(where, source, next(mismatches), tree) from None


def _mismatches(specs: Any, tree: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Where specs are no prefix of a tree: the path, and the structures of both there."""
    if isinstance(specs, AxisSpec):
        return
    inner_specs, structure = _children(specs)
    values, structure_of_tree = _children(tree)
    if structure != structure_of_tree:
        yield path, structure, structure_of_tree
        return
    for (key, spec), (_, value) in zip(inner_specs, values):
        yield from _mismatches(spec, value, argument_path(key, path))


def _children(node):
    """The children of a pytree node with their keys, and its structure without them."""
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)


def check_containers(where: str, specs: Sequence[AxisSpec], tree: Any, root: str) -> None:
    """Raise if a spec names dimensions of arrays in a container that holds their shape beside them
    (``BCOO``): the shape would be wrong without these dimensions.
    """
    for path, container, leaves in _jax.shaped_containers(tree):
        for spec in specs[leaves]:
            if spec.names:
                kind = type(container).__name__
                raise _container_with_shape(where, argument_path(path, root), kind, spec.source)


def check_argument(spec: AxisSpec, shape: Sequence[int], path: str, is_scalar: bool) -> None:
    """Raise unless an argument has the dimensions that its spec names or asserts."""
    if spec.needed_rank > len(shape):
        if is_scalar:
            raise _scalar_argument_mapped(spec.source, spec.needed_rank, path)
        if spec.rank is None:
            raise _argument_rank_too_small(spec.source, spec.needed_rank, path, shape)
    if spec.rank is not None and spec.rank != len(shape):
        raise _rank_differs(spec.source, spec.rank, path, shape, "in_axes")


def check_result(
    spec: AxisSpec, positional_shape: Sequence[int], path: str, sizes: Mapping[AxisName, int]
) -> None:
    """Raise unless a result has enough positional dimensions for its spec.

    Args:
      positional_shape: the shape of the function's result inside the body.
      sizes: axis sizes, to print the shape that the result would have.
    """
    ndim = len(positional_shape)
    named = len(spec.names)
    if spec.needed_rank > ndim + named:
        raise _output_rank_too_small(spec.source, spec.needed_rank - named, path, ndim)
    if spec.rank is not None and spec.rank != ndim + named:
        shape = list(positional_shape)
        for position, name in spec.names:
            shape.insert(position, sizes[name])
        raise _rank_differs(spec.source, spec.rank, path, shape, "out_axes")


def infer_sizes(
    specs: Sequence[AxisSpec],
    shapes: Sequence[Sequence[int]],
    paths: Sequence[str],
    axis_sizes: Mapping[AxisName, int],
) -> dict[AxisName, int]:
    """Infer axis sizes from ``axis_sizes`` and from the arguments; all must agree."""
    sizes = dict(axis_sizes)
    origins = dict.fromkeys(axis_sizes, "axis_sizes")
    for spec, shape, path in zip(specs, shapes, paths):
        for dim, name in spec.names:
            known = sizes.setdefault(name, shape[dim])
            origin = origins.setdefault(name, path)
            if known != shape[dim]:
                raise _size_conflict(name, known, origin, shape, spec.source, dim, path)
    return sizes


# ----------------------------------------------------------------------------- messages


def _not_a_prefix(where: str, specs: Any, mismatch: tuple[str, Any, Any], tree: Any) -> ValueError:
    place, asked, found = mismatch
    ours = (
        f"{subject(place)} has the structure {found}, but {where} has {asked} for it. Give both "
        f"the same structure, or one specification for all of it ({{}} for what is not mapped). "
        f"The {where} here: {show(specs)}"
    )
    hint = ""
    if where == "in_axes":
        hint = (
            " Note that xmap in_axes that are non-trivial pytrees should always be wrapped in a "
            "tuple representing the argument list."
        )
    legacy = (
        f"xmap {where} specification must be a tree prefix of the corresponding value, "
        f"got specification {show(specs)} for value tree {jax.tree.structure(tree)}.{hint}"
    )
    return ValueError(f"{ours}{LEGACY}{legacy}")


def _container_with_shape(where: str, path: str, kind: str, spec: Any) -> TypeError:
    advice = "Pass its arrays (data and indices of a BCOO) as arguments of their own"
    if where == "out_axes":
        advice = "Return its arrays (data and indices of a BCOO) as results of their own"
    return TypeError(
        f"{path} is a {kind}, which holds a shape beside its arrays, so {where} {show(spec)} "
        f"cannot name dimensions of it. {advice}, and make the {kind} from them"
    )


def _argument_rank_too_small(spec: Any, needed: int, path: str, shape: Sequence[int]) -> ValueError:
    shown = show(spec)
    ours = (
        f"{path} has shape {tuple(shape)}, but {shown} needs at least rank {needed}. "
        "Name fewer dimensions, or pass an array that has them"
    )
    legacy = (
        f"One of xmap arguments has an in_axes specification of {shown}, which implies that it has "
        f"at least {needed} dimensions, but the argument has rank {len(shape)}"
    )
    return ValueError(f"{ours}{LEGACY}{legacy}")


def _scalar_argument_mapped(spec: Any, needed: int, path: str) -> TypeError:
    return TypeError(
        f"{path} is a Python scalar, but {show(spec)} needs at least rank {needed}. "
        "Pass an array with a dimension for each name"
    )


def _output_rank_too_small(spec: Any, needed: int, path: str, ndim: int) -> ValueError:
    shown = show(spec)
    ours = (
        f"{subject(path)} has {ndim} dimensions without its named axes, but its out_axes "
        f"{shown} need at least {needed}. Put the named axes at lower positions"
    )
    legacy = (
        f"One of xmap outputs has an out_axes specification of {shown}, which requires the result "
        f"of the xmapped function to have at least {needed} positional dimensions, but it only has "
        f"{ndim}"
    )
    return ValueError(f"{ours}{LEGACY}{legacy}")


def _rank_differs(spec: Any, rank: int, path: str, shape: Sequence[int], where: str) -> ValueError:
    of = "argument"
    included = ""
    if where == "out_axes":
        of = "output"
        included = ", named axes included"
    shown = show(spec)
    shape = tuple(shape)
    ours = (
        f"{subject(path)} has shape {shape}{included}, but {shown} asserts rank {rank}. "
        "Name as many as there are, or end the list with `...`"
    )
    legacy = (
        f"xmap {of} has an {where} specification of {shown}, which asserts that it should be of "
        f"rank {rank}, but the {of} has rank {len(shape)} (and shape {shape})"
    )
    return ValueError(f"{ours}{LEGACY}{legacy}")


def _size_conflict(
    name: Hashable,
    known: int,
    origin: str,
    shape: Sequence[int],
    spec: Any,
    dim: int,
    path: str,
) -> ValueError:
    found = shape[dim]
    shape = tuple(shape)
    ours = (
        f"Axis `{name}` has size {known} in {origin}, but size {found} in {path}, "
        f"dimension {dim} of its shape {shape}. If these are different axes, give them different "
        "names. If they are one, pass arrays of one length"
    )
    legacy = (
        f"The size of axis {name} was previously inferred to be {known}, but found an argument of "
        f"shape {shape} with in_axes specification {show(spec)}. "
        f"Shape mismatch occurs in dimension {dim}: {found} != {known}"
    )
    return ValueError(f"{ours}{LEGACY}{legacy}")
