"""The edits of a program's own files that replace its xmaps by plain JAX."""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
from collections.abc import Callable, Sequence, Set
from typing import Any

from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.construction import Construction, Edited, Entered
from xmap_compat.tools.leave.in_place import TOKENS, InPlace, decorators, laid_out
from xmap_compat.tools.leave.old_check.fix import Edit
from xmap_compat.tools.leave.old_check.names import first_line
from xmap_compat.tools.leave.places import Reached, Site, check_dropped, is_under, site_of
from xmap_compat.tools.leave.shared import FileNames, Shared
from xmap_compat.tools.leave.verifying import in_a_line
from xmap_compat.tools.source.helper_texts import helper_lines
from xmap_compat.tools.source.imports import file_of, imports_for
from xmap_compat.tools.source.nested import vmaps
from xmap_compat.tools.source.rewrite import OURS, ours
from xmap_compat.tools.source.text import Names, NotWritable, module_text
from xmap_compat.tools.source.user_code import file_at, spliced

ARGUMENTS = {"fun", "in_axes", "out_axes", "axis_sizes", "axis_resources", "donate_argnums"}
ABOUT_HELPERS = "What the program needs of named axes, and plain JAX lacks."


def edits_of(
    cs: Sequence[Construction], *, root: str, entered: Set[Entered], beside: str = "", assignment: int | None = None
) -> Edited:
    """The edits for the constructions that a program made, in files under ``root``.

    Args:
      entered: where the program has entered meshes.
      beside: the folder for a file of helpers, if it is not ``root``.
      assignment: which one to keep where functions are mapped with several ``axis_resources``; they count from 1.
    """
    for c in (c for c in cs if not c.refused):
        _or_refuse(c, _find, root)
    for c in (c for c in cs if not (c.refused or c.is_nested)):
        _or_refuse(c, _draw, cs, root)
    inside = [rule for c in cs if c.made and c.made.only_values for rule in c.made.custom]
    for c in (c for c in cs if c.made and c.made.rules):
        if any(rule is other for rule in c.made.custom for other in inside):  # a rule has one text
            _or_refuse(c, functools.partial(_draw, keeps_rules=True), cs, root)
    _choose(cs, assignment)
    _keep_what_stays(cs, root, assignment is not None)
    return _finished(cs, root, beside or root, entered)


def _or_refuse(c: Construction, step: Callable[..., None], *args: Any) -> None:
    try:
        step(c, *args)
    except Exception as error:
        c.refused = str(error) if isinstance(error, NotWritable) else messages.FAILED.format(error=in_a_line(error))


def _find(c: Construction, root: str) -> None:
    """Find the call of xmap, and refuse what cannot be edited whatever it computes."""
    if not os.path.isabs(c.file):
        raise NotWritable(messages.GENERATED_CODE.format(file=c.file))
    if not is_under(c.file, root):
        raise NotWritable(messages.OF_ANOTHER_PACKAGE.format(file=c.file))
    if not c.plans:
        raise NotWritable(c.problem or messages.NEVER_CALLED)
    declared, *others = (function.plan.declared for function in c.functions)
    c.site = site_of(c)
    if any(other.key() != declared.key() for other in others):
        raise NotWritable(messages.DIFFERENT_AXES)
    if unknown := c.site.given.keys() - ARGUMENTS:
        raise NotWritable(messages.UNKNOWN_ARGUMENT.format(min(unknown)))
    placed = (f"{name} on {' and '.join(map(str, axes))}" for name, axes in declared.resources.items())
    c.assignment = ", ".join(placed) or "no mesh"


def _draw(c: Construction, cs: Sequence[Construction], root: str, keeps_rules: bool = False) -> None:
    """The edits of a construction, which must be the same for each of its calls.

    Args:
      keeps_rules: whether its backward rules stay as they are, for gradients that another one takes inside.
    """
    c.made = None
    made_here = frozenset(c.site.piece.span(c.site.call) for c in cs if c.site)
    first, *others = [_drawn(cs, root, c, InPlace(plan, c.plans, made_here, keeps_rules)) for plan in c.plans]
    if any(other.edits != first.edits for other in others):
        raise NotWritable(messages.DIFFERENT_TEXTS)
    check_dropped(c.site)
    if "axes_of" in first.helpers and (objects := [n for n in first.names.all if not isinstance(n, str)]):
        raise NotWritable(messages.NO_STRING.format(name=objects[0]))
    c.made = first


