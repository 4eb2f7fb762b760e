"""Rewrites removed names where they stand: today's names, none if nothing uses them, ``install()`` for the rest."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from xmap_compat.tools.check import table
from xmap_compat.tools.check.findings import Checked, Finding, check
from xmap_compat.tools.check.sources import NOTEBOOK, Program, cells_of
from xmap_compat.tools.check.texts import Names, text_of

INSTALL = "import xmap_compat; xmap_compat.install()"
MESHES = (f"{table.MAPS}.Mesh", "jax.interpreters.pxla.Mesh")
# What may take a name away from the axes that a result varies over.
_REDUCES = re.compile(r"\b(psum|pmean|pmax|pmin|pdot|xeinsum|all_gather|pargmax|pargmin|einsum)\b")
# Keywords that are more than another name of the same: of pjit and its constraint.
_SAME_KEYWORDS = {gone.name: gone for gone in table.KEYWORDS.values() if gone.now and ".pjit." not in gone.name}
# Where a mesh class is a value: ours is another class than JAX's.
_COMPARES = re.compile(
    r"\b(isinstance|issubclass|type|__class__|case|register)\b.*\bMesh\b|[{,] *(\w+\.)*Mesh *[]:,}]|: Mesh\): return"
)
Spot = tuple[int, int]  # a line, from 1, and a column in bytes, from 0
Edit = tuple[Spot, Spot, str]


@dataclasses.dataclass(frozen=True)
class Fixed:
    """What fixing some files gives."""

    texts: dict[Path, str]  # the new texts of the files that need one
    left: tuple[Finding, ...]  # what it could not mend, each with ``path``, ``line``, ``gone.name``, ``gone.remedy``
    needs_install: bool  # whether a file needs ``install()``, which its new text calls if it may


def fixed(paths: Sequence[Path], *, install: bool = True, keep: Collection[str] = ()) -> Fixed:
    """New texts of the files of ``paths`` that need one.

    Args:
      paths: files and folders.
      install: whether a file may call ``install()`` where only that gives a name; if not, the name is in ``left``.
      keep: dotted removed names that stay as they are.
    """
    return edited(check(paths), install, keep)


def edited(checked: Checked, install: bool = True, keep: Collection[str] = ()) -> Fixed:
    found: dict[Path, list[Finding]] = defaultdict(list)
    for finding in checked.findings:
        if finding.gone.name not in keep:
            found[finding.path].append(finding)
    new, left, needs = {}, [], False
    for program in checked.programs:
        if program.errors or program.path not in found:
            continue
        file = _File(program, found[program.path], keep, set(_taken(program.path, checked.programs)))
        needs |= bool(file.installed)
        left += file.left + file.installed * (not install)
        edits = file.all_edits(install)
        try:
            text = _written(program, edits) if edits else ""
        except SyntaxError:
            left += found[program.path]
        else:
            new.update({program.path: text} if text else {})
    return Fixed(new, tuple(left), needs)


def _taken(path: Path, programs: Iterable[Program]) -> Iterator[str]:
    """The names that other files, given or beside this one, import from modules of their own."""
    beside = [other for other in sorted(path.parent.glob("*.py")) if other != path]
    texts = [other.read_text(encoding="utf-8", errors="replace") for other in beside[:500]]
    for text in (*texts, *(program.text for program in programs if program.path != path)):
        for names in re.findall(rf"(?m)^\s*from\s+[.\w]*\b{re.escape(path.stem)}\s+import\s+\(?([^\n)]*)", text):
            yield from re.findall(r"\w+", names)
        yield from re.findall(rf"\b{re.escape(path.stem)}\.(\w+)", text)


def _written(program: Program, edits: Iterable[Edit]) -> str:
    """The text of the file after its edits; raises if it is no Python."""
    by_cell: dict[int, list[Edit]] = defaultdict(list)
    for (line, column), (end_line, end_column), text in edits:
        number, first = program.where(line)
        by_cell[number].append(((first, column), (first + end_line - line, end_column), text))
    texts = {cell.number: applied(cell.text, by_cell[cell.number]) for cell in program.cells}
    if program.path.suffix != NOTEBOOK:
        ast.parse(texts[0])
        return texts[0]
    source = json.loads(program.path.read_bytes())
    for cell in cells_of(program.path):
        if by_cell[cell.number]:
            source["cells"][cell.number - 1]["source"] = texts[cell.number].splitlines(True)
    return json.dumps(source, indent=1, ensure_ascii=False) + "\n"


def applied(text: str, edits: Iterable[Edit]) -> str:
    lines = text.split("\n")
    end = "\r\n" if "\r\n" in text else "\n"
    for (line, column), (end_line, end_column), new in sorted(edits, reverse=True):
        before = lines[line - 1].encode()[:column].decode()
        after = lines[end_line - 1].encode()[end_column:].decode()
        lines[line - 1 : end_line] = (before + new.replace("\n", end) + after).split("\n")
    return "\n".join(lines)


def _start(node: ast.AST) -> Spot:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


def _end(node: ast.AST) -> Spot:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


class _File:
    """The edits of one file."""

    def __init__(self, program: Program, findings: list[Finding], keep: Collection[str], taken: set[str]):
        self._program, self._keep = program, keep
        self._lines = program.text.split("\n")
        self._names = Names(program.tree)
        self._parents = {id(child): node for node in self._names.nodes for child in ast.iter_child_nodes(node)}
        self._exported = taken | {text for node in self._names.nodes if (text := text_of(node))}
        self._rewritten: set[int] = set()
        self._added: set[str] = set()
        self.edits: list[Edit] = []
        self.left: list[Finding] = []
        self.installed: list[Finding] = []
        self._undeclared = any(map(self._may_be_undeclared, self._names.nodes))
        imports = [finding for finding in findings if isinstance(finding.node, ast.alias)]
        self._compares = _COMPARES.search(program.text) is not None
        for finding in findings:
            if not isinstance(finding.node, ast.alias):
                self._use(finding)
        by_statement: dict[int, dict[int, Finding]] = defaultdict(dict)
        for finding in imports:
            by_statement[id(self._parents[id(finding.node)])][id(finding.node)] = finding
        for of_statement in by_statement.values():
            self._import(of_statement)

    def all_edits(self, install: bool) -> list[Edit]:
        """The edits, with the imports and the call of ``install()`` that they need, before the first import of JAX."""
        lines = sorted(f"import {name}" for name in self._added)
        if self.installed and install:
            lines = [line for line in lines if line != "import xmap_compat"] + [INSTALL]
        if not lines:
            return self.edits
        first = next(node for node in self._program.tree.body if any(map(self._is_of_jax, ast.walk(node))))
        line, column = _start(first)
        before = self._lines[line - 1].encode()[:column].decode()
        separator = "; " if before.strip() else "\n" + before
        return [*self.edits, ((line, column), (line, column), separator.join([*lines, ""]))]

    def _is_of_jax(self, node: ast.AST) -> bool:
        needing = any(finding.node is node for finding in self.installed)
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) and not node.level else []
        return (
            needing
            or any(name.split(".")[0] in ("jax", "flax", "haiku", "optax") for name in names)
            or bool(id(node) in self._rewritten)
        )

    def _leave(self, finding: Finding) -> None:
        """Not rewritten: ``install()`` gives the name, or a hand has to."""
        if finding.dies:
            self.left.append(finding)
        elif finding.gone.kind != table.GONE and (not finding.guarded or finding.caught):
            self.installed.append(finding)

    def _now(self, finding: Finding) -> str:
        """Today's name of the same object, if it means the same here."""
        differs = (self._undeclared and finding.gone.name == f"{table.MAPS}.xmap") or (
            self._compares and finding.gone.name in MESHES
        )
        return "" if differs else finding.gone.now

    # ------------------------------------------------------------------------------- uses

    def _use(self, finding: Finding) -> None:
        node, now = finding.node, self._now(finding)
        if isinstance(node, ast.Name) and node.id in self._names.imported:
            if finding.dies:
                self.left.append(finding)
        elif isinstance(node, ast.keyword) and finding.gone.name in _SAME_KEYWORDS and node.arg:
            line, column = _start(node)
            self.edits.append(((line, column), (line, column + len(node.arg)), _SAME_KEYWORDS[finding.gone.name].now))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and now and self._attribute(node, now):
            self._rewritten.add(id(node))
        else:
            self._leave(finding)

    def _attribute(self, node: ast.Attribute, now: str) -> bool:
        """Write today's name; whether its first part can be had."""
        module, _, last = now.rpartition(".")
        root = now.split(".")[0]
        if self._names.dotted(node.value) == module:
            line, column = _end(node)
            self.edits.append(((line, column - len(node.attr.encode())), (line, column), last))
            return True
        if root in self._names.values or self._names.imported.get(root, root) != root:
            return False
        needed = [module] if module.startswith(("jax.extend", "jax.example_libraries", "collections")) else [root]
        top = {a.name for n in self._program.tree.body if isinstance(n, ast.Import) for a in n.names if not a.asname}
        self._added |= {name for name in needed if not any(f"{t}.".startswith(f"{name}.") for t in top)}
        self.edits.append((_start(node), _end(node), now))
        return True

    # ---------------------------------------------------------------------------- imports

    def _stays(self, node: ast.AST | None) -> bool:
        """Whether a node is not part of what was rewritten."""
        while node is not None and id(node) not in self._rewritten:
            node = self._parents.get(id(node))
        return node is None

    def _is_used(self, local: str) -> bool:
        """Whether something still reads a name of this file."""
        names = (n for n in self._names.nodes if isinstance(n, ast.Name) and n.id == local)
        return local in self._exported or any(not isinstance(n.ctx, ast.Store) and self._stays(n) for n in names)

    def _import(self, findings: dict[int, Finding]) -> None:
        statement = self._parents[next(iter(findings))]
        assert isinstance(statement, (ast.Import, ast.ImportFrom))
        stays: list[ast.alias] = []
        moved: list[tuple[ast.alias, str]] = []
        for alias in statement.names:
            finding = findings.get(id(alias))
            local = alias.asname or alias.name
            if finding is None:
                stays.append(alias)
            elif isinstance(statement, ast.Import) and not alias.asname:
                if self._whole_name_stays(alias.name):
                    self._leave(finding)
                    stays.append(alias)
                else:
                    moved.append((alias, table.MOVED.get(alias.name, "jax")))
            elif self._is_used(local):
                if now := table.MOVED.get(finding.gone.name) or self._now(finding):
                    moved.append((alias, now))
                else:
                    self._leave(finding)
                    stays.append(alias)
        if len(stays) < len(statement.names):
            self._rewritten.add(id(statement))
            self._statement(statement, stays, moved)

    def _whole_name_stays(self, module: str) -> bool:
        """Whether ``import a.b`` serves a name ``a.b.c`` that is not rewritten."""
        names = (n for n in self._names.nodes if isinstance(n, ast.Attribute) and self._names.dotted(n) == module)
        return any(map(self._stays, names))

    def _statement(self, node: ast.Import | ast.ImportFrom, stays: list[ast.alias], moved: list) -> None:
        """Write an import anew: its comments, the names that have moved, and those that stay, in their order."""
        heads: dict[str, list[str]] = defaultdict(list)
        for alias, now in moved:
            module, _, last = now.rpartition(".")
            local = alias.asname or (alias.name if isinstance(node, ast.ImportFrom) else "")
            if isinstance(node, ast.ImportFrom) and module:
                heads[f"from {module} import "].append(last if last == local else f"{last} as {local}")
            else:
                heads["import "].append(f"{now} as {local}" if local and local != now else now)
        of_stays = f"from {node.module} import " if isinstance(node, ast.ImportFrom) else "import "
        for alias in stays:
            heads[of_stays].append(f"{alias.name} as {alias.asname}" if alias.asname else alias.name)
        statements = [head + ", ".join(dict.fromkeys(names)) for head, names in heads.items()]
        (line, column), (end_line, end_column) = _start(node), _end(node)
        before = self._lines[line - 1].encode()[:column].decode()
        after = self._lines[end_line - 1].encode()[end_column:].strip()
        inner = "\n".join(self._lines[line - 1 : end_line])
        comments = [] if before.strip() else re.findall(r"#[^\n\r]*", inner[: inner.rfind(")") + 1])
        parent = self._parents[id(node)]
        alone = any(getattr(parent, name, None) == [node] for name in ("body", "orelse", "finalbody"))
        if not (statements or alone or before.strip() or after or comments):
            self.edits.append(((line, 0), (end_line + 1, 0), ""))
        else:
            separator = "; " if before.strip() else "\n" + before
            self.edits.append(
                ((line, column), (end_line, end_column), separator.join([*comments, *(statements or ["pass"])]))
            )

    # ------------------------------------------------------- names that are not always the same

    def _may_be_undeclared(self, node: ast.AST) -> bool:
        """Whether an ``xmap`` may return what its ``out_axes`` do not name: only that of ``install()`` accepts it."""
        if not isinstance(node, ast.Call):
            return False
        arguments = [node.func, *node.args] if self._names.dotted(node.func) != "functools.partial" else node.args
        if not arguments or self._names.dotted(arguments[0]) != f"{table.MAPS}.xmap":
            return False
        given = dict(zip(("fun", "in_axes", "out_axes"), arguments[1:]))
        given |= {str(keyword.arg): keyword.value for keyword in node.keywords}
        if "axis_resources" not in given:
            return False
        ins, out = (_texts(given.get(name)) for name in ("in_axes", "out_axes"))
        if ins is None or out is None:
            return True
        specs = given["out_axes"].elts if isinstance(given["out_axes"], ast.Tuple) else [given["out_axes"]]
        lacking = [spec for spec in specs if ins - (_texts(spec) or set())]
        fun = given.get("fun")
        bodies = [n for n in self._names.nodes if getattr(n, "name", None) == getattr(fun, "id", "")]
        texts = [ast.unparse(body) for body in ([fun] if isinstance(fun, ast.Lambda) else bodies)]
        return bool(lacking) and (not texts or len(_REDUCES.findall(texts[0])) < len(lacking))


def _texts(node: ast.expr | None) -> set[str] | None:
    """The texts of a literal; None if it is none."""
    if node is None or any(isinstance(n, (ast.Name, ast.Call)) for n in ast.walk(node)):
        return None
    return {text for part in ast.walk(node) if (text := text_of(part))}
