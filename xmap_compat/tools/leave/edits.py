"""The edits of a program's functions, which the first run makes: ``mapped`` for ``xmap``, and names
in collectives.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from xmap_compat import _jax
from xmap_compat.core import undeclared
from xmap_compat.core.names import Checker
from xmap_compat.core.parameters import mentioned_names
from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.comparing import in_a_line
from xmap_compat.tools.leave.construction import Change, Construction, Edited, Place, Spot
from xmap_compat.tools.leave.helper_texts import HELPERS, helper_file
from xmap_compat.tools.leave.places import Reached, file_of, is_under, unmade, xmap_at
from xmap_compat.tools.leave.recipe import recipe_of
from xmap_compat.tools.leave.rewrite import Rewriter
from xmap_compat.tools.leave.rewriting import AxisNames, Parts, Rewriting
from xmap_compat.tools.leave.text import OURS, NotWritable, fresh
from xmap_compat.tools.leave.user_code import Piece, calls_of_collectives, collectives


@dataclasses.dataclass
class _Function:
    """A function of the user that xmaps reach.

    Attributes:
      reached_by: these xmaps.
      changes: its edits, with the indices of the calls that they are in.
      why_not: why it cannot be edited.
    """

    code: types.CodeType
    piece: Piece
    reached_by: list[Construction]
    changes: list[Change] = dataclasses.field(default_factory=list)
    places: frozenset[int] = frozenset()
    why_not: str = ""


def edits_of(
    cs: Sequence[Construction], *, root: str, beside: str = "", generated: Collection[str] = ()
) -> Edited:
    """The edits for the constructions that a program made, in files under ``root``.

    Args:
      beside: the folder for the helper file, if it is not ``root``.
      generated: files there that the program itself has written.
    """
    is_own = lambda file: is_under(file, root) and os.path.realpath(file) not in generated  # noqa: E731
    cs = [*cs, *unmade(cs, is_own)]
    for c in cs:
        _or_refuse(c, _find, is_own)
    reached = {
        c: Reached([*(f.plan.declared.fun for f in c.functions), *c.given], is_own) for c in cs
    }
    functions, unread = _functions(reached)
    names = _names(_ways(c for c in cs if not c.refused))
    placed = [p for c in cs for p in c.placed]
    jaxprs = [p.program.jaxpr for p in placed]
    known = frozenset().union(*(of.names for of in reached.values()))
    rewriting = Rewriting(names, calls_of_collectives(jaxprs), functions=known)
    _rewrite(functions, rewriting)
    for c in cs:
        c.refused = c.refused or unread.get(c, "")
        c.refused = c.refused or next(
            (f.why_not for f in functions if f.why_not and c in f.reached_by), ""
        )
        _or_refuse(c, _check, rewriting, names, functions)
    _keep_what_stays(cs, functions)
    for c in cs:
        own = [f for f in functions if c in f.reached_by]
        c.changes = [change for f in own for change in f.changes]
        c.places = frozenset().union(*(f.places for f in own))
        of_last = [
            f.plan.declared for f in c.functions[-1:] if hasattr(f.plan.declared, "resources")
        ]
        last, own_parts = c.placed[-1] if c.placed else None, _choices([c] * (not c.refused), names)
        parts = {name: of[0] for name, of in own_parts.items() if len(of) == 1}
        c.recipe = [line for declared in of_last for line in recipe_of(declared, last, parts)]
        c.change = c.change and c.change._replace(file=os.path.realpath(c.file))
        c.changes = [change._replace(file=os.path.realpath(change.file)) for change in c.changes]
    folder = beside or root
    module = fresh("named_axes", {name.partition(".")[0] for name in os.listdir(folder)})
    kept = [change.text for c in cs if not c.refused for change in c.changes]
    files = {
        os.path.realpath(f)
        for f in map(file_of, list(sys.modules.values()))
        if f.endswith(".py") and is_own(f)
    }
    files |= {
        change.file for c in cs if not c.refused for change in (c.change, *c.changes) if change
    }
    return Edited(
        list(cs),
        places=rewriting.places,
        files=sorted(f for f in files if os.path.getsize(f)),
        helpers=helper_file(
            [name for name in HELPERS if any(OURS + name in text for text in kept)], names.choices
        ),
        helper_file=os.path.join(folder, f"{module}.py"),
        of_one_name=[name for name in names.choices if name in names.mesh_axes],
        unedited=_unedited(functions, names),
    )


def _or_refuse(c: Construction, step: Any, *args: Any) -> None:
    try:
        if not c.refused:
            step(c, *args)
    except Exception as error:
        c.refused = (
            str(error)
            if isinstance(error, NotWritable)
            else messages.FAILED.format(error=in_a_line(error))
        )


def _find(c: Construction, is_own: Callable[[str], bool]) -> None:
    """Find the call of xmap, and refuse what cannot be edited whatever it computes."""
    if not is_own(c.file):
        raise NotWritable(messages.NOT_OF_THE_PROGRAM.format(file=c.file))
    if c.problem and not c.placed:
        raise NotWritable(c.problem)
    c.change = xmap_at(c, any(any(placed.undeclared) for placed in c.placed))
    for placed in c.placed:
        if named := [
            loop
            for p in placed.placements.values()
            for loop in p.loops
            if not isinstance(loop, tuple)
        ]:
            raise NotWritable(messages.NAMED_LOOP.format(name=named[0]))
        if "Explicit" in str(getattr(placed.scope.mesh, "axis_types", "")):
            raise NotWritable(messages.EXPLICIT)


# ------------------------------------------------------------------------------ names of axes


def _ways(cs: Iterable[Construction]) -> dict[Any, dict[Parts, None]]:
    """The mesh axes that split each axis of xmaps, in each way."""
    found: dict[Any, dict[Parts, None]] = {}
    for declared in (function.plan.declared for c in cs for function in c.functions):
        for name in declared.names:
            entries = declared.resources.get(name, ())
            found.setdefault(name, {})[
                tuple(entry for entry in entries if not hasattr(entry, "length"))
            ] = None
    return found


def _names(ways: Mapping[Any, Iterable[Parts]]) -> AxisNames:
    """What executes each axis: each way has its own name for the elements of a device, and none
    stands for another.
    """
    mesh_axes = frozenset(m for of in ways.values() for across in of for m in across)
    choices = {
        name: [
            (*across, f"{name}_local" + f"_{k}" * (k > 1))
            if across or name in mesh_axes
            else (name,)
            for k, across in enumerate(sorted(of, key=len, reverse=True), 1)
        ]
        for name, of in ways.items()
    }
    return AxisNames(choices, mesh_axes)


def _choices(cs: Iterable[Construction], names: AxisNames) -> dict[Any, list[Parts]]:
    """What executes each axis of xmaps."""
    return {
        name: [p for p in names.choices[name] if p[:-1] in of] for name, of in _ways(cs).items()
    }


def _unedited(functions: Sequence[_Function], names: AxisNames) -> list[Place]:
    """Collectives over axes that are split, beside edited functions, in functions that no xmap of
    this run reaches.
    """
    places: list[Place] = []
    for piece in {f.piece.file: f.piece for f in functions if f.changes}.values():
        calls = (
            n
            for n in piece.bindings.nodes
            if isinstance(n, ast.Call) and _is_over_split_axes(piece, n, names)
        )
        unread = (c for c in calls if not any(f.piece.holds(piece.span(c)) for f in functions))
        places.extend((piece.file, call.lineno, call.col_offset) for call in unread)
    return places


def _is_over_split_axes(piece: Piece, call: ast.Call, names: AxisNames) -> bool:
    called = (
        piece.bindings.dotted(call.func),
        piece.bindings.dotted(call),
    )  # also functools.partial(lax.psum, ...)
    held = (
        n.value
        for of in (*call.args, *call.keywords)
        for n in ast.walk(of)
        if isinstance(n, ast.Constant)
    )
    takes_axes = any(name.startswith(("jax.lax.", "jax.numpy.", "jax.nn.")) for name in called)
    return takes_axes and any(v in names.choices and not names.stays(v) for v in held)


# ---------------------------------------------------------------------------------- functions


def _functions(
    reached: dict[Construction, Reached],
) -> tuple[list[_Function], dict[Construction, str]]:
    """The functions that xmaps reach, the innermost ones first, and why those of some cannot be
    read.
    """
    found: dict[types.CodeType, _Function] = {}
    unread: dict[Construction, str] = {}
    for c, of in reached.items():
        for code, values in of.functions.items():
            try:
                if code not in found:
                    found[code] = _Function(code, of.piece(values), [])
                found[code].reached_by.append(c)
            except NotWritable as reason:
                if any(
                    name in code.co_names for name in dir(sys.modules["jax.lax"])
                ):  # it may have collectives
                    unread[c] = str(reason)
    functions = sorted(found.values(), key=lambda f: f.piece.node.end_lineno - f.piece.node.lineno)
    for inner in functions:
        for outer in functions:
            if outer is not inner and outer.piece.holds(inner.piece.span(inner.piece.node)):
                inner.reached_by += [c for c in outer.reached_by if c not in inner.reached_by]
    return functions, unread


def _rewrite(functions: Sequence[_Function], rewriting: Rewriting) -> None:
    """Edit each function; what is in an inner function is edited there, where more names are
    known.
    """
    done: list[tuple[str, Spot, Spot]] = []
    names = rewriting.names
    for function in functions:
        piece, before = function.piece, len(rewriting.places)
        choices = _choices([c for c in function.reached_by if not c.refused], names)
        rewriting.names = dataclasses.replace(names, choices=choices)
        try:
            for start, end, text in Rewriter(rewriting, piece).edits():
                if not any(file == piece.file and a <= start and end <= b for file, a, b in done):
                    function.changes.append(Change(piece.file, start, end, text))
        except NotWritable as reason:
            function.why_not = str(reason)
        done.append((piece.file, *piece.bounds(piece.node)))
        function.places = frozenset(range(before, len(rewriting.places)))
    rewriting.names = names


def _check(
    c: Construction, rewriting: Rewriting, names: AxisNames, functions: Sequence[_Function]
) -> None:
    """Refuse a construction whose collectives are not all found, or whose names mean others'
    axes.
    """
    own = _choices([c], names)
    meshes = {m for p in c.placed if p.scope.mesh is not None for m in p.scope.mesh.axis_names}
    if clash := [
        p[-1]
        for n, of in own.items()
        for p in of
        if p != (n,) and (p[-1] in own or p[-1] in meshes)
    ]:
        raise NotWritable(messages.TAKEN.format(name=clash[0]))
    for placed in c.placed:
        _check_mesh_axes(placed)
        for eqn, stack, spans in collectives(placed.program.jaxpr):
            primitive, over = eqn.primitive.name, mentioned_names(eqn.params)
            if eqn.params.get("axis_index_groups") is not None:
                raise NotWritable(messages.GROUPS)
            # JAX locates rules of derivatives where their function is called.
            in_rule = "jvp(" in stack or "transpose(" in stack
            if in_rule and names.mesh_axes.intersection(
                over
            ):  # a library reduces over the mesh axis alone, silently
                in_rule = not spans or any(f.piece.holds(spans[0]) for f in functions)
            stays = in_rule or all(map(names.stays, over))
            if stays and primitive not in ("pdot", "all_to_all", "ppermute"):
                continue
            if rewriting.handled.isdisjoint(spans) and not rewriting.handled.issuperset(over):
                called = f"{primitive} over {', '.join(map(str, over))} at {_jax.where_in_user_code(eqn)}"
                raise NotWritable(messages.NOT_BY_NAME.format(called=called, primitive=primitive))


def _check_mesh_axes(placed: Any) -> None:
    """Refuse a collective over an axis that its operand lacks, and whose mesh axis splits another
    one of the operand.

    In JAX it reduces that one, and data that are alike, such as zeros, do not tell.
    """

    every = placed.every_placement

    class Lacking(Checker):
        def _collective(self, eqn, inputs):
            held = frozenset().union(*inputs)
            over = [n for n in mentioned_names(eqn.params) if n in every and n not in held]
            for name, other in itertools.product(over, held & every.keys()):
                if {*every[name].mesh_axes} & {*every[other].mesh_axes}:
                    raise NotWritable(
                        messages.LACKS.format(where=self.where(eqn), name=name, other=other)
                    )
            return super()._collective(eqn, inputs)

    if not placed.nested and len(every) > 1:
        given = [frozenset(spec.position_of()) for spec in placed.in_specs]
        entering = undeclared.names_at_entry(placed.program.consts, given, every)
        Lacking(every, placed.fun_name).results(placed.program.jaxpr, entering)


def _keep_what_stays(cs: Sequence[Construction], functions: Iterable[_Function]) -> None:
    """Refuse edits of functions that an xmap which stays may call."""
    pending = [c for c in cs if c.refused]
    while pending:
        stays = pending.pop()
        for function in (f for f in functions if f.changes and stays in f.reached_by):
            for c in (c for c in function.reached_by if not c.refused):
                c.refused = messages.SHARES_WITH_ONE_THAT_STAYS.format(where=stays.where)
                pending.append(c)
