"""Other programs beside this one, which did not run."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.edits import old_aliases
from xmap_compat.tools.leave.places import XMAPS, Source
from xmap_compat.tools.leave.xmap_calls import XmapCall, span_of
from xmap_compat.tools.source.bindings import Names
from xmap_compat.tools.source.reading import read, source_files


def judge(
    xmap_calls: Iterable[XmapCall], sources: Mapping[str, Source], folders: Collection[str]
) -> None:
    """Refuse xmap calls with mesh resources whose function another program calls in the body of an
    xmap: there JAX cannot enter a mesh again.
    """
    named: dict[str, XmapCall] = {}
    for c in xmap_calls:
        name = _assigned(c, sources)
        if name and c.resources and not c.refused:
            named[name] = c
    if not named:
        return
    for path, text in _others(sources, folders):
        if "xmap" in text:
            for node, meant in _read_in_bodies(Names(read(path).tree)):
                c = named.get(".".join(meant.split(".")[-2:]))
                if c is not None:
                    where = f"{path.name}:{node.lineno}"
                    c.refused = messages.IN_ANOTHER_PROGRAM.format(where=where)


def _others(sources: Mapping[str, Source], folders: Collection[str]) -> Iterator[tuple[Path, str]]:
    """The files in these folders that did not run, and their texts."""
    for path in source_files(Path(folder) for folder in sorted({*folders})):
        if str(path.resolve()) not in sources:
            yield path, read(path).text


def _assigned(c: XmapCall, sources: Mapping[str, Source]) -> str:
    """``steps.train`` for ``train = xmap(...)`` at the top of ``steps.py``."""
    if c.file not in sources:
        return ""
    for statement in sources[c.file].tree.body:
        if isinstance(statement, ast.Assign) and span_of(statement.value) == c.span:
            return f"{Path(c.file).stem}.{ast.unparse(statement.targets[0])}"
    return ""


def _read_in_bodies(names: Names) -> Iterator[tuple[Any, str]]:
    """The names that bodies of xmaps read, and their meanings."""
    for call in names.nodes:
        if isinstance(call, ast.Call) and call.args and names.of(call.func) in XMAPS:
            body = call.args[0]
            if isinstance(body, ast.Name):
                body = names.meaning(body.id)
            for node in ast.walk(body) if isinstance(body, ast.AST) else ():
                yield node, names.of(node)


def others_that_need(sources: Mapping[str, Source], folders: Collection[str]) -> list[str]:
    """Files that did not run, which files of the program import, and which import old names."""
    text = "\n".join("\n".join(source.lines) for source in sources.values())
    found = []
    for path, _ in _others(sources, folders):
        imports = rf"\bimport\b.*\b{path.stem}\b|\bfrom .*\b{path.stem} import"
        nodes = ast.walk(read(path).tree) if re.search(imports, text) else ()
        if any(old_aliases(node) for node in nodes):
            found.append(path.name)
    return sorted(found)
