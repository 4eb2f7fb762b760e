"""The proof of edits: functions get the code of their edited text, are traced, and are compared with plans of calls.

A run does not reach the branches that no recorded call took.  A trace reaches all of them.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.construction import Construction, Edited
from xmap_compat.tools.leave.old_check import fix
from xmap_compat.tools.leave.places import Reached, Site
from xmap_compat.tools.source import beside, proof
from xmap_compat.tools.source.program import axis_names
from xmap_compat.tools.source.table import STAND_INS
from xmap_compat.tools.source.text import NotWritable
from xmap_compat.tools.source.user_code import file_at, source_of

_IMPORTS, _FUNCTIONS = (ast.Import, ast.ImportFrom), (ast.FunctionDef, ast.Lambda)


class EditedFile:
    """A file before and after its edits, but for reads of the mesh and calls of xmap in bodies, which plans hold."""

    def __init__(self, path: str, found: Edited):
        held = file_at(path, path)
        self.globals: dict[int, dict[str, Any]] = {}
        inner = [c.site for c in found.constructions if c.site and c.is_nested and c.site.piece.file == path]
        every = (edit for c in found.constructions for edit in c.edits)
        edits = [(file, e) for file, e in every if not any(_is_around(e, site) for site in inner)]
        edits += [edit for edit in found.shared if "sharding.get_" not in edit[1].text]
        self.trees = held.tree, ast.parse(fix.edited(held.text, [e for file, e in edits if file == path]))

    def code(self, function: types.FunctionType) -> types.CodeType:
        """The code of a function after the edits, with all its free variables, also those that are no longer read."""
        own, at = function.__code__, source_of(function).node
        self.globals[id(function.__globals__)] = function.__globals__
        old, new = (_alike(tree, at) for tree in self.trees)
        node = dict(zip(((n.lineno, n.col_offset) for n in old), new)).get((at.lineno, at.col_offset), at)
        if ast.dump(node) == ast.dump(at) and len(old) == len(new):
            return own
        around = [c.name for c in ast.walk(self.trees[1]) if isinstance(c, ast.ClassDef) and node in ast.walk(c)]
        free, node = ", ".join(own.co_freevars), copy.deepcopy(node)
        made: Any = ast.parse(f"def edited({free}):\n class {['_', *around][-1]}:\n  ...\n[{free}]")
        ast.increment_lineno(node, at.lineno - node.lineno)
        if isinstance(node, ast.Lambda):
            node.body = ast.IfExp(ast.Constant(True), node.body, made.body[1].value)
        else:
            node.body.append(ast.If(ast.Constant(False), [made.body[1]], []))
        made.body[0].body[0].body = [ast.Expr(node) if isinstance(node, ast.Lambda) else node]
        code: Any = compile(ast.fix_missing_locations(made), own.co_filename, "exec", dont_inherit=True)
        for _ in range(3):  # the definition in the class in the function
            *_, code = (inner for inner in code.co_consts if isinstance(inner, types.CodeType))
        if len(old) != len(new) or (code.co_name, code.co_freevars) != (own.co_name, own.co_freevars):
            raise NotWritable(messages.NOT_FOUND_AGAIN.format(name=own.co_name))
        return code


def _is_around(edit: fix.Edit, site: Site) -> bool:
    """Whether an edit is in a call of xmap, and not in its function."""
    call, fun = (fix.replacing(node, "") for node in (site.call, site.given.get("fun", site.call)))
    is_apart = "fun" not in site.given or edit.end <= fun.start or fun.end <= edit.start
    return is_apart and call.start <= edit.start and edit.end <= call.end


def _alike(tree: ast.Module, node: Any) -> list[Any]:
    """The functions of a file with the kind, the name and the parameters of this one, in order: edits keep these."""
    key = lambda n: (type(n), getattr(n, "name", ""), [a.arg for a in ast.walk(n.args) if isinstance(a, ast.arg)])  # noqa: E731
    found = [n for n in ast.walk(tree) if isinstance(n, _FUNCTIONS) and key(n) == key(node)]
    return sorted(found, key=lambda n: (n.lineno, n.col_offset))


def prove(found: Edited, root: str) -> None:
    """Note for each construction with edits how its functions differ from its plans, or why they are not compared."""
    kept = [c for c in found.constructions if c.edits]
    codes: dict[types.FunctionType, types.CodeType] = {}
    expected: dict[Construction, list[proof.Graph]] = {}
    files = {path: EditedFile(path, found) for path in dict.fromkeys(path for c in kept for path, _ in c.edits)}
    for c in kept:
        try:
            reached = [Reached([plan.staged.declared.fun], root).functions.values() for plan in c.plans]
            paths = {f: os.path.realpath(f.__code__.co_filename) for of in reached for fs in of for f in fs}
            codes |= {f: files[path].code(f) for f, path in paths.items() if path in files}
            names = [axis_names(plan).with_inner() for plan in c.plans]
            if any(mesh_axes for n in names for mesh_axes, _ in n.inner.values()):
                raise NotWritable(messages.INNER_ON_THE_MESH)
            expected[c] = list(map(proof.graph_of, c.plans, names))
        except Exception as error:
            c.unproved = str(error) if isinstance(error, NotWritable) else beside.in_words(error)
    with _in_place(codes, files.values(), found):
        for c, graphs in expected.items():
            c.differs = _difference(c, graphs)
    for c in (c for c in expected if c.differs):  # the program may have changed what its own functions compute
        if why := _difference(c, map(proof.graph_of, c.plans)):
            c.differs, c.unproved = "", messages.NOT_AS_BEFORE.format(why)


def _difference(c: Construction, graphs: Iterable[proof.Graph]) -> str:
    for plan, graph in zip(c.plans, graphs):
        try:
            found = proof.difference_from(plan, graph, plan.staged.declared.fun)
        except Exception as error:
            found = beside.in_words(error)
        if found:
            return re.sub(r"edited\.<locals>\.(_\.)?", "", found)
    return ""


@contextlib.contextmanager
def _in_place(codes: Mapping[Any, Any], files: Iterable[EditedFile], found: Edited) -> Iterator[None]:
    """The functions have these codes, and their modules the names that the edits import; then all is as it was."""
    name, helpers = os.path.basename(found.helper_file).removesuffix(".py"), types.ModuleType("helpers")
    exec(found.helpers, vars(helpers))
    with contextlib.ExitStack() as stack:
        stack.callback(jax.clear_caches)  # of traces of jitted functions
        stack.callback(sys.modules.pop, name)
        sys.modules[name] = helpers
        vars(helpers).update(STAND_INS)
        for file in files:
            old, new = ({ast.unparse(n) for n in ast.walk(t) if isinstance(n, _IMPORTS)} for t in file.trees)
            names: dict[str, Any] = {}
            exec("\n".join(new - old), names)
            for held in file.globals.values():
                stack.callback(held.update, dict(held))
                stack.callback(list, map(held.pop, names))
                held.update(names)
        for function, code in codes.items():
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = code
        jax.clear_caches()
        yield
