"""The texts of a program's files after its edits: ``mapped`` for ``xmap``, and the functions of the
helper file for those that name an axis.  All other names stay.

The driver, which does not import JAX, makes them from what the first run has found.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import os
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from xmap_compat.tools.check import editor, findings, table
from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.construction import Collective, Construction, Found
from xmap_compat.tools.leave.helper_text import FUNCTIONS
from xmap_compat.tools.leave.patch import Changes, Refused, contents
from xmap_compat.tools.leave.place_of_helper import Helper
from xmap_compat.tools.leave.places import GONE, HOMES, Source, span_of
from xmap_compat.tools.source.bindings import IMPORTS, Names
from xmap_compat.tools.source.layout import applied, program_of, python_of, replacing
from xmap_compat.tools.source.renaming import TOKEN, Renaming

_CONSTRAINT = "jax.experimental.pjit.with_sharding_constraint"
_MESHES = tuple(f"{home}.{name}" for home in HOMES for name in ("Mesh", "mesh"))
_LOOPS = tuple(f"{home}.{name}" for home in HOMES for name in ("SerialLoop", "AnonymousSerialLoop"))
_ENVIRONMENT = "thread_resources.env"
_INSTALLS = ("xmap_compat.install", "xmap_compat.legacy.install")
_OPTION = re.compile(r"(jax_)?experimental_xmap")
_MESH_READS = {".physical_mesh": "{h:context_mesh}()", ".shape": "{h:context_mesh}().shape"}


@dataclasses.dataclass
class Edited:
    """A program's files with edits.

    Attributes:
      changes: the old and the new contents of the files that change, and of the helper file.
      places: where each construction is made now: file, line, column, number.
      left: for what the program still needs this package.
      functions: what the helper file is to have.
    """

    changes: Changes
    places: list[tuple[str, int, int, int]]
    left: list[str]
    helper: Helper
    functions: Sequence[str]

    def line_before(self, path: str, line: int) -> tuple[str, str]:
        """The place and the text that a line of a file had before the edits."""
        same = contents(path)
        before, after = self.changes.get(path, (same, same))
        old = python_of(before or b"", path).split("\n")
        new = python_of(after, path).split("\n")
        number = line
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        for _, start, end, new_start, new_end in matcher.get_opcodes():
            if new_start < line <= new_end:
                number = max(1, min(start + line - new_start, end))
        return f"{os.path.basename(path)}:{number}", old[number - 1].strip()


class Program:
    """The files of a program, and what changes in them whichever constructions are patched."""

    def __init__(self, found: Found, contents: Mapping[str, bytes], beside: str):
        self.found, self.contents, self.beside = found, contents, beside
        self.helper = Helper(contents, found.files, beside)
        axes = {name for c in found.constructions for name in c.axes}
        stems = {name.partition(".")[0] for name in found.files.values()}
        stems |= {Path(path).stem for path in contents}
        self.own = stems - {"", "__init__"}
        spans: dict[str, set[Any]] = {}
        for each in (each for c in found.constructions for each in c.collectives):
            place = each.line, each.column, each.end_line, each.end_column
            spans.setdefault(each.file, set()).add(place)
        self.sources: dict[str, Source] = {}
        for path, data in contents.items():
            if path != self.helper.path:
                is_axis = (lambda name: True) if not axes else axes.__contains__
                traced = spans.get(path, set())
                self.sources[path] = Source(path, data, is_axis, traced, self.own)
        self.exported = self._exported()

    def _exported(self) -> set[str]:
        """The names that files of the program take from others of it."""
        found: set[str] = set()
        for source in self.sources.values():
            for node in source.names.nodes:
                if isinstance(node, ast.ImportFrom) and self._is_own(node.module, node.level):
                    found.update(alias.name for alias in node.names)
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    module = source.names.of(node.value)
                    if module and self._is_own(module, module.startswith(".")):
                        found.add(node.attr)
        return found

    def _is_own(self, module: str | None, level: int) -> bool:
        return bool(level) or (module or "").partition(".")[0] in self.own

    # ---- constructions that stay

    def judge(self) -> None:
        """Refuse the constructions that the edit cannot name, and add those that were not made."""
        made = {(c.file, c.line, c.column) for c in self.found.constructions}
        for c in self.found.constructions:
            c.refused = c.refused or self._why_not(c)
        for path, source in self.sources.items():
            for call in source.calls.values():
                place = path, call.lineno, call.col_offset
                if place not in made and source.xmap_at(call) is not None:
                    made.add(place)
                    number = len(self.found.constructions)
                    self.found.constructions.append(Construction(*place, number))

    def _why_not(self, c: Construction) -> str:
        source = self.sources.get(c.file)
        if source is None:
            return messages.NOT_OF_THE_PROGRAM.format(file=c.file)
        uses = source.xmaps(c.line, c.column)
        if len(uses) != 1:
            return messages.SEVERAL if uses else messages.NO_XMAP_HERE
        for each in c.collectives:
            words = self._why_not_named(each, c)
            if words:
                return words
        for other in self.sources.values():
            missed = other.missed(c.of_one_name)
            if missed is not None:
                text = other.shown(missed)
                return messages.OF_ONE_NAME.format(where=other.where(missed), text=text)
        return ""

    def _why_not_named(self, each: Collective, c: Construction) -> str:
        source = self.sources.get(each.file)
        if source is None or each.inside == self.helper.path:
            return ""
        call = source.calls.get((each.line, each.column, each.end_line, each.end_column))
        if call is None or source.is_named(call):
            return ""
        if each.inside != each.file and not c.of_one_name.intersection(each.names):
            return ""  # a layer of a library, of which the replay tells
        text = source.shown(call.func)
        library = source.library(call.func)
        is_known = library in FUNCTIONS
        remedy = messages.BY_NAME.format(library) if is_known else messages.BY_COLLECTIVES
        return messages.NOT_NAMED.format(where=source.where(call), text=text, remedy=remedy)

    # ---- the edits

    def edited(self, patched: Sequence[Construction], others: Collection[str]) -> Edited:
        """The program with ``mapped`` in the place of the xmaps that are patched.

        Args:
          others: files of the program that did not run, and need this package.
        """
        stays = len(patched) < len(self.found.constructions)
        self.functions: set[str] = set()
        asked: dict[str, Renaming] = {}
        for path, source in self.sources.items():
            renaming = Renaming(source.names, source.lines, GONE, self.exported)
            self._ask(source, renaming, [c for c in patched if c.file == path], stays)
            asked[path] = renaming
        self.helper.settle([path for path, renaming in asked.items() if renaming.is_asked])
        texts = {}
        for path, renaming in asked.items():
            renaming.homes = {"h": self.helper.module_for(path)}
            texts[path] = applied(self.contents[path], path, renaming.edits())
        texts, left = modernized(tuple(texts.items()))
        left += [name for path, data in texts.items() for name in _old_names(path, data)]
        left += [os.path.basename(path) for path in others]
        if not (left or stays):
            texts = {path: _without_install(path, data) for path, data in texts.items()}
        new: dict[str, tuple[bytes | None, bytes]] = {}
        for path, data in texts.items():
            if data != self.contents[path]:
                new[path] = self.contents[path], data
        new |= self.helper.change(self.functions)
        places = [place for path in texts for place in self._places(path, texts[path], patched)]
        return Edited(new, places, left, self.helper, sorted(self.functions))

    def _ask(
        self, source: Source, renaming: Renaming, patched: Sequence[Construction], stays: bool
    ) -> None:
        for node, function in source.functions.items():
            self._rename(renaming, node, f"{{h:{function}}}")
        for call in source.methods:
            self._ask_method(source, renaming, call)
        for value in source.layers:
            start, end, _ = replacing(value, "")
            renaming.write(start, start, "{h:axes_of}(")
            renaming.write(end, end, ")")
            self.functions.add("axes_of")
        for c in patched:
            self._ask_xmap(source, renaming, c)
        for node in source.names.nodes:
            if isinstance(node, (ast.Name, ast.Attribute)):
                self._ask_old(source, renaming, node, stays)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                given = node.value.args[:1]
                if given and _OPTION.match(str(getattr(given[0], "value", ""))):
                    renaming.remove(node)

    def _rename(self, renaming: Renaming, node: ast.AST, text: str) -> None:
        renaming.rename(node, text)
        self.functions.update(name for home, name in TOKEN.findall(text) if home == "h")

    def _ask_method(self, source: Source, renaming: Renaming, call: ast.Call) -> None:
        """``v.min("i")`` becomes ``min(v, "i")`` of the helper."""
        function: Any = call.func
        name = function.attr
        start, _, _ = replacing(call, "")
        dot = replacing(function.value, "").end
        given: Any = [*call.args, *(k for k in call.keywords)][0]
        between = source.between(dot, (given.lineno, given.col_offset))
        closing = between[: between.rindex(f".{name}")] if f".{name}" in between else ""
        renaming.write(start, start, f"{{h:{name}}}(")
        renaming.write(dot, (given.lineno, given.col_offset), f"{closing.rstrip()}, ")
        self.functions.add(name)

    def _ask_xmap(self, source: Source, renaming: Renaming, c: Construction) -> None:
        callees = source.xmaps(c.line, c.column)
        if not callees:
            return
        (callee,) = callees
        text, options = "{h:mapped}", "undeclared=True" * c.undeclared
        call: Any = source.names.parents[callee]
        keywords = {k.arg for k in call.keywords}
        if call.func is callee and not call.args and keywords and not keywords & {"fun", None}:
            # A decorator, which takes the function later.
            first = call.keywords[0]
            text = f"{{functools:partial}}({text}, {options}{', ' * bool(options)}"
            start, _, _ = replacing(callee, "")
            renaming.write(start, (first.lineno, first.col_offset), text)
            renaming.cover(callee)
        else:
            text = f"{{functools:partial}}({text}, {options})" if options else text
            self._rename(renaming, callee, text)
        self.functions.add("mapped")

    def _ask_old(self, source: Source, renaming: Renaming, node: ast.AST, stays: bool) -> None:
        """Other names of the old modules."""
        name = source.names.of(node)
        if not name.startswith((*GONE, "jax.experimental.pjit.")):
            return
        if not isinstance(getattr(node, "ctx", None), ast.Load):
            if name.endswith(_ENVIRONMENT):
                raise Refused(messages.ENVIRONMENT.format(where=source.where(node)))
        elif name in _MESHES:
            self._rename(renaming, node, "{jax.sharding:Mesh}")
        elif name == _CONSTRAINT:
            self._rename(renaming, node, "{jax.lax:with_sharding_constraint}")
        elif name in _LOOPS and not stays:
            self._rename(renaming, node, "{h:SerialLoop}")
        elif not stays:
            for ending, text in _MESH_READS.items():
                if name.endswith(_ENVIRONMENT + ending):
                    self._rename(renaming, node, text)

    def _places(
        self, path: str, data: bytes, patched: Sequence[Construction]
    ) -> list[tuple[str, int, int, int]]:
        """Where the constructions of a file are made now: what stands there keeps its order."""
        source = self.sources[path]
        before = [(span_of(node), -1) for node in _mapped_in(source.names)]
        for c in patched:
            if c.file == path:
                (callee,) = source.xmaps(c.line, c.column)
                before.append((span_of(callee), c.number))
        names = Names(program_of(data, path).tree)
        now = sorted(_mapped_in(names), key=span_of)
        if len(now) != len(before):
            raise Refused(messages.LOST.format(path=path))
        found = []
        for node, (_, number) in zip(now, sorted(before)):
            call: Any = names.parents[node]
            if number >= 0:
                found.append((path, call.lineno, call.col_offset, number))
        return found


def _mapped_in(names: Names) -> list[ast.AST]:
    found = []
    for node in names.nodes:
        if isinstance(getattr(node, "ctx", None), ast.Load):
            home, _, name = names.of(node).rpartition(".")
            if name == "mapped" and re.search(r"(^|\.)named_axes(_\d+)?$", home):
                found.append(node)
    return found


# ---- names of JAX that are gone


@functools.lru_cache(maxsize=8)
def modernized(contents: tuple[tuple[str, bytes], ...]) -> tuple[dict[str, bytes], list[str]]:
    """Files with today's names for what JAX has removed elsewhere, as ``check --fix`` writes them,
    and what it leaves.
    """
    of_xmap = [name for name in (*table.NAMES, *table.MODULES) if f"{name}.".startswith(GONE)]
    with tempfile.TemporaryDirectory() as folder:
        copies = {Path(folder + path).resolve(): path for path, _ in contents}
        for path, data in contents:
            copy = Path(folder + path).resolve()
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(data)
        fixed = editor.fixed(findings.check(list(copies)), install=False, keep=of_xmap)
    texts = dict(contents)
    texts |= {copies[path.resolve()]: data for path, data in fixed.contents.items()}
    return texts, [f"{found.gone.name} of {found.path.name}:{found.line}" for found in fixed.left]


def _old_names(path: str, data: bytes) -> list[str]:
    """The names of this package, or of old modules, that a file still imports."""
    names, found = Names(program_of(data, path).tree), []
    installs = {id(part) for node in _install_calls(names) for part in ast.walk(node)}
    for node in names.nodes:
        if isinstance(node, IMPORTS):
            for alias in old_aliases(node):
                local = alias.asname or alias.name.partition(".")[0]
                loads = [n for n in names.nodes if isinstance(n, ast.Name) and n.id == local]
                if not loads or any(id(n) not in installs for n in loads):
                    found.append(f"{alias.name} of {os.path.basename(path)}:{node.lineno}")
    return found


def old_aliases(node: Any) -> list[ast.alias]:
    home = ""
    if isinstance(node, ast.ImportFrom):
        home = f"{'.' * node.level}{node.module or ''}."
    return [alias for alias in node.names if f"{home}{alias.name}.".startswith(GONE)]


def _install_calls(names: Names) -> list[ast.Expr]:
    statements = (n for n in names.nodes if isinstance(n, ast.Expr))
    calls = (n for n in statements if isinstance(n.value, ast.Call))
    return [n for n in calls if names.of(n.value.func) in _INSTALLS]  # type: ignore[attr-defined]


def _without_install(path: str, data: bytes) -> bytes:
    program = program_of(data, path)
    names = Names(program.tree)
    calls = _install_calls(names)
    if not calls:
        return data
    renaming = Renaming(names, program.text.split("\n"), GONE)
    for statement in calls:
        renaming.remove(statement)
    return applied(data, path, renaming.edits())
