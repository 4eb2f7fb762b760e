"""The texts of a program's files after its edits: ``mapped`` for ``xmap``, and the functions of the
helper file for those that name an axis.  All other names stay.

The command, which does not import JAX, makes them from what the first run has found.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from xmap_compat.tools.check import editor, findings, removed_names
from xmap_compat.tools.leave import messages
from xmap_compat.tools.leave.patch import Change
from xmap_compat.tools.leave.place_of_helper import Helper
from xmap_compat.tools.leave.places import HOMES, OLD_PREFIXES, Source
from xmap_compat.tools.leave.replaying import PROBE
from xmap_compat.tools.leave.xmap_calls import FirstRun, XmapCall
from xmap_compat.tools.source.bindings import IMPORTS, text_of
from xmap_compat.tools.source.layout import applied, parsed, replacing
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


# In the copy that runs, `mapped` is `__leave__(number, mapped)`.
_PROBED = re.compile(rf"{PROBE}\(\d+, ([\w.]+)\)".encode())


@dataclasses.dataclass
class Edited:
    """A program's files with edits.

    Attributes:
      changes: the old and the new contents of the files that change, and of the helper file.
      probed: the new contents of the files that run: which xmap call makes a function is known.
      needs: what of this program still needs this package, in words.
      helper: the helper file.
    """

    changes: dict[str, Change] = dataclasses.field(default_factory=dict)
    probed: dict[str, bytes] = dataclasses.field(default_factory=dict)
    needs: list[str] = dataclasses.field(default_factory=list)
    helper: str = ""


class ProgramFiles:
    """The files of a program, and what changes in them whichever xmap calls are patched."""

    def __init__(self, found: FirstRun, beside: str):
        self.found = found
        self.helper = Helper(found.files, beside)
        self.modules = {name.partition(".")[0] for name in found.files.values()} - {""}
        axes: set[Any] = set()
        for c in found.xmap_calls:
            axes |= c.axes
        self.files: dict[str, bytes] = {}
        self.sources: dict[str, Source] = {}
        for path in found.files:
            if path != self.helper.path:
                self.files[path] = Path(path).read_bytes()
                self.sources[path] = Source(path, self.files[path], axes, self.modules)
        self.exported = self._exported()

    def _exported(self) -> set[str]:
        """The names that files of the program take from others of it."""

        def is_of_program(module):
            return module.startswith(".") or module.partition(".")[0] in self.modules

        found: set[str] = set()
        for source in self.sources.values():
            found |= source.names.taken_from(is_of_program)
        return found

    def refuse_or_add(self) -> None:
        """Refuse the xmap calls whose xmap is not in a file of the program, and add those that
        this run did not make: in other modules than the script they stay.
        """
        made = set()
        for c in self.found.xmap_calls:
            callee = self._callee(c)
            made.add(callee)
            if c.file not in self.sources:
                c.refused = messages.NOT_OF_THE_PROGRAM.format(file=os.path.basename(c.file))
            elif callee is None:
                c.refused = messages.NO_XMAP_HERE
            for path, source in self.sources.items():
                for axis in c.like_mesh_axes & source.unedited.keys():
                    where = f"{os.path.basename(path)}:{source.unedited[axis]}"
                    c.refused = c.refused or messages.UNEDITED.format(where=where)
        for path, source in self.sources.items():
            for span, callee in source.xmaps.items():
                if callee not in made:
                    made.add(callee)
                    c = XmapCall(path, span, number=len(self.found.xmap_calls))
                    self.found.xmap_calls.append(c)
                    if self.found.files[path] != "__main__":
                        c.refused = messages.NOT_MADE

    def _callee(self, c: XmapCall) -> Any:
        """The ``xmap`` that is called there."""
        source = self.sources.get(c.file)
        return source.xmaps.get(c.span) if source else None

    # ---- the edits

    def edited(self, others: Collection[str]) -> Edited:
        """The program with ``mapped`` in the place of the xmaps that are not refused.

        Args:
          others: files of the program that did not run, and need this package.
        """
        patched = [c for c in self.found.xmap_calls if not c.refused]
        stays = len(patched) < len(self.found.xmap_calls)
        installs = stays or bool(others)
        probed, needs = self._texts(patched, stays, installs)
        # Something else needs this package: then calls of install() stay too.
        if needs and not installs:
            probed, _ = self._texts(patched, stays, installs=True)
        changes = self.helper.change(self.functions)
        for path, data in probed.items():
            data = _PROBED.sub(rb"\1", data)
            if data != self.files[path]:
                changes[path] = self.files[path], data
        return Edited(
            changes=changes,
            probed=probed,
            needs=[*needs, *others],
            helper=self.helper.path,
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
            self._rename_names(source, renaming, stays, installs)
            renamings[path] = renaming
        for c in patched:
            self._rename_xmap(self.sources[c.file], renamings[c.file], c)
        edited = {path for path, renaming in renamings.items() if renaming.has_edits}
        self.helper.choose_place(sorted(edited))
        texts = {}
        self.functions: set[str] = set()
        for path, renaming in renamings.items():
            self.functions |= renaming.names_from("h")
            renaming.homes = {"h": self.helper.module_for(path)}
            texts[path] = applied(self.files[path], path, renaming.edits())
        texts, needs = _modernized(texts)
        for path, data in texts.items():
            for node in ast.walk(parsed(data, path).tree):
                for alias in _old_aliases(node):
                    is_for_install = alias.name in ("xmap_compat", "install")
                    if not (installs and is_for_install):
                        needs.append(f"{alias.name} of {os.path.basename(path)}:{alias.lineno}")
        return texts, needs

    def _rename_names(
        self, source: Source, renaming: Renaming, stays: bool, installs: bool
    ) -> None:
        """Rename functions that name an axis, and names of old modules; remove calls of
        ``install()`` and options of xmap that nothing needs.
        """
        for node, function in source.functions.items():
            renaming.rename(node, f"{{h:{function}}}")
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

    def _rename_xmap(self, source: Source, renaming: Renaming, c: XmapCall) -> None:
        """``xmap(`` becomes ``mapped(``, or a ``partial`` function of it."""
        callee = self._callee(c)
        call: Any = source.names.parents[callee]
        mapped = f"{PROBE}({c.number}, {{h:mapped}})"
        if c.undeclared:
            mapped = f"{{functools:partial}}({mapped}, undeclared=True)"
        first = call.keywords[0] if call.keywords else None
        if call.func is callee and not call.args and first and first.arg not in ("fun", None):
            # `xmap(in_axes=...)` without a function is a decorator; `mapped` needs `partial` for
            # that.
            start, _, _ = replacing(callee, "")
            text = f"{{functools:partial}}({mapped}, "
            renaming.write(start, (first.lineno, first.col_offset), text)
            renaming.cover(callee)
        else:
            renaming.rename(callee, mapped)


def _is_option(call: ast.Call) -> bool:
    """Whether a call sets an option of xmap."""
    return any(_OPTION.match(text_of(node)) for node in call.args[:1])


# ---- names of JAX that are gone


def _modernized(texts: dict[str, bytes]) -> tuple[dict[str, bytes], list[str]]:
    """Files with today's names for what JAX has removed elsewhere, as ``check --fix`` writes them,
    and what it leaves.
    """
    of_xmap = [name for name in removed_names.ALL if f"{name}.".startswith(OLD_PREFIXES)]
    new = dict(texts)
    with tempfile.TemporaryDirectory() as folder:
        copies = {Path(folder + path).resolve(): path for path in texts}
        for copy, path in copies.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(texts[path])
        fixed = editor.fixed(findings.check([*copies]), install=False, keep=of_xmap)
    for copy, data in fixed.contents.items():
        new[copies[copy.resolve()]] = data
    return new, [f"{found.gone.name} of {found.path.name}:{found.line}" for found in fixed.left]


def _old_aliases(node: Any) -> list[ast.alias]:
    """The names of this package, or of old modules, that an import brings."""
    if not isinstance(node, IMPORTS):
        return []
    home = ""
    if isinstance(node, ast.ImportFrom):
        home = f"{'.' * node.level}{node.module or ''}."
    return [alias for alias in node.names if f"{home}{alias.name}.".startswith(OLD_PREFIXES)]
