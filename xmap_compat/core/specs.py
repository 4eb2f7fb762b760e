"""Stage 1: the user's ``in_axes`` and ``out_axes`` become one ``AxisSpec`` per array.

Later stages never see the user's syntax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xmap_compat.core.errors import LEGACY, should_be, show

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
        # No arguments.  Further inside, ``()`` is the specification of a scalar, as ``[]`` is.
        return ()
    if where == "in_axes" and isinstance(tree, dict) and not is_spec(tree):
        # The arguments are a tuple: a dictionary can only be one specification for all of them.
        for position, name in tree.items():
            if isinstance(position, int) and isinstance(name, tuple):
                raise _bad_axis_name(where, name, where, tree)
    try:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_spec)
    except ValueError:
        # JAX sorts the keys of dictionaries, and these cannot be compared.
        raise _bad_spec(where, tree, where) from None
    specs = [_parse_spec(where, leaf, argument_path(path, where)) for path, leaf in leaves]
    return jax.tree.unflatten(treedef, specs)


def spec_names(specs: Any) -> list[AxisName]:
    """The axis names of parsed specs, each once, in the order of their appearance."""
    names: dict[AxisName, None] = {}
    for spec in jax.tree.leaves(specs):
        names.update(dict.fromkeys(spec.position_of()))
    return list(names)


def argument_path(args_path: Sequence[Any], root: str) -> str:
    """``args[0]['w']`` for a leaf of the arguments (or results).

    A class that was registered without keys only numbers its children: ``args[0].<child 1>``.
    """
    path = root
    for key in args_path:
        if isinstance(key, jax.tree_util.FlattenedIndexKey):
            path += f".<child {key.key}>"
        else:
            path += jax.tree_util.keystr((key,))
    return path


def parse_axis_sizes(axis_sizes: Any) -> dict[AxisName, int]:
    if axis_sizes is None:
        return {}
    if not isinstance(axis_sizes, Mapping):
        raise should_be("axis_sizes", "a dictionary, such as {'batch': 8}", axis_sizes)
    sizes = {}
    for name, size in axis_sizes.items():
        check_name("axis_sizes", name)
        what = f"The size of axis {name} in axis_sizes"
        if not is_integer(size):
            raise should_be(what, "an integer, such as 8", size)
        if size < 0:
            raise should_be(what, "at least 0", size, ValueError)
        sizes[name] = int(size)
    return sizes


def is_integer(value: Any) -> bool:
    """Whether a value is an integer, and no truth value."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


# ------------------------------------------------------------------------ parsing


def _is_container(x):
    """Whether a value cannot be an axis name inside a list or a dictionary."""
    return isinstance(x, (list, tuple, dict)) or not jax.tree_util.all_leaves([x])


def is_spec(entry):
    """Whether in_axes or out_axes, or a node of them, is one specification and not a container of
    them.
    """
    if isinstance(entry, dict):
        return not _holds_containers(entry.values())
    if isinstance(entry, list):
        return _is_list_spec(entry)
    if not isinstance(entry, tuple):
        return False
    return not entry or (type(entry) is tuple and _is_list_spec(entry))


def _is_list_spec(entry):
    is_list_of_names = any(x is ... or isinstance(x, str) for x in entry)
    return is_list_of_names or not _holds_containers(entry)


def _holds_containers(entries):
    return any(entry is not None and _is_container(entry) for entry in entries)


def _parse_spec(where, spec, path):
    if isinstance(spec, dict):
        return _parse_dict(where, spec, path)
    if isinstance(spec, (list, tuple)):
        return _parse_list(where, spec, path)
    raise _bad_spec(where, spec, path)


def _parse_dict(where, spec, path):
    if not all(map(is_integer, spec)):
        raise _bad_spec(where, spec, path)
    if any(position < 0 for position in spec):
        raise _negative_axis(where, spec, path)
    pairs = [(int(position), spec[position]) for position in sorted(spec)]
    return _make_spec(where, pairs, None, spec, path)


def _parse_list(where, spec, path):
    entries = list(spec)
    rank: int | None = len(entries)
    if entries and entries[-1] is ...:
        rank = None
        entries.pop()
    if any(entry is ... for entry in entries):
        raise _misplaced_ellipsis(spec, path)
    pairs = [(position, name) for position, name in enumerate(entries) if name is not None]
    return _make_spec(where, pairs, rank, spec, path)


def _make_spec(where, pairs, rank, source, path):
    for _, name in pairs:
        check_name(where, name, path, source)
    spec = AxisSpec(tuple(pairs), rank, source)
    if len(spec.position_of()) != len(pairs):
        raise _repeated_name(where, source, path)
    return spec


