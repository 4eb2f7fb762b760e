"""The text of the helper file: the definitions of the module ``named_axes`` that a program needs."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterable

from xmap_compat.tools.leave.helper import named_axes

_COLLECTIVES = (
    "psum",
    "pmean",
    "pmax",
    "pmin",
    "axis_index",
    "axis_size",
    "all_gather",
    "psum_scatter",
    "all_to_all",
    "pswapaxes",
    "ppermute",
    "pshuffle",
    "pdot",
)
# The name of the helper's function for what a program calls.  Those that have the name of a builtin
# are to be called as attributes of the helper.
FUNCTIONS = {f"jax.lax.{name}": name for name in _COLLECTIVES}
FUNCTIONS |= {"xmap_compat.pdot": "pdot", "xmap_compat.lax.pdot": "pdot"}
# Functions and methods that reduce over positions, unless a literal name says otherwise.
METHODS = {name: name for name in ("sum", "mean", "max", "min", "var", "std")}
_REDUCTIONS = {f"jax.numpy.{name}": name for name in METHODS}
_REDUCTIONS |= {"jax.numpy.amax": "max", "jax.numpy.amin": "min"}
_REDUCTIONS |= {
    f"jax.nn.{name}": name for name in ("softmax", "log_softmax", "logsumexp", "one_hot")
}
_REDUCTIONS |= {
    f"jax.scipy.special.{name}": name for name in ("softmax", "log_softmax", "logsumexp")
}
REDUCTIONS = frozenset(_REDUCTIONS)
FUNCTIONS |= _REDUCTIONS


def helper_text(names: Iterable[str], existing: str | None = None) -> str:
    """The text of the file, with these functions and what they use.

    Args:
      existing: the text of a helper that is there already.  It gets what it lacks, at its end.
    """
    whole = _Module(inspect.getsource(named_axes))
    needed = whole.needs(names)
    if existing is None:
        imports = "".join(whole.imports_of(needed))
        definitions = "".join(whole.texts(needed)).lstrip("\n")
        lines_between = 1 if definitions.startswith(("#", "ENTERED")) else 2
        return whole.docstring + imports + "\n" * lines_between + definitions
    own = _Module(existing)
    added = needed - own.definitions.keys()
    imported = own.imported()
    lacking = [text for text in whole.imports_of(added) if text.strip() not in imported]
    lines = existing.rstrip("\n").splitlines(keepends=True)
    lines[own.end_of_imports : own.end_of_imports] = [text.lstrip("\n") for text in lacking]
    grown = "".join(lines) + "\n" + "".join(whole.texts(added))
    return grown if added else existing


class _Module:
    """The text of a module, in pieces: each has the blank lines and comments above it.

    Attributes:
      docstring: the first piece.
      definitions: for each name its text, in their order.
      end_of_imports: the number of lines until there.
    """

    def __init__(self, text: str):
        self.docstring = ""
        self.definitions: dict[str, str] = {}
        self.end_of_imports = 0
        self._imports: list[tuple[ast.Import | ast.ImportFrom, str]] = []
        self._uses: dict[str, set[str]] = {}
        lines = text.splitlines(keepends=True)
        end = 0
        for node in ast.parse(text).body:
            piece = "".join(lines[end : node.end_lineno])
            end = node.end_lineno or 0
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._imports.append((node, piece))
                self.end_of_imports = end
            elif name := _defined_by(node):
                self.definitions[name] = piece
                self._note_uses(name, node)
            elif not self._imports:
                self.docstring += piece
                self.end_of_imports = end

    def _note_uses(self, name: str, node: ast.stmt) -> None:
        used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        self._uses.setdefault(name, set()).update(used)
        for decorator in getattr(node, "decorator_list", ()):
            # The rule of a function, as in @function.defjvp: it is needed with the function.
            if isinstance(decorator, ast.Attribute) and isinstance(decorator.value, ast.Name):
                self._uses.setdefault(decorator.value.id, set()).add(name)

    def needs(self, names: Iterable[str]) -> set[str]:
        """These definitions, and those that they use."""
        found: set[str] = set()
        pending = [*names]
        while pending:
            name = pending.pop()
            if name in self.definitions and name not in found:
                found.add(name)
                pending += self._uses[name]
        return found

    def texts(self, names: Collection[str]) -> list[str]:
        return [text for name, text in self.definitions.items() if name in names]

    def imported(self) -> set[str]:
        """The statements that import something."""
        return {ast.unparse(node) for node, _ in self._imports}

    def imports_of(self, names: Collection[str]) -> list[str]:
        """The statements that import what some definitions use."""
        used: set[str] = set()
        for name in names:
            used |= self._uses[name]
        return [text for node, piece in self._imports if (text := _import_of(node, piece, used))]


def _import_of(node: ast.Import | ast.ImportFrom, piece: str, used: Collection[str]) -> str:
    """An import of those names that are used; empty if none is."""
    kept = [alias for alias in node.names if (alias.asname or alias.name) in used]
    if not isinstance(node, ast.ImportFrom) or len(kept) in (0, len(node.names)):
        return piece if kept else ""
    text = ast.unparse(ast.ImportFrom(node.module, kept, node.level))
    blank = len(piece) - len(piece.lstrip("\n"))
    return "\n" * blank + text + "\n"


def _defined_by(node: ast.stmt) -> str:
    """The name that a statement of a module defines; empty if it defines none."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0])
    return ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else ""
