"""Stage 1: whether specs fit the arguments and results of a call: their trees, ranks and sizes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from xmap_compat import _jax
from xmap_compat.core.errors import LEGACY, show, subject
from xmap_compat.core.specs import (
    AxisName,
    AxisSpec,
    argument_path,
    is_spec,
    parse_specs,
    spec_names,
)

_ROOTS = {"in_axes": "args", "out_axes": "result"}


def broadcast_specs(
    where: str, specs: Any, tree: Any, source: Any, root: str = ""
) -> list[AxisSpec]:
    """One spec per leaf of ``tree``, which the parsed ``specs`` are a prefix of.

    Args:
      root: what ``tree`` is, for messages; by default the tuple of all arguments, or the result.
    """
    if tree is None and where == "out_axes" and spec_names(specs):
        raise _not_a_prefix(where, source, _Mismatch("result", "names", "None"), tree)
    try:
        return jax.tree.leaves(jax.tree.broadcast(specs, tree))
    except (ValueError, TypeError):
        path = root or _ROOTS[where]
        mismatch = _first_mismatch(specs, tree, path)
        if mismatch is None:
            mismatch = _Mismatch(path, show(source), str(jax.tree.structure(tree)))
        raise _not_a_prefix(where, source, mismatch, tree, is_of_xmap=not root) from None


def _is_prefix(specs: Any, tree: Any) -> bool:
    try:
        jax.tree.broadcast(specs, tree)
    except (ValueError, TypeError):
        return False
    return True


class _Mismatch(NamedTuple):
    """The first place where specs are no prefix of a tree.

    Attributes:
      place: the path of the value there.
      asked, found: what the spec and the value are there, in words.
      missing: keys of a dictionary, or positions of a tuple, that the spec lacks.
      extra: those that the value lacks.
    """

    place: str
    asked: str
    found: str
    missing: Sequence[Any] = ()
    extra: Sequence[Any] = ()

    @property
    def has_keys(self) -> bool:
        return self.asked.startswith("a dict") and self.found.startswith("a dict")


def _first_mismatch(specs: Any, tree: Any, path: str) -> _Mismatch | None:
    if isinstance(specs, AxisSpec):
        return None
    inner_specs, structure = _children(specs)
    values, structure_of_tree = _children(tree)
    if structure != structure_of_tree:
        asked = _keys(specs)
        found = _keys(tree)
        missing = [key for key in found if key not in asked]
        extra = [key for key in asked if key not in found]
        return _Mismatch(path, _describe_node(specs), _describe_node(tree), missing, extra)
    for (key, spec), (_, value) in zip(inner_specs, values):
        below = _first_mismatch(spec, value, argument_path(key, path))
        if below is not None:
            return below
    return None


def _keys(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node)
    if type(node) is tuple:
        return list(range(len(node)))
    return []


def _children(node):
    """The children of a pytree node with their keys, and its structure without them."""
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)


def _describe_node(node):
    is_empty = isinstance(node, (tuple, list, dict)) and not node
    if node is None or is_empty:
        return repr(node)
    if jax.tree_util.all_leaves([node]):
        is_python_scalar = getattr(node, "shape", ()) == () and getattr(node, "weak_type", True)
        return "a Python scalar" if is_python_scalar else "an array"
    kind = type(node).__name__
    if isinstance(node, dict):
        return f"a {kind} with the keys {_listed(list(node))}"
    if type(node) in (tuple, list):
        return f"a {kind} of length {len(node)}"
    if isinstance(node, (tuple, list)):
        return f"the class {kind} of length {len(node)}"
    return f"the class {kind}"


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
                is_for_all = len(specs) > 1 and all(other is spec for other in specs)
                raise _size_conflict(name, known, origin, shape, spec.source, dim, path, is_for_all)
    return sizes


# ----------------------------------------------------------------------------- messages

_FEWER = "Name fewer dimensions, or pass an array that has them"


def _not_a_prefix(
    where: str, specs: Any, mismatch: _Mismatch, tree: Any, is_of_xmap: bool = True
) -> Exception:
    written = f". The {where} here: {show(specs)}"
    if is_of_xmap:
        written += _legacy_not_a_prefix(where, specs, tree)
    if mismatch.has_keys:
        return _other_keys(where, mismatch, written)
    if (mismatch.found, mismatch.place) == ("None", "result"):
        return _names_of_nothing(written)
    return _other_structure(where, mismatch, written)


def _names_of_nothing(written: str) -> ValueError:
    return ValueError(
        f"The function returned None (is a `return` missing?), but out_axes have names{written}"
    )


def _other_structure(where: str, mismatch: _Mismatch, written: str) -> ValueError:
    place, asked, found, missing, _ = mismatch
    advice = "Give both the same structure, or one specification for all of it"
    if asked == "None":
        advice = "Write {} for what is not mapped"
    elif where == "in_axes" and place == "args":
        advice = "Write in_axes as a tuple, with an entry for each argument"
        if asked.startswith("a tuple"):
            advice = "Call it with as many arguments as in_axes has entries"
        if asked.startswith("a tuple") and missing:
            advice += ", or add an entry to in_axes (`{}` for one without names)"
    return ValueError(
        f"{subject(place)} is {found}, but {where} has {asked} for it. {advice}{written}"
    )


def _other_keys(where: str, mismatch: _Mismatch, written: str) -> ValueError:
    place = mismatch.place
    path = where + place.removeprefix("args").removeprefix("result").removeprefix("local")
    differences = []
    if mismatch.missing:
        entries = ", ".join(f"{key!r}: [...] or {{}}" for key in mismatch.missing)
        differences.append(f"{path} lacks {_listed(mismatch.missing)}: add {entries}")
    if mismatch.extra:
        keys = _listed(mismatch.extra)
        differences.append(f"{place} lacks {keys}: remove {keys} from {path}")
    return ValueError(
        f"The keys of {path} are not those of {place}. {'. '.join(differences)}{written}"
    )


def _listed(keys: Sequence[Any]) -> str:
    return ", ".join(map(repr, keys))


def _legacy_not_a_prefix(where: str, specs: Any, tree: Any) -> str:
    hint = ""
    if where == "in_axes":
        if isinstance(specs, list) and not is_spec(specs):
            specs = tuple(specs)
        hint = (
            " Note that xmap in_axes that are non-trivial pytrees should always be wrapped in a "
            "tuple representing the argument list."
        )
        if len(tree) == 1 and _is_prefix((parse_specs(where, specs),), tree):
            hint += (
                " In particular, you're passing in a single argument which means that xmap in_axes "
                "might need to be wrapped in a singleton tuple."
            )
    return (
        f"{LEGACY}xmap {where} specification must be a tree prefix of the corresponding value, "
        f"got specification {show(specs)} for value tree {jax.tree.structure(tree)}.{hint}"
    )


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
        f"{path} has shape {tuple(shape)}, but {shown} needs at least {_dimensions(needed)}. "
        f"{_FEWER}"
    )
    legacy = (
        f"One of xmap arguments has an in_axes specification of {shown}, which implies that it has "
        f"at least {needed} dimensions, but the argument has rank {len(shape)}"
    )
    return ValueError(f"{ours}{LEGACY}{legacy}")


def _scalar_argument_mapped(spec: Any, needed: int, path: str) -> TypeError:
    is_in_a_list = path.count("[") > 1
    hint = " (a list of numbers is a pytree of scalars)" if is_in_a_list else ""
    return TypeError(
        f"{path} is a Python scalar, but {show(spec)} needs at least {_dimensions(needed)}. "
        f"Pass an array with a dimension for each name{hint}"
    )


def _output_rank_too_small(spec: Any, needed: int, path: str, ndim: int) -> ValueError:
    shown = show(spec)
    ours = (
        f"{subject(path)} has {_dimensions(ndim)} without its named axes, but its out_axes "
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
        f"{subject(path)} has shape {shape}{included}, but {shown} names exactly "
        f"{_exactly(spec, rank, len(shape))}"
    )
    legacy = (
        f"xmap {of} has an {where} specification of {shown}, which asserts that it should be of "
        f"rank {rank}, but the {of} has rank {len(shape)} (and shape {shape})"
    )
    return ValueError(f"{ours}{LEGACY}{legacy}")


def _dimensions(count: int) -> str:
    return "one dimension" if count == 1 else f"{count} dimensions"


def _exactly(spec: Any, rank: int, found: int) -> str:
    """Say what a list without an ellipsis requires, and what to do."""
    advice = _FEWER
    if found > rank:
        other = "the other" if found == rank + 1 else "the others"
        advice = f"Write {show([*spec, ...])} or name {other}"
    return f"{_dimensions(rank)}. {advice}"


def _size_conflict(
    name: Hashable,
    known: int,
    origin: str,
    shape: Sequence[int],
    spec: Any,
    dim: int,
    path: str,
    is_for_all: bool,
) -> ValueError:
    advice = (
        "If these are different axes, give them different names. "
        "If they are one, pass arrays of one length"
    )
    if is_for_all:
        advice = (
            "One in_axes is for all arguments. "
            "To tell them apart, write a tuple, with {} for what is not mapped"
        )
    found = shape[dim]
    shape = tuple(shape)
    ours = (
        f"Axis `{name}` has size {known} in {origin}, but size {found} in {path}, "
        f"dimension {dim} of its shape {shape}. {advice}"
    )
    legacy = (
        f"The size of axis {name} was previously inferred to be {known}, but found an argument of "
        f"shape {shape} with in_axes specification {show(spec)}. "
        f"Shape mismatch occurs in dimension {dim}: {found} != {known}"
    )
    return ValueError(f"{ours}{LEGACY}{legacy}")
