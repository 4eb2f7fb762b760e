"""The edits of a program's own files that replace its xmaps by plain JAX."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat.core.call import partition_spec as spec_of
from xmap_compat.core.specs import AxisSpec
from xmap_compat.tools.leave import shared as of_files
from xmap_compat.tools.leave.places import File, Reached, Site, globals_of, is_under, read, site_of
from xmap_compat.tools.source import hazards
from xmap_compat.tools.source.hazards import rules_over
from xmap_compat.tools.source.helper_texts import HELPERS, helper_module
from xmap_compat.tools.source.imports import file_of
from xmap_compat.tools.source.module import check_all_found
from xmap_compat.tools.source.nested import position_in, vmaps
from xmap_compat.tools.source.program import axis_names, why_unchecked
from xmap_compat.tools.source.rewrite import OURS, Rewriter, ours
from xmap_compat.tools.source.text import NotWritable, literal, partition_spec, prefix
from xmap_compat.tools.source.user_code import AxisNames, Piece, Span, collectives, spliced

__all__ = ["Construction", "Edit", "Edited", "Outcome", "edits_of", "read"]


@dataclasses.dataclass(frozen=True)
class Construction:
    """One call of ``xmap(...)`` in the program's text.

    Attributes:
      file, line: of its expression: the first line of the call.
      reached: how often the program made it.
      plans: the distinct plans of its first calls; empty if it was never called.
      function: the xmapped function of the first time.
      others: those of later times whose declarations differ.
      column: where the call starts in its line, in bytes; None if unknown.
      differentiated: whether the program took a gradient of it from outside.
    """

    file: str
    line: int
    reached: int
    plans: tuple[Any, ...]
    function: Any
    others: tuple[Any, ...] = ()
    column: int | None = None
    differentiated: bool = False


@dataclasses.dataclass(frozen=True)
class Edit:
    """The replacement of a part of a file; ``start`` and ``end`` count its characters, as :func:`read` gives them."""

    file: str
    start: int
    end: int
    text: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a construction.

    Attributes:
      edits: the first one replaces the construction, by one expression; empty if it was refused.
      refused: why it stays, and what to do.
      decorates: whether the expression is a function of the function to map, as ``@xmap(...)`` is.
    """

    construction: Construction
    edits: tuple[Edit, ...]
    refused: str | None
    note: str = ""
    decorates: bool = False


@dataclasses.dataclass(frozen=True)
class Edited:
    """All edits of a program.

    Attributes:
      outcomes: one for each construction, in their order.
      shared: edits of whole files: imports, mesh contexts, ``thread_resources``.
      helpers: the text of the helper file; empty if nothing needs it.
      helper_file: its path.
    """

    outcomes: tuple[Outcome, ...]
    shared: tuple[Edit, ...]
    helpers: str
    helper_file: str


# ---------------------------------------------------------------------- the texts of one call

Places = dict[tuple[str, int, int], str]  # the new text of a part of a file: its name in code objects, start, end


class InPlace:
    """What :class:`Rewriter` needs of a module, for edits of the user's own files.

    Attributes:
      edits: the new texts.
      handled: calls that were looked at, with the axes that they are over.
    """

    def __init__(self, plan: Any, root: str, outermost: frozenset[Span]):
        self.plan, self.root, self.outermost, self.proving = plan, root, outermost, False
        self.placed, self.jaxpr = plan.staged.placed, plan.staged.placed.program.jaxpr
        self.names: AxisNames = axis_names(plan)
        self.found = rules_over(plan)
        self.unchecked = self._why_unchecked() if plan.mesh is not None else None
        self.inside = hazards.contractions_inside(self.jaxpr)
        self.only_values = bool(self.inside) or (bool(self.found) and hazards.differentiates(self.jaxpr))
        self.typed = plan.mesh is not None and self.unchecked is None
        hazards.check(plan, self.typed or self.only_values)
        self.one_by_one = hazards.axes_of_generators(plan)
        self.rules = () if self.only_values else self.found
        self.names = self.names.with_inner()
        self.calls: dict[Span, list[Any]] = {}
        for eqn, spans in collectives(self.jaxpr):
            if spans:
                self.calls.setdefault(spans[0], []).append(eqn)
        self.handled: dict[Any, tuple[Any, ...]] = {}
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
            text = self.plan.source()
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
            for node in (n for n in ast.walk(piece.node) if isinstance(n, ast.Call) and piece.span(n) in self.calls):
                called = Rewriter(self, piece).callee(node.func)  # type: ignore[arg-type]
                if any(called is rule for rule in reached.rules):
                    self.handled.setdefault(piece.span(node), ())
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
        """The axes of each map, the outermost one first; those that fill the mesh together, as far as no array has two."""
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


