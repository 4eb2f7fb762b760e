"""The edits of the user's files for one call, and the expression of its mapped function."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.places import Reached
from xmap_compat.tools.source.hazards import RuleOver, rules_over
from xmap_compat.tools.source.helper_texts import HELPERS
from xmap_compat.tools.source.module import check_all_found
from xmap_compat.tools.source.program import axis_names, why_unchecked, written
from xmap_compat.tools.source.rewrite import OURS, Rewriter, Rewriting
from xmap_compat.tools.source.text import NotWritable, prefix
from xmap_compat.tools.source.user_code import AxisNames, Piece, Span, calls_of_collectives
from xmap_compat.tools.source.wrapper import Maps


class InPlace(Rewriting):
    """The edits of the user's own files for a call.

    Attributes:
      edits: the new text of each part of a file: its name in code objects, start, end.
      replaced: those of them that are calls of xmap.
      around: the constructions in its body.
      custom: functions with derivative rules of their own.
    """

    def __init__(self, plan: Any, plans: Sequence[Any], made_here: frozenset[Span], keeps_rules: bool):
        names, rules = axis_names(plan), rules_over(plan)
        typed = plan.mesh is not None and _is_typed(plan, names, rules)
        calls = [calls_of_collectives(other.staged.placed.program.jaxpr) for other in plans]  # one text for all types
        every = {span: [e for of in calls for e in of.get(span, ())] for span in dict.fromkeys(itertools.chain(*calls))}
        super().__init__(plan, names, rules, typed, keeps_rules)
        self.calls, self.made_here = every, made_here
        self.custom: list[Any] = []
        self.edits: dict[tuple[str, int, int], str] = {}
        self.replaced: set[tuple[str, int, int]] = set()
        self.around: list[Any] = []

    @property
    def helpers(self) -> list[str]:
        """The helpers that the edits call."""
        return [n for text in self.edits.values() for n in re.findall(rf"{OURS}(\w+)", text) if n in HELPERS]

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
        check_all_found(self.plan.staged.placed.program.jaxpr, self.names, self.handled)

    def _put(self, piece: Piece, done: Sequence[tuple[str, int, int]]) -> None:
        for start, end, text in Rewriter(self, piece).edits():
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
        maps = Maps(self, like(declared.in_specs), like(declared.out_specs))
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


def _is_typed(plan: Any, names: AxisNames, rules: Sequence[RuleOver]) -> bool:
    """Whether JAX can check which values vary over the mesh, as a generated program of the call tells."""
    if why_unchecked(plan, names, rules) is not None or any(plan.staged.placed.undeclared):
        return False
    try:
        return "check_vma=False" not in written(plan).text
    except NotImplementedError:
        return False


def decorators(text: str) -> list[str]:
    """The decorators that do what the calls around ``function`` do, the last one first."""
    node, found = ast.parse(text, mode="eval").body, []
    while isinstance(node, ast.Call):
        parts = [ast.get_source_segment(text, part) or "" for part in (node.func, *node.keywords)]
        name, options = parts[0], ", ".join(parts[1:])
        found.append(f"{OURS}partial({name}, {options})" if options else name)
        (node,) = node.args
    return found


def laid_out(text: str, indent: int, width: int = 88) -> str:
    """An expression over several lines, if it does not fit in one."""
    new = _over_lines(text, indent, width)
    try:
        return new if len({ast.dump(ast.parse(f"({t}\n)")) for t in (text, new)}) == 1 else text
    except SyntaxError:  # a comma after a comment
        return text


# What may hold brackets or commas, and then these.
TOKENS = re.compile(r"""(['"])(?:\\.|(?!\1).)*\1|#[^\n]*|\blambda\b[^:]*:|[][(){},]""")


def _over_lines(text: str, indent: int, width: int) -> str:
    """A text with a line for each part of its last brackets, if it ends with them; lambdas of the user stay."""
    if indent + len(text) <= width or text[-1] not in ")]}" or re.match("lambda(?! function:)", text):
        return text
    depth, cuts = 0, [0]
    for token in TOKENS.finditer(text):
        depth -= token[0] in ")]}"
        if depth == 0 and token[0] in "([{":
            cuts = [token.end()]
        elif depth == 1 and token[0] == ",":
            cuts.append(token.end())
        depth += token[0] in "([{"
    parts = [text[a:b].strip().removesuffix(",") for a, b in itertools.pairwise([*cuts, len(text) - 1])]
    lines = [f"{' ' * (indent + 4)}{_over_lines(part, indent + 4, width)}" for part in parts if part]
    comma = "," * (len(lines) > 1 or bool(re.search(r"[\w)\]]\($", text[: cuts[0]])))
    return "\n".join([text[: cuts[0]], ",\n".join(lines) + comma, " " * indent + text[-1]])