def _drawn(cs: Sequence[Construction], root: str, c: Construction, made: InPlace) -> InPlace:
    if "Explicit" in str(getattr(made.plan.mesh, "axis_types", "")):
        raise NotWritable(messages.EXPLICIT)
    if made.only_values and c.differentiated:
        raise NotWritable(messages.INSIDE_AND_OUTSIDE)
    if clashing := [n for n in made.names.mesh if n in made.names.order and made.names.parts(n) != (n,)]:
        raise NotWritable(messages.NAME_OF_A_MESH_AXIS.format(name=clashing[0]))
    declared = c.functions[0].plan.declared
    reached = Reached([function.plan.declared.fun for function in c.functions], root)
    made.functions(reached)
    bodies = reached.parts()
    for other in (other for other in cs if other.site and other.is_nested):
        (start, end), file, function = other.site.bounds, other.site.piece.file, other.functions[0]
        in_body = any(name == file and a <= start and end <= b for name, a, b in bodies)
        if in_body or any(x is function for x in reached.nested):
            inner = function.plan.declared
            if why := other.refused or "leave out its axis_sizes" * bool(inner.sizes):
                raise NotWritable(f"an xmap in its body, {other.where}: {why}")
            text = vmaps(made, "function", inner.in_source, inner.out_source, dict(inner.resources))
            check_dropped(other.site)
            _replace(other.site, text, made, splits=in_body)
            made.around.append(other)
    donated, text = c.site.given.get("donate_argnums"), made.mapped(declared, c.globals)
    more = f", donate_argnums={ast.unparse(donated)}" if donated is not None else ""
    is_jitted = re.search(r"\bjax\.jit(\(\s*|\s+@)$", c.site.piece.text[: c.site.bounds[0]])
    _replace(c.site, text if is_jitted and not more and text != "function" else f"jax.jit({text}{more})", made)
    return made


def _replace(site: Site, text: str, made: InPlace, splits: bool = False) -> None:
    """Replace a call of xmap, with the edits in its function; or, if it is to be split, what is around that."""
    fun, file, (start, end) = site.given.get("fun"), site.piece.file, site.bounds
    if splits and fun is not None:
        (first, last), (before, after) = site.piece.bounds(fun), ours(text).split(f"{OURS}function")
        made.edits |= {(file, start, first): before, (file, last, end): after}
        return
    inner = [(s, e, new) for (name, s, e), new in made.edits.items() if name == file]
    function = "function" if fun is None else spliced(site.piece.text, inner, *site.piece.bounds(fun))
    for key in [key for key in made.edits if key[0] == file and start <= key[1] and key[2] <= end]:
        del made.edits[key]
    marked = ours(text).replace(f"{OURS}function", function)
    if site.decorates:
        marked = _next(site.piece.text, start).join(decorators(marked))
    elif fun is None:
        marked = f"lambda function: {marked}"
    made.edits[file, start, end] = marked
    made.replaced.add((file, start, end))


def _next(text: str, start: int) -> str:
    """What is between the decorator at a place and the next one."""
    before = text[text.rfind("\n", 0, start) + 1 : start]
    return f"\n{before[: len(before) - len(before.lstrip())]}@"


# ------------------------------------------------------------------ what constructions share


def _choose(cs: Sequence[Construction], assignment: int | None) -> None:
    """Refuse constructions that need different texts of one function, but for the chosen assignment."""
    kinds = list(dict.fromkeys(c.assignment for c in cs if c.assignment))
    chosen = kinds[assignment - 1] if assignment is not None and 0 < assignment <= len(kinds) else None
    drawn = [c for c in cs if c.made]
    for c in drawn:
        for other in drawn:
            if c is not other and c.assignment != chosen and (clash := _clash(c.made, other.made)):
                both = (f"{k}: {kind}" for k, kind in enumerate(kinds, 1) if kind in (c.assignment, other.assignment))
                what = messages.CHOOSE if chosen is None else messages.CHOSEN.format(assignment)
                why, name = clash
                c.refused = why.format(name=name, where=other.where, kinds="; ".join(both), what=what)


def _clash(a: InPlace, b: InPlace) -> tuple[str, str] | None:
    """Why two constructions cannot both be edited, and for the sake of which axis, if it is one; None if they can."""
    overlaps = lambda x, y: x[0] == y[0] and x[1] < y[2] and y[1] < x[2]  # noqa: E731
    if any(overlaps(x, y) and (x != y or a.edits[x] != b.edits[y]) for x in a.edits for y in b.edits):
        return messages.SHARES, ""
    named = a.names.mesh.keys() & b.names.mesh.keys()
    if "axes_of" not in {*a.helpers} & {*b.helpers}:
        spans = a.handled.keys() & b.handled.keys()
        named &= {n for s in spans for n in a.handled[s]} & {n for s in spans for n in b.handled[s]}
    apart = sorted(str(n) for n in named if a.names.parts(n) != b.names.parts(n))
    return (messages.SHARES_A_NAME, apart[0]) if apart else None