# ------------------------------------------------------------------------ all constructions


@dataclasses.dataclass
class Draft:
    """The edits for one construction while those of others are compared with it."""

    construction: Construction
    site: Site | None = None
    made: InPlace | None = None
    refused: str | None = None
    assignment: str = ""
    note: str = ""


def edits_of(constructions: Sequence[Construction], *, root: str, assignment: int | None = None) -> Edited:
    """The edits for the constructions that a program made, in files under ``root``.

    Args:
      assignment: which one to keep where functions are mapped with several ``axis_resources``; they count from 1.
    """
    drafts = [Draft(c) for c in constructions]
    for draft in drafts:
        draft.refused = _refusal(lambda draft=draft: _find(draft, root))
    outermost = frozenset(d.site.piece.span(d.site.call) for d in drafts if d.site and not _is_nested(d.construction))
    for draft in drafts:
        if draft.refused is None and not _is_nested(draft.construction):
            draft.refused = _refusal(lambda draft=draft: _draw(draft, drafts, root, outermost))
    _choose(drafts, assignment)
    return _finished(drafts, root)


def _refusal(step: Any) -> str | None:
    try:
        step()
    except NotWritable as reason:
        return str(reason)
    return None


def _is_nested(construction: Construction) -> bool:
    return bool(construction.plans) and all(p.staged.placed.nested for p in construction.plans)


def _find(draft: Draft, root: str) -> None:
    """Find the call of xmap, and refuse what cannot be edited whatever it computes."""
    c = draft.construction
    if not is_under(c.file, root):
        raise NotWritable(f"{os.path.basename(c.file)} belongs to another package: change it there")
    if not c.plans:
        raise NotWritable("the program never calls it: run the program so that it does")
    declared = c.function.plan.declared
    fun = getattr(declared.fun, "__wrapped__", declared.fun)
    draft.site = site_of(c.file, c.line, c.column, globals_of(c.file, [fun] if hasattr(fun, "__code__") else []))
    if any(other.plan.declared.key() != declared.key() for other in c.others):
        raise NotWritable("this line makes xmaps that differ in their axes: write one call of xmap for each")
    unknown = draft.site.given.keys() - {"fun", "in_axes", "out_axes", "axis_sizes", "axis_resources", "donate_argnums"}
    if unknown:
        raise NotWritable(f"the argument {min(unknown)} of xmap, which jax.jit does not have")
    draft.assignment = (
        ", ".join(f"{n} on {' and '.join(map(str, r))}" for n, r in declared.resources.items()) or "no mesh"
    )
    if not _jax.part_is_on("frames"):
        raise NotWritable("this JAX does not say which calls made an operation, or XMAP_COMPAT_PUBLIC is set")


def _draw(draft: Draft, drafts: Sequence[Draft], root: str, outermost: frozenset[Span]) -> None:
    """The edits of a construction, which must be the same for each of its calls."""
    made = [_drawn(draft, plan, drafts, root, outermost) for plan in draft.construction.plans]
    if any(m.edits != made[0].edits for m in made):
        raise NotWritable("its calls need different texts, as their meshes or sizes differ: write one xmap for each")
    draft.made = made[0]


