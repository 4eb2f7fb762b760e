"""The proof of the edits: each call's edited functions are traced in the program itself, and compared with its plan.

A run compares the calls that were recorded, so it knows nothing of a branch that none of them took.  A trace takes all
branches.  For the time of the proof, the program's functions have the code of their edited text.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from xmap_compat.tools.check import fix
from xmap_compat.tools.configuration import configured
from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.construction import Construction, Edited
from xmap_compat.tools.leave.places import Reached
from xmap_compat.tools.source import beside, proof
from xmap_compat.tools.source.program import axis_names
from xmap_compat.tools.source.table import STAND_INS
from xmap_compat.tools.source.text import NotWritable
from xmap_compat.tools.source.user_code import codes_in, file_at, source_of

_IMPORTS, _FUNCTIONS = (ast.Import, ast.ImportFrom), (ast.FunctionDef, ast.Lambda)


def prove(found: Edited, root: str) -> None:
    """Note for each construction with edits how its functions differ from its plans, or why they are not compared."""
    kept = [c for c in found.constructions if c.edits]
    try:
        files = {path: _File(path, found) for path in dict.fromkeys(path for c in kept for path, _ in c.edits)}
        codes: dict[types.FunctionType, types.CodeType] = {}
        for c in kept:
            c.unproved = _unless_found(codes, files, c, root)
        proved = [c for c in kept if not c.unproved]
        expected = [_graphs(c) for c in proved]  # derivatives of the program's own functions are traced for them
        jax.clear_caches()
        with _in_place(codes, files, found):
            for c, graphs in zip(proved, expected):
                c.differs = _difference(c, graphs)
        jax.clear_caches()
        for c in (c for c in proved if c.differs):  # the program may have changed what its own functions compute
            if why := _difference(c, None):
                c.differs, c.unproved = "", messages.NOT_AS_BEFORE.format(why)
    except Exception as error:
        for c in kept:
            c.unproved = c.unproved or beside.in_words(error)


def _graphs(c: Construction) -> list[proof.Graph]:
    graphs = [proof.graph_of(plan, axis_names(plan).with_inner()) for plan in c.plans]
    for plan, graph in zip(c.plans, graphs):
        with configured(plan.staged.configuration):
            assert graph.number >= 0
    return graphs


def _difference(c: Construction, expected: Sequence[proof.Graph] | None) -> str:
    """How the functions of a construction differ from the plans of its calls; empty if they do not.

    Args:
      expected: of its edited functions; None for its own, which have the named axes.
    """
    for k, plan in enumerate(c.plans):
        names = axis_names(plan).with_inner() if expected else None
        mesh = jax.set_mesh(plan.mesh) if expected and isinstance(plan.mesh, jax.sharding.Mesh) else None
        try:
            with configured(plan.staged.configuration), mesh or contextlib.nullcontext():
                graph = expected[k] if expected else proof.graph_of(plan, None)
                found = proof.difference(graph, proof.traced(plan, names, plan.staged.declared.fun))
        except Exception as error:
            found = beside.in_words(error)
        if found:
            return found
    return ""


class _File:
    """A file before and after its edits, in which calls of xmap in the bodies of others stay: plans hold them."""

    def __init__(self, path: str, found: Edited):
        held = file_at(path, path)
        inner = [c.site for c in found.constructions if c.site and c.is_nested and c.site.piece.file == path]
        edits = [e for file, e in [*found.shared, *(e for c in found.constructions for e in c.edits)] if file == path]
        stays = lambda e: any(_part(e, s.call) and not _part(e, s.given.get("fun", s.call)) for s in inner)  # noqa: E731
        self.before, self.after = held.tree, ast.parse(fix.edited(held.text, [e for e in edits if not stays(e)]))

    def code(self, function: types.FunctionType) -> types.CodeType:
        """The code of a function after the edits; its own if none changes it."""
        node = source_of(function).node
        own, new = (_alike(tree, node) for tree in (self.before, self.after))
        at = [(n.lineno, n.col_offset) for n in own].index((node.lineno, node.col_offset))
        if len(own) != len(new):
            raise NotWritable(f"{function.__name__} is not found again")
        same = ast.dump(own[at]) == ast.dump(new[at])
        return function.__code__ if same else _compiled(self.after, new[at], node, function.__code__)


def _part(edit: fix.Edit, node: ast.expr) -> bool:
    """Whether an edit is of a part of an expression, which it does not replace."""
    start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    return start <= edit.start and edit.end <= end and (edit.start, edit.end) != (start, end)


def _alike(tree: ast.Module, node: Any) -> list[Any]:
    """The functions of a file with the kind, the name and the parameters of this one, in order: edits keep these."""
    key = lambda n: (type(n), getattr(n, "name", ""), [a.arg for a in ast.walk(n.args) if isinstance(a, ast.arg)])  # noqa: E731
    found = [n for n in ast.walk(tree) if isinstance(n, _FUNCTIONS) and key(n) == key(node)]
    return sorted(found, key=lambda n: (n.lineno, n.col_offset))


def _compiled(tree: ast.Module, node: Any, before: Any, own: types.CodeType) -> types.CodeType:
    """The code of a definition with the free variables of its function, also those that it does not read any more."""
    around = [c.name for c in ast.walk(tree) if isinstance(c, ast.ClassDef) and node in ast.walk(c)]
    made: Any = ast.parse(f"def function({', '.join(own.co_freevars)}):\n class {[*around, '_'][-1]}:\n  pass")
    node, free = copy.deepcopy(node), ast.parse(f"[{', '.join(own.co_freevars)}]", mode="eval").body
    ast.increment_lineno(node, before.lineno - node.lineno)
    node.args.defaults, node.args.kw_defaults = [], [None] * len(node.args.kwonlyargs)
    for arg in (a for a in ast.walk(node.args) if isinstance(a, ast.arg)):
        arg.annotation = None
    if isinstance(node, ast.Lambda):
        node.body = ast.IfExp(ast.Constant(True), node.body, free)
        node = ast.Expr(node)
    else:
        node.decorator_list, node.returns = [], None
        node.body.append(ast.If(ast.Constant(False), [ast.Expr(free)], []))
    made.body[0].body[0].body = [node]
    found = [*codes_in(compile(ast.fix_missing_locations(made), own.co_filename, "exec", dont_inherit=True))][3]
    if found.co_freevars != own.co_freevars:
        raise NotWritable(f"{own.co_name} reads other variables of the functions around it")
    return found


def _unless_found(codes: dict[Any, Any], files: Mapping[str, _File], c: Construction, root: str) -> str:
    """Add the codes of the functions that a construction reaches; returns why one is not found, or ""."""
    try:
        for plan in c.plans:
            for function in (f for of in Reached(plan.staged.declared.fun, root).functions.values() for f in of):
                if (file := files.get(os.path.realpath(function.__code__.co_filename))) is not None:
                    codes[function] = codes.get(function) or file.code(function)
    except NotWritable as reason:
        return str(reason)
    return ""


@contextlib.contextmanager
def _in_place(codes: Mapping[Any, Any], files: Mapping[str, _File], found: Edited) -> Iterator[None]:
    """The functions have these codes, and their modules the names that the edits import; then all is as it was."""
    module = types.ModuleType(os.path.basename(found.helper_file).removesuffix(".py"))
    exec(found.helpers, vars(module))
    vars(module).update(STAND_INS)
    with contextlib.ExitStack() as stack:
        _put(stack, sys.modules, {module.__name__: module})
        for path, file in files.items():
            names: dict[str, Any] = {}
            old, new = (map(ast.unparse, (n for n in ast.walk(t) if isinstance(n, _IMPORTS))) for t in (file.before, file.after))
            exec("\n".join({*new} - {*old}), names)
            del names["__builtins__"]
            for held in {id(f.__globals__): f.__globals__ for f in codes if f.__code__.co_filename == path}.values():
                _put(stack, held, names)
        for function, code in codes.items():
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = code
        yield


def _put(stack: contextlib.ExitStack, held: dict[str, Any], new: Mapping[str, Any]) -> None:
    before = {name: held[name] for name in new if name in held}
    for name in new.keys() - before.keys():
        stack.callback(held.pop, name, None)
    stack.callback(held.update, before)
    held.update(new)
