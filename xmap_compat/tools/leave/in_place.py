"""The edits of the user's files for one call, and the expression of its mapped function."""

from __future__ import annotations

import ast
import functools
import re
import types
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.places import Reached
from xmap_compat.tools.source import hazards
from xmap_compat.tools.source.helper_texts import HELPERS
from xmap_compat.tools.source.module import check_all_found
from xmap_compat.tools.source.program import axis_names, why_unchecked
from xmap_compat.tools.source.rewrite import OURS, Rewriter
from xmap_compat.tools.source.text import NotWritable, prefix
from xmap_compat.tools.source.user_code import Piece, Span, calls_of_collectives
from xmap_compat.tools.source.wrapper import Maps


class InPlace:
    """What :class:`Rewriter` needs of a module, for edits of the user's own files.

    Attributes:
      edits: the new text of each part of a file: its name in code objects, start, end.
      replaced: those of them that are calls of xmap.
      handled: calls that were looked at, with the axes that they are over.
      around: the constructions in its body.
      custom: functions with derivative rules of their own.
    """

    def __init__(self, plan: Any, plans: Sequence[Any], outermost: frozenset[Span], keeps_rules: bool):
        self.plan, self.outermost, self.proving = plan, outermost, False
        self.placed, self.jaxpr = plan.staged.placed, plan.staged.placed.program.jaxpr
        self.names, found = axis_names(plan), hazards.rules_over(plan)
        self.typed = plan.mesh is not None and self._is_typed(found)
        self.inside = hazards.contractions_inside(self.jaxpr)
        takes_gradients = bool(found) and hazards.differentiates(self.jaxpr)
        self.only_values = keeps_rules or bool(self.inside) or takes_gradients
        hazards.check(plan, self.typed or self.only_values)
        self.rules = () if self.only_values else found
        self.one_by_one = hazards.axes_of_generators(plan)
        self.names = self.names.with_inner()
        calls = [calls_of_collectives(other.staged.placed.program.jaxpr) for other in plans]  # one text for all types
        self.calls = {span: [e for of in calls for e in of.get(span, ())] for span in dict.fromkeys(chain(*calls))}
        self.handled: dict[Any, tuple[Any, ...]] = {}
        self.custom: list[Any] = []
        self.nested: list[Any] = []
        self.edits: dict[tuple[str, int, int], str] = {}
        self.replaced: set[tuple[str, int, int]] = set()
        self.around: list[Any] = []

    def _is_typed(self, found: Any) -> bool:
        """Whether JAX can check which values vary over the mesh, as a generated program of the call tells."""
        if why_unchecked(self.plan, self.names, found) is not None or any(self.placed.undeclared):
            return False
        try:
            return "check_vma=False" not in self.plan.source(run=False)
        except NotImplementedError:
            return False

    @property
    def helpers(self) -> list[str]:
        """The helpers that the edits call."""
        return [n for text in self.edits.values() for n in re.findall(rf"{OURS}(\w+)", text) if n in HELPERS]

    def helper(self, name: str) -> str:
        return name

    def alias(self, name: str, module: Any) -> str:
        return name

    def edited(self, piece: Piece, node: ast.AST, new: str) -> None:
        """The table of edits of a generated module is not needed."""

    def taken_out(self, owner: Any, name: str) -> None:
        """A module of the user is edited where it is."""

    def functions(self, reached: Reached) -> None:
        """Edit the functions that a call reaches."""
        self.custom, pieces = reached.rules, reached.pieces()
        done: list[tuple[str, int, int]] = []
        for piece in (*pieces, *reached.attached()):
            self._put(piece, done)
            done.append((piece.file, *piece.bounds(piece.node)))
        if any(rule.options(self.typed) for rule in self.rules) and "backward_over" not in self.helpers:
            raise NotWritable(messages.RULE_NOT_FOUND)
        for piece in pieces:  # JAX locates the collectives of custom rules where their function is called
            for call in (n for n in ast.walk(piece.node) if isinstance(n, ast.Call) and piece.span(n) in self.calls):
                if any(piece.meaning(call.func) is rule for rule in reached.rules):
                    self.handled.setdefault(piece.span(call), ())
        check_all_found(self.jaxpr, self.names, self.handled)

    def _put(self, piece: Piece, done: Sequence[tuple[str, int, int]]) -> None:
        for start, end, text in Rewriter(self, piece).edits():  # type: ignore[arg-type]
            # What is inserted at the bounds of a function that is edited already, around a rule, is not in it.
            is_in = lambda a, b, at=(start, end): a <= at[0] and at[1] <= b and at not in ((a, a), (b, b))  # noqa: E731
            if not any(file == piece.file and is_in(a, b) for file, a, b in done):
                self.edits[piece.file, start, end] = text

    # ---- the maps

    def mapped(self, declared: Any, around: Mapping[str, Any]) -> str:
        """An expression for the mapped function, in which the user's own is ``function``.

        Args:
          around: the global variables, which name the classes of the user's pytrees.
        """
        self._globals, text = around, "function"
        like = lambda specs: functools.partial(prefix, specs, named=self._named)  # noqa: E731
        both = like(declared.in_specs), like(declared.out_specs)
        maps = Maps(self.plan, self, self.one_by_one, self.typed, *both)  # type: ignore[arg-type]
        for name, options in maps.innermost_first():
            text = f"{name}({', '.join([text, *options])})"
        return text

    def _named(self, kind: type) -> str:
        """The name of a class in the file of the call of xmap."""
        for name, value in self._globals.items():
            if value is kind:
                return name
            if isinstance(value, types.ModuleType) and vars(value).get(kind.__name__) is kind:
                return f"{name}.{kind.__name__}"
        raise NotWritable(messages.CLASS_WITHOUT_NAME.format(name=kind.__name__))