def _drawn(draft: Draft, plan: Any, drafts: Sequence[Draft], root: str, outermost: frozenset[Span]) -> InPlace:
    site, c = draft.site, draft.construction
    assert site is not None
    made = InPlace(plan, root, outermost)
    if made.only_values and c.differentiated:
        raise NotWritable(
            "gradients of it are taken inside and outside, and a backward rule or contraction over its axes needs another "
            "text for each: write two functions"
        )
    clashing = [n for n in made.names.mesh if n in made.names.order and made.names.parts(n) != (n,)]
    if clashing:
        raise NotWritable(
            f"the axis {clashing[0]} has the name of a mesh axis that is another one: a place that is missed would "
            f"compute other numbers without an error. Rename the axis, e.g. to {clashing[0]}s"
        )
    declared = c.function.plan.declared
    reached = Reached(declared.fun, root)
    made.functions(reached)
    bodies = [(piece.file, *piece.bounds(piece.node)) for piece in reached.pieces()]
    for other in (d for d in drafts if d.site is not None and _is_nested(d.construction)):
        (start, end), file = other.site.piece.bounds(other.site.call), other.site.piece.file
        if any(name == file and a <= start and end <= b for name, a, b in bodies):
            other.note = f"in the body of the one at {os.path.basename(c.file)}:{c.line}"
        elif any(x is other.construction.function for x in reached.nested):
            inner = other.construction.function.plan.declared
            text = vmaps(made, "function", inner.in_source, inner.out_source, dict(inner.resources))  # type: ignore[arg-type]
            _replace(other.site, text, made)
            other.note = f"in the body of the one at {os.path.basename(c.file)}:{c.line}"
    donated = site.given.get("donate_argnums")
    more = f", donate_argnums={ast.unparse(donated)}" if donated is not None else ""
    _replace(site, f"jax.jit({made.mapped(declared)}{more})", made)
    return made


def _replace(site: Site, text: str, made: InPlace) -> None:
    """Replace a call of xmap, with the edits in its function."""
    fun, file, edits = site.given.get("fun"), site.piece.file, made.edits
    start, end = site.piece.bounds(site.call)
    inner = [(s, e, new) for (name, s, e), new in edits.items() if name == file]
    function = "function" if fun is None else spliced(site.piece.text, inner, *site.piece.bounds(fun))
    for key in [key for key in edits if key[0] == file and start <= key[1] and key[2] <= end]:
        del edits[key]
    marked = ours(text).replace(f"{OURS}function", function)
    edits[file, start, end] = f"{'lambda function: ' * (fun is None)}{marked}"
    made.replaced.add((file, start, end))


def _choose(drafts: Sequence[Draft], assignment: int | None) -> None:
    """Refuse constructions that need different texts of one function, but for the chosen assignment."""
    drawn = [d for d in drafts if d.made is not None]
    kinds = list(dict.fromkeys(d.assignment for d in drafts if d.assignment))
    shown = "; ".join(f"{k}: {kind}" for k, kind in enumerate(kinds, 1))
    chosen = kinds[assignment - 1] if assignment is not None and 0 < assignment <= len(kinds) else None
    clashes = [(a, b) for k, a in enumerate(drawn) for b in drawn[k + 1 :] if (_clash(a.made, b.made))]
    for pair in clashes:
        for draft, other in (pair, pair[::-1]):
            if chosen is None or draft.assignment != chosen:
                where = f"{os.path.basename(other.construction.file)}:{other.construction.line}"
                draft.refused = (
                    f"it shares a function with the xmap at {where}, which needs another text of it. The assignments are "
                    f"{shown}: choose one with --assignment, or write one function for each"
                )


