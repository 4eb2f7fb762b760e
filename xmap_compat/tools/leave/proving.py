"""The proof of the edits: the program's functions get the code of their edited text, are traced, and compared with plans.

A run knows nothing of a branch that no recorded call took; a trace takes them all.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import os
import re
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
from xmap_compat.tools.source.user_code import file_at, source_of


class EditedFile:
    """A file before and after its edits, but for reads of the mesh and calls of xmap in bodies, which plans hold."""

    def __init__(self, path: str, found: Edited):
        held, self.globals = file_at(path, path), {}
        inner = [c.site for c in found.constructions if c.site and c.is_nested and c.site.piece.file == path]
        stays = lambda e: any(_part(e, s.call) and not _part(e, s.given.get("fun", s.call)) for s in inner)  # noqa: E731
        edits = [edit for c in found.constructions for edit in c.edits if not stays(edit[1])]
        edits += [edit for edit in found.shared if "sharding.get_" not in edit[1].text]
        self.before, self.after = held.tree, ast.parse(fix.edited(held.text, [e for file, e in edits if file == path]))

    def code(self, function: types.FunctionType) -> types.CodeType:
        """The code of a function after the edits, with all its free variables, also those that are no longer read."""
        own, node, self.globals[id(function.__globals__)] = function.__code__, source_of(function).node, function.__globals__
        old, new = (_alike(tree, node) for tree in (self.before, self.after))
        at = next(k for k, n in enumerate(old) if (n.lineno, n.col_offset) == (node.lineno, node.col_offset))
        if len(old) != len(new):
            raise NotWritable(messages.NOT_FOUND_AGAIN.format(name=own.co_name))
        if ast.dump(old[at]) == ast.dump(new[at]):
            return own
        around = [c.name for c in ast.walk(self.after) if isinstance(c, ast.ClassDef) and new[at] in ast.walk(c)]
        free, last = ", ".join(own.co_freevars), copy.deepcopy(new[at])
        made: Any = ast.parse(f"def edited({free}):\n class {['_', *around][-1]}:\n  ...\n[{free}]")
        ast.increment_lineno(last, node.lineno - last.lineno)
        if isinstance(last, ast.Lambda):
            last.body = ast.IfExp(ast.Constant(True), last.body, made.body[1].value)
            last = ast.Expr(last)
        else:
            last.body.append(ast.If(ast.Constant(False), [made.body.pop()], []))
        made.body[0].body[0].body = [last]
        code: Any = compile(ast.fix_missing_locations(made), own.co_filename, "exec", dont_inherit=True)
        for _ in range(3):  # the definition in the class in the function
            *_, code = (inner for inner in code.co_consts if isinstance(inner, types.CodeType))
        if (code.co_name, code.co_freevars) != (own.co_name, own.co_freevars):
            raise NotWritable(messages.NOT_FOUND_AGAIN.format(name=own.co_name))
        return code


def _part(edit: fix.Edit, node: ast.expr) -> bool:
    """Whether an edit is of a part of an expression, which it does not replace."""
    start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    return start <= edit.start and edit.end <= end and (edit.start, edit.end) != (start, end)


def _alike(tree: ast.Module, node: Any) -> list[Any]:
    """The functions of a file with the kind, the name and the parameters of this one, in order: edits keep these."""
    key = lambda n: (type(n), getattr(n, "name", ""), [a.arg for a in ast.walk(n.args) if isinstance(a, ast.arg)])  # noqa: E731
    found = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.Lambda)) and key(n) == key(node)]
    return sorted(found, key=lambda n: (n.lineno, n.col_offset))


def prove(found: Edited, root: str) -> None:
    """Note for each construction with edits how its functions differ from its plans, or why they are not compared."""
    kept, codes, expected = [c for c in found.constructions if c.edits], {}, {}
    files = {path: EditedFile(path, found) for path in dict.fromkeys(path for c in kept for path, _ in c.edits)}
    for c in kept:
        try:
            codes |= _codes(c, files, root)
            expected[c] = [_numbered(plan) for plan in c.plans]
        except Exception as error:
            c.unproved = str(error) if isinstance(error, NotWritable) else beside.in_words(error)
    with _in_place(codes, files, found):
        for c, graphs in expected.items():
            c.differs = _difference(c, graphs)
    for c in (c for c in expected if c.differs):  # the program may have changed what its own functions compute
        if why := _difference(c, ()):
            c.differs, c.unproved = "", messages.NOT_AS_BEFORE.format(why)


def _codes(c: Construction, files: Mapping[str, EditedFile], root: str) -> dict[Any, types.CodeType]:
    """The edited codes of the functions that a construction reaches."""
    functions = [f for p in c.plans for of in Reached(p.staged.declared.fun, root).functions.values() for f in of]
    paths = {f: os.path.realpath(f.__code__.co_filename) for f in functions}
    return {f: files[path].code(f) for f, path in paths.items() if path in files}


def _numbered(plan: Any) -> proof.Graph:
    """The program of a plan, to be compared; its derivatives are traced, by the program's own functions."""
    names = axis_names(plan).with_inner()
    if any(mesh_axes for mesh_axes, _ in names.inner.values()):
        raise NotWritable(messages.INNER_ON_THE_MESH)
    graph = proof.graph_of(plan, names)
    with configured(plan.staged.configuration):
        assert graph.number is not None
    return graph


def _difference(c: Construction, expected: Sequence[proof.Graph]) -> str:
    """How functions differ from the plans of calls, empty if they do not: edited ones, or the program's own from ()."""
    for k, plan in enumerate(c.plans):
        names = axis_names(plan).with_inner() if expected else None
        try:
            with configured(plan.staged.configuration):
                traced = proof.traced(plan, names, plan.staged.declared.fun)
                found = proof.difference(expected[k] if expected else proof.graph_of(plan, None), traced)
        except Exception as error:
            found = beside.in_words(error)
        if found:
            return re.sub(r"edited\.<locals>\.(_\.)?", "", found)
    return ""


@contextlib.contextmanager
def _in_place(codes: Mapping[Any, Any], files: Mapping[str, EditedFile], found: Edited) -> Iterator[None]:
    """The functions have these codes, and their modules the names that the edits import; then all is as it was."""
    module = types.ModuleType(os.path.basename(found.helper_file).removesuffix(".py"))
    exec(found.helpers, vars(module))
    vars(module).update(STAND_INS)
    with contextlib.ExitStack() as stack:
        stack.callback(jax.clear_caches)  # of traces of jitted functions
        _put(stack, sys.modules, {module.__name__: module})
        for file in files.values():
            of = lambda tree: {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))}  # noqa: E731
            exec("\n".join(of(file.after) - of(file.before)), names := {})
            for held in file.globals.values():
                _put(stack, held, {name: value for name, value in names.items() if name != "__builtins__"})
        for function, code in codes.items():
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = code
        jax.clear_caches()
        yield


def _put(stack: contextlib.ExitStack, held: dict[str, Any], new: Mapping[str, Any]) -> None:
    before = {name: held[name] for name in new if name in held}
    for name in new.keys() - before.keys():
        stack.callback(held.pop, name, None)
    stack.callback(held.update, before)
    held.update(new)
