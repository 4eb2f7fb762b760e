"""Other programs that import the files of this one, and did not run."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.construction import Construction
from xmap_compat.tools.leave.edits import old_aliases
from xmap_compat.tools.leave.places import XMAPS, Source
from xmap_compat.tools.source.bindings import IMPORTS, Names
from xmap_compat.tools.source.reading import read, source_files


def judge(
    constructions: Iterable[Construction], sources: dict[str, Source], folders: Iterable[str]
) -> None:
    """Refuse constructions with mesh resources that another program calls in the body of an xmap:
    there JAX cannot enter a mesh again.
    """
    named: dict[str, Construction] = {}
    for c in constructions:
        name = _assigned(c, sources.get(c.file))
        if name and c.resources and not c.refused:
            named[f"{Path(c.file).stem}.{name}"] = c
    if not named:
        return
    for path in source_files(Path(folder) for folder in {*folders}):
        if str(path.resolve()) not in sources and b"xmap" in path.read_bytes():
            for node, called in _called_in_bodies(Names(read(path).tree)):
                reached = named.get(".".join(called.split(".")[-2:]))
                if reached is not None:
                    where = f"{os.path.basename(path)}:{node.lineno}"
                    reached.refused = messages.IN_ANOTHER_PROGRAM.format(where=where)


def _assigned(c: Construction, source: Source | None) -> str:
    """The name that a construction is assigned to at the top of its file."""
    for statement in source.tree.body if source else ():
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            value: Any = statement.value
            if (value.lineno, value.col_offset) == (c.line, c.column):
                return statement.targets[0].id
    return ""


def _called_in_bodies(names: Names) -> Iterator[tuple[Any, str]]:
    """The names that bodies of xmaps read, and their meanings."""
    for call in names.nodes:
        if isinstance(call, ast.Call) and call.args and names.of(call.func) in XMAPS:
            body: ast.AST = call.args[0]
            if isinstance(body, ast.Name):
                found = names.meaning(body.id)
                body = found if isinstance(found, ast.FunctionDef) else body
            for node in ast.walk(body):
                meant = names.of(node)
                if "." in meant:
                    yield node, meant


def others_that_need(sources: dict[str, Source], folders: Iterable[str]) -> list[str]:
    """Files that files of the program import, which did not run and hold names of xmap."""
    imported: set[str] = set()
    for source in sources.values():
        for node in source.names.nodes:
            if isinstance(node, IMPORTS):
                modules = [getattr(node, "module", "") or "", *(a.name for a in node.names)]
                imported.update(module.rpartition(".")[2] for module in modules)
    found = []
    for path in source_files(Path(folder) for folder in {*folders}):
        if str(path.resolve()) not in sources and path.stem in imported:
            nodes = Names(read(path).tree).nodes
            if any(old_aliases(node) for node in nodes if isinstance(node, IMPORTS)):
                found.append(str(path))
    return sorted(found)
