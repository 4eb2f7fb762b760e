"""The edits of a program's own files that replace its xmaps by plain JAX."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from xmap_compat import _jax
from xmap_compat.tools.leave import shared as of_files
from xmap_compat.tools.leave.in_place import InPlace, laid_out
from xmap_compat.tools.leave.places import File, Reached, Site, globals_of, is_under, read, site_of
from xmap_compat.tools.source.helper_texts import helper_module
from xmap_compat.tools.source.imports import file_of
from xmap_compat.tools.source.nested import vmaps
from xmap_compat.tools.source.rewrite import OURS, ours
from xmap_compat.tools.source.text import NotWritable
from xmap_compat.tools.source.user_code import Span, spliced

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


# ------------------------------------------------------------------------ all constructions


@dataclasses.dataclass
class Draft:
    """The edits for one construction while those of others are compared with it."""

    construction: Construction
    site: Any = None  # a Site, once it is found
    made: Any = None  # an InPlace, unless it is refused
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
    inside = [rule for d in drafts if d.made is not None and d.made.only_values for rule in d.made.custom]
    for draft in (d for d in drafts if d.made is not None and d.made.rules):
        if any(rule is other for rule in draft.made.custom for other in inside):  # a rule has one text
            draft.refused = _refusal(lambda draft=draft: _draw(draft, drafts, root, outermost, keeps_rules=True))
    _choose(drafts, assignment)
    _keep_what_stays(drafts, root, assignment is not None)
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


def _draw(
    draft: Draft, drafts: Sequence[Draft], root: str, outermost: frozenset[Span], keeps_rules: bool = False
) -> None:
    """The edits of a construction, which must be the same for each of its calls.

    Args:
      keeps_rules: whether its backward rules stay as they are, for gradients that another one takes inside.
    """
    draft.made, plans = None, draft.construction.plans
    made = [_drawn(draft, InPlace(plan, root, outermost, keeps_rules), drafts, root) for plan in plans]
    if any(m.edits != made[0].edits for m in made):
        raise NotWritable("its calls need different texts, as their meshes or sizes differ: write one xmap for each")
    draft.made = made[0]


def _drawn(draft: Draft, made: InPlace, drafts: Sequence[Draft], root: str) -> InPlace:
    site, c = draft.site, draft.construction
    assert site is not None
    if made.only_values and c.differentiated:
        raise NotWritable(
            "gradients are taken inside (of it, or of an xmap with the same rules) and of it from outside, and a "
            "backward rule or contraction over its axes needs another text for each: write two functions"
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
                    f"it shares a function with the xmap at {where}, which needs another text of it. Assignments: "
                    f"{shown}: choose one with --assignment, or write one function for each"
                )


def _keep_what_stays(drafts: Sequence[Draft], root: str, is_chosen: bool) -> None:
    """Refuse edits of functions that an xmap which stays may call, unless the user has chosen between the two."""
    pending = [d for d in drafts if d.refused is not None and not (is_chosen and d.made is not None)]
    while pending:
        stays = pending.pop().construction
        parts = _parts(getattr(stays.function, "plan", None), root)
        for draft in (d for d in drafts if d.made is not None and d.refused is None):
            edits = [e for e in draft.made.edits if e not in draft.made.replaced]
            if any(name == file and a < end and start < b for name, start, end in edits for file, a, b in parts):
                where = f"{os.path.basename(stays.file)}:{stays.line}"
                draft.refused = f"it shares a function with the xmap at {where}, which stays: write one for each"
                pending.append(draft)


def _parts(plan: Any, root: str) -> list[tuple[str, float, float]]:
    """The parts of files that an xmap reaches."""
    reached = Reached(plan.declared.fun, root) if plan is not None else None
    try:
        return [(piece.file, *piece.bounds(piece.node)) for piece in reached.pieces()] if reached else []
    except NotWritable:  # text that cannot be read: perhaps all of it
        return [(code.co_filename, 0, float("inf")) for code in reached.functions] if reached else []


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
            resolved = _resolved(text, names[path])
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
    by_name = [d.made for d in kept if "axes_of" in d.made.helpers]
    parts = {name: axes for made in by_name for name, axes in made.names.all.items()}
    text = helper_module(helpers, parts) if helpers else ""
    return Edited(outcomes, tuple(Edit(*e) for e in dict.fromkeys(shared)), text, helper_file)


def _resolved(text: str, names: of_files.FileNames) -> str:
    return re.sub(rf"{OURS}(\w+)", lambda found: names.name(found[1]), text)


def _outcome(draft: Draft, files: Mapping[str, File], places: Mapping[str, Sequence[tuple[int, int, str]]]) -> Outcome:
    edits = [Edit(path, *files[path].edit(*e)) for path, own in places.items() for e in own]
    if draft.site is not None and edits:
        path, bounds = os.path.realpath(draft.site.piece.file), draft.site.piece.bounds(draft.site.call)
        start, end, _ = files[path].edit(bounds[0], bounds[1], "")
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