def _clash(a: InPlace, b: InPlace) -> bool:
    overlaps = lambda x, y: x[0] == y[0] and x[1] < y[2] and y[1] < x[2]  # noqa: E731
    if any(overlaps(x, y) and (x != y or a.edits[x] != b.edits[y]) for x in a.edits for y in b.edits):
        return True
    named = a.names.mesh.keys() & b.names.mesh.keys()
    if "axes_of" not in {*a.helpers} & {*b.helpers}:
        spans = a.handled.keys() & b.handled.keys()
        named &= {n for s in spans for n in a.handled[s]} & {n for s in spans for n in b.handled[s]}
    return any(a.names.parts(n) != b.names.parts(n) for n in named)


def _finished(drafts: Sequence[Draft], root: str) -> Edited:
    """The edits of all constructions that are not refused, with the names that their files have for what they use."""
    kept = [d for d in drafts if d.made is not None and d.refused is None]
    helper_file = _helper_file(root)
    module = os.path.splitext(os.path.basename(helper_file))[0]
    paths = {os.path.realpath(file) for d in drafts if d.site for file in (d.construction.file,)}
    paths |= {os.path.realpath(key[0]) for d in kept for key in d.made.edits}
    paths |= {
        os.path.realpath(f) for f in map(file_of, list(sys.modules.values())) if f.endswith(".py") and is_under(f, root)
    }
    files = {path: File(path) for path in sorted(paths)} if kept else {}
    names = {path: of_files.FileNames(file, module) for path, file in files.items()}
    places: dict[int, dict[str, list[tuple[int, int, str]]]] = {}
    for draft in kept:
        own = places[id(draft)] = defaultdict(list)
        for (name, start, end), text in draft.made.edits.items():
            file = files[path := os.path.realpath(name)]
            resolved = re.sub(rf"{OURS}(\w+)", lambda m, path=path: names[path].name(m[1]), text)
            if (name, start, end) in draft.made.replaced:
                line = file.text[file.text.rfind("\n", 0, start) + 1 :]
                resolved = laid_out(resolved, len(line) - len(line.lstrip()))
            own[path].append((start, end, resolved))
    shared = []
    for path, file in files.items():
        mine = [e for own in places.values() for e in own[path]]
        shared += [(path, *file.edit(*e)) for e in of_files.Shared(file, names[path]).finished(mine)]
    outcomes = tuple(_outcome(d, files, places.get(id(d), {})) for d in drafts)
    helpers = dict.fromkeys(h for d in kept for h in d.made.helpers)
    parts = {name: axes for d in kept for name, axes in d.made.names.all.items()}
    text = helper_module(helpers, parts) if helpers else ""
    return Edited(outcomes, tuple(Edit(*e) for e in dict.fromkeys(shared)), text, helper_file)


def _outcome(draft: Draft, files: Mapping[str, File], places: Mapping[str, Sequence[tuple[int, int, str]]]) -> Outcome:
    edits = [Edit(path, *files[path].edit(*e)) for path, own in places.items() for e in own]
    if draft.site is not None and edits:
        path, bounds = os.path.realpath(draft.site.piece.file), draft.site.piece.bounds(draft.site.call)
        start, end, _ = files[path].edit(*bounds, "")
        edits.sort(key=lambda e: (e.file, e.start, e.end) != (path, start, end))
    refused, note = draft.refused, draft.note
    if draft.made is None and refused is None and not note:
        refused = "it is called in the body of an xmap that stays"
    if draft.made is not None and draft.made.unchecked:
        note = f"unchecked: {draft.made.unchecked}"
    decorates = draft.site is not None and "fun" not in draft.site.given
    return Outcome(draft.construction, () if refused else tuple(edits), refused, note, decorates)


def _helper_file(root: str) -> str:
    """A file beside the program whose name is free."""
    names = ("named_axes", *(f"named_axes_{k}" for k in range(2, 1000)))
    paths = (os.path.join(os.path.realpath(root), f"{name}.py") for name in names)
    return next(path for path in paths if not os.path.exists(path))
