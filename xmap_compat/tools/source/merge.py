"""Written modules as one module, in which definitions that are the same in several of them stand once."""

from __future__ import annotations

import ast
import dataclasses
import textwrap
from collections.abc import Iterator, Sequence

from xmap_compat.tools.source.layout import EDITED, docstring, formatted, sorted_imports
from xmap_compat.tools.source.text import WIDTH, Names


@dataclasses.dataclass(frozen=True)
class Statement:
    """A statement at the top of a module: what it defines or completes, and its lines."""

    name: str
    node: ast.stmt
    lines: tuple[str, ...]


class Merged:
    """Collects modules."""

    def __init__(self):
        self._calls: list[tuple[str, str]] = []
        self._edits: dict[str, None] = {}
        self._notes: list[str] = []
        self._imports: dict[str, None] = {}
        self._statements: list[str] = []
        self._known: dict[str, str] = {}

    def add(self, text: str, entry: str, about: str) -> str | None:
        """Add the module of a call.

        Args:
          entry: its function.
          about: the call, in words.

        Returns:
          What its function is called here; None, and nothing is added, if it has names that cannot be told apart.
        """
        tree = ast.parse(text)
        imports = {name: line for n in tree.body if isinstance(n, _IMPORTS) for name, line in _imported(n)}
        statements = list(_statements(tree, text.split("\n")))
        own = dict.fromkeys(s.name for s in statements)
        renamed = self._names_of(statements) if not imports.keys() & own else None
        if renamed is None or any(self._known.get(n, t) != t for n, t in imports.items()):
            return None
        if any(n in renamed for s in statements for n in _local_names(s.node)):
            return None
        texts = {name: _joined(statements, name, renamed) for name in own}
        shared = {name for name in own if renamed.get(name, name) in self._known}
        self._known.update({renamed.get(name, name): texts[name] for name in own} | imports)
        self._statements += [_renamed(s, renamed) for s in statements if s.name not in shared]
        self._imports.update(dict.fromkeys(imports.values()))
        name = renamed.get(entry, entry)
        if entry not in shared:
            _, *paragraphs = (ast.get_docstring(tree) or "").split("\n\n")
            if paragraphs and paragraphs[0] == EDITED:
                lines = paragraphs[1].split("\n")
                self._edits.update(dict.fromkeys("\n".join(pair) for pair in zip(lines[::2], lines[1::2])))
                paragraphs = paragraphs[2:]
            self._notes += [f"{name}: {note}" for note in paragraphs]
        self._calls.append((name, about))
        return name

    def text(self, title: str) -> str:
        """The module."""
        width = max(len(name) for name, _ in self._calls)
        about = [title, "", *(f"  {name.ljust(width)}  {call}" for name, call in self._calls)]
        if self._edits:
            about += ["", EDITED, "", *"\n".join(self._edits).split("\n")]
        for note in self._notes:
            about += ["", *textwrap.wrap(note, WIDTH)]
        return formatted(
            "\n".join([*docstring(about), "", *sorted_imports(self._imports), "", "\n\n\n".join(self._statements), ""])
        )

    def _names_of(self, statements: Sequence[Statement]) -> dict[str, str] | None:
        """New names for what has one that means something else here."""
        own = dict.fromkeys(s.name for s in statements)
        renamed: dict[str, str] = {}

        def fits(name, new):
            text = _joined(statements, name, {**renamed, name: new})
            return self._known.get(new, text) == text

        for _ in range(_TRIES):
            name = next((n for n in own if not fits(n, renamed.get(n, n))), None)
            if name is None:
                return renamed
            taken = {*own, *renamed.values()}
            renamed[name] = next(n for n in Names.variants(name) if n not in taken and fits(name, n))
        return None


_TRIES = 1000
_IMPORTS = (ast.Import, ast.ImportFrom)


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """The names that a statement binds, with a statement for each."""
    for alias in node.names:
        one = ast.Import([alias]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [alias], 0)
        yield (alias.asname or alias.name).split(".")[0], ast.unparse(one)


def _statements(tree: ast.Module, lines: Sequence[str]) -> Iterator[Statement]:
    for node in tree.body[1:]:
        if isinstance(node, _IMPORTS):
            continue
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        yield Statement(_defined(node), node, tuple(lines[first - 1 : node.end_lineno]))


def _defined(node: ast.stmt) -> str:
    """The name that a statement defines, or whose function it completes: ``f.defvjp(...)``."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
    return next(n.id for n in ast.walk(targets[0]) if isinstance(n, ast.Name))


def _joined(statements: Sequence[Statement], name: str, renamed: dict[str, str]) -> str:
    return "\n".join(_renamed(s, renamed) for s in statements if s.name == name)


def _renamed(statement: Statement, renamed: dict[str, str]) -> str:
    """The text of a statement with other names."""
    lines = [line.encode() for line in statement.lines]
    last = statement.node.end_lineno or 0
    places = []
    for n in ast.walk(statement.node):
        if isinstance(n, ast.Name) and n.id in renamed:
            places.append((n.lineno, n.col_offset, n.id))
    if isinstance(statement.node, (ast.FunctionDef, ast.ClassDef)) and statement.name in renamed:
        line = statement.node.lineno
        places.append((line, lines[line - last - 1].index(b" " + statement.name.encode()) + 1, statement.name))
    for line, column, name in sorted(places, reverse=True):
        text = lines[line - last - 1]
        lines[line - last - 1] = text[:column] + renamed[name].encode() + text[column + len(name.encode()) :]
    return b"\n".join(lines).decode()


def _local_names(node: ast.stmt) -> set[str]:
    """The parameters and variables of functions in a statement, and names in f-strings, whose place is not known."""
    if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return set()
    stored = (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load))
    inner = (n.name for n in ast.walk(node) if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n is not node)
    strings = (n for s in ast.walk(node) if isinstance(s, ast.JoinedStr) for n in ast.walk(s))
    unplaced = (n.id for n in strings if isinstance(n, ast.Name))
    return {*stored, *inner, *unplaced, *(n.arg for n in ast.walk(node) if isinstance(n, ast.arg))}