_TYPES_OF_NO_NAME = (bool, np.bool_, tuple, jax.sharding.PartitionSpec)


def check_name(where: str, name: Any, path: str = "", source: Any = None) -> None:
    """Raise unless ``name`` can be the name of an axis."""
    is_dots = isinstance(name, str) and name == "..."
    if is_dots or not can_name(name, _TYPES_OF_NO_NAME):
        raise _bad_axis_name(where, name, path, source)


def can_name(value: Any, refused: tuple[type, ...]) -> bool:
    """Whether a value can name an axis or a resource: a hashable that is neither None, an ellipsis,
    nor of a type in ``refused``.
    """
    if value is None or value is ... or isinstance(value, refused):
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True


# ----------------------------------------------------------------------------- messages

_PARTITION_SPEC = "a PartitionSpec has a meaning in jit and shard_map only"


def _bad_spec(where: str, spec: Any, path: str) -> TypeError:
    ours = f"{path} is {show(spec)}, which is not an axis specification{_spec_meant(spec)}"
    legacy = (
        f"Value mapping specification in xmap {where} pytree can be either: - lists of axis names "
        "(possibly ending with the ellipsis object: ...) - dictionaries that map positional axes "
        f"(integers) to axis names (e.g. {{2: 'name'}}) but got: {show(spec)}"
    )
    return TypeError(f"{ours}{LEGACY}{legacy}")


def _spec_meant(spec: Any) -> str:
    """What to write instead of an invalid specification, if that can be guessed."""
    if spec is ... or (isinstance(spec, str) and spec == "..."):
        return ". Write [...] where no dimension is named"
    if isinstance(spec, str):
        return f". Write [{spec!r}, ...] for the leading dimension"
    if isinstance(spec, jax.sharding.PartitionSpec):
        return f": {_PARTITION_SPEC}. Write a list of names, e.g. ['i', ...]"
    if isinstance(spec, (set, frozenset)):
        return ". A set has no order: write a list, or {position: name}"
    if isinstance(spec, (int, np.integer)):
        leading = "['name', ...] or " if spec == 0 else ""
        return f". Write {leading}{{{spec}: 'name'}}, with the name of that dimension"
    if isinstance(spec, dict) and all(isinstance(k, (int, np.integer)) for k in spec.values()):
        turned = {position: name for name, position in spec.items()}
        return f". Write it the other way round: {show(turned)}"
    return ". Write a list of names, or {position: name} with integers for positions"


def _bad_axis_name(where: str, name: Any, path: str, spec: Any) -> TypeError:
    reason = "it must be hashable, and neither None nor an ellipsis"
    remedy = "Use a string instead"
    if isinstance(name, str):
        reason = f"`{name!r}` is a string"
        remedy = "Write `...`"
    if isinstance(name, tuple):
        reason = "JAX reads a tuple as several names"
    if isinstance(name, jax.sharding.PartitionSpec):
        reason = _PARTITION_SPEC
        remedy = "Name the dimensions of an array with a list, e.g. ['i', ...]"
    if isinstance(name, (bool, np.bool_)):
        reason = "JAX reads a truth value as the position 0 or 1"
    if isinstance(name, (list, dict)) and isinstance(spec, tuple) and spec[-1] is ...:
        remedy = (
            "A tuple that ends in ... is one specification: for an argument without names write "
            "[...] or {}"
        )
    seen = f"In {where},"
    if spec is not None:
        seen = f"{path} is {show(spec)}, but"
    return TypeError(f"{seen} {show(name)} cannot be used as an axis name: {reason}. {remedy}")


def _misplaced_ellipsis(spec: Any, path: str) -> ValueError:
    return ValueError(
        f"{path} is {show(spec)}, but an ellipsis can only end a list of axis names. Use a "
        "dictionary to name dimensions that are not leading, e.g. {0: 'i', 2: 'j'}"
    )


def _negative_axis(where: str, spec: Any, path: str) -> ValueError:
    ours = (
        f"{path} is {show(spec)}, but a position cannot be negative. Count from the first dimension"
    )
    return ValueError(f"{ours}{LEGACY}xmap doesn't support negative axes in {where}")


def _repeated_name(where: str, spec: Any, path: str) -> ValueError:
    shown = show(spec)
    diagonal = ". For a diagonal, call jnp.diagonal before" if where == "in_axes" else ""
    ours = f"{path} is {shown}, which repeats a name. Give each dimension its own name{diagonal}"
    legacy = (
        f"Named axes should be unique within each {where} argument specification, but one them is: "
        f"{shown}"
    )
    return ValueError(f"{ours}{LEGACY}{legacy}")
