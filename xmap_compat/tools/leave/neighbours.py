"""Other programs beside this one, which did not run."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.places import Source
from xmap_compat.tools.leave.xmap_calls import XmapCall
from xmap_compat.tools.source.reading import read, source_files

# An import of what only this package has.
_NEEDS = re.compile(
    r"(?m)^\s*(from|import) "
    r"(xmap_compat|jax\.experimental\.maps|jax\.experimental import.*\bmaps)\b"
)


def _others(sources: Mapping[str, Source], folders: Collection[str]) -> Iterator[tuple[Path, str]]:
    """The files in these folders that did not run and need this package, and their texts."""
    for path in source_files(Path(folder) for folder in sorted({*folders})):
        if str(path.resolve()) not in sources:
            text = read(path).text
            if _NEEDS.search(text):
                yield path, text


def refuse_shared(
    xmap_calls: Iterable[XmapCall], sources: Mapping[str, Source], folders: Collection[str]
) -> None:
    """Refuse xmap calls with resources whose function, assigned at the top of a module, another
    program uses beside an xmap: in the body of that, JAX cannot enter a mesh again.
    """
    for path, text in _others(sources, folders):
        for c in xmap_calls:
            if c.refused or not c.has_resources or "xmap(" not in text:
                continue
            assigned = re.match(r"(\w+) *=", sources[c.file].lines[c.span[0] - 1])
            module = Path(c.file).stem
            if assigned and re.search(rf"(?s)\b{module}\b.*\b{assigned[1]}\(", text):
                c.refused = messages.IN_ANOTHER_PROGRAM.format(name=path.name)


def others_that_need(sources: Mapping[str, Source], folders: Collection[str]) -> list[str]:
    """Files that did not run, which files of the program import, and which need this package."""
    program = "\n".join("\n".join(source.lines) for source in sources.values())
    found = []
    for path, _ in _others(sources, folders):
        imports = rf"\bimport\b.*\b{path.stem}\b|\bfrom .*\b{path.stem} import"
        if re.search(imports, program):
            found.append(path.name)
    return sorted(found)
