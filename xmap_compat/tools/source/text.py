"""Python source as text: literals, pytrees and statements."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

WIDTH = 120
INDENT = "    "


class NotWritable(Exception):
    """Something that this way of writing the program cannot express; the message says what, and where."""

    placed = False

    def at(self, place: str) -> NotWritable:
        """The same with a place in the user's files, unless it has one."""
        if not self.placed:
            self.args, self.placed = (f"{self} ({place})",), True
        return self


# ----------------------------------------------------------------------------- literals


def quoted(text: str) -> str:
    """A string literal in double quotes."""
    shown = repr(text)
    return shown if '"' in text or "\\" in shown else f'"{shown[1:-1]}"'


def literal(value: Any) -> str:
    """Plain Python data as source."""
    if value is None or value is ... or isinstance(value, (bool, int)):
        return "..." if value is ... else str(value)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, (float, complex)):
        return scalar(value)
    if isinstance(value, np.generic):
        return typed_scalar(value)
    if type(value) is tuple:
        return f"({literal(value[0])},)" if len(value) == 1 else f"({', '.join(map(literal, value))})"
    if type(value) is list:
        return f"[{', '.join(map(literal, value))}]"
    if type(value) in (set, frozenset) and value:
        return f"{{{', '.join(sorted(map(literal, value)))}}}"
    if type(value) is dict:
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, PartitionSpec):
        return partition_spec(value)
    raise NotWritable(f"a value of type {type(value).__name__}")


def scalar(value: Any) -> str:
    """A Python number; its type follows from where it stands."""
    value = value.item() if hasattr(value, "item") else value
    kinds: tuple[Any, ...] = (bool, int, float, complex)
    for kind in kinds:
        # JAX's literals are of subclasses, which show themselves otherwise.
        if isinstance(value, kind):
            value = kind(value)
            break
    if isinstance(value, complex):
        return f"complex({scalar(value.real)}, {scalar(value.imag)})"
    if isinstance(value, float):
        if value != value:
            return "jnp.nan"
        if value in (float("inf"), float("-inf")):
            return "jnp.inf" if value > 0 else "-jnp.inf"
    return repr(value)


def typed_scalar(value: Any) -> str:
    return f"{_value_dtype(value.dtype)}({scalar(value)})"


def _value_dtype(kind: Any) -> str:
    """As ``np.float32``, so that a value keeps a type that JAX would narrow."""
    text = dtype(kind)
    return f"np.{text[4:]}" if np.dtype(kind).kind in "biufc" else text


def dtype(kind: Any) -> str:
    """``jnp.float32``"""
    name = np.dtype(kind).name if not jax.dtypes.issubdtype(kind, jax.dtypes.extended) else None
    if name is None:
        raise NotWritable(f"the element type {kind}")
    return {"bool": "jnp.bool_"}.get(name, f"jnp.{name}")


def array(value: Any) -> str:
    """A small array."""
    value = np.asarray(value)
    if value.ndim == 0:
        return typed_scalar(value[()])
    return f"np.array({_nested(value.tolist())}, {_value_dtype(value.dtype)})"


def _nested(value):
    return f"[{', '.join(map(_nested, value))}]" if isinstance(value, list) else scalar(value)


def axes(names: Sequence[Any]) -> str:
    """One axis name, or a tuple of them."""
    return literal(names[0]) if len(names) == 1 else literal(tuple(names))


def partition_spec(spec: Sequence[Any]) -> str:
    return f"P({', '.join(map(literal, spec))})"


def is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def identifier(text: str) -> str:
    """A name that can stand in a program: ``params['w1']`` -> ``params_w1``."""
    cleaned = "".join(c if c.isalnum() else "_" for c in text)
    parts = [part for part in cleaned.split("_") if part]
    name = "_".join(parts) or "value"
    name = f"v{name}" if name[0].isdigit() else name
    return name + "_" if keyword.iskeyword(name) else name


