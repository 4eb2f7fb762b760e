"""Several generated modules as one module.  If they share a definition, it appears only once."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Mapping
from typing import Any

from xmap_compat.tools.leave.old_check.names import first_line
from xmap_compat.tools.source.text import EDITED, Names, NotWritable, module_text
from xmap_compat.tools.source.user_code import renamed

_IMPORTS = (ast.Import, ast.ImportFrom)
_EDITS = (" ", EDITED)


class Merged:
    """Collects generated modules."""

    def __init__(self):
        self._calls: list[tuple[Any, ...]] = []
        self._about: dict[str, None] = {}
        self._statements: list[str] = []
        self._known: dict[str, Any] = {}  # the meaning of a name: a definition, None for a builtin, the id of an array

    def add(self, text: str, entry: str, about: str, values: Mapping[str, Any] | None = None) -> str | None:
        """Add the module of a call.

        Args:
          entry: its function.
          about: a description of the call.
          values: the arrays that it lacks, by name.

        Returns:
          The name of its function in the merged module.  None, and nothing is added, if two names would be ambiguous.
        """
        tree = ast.parse(text)
        read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and hasattr(builtins, n.id)}
        given: dict[str, Any] = dict.fromkeys(read - _definitions(text).keys())
        given |= {name: id(value) for name, value in (values or {}).items()}
        if any(self._known.get(name, meaning) != meaning for name, meaning in given.items()):
            return None
        fresh = Names(re.findall(r"\w+", text))
        while clashing := [n for n, s in (_definitions(text) | given).items() if self._known.get(n, s) != s]:
            new = fresh.like(re.sub(r"(?<=\w)_\d+$", "", clashing[0]))
            entry = new if entry == clashing[0] else entry
            if (renamed := _renamed(text, clashing[0], new)) is None:
                return None
            text = renamed
        self._statements += [shown for name, shown in _statements(text) if name not in self._known]
        self._known.update(_definitions(text) | given)
        self._calls.append((entry, about, values))
        for paragraph in (ast.get_docstring(tree) or "").split("\n\n")[1:]:
            self._about[paragraph if paragraph.startswith(_EDITS) else f"{entry}: {paragraph}"] = None
        return entry

    def text(self, title: str) -> str:
        """The text of the merged module."""
        width = max(len(name) for name, *_ in self._calls)
        calls = "\n".join(f"  {name.ljust(width)}  {about}" for name, about, _ in self._calls)
        about = "\n\n".join([title, calls, *sorted(self._about, key=lambda p: not p.startswith(_EDITS))])
        imports = [s for s in self._statements if s.startswith(("import ", "from "))]
        others = "\n\n\n".join(s for s in self._statements if s not in imports)
        return module_text(about.split("\n"), imports, [others])


def _statements(text: str) -> Iterator[tuple[str, str]]:
    """The statements of a module: the name that each binds, or completes as ``f.defvjp(...)`` does, and its text."""
    lines = text.split("\n")
    for node in ast.parse(text).body[1:]:
        if isinstance(node, _IMPORTS):
            home = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                yield (alias.asname or alias.name).split(".")[0], f"{home}import {ast.unparse(alias)}"
        else:
            shown = "\n".join(lines[first_line(node) - 1 : node.end_lineno])
            yield getattr(node, "name", None) or re.findall(r"\w+", shown)[0], shown


def _definitions(text: str) -> dict[str, str]:
    """Each name of a module, with the text of all statements that define it."""
    found: dict[str, str] = {}
    for name, shown in _statements(text):
        found[name] = f"{found.get(name, '')}\n{shown}"
    return found


def _renamed(text: str, old: str, new: str) -> str | None:
    """A module in which one of its own names is replaced; None if it cannot be, as for an import."""
    bound_elsewhere = (n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.Global, *_IMPORTS)))
    if any(old in re.findall(r"\w+", ast.unparse(node)) for node in bound_elsewhere):
        return None
    try:
        text = renamed(text, {old: new})
    except NotWritable:
        return None
    lines = text.split("\n")
    for first in (node.lineno - 1 for node in ast.parse(text).body):
        lines[first] = re.sub(rf"^(def |class |){old}\b", rf"\g<1>{new}", lines[first])
    return "\n".join(lines)
