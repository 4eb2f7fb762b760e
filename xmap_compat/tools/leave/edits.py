"""The texts of a program's files after its edits: ``mapped`` for ``xmap``, and the functions of the
helper file for those that name an axis.  All other names stay.

The command, which does not import JAX, makes them from what the first run has found.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from xmap_compat.tools.check import editor, findings, table
from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.patch import Changes, Refused, contents
from xmap_compat.tools.leave.place_of_helper import Helper
from xmap_compat.tools.leave.places import HOMES, OLD_PREFIXES, Source
from xmap_compat.tools.leave.xmap_calls import FirstRun, Span, XmapCall, span_of
from xmap_compat.tools.source.bindings import IMPORTS, Names, text_of
from xmap_compat.tools.source.layout import applied, parsed, replacing, text_as_python
from xmap_compat.tools.source.renaming import Renaming

# What takes the place of other names of old modules: always, or where no xmap stays.
_ALWAYS = {"jax.experimental.pjit.with_sharding_constraint": "{jax.lax:with_sharding_constraint}"}
_WITHOUT_XMAP = {}
for _home in HOMES:
    for _name in ("Mesh", "mesh"):
        _ALWAYS[f"{_home}.{_name}"] = "{jax.sharding:Mesh}"
    for _name in ("SerialLoop", "AnonymousSerialLoop"):
        _WITHOUT_XMAP[f"{_home}.{_name}"] = "{h:SerialLoop}"
    _env = f"{_home}.thread_resources.env"
    _WITHOUT_XMAP[f"{_env}.physical_mesh"] = "{h:context_mesh}()"
    _WITHOUT_XMAP[f"{_env}.shape"] = "{h:context_mesh}().shape"
_INSTALLS = ("xmap_compat.install", "xmap_compat.legacy.install")
_OPTION = re.compile(r"(jax_)?experimental_xmap")


@dataclasses.dataclass
class Edited:
    """A program's files with edits.

    Attributes:
      changes: the old and the new contents of the files that change, and of the helper file.
      places: where each xmap call starts now: file, line and column, number.
      needs: what of this program still needs this package, in words.
      helper: the helper file.
      functions: what the helper file is to have.
      with_mesh: a line of which JAX warned when it ran: it enters a mesh by ``with mesh:``.
    """

    changes: Changes = dataclasses.field(default_factory=dict)
    places: list[tuple[str, tuple[int, int], int]] = dataclasses.field(default_factory=list)
    needs: list[str] = dataclasses.field(default_factory=list)
    helper: str = ""
    functions: Sequence[str] = ()
    with_mesh: str = ""

    def line_before(self, path: str, line: int) -> tuple[str, str]:
        """The place and the text that a line below the imports had before the edits."""
        before, after = self.changes.get(path) or (contents(path),) * 2
        old = text_as_python(before or b"", path).split("\n")
        line += len(old) - len(text_as_python(after, path).split("\n"))
        return f"{os.path.basename(path)}:{line}", old[line - 1].strip()


class ProgramFiles:
    """The files of a program, and what changes in them whichever xmap calls are patched."""

    def __init__(self, found: FirstRun, files: Mapping[str, bytes], beside: str):
        self.found = found
        self.files = files
        self.helper = Helper(files, found.files, beside)
        self.modules = {name.partition(".")[0] for name in found.files.values()} - {""}
        axes: set[Any] = set()
        traced: dict[str, set[Span]] = defaultdict(set)
        for c in found.xmap_calls:
            axes |= c.axes
            for path, span in c.collectives:
                traced[path].add(span)
        self.sources: dict[str, Source] = {}
        for path, data in files.items():
            if path != self.helper.path:
                self.sources[path] = Source(path, data, axes, traced[path], self.modules)
        self.exported = self._exported()

    def _exported(self) -> set[str]:
        """The names that files of the program take from others of it."""

        def is_of_program(module):
            return module.startswith(".") or module.partition(".")[0] in self.modules

        found: set[str] = set()
        for source in self.sources.values():
            found |= source.names.taken_from(is_of_program)
        return found

    # ---- xmap calls that stay

    def refuse_or_add(self) -> None:
        """Refuse the xmap calls that the edit cannot name, and add those that this run did not
        make.
        """
        made = set()
        for c in self.found.xmap_calls:
            c.refused = c.refused or self._why_not(c)
            made.add(self._callee(c))
        for path, source in self.sources.items():
            for callee, span in source.xmaps().items():
                if callee not in made:
                    number = len(self.found.xmap_calls)
                    self.found.xmap_calls.append(XmapCall(path, span, number))

    def _callee(self, c: XmapCall) -> ast.expr | None:
        """The ``xmap`` that is called there."""
        source = self.sources.get(c.file)
        return source.xmap_at(c.span) if source else None

    def _why_not(self, c: XmapCall) -> str:
        if c.file not in self.sources:
            return messages.NOT_OF_THE_PROGRAM.format(file=c.file)
        if self._callee(c) is None:
            return messages.NO_XMAP_HERE
        for path, span in c.collectives:
            source = self.sources.get(path)
            call = source.not_named(span) if source else None
            if source and call:
                where = source.where(call)
                return messages.NOT_NAMED.format(where=where, text=source.shown(call.func))
        for source in self.sources.values():
            missed = source.missed(c.named_like_mesh_axes)
            if missed is not None:
                where = source.where(missed)
                return messages.OF_ONE_NAME.format(where=where, text=source.shown(missed))
        return ""

    # ---- the edits

    def edited(self, patched: Sequence[XmapCall], others: Collection[str]) -> Edited:
        """The program with ``mapped`` in the place of the xmaps that are patched.

        Args:
          others: files of the program that did not run, and need this package.
        """
        stays = len(patched) < len(self.found.xmap_calls)
        texts, needs = self._texts(patched, stays, installs=stays or bool(others))
        # Something else needs this package: then calls of install() stay too.
        if needs and not stays:
            texts, _ = self._texts(patched, stays, installs=True)
        changes: dict[str, tuple[bytes | None, bytes]] = {}
        places = []
        for path, data in texts.items():
            places += self._places(path, data, patched)
            if data != self.files[path]:
                changes[path] = self.files[path], data
        changes |= self.helper.change(self.functions)
        return Edited(
            changes=changes,
            places=places,
            needs=[*needs, *others],
            helper=self.helper.path,
            functions=sorted(self.functions),
        )

    def _texts(
        self, patched: Sequence[XmapCall], stays: bool, installs: bool
    ) -> tuple[dict[str, bytes], list[str]]:
        """The new contents of the files, and what they still need of this package.

        Args:
          stays: whether an xmap stays.
          installs: whether calls of ``install()`` stay.
        """
        renamings: dict[str, Renaming] = {}
        for path, source in self.sources.items():
            renaming = Renaming(source.names, source.lines, OLD_PREFIXES, self.exported)
            self._ask(source, renaming, stays, installs)
            for c in patched:
                if c.file == path:
                    self._ask_xmap(source, renaming, c)
            renamings[path] = renaming
        asked = {path for path, renaming in renamings.items() if renaming.is_asked}
        self.helper.settle(sorted(asked))
        texts = {}
        self.functions: set[str] = set()
        for path, renaming in renamings.items():
            self.functions |= renaming.asked_of("h")
            renaming.homes = {"h": self.helper.module_for(path)}
            texts[path] = applied(self.files[path], path, renaming.edits())
        texts, unmended = modernized(tuple(texts.items()))
        needs = [*unmended]
        for path, data in texts.items():
            for node in ast.walk(parsed(data, path).tree):
                for alias in old_aliases(node):
                    is_for_install = alias.name in ("xmap_compat", "install")
                    if not (installs and is_for_install):
                        needs.append(f"{alias.name} of {os.path.basename(path)}:{alias.lineno}")
        return texts, needs

    def _ask(self, source: Source, renaming: Renaming, stays: bool, installs: bool) -> None:
        for node, function in source.functions.items():
            renaming.rename(node, f"{{h:{function}}}")
        for call in source.methods:
            self._ask_method(source, renaming, call)
        for value in source.layers:
            start, end, _ = replacing(value, "")
            renaming.write(start, start, "{h:axes_of}(")
            renaming.write(end, end, ")")
        names = _ALWAYS if stays else _ALWAYS | _WITHOUT_XMAP
        for node in source.names.nodes:
            name = source.names.imported_name(node)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                called = source.names.imported_name(node.value.func)
                goes = called in _INSTALLS and not installs
                if goes or _is_option(node.value):
                    renaming.remove(node)
            elif name in names and isinstance(node.ctx, ast.Load):
                renaming.rename(node, names[name])
            elif name.endswith("thread_resources.env") and not isinstance(node.ctx, ast.Load):
                raise Refused(messages.ENVIRONMENT.format(where=source.where(node)))

    def _ask_method(self, source: Source, renaming: Renaming, call: ast.Call) -> None:
        """``v.min("i")`` becomes ``min(v, "i")`` of the helper."""
        function: Any = call.func
        first: Any = (call.args or call.keywords)[0]
        start, _, _ = replacing(call, "")
        dot = replacing(function.value, "").end
        given = first.lineno, first.col_offset
        closing, _, _ = source.between(dot, given).partition(f".{function.attr}")
        renaming.write(start, start, f"{{h:{function.attr}}}(")
        renaming.write(dot, given, f"{closing.rstrip()}, ")

    def _ask_xmap(self, source: Source, renaming: Renaming, c: XmapCall) -> None:
        """``xmap(`` becomes ``mapped(``, or a ``partial`` function of it."""
        callee: Any = self._callee(c)
        call: Any = source.names.parents[callee]
        options = ", undeclared=True" if c.undeclared else ""
        first = call.keywords[0] if call.keywords else None
        if call.func is callee and not call.args and first and first.arg not in ("fun", None):
            # `xmap(in_axes=...)` without a function is a decorator; `mapped` needs `partial` for
            # that.
            start, _, _ = replacing(callee, "")
            text = f"{{functools:partial}}({{h:mapped}}{options}, "
            renaming.write(start, (first.lineno, first.col_offset), text)
            renaming.cover(callee)
        elif options:
            renaming.rename(callee, f"{{functools:partial}}({{h:mapped}}{options})")
        else:
            renaming.rename(callee, "{h:mapped}")

    def _places(
        self, path: str, data: bytes, patched: Sequence[XmapCall]
    ) -> list[tuple[str, tuple[int, int], int]]:
        """Where the xmap calls of a file are now: what stands there keeps its order."""
        before = {span_of(node): -1 for node in _mapped_in(self.sources[path].names)}
        for c in patched:
            if c.file == path:
                before[span_of(self._callee(c))] = c.number
        names = Names(parsed(data, path).tree)
        now = sorted(_mapped_in(names), key=span_of)
        if len(now) != len(before):
            raise Refused(messages.LOST.format(path=path))
        found = []
        for node, (_, number) in zip(now, sorted(before.items())):
            if number >= 0:
                line, column, _, _ = span_of(names.parents[node])
                found.append((path, (line, column), number))
        return found


def _is_option(call: ast.Call) -> bool:
    """Whether a call sets an option of xmap."""
    return bool(call.args) and bool(_OPTION.match(text_of(call.args[0])))


def _mapped_in(names: Names) -> list[ast.AST]:
    """The uses of the helper's ``mapped``."""
    found = []
    for node in names.nodes:
        is_read = isinstance(getattr(node, "ctx", None), ast.Load)
        if is_read and re.search(r"(^|\.)named_axes(_\d+)?\.mapped$", names.imported_name(node)):
            found.append(node)
    return found


# ---- names of JAX that are gone


@functools.lru_cache(maxsize=8)
def modernized(files: tuple[tuple[str, bytes], ...]) -> tuple[dict[str, bytes], list[str]]:
    """Files with today's names for what JAX has removed elsewhere, as ``check --fix`` writes them,
    and what it leaves.
    """
    of_xmap = [name for name in table.ALL if f"{name}.".startswith(OLD_PREFIXES)]
    texts = dict(files)
    with tempfile.TemporaryDirectory() as folder:
        copies = {Path(folder + path).resolve(): path for path in texts}
        for copy, path in copies.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(texts[path])
        fixed = editor.fixed(findings.check([*copies]), install=False, keep=of_xmap)
    for copy, data in fixed.contents.items():
        texts[copies[copy.resolve()]] = data
    return texts, [f"{found.gone.name} of {found.path.name}:{found.line}" for found in fixed.left]


def old_aliases(node: Any) -> list[ast.alias]:
    """The names of this package, or of old modules, that an import brings."""
    if not isinstance(node, IMPORTS):
        return []
    home = ""
    if isinstance(node, ast.ImportFrom):
        home = f"{'.' * node.level}{node.module or ''}."
    return [alias for alias in node.names if f"{home}{alias.name}.".startswith(OLD_PREFIXES)]