# ------------------------------------------------------------------------------- pytrees


Named = Callable[[type], str]


def tree(structure: Any, leaves: Sequence[str], named: Named | None = None) -> str:
    """A pytree of texts as a display of dictionaries, lists and tuples.

    Args:
      named: what classes of named tuples are called.
    """
    return _display(jax.tree.unflatten(structure, [_Text(leaf) for leaf in leaves]), named)


def repeated(items: Sequence[str]) -> str | None:
    """A list of items that are the same and long: ``[{"w": P("x")}] * 12``."""
    same = len(items) > 2 and len(set(items)) == 1 and len(items) * len(items[0]) > WIDTH // 2
    return f"[{items[0]}] * {len(items)}" if same else None


class _Text:
    """A leaf; not a string, which a pytree may contain."""

    def __init__(self, text: str):
        self.text = text


def _display(node, named):
    show = lambda x: _display(x, named)  # noqa: E731
    if isinstance(node, _Text):
        return node.text
    if node is None:
        return "None"
    if type(node) is tuple:
        return f"({show(node[0])},)" if len(node) == 1 else f"({', '.join(map(show, node))})"
    if type(node) is list:
        return repeated([show(x) for x in node]) or f"[{', '.join(map(show, node))}]"
    if type(node) is dict:
        return "{" + ", ".join(f"{literal(k)}: {show(v)}" for k, v in node.items()) + "}"
    if isinstance(node, tuple) and hasattr(node, "_fields") and named is not None:
        return f"{named(type(node))}({', '.join(f'{f}={show(x)}' for f, x in zip(node._fields, node))})"
    raise NotWritable(f"a pytree with a node of type {type(node).__name__}")


def prefix(structure: Any, leaves: Sequence[str], named: Named | None = None) -> str:
    """The same, where one text may stand for a subtree whose leaves are all equal."""
    if len(set(leaves)) == 1 and structure.num_nodes > 0:
        return leaves[0]
    children = structure.children()
    if not children or jax.tree_util.treedef_is_leaf(structure):
        return tree(structure, leaves, named)
    rest, parts = list(leaves), []
    for child in children:
        parts.append(prefix(child, rest[: child.num_leaves], named))
        rest = rest[child.num_leaves :]
    node = _one_level(structure)
    level = jax.tree.structure(node, is_leaf=lambda x: x is not node)
    return _display(jax.tree.unflatten(level, map(_Text, parts)), named)


def _one_level(structure):
    """A pytree node of the same type whose children are numbers."""
    return jax.tree.unflatten(structure, [0] * structure.num_leaves)


class Names:
    """Fresh names, without those that are taken."""

    def __init__(self, taken: Sequence[str]):
        self.taken = {*taken, *keyword.kwlist, "l"}

    def take(self, name: str) -> bool:
        """Whether a name was free; it is taken now."""
        free = name not in self.taken
        self.taken.add(name)
        return free

    def like(self, wanted: str) -> str:
        """A free name as near to the wanted one as can be had."""
        return next(name for name in self.variants(wanted) if self.take(name))

    @staticmethod
    def variants(wanted):
        yield wanted
        yield from (f"{wanted}_{k}" for k in range(2, 10_000))


class Lines:
    """Source being written, one statement in a line."""

    def __init__(self):
        self.lines: list[str] = []
        self.indent = 0

    def add(self, text: str) -> None:
        self.lines.append(INDENT * self.indent + text)

    def raw(self, lines: Sequence[str]) -> None:
        self.lines.extend(lines)

    def blank(self, count: int = 1) -> None:
        self.lines.extend([""] * count)

    def block(self, head: str, body: Callable[[], None]) -> None:
        """A function; within another, with an empty line before and after it."""
        if self.indent and self.lines[-1] and not self.lines[-1].endswith(":"):
            self.blank()
        self.add(head)
        self.indent += 1
        body()
        self.indent -= 1
        if self.indent:
            self.blank()
