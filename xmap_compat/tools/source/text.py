"""Python source as text: literals, pytrees, names."""

from __future__ import annotations

import contextlib
import itertools
import keyword
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

WIDTH = 120
_SHOWN = {"np": np, "jnp": jnp, "Ellipsis": ..., **{kind.__name__: kind for kind in (frozenset, range, set, slice)}}


class NotWritable(Exception):
    """Something that this way of writing the program cannot express; the message says what, and where."""

    placed = False

    def at(self, place: str) -> NotWritable:
        """The same with a place in the user's files, unless it has one."""
        if not self.placed:
            self.args, self.placed = (f"{self} ({place})",), True
        return self


class _Text(str):
    """Source, which ``repr`` leaves as it is: ``repr`` of a tuple of them is the source of a tuple."""

    __repr__ = str.__str__


def literal(value: Any) -> str:
    """Plain Python data as source: as it shows itself, if that is evaluated to the same."""
    if isinstance(value, PartitionSpec):
        return partition_spec(value)
    if type(value) is complex:  # the signs of its zeros
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    shown = re.sub(r"'([^'\"\\]*)'", r'"\1"', repr(value))
    for text in (shown, repr(value), re.sub(r"(?<![\w\"'])(nan|inf)\b", r"jnp.\1", shown)):
        with contextlib.suppress(Exception):
            found = eval(text, {"__builtins__": {}, **_SHOWN})
            if type(found) is type(value) and repr(found) == repr(value):
                return text
    raise NotWritable(f"a value of type {type(value).__name__}")


def array(value: Any) -> str:
    """A small array or a NumPy scalar, of a type of NumPy, which JAX does not narrow, if NumPy has it."""
    value = np.asarray(value)
    name = value.dtype.name
    dtype = f"np.{name}" if hasattr(np, name) else f"jnp.{name}"
    if value.size == 0:
        return f"np.zeros({value.shape}, {dtype})"
    numbers = jax.tree.map(lambda number: _Text(literal(number)), value.tolist())
    return f"np.array({numbers}, {dtype})" if value.ndim else f"{dtype}({numbers})"


def axes(names: Sequence[Any]) -> str:
    """One axis name, or a tuple of them."""
    return literal(names[0] if len(names) == 1 else tuple(names))


def partition_spec(spec: Sequence[Any]) -> str:
    return f"P({', '.join(map(literal, spec))})"


def display(kind: type, parts: Iterable[str], keys: Iterable[Any] = ()) -> str:
    """A tuple, a list or a dictionary of texts."""
    texts = list(map(_Text, parts))
    return repr(dict(zip((_Text(literal(k)) for k in keys), texts)) if kind is dict else kind(texts))


Named = Callable[[type], str]


def prefix(structure: Any, leaves: Sequence[str], named: Named | None = None, whole: bool = False) -> str:
    """A pytree of texts as a display of dictionaries, lists and tuples.

    Args:
      named: what classes of named tuples are called.
      whole: without this, one text may stand for a subtree whose leaves are all equal.
    """
    kind, keys = structure.node_data() or (None, None)
    if kind is None or (len(set(leaves)) == 1 and not whole):
        return leaves[0]
    rest = iter(leaves)
    children = structure.children()
    parts = [prefix(child, list(itertools.islice(rest, child.num_leaves)), named, whole) for child in children]
    if kind is list and len(set(parts)) == 1 < len(parts) - 1 and len(str(parts)) > WIDTH // 2:
        return f"[{parts[0]}] * {len(parts)}"
    if kind in (tuple, list, dict):
        return display(kind, parts, keys or ())
    if kind is type(None):
        return "None"
    if named is not None and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return f"{named(kind)}({', '.join(f'{f}={part}' for f, part in zip(kind._fields, parts))})"
    raise NotWritable(f"a pytree with a node of type {kind.__name__}")


def is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def identifier(text: str) -> str:
    """A name that can stand in a program: ``params['w1']`` -> ``params_w1``."""
    name = "_".join(re.findall(r"[^\W_]+", text)) or "value"
    return f"v{name}" if name[0].isdigit() else name + "_" * keyword.iskeyword(name)


class Names:
    """Fresh names, without those that are taken."""

    def __init__(self, taken: Iterable[str]):
        self.taken = {*taken, *keyword.kwlist, "l"}

    def like(self, wanted: str) -> str:
        """A free name as near to the wanted one as can be had; it is taken now."""
        variants = itertools.chain([wanted], (f"{wanted}_{k}" for k in itertools.count(2)))
        name = next(name for name in variants if name not in self.taken)
        self.taken.add(name)
        return name
