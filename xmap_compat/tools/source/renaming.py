"""Other functions in the place of those that a file uses, and their imports.

A text for the file names them by tokens: ``{named_axes:psum}`` is ``psum`` of ``named_axes``, by
the name that the file has for it, or gets.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from xmap_compat.tools.source.bindings import IMPORTS, Names, bound_by, text_of
from xmap_compat.tools.source.layout import Edit, in_place_of, replacing

TOKEN = re.compile(r"\{([\w.]+):(\w+)\}")


class Renaming:
    """The edits of a file.

    Attributes:
      gone: the homes of names that JAX removed: their imports go, if nothing uses them.
      exported: names that other files take from this one; ``*`` for all.
      homes: modules that tokens name otherwise.
    """

    def __init__(
        self,
        names: Names,
        lines: Sequence[str],
        gone: tuple[str, ...] = (),
        exported: Collection[str] = (),
    ):
        self.names, self.lines, self.gone = names, lines, gone
        self.tree: Any = names.nodes[0]
        self._texts = {text_of(node) for node in self.names.nodes}
        self._exported = {*exported}
        self.homes: dict[str, str] = {}
        self._renamed: dict[ast.AST, str] = {}  # names and attributes, and their new texts
        self._written: list[Edit] = []
        self._covered: set[ast.AST] = set()  # what is no longer in the file
        self._loads: dict[str, list[ast.Name]] = defaultdict(list)
        for node in self.names.nodes:
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
                self._loads[node.id].append(node)
        if self._loads.keys() & {"exec", "eval"}:
            self._texts = {word for text in self._texts for word in re.findall(r"\w+", text)}

    # ---- what is asked for

    def rename(self, node: ast.AST, text: str) -> None:
        """Put a text in the place of a name or an attribute."""
        self._renamed[node] = text
        self._covered.update(ast.walk(node))

    def is_renamed(self, node: ast.AST | None) -> bool:
        return node in self._renamed or node in self._covered

    def write(self, start: tuple[int, int], end: tuple[int, int], text: str) -> None:
        """Put a text in the place of a part of the file."""
        self._written.append(Edit(start, end, text))

    def cover(self, node: ast.AST) -> None:
        """Note that a text which is written has taken the place of a node."""
        self._covered.update(ast.walk(node))

    def remove(self, statement: ast.stmt) -> None:
        parent = self.names.parents[statement]
        self._written.append(in_place_of(statement, parent, self.lines, []))
        self.cover(statement)

    @property
    def is_asked(self) -> bool:
        return bool(self._renamed or self._written)

    # ---- the edits

    def edits(self) -> list[Edit]:
        """All edits of the file; none if nothing was asked for, and no import of it is gone."""
        self._new: dict[str, set[str]] = defaultdict(set)  # what is imported from each module
        self._modules: set[str] = set()
        changed = self._changed_imports()
        self._known = self._names_by_meaning()
        edits = [replacing(node, self._text(text)) for node, text in self._kept_renamings()]  # type: ignore[arg-type]
        edits += [edit._replace(text=self._text(edit.text)) for edit in self._written]
        lines = self._new_imports(edits)
        top = [statement for statement in changed if statement in self.tree.body]
        used = min([edit.start for edit in edits], default=(0, 0))
        before = [statement for statement in top if (statement.lineno, 0) < used]
        for statement, imports in changed.items():
            own = [*imports, *(lines if statement in before[-1:] else ())]
            edits.append(in_place_of(statement, self.names.parents[statement], self.lines, own))
        if not before and lines:
            edits.append(after_imports(self.tree, self.lines, lines))
        return merged(edits)

    def _kept_renamings(self) -> Iterator[tuple[ast.AST, str]]:
        for node, text in self._renamed.items():
            if not (isinstance(node, ast.Name) and node.id in self._carried):
                yield node, text

    def _changed_imports(self) -> dict[ast.stmt, list[str]]:
        """The imports that change, and what takes the place of each."""
        carried = {name: self._carrying(name) for name in self._loads}
        self._carried = {name: token for name, token in carried.items() if token}
        found: dict[ast.stmt, list[str]] = {}
        for statement in self.names.nodes:
            if isinstance(statement, IMPORTS):
                new = [*self._new_aliases(statement)]
                if new != [(_head(statement), ast.unparse(a)) for a in statement.names]:
                    found[statement] = _statements(new)
        return found

    def _carrying(self, name: str) -> tuple[str, str] | None:
        """The function that the import of a name brings from now on, if all uses are renamed to
        that.
        """
        new = {self._renamed.get(node, "") for node in self._loads[name]}
        token = TOKEN.fullmatch(new.pop()) if len(new) == 1 else None
        aliases = [a for n in self.names.nodes if isinstance(n, ast.ImportFrom) for a in n.names]
        own = [alias for alias in aliases if (alias.asname or alias.name) == name]
        if token is None or not own:
            return None
        if not all(alias.asname or token[2] == name for alias in own):
            return None
        return self.homes.get(token[1], token[1]), token[2]

    def _new_aliases(self, statement: Any) -> Iterator[tuple[str, str]]:
        """For each name of an import the head of its new statement, and the name there."""
        head = _head(statement)
        for alias in statement.names:
            local = alias.asname or alias.name
            if local in self._carried and isinstance(statement, ast.ImportFrom):
                module, name = self._carried[local]
                yield f"from {module} import ", name if name == local else f"{name} as {local}"
            elif not self._goes(statement, alias):
                yield head, ast.unparse(alias)
            elif (root := self._root_of(alias)) and isinstance(statement, ast.Import):
                yield head, root

    def _goes(self, statement: ast.stmt, alias: ast.alias) -> bool:
        """Whether nothing needs an import any more."""
        home = f"{getattr(statement, 'module', '') or ''}." * isinstance(statement, ast.ImportFrom)
        is_gone = f"{home}{alias.name}.".startswith(self.gone) if self.gone else False
        local = alias.asname or alias.name
        if isinstance(statement, ast.Import) and "." in alias.name and not alias.asname:
            return is_gone and not self._reads(alias.name)
        if local in self._exported or "*" in self._exported or local in self._texts:
            return False
        uses = self._loads[local]
        return all(node in self._covered for node in uses) and bool(uses or is_gone)

    def _reads(self, module: str) -> bool:
        """Whether the file still reads a module by its whole name."""
        attributes = (n for n in self.names.nodes if isinstance(n, ast.Attribute))
        kept = (node for node in attributes if node not in self._covered)
        return any(self.names.of(node) == module for node in kept)

    def _root_of(self, alias: ast.alias) -> str:
        """``jax`` for ``import jax.experimental.maps``, if the file reads it and has no other
        import of it.
        """
        root, *inner = alias.name.split(".")
        kept = [node for node in self._loads[root] if node not in self._covered]
        others = [a for n in self.names.nodes if isinstance(n, ast.Import) for a in n.names]
        has_other = any(a.name == root and not a.asname for a in others)
        return root if inner and kept and not alias.asname and not has_other else ""

    # ---- names

    def _names_by_meaning(self) -> dict[str, str]:
        """The names that imports at the top of the file bind, and that stay."""
        found = {}
        for statement in self.tree.body:
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    home = "." * statement.level + (statement.module or "")
                    if not self._goes(statement, alias):
                        found[f"{home}:{alias.name}"] = alias.asname or alias.name
        for name, token in self._carried.items():
            found[":".join(token)] = name
        return found

    def _taken(self) -> set[str]:
        """The names that mean something in the file."""
        if not hasattr(self, "_taken_names"):
            kept = {name for name, nodes in self._loads.items() if {*nodes} - self._covered}
            bound = (name for node in self.names.nodes for name in self._bound(node))
            self._taken_names = kept.union(bound)
        return self._taken_names

    def _bound(self, node: ast.AST) -> list[str]:
        if not isinstance(node, IMPORTS):
            return bound_by(node)
        stay = [alias for alias in node.names if not self._goes(node, alias)]
        return [alias.asname or alias.name.split(".")[0] for alias in stay]

    def _text(self, text: str) -> str:
        return TOKEN.sub(lambda token: self._name(*token.groups()), text)

    def _name(self, module: str, name: str) -> str:
        """How the file calls a function of a module."""
        module = self.homes.get(module, module)
        known = self._known.get(f"{module}:{name}")
        if known:
            return known
        root, _, _ = module.partition(".")
        if {*self.names.bound.get(root, [])} == {root} and root in self._taken():
            return f"{module}.{name}"
        if name not in self._taken() and not hasattr(builtins, name):
            self._new[module].add(name)
            return name
        self._modules.add(module)
        return f"{module.rpartition('.')[2]}.{name}"

    def _new_imports(self, edits: list[Edit]) -> list[str]:
        """The lines that import what the new texts use; an import that is there takes more names
        by an edit.
        """
        lines = []
        for module in sorted(self._modules):
            package, dot, last = module.rpartition(".")
            lines.append(f"from {package or dot} import {last}" if dot else f"import {last}")
        for module, names in sorted(self._new.items()):
            more = ", ".join(sorted(names))
            there = self._import_of(module)
            if there is None:
                lines.append(f"from {module} import {more}")
            else:
                end = replacing(there.names[-1], "").end
                edits.append(Edit(end, end, f", {more}"))
        return lines

    def _import_of(self, module: str) -> ast.ImportFrom | None:
        found = (n for n in self.tree.body if isinstance(n, ast.ImportFrom))
        of_it = (n for n in found if "." * n.level + (n.module or "") == module)
        return next((n for n in of_it if not any(self._goes(n, a) for a in n.names)), None)


def _head(statement: Any) -> str:
    if isinstance(statement, ast.Import):
        return "import "
    return f"from {'.' * statement.level}{statement.module or ''} import "


def _statements(aliases: Iterable[tuple[str, str]]) -> list[str]:
    """Import statements, those of one module together."""
    by_head: dict[str, dict[str, None]] = defaultdict(dict)
    for head, alias in aliases:
        by_head[head][alias] = None
    return [head + ", ".join(names) for head, names in by_head.items()]


def merged(edits: Iterable[Edit]) -> list[Edit]:
    """One insertion for all that are at one place, in their order."""
    found: dict[tuple[Any, Any], str] = {}
    for start, end, text in edits:
        before = found.get((start, end), "") if start == end else ""
        found[start, end] = before + text
    return [Edit(*place, text) for place, text in found.items()]


def after_imports(tree: ast.Module, lines: Sequence[str], new: Iterable[str]) -> Edit:
    """Add imports after those with which a file begins, up to the first of JAX at least: before
    that, a program may set options that JAX reads.
    """
    last, seen = None, False
    for statement in tree.body:
        if isinstance(statement, IMPORTS):
            last = statement
            seen = seen or "jax" in ast.unparse(statement)
        elif seen:
            break
    if last is None:
        return Edit((1, 0), (1, 0), "".join(f"{line}\n" for line in new))
    line, column = replacing(last, "").end
    of_line = lines[line - 1].encode()
    is_last = not of_line[column:].partition(b"#")[0].strip()
    end = (line, len(of_line) if is_last else column)
    return Edit(end, end, "".join(f"\n{line}" for line in new))
