"""Python source as text: literals, pytrees, names, and the layout of a module."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import keyword
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDTH = 120
EDITED = "What changed in the functions:"
_FORMATTERS = (
    "ruff check --isolated --select=I --fix --quiet -",
    f"ruff format --isolated --line-length={WIDTH} -",
    f"black --line-length={WIDTH} --quiet -",
)
_SHOWN = {"np": np, "jnp": jnp, "Ellipsis": ..., **{kind.__name__: kind for kind in (frozenset, range, set, slice)}}


class NotWritable(Exception):
    """A part of the program cannot be written in this way.  The message names the part, and the place."""

    placed = False

    def at(self, place: str) -> NotWritable:
        """The same error with a place in the user's files, unless it names one already."""
        if not self.placed:
            self.args, self.placed = (f"{self} ({place})",), True
        return self


class Text(str):
    """Source text that ``repr`` leaves as it is, so ``repr`` of a tuple of them is the source of a tuple."""

    __repr__ = str.__str__


def literal(value: Any) -> str:
    """Plain Python data as source: its ``repr``, if that evaluates to the same value."""
    if type(value) is complex:  # zeros have signs
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    shown = re.sub(r"'([^'\"\\]*)'", r'"\1"', repr(value))
    for text in (shown, repr(value), re.sub(r"(?<![\w\"'])(nan|inf)\b", r"jnp.\1", shown)):
        with contextlib.suppress(Exception):
            found = eval(text, {"__builtins__": {}, **_SHOWN})
            if type(found) is type(value) and repr(found) == repr(value):
                return text
    raise NotWritable(f"a value of type {type(value).__name__}")


def array(value: Any) -> str:
    """A small array or a NumPy scalar.  Its type is NumPy's if NumPy has it, because JAX does not narrow that."""
    value = np.asarray(value)
    name = value.dtype.name
    dtype = f"np.{name}" if hasattr(np, name) else f"jnp.{name}"
    if value.size == 0:
        return f"np.zeros({value.shape}, {dtype})"
    numbers = jax.tree.map(lambda number: Text(literal(number)), value.tolist())
    return f"np.array({numbers}, {dtype})" if value.ndim else f"{dtype}({numbers})"


def axes(names: Sequence[Any]) -> str:
    """One axis name, or a tuple of them."""
    return literal(names[0] if len(names) == 1 else tuple(names))


def partition_spec(spec: Sequence[Any]) -> str:
    return f"P({', '.join(map(literal, spec))})"


def prefix(tree: Any, text: Callable[[Any], str], named: Any = None) -> str:
    """A pytree as source, with a text in the place of each leaf; one text stands for leaves that all have it.

    Args:
      named: a function that gives the name of a class of named tuples or of a dataclass; without it, they are refused.
    """
    if len(texts := {*map(text, jax.tree.leaves(tree))}) == 1:
        return texts.pop()
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    parts = [Text(prefix(child, text, named)) for _, child in children]
    if type(tree) is list and len(set(parts)) == 1 < len(parts) - 1 and len(str(parts)) > WIDTH // 2:
        return f"{parts[:1]} * {len(parts)}"
    if type(tree) in (tuple, list):
        return repr(type(tree)(parts))
    if type(tree) is dict:
        return repr({Text(literal(key.key)): part for ((key,), _), part in zip(children, parts)})
    if tree is None:
        return "None"
    held = {f: getattr(tree, f, None) for f in field_names(type(tree))}
    by_child = {id(child): part for (_, child), part in zip(children, parts)}
    if named is not None and held and by_child.keys() <= {*map(id, held.values())}:
        given = (f"{f}={by_child[id(x)] if id(x) in by_child else literal(x)}" for f, x in held.items())
        return f"{named(type(tree))}({', '.join(given)})"
    raise NotWritable(f"a pytree with a node of type {type(tree).__name__}: use a tuple, a dictionary or a dataclass")


def field_names(kind: Any) -> list[str]:
    """The parameters of a class of named tuples, or of a dataclass."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return list(getattr(kind, "_fields", [f.name for f in fields if f.init]))


def identifier(text: str) -> str:
    """A valid Python name: ``params['w1']`` -> ``params_w1``."""
    name = "_".join(re.findall(r"[^\W_]+", text)) or "value"
    return f"v{name}" if name[0].isdigit() else name + "_" * keyword.iskeyword(name)


class Names:
    """Fresh names, which differ from those that are taken."""

    def __init__(self, taken: Iterable[str]):
        self.taken = {*taken, *keyword.kwlist, "l"}

    def like(self, wanted: str) -> str:
        """A free name as close to the wanted one as possible; it is taken from now on."""
        variants = itertools.chain([wanted], (f"{wanted}_{k}" for k in itertools.count(2)))
        name = next(name for name in variants if name not in self.taken)
        self.taken.add(name)
        return name


# -------------------------------------------------------------------------------- modules


def module_text(about: Sequence[str], imports: Iterable[str], lines: Iterable[str]) -> str:
    """A formatted module; its imports are in the order of isort, but the standard library has no section of its own."""
    ordered = sorted(imports, key=lambda s: (s.startswith("from "), s))
    return formatted("\n".join([docstring(about), "", *ordered, "", *lines, ""]))


def formatted(text: str) -> str:
    """The text after ruff and black have formatted it, if they are installed."""
    for command in (line.split() for line in _FORMATTERS):
        if importlib.util.find_spec(command[0]) is not None:
            started = [sys.executable, "-m", *command]
            done = subprocess.run(started, input=text, capture_output=True, text=True, timeout=60)
            text = done.stdout if done.returncode == 0 else text
    return re.sub("\n{4,}", "\n\n\n", text)


def noted(text: str, note: str, in_title: bool = False) -> str:
    """A module with a note in its docstring: in the first line, or in a paragraph after it."""
    _, about, rest = text.split('"""', 2)
    title, *more = about.rstrip().split("\n")
    note = f" {_escaped(note)}" if in_title else f"\n\n{_escaped(textwrap.fill(note, WIDTH))}"
    return '"""'.join(["", "\n".join([title + note, *more]) + "\n" * (not in_title or bool(more)), rest])


def docstring(about: Sequence[str]) -> str:
    return f'"""{_escaped(chr(10).join(about))}' + ('\n"""' if len(about) > 1 else '"""')


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"' * 3, "'" * 3)
