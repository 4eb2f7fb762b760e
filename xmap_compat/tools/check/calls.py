"""What the calls of ``xmap`` and ``pjit`` in a file say literally: may they have today's names."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from xmap_compat.tools.check import table
from xmap_compat.tools.source.bindings import Names, text_of
from xmap_compat.tools.source.layout import Edit

XMAP = f"{table.MAPS}.xmap"
_PARTIAL = ("functools.partial", "jax.tree_util.Partial")
_SPECS = "jax.sharding.PartitionSpec"
# What takes a name away from the axes that a result varies over; and what may, given a name.
_COLLECTIVES = {"psum", "pmean", "pmax", "pmin", "pdot", "xeinsum", "all_gather", "psum_scatter"}
_COLLECTIVES |= {"pargmax", "pargmin"}
_REDUCTIONS = {"einsum", "sum", "mean", "max", "min", "prod", "var", "std", "any", "all"}
_REDUCTIONS |= {"logsumexp"}
ANY = "*"


class _NotLiteral(Exception):
    """An expression whose value is known at run time only."""


@dataclasses.dataclass
class Calls:
    """What the calls of a file ask for.

    Attributes:
      edits: those that take entries out of ``axis_resources``.
      covered: the nodes in these entries.
      reasons: why xmap keeps its import, each with its line.
    """

    edits: list[Edit]
    covered: set[ast.AST]
    reasons: list[tuple[int, str]]


def read_calls(names: Names) -> Calls:
    """Look at each call of xmap in a file."""
    found = Calls([], set(), [])
    reduced = _reduced(names)
    for call, given in _xmaps(names):
        in_names = _axes(names, given.get("in_axes"))
        out_names = _axes(names, given.get("out_axes"))
        sizes = _keys(names, given.get("axis_sizes"))
        resources = _keys(names, given.get("axis_resources"))
        if in_names is None or not given.get("axis_resources"):
            continue
        if resources is not None and sizes is not None:
            unknown = [name for name in resources if name not in {*in_names, *sizes}]
            if unknown:
                _take_out(found, call, given["axis_resources"], unknown)
        if out_names is not None and ANY not in reduced:
            split = in_names if resources is None else set(in_names) & {*resources}
            undeclared = sorted(map(str, {*split} - {*out_names} - reduced))
            if undeclared:
                words = f"its result may vary over {', '.join(undeclared)}, which out_axes lack"
                found.reasons.append((call.lineno, words))
    return found


def _xmaps(names: Names) -> Iterator[tuple[ast.Call, dict[str, ast.expr]]]:
    """The calls of xmap, also by ``partial``, and their arguments by name."""
    for node in names.nodes:
        if not isinstance(node, ast.Call):
            continue
        args: Sequence[ast.expr] = node.args
        called = names.dotted(node.func)
        if called in _PARTIAL and args:
            called = names.dotted(args[0])
            args = args[1:]
        if called == XMAP:
            given = dict(zip(("fun", "in_axes", "out_axes"), args))
            given.update({keyword.arg or "**": keyword.value for keyword in node.keywords})
            yield node, given


def _resolved(names: Names, node: Any) -> Any:
    """An expression, or the one that a variable is bound to."""
    for _ in range(9):
        if not isinstance(node, ast.Name):
            return node
        node = names.meaning(node.id)
    return None


def _axes(names: Names, node: ast.expr | None) -> list[Any] | None:
    """The names in specifications; None if these are not literal."""
    try:
        return list(_in_spec(names, node, 9))
    except _NotLiteral:
        return None


def _in_spec(names: Names, node: Any, depth: int) -> Iterator[Any]:
    node = _resolved(names, node)
    if isinstance(node, ast.Constant):
        if node.value is not None and node.value is not ...:
            yield node.value
        return
    if isinstance(node, ast.Dict):
        parts: Sequence[Any] = node.values
    elif isinstance(node, (ast.List, ast.Tuple)):
        parts = node.elts
    else:
        raise _NotLiteral
    if not depth:
        raise _NotLiteral
    for part in parts:
        yield from _in_spec(names, part, depth - 1)


def _keys(names: Names, node: ast.expr | None) -> list[Any] | None:
    """The keys of a dictionary; None if they are not literal."""
    node = _resolved(names, node)
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        return []
    if not isinstance(node, ast.Dict):
        return None
    keys = []
    for key in node.keys:
        key = _resolved(names, key)
        if not isinstance(key, ast.Constant):
            return None
        keys.append(key.value)
    return keys


def _reduced(names: Names) -> set[Any]:
    """The names over which something in the file reduces; ``ANY`` for a name that is not
    literal.
    """
    found: set[Any] = set()
    for call in names.nodes:
        if not isinstance(call, ast.Call):
            continue
        last = re.split(r"\W", ast.unparse(call.func))[-1]
        if last not in (*_COLLECTIVES, *_REDUCTIONS):
            continue
        texts = _texts_of(names, call)
        if not texts and last in _COLLECTIVES:
            return {ANY}
        for text in texts:
            found.update(re.findall(r"\w+", text))
    return found


def _texts_of(names: Names, call: ast.Call) -> list[str]:
    """The texts that a call is given, also by the names of constants."""
    texts = []
    for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
        for node in ast.walk(argument):
            text = names.text(node)
            if text:
                texts.append(text)
    return texts


def _take_out(found: Calls, call: ast.Call, resources: ast.expr, unknown: list[Any]) -> None:
    """Take entries out of a literal; where it is none, xmap keeps its import."""
    if isinstance(resources, ast.Dict):
        for key, value in zip(resources.keys, resources.values):
            if isinstance(key, ast.Constant) and key.value in unknown:
                found.covered.update((*ast.walk(key), *ast.walk(value)))
        found.edits += _without(resources, unknown)
    else:
        axes = ", ".join(map(str, unknown))
        words = f"its axis_resources are no literal, and name {axes}, which no spec names"
        found.reasons.append((call.lineno, words))


def _without(literal: ast.Dict, unknown: list[Any]) -> list[Edit]:
    """The edits that take entries out of a dictionary."""
    entries: list[tuple[Any, Any]] = list(zip(literal.keys, literal.values))
    stay = [getattr(key, "value", None) not in unknown for key, _ in entries]
    edits = []
    for number, (key, value) in enumerate(entries):
        if stay[number]:
            continue
        start = key.lineno, key.col_offset
        end = value.end_lineno, value.end_col_offset
        if number + 1 < len(entries):
            following = entries[number + 1][0]
            end = following.lineno, following.col_offset
        elif any(stay):
            last = max(k for k, stays in enumerate(stay) if stays)
            before = entries[last][1]
            start = before.end_lineno, before.end_col_offset
        edits.append(Edit(start, end, ""))
    return _disjoint(edits)


def _disjoint(edits: list[Edit]) -> list[Edit]:
    """Edits without those that lie within another."""
    kept = []
    for edit in edits:
        others = (other for other in edits if other is not edit)
        if not any(other.start <= edit.start and edit.end <= other.end for other in others):
            kept.append(edit)
    return kept


def spec_of_none(names: Names, value: ast.expr) -> str | None:
    """How a keyword of ``pjit`` may take today's name: what to write for each None in its value;
    None if the value is not literal.
    """
    for node in ast.walk(value):
        if isinstance(node, ast.Name) and not names.dotted(node).endswith("PartitionSpec"):
            return None
    for name, bound in names.bound.items():
        if any(str(meant).endswith(".PartitionSpec") for meant in bound):
            return f"{name}()"
    return f"{_SPECS}()"


def nones_in(value: ast.expr) -> list[ast.Constant]:
    """The Nones that stand for whole specs: not those inside of ``P(None, 'x')``."""
    if isinstance(value, ast.Constant):
        return [value] if value.value is None else []
    found = []
    if isinstance(value, (ast.Tuple, ast.List)):
        for part in value.elts:
            found += nones_in(part)
    if isinstance(value, ast.Dict):
        for part in value.values:
            found += nones_in(part)
    return found


def texts_in(names: Names) -> set[str]:
    """All texts of a file."""
    return {text for node in names.nodes if (text := text_of(node))}
