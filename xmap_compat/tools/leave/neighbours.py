"""Other programs beside this one, which did not run."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.places import XMAPS, Source
from xmap_compat.tools.leave.xmap_calls import XmapCall, span_of
from xmap_compat.tools.source.bindings import Names
from xmap_compat.tools.source.reading import read, source_files

# An import of what only this package has.
_NEEDS = re.compile(
    r"(?m)^\s*(from|import) "
    r"(xmap_compat|jax\.experimental\.maps|jax\.experimental import.*\bmaps)\b"
)


def refuse_shared(
    xmap_calls: Iterable[XmapCall], sources: Mapping[str, Source], folders: Collection[str]
) -> None:
    """Refuse xmap calls with mesh resources whose function another program uses beside an xmap: in
    the body of that, JAX cannot enter a mesh again.
    """
    named: dict[str, XmapCall] = {}
    for c in xmap_calls:
        name = _assigned(c, sources)
        if name and c.has_mesh_axes and not c.refused:
            named[name] = c
    if not named:
        return
    for path, text in _others(sources, folders):
        if "xmap" in text:
            _refuse_used(path, Names(read(path).tree), named)


def _refuse_used(path: Path, names: Names, named: Mapping[str, XmapCall]) -> None:
    meanings = {node: names.imported_name(node) for node in names.nodes}
    if not set(XMAPS).intersection(meanings.values()):
        return
    for node, meant in meanings.items():
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


def others_that_need(sources: Mapping[str, Source], folders: Collection[str]) -> list[str]:
    """Files that did not run, which files of the program import, and which need this package."""
    program = "\n".join("\n".join(source.lines) for source in sources.values())
    found = []
    for path, text in _others(sources, folders):
        imports = rf"\bimport\b.*\b{path.stem}\b|\bfrom .*\b{path.stem} import"
        if re.search(imports, program) and _NEEDS.search(text):
            found.append(path.name)
    return sorted(found)