def decorators(text: str) -> list[str]:
    """The decorators that do what the calls around ``function`` do, the last one first."""
    node, found = ast.parse(text, mode="eval").body, []
    while isinstance(node, ast.Call):
        parts = [ast.get_source_segment(text, part) or "" for part in (node.func, *node.keywords)]
        name, options = parts[0], ", ".join(parts[1:])
        found.append(f"{OURS}functools.partial({name}, {options})" if options else name)
        (node,) = node.args
    return found


def laid_out(text: str, indent: int, width: int = 88) -> str:
    """An expression over several lines, if it does not fit in one."""
    if indent + len(text) <= width:
        return text
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:  # a part over several lines, which needs the brackets around it
        return text
    segment = lambda n: ast.get_source_segment(text, n) or ""  # noqa: E731
    if isinstance(node, ast.Lambda):
        body = segment(node.body)  # perhaps without its parentheses
        return text.removesuffix(body) + laid_out(body, indent, width) if text.endswith(body) else text
    unpacked = lambda n: None in getattr(n, "keys", ()) or getattr(n, "arg", "") is None  # noqa: E731
    if any(isinstance(n, (ast.Starred, ast.NamedExpr)) or unpacked(n) for n in ast.walk(node)):
        return text  # as the user has laid it out
    if isinstance(node, ast.Dict):
        parts = [(f"{segment(k)}: ", v) for k, v in zip(node.keys, node.values) if k]
    elif isinstance(node, ast.Call):
        parts = [*(("", a) for a in node.args), *((f"{k.arg}=", k.value) for k in node.keywords)]
    else:
        parts = [("", a) for a in getattr(node, "elts", ())]
    if not parts:
        return text
    head = segment(node.func) + "(" if isinstance(node, ast.Call) else text[0]
    inner = " " * (indent + 4)
    lines = [f"{inner}{name}{laid_out(segment(value), indent + 4 + len(name), width)},\n" for name, value in parts]
    return "".join([head, "\n", *lines, " " * indent, text[-1]])