def _keep_what_stays(cs: Sequence[Construction], root: str, is_chosen: bool) -> None:
    """Refuse edits of functions that an xmap which stays may call, unless the user has chosen between the two."""
    pending = [c for c in cs if c.refused and not (is_chosen and c.made)]
    while pending:
        stays = pending.pop()
        parts = Reached([f.plan.declared.fun for f in stays.functions], root).parts()
        for c in (c for c in cs if c.made and not c.refused):
            edits = c.made.edits.keys() - c.made.replaced
            if any(name == file and a < end and start < b for name, start, end in edits for file, a, b in parts):
                c.refused = messages.SHARES_WITH_ONE_THAT_STAYS.format(where=stays.where)
                pending.append(c)


# ---------------------------------------------------------------------------- whole files


def _finished(cs: Sequence[Construction], root: str, beside: str, entered: Set[Entered]) -> Edited:
    """The edits of constructions that are kept, with the names that their files have for what they use."""
    kept = [c for c in cs if c.made and not c.refused]
    for c in cs:
        is_edited = any(c in other.made.around for other in kept) and not any(cs[n].refused for n in c.inside)
        if not (c.refused or c in kept or is_edited):
            c.refused = messages.IN_ONE_THAT_STAYS
    module = Names(name.partition(".")[0] for name in os.listdir(beside)).like("named_axes")
    paths = {c.file for c in cs if c.site} | {key[0] for c in kept for key in c.made.edits}
    paths |= {f for f in map(file_of, list(sys.modules.values())) if f.endswith(".py") and is_under(f, root)}
    read = sorted({os.path.realpath(path) for path in paths if os.path.getsize(path)}) if kept else ()
    files = {path: file_at(path, path) for path in read}
    names = {path: FileNames(file.tree, module) for path, file in files.items()}
    for c in kept:
        first, c.decorates = (c.site.piece.file, *c.site.bounds), "fun" not in c.site.given
        for key, text in sorted(c.made.edits.items(), key=lambda edit: edit[0] != first):
            path, (_, start, end) = os.path.realpath(key[0]), key
            whole, new = files[path].text, _resolved(text, names[path])
            if key in c.made.replaced:
                line, between = whole[whole.rfind("\n", 0, start) + 1 :], _next(whole, start)
                indent = len(line) - len(line.lstrip())
                new = between.join(laid_out(part, indent) for part in new.split(between))
            c.edits.append((path, Edit(_position(whole, start), _position(whole, end), new)))
            kept_there, before = ([t[0] for t in TOKENS.finditer(s) if t[0][0] == "#"] for s in (new, whole[start:end]))
            if lost := [comment for comment in before if comment not in kept_there]:
                c.edits.append((path, _above(files[path].tree, c.edits[-1][1].start, lost)))
    edited = {path: Shared(file, names[path], entered) for path, file in files.items()}
    shared = []
    for path, shared_by in edited.items():
        shared_by.edit([edit for c in kept for name, edit in c.edits if name == path])
    for path, shared_by in edited.items():
        elsewhere = set[str]().union(*(other.taken for other in edited.values() if other is not shared_by))
        shared += [(path, edit) for edit in shared_by.finished(elsewhere)]
    helpers = dict.fromkeys(h for c in kept for h in c.made.helpers)
    parts = {name: axes for c in kept if "axes_of" in c.made.helpers for name, axes in c.made.names.all.items()}
    lines = helper_lines(helpers, parts)
    text = module_text([ABOUT_HELPERS], imports_for(lines), lines) if helpers else ""
    left = [name for whole in edited.values() for name in whole.left]
    return Edited(list(cs), shared, text, os.path.join(beside, f"{module}.py"), left=left)


def _above(tree: ast.Module, place: tuple[int, int], comments: Sequence[str]) -> Edit:
    """The edit that puts comments above the innermost statement at a place."""
    holds = lambda n: (first_line(n), 0) <= place < (n.end_lineno, n.end_col_offset)  # noqa: E731
    statement = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and holds(n)][-1]
    at, indent = (first_line(statement), 0), " " * statement.col_offset
    return Edit(at, at, "".join(f"{indent}{comment}\n" for comment in comments))


def _resolved(text: str, names: FileNames) -> str:
    return re.sub(rf"{OURS}(\w+)", lambda found: names.name(found[1]), text)


def _position(text: str, k: int) -> tuple[int, int]:
    """The line of a character, and its column in bytes: what ``user_code.offset`` is the inverse of."""
    return text.count("\n", 0, k) + 1, len(text[text.rfind("\n", 0, k) + 1 : k].encode())
