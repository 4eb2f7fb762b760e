"""Stage 1: the user's ``in_axes`` and ``out_axes`` become one ``AxisSpec`` per array.

Later stages never see the user's syntax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xmap_compat import _jax
from xmap_compat.core import errors

AxisName = Hashable
AxisNames = Sequence[AxisName]


@dataclasses.dataclass(frozen=True)
class AxisSpec:
    """Which positional dimensions of one array are named.

    Attributes:
      names: ``(position, axis name)`` pairs in the order of the positions.
      rank: the rank that the user asserted (a list without a final ellipsis), or None.
      source: what the user wrote, for messages.
    """

    names: tuple[tuple[int, AxisName], ...]
    rank: int | None
    source: Any = dataclasses.field(compare=False, hash=False)

    @property
    def needed_rank(self) -> int:
        """The smallest rank of an array that has every named dimension."""
        return 1 + max((position for position, _ in self.names), default=-1)

    def name_at(self) -> dict[int, AxisName]:
        return dict(self.names)

    def position_of(self) -> dict[AxisName, int]:
        return {name: position for position, name in self.names}


def parse_specs(where: str, tree: Any) -> Any:
    """Replace every specification in a pytree prefix by an ``AxisSpec``.

    Args:
      where: ``'in_axes'`` or ``'out_axes'``, for messages.
      tree: what the user wrote.

    Raises:
      TypeError, ValueError: a malformed specification.
    """
    if isinstance(tree, tuple) and not tree:
        return ()  # there are no arguments; below the whole, ``()`` is a scalar, like ``[]``
    if where == "in_axes" and isinstance(tree, dict) and not is_spec(tree):
        # The arguments are a tuple: a dictionary can only be one specification for all of them.
        for position, name in tree.items():
            if isinstance(position, int) and isinstance(name, tuple):
                raise errors.bad_axis_name(where, name, where, tree)
    try:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_spec)
    except ValueError:
        # JAX sorts the keys of dictionaries, and these cannot be compared.
        raise errors.bad_spec(where, tree, where) from None
    specs = [_parse_spec(where, leaf, argument_path(path, where)) for path, leaf in leaves]
    return jax.tree.unflatten(treedef, specs)


def spec_names(specs: Any) -> list[AxisName]:
    """The axis names of parsed specs, each once, in the order of their appearance."""
    return list(dict.fromkeys(name for spec in jax.tree.leaves(specs) for _, name in spec.names))


def broadcast_specs(where: str, specs: Any, tree: Any, source: Any, root: str = "") -> list[AxisSpec]:
    """One spec per leaf of ``tree``, which the parsed ``specs`` are a prefix of.

    Args:
      root: what ``tree`` is, for messages; by default the tuple of all arguments, or the result.
    """

    flat: list[AxisSpec] = []

    def repeat(spec, subtree):
        flat.extend([spec] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map(repeat, specs, tree)
    except (ValueError, TypeError):
        path = root or ("args" if where == "in_axes" else "result")
        parting = _parting(specs, tree, path) or (path, errors.show(source), str(jax.tree.structure(tree)), ())
        raise errors.not_a_prefix(where, source, parting, is_of_xmap=not root) from None
    return flat


def _parting(specs: Any, tree: Any, path: str) -> tuple[str, str, str, Sequence[Any]] | None:
    """Where specs stop being a prefix of a tree, what the two have there, and keys that the specs lack."""
    if isinstance(specs, AxisSpec):
        return None
    (own, own_tree), (others, others_tree) = _children(specs), _children(tree)
    if own_tree != others_tree:
        is_dict = isinstance(specs, dict) and isinstance(tree, dict)
        missing = [key for key in tree if key not in specs] if is_dict else ()
        return path, _describe_node(specs), _describe_node(tree), missing
    below = (_parting(s, t, argument_path(key, path)) for (key, s), (_, t) in zip(own, others))
    return next((parting for parting in below if parting is not None), None)


def _children(node):
    """The children of a pytree node with their keys, and its own structure."""
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)


def _describe_node(node):
    if node is None or (isinstance(node, (tuple, list, dict)) and not node):
        return repr(node)
    if jax.tree_util.all_leaves([node]):
        return "an array" if getattr(node, "shape", ()) or not getattr(node, "weak_type", True) else "a Python scalar"
    if isinstance(node, dict):
        return f"a {type(node).__name__} with the keys {', '.join(map(repr, node))}"
    length = f" of length {len(node)}" if isinstance(node, (tuple, list)) else ""
    return (f"a {type(node).__name__}" if type(node) in (tuple, list) else f"the class {type(node).__name__}") + length


def argument_path(args_path: Sequence[Any], root: str) -> str:
    """``args[0]['w']`` for a leaf of the arguments (or results).

    A class that was registered without keys only numbers its children: ``args[0].<child 1>``.
    """
    unnamed = jax.tree_util.FlattenedIndexKey
    keys = (f".<child {k.key}>" if isinstance(k, unnamed) else jax.tree_util.keystr((k,)) for k in args_path)
    return root + "".join(keys)


def check_containers(where: str, specs: Sequence[AxisSpec], tree: Any, root: str) -> None:
    """Raise if a spec names dimensions of arrays in a container that holds a shape, which would be another one."""
    for path, container, leaves in _jax.shaped_containers(tree):
        if spec := next((spec for spec in specs[leaves] if spec.names), None):
            raise errors.container_with_shape(where, argument_path(path, root), type(container).__name__, spec.source)


def check_argument(spec: AxisSpec, shape: Sequence[int], path: str, is_scalar: bool) -> None:
    """Raise unless an argument has the dimensions that its spec names or asserts."""
    if spec.needed_rank > len(shape):
        if is_scalar:
            raise errors.scalar_argument_mapped(spec.source, spec.needed_rank, path)
        if spec.rank is None:
            raise errors.argument_rank_too_small(spec.source, spec.needed_rank, path, shape)
    if spec.rank is not None and spec.rank != len(shape):
        raise errors.rank_differs(spec.source, spec.rank, path, shape, "in_axes")


def check_result(spec: AxisSpec, positional_shape: Sequence[int], path: str, sizes: Mapping[AxisName, int]) -> None:
    """Raise unless a result has enough positional dimensions for its spec.

    Args:
      positional_shape: the shape of the function's result inside the body.
      sizes: axis sizes, to print the shape that the result would have.
    """
    ndim, named = len(positional_shape), len(spec.names)
    if spec.needed_rank > ndim + named:
        raise errors.output_rank_too_small(spec.source, spec.needed_rank - named, path, ndim)
    if spec.rank is not None and spec.rank != ndim + named:
        shape = list(positional_shape)
        for position, name in spec.names:
            shape.insert(position, sizes[name])
        raise errors.rank_differs(spec.source, spec.rank, path, shape, "out_axes")


def infer_sizes(
    specs: Sequence[AxisSpec], shapes: Sequence[Sequence[int]], paths: Sequence[str], axis_sizes: Mapping[AxisName, int]
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
                raise errors.size_conflict(name, known, origin, shape, spec.source, dim, path, is_for_all)
    return sizes


def parse_axis_sizes(axis_sizes: Any) -> dict[AxisName, int]:
    if axis_sizes is None:
        return {}
    if not isinstance(axis_sizes, Mapping):
        raise errors.should_be("axis_sizes", "a dictionary, such as {'batch': 8}", axis_sizes)
    sizes = {}
    for name, size in axis_sizes.items():
        check_name("axis_sizes", name)
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool):
            raise errors.should_be(f"The size of axis {name} in axis_sizes", "an integer, such as 8", size)
        if size < 0:
            raise errors.should_be(f"The size of axis {name} in axis_sizes", "at least 0", size, ValueError)
        sizes[name] = int(size)
    return sizes


# ------------------------------------------------------------------------ parsing


def _is_container(x):
    """Whether a value cannot be an axis name inside a list or a dictionary."""
    return isinstance(x, (list, tuple, dict)) or not jax.tree_util.all_leaves([x])


def is_spec(entry):
    """Whether in_axes or out_axes, or a node of them, is one specification and not a container of them."""
    if isinstance(entry, dict):
        return not any(_is_container(value) for value in entry.values() if value is not None)
    if isinstance(entry, list):
        return _is_list_spec(entry)
    return isinstance(entry, tuple) and (not entry or (type(entry) is tuple and _is_list_spec(entry)))


def _is_list_spec(entry):
    return any(x is ... or isinstance(x, str) for x in entry) or not any(
        _is_container(x) for x in entry if x is not None
    )


def _parse_spec(where, spec, path):
    if isinstance(spec, dict):
        return _parse_dict(where, spec, path)
    if isinstance(spec, (list, tuple)):
        return _parse_list(where, spec, path)
    raise errors.bad_spec(where, spec, path)


def _parse_dict(where, spec, path):
    if not all(isinstance(k, (int, np.integer)) and not isinstance(k, bool) for k in spec):
        raise errors.bad_spec(where, spec, path)
    if any(k < 0 for k in spec):
        raise errors.negative_axis(where, spec, path)
    return _make_spec(where, [(int(k), spec[k]) for k in sorted(spec)], None, spec, path)


def _parse_list(where, spec, path):
    entries = list(spec)
    open_ended = bool(entries) and entries[-1] is ...
    if open_ended:
        entries = entries[:-1]
    if any(entry is ... for entry in entries):
        raise errors.misplaced_ellipsis(spec, path)
    pairs = [(k, name) for k, name in enumerate(entries) if name is not None]
    return _make_spec(where, pairs, None if open_ended else len(entries), spec, path)


def _make_spec(where, pairs, rank, source, path):
    for _, name in pairs:
        check_name(where, name, path, source)
    if len({name for _, name in pairs}) != len(pairs):
        raise errors.repeated_name(where, source, path)
    return AxisSpec(tuple(pairs), rank, source)


def check_name(where: str, name: Any, path: str = "", source: Any = None) -> None:
    """Raise unless ``name`` can be the name of an axis."""
    is_dots = isinstance(name, str) and name == "..."
    others = (bool, np.bool_, tuple, jax.sharding.PartitionSpec)
    if name is None or name is ... or is_dots or isinstance(name, others):
        raise errors.bad_axis_name(where, name, path, source)
    try:
        hash(name)
    except TypeError:
        raise errors.bad_axis_name(where, name, path, source) from None
