"""The edits of the user's files for one call, and the expression of its mapped function."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from xmap_compat.core.call import partition_spec as spec_of
from xmap_compat.core.specs import AxisSpec
from xmap_compat.tools.leave.places import Reached
from xmap_compat.tools.source import hazards
from xmap_compat.tools.source.hazards import rules_over
from xmap_compat.tools.source.helper_texts import HELPERS
from xmap_compat.tools.source.module import check_all_found
from xmap_compat.tools.source.nested import position_in
from xmap_compat.tools.source.program import axis_names, why_unchecked
from xmap_compat.tools.source.rewrite import OURS, Rewriter
from xmap_compat.tools.source.text import NotWritable, literal, partition_spec, prefix
from xmap_compat.tools.source.user_code import AxisNames, Piece, Span, collectives

Places = dict[tuple[str, int, int], str]  # the new text of a part of a file: its name in code objects, start, end


class InPlace:
    """What :class:`Rewriter` needs of a module, for edits of the user's own files.

    Attributes:
      edits: the new texts.
      handled: calls that were looked at, with the axes that they are over.
      custom: functions with derivative rules of their own.
    """

    def __init__(self, plan: Any, root: str, outermost: frozenset[Span], keeps_rules: bool):
        self.plan, self.root, self.outermost, self.proving = plan, root, outermost, False
        self.placed, self.jaxpr = plan.staged.placed, plan.staged.placed.program.jaxpr
        self.names: AxisNames = axis_names(plan)
        self.found = rules_over(plan)
        self.unchecked = self._why_unchecked() if plan.mesh is not None else None
        self.inside = hazards.contractions_inside(self.jaxpr)
        takes_gradients = bool(self.found) and hazards.differentiates(self.jaxpr)
        self.only_values = keeps_rules or bool(self.inside) or takes_gradients
        self.typed = plan.mesh is not None and self.unchecked is None
        hazards.check(plan, self.typed or self.only_values)
        self.one_by_one = hazards.axes_of_generators(plan)
        self.rules = () if self.only_values else self.found
        self.names = self.names.with_inner()
        self.calls: dict[Span, list[Any]] = {}
        for eqn, _, spans in collectives(self.jaxpr):
            if spans:
                self.calls.setdefault(spans[0], []).append(eqn)
        self.handled: dict[Any, tuple[Any, ...]] = {}
        self.custom: list[Any] = []
        self.nested: list[Any] = []
        self.edits: Places = {}
        self.replaced: set[tuple[str, int, int]] = set()

    def _why_unchecked(self) -> str | None:
        """Why JAX cannot check which values vary over the mesh, as a generated program of the call tells; else None."""
        if (known := why_unchecked(self.plan, self.names, self.found)) is not None:
            return known
        if any(self.placed.undeclared):
            return "a result varies over an axis that its out_axes do not name: each device has its own"
        try:
            text = self.plan.source(run=False)
        except NotImplementedError:
            return "whether its types agree is not known"
        return "with types JAX refuses it" if "check_vma=False" in text else None

    @property
    def helpers(self) -> list[str]:
        """The helpers that the edits call."""
        marked = (re.findall(rf"{OURS}(\w+)", text) for text in self.edits.values())
        return [name for names in marked for name in names if name in HELPERS]

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
        self.custom = reached.rules
        done: list[tuple[str, int, int]] = []
        for piece in reached.pieces():
            self._put(piece, done)
            done.append((piece.file, *piece.bounds(piece.node)))
        attached = {f"{rule.__name__}.defvjp": rule for rule in reached.rules if isinstance(rule, jax.custom_vjp)}
        for file in {piece.file: piece for piece in reached.pieces()}.values():
            for node in file.tree.body:
                called = node.value if isinstance(node, ast.Expr) else None
                if isinstance(called, ast.Call) and ast.unparse(called.func) in attached:
                    self._put(dataclasses.replace(file, node=node, closure={}), done)
        if any(rule.options(self.typed) for rule in self.rules) and "backward_over" not in self.helpers:
            raise NotWritable("a backward rule with collectives, whose `defvjp` is not found")
        for piece in reached.pieces():  # JAX locates the collectives of custom rules where their function is called
            for call in (n for n in ast.walk(piece.node) if isinstance(n, ast.Call) and piece.span(n) in self.calls):
                called = Rewriter(self, piece).callee(call.func)  # type: ignore[arg-type]
                if any(called is rule for rule in reached.rules):
                    self.handled.setdefault(piece.span(call), ())
        check_all_found(self.jaxpr, self.names, self.handled)

    def _put(self, piece: Piece, done: Sequence[tuple[str, int, int]]) -> None:
        for start, end, text in Rewriter(self, piece).edits():  # type: ignore[arg-type]
            if not any(file == piece.file and a <= start and end <= b for file, a, b in done):
                self.edits[piece.file, start, end] = text

    def about(self, names: Iterable[Any]) -> bool:
        """Whether a call over axes may be over one of this call of xmap; without names, they are unknown."""
        return not names or any(name in self.names.mesh for name in names)

    # ---- the maps

    def mapped(self, declared: Any) -> str:
        """An expression for the mapped function, in which the user's own is ``function``."""
        text = "function"
        for axes, local in reversed(self._maps(declared)):
            places = self._places(declared, axes, [a for group, _ in self._maps(declared) for a in group])
            axis, options = axes[0], [p for p in places if not p.endswith("=0")]
            loops = axis.loops or axis.name in self.one_by_one
            if not local:
                text = f"{self.helper('one_element')}({', '.join([text, *places])})"
                continue
            if loops:
                batch = 1 if axis.name in self.one_by_one else axis.local_size
                options += [f"turns={axis.device_size // batch}"] if batch > 1 else []
            else:
                options.append(f"axis_name={literal(self.names.local[axis.name])}")
            if all(axis.name not in a.axes for a in self.plan.arguments):
                options.append(f"axis_size={axis.device_size}")
            text = f"{self.helper('in_loop') if loops else 'jax.vmap'}({', '.join([text, *options])})"
        if self.plan.mesh is None:
            return text
        specs = lambda tree: self._like(tree, lambda s: partition_spec(spec_of(s, self.placed.placements)))  # noqa: E731
        options = [f"in_specs={specs(declared.in_specs)}", f"out_specs={specs(declared.out_specs)}"]
        if self.plan.compiler_axes:
            own = [literal(a) for a in self.plan.mesh.axis_names if a not in self.plan.compiler_axes]
            options.append(f"axis_names={{{', '.join(own)}}}")
        options += ["check_vma=False"] * (not self.typed)
        return f"jax.shard_map({', '.join([text, *options])})"

    def _maps(self, declared: Any) -> list[tuple[list[Any], bool]]:
        """The axes of each map, outermost first.  Those that fill the mesh share a map, unless an array has two."""
        specs = jax.tree.leaves((declared.in_specs, declared.out_specs))
        groups: list[tuple[list[Any], bool]] = []
        full = [a for a in self.plan.axes if not self.names.local[a.name]]
        for axis in full:
            apart = lambda names, axis=axis: all(len({*names, axis.name} & s.position_of().keys()) < 2 for s in specs)  # noqa: E731
            group = next((g for g, _ in groups if apart([a.name for a in g])), None)
            if group is None:
                groups.append(([axis], False))
            else:
                group.append(axis)
        looped = lambda a: not (a.loops or a.name in self.one_by_one)  # noqa: E731
        return groups + [([a], True) for a in sorted((a for a in self.plan.axes if a not in full), key=looped)]

    def _places(self, declared: Any, axes: Sequence[Any], order: Sequence[Any]) -> list[str]:
        """The dimensions of axes in the arguments and the results, where those of outer maps are gone."""
        outer = [a.name for a in order[: order.index(axes[0])]]
        at = lambda spec: next((p for a in axes if (p := position_in(spec, a.name, outer)) is not None), None)  # noqa: E731
        given, results = (
            self._like(tree, lambda s: literal(at(s))) for tree in (declared.in_specs, declared.out_specs)
        )
        return [f"in_axes={given}", f"out_axes={results}"]

    def _like(self, specs: Any, text: Any) -> str:
        leaf = lambda s: isinstance(s, AxisSpec)  # noqa: E731
        return prefix(jax.tree.structure(specs, is_leaf=leaf), list(map(text, jax.tree.leaves(specs, is_leaf=leaf))))


def laid_out(text: str, indent: int, width: int = 88) -> str:
    """An expression over several lines, if it does not fit in one."""
    if indent + len(text) <= width:
        return text
    node = ast.parse(text, mode="eval").body
    segment = lambda n: ast.get_source_segment(text, n) or ""  # noqa: E731
    if isinstance(node, ast.Lambda):
        return text[: -len(segment(node.body))] + laid_out(segment(node.body), indent, width)
    if isinstance(node, ast.Dict):
        parts = [(f"{segment(k)}: ", v) for k, v in zip(node.keys, node.values) if k is not None]
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
